// See cta.h.
#include "cta.h"

#include "grid.h"
#include "report.h"
#include "scheduler.h"

namespace jax_fa4::emulator {

Cta::Cta(Cluster& owner, uint32_t cta_rank, Dim3 cta_index)
    : cluster(owner),
      rank(cta_rank),
      index(cta_index),
      shared(owner.grid.shared_bytes, owner.grid.options.check_races) {
  if (owner.grid.options.architecture >= 100) tensor = std::make_unique<TensorMemory>(owner.grid.options.check_races);
}

void Cta::wake(const Wait& wait) {
  for (const auto& warp : warps)
    if (warp->waits_for(wait)) warp->wake(wait);
}

MemoryBarrier& Cta::mbarrier(uint32_t offset) {
  const auto found = mbarriers.find(offset);
  if (found == mbarriers.end())
    throw Fault(Status::launch_failed, "no mbarrier was initialised at shared address " + shared_name(*this, offset));
  return found->second;
}

MemoryBarrier& Cta::mbarrier(uint32_t offset, const Warp& user) {
  MemoryBarrier& barrier = mbarrier(offset);
  const Stamp made = barrier.initialized;
  if (!grid().options.check_races || made.agent == user.agent || user.knows.happened.at(made.agent) >= made.time ||
      user.knows.initialized.at(made.agent) >= made.time)
    return barrier;
  throw Fault(Status::launch_failed,
              "the mbarrier at " + shared_name(*this, offset) + " of " + cta_name(*this) +
                  " is used, but nothing orders this after its mbarrier.init by " + cluster.agent_name(made.agent) +
                  ": a CTA's threads need a barrier, other CTAs a cluster barrier that releases, or that comes after "
                  "fence.mbarrier_init");
}

void Cta::arrive(uint32_t offset, int64_t arrivals, int64_t bytes, const Knowledge& knows, const Arrival& who) {
  MemoryBarrier& barrier = mbarrier(offset);
  barrier.pending -= arrivals;
  barrier.bytes -= bytes;
  barrier.arrived.join(knows);
  barrier.last_arrival = who;
  scheduler().progress();
  if (barrier.pending < 0)
    throw Fault(Status::launch_failed, "the mbarrier at " + shared_name(*this, offset) +
                                           " gets more arrivals in phase " + std::to_string(barrier.phase) +
                                           " than the " + std::to_string(barrier.expected) + " it expects");
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.phase++;
  barrier.pending = barrier.expected;
  barrier.completed.join(barrier.arrived);
  barrier.arrived.clear();
  wake({Wait::Kind::mbarrier, offset});
}

void Cta::expect_bytes(uint32_t offset, int64_t bytes) {
  mbarrier(offset).bytes += bytes;
  scheduler().progress();
}

void SharedPass::fail(const Conflict& conflict) const { report_shared_conflict(cta_, conflict, actor_, what_); }

void Cta::read_shared(uint32_t offset, uint32_t bytes, const Actor& actor, const char* what) {
  SharedPass(*this, actor, false, what).touch(offset, bytes);
}

void Cta::write_shared(uint32_t offset, uint32_t bytes, const Actor& actor, const char* what) {
  SharedPass(*this, actor, true, what).touch(offset, bytes);
}

void Cta::atomic_shared(uint32_t offset, uint32_t bytes, const Actor& actor) {
  Actor strong = actor;
  strong.strong = true;
  read_shared(offset, bytes, strong, "an atomic operation");
  write_shared(offset, bytes, strong, "an atomic operation");
}

// -------------------------------------------------------------------------------------------------------------
// clusters

Cluster::Cluster(Grid& owner, Scheduler& runs_on, uint64_t cluster_number)
    : grid(owner), scheduler(runs_on), number(cluster_number) {
  new_agent("kernels that were launched before");  // kEarlierKernels
  const Dim3 size = grid.shape.cluster;
  const Dim3 at = grid.cluster_index(number);
  for (uint32_t rank = 0; rank < size.product(); rank++) {
    const Dim3 in_cluster{rank % size.x, rank / size.x % size.y, rank / size.x / size.y};
    ctas.push_back(std::make_unique<Cta>(
        *this, rank, Dim3{at.x * size.x + in_cluster.x, at.y * size.y + in_cluster.y, at.z * size.z + in_cluster.z}));
    Cta& cta = *ctas.back();
    for (int w = 0; w < grid.warps_per_cta; w++) {
      const int threads = grid.threads_per_cta - w * kLanes;
      cta.warps.push_back(std::make_unique<Warp>(cta, w, threads >= kLanes ? 0xffffffffu : (1u << threads) - 1));
      cta.warps.back()->agent =
          new_agent("warp " + std::to_string(w) + (size.product() > 1 ? " of CTA rank " + std::to_string(rank) : ""));
    }
    cta.warps_left = grid.warps_per_cta;
  }
  ctas_left = static_cast<int>(ctas.size());
  warps_total = static_cast<uint32_t>(ctas.size()) * static_cast<uint32_t>(grid.warps_per_cta);
}

Agent Cluster::new_agent(std::string name) {
  agent_names_.push_back(std::move(name));
  agent_times_.push_back(0);
  return static_cast<Agent>(agent_names_.size() - 1);
}

void Cluster::wake(const Wait& wait) {
  for (const auto& cta : ctas) cta->wake(wait);
}

// Exited warps count as arrived.
void Cluster::check_barrier() {
  if (barrier_arrived == 0 || barrier_arrived + warps_exited < warps_total) return;
  barrier_arrived = 0;
  barrier_phase++;
  barrier_completed.join(barrier_knowledge);
  barrier_knowledge.clear();
  scheduler.progress();
  wake({Wait::Kind::cluster_barrier, 0});
}

}  // namespace jax_fa4::emulator

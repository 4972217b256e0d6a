// See scheduler.h.
#include "scheduler.h"

#include <algorithm>

#include "grid.h"
#include "report.h"

namespace jax_fa4::emulator {
namespace {

constexpr int kBurstOctaves = 7;   // a warp runs 1 to 127 instructions at a time
constexpr int kDelayOctaves = 12;  // asynchronous work takes up to 4096 instructions of its SM
constexpr uint64_t kNever = uint64_t{1} << 62;
// Lazily completed work is let through when warps have only polled for so long.
constexpr uint64_t kPatience = 20'000;

}  // namespace

Scheduler::Scheduler(Grid& grid, uint64_t seed) : global_view(*grid.record), grid_(grid), random_(seed) {
  const size_t cells = static_cast<size_t>(grid.warps_per_cta) * grid.program.code.size();
  counts.executed.assign(cells, 0);
  counts.waited.assign(cells, 0);
}

bool Scheduler::admit() {
  const int64_t number = grid_.next_cluster();
  if (number < 0) return false;
  clusters_.push_back(std::make_unique<Cluster>(grid_, *this, static_cast<uint64_t>(number)));
  for (const auto& cta : clusters_.back()->ctas)
    for (const auto& warp : cta->warps) runnable_.push_back(warp.get());
  progress();
  return true;
}

uint64_t Scheduler::later(Cluster& cluster, std::function<void()> work, uint64_t not_before) {
  uint64_t due = now_;
  if (grid_.options.completion == Completion::random) due = now_ + random_.heavy_tailed(kDelayOctaves);
  if (grid_.options.completion == Completion::lazy) due = kNever + random_.below(1024);
  due = std::max(due, not_before);
  cluster.pending_events++;
  events_.push_back({due, events_made_++, &cluster, running, instruction, std::move(work)});
  std::push_heap(events_.begin(), events_.end(), std::greater<>());
  return due;
}

// Allocations do not go away while a kernel runs that uses them, so what was found stays good for the launch.
const GlobalMemory::Range& Scheduler::find_global(uint64_t address, uint64_t bytes) {
  for (const GlobalMemory::Range& range : recent_)
    if (address >= range.begin && address < range.end && bytes <= range.end - address) return range;
  GlobalMemory::Range found = grid_.memory.find(address, bytes);
  if (found.end == 0) return missing_;
  GlobalMemory::Range& slot = recent_[recent_next_++ % 8];
  slot = std::move(found);
  return slot;
}

void Scheduler::run_due(bool force) {
  while (!events_.empty() && (force || events_.front().due <= now_)) {
    std::pop_heap(events_.begin(), events_.end(), std::greater<>());
    const Event event = std::move(events_.back());
    events_.pop_back();
    if (event.due < kNever) now_ = std::max(now_, event.due);
    event.cluster->pending_events--;
    counts.events++;
    progress();
    running = event.issuer;
    instruction = event.issued;
    event.work();
    force = false;
  }
}

namespace {

// A CTA's shared memory goes when it exits, so whoever started a copy out of it must have waited for the read. Copies
// that were never committed to a group pass: flash-attn-4's backward ends with one, and is right on silicon.
void check_bulk_reads(const Cta& cta) {
  for (const auto& warp : cta.warps)
    for (int lane = 0; lane < kLanes; lane++)
      for (size_t group = 0; group + 1 < warp->bulk[lane].groups.size(); group++)
        if (warp->bulk[lane].groups[group].last_time > warp->knows.happened.at(warp->bulk_agent))
          throw Fault(Status::launch_failed, "warp " + std::to_string(warp->index) + " lane " + std::to_string(lane) +
                                                 " started a bulk copy out of shared memory and its CTA exits without "
                                                 "cp.async.bulk.wait_group or wait_group.read for it");
}

}  // namespace

void Scheduler::run_warp(Warp& warp) {
  running = &warp;
  const uint64_t done = warp.run(random_.heavy_tailed(kBurstOctaves));
  now_ += std::max<uint64_t>(done, 1);
  counts.warp_instructions += done;
  if (!warp.finished()) return;
  Cta& cta = warp.cta;
  Cluster& cluster = cta.cluster;
  cluster.warps_exited++;
  cta.warps_left--;
  cta.free_registers += warp.registers_per_thread * kLanes;
  cta.wake({Wait::Kind::registers, 0});
  warp.release_into(cluster.barrier_knowledge);
  cluster.check_barrier();
  if (cta.warps_left > 0) return;
  if (grid_.options.check_exit_reads) check_bulk_reads(cta);
  cluster.ctas_left--;
  if (cta.tensor != nullptr && cta.tensor->allocated_columns() != 0)
    throw Fault(Status::launch_failed, std::to_string(cta.tensor->allocated_columns()) +
                                           " columns of tensor memory are still allocated when the CTA ends");
}

void Scheduler::retire() {
  running = nullptr;
  std::erase_if(clusters_, [](const std::unique_ptr<Cluster>& cluster) { return cluster->finished(); });
}

std::string Scheduler::deadlock_report() const {
  std::string text;
  for (const auto& cluster : clusters_) text += waiting_warps(*cluster, grid_.source);
  return text;
}

bool Scheduler::stuck() {
  if (now_ - last_progress_ < grid_.options.stuck_after) return false;
  if (admit()) return false;
  if (!grid_.others_progress(seen_progress_)) return true;
  last_progress_ = now_;
  return false;
}

void Scheduler::run() {
  for (uint64_t turn = 1; !grid_.failed(); turn++) {
    if (turn % 256 == 0 || runnable_.empty()) {
      retire();
      if (turn_progress_) grid_.note_progress();
      turn_progress_ = false;
    }
    while (static_cast<int>(clusters_.size()) < grid_.resident_limit() && admit()) {
    }
    if (clusters_.empty()) return;
    run_due(!events_.empty() && now_ - last_progress_ > kPatience && grid_.options.completion == Completion::lazy);
    if (runnable_.empty()) {
      if (!events_.empty()) {
        run_due(true);
        continue;
      }
      retire();
      if (clusters_.empty() || admit()) continue;
      throw Fault(Status::launch_timeout, "deadlock: no warp can run and nothing is under way\n" + deadlock_report());
    }
    const size_t pick = random_.below(runnable_.size());
    Warp* warp = runnable_[pick];
    run_warp(*warp);
    if (warp->finished() || warp->blocked()) {
      // A warp that another one's wake put back stands at the end; this entry goes.
      runnable_[pick] = runnable_.back();
      runnable_.pop_back();
    }
    if (stuck())
      throw Fault(Status::launch_timeout, "no progress: warps run, but no memory, barrier or event has changed for " +
                                              std::to_string(grid_.options.stuck_after) + " instructions\n" +
                                              deadlock_report());
  }
}

}  // namespace jax_fa4::emulator

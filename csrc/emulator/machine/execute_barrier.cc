// Barriers of a CTA and of a cluster, mbarriers, register budgets. Source: PTX ISA, "barrier", "barrier.cluster",
// "mbarrier", "setmaxnreg", "griddepcontrol".
#include <algorithm>
#include <bit>

#include "access.h"
#include "grid.h"
#include "handlers.h"
#include "report.h"
#include "scheduler.h"

namespace jax_fa4::emulator {
namespace {

constexpr int64_t kMaxArrivals = (1 << 20) - 1;

Arrival who(const Warp& warp, const Instruction& i) { return {nullptr, &warp, i.line}; }

// One warp arrives; counts all its threads, as the hardware does. True if that ends the generation.
bool arrive_at(Warp& warp, const Instruction& i, uint32_t id, NamedBarrier& barrier) {
  const uint32_t expected =
      i.flags != 0 ? warp.source(i.b)[std::countr_zero(warp.current.lanes)]
                   : static_cast<uint32_t>((warp.cta.grid().threads_per_cta + kLanes - 1) / kLanes * kLanes);
  if (expected == 0 || expected % kLanes != 0 || expected > 1024)
    throw Fault(Status::launch_failed, "barrier " + std::to_string(id) + " expects " + std::to_string(expected) +
                                           " threads: the number must be a multiple of 32 up to 1024");
  if (barrier.expected == 0) {
    barrier.expected = expected;
    barrier.line = i.line;
  }
  if (barrier.expected != expected)
    throw Fault(Status::launch_failed, "barrier " + std::to_string(id) + " is used with " + std::to_string(expected) +
                                           " threads while it waits for " + std::to_string(barrier.expected) +
                                           " (first arrival in PTX line " + std::to_string(barrier.line) + ")");
  barrier.arrived += kLanes;
  warp.release_into(barrier.knowledge);
  warp.cta.scheduler().progress();
  if (barrier.arrived < barrier.expected) return false;
  barrier.generation++;
  barrier.expected = 0;
  barrier.arrived = 0;
  barrier.completed.join(barrier.knowledge);
  barrier.knowledge.clear();
  barrier.result = barrier.reduction;
  warp.cta.wake({Wait::Kind::barrier, id});
  return true;
}

void reduce_into(Warp& warp, const Instruction& i, uint32_t lanes, NamedBarrier& barrier) {
  const uint32_t value = (i.p_negated ? ~warp.predicate(i.q) : warp.predicate(i.q)) & lanes;
  if (barrier.arrived == 0) barrier.reduction = i.mode == 3 ? 1 : 0;
  if (i.mode == 2) barrier.reduction += static_cast<uint32_t>(std::popcount(value));
  if (i.mode == 3) barrier.reduction &= value == lanes;
  if (i.mode == 4) barrier.reduction |= value != 0;
}

}  // namespace

EMULATOR_HANDLER(execute_barrier) {
  if (!warp.converged(0xffffffffu, lanes)) return warp.block({Wait::Kind::reconvergence, 0xffffffffu});
  const uint32_t id = warp.source(i.a)[std::countr_zero(lanes)];
  if (id >= 16)
    throw Fault(Status::launch_failed, "barrier " + std::to_string(id) + " does not exist: a CTA has barriers 0 to 15");
  NamedBarrier& barrier = warp.cta.barriers[id];
  if (!warp.barrier_waiting) {
    if (i.mode >= 2) reduce_into(warp, i, lanes, barrier);
    const uint64_t generation = barrier.generation;
    arrive_at(warp, i, id, barrier);
    if (i.mode == 1) return Flow::next;
    warp.barrier_waiting = true;
    warp.barrier_generation = generation;
  }
  if (barrier.generation == warp.barrier_generation) return warp.block({Wait::Kind::barrier, id});
  warp.barrier_waiting = false;
  warp.acquire(barrier.completed);
  if (i.mode < 2) return Flow::next;
  uint32_t result[kLanes];
  std::fill(result, result + kLanes, barrier.result);
  if (i.mode == 2)
    warp.write(i.d, result, 1, lanes);
  else
    warp.write_predicate(i.p, barrier.result != 0 ? 0xffffffffu : 0, lanes);
  return Flow::next;
}

namespace {

// Without release, an arrival tells of the barriers whose initialisation was fenced, and what was known at the last
// memory fence; without acquire, a wait learns at the next one.
void arrive_relaxed(Warp& warp, Knowledge& told) {
  constexpr size_t kLevel = static_cast<size_t>(MemoryScope::cluster);
  told.initialized.join(warp.knows.initialized);
  if (warp.fences != nullptr && warp.fences->has_released[kLevel]) told.join(warp.fences->released[kLevel]);
}

void wait_relaxed(Warp& warp, const Knowledge& told) {
  warp.knows.initialized.join(told.initialized);
  if (warp.fences == nullptr) warp.fences = std::make_unique<FenceState>();
  warp.fences->seen[static_cast<size_t>(MemoryScope::cluster)].join(told);
}

}  // namespace

// mode: 0 arrive, 1 wait; flags 1: relaxed.
EMULATOR_HANDLER(execute_cluster_barrier) {
  if (!warp.converged(0xffffffffu, lanes)) return warp.block({Wait::Kind::reconvergence, 0xffffffffu});
  Cluster& cluster = warp.cta.cluster;
  if (i.mode == 0) {
    if (warp.cluster_arrived)
      throw Fault(Status::launch_failed, "a warp arrives at the cluster barrier twice without waiting for it");
    warp.cluster_arrived = true;
    warp.cluster_phase = cluster.barrier_phase;
    if (i.flags == 0)
      warp.release_into(cluster.barrier_knowledge);
    else
      arrive_relaxed(warp, cluster.barrier_knowledge);
    cluster.barrier_arrived++;
    cluster.check_barrier();
    return Flow::next;
  }
  if (!warp.cluster_arrived)
    throw Fault(Status::launch_failed, "a warp waits for the cluster barrier at which it has not arrived");
  if (cluster.barrier_phase == warp.cluster_phase) return warp.block({Wait::Kind::cluster_barrier, 0});
  warp.cluster_arrived = false;
  if (i.flags == 0)
    warp.acquire(cluster.barrier_completed);
  else
    wait_relaxed(warp, cluster.barrier_completed);
  return Flow::next;
}

// -------------------------------------------------------------------------------------------------------------
// mbarriers

namespace {

SharedPlace barrier_place(Warp& warp, const Instruction& i, int lane) {
  const uint64_t address = warp.address(i, lane);
  if (address % 8 != 0)
    throw Fault(Status::misaligned_address, "the mbarrier at " + hex(address) + " is not aligned to 8 bytes");
  return resolve_shared(warp, address, 8, "an mbarrier operation");
}

}  // namespace

EMULATOR_HANDLER(execute_mbarrier_init) {
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    const SharedPlace place = barrier_place(warp, i, lane);
    const int64_t count = warp.source(i.b)[lane];
    if (count < 1 || count > kMaxArrivals)
      throw Fault(Status::launch_failed, "an mbarrier is initialised for " + std::to_string(count) +
                                             " arrivals: accepted are 1 to " + std::to_string(kMaxArrivals));
    place.cta->write_shared(place.offset, 8, actor_of(warp), "mbarrier.init");
    MemoryBarrier& barrier = place.cta->mbarriers[place.offset];
    const Agent channel = barrier.channel;
    barrier = MemoryBarrier{};
    barrier.channel = channel;
    barrier.expected = static_cast<uint32_t>(count);
    barrier.pending = count;
    barrier.initialized = warp.stamp();
  }
  warp.cta.scheduler().progress();
  return Flow::next;
}

EMULATOR_HANDLER(execute_mbarrier_invalidate) {
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    const SharedPlace place = barrier_place(warp, i, lane);
    place.cta->mbarrier(place.offset, warp);
    place.cta->mbarriers.erase(place.offset);
  }
  return Flow::next;
}

// Every lane arrives by itself. The init must be visible: the barrier's word is read like memory.
EMULATOR_HANDLER(execute_mbarrier_arrive) {
  if (i.flags & 2) throw Fault(Status::not_supported, "mbarrier.arrive.noComplete is not supported");
  Knowledge mine;
  warp.release_into(mine);
  uint32_t state[2 * kLanes] = {};
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    const SharedPlace place = barrier_place(warp, i, lane);
    MemoryBarrier& barrier = place.cta->mbarrier(place.offset, warp);
    state[lane] = static_cast<uint32_t>(barrier.phase);
    state[lane + kLanes] = static_cast<uint32_t>(barrier.pending);
    const uint32_t operand = warp.source(i.b)[lane];
    if (i.flags & 1) place.cta->expect_bytes(place.offset, operand);
    const int64_t arrivals = (i.flags & 1) ? 1 : operand;
    if (i.mode != 0) barrier.expected -= static_cast<uint32_t>(arrivals);
    place.cta->arrive(place.offset, arrivals, 0, mine, who(warp, i));
  }
  if (i.out_slots != 0) warp.write(i.d, state, 2, lanes);
  return Flow::next;
}

EMULATOR_HANDLER(execute_mbarrier_expect) {
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    const SharedPlace place = barrier_place(warp, i, lane);
    place.cta->mbarrier(place.offset, warp);
    place.cta->expect_bytes(place.offset, warp.source(i.b)[lane]);
  }
  return Flow::next;
}

EMULATOR_HANDLER(execute_mbarrier_complete) {
  Knowledge mine;
  warp.release_into(mine);
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    const SharedPlace place = barrier_place(warp, i, lane);
    place.cta->mbarrier(place.offset, warp);
    place.cta->arrive(place.offset, 0, warp.source(i.b)[lane], mine, who(warp, i));
  }
  return Flow::next;
}

namespace {

// parity: the phase of that parity has ended if the open phase has the other one.
bool phase_ended(const MemoryBarrier& barrier, const Warp& warp, const Instruction& i, int lane) {
  if (i.flags & 1) return (barrier.phase & 1) != (warp.source(i.b)[lane] & 1);
  return static_cast<uint32_t>(barrier.phase) != warp.source(i.b)[lane];
}

}  // namespace

EMULATOR_HANDLER(execute_mbarrier_wait) {
  uint32_t ended = 0;
  Wait wait;
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    const SharedPlace place = barrier_place(warp, i, lane);
    if (place.cta != &warp.cta)
      throw Fault(Status::illegal_address, "an mbarrier of another CTA can be arrived at, but not waited for");
    MemoryBarrier& barrier = place.cta->mbarrier(place.offset, warp);
    if (phase_ended(barrier, warp, i, lane)) {
      ended |= 1u << lane;
      warp.acquire(barrier.completed);
    } else {
      wait = {Wait::Kind::mbarrier, place.offset};
    }
  }
  const bool may_wait = (i.flags & 2) != 0;
  if (ended != lanes) {
    // try_wait may give up at any time: sometimes it does at once, so that code behind a failed try runs too.
    if (may_wait && (warp.tried || !warp.cta.scheduler().random().one_in(4))) {
      warp.tried = true;
      return warp.block(wait);
    }
    warp.yield = true;
  }
  warp.tried = may_wait && ended != lanes;
  warp.write_predicate(i.p, ended, lanes);
  return Flow::next;
}

EMULATOR_HANDLER(execute_mbarrier_pending) {
  warp.write(i.d, warp.source(i.a) + kLanes, 1, lanes);
  return Flow::next;
}

// ---------------------------------------------------------------------------------------------------------- registers

// mode: 0 dec, 1 inc. The count is a warp's per thread; a warpgroup takes or gives together.
EMULATOR_HANDLER(execute_set_registers) {
  if (!warp.converged(0xffffffffu, lanes)) return warp.block({Wait::Kind::reconvergence, 0xffffffffu});
  const int wanted = static_cast<int>(i.immediate);
  const int change = (wanted - warp.registers_per_thread) * kLanes;
  if (i.mode == 0 && wanted > warp.registers_per_thread)
    throw Fault(Status::launch_failed, "setmaxnreg.dec to " + std::to_string(wanted) + " registers, but the warp has " +
                                           std::to_string(warp.registers_per_thread));
  // What a warp has at first is an assumption: the most that its launch allows.
  if (i.mode == 1 && wanted < warp.registers_per_thread && warp.registers_known)
    throw Fault(Status::launch_failed, "setmaxnreg.inc to " + std::to_string(wanted) + " registers, but the warp has " +
                                           std::to_string(warp.registers_per_thread));
  if (change > warp.cta.free_registers) return warp.block({Wait::Kind::registers, 0});
  warp.cta.free_registers -= change;
  warp.registers_per_thread = wanted;
  warp.registers_known = true;
  warp.cta.scheduler().progress();
  if (change < 0) warp.cta.wake({Wait::Kind::registers, 0});
  return Flow::next;
}

// Launches follow each other one by one, so what came before is always complete; mode 0, wait: it is known to be.
EMULATOR_HANDLER(execute_dependency) {
  if (i.mode == 0) warp.knows.happened.raise(kEarlierKernels, 1);
  return Flow::next;
}

}  // namespace jax_fa4::emulator

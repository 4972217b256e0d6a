// cp.async and bulk copies: they read and write later, at a moment that the scheduler draws. Source: PTX ISA, "Data
// Movement and Conversion Instructions: Asynchronous copy", "cp.async.bulk", "cp.reduce.async.bulk", "st.async",
// "clusterlaunchcontrol".
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "../units/tma.h"
#include "asynchronous.h"
#include "grid.h"
#include "handlers.h"
#include "report.h"
#include "scheduler.h"

namespace jax_fa4::emulator {
namespace {

void check_bulk(uint64_t from, uint64_t to, uint64_t bytes, const char* what) {
  if (from % 16 != 0 || to % 16 != 0 || bytes % 16 != 0)
    throw Fault(Status::misaligned_address, std::string(what) + " of " + std::to_string(bytes) + " bytes from " +
                                                hex(from) + " to " + hex(to) +
                                                ": addresses and size must be multiples of 16");
}

uint32_t first_mask(const Warp& warp, const Instruction& i, int lane) { return warp.source(i.e)[lane] & 0xffff; }

}  // namespace

// -------------------------------------------------------------------------------------------------------------
// cp.async

// a: shared destination; second: global source; immediate: bytes; b: source bytes (flags 1) or p: ignore-source.
EMULATOR_HANDLER(execute_copy_async) {
  const uint32_t bytes = static_cast<uint32_t>(i.immediate);
  const Agent agent = warp_agent(warp, warp.copy_agent, "cp.async");
  // cp.async runs in the generic proxy.
  Operation operation = start_operation(warp, agent);
  Actor actor = operation.actor();
  actor.asynchronous = false;
  struct Part {
    uint8_t* to;
    const uint8_t* from;
    uint32_t bytes;
  };
  std::vector<Part> parts;
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    const SharedPlace to = resolve_shared(warp, warp.address(i, lane), bytes, "cp.async");
    uint32_t take = (i.flags & 1) ? std::min(bytes, warp.source(i.b)[lane]) : bytes;
    if (i.p >= 0 && ((warp.predicate(i.p) >> lane) & 1) != 0) take = 0;
    if (to.offset % bytes != 0)
      throw Fault(Status::misaligned_address, "cp.async to shared address " + hex(to.offset) + " in lane " +
                                                  std::to_string(lane) + " is not aligned to its " +
                                                  std::to_string(bytes) + " bytes");
    const uint64_t address = warp.address(i.second, lane);
    const uint8_t* from =
        take == 0 ? nullptr : resolve(warp, Space::global, address, take, take == bytes ? bytes : 1, lane, false).data;
    if (take != 0)
      record_global(warp.cta, global_access(warp, i, AccessKind::read, operation.stamp), *operation.knows, address,
                    take, "cp.async");
    to.cta->write_shared(to.offset, bytes, actor, "cp.async");
    parts.push_back({to.cta->shared.data() + to.offset, from, take});
  }
  GroupQueue::Group& group = warp.copies.open();
  group.unfinished++;
  group.last_time = operation.stamp.time;
  const uint64_t number = warp.copies.open_number();
  Warp* issuer = &warp;
  warp.cta.scheduler().later(warp.cta.cluster, [issuer, number, bytes, parts = std::move(parts)] {
    for (const Part& part : parts) {
      if (part.bytes != 0) std::memcpy(part.to, part.from, part.bytes);
      std::memset(part.to + part.bytes, 0, bytes - part.bytes);
    }
    if (GroupQueue::Group* group = issuer->copies.find(number)) group->unfinished--;
    issuer->wake({Wait::Kind::copy_group, 0});
  });
  return Flow::next;
}

EMULATOR_HANDLER(execute_copy_commit) {
  warp.copies.commit();
  return Flow::next;
}

// immediate: groups that may stay pending; flags 1: none, and the open group counts.
EMULATOR_HANDLER(execute_copy_wait) {
  if (i.flags != 0 && warp.copies.open().last_time != 0) warp.copies.commit();
  if (!warp.copies.done(i.immediate, false)) return warp.block({Wait::Kind::copy_group, 0});
  warp.knows.happened.raise(warp.copy_agent, warp.copies.acquire(i.immediate));
  return Flow::next;
}

namespace {

struct BarrierArrivals {
  Warp* warp;
  uint64_t last_group;  // of cp.async, that must be complete first
  std::vector<SharedPlace> places;
  Knowledge knows;
  Arrival who;
};

void arrive_after_copies(const std::shared_ptr<BarrierArrivals>& arrivals) {
  Cluster& cluster = arrivals->warp->cta.cluster;
  cluster.scheduler.later(cluster, [arrivals] {
    GroupQueue& copies = arrivals->warp->copies;
    for (uint64_t number = copies.first; number <= arrivals->last_group && number <= copies.open_number(); number++)
      if (copies.find(number)->unfinished != 0) return arrive_after_copies(arrivals);
    for (const SharedPlace& place : arrivals->places)
      place.cta->arrive(place.offset, 1, 0, arrivals->knows, arrivals->who);
  });
}

}  // namespace

// cp.async.mbarrier.arrive: the arrival comes when this warp's copies so far are complete. flags 1: noinc.
EMULATOR_HANDLER(execute_copy_arrive) {
  auto arrivals = std::make_shared<BarrierArrivals>();
  arrivals->warp = &warp;
  arrivals->last_group = warp.copies.open_number();
  arrivals->who = {"cp.async.mbarrier.arrive", nullptr, i.line};
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    const SharedPlace place = resolve_shared(warp, warp.address(i, lane), 8, "cp.async.mbarrier.arrive");
    MemoryBarrier& barrier = place.cta->mbarrier(place.offset, warp);
    if ((i.flags & 1) == 0) barrier.pending++;
    arrivals->places.push_back(place);
  }
  warp.release_into(arrivals->knows);
  if (warp.copy_agent != 0) arrivals->knows.happened.raise(warp.copy_agent, warp.cta.cluster.time_of(warp.copy_agent));
  arrive_after_copies(arrivals);
  return Flow::next;
}

// ---------------------------------------------------------------------------------------------------------- bulk
// groups

EMULATOR_HANDLER(execute_bulk_commit) {
  for (int lane = 0; lane < kLanes; lane++)
    if (((lanes >> lane) & 1) != 0) warp.bulk[lane].commit();
  return Flow::next;
}

// immediate: groups that may stay pending; flags 1: only the reads of the source count.
EMULATOR_HANDLER(execute_bulk_wait) {
  for (int lane = 0; lane < kLanes; lane++)
    if (((lanes >> lane) & 1) != 0 && !warp.bulk[lane].done(i.immediate, (i.flags & 1) != 0))
      return warp.block({Wait::Kind::bulk_group, 0});
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    GroupQueue& queue = warp.bulk[lane];
    if ((i.flags & 1) == 0) warp.knows.happened.raise(warp.bulk_write_agent, queue.writes(i.immediate));
    warp.knows.happened.raise(warp.bulk_agent, queue.acquire(i.immediate));
  }
  return Flow::next;
}

namespace {

// A copy of a bulk group: its read of shared memory, and its write of global memory, which is over later.
struct BulkOperation {
  Operation read;
  GlobalAccess write;
  // Records what is written to global memory.
  void record(Cta& cta, uint64_t address, uint64_t bytes, const char* what) const {
    record_global(cta, write, *read.knows, address, bytes, what);
  }
};

BulkOperation start_bulk(Warp& warp, const Instruction& i, bool reduces) {
  BulkOperation bulk;
  bulk.read = start_operation(warp, warp_agent(warp, warp.bulk_agent, "bulk groups"));
  const Agent writer = warp_agent(warp, warp.bulk_write_agent, "writes of bulk groups");
  const Stamp stamp{writer, warp.cta.cluster.tick(writer)};
  bulk.write = global_access(warp, i, reduces ? AccessKind::reduce : AccessKind::write, stamp);
  bulk.write.strong = reduces;  // relaxed, of device scope
  bulk.write.scope = MemoryScope::gpu;
  bulk.write.asynchronous = true;
  return bulk;
}

// A read of global memory by an operation of the async proxy.
GlobalAccess bulk_read(const Warp& warp, const Instruction& i, const Operation& operation) {
  GlobalAccess access = global_access(warp, i, AccessKind::read, operation.stamp);
  access.asynchronous = true;
  return access;
}

// The open bulk groups of lanes that share an operation.
struct OpenGroups {
  Warp& warp;
  std::vector<std::pair<int, uint64_t>> numbers;  // lane and group

  OpenGroups(Warp& issuer, uint32_t lanes, const BulkOperation& bulk) : warp(issuer) {
    for (int lane = 0; lane < kLanes; lane++) {
      if (((lanes >> lane) & 1) == 0) continue;
      GroupQueue::Group& group = warp.bulk[lane].open();
      group.unread++;
      group.unfinished++;
      group.last_time = bulk.read.stamp.time;
      group.write_time = bulk.write.stamp.time;
      numbers.emplace_back(lane, warp.bulk[lane].open_number());
    }
  }
  void less(uint32_t GroupQueue::Group::* count) const {
    for (const auto& [lane, number] : numbers)
      if (GroupQueue::Group* group = warp.bulk[lane].find(number)) (group->*count)--;
    warp.wake({Wait::Kind::bulk_group, 0});
  }
};

// Joins an operation to the open bulk group of each lane; `read` runs when the source is read, `write` when all is
// done.
void in_bulk_group(Warp& warp, uint32_t lanes, const BulkOperation& bulk, std::function<void()> read,
                   std::function<void()> write) {
  const auto groups = std::make_shared<const OpenGroups>(warp, lanes, bulk);
  Cluster* cluster = &warp.cta.cluster;
  warp.cta.scheduler().later(*cluster, [groups, cluster, read = std::move(read), write = std::move(write)]() mutable {
    read();
    groups->less(&GroupQueue::Group::unread);
    cluster->scheduler.later(*cluster, [groups, write = std::move(write)] {
      write();
      groups->less(&GroupQueue::Group::unfinished);
    });
  });
}

// Shared memory as source of an asynchronous read: recorded now, data taken later.
std::shared_ptr<std::vector<uint8_t>> staged(uint64_t bytes) { return std::make_shared<std::vector<uint8_t>>(bytes); }

// The CTAs that a copy into shared memory goes to.
std::vector<Cta*> destinations(Warp& warp, const Instruction& i, int lane, Cta* named) {
  if ((i.flags & 1) == 0) return {named};
  const uint32_t mask = first_mask(warp, i, lane);
  std::vector<Cta*> all;
  for (uint32_t rank = 0; rank < 16; rank++) {
    if (((mask >> rank) & 1) == 0) continue;
    if (rank >= warp.cta.cluster.ctas.size())
      throw Fault(Status::launch_failed, "the multicast mask " + hex(mask) + " names CTA rank " + std::to_string(rank) +
                                             " of a cluster of " + std::to_string(warp.cta.cluster.ctas.size()));
    all.push_back(warp.cta.cluster.ctas[rank].get());
  }
  return all;
}

// Where the bytes of a copy into `to` are counted: at the offset of the named barrier in the same CTA, or, for a CTA
// pair, in the CTA of the pair that has the named one's parity.
Cta* barrier_cta(Warp& warp, const Instruction& i, Cta* to, Cta* named) {
  if (i.cta_group == 2) return warp.cta.cluster.ctas[(to->rank & ~1u) | (named->rank & 1u)].get();
  if ((i.flags & 1) != 0) return to;
  if (named != to)
    throw Fault(Status::launch_failed,
                "the copy goes to " + cta_name(*to) + ", but its mbarrier is in " + cta_name(*named));
  return named;
}

SharedPlace barrier_operand(Warp& warp, const MemoryOperand& operand, int lane) {
  const SharedPlace place = resolve_shared(warp, warp.address(operand, lane), 8, "the mbarrier of a copy");
  if (place.offset % 8 != 0)
    throw Fault(Status::misaligned_address, "the mbarrier at " + hex(place.offset) + " is not aligned to 8 bytes");
  return place;
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------- bulk
// copies

// mode: 0 global to shared, 1 shared to shared of the cluster, 2 shared to global. a: destination; second: source; b:
// bytes; third: mbarrier (0 and 1); e: multicast mask if flags 1.
EMULATOR_HANDLER(execute_bulk_copy) {
  Statistics& counts = warp.cta.scheduler().counts;
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    const uint64_t to = warp.address(i, lane), from = warp.address(i.second, lane);
    const uint32_t bytes = warp.source(i.b)[lane];
    check_bulk(from, to, bytes, "a bulk copy");
    if (i.mode == 2) {
      const BulkOperation bulk = start_bulk(warp, i, false);
      const SharedPlace source = resolve_shared(warp, from, bytes, "a bulk copy");
      uint8_t* target = resolve_global(warp.cta, to, bytes, true, "a bulk copy");
      source.cta->read_shared(source.offset, bytes, bulk.read.actor(), "a bulk copy");
      bulk.record(warp.cta, to, bytes, "a bulk copy");
      counts.bulk_out += bytes;
      const auto data = staged(bytes);
      in_bulk_group(
          warp, 1u << lane, bulk, [=] { std::memcpy(data->data(), source.cta->shared.data() + source.offset, bytes); },
          [=] { std::memcpy(target, data->data(), bytes); });
      continue;
    }
    const SharedPlace named = resolve_shared(warp, to, bytes, "a bulk copy");
    const SharedPlace barrier = barrier_operand(warp, i.third, lane);
    const uint8_t* source = nullptr;
    SharedPlace shared_source;
    if (i.mode == 0)
      source = resolve_global(warp.cta, from, bytes, false, "a bulk copy");
    else
      shared_source = resolve_shared(warp, from, bytes, "a bulk copy");
    for (Cta* cta : destinations(warp, i, lane, named.cta)) {
      Cta* counter = barrier_cta(warp, i, cta, barrier.cta);
      const Operation operation = start_operation(warp, barrier_agent(warp, *counter, barrier.offset));
      if (i.mode == 0)
        record_global(warp.cta, bulk_read(warp, i, operation), *operation.knows, from, bytes, "a bulk copy");
      if (i.mode == 1) {
        shared_source.cta->read_shared(shared_source.offset, bytes, operation.actor(), "a bulk copy");
        source = shared_source.cta->shared.data() + shared_source.offset;
      }
      cta->write_shared(named.offset, bytes, operation.actor(), "a bulk copy");
      (i.mode == 0 ? counts.bulk_in : counts.peer) += bytes;
      const Arrival who{"the bulk copy", nullptr, i.line};
      warp.cta.scheduler().later(warp.cta.cluster, [=] {
        std::memcpy(cta->shared.data() + named.offset, source, bytes);
        counter->arrive(barrier.offset, 0, bytes, completion_of(operation), who);
      });
    }
  }
  return Flow::next;
}

// mode 2: shared to global, 1: shared to shared of the cluster; immediate: the Reduction; type and source_type by
// element.
EMULATOR_HANDLER(execute_bulk_reduce) {
  const Reduction reduction = static_cast<Reduction>(i.immediate);
  const Element element = static_cast<Element>(i.flags);
  Statistics& counts = warp.cta.scheduler().counts;
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    const uint64_t to = warp.address(i, lane), from = warp.address(i.second, lane);
    const uint32_t bytes = warp.source(i.b)[lane];
    check_bulk(from, to, bytes, "a bulk reduction");
    const SharedPlace source = resolve_shared(warp, from, bytes, "a bulk reduction");
    const auto data = staged(bytes);
    Grid* grid = &warp.cta.grid();
    if (i.mode == 2) {
      const BulkOperation bulk = start_bulk(warp, i, true);
      source.cta->read_shared(source.offset, bytes, bulk.read.actor(), "a bulk reduction");
      resolve_global(warp.cta, to, bytes, false, "a bulk reduction");
      uint8_t* target = resolve_global(warp.cta, to, bytes, true, "a bulk reduction");
      bulk.record(warp.cta, to, bytes, "a bulk reduction");
      counts.bulk_out += bytes;
      in_bulk_group(
          warp, 1u << lane, bulk, [=] { std::memcpy(data->data(), source.cta->shared.data() + source.offset, bytes); },
          [=] {
            std::lock_guard lock(grid->atomics);
            reduce_elements(reduction, element, target, data->data(), bytes);
          });
      continue;
    }
    const SharedPlace target = resolve_shared(warp, to, bytes, "a bulk reduction");
    const SharedPlace barrier = barrier_operand(warp, i.third, lane);
    const Operation operation = start_operation(warp, barrier_agent(warp, *barrier.cta, barrier.offset));
    source.cta->read_shared(source.offset, bytes, operation.actor(), "a bulk reduction");
    target.cta->atomic_shared(target.offset, bytes, operation.actor());
    counts.peer += bytes;
    const Arrival who{"the bulk reduction", nullptr, i.line};
    warp.cta.scheduler().later(warp.cta.cluster, [=] {
      reduce_elements(reduction, element, target.cta->shared.data() + target.offset,
                      source.cta->shared.data() + source.offset, bytes);
      barrier.cta->arrive(barrier.offset, 0, bytes, completion_of(operation), who);
    });
  }
  return Flow::next;
}

// ------------------------------------------------------------------------------------------------------- tensor copies

namespace {

struct Box {
  TensorMap map;
  int32_t coordinates[5] = {};
};

// The tensor map and coordinates of a lane: b (64-bit address) and the list.
Box box_of(Warp& warp, const Instruction& i, const MemoryOperand& map_operand, int lane) {
  Box box;
  const uint64_t address = warp.address(map_operand, lane);
  const Place place = resolve(warp, Space::generic, address, 128, 64, lane, false);
  const std::string problem = decode_tensor_map(place.data, box.map);
  if (!problem.empty())
    throw Fault(Status::launch_failed, "the tensor map at " + hex(address) + " is not valid: " + problem);
  const Slot* list = warp.list(i);
  for (uint32_t d = 0; d < i.list_count; d++) box.coordinates[d] = static_cast<int32_t>(warp.source(list[d])[lane]);
  return box;
}

void check_box(const Box& box, const Instruction& i, uint32_t offset) {
  const std::string problem = check_tile_copy(box.map, static_cast<int>(i.list_count), offset);
  if (!problem.empty()) throw Fault(Status::misaligned_address, "a tensor copy is not valid: " + problem);
}

void check_rows(Warp& warp, const Box& box, uint32_t offset, bool writes, bool counts = true) {
  walk_box_rows(box.map, box.coordinates, offset, [&](const BoxRow& row) {
    if (row.global_bytes != 0)
      resolve_global(warp.cta, row.global_address, row.global_bytes, writes, "a tensor copy", counts);
  });
}

void record_rows(Cta& cta, const GlobalAccess& access, const Knowledge& knows, const Box& box, uint32_t offset) {
  walk_box_rows(box.map, box.coordinates, offset, [&](const BoxRow& row) {
    if (row.global_bytes != 0) record_global(cta, access, knows, row.global_address, row.global_bytes, "a tensor copy");
  });
}

// A swizzle keeps 16 bytes together: most runs are so long.
void copy_run(void* to, const void* from, uint32_t bytes) {
  if (bytes == 16)
    std::memcpy(to, from, 16);
  else
    std::memcpy(to, from, bytes);
}

void copy_in(Cta& cta, const Box& box, uint32_t offset) {
  uint8_t* shared = cta.shared.data();
  walk_box(box.map, box.coordinates, offset, [&](const BoxRun& run) {
    if (run.in_bounds)
      copy_run(shared + run.shared_address, reinterpret_cast<const void*>(run.global_address), run.bytes);
    else
      fill_out_of_bounds(box.map, shared + run.shared_address, run.bytes);
    convert_loaded(box.map, shared + run.shared_address, run.bytes);
  });
}

}  // namespace

// a: destination; second: tensor map; list: coordinates; third: mbarrier; e: multicast mask if flags 1.
EMULATOR_HANDLER(execute_tensor_load) {
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    const Box box = box_of(warp, i, i.second, lane);
    const uint32_t bytes = box_bytes(box.map);
    const SharedPlace named = resolve_shared(warp, warp.address(i, lane), bytes, "a tensor copy");
    const SharedPlace barrier = barrier_operand(warp, i.third, lane);
    check_box(box, i, named.offset);
    check_rows(warp, box, named.offset, false);
    const auto kept = std::make_shared<const Box>(box);
    for (Cta* cta : destinations(warp, i, lane, named.cta)) {
      Cta* counter = barrier_cta(warp, i, cta, barrier.cta);
      const Operation operation = start_operation(warp, barrier_agent(warp, *counter, barrier.offset));
      record_rows(warp.cta, bulk_read(warp, i, operation), *operation.knows, box, named.offset);
      // Whole boxes are contiguous, whatever the swizzle.
      cta->write_shared(named.offset, bytes, operation.actor(), "a tensor copy");
      warp.cta.scheduler().counts.tensor_copy_in += bytes;
      const Arrival who{"the tensor copy", nullptr, i.line};
      warp.cta.scheduler().later(warp.cta.cluster, [=] {
        copy_in(*cta, *kept, named.offset);
        counter->arrive(barrier.offset, 0, bytes, completion_of(operation), who);
      });
    }
  }
  return Flow::next;
}

namespace {

// The lanes that copy the same box from the same place as this one: a warp of which no thread was elected.
uint32_t same_copies(const Warp& warp, const Instruction& i, uint32_t lanes, int lane) {
  const Slot* list = warp.list(i);
  uint32_t same = 0;
  for (int other = 0; other < kLanes; other++) {
    bool is_same = ((lanes >> other) & 1) != 0 && warp.address(i, other) == warp.address(i, lane) &&
                   warp.address(i.second, other) == warp.address(i.second, lane);
    for (uint32_t d = 0; d < i.list_count && is_same; d++)
      is_same = warp.source(list[d])[other] == warp.source(list[d])[lane];
    same |= static_cast<uint32_t>(is_same) << other;
  }
  return same;
}

}  // namespace

// a: source; second: tensor map; list: coordinates; mode 1: reduce by `immediate`.
EMULATOR_HANDLER(execute_tensor_store) {
  const bool reduces = i.mode != 0;
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    // What lanes write alike is written once, by the first of them; each of them adds by itself. Either counts once.
    const uint32_t same = same_copies(warp, i, lanes, lane);
    const bool counts = std::countr_zero(same) == lane;
    if (!counts && !reduces) continue;
    const Box box = box_of(warp, i, i.second, lane);
    const uint32_t bytes = box_bytes(box.map);
    const SharedPlace source = resolve_shared(warp, warp.address(i, lane), bytes, "a tensor copy");
    if (source.cta != &warp.cta)
      throw Fault(Status::illegal_address, "a tensor store reads shared memory of another CTA");
    check_box(box, i, source.offset);
    const Reduction reduction = static_cast<Reduction>(i.immediate);
    if (reduces) {
      const std::string problem = check_reduction(reduction, box.map.element);
      if (!problem.empty()) throw Fault(Status::launch_failed, "a tensor reduction is not valid: " + problem);
      check_rows(warp, box, source.offset, false, counts);
    }
    check_rows(warp, box, source.offset, true, counts);
    const BulkOperation bulk = start_bulk(warp, i, reduces);
    source.cta->read_shared(source.offset, bytes, bulk.read.actor(), "a tensor copy");
    record_rows(warp.cta, bulk.write, *bulk.read.knows, box, source.offset);
    if (counts) warp.cta.scheduler().counts.tensor_copy_out += bytes;
    const auto data = staged(bytes);
    Grid* grid = &warp.cta.grid();
    const auto kept = std::make_shared<const Box>(box);
    in_bulk_group(
        warp, reduces ? 1u << lane : same, bulk,
        [=] { std::memcpy(data->data(), source.cta->shared.data() + source.offset, bytes); },
        [=] {
          std::unique_lock lock(grid->atomics, std::defer_lock);
          if (reduces) lock.lock();
          walk_box(kept->map, kept->coordinates, source.offset, [&](const BoxRun& run) {
            if (!run.in_bounds) return;
            const uint8_t* from = data->data() + (run.shared_address - source.offset);
            void* to = reinterpret_cast<void*>(run.global_address);
            if (reduces)
              reduce_elements(reduction, kept->map.element, to, from, run.bytes);
            else
              copy_run(to, from, run.bytes);
          });
        });
  }
  return Flow::next;
}

// ---------------------------------------------------------------------------------------- st.async,
// clusterlaunchcontrol

// a: destination; list: values; third: mbarrier. mode: 255 store, else the Reduction.
EMULATOR_HANDLER(execute_store_async) {
  const uint32_t element = static_cast<uint32_t>(type_bits(i.type)) / 8, bytes = element * i.list_count;
  const Slot* list = warp.list(i);
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    const SharedPlace to = resolve_shared(warp, warp.address(i, lane), bytes, "st.async");
    const SharedPlace barrier = barrier_operand(warp, i.third, lane);
    if (barrier.cta != to.cta)
      throw Fault(Status::launch_failed, "st.async writes to one CTA and signals an mbarrier of another");
    const Operation operation = start_operation(warp, barrier_agent(warp, *barrier.cta, barrier.offset));
    const auto data = staged(bytes);
    for (uint32_t at = 0; at < i.list_count; at++) {
      const uint64_t value = element == 8 ? warp.wide_source(list[at], lane) : warp.source(list[at])[lane];
      std::memcpy(data->data() + at * element, &value, element);
    }
    if (i.mode == 255)
      to.cta->write_shared(to.offset, bytes, operation.actor(), "st.async");
    else
      to.cta->atomic_shared(to.offset, bytes, operation.actor());
    warp.cta.scheduler().counts.peer += bytes;
    const Arrival who{"st.async", nullptr, i.line};
    const uint8_t mode = i.mode;
    const Element kind = element == 8 ? Element::u64 : is_signed(i.type) ? Element::s32 : Element::u32;
    warp.cta.scheduler().later(warp.cta.cluster, [=] {
      uint8_t* target = to.cta->shared.data() + to.offset;
      if (mode == 255)
        std::memcpy(target, data->data(), bytes);
      else
        reduce_elements(static_cast<Reduction>(mode), kind, target, data->data(), bytes);
      barrier.cta->arrive(barrier.offset, 0, bytes, completion_of(operation), who);
    });
  }
  return Flow::next;
}

// try_cancel: a: where the 16-byte answer goes; third: mbarrier; flags 1: to all CTAs of the cluster.
// The answer: CTA index of the cancelled cluster's first CTA in words 0 to 2, and 1 in word 3; zeros if there is none.
EMULATOR_HANDLER(execute_cluster_launch) {
  const int lane = std::countr_zero(lanes);
  const SharedPlace to = resolve_shared(warp, warp.address(i, lane), 16, "clusterlaunchcontrol");
  const SharedPlace barrier = barrier_operand(warp, i.third, lane);
  if (to.offset % 16 != 0)
    throw Fault(Status::misaligned_address,
                "the answer of clusterlaunchcontrol at " + hex(to.offset) + " is not aligned to 16 bytes");
  Grid& grid = warp.cta.grid();
  const int64_t number = grid.cancel_cluster();
  uint32_t answer[4] = {};
  if (number >= 0) {
    const Dim3 cluster = grid.cluster_index(static_cast<uint64_t>(number));
    answer[0] = cluster.x * grid.shape.cluster.x;
    answer[1] = cluster.y * grid.shape.cluster.y;
    answer[2] = cluster.z * grid.shape.cluster.z;
    answer[3] = 1;
  }
  std::vector<Cta*> targets{to.cta};
  if (i.flags & 1) {
    targets.clear();
    for (const auto& cta : warp.cta.cluster.ctas) targets.push_back(cta.get());
  }
  for (Cta* cta : targets) {
    const Operation operation = start_operation(warp, barrier_agent(warp, *cta, barrier.offset));
    cta->write_shared(to.offset, 16, operation.actor(), "clusterlaunchcontrol");
    const Arrival who{"clusterlaunchcontrol", nullptr, i.line};
    const std::array<uint32_t, 4> words{answer[0], answer[1], answer[2], answer[3]};
    warp.cta.scheduler().later(warp.cta.cluster, [=] {
      std::memcpy(cta->shared.data() + to.offset, words.data(), 16);
      cta->arrive(barrier.offset, 0, 16, completion_of(operation), who);
    });
  }
  return Flow::next;
}

// query_cancel: a: the 128-bit answer; mode 0: is_canceled into p; 1 to 3: x, y, z into d; 4: all into the list.
EMULATOR_HANDLER(execute_cluster_query) {
  const uint32_t* words = warp.source(i.a);
  if (i.mode == 0) {
    uint32_t cancelled = 0;
    for (int lane = 0; lane < kLanes; lane++) cancelled |= (words[3 * kLanes + lane] & 1) << lane;
    warp.write_predicate(i.p, cancelled, lanes);
    return Flow::next;
  }
  if (i.mode < 4) {
    warp.write(i.d, words + (i.mode - 1) * kLanes, 1, lanes);
    return Flow::next;
  }
  const Slot* list = warp.list(i);
  for (uint32_t at = 0; at < std::min(3u, i.list_count); at++) warp.write(list[at], words + at * kLanes, 1, lanes);
  return Flow::next;
}

}  // namespace jax_fa4::emulator

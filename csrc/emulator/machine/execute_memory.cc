// Loads, stores, atomics, address conversions, ldmatrix and stmatrix. Source: PTX ISA, "Data Movement and Conversion
// Instructions", "Parallel Synchronization and Communication Instructions: atom, red, fence".
#include <algorithm>
#include <bit>
#include <cstring>

#include "../units/tmem.h"
#include "access.h"
#include "grid.h"
#include "handlers.h"
#include "lane_functions.h"
#include "report.h"
#include "scheduler.h"
#include "warp_access.h"

namespace jax_fa4::emulator {
namespace {

void count_shared(Warp& warp, const uint32_t* offsets, uint32_t lanes, uint32_t bytes, bool writes) {
  Statistics& counts = warp.cta.scheduler().counts;
  (writes ? counts.shared_written : counts.shared_read) += static_cast<uint64_t>(std::popcount(lanes)) * bytes;
  counts.bank_conflicts += extra_shared_cycles(offsets, lanes, bytes);
}

bool synchronizes(const Instruction& i) { return i.order != MemoryOrder::weak; }

// The name of a flag: shared memory by its place in the cluster, whichever window it is named through.
uint64_t flag_address(const Place& place, uint64_t address) {
  return place.owner == nullptr ? address : kSharedWindow + (uint64_t{place.owner->rank} << kRankShift) + place.offset;
}

// Lanes that touch global memory: where, and how many bytes each.
struct GlobalLanes {
  uint64_t address[kLanes];
  uint32_t lanes = 0;
  bool repeats = true;  // all of them write what is there already

  void add(int lane, uint64_t at) {
    address[lane] = at;
    lanes |= 1u << lane;
  }
  // Records them, neighbours together.
  void record(Warp& warp, const Instruction& i, AccessKind kind, uint32_t bytes, const char* what) const {
    if (lanes == 0 || !warp.cta.grid().options.check_races) return;
    GlobalAccess access = global_access(warp, i, kind, warp.stamp());
    access.repeats = repeats && kind == AccessKind::write;
    for (int lane = 0; lane < kLanes; lane++) {
      if (((lanes >> lane) & 1) == 0) continue;
      const uint64_t begin = address[lane];
      uint64_t size = bytes;
      while (lane + 1 < kLanes && ((lanes >> (lane + 1)) & 1) != 0 && address[lane + 1] == begin + size) {
        size += bytes;
        lane++;
      }
      record_global(warp.cta, access, warp.knows, begin, size, what);
    }
  }
};

uint64_t element_of(const uint8_t* data, uint32_t bytes) {
  uint64_t value = 0;
  std::memcpy(&value, data, bytes);
  return value;
}

// One element from memory into a lane's planes. A register that is wider than the type gets it extended, by its sign or
// by zeros. Source: PTX ISA, "Operand Size Exceeding Instruction-Type Size".
void put_loaded(const Instruction& i, const uint8_t* data, uint32_t* plane) {
  const uint32_t bytes = static_cast<uint32_t>(type_bits(i.type)) / 8;
  if (bytes <= 4) {
    uint32_t word = 0;
    std::memcpy(&word, data, bytes);
    if (i.type == Type::s8) word = static_cast<uint32_t>(int32_t{static_cast<int8_t>(word)});
    if (i.type == Type::s16) word = static_cast<uint32_t>(int32_t{static_cast<int16_t>(word)});
    if (i.out_slots > 1) plane[kLanes] = is_signed(i.type) ? 0u - (word >> 31) : 0;
    plane[0] = i.flags == 0 && bytes < 4 ? word & 0xffff : word;  // flags 0: a register of 16 bits
    return;
  }
  for (uint32_t at = 0; at < bytes / 4; at++) std::memcpy(plane + at * kLanes, data + at * 4, 4);
}

}  // namespace

namespace {

// Loads whose lanes all find plain data: `from` of each active lane.
void put_all_loaded(Warp& warp, const Instruction& i, const uint8_t* const* from, uint32_t lanes) {
  const uint32_t element = static_cast<uint32_t>(type_bits(i.type)) / 8;
  const Slot* list = warp.list(i);
  for (uint32_t at = 0; at < i.list_count; at++) {
    uint32_t value[4 * kLanes];
    if (element >= 4 && i.out_slots * 4u == element) {
      for (uint32_t plane = 0; plane < i.out_slots; plane++)
        for (int lane = 0; lane < kLanes; lane++)
          std::memcpy(value + plane * kLanes + lane, from[lane] + at * element + plane * 4, 4);
    } else {
      for (int lane = 0; lane < kLanes; lane++)
        if (((lanes >> lane) & 1) != 0) put_loaded(i, from[lane] + at * element, value + lane);
    }
    warp.write(list[at], value, i.out_slots, lanes);
  }
}

void load_slowly(Warp& warp, const Instruction& i, uint32_t lanes, uint32_t bytes, const uint8_t** from) {
  Actor actor = actor_of(warp);
  actor.strong = synchronizes(i);
  uint32_t offsets[kLanes] = {}, shared_lanes = 0;
  GlobalLanes global;
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    const uint64_t address = warp.address(i, lane);
    const Place place = resolve(warp, i.space, address, bytes, bytes, lane, false);
    if (synchronizes(i)) read_flag(warp, flag_address(place, address), i.order, i.scope);
    if (place.is_global) global.add(lane, address);
    if (place.owner != nullptr) {
      place.owner->read_shared(place.offset, bytes, actor, "a load");
      offsets[lane] = place.offset;
      shared_lanes |= 1u << lane;
    }
    from[lane] = place.data;
  }
  global.record(warp, i, AccessKind::read, bytes, "a load");
  if (shared_lanes != 0) count_shared(warp, offsets, shared_lanes, bytes, false);
  if (synchronizes(i)) warp.yield = true;  // the kernel may be polling
}

}  // namespace

EMULATOR_HANDLER(execute_load) {
  const uint32_t bytes = static_cast<uint32_t>(type_bits(i.type)) / 8 * i.vector;
  const uint8_t* from[kLanes];
  const LaneAddresses addresses(warp, i, lanes, bytes);
  if (!synchronizes(i) && addresses.in_shared()) {
    addresses.touch_shared(warp, false, "a load");
    uint8_t* shared = warp.cta.shared.data();
    for (int lane = 0; lane < kLanes; lane++) from[lane] = shared + addresses.offset[lane];
    count_shared(warp, addresses.offset, lanes, bytes, false);
  } else if (!synchronizes(i) && addresses.in_global(warp, i, false)) {
    addresses.touch_global(warp, i, AccessKind::read, false, "a load");
    for (int lane = 0; lane < kLanes; lane++) from[lane] = reinterpret_cast<const uint8_t*>(addresses.address[lane]);
  } else {
    alignas(16) static const uint8_t kNothing[32] = {};
    std::fill(from, from + kLanes, kNothing);
    load_slowly(warp, i, lanes, bytes, from);
  }
  put_all_loaded(warp, i, from, lanes);
  return Flow::next;
}

// Parameters are the same for all lanes; offset counts from the start of the block.
EMULATOR_HANDLER(execute_load_param) {
  const uint32_t element = static_cast<uint32_t>(type_bits(i.type)) / 8;
  const Slot* list = warp.list(i);
  const uint8_t* from = warp.cta.grid().params + i.offset;
  for (uint32_t at = 0; at < i.list_count; at++, from += element) {
    uint32_t value[4 * kLanes];
    put_loaded(i, from, value);
    for (int plane = 0; plane < i.out_slots; plane++)
      std::fill(value + plane * kLanes + 1, value + (plane + 1) * kLanes, value[plane * kLanes]);
    warp.write(list[at], value, i.out_slots, lanes);
  }
  return Flow::next;
}

namespace {

// What a store takes from registers: `count` planes of `bytes` (at most 4) bytes a lane, which lie one after the other.
struct StoredPlanes {
  const uint32_t* plane[8];
  uint32_t count = 0;
  uint32_t bytes;

  StoredPlanes(Warp& warp, const Instruction& i) {
    const uint32_t element = static_cast<uint32_t>(type_bits(i.type)) / 8;
    const Slot* list = warp.list(i);
    bytes = std::min(element, 4u);
    for (uint32_t at = 0; at < i.list_count; at++)
      for (uint32_t part = 0; part < std::max(1u, element / 4); part++)
        plane[count++] = warp.source(list[at]) + part * kLanes;
  }
  void put(uint8_t* to, int lane) const {
    for (uint32_t at = 0; at < count; at++, to += bytes) {
      if (bytes == 4)
        std::memcpy(to, plane[at] + lane, 4);
      else
        std::memcpy(to, plane[at] + lane, bytes);
    }
  }
  bool is_there(const uint8_t* at_place, int lane) const {
    for (uint32_t at = 0; at < count; at++, at_place += bytes)
      if (std::memcmp(at_place, plane[at] + lane, bytes) != 0) return false;
    return true;
  }
};

void store_slowly(Warp& warp, const Instruction& i, uint32_t lanes, uint32_t bytes, const StoredPlanes& planes) {
  Actor actor = actor_of(warp);
  actor.strong = synchronizes(i);
  uint32_t offsets[kLanes] = {}, shared_lanes = 0;
  uint64_t flags[kLanes];
  GlobalLanes global;
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    const uint64_t address = warp.address(i, lane);
    const Place place = resolve(warp, i.space, address, bytes, bytes, lane, true);
    if (place.is_global) {
      global.add(lane, address);
      global.repeats = global.repeats && planes.is_there(place.data, lane);
    }
    if (place.owner != nullptr) {
      place.owner->write_shared(place.offset, bytes, actor, "a store");
      offsets[lane] = place.offset;
      shared_lanes |= 1u << lane;
    }
    if (synchronizes(i)) flags[lane] = flag_address(place, address);
    planes.put(place.data, lane);
  }
  global.record(warp, i, AccessKind::write, bytes, "a store");
  if (synchronizes(i))
    for (int lane = 0; lane < kLanes; lane++)
      if (((lanes >> lane) & 1) != 0) write_flag(warp, flags[lane], i.order, i.scope);
  if (shared_lanes != 0) count_shared(warp, offsets, shared_lanes, bytes, true);
}

}  // namespace

EMULATOR_HANDLER(execute_store) {
  const uint32_t bytes = static_cast<uint32_t>(type_bits(i.type)) / 8 * i.vector;
  const StoredPlanes planes(warp, i);
  const LaneAddresses addresses(warp, i, lanes, bytes);
  warp.cta.scheduler().progress();
  if (!synchronizes(i) && addresses.in_shared()) {
    addresses.touch_shared(warp, true, "a store");
    for (int lane = 0; lane < kLanes; lane++)
      if (((lanes >> lane) & 1) != 0) planes.put(warp.cta.shared.data() + addresses.offset[lane], lane);
    count_shared(warp, addresses.offset, lanes, bytes, true);
    return Flow::next;
  }
  if (!synchronizes(i) && addresses.in_global(warp, i, true)) {
    bool repeats = true;
    for (int lane = 0; lane < kLanes; lane++) {
      if (((lanes >> lane) & 1) == 0) continue;
      uint8_t* to = reinterpret_cast<uint8_t*>(addresses.address[lane]);
      repeats = repeats && planes.is_there(to, lane);
      planes.put(to, lane);
    }
    addresses.touch_global(warp, i, AccessKind::write, repeats, "a store");
    return Flow::next;
  }
  store_slowly(warp, i, lanes, bytes, planes);
  return Flow::next;
}

// --------------------------------------------------------------------------------------------------------------
// atomics

namespace {

template <class T>
T integer_atomic(int operation, T old, T value, T third) {
  using S = std::make_signed_t<T>;
  switch (operation) {
    case 0:
      return static_cast<T>(old + value);
    case 1:
      return std::min(old, value);
    case 2:
      return std::max(old, value);
    case 3:
      return static_cast<T>(std::min(static_cast<S>(old), static_cast<S>(value)));
    case 4:
      return static_cast<T>(std::max(static_cast<S>(old), static_cast<S>(value)));
    case 5:
      return old & value;
    case 6:
      return old | value;
    case 7:
      return old ^ value;
    case 8:
      return old >= value ? 0 : old + 1;  // inc
    case 9:
      return old == 0 || old > value ? value : old - 1;  // dec
    case 10:
      return value;  // exch
    default:
      return old == value ? third : old;  // cas
  }
}

uint64_t float_atomic(const Instruction& i, uint64_t old, uint64_t value) {
  const uint32_t a = static_cast<uint32_t>(old), b = static_cast<uint32_t>(value);
  const bool packed_pair = i.type == Type::f16x2 || i.type == Type::bf16x2;
  const Format half = i.type == Type::f16 || i.type == Type::f16x2 ? Format::f16 : Format::bf16;
  const auto one = [&](uint32_t x, uint32_t y) -> uint32_t {
    if (i.mode == 0) return add_half(x, y, {half});
    return i.mode == 1 ? min_half(x, y, half) : max_half(x, y, half);
  };
  switch (i.type) {
    case Type::f64:
      return std::bit_cast<uint64_t>(std::bit_cast<double>(old) + std::bit_cast<double>(value));
    case Type::f32:
      return i.mode == 0 ? add_f32(a, b) : i.mode == 1 ? min_f32(a, b) : max_f32(a, b);
    default:
      return packed_pair ? packed(one, a, b) : one(a & 0xffff, b & 0xffff);
  }
}

uint64_t atomic_result(const Instruction& i, uint64_t old, uint64_t value, uint64_t third) {
  if (is_float(i.type) && i.mode < 10) return float_atomic(i, old, value);
  int operation = i.mode;
  if ((operation == 1 || operation == 2) && is_signed(i.type)) operation += 2;
  switch (type_bits(i.type)) {
    case 16:
      return integer_atomic<uint16_t>(operation, static_cast<uint16_t>(old), static_cast<uint16_t>(value),
                                      static_cast<uint16_t>(third));
    case 64:
      return integer_atomic<uint64_t>(operation, old, value, third);
    default:
      return integer_atomic<uint32_t>(operation, static_cast<uint32_t>(old), static_cast<uint32_t>(value),
                                      static_cast<uint32_t>(third));
  }
}

}  // namespace

// atom and red: flags 1: there is a destination. Vector forms have list_count sources (and as many destinations behind
// them).
EMULATOR_HANDLER(execute_atomic) {
  const uint32_t bytes = static_cast<uint32_t>(type_bits(i.type)) / 8;
  const bool is_wide = bytes == 8;
  const Slot* list = warp.list(i);
  const uint32_t count = i.vector;
  const Actor actor = actor_of(warp);
  uint32_t results[8][2 * kLanes] = {};
  bool changed = false;
  const GlobalAccess access = global_access(warp, i, AccessKind::reduce, warp.stamp());
  std::lock_guard lock(warp.cta.grid().atomics);
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    const uint64_t address = warp.address(i, lane);
    const Place place = resolve(warp, i.space, address, bytes * count, bytes * count, lane, true);
    read_flag(warp, flag_address(place, address), i.order, i.scope);
    if (place.is_global) record_global(warp.cta, access, warp.knows, address, bytes * count, "an atomic operation");
    if (place.owner != nullptr) place.owner->atomic_shared(place.offset, bytes * count, actor);
    for (uint32_t at = 0; at < count; at++) {
      const uint64_t old = element_of(place.data + at * bytes, bytes);
      const uint64_t value = is_wide ? warp.wide_source(list[at], lane) : warp.source(list[at])[lane];
      const uint64_t third = i.mode != 11 ? 0 : is_wide ? warp.wide_source(i.c, lane) : warp.source(i.c)[lane];
      const uint64_t fresh = atomic_result(i, old, value, third);
      changed = changed || fresh != old;
      std::memcpy(place.data + at * bytes, &fresh, bytes);
      results[at][lane] = static_cast<uint32_t>(old);
      results[at][lane + kLanes] = static_cast<uint32_t>(old >> 32);
    }
    write_flag(warp, flag_address(place, address), i.order, i.scope);
  }
  if (i.flags & 1)
    for (uint32_t at = 0; at < count; at++) warp.write(list[count + at], results[at], is_wide ? 2 : 1, lanes);
  if (changed) warp.cta.scheduler().progress();
  warp.yield = true;
  return Flow::next;
}

// -------------------------------------------------------------------------------------------------- addresses and
// fences

// cvta: mode 0 to generic, 1 from generic. Global, const and param addresses are generic already.
EMULATOR_HANDLER(execute_convert_address) {
  uint32_t result[2 * kLanes];
  const uint64_t window = i.space == Space::shared || i.space == Space::shared_cluster ? kSharedWindow
                          : i.space == Space::local                                    ? kLocalWindow
                                                                                       : 0;
  for (int lane = 0; lane < kLanes; lane++) {
    uint64_t value = warp.wide_source(i.a, lane);
    if (window != 0 && i.mode == 0) value = (value & 0xffffffffu) + window;
    if (window != 0 && i.mode == 1) value = value & 0xffffffffu;
    result[lane] = static_cast<uint32_t>(value);
    result[lane + kLanes] = static_cast<uint32_t>(value >> 32);
  }
  warp.write(i.d, result, 2, lanes);
  return Flow::next;
}

EMULATOR_HANDLER(execute_is_space) {
  uint32_t result = 0;
  for (int lane = 0; lane < kLanes; lane++) {
    const uint64_t value = warp.wide_source(i.a, lane);
    const bool shared = value >= kSharedWindow && value < kSharedWindow + (uint64_t{1} << 32);
    const bool local = value >= kLocalWindow && value < kLocalWindow + (uint64_t{1} << 32);
    const bool own = shared && ((value - kSharedWindow) >> kRankShift) == warp.cta.rank;
    const bool holds = i.space == Space::shared           ? own
                       : i.space == Space::shared_cluster ? shared
                       : i.space == Space::local          ? local
                                                          : !shared && !local;
    result |= static_cast<uint32_t>(holds) << lane;
  }
  warp.write_predicate(i.p, result, lanes);
  return Flow::next;
}

// mapa: the same offset in the CTA of rank b. A rank that the cluster has not is reported where the address is used:
// lanes that use none may compute any.
EMULATOR_HANDLER(execute_map_address) {
  uint32_t result[2 * kLanes];
  for (int lane = 0; lane < kLanes; lane++) {
    const uint64_t value = i.out_slots == 2 ? warp.wide_source(i.a, lane) : warp.source(i.a)[lane];
    const uint64_t rank = warp.source(i.b)[lane] & 0xff;
    const uint64_t mapped =
        ((value + static_cast<uint64_t>(i.offset)) & ~(uint64_t{0xff} << kRankShift)) | rank << kRankShift;
    result[lane] = static_cast<uint32_t>(mapped);
    result[lane + kLanes] = static_cast<uint32_t>(mapped >> 32);
  }
  warp.write(i.d, result, i.out_slots, lanes);
  return Flow::next;
}

EMULATOR_HANDLER(execute_cta_rank) {
  uint32_t result[kLanes];
  for (int lane = 0; lane < kLanes; lane++) result[lane] = (warp.source(i.a)[lane] >> kRankShift) & 0xff;
  warp.write(i.d, result, 1, lanes);
  return Flow::next;
}

// mode 1: fence.proxy.async: what this warp knows becomes visible to the asynchronous proxy, in shared memory (flags 1)
// and in global memory (flags 2); 2: a memory fence; 3: fence.mbarrier_init.
EMULATOR_HANDLER(execute_fence) {
  if (i.mode == 2) {
    fence_memory(warp, i.scope);
    return Flow::next;
  }
  warp.knows.happened.raise(warp.agent, warp.time);
  if (i.mode == 1 && (i.flags & 1) != 0) warp.knows.fenced.join(warp.knows.happened);
  if (i.mode == 1 && (i.flags & 2) != 0) warp.knows.fence_global();
  if (i.mode == 3) warp.knows.initialized.raise(warp.agent, warp.time);
  warp.time++;
  return Flow::next;
}

// ------------------------------------------------------------------------------------------------------------ matrices

namespace {

// The 16-byte rows of `matrices` 8x8 matrices: row r of matrix m is at the address that lane 8 m + r gives.
SharedPlace row_place(Warp& warp, const Instruction& i, int lane) {
  const uint64_t address = warp.address(i, lane);
  if (address % 16 != 0)
    throw Fault(Status::misaligned_address,
                "a matrix row at " + hex(address) + " in lane " + std::to_string(lane) + " is not aligned to 16 bytes");
  return resolve_shared(warp, address, 16, "a matrix row");
}

// The record of the rows, which mostly lie in the warp's own CTA.
class MatrixRows {
 public:
  MatrixRows(Warp& warp, bool writes, const char* what)
      : own_(&warp.cta), actor_(actor_of(warp)), writes_(writes), what_(what), pass_(warp.cta, actor_, writes, what) {}
  void touch(const SharedPlace& place) {
    if (place.cta == own_)
      pass_.touch(place.offset, 16);
    else
      SharedPass(*place.cta, actor_, writes_, what_).touch(place.offset, 16);
  }

 private:
  Cta* own_;
  const Actor actor_;
  const bool writes_;
  const char* what_;
  SharedPass pass_;
};

}  // namespace

// mode: matrices; flags 1: transposed.
EMULATOR_HANDLER(execute_load_matrix) {
  if (!warp.converged(0xffffffffu, lanes)) return warp.block({Wait::Kind::reconvergence, 0xffffffffu});
  const Slot* list = warp.list(i);
  uint32_t results[4][kLanes];
  uint32_t offsets[kLanes] = {};
  MatrixRows touched(warp, false, "ldmatrix");
  for (int matrix = 0; matrix < i.mode; matrix++) {
    uint16_t rows[8][8];
    for (int row = 0; row < 8; row++) {
      const SharedPlace place = row_place(warp, i, matrix * 8 + row);
      touched.touch(place);
      offsets[matrix * 8 + row] = place.offset;
      std::memcpy(rows[row], place.cta->shared.data() + place.offset, 16);
    }
    load_matrix(rows, (i.flags & 1) != 0, results[matrix]);
  }
  for (int matrix = 0; matrix < i.mode; matrix++) warp.write(list[matrix], results[matrix], 1, lanes);
  count_shared(warp, offsets, i.mode == 4 ? 0xffffffffu : (1u << (8 * i.mode)) - 1, 16, false);
  return Flow::next;
}

// mode: matrices; flags 1: transposed, 2: 8-bit elements (m16n8.trans).
EMULATOR_HANDLER(execute_store_matrix) {
  if (!warp.converged(0xffffffffu, lanes)) return warp.block({Wait::Kind::reconvergence, 0xffffffffu});
  const Slot* list = warp.list(i);
  uint32_t offsets[kLanes] = {};
  MatrixRows touched(warp, true, "stmatrix");
  for (int matrix = 0; matrix < i.mode; matrix++) {
    uint16_t rows[8][8];
    uint8_t narrow[8][16];
    if (i.flags & 2)
      store_matrix_b8(narrow, warp.source(list[matrix]));
    else
      store_matrix(rows, (i.flags & 1) != 0, warp.source(list[matrix]));
    for (int row = 0; row < 8; row++) {
      const SharedPlace place = row_place(warp, i, matrix * 8 + row);
      touched.touch(place);
      offsets[matrix * 8 + row] = place.offset;
      if (i.flags & 2)
        std::memcpy(place.cta->shared.data() + place.offset, narrow[row], 16);
      else
        std::memcpy(place.cta->shared.data() + place.offset, rows[row], 16);
    }
  }
  count_shared(warp, offsets, i.mode == 4 ? 0xffffffffu : (1u << (8 * i.mode)) - 1, 16, true);
  warp.cta.scheduler().progress();
  return Flow::next;
}

}  // namespace jax_fa4::emulator

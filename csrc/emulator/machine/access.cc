// See access.h.
#include "access.h"

#include <algorithm>
#include <cstring>

#include "grid.h"
#include "report.h"
#include "scheduler.h"

namespace jax_fa4::emulator {
namespace {

std::string in_lane(int lane) { return " in lane " + std::to_string(lane); }

// The bits of the bytes from `at` to `end` that share a byte of the record with `at`.
uint8_t bits_from(uint64_t at, uint64_t end) {
  const uint64_t last = std::min(end, at / 8 * 8 + 8) - 1;
  return static_cast<uint8_t>(0xffu << (at % 8) & 0xffu >> (7 - last % 8));
}

bool all_written(const GlobalMemory::Range& range, uint64_t address, uint64_t bytes) {
  if (range.written == nullptr) return true;
  const uint8_t* bits = range.written->data();
  const uint64_t first = address - range.begin, end = first + bytes;
  for (uint64_t at = first; at < end;) {
    uint64_t many = 0;
    if (at % 8 == 0 && at + 64 <= end) {
      std::memcpy(&many, bits + at / 8, sizeof many);
      if (~many != 0) return false;
      at += 64;
      continue;
    }
    const uint8_t mask = bits_from(at, end);
    if ((bits[at / 8] & mask) != mask) return false;
    at = at / 8 * 8 + 8;
  }
  return true;
}

void set_written(const GlobalMemory::Range& range, uint64_t address, uint64_t bytes) {
  if (all_written(range, address, bytes)) return;
  uint8_t* bits = range.written->data();
  const uint64_t first = address - range.begin, end = first + bytes;
  // Neighbouring CTAs on other host threads may share the byte.
  for (uint64_t at = first; at < end; at = at / 8 * 8 + 8)
    __atomic_fetch_or(&bits[at / 8], bits_from(at, end), __ATOMIC_RELAXED);
}

}  // namespace

uint8_t* resolve_global(Cta& cta, uint64_t address, uint64_t bytes, bool writes, const char* what, bool counts) {
  const GlobalMemory::Range& range = cta.scheduler().find_global(address, bytes);
  if (range.end == 0)
    throw Fault(Status::illegal_address, std::string(what) + " of " + std::to_string(bytes) +
                                             " bytes touches global memory at " + hex(address) +
                                             ", which belongs to no allocation");
  if (writes) {
    set_written(range, address, bytes);
    if (counts) cta.scheduler().counts.global_written += bytes;
  } else {
    if (cta.grid().options.check_uninitialized && !all_written(range, address, bytes))
      throw Fault(Status::launch_failed, std::string(what) + " reads global memory at " + hex(address) + " (byte " +
                                             std::to_string(address - range.begin) +
                                             " of its allocation), which was never written");
    if (counts) cta.scheduler().counts.global_read += bytes;
  }
  return reinterpret_cast<uint8_t*>(address);
}

bool global_is_plain(Cta& cta, uint64_t address, uint64_t bytes, bool writes) {
  const GlobalMemory::Range& range = cta.scheduler().find_global(address, bytes);
  if (range.end == 0) return false;
  if (writes || !cta.grid().options.check_uninitialized) return true;
  return all_written(range, address, bytes);
}

SharedPlace resolve_shared(Warp& warp, uint64_t address, uint32_t bytes, const char* what) {
  if (address >= kSharedWindow) address -= kSharedWindow;
  const uint64_t rank = address >> kRankShift;
  const uint32_t offset = static_cast<uint32_t>(address) & kOffsetMask;
  Cluster& cluster = warp.cta.cluster;
  if (rank >= cluster.ctas.size())
    throw Fault(Status::illegal_address, std::string(what) + " names shared address " + hex(address) +
                                             ": the cluster has no CTA of rank " + std::to_string(rank));
  Cta& cta = *cluster.ctas[rank];
  if (!cta.shared.contains(offset, bytes) || offset < kReservedShared)
    throw Fault(Status::illegal_address, std::string(what) + " of " + std::to_string(bytes) +
                                             " bytes at shared address " + hex(address) + " is outside of the CTA's " +
                                             std::to_string(cta.shared.size() - kReservedShared) +
                                             " bytes, which start at 0x400");
  if (&cta != &warp.cta && cta.warps_left == 0)
    throw Fault(Status::illegal_address,
                std::string(what) + " reaches shared memory of " + cta_name(cta) + ", which has exited");
  return {&cta, offset};
}

Place resolve(Warp& warp, Space space, uint64_t address, uint32_t bytes, uint32_t align, int lane, bool writes) {
  const char* what = writes ? "a store" : "a load";
  if (align > 1 && address % align != 0)
    throw Fault(Status::misaligned_address, std::string(what) + " of " + std::to_string(align) + " bytes at address " +
                                                hex(address) + in_lane(lane) + " is not aligned");
  if (space == Space::generic) {
    if (address >= kSharedWindow && address < kSharedWindow + (uint64_t{1} << 32))
      space = Space::shared_cluster;
    else if (address >= kLocalWindow && address < kLocalWindow + (uint64_t{1} << 32))
      space = Space::local;
    else
      space = Space::global;
  }
  Place place;
  switch (space) {
    case Space::shared:
    case Space::shared_cluster: {
      const SharedPlace shared = resolve_shared(warp, address, bytes, what);
      if (space == Space::shared && shared.cta != &warp.cta)
        throw Fault(Status::illegal_address, std::string(what) + in_lane(lane) +
                                                 " with .shared::cta names shared memory of another CTA (" +
                                                 hex(address) + ")");
      return {shared.cta->shared.data() + shared.offset, shared.cta, shared.offset, false};
    }
    case Space::local: {
      const uint64_t offset = address >= kLocalWindow ? address - kLocalWindow : address;
      const uint64_t size = warp.cta.grid().program.local_bytes;
      if (offset + bytes > size)
        throw Fault(Status::illegal_address, std::string(what) + in_lane(lane) + " is outside of the thread's " +
                                                 std::to_string(size) + " bytes of local memory");
      place.data = warp.local.data() + static_cast<uint64_t>(lane) * size + offset;
      return place;
    }
    case Space::param:
    default:
      break;
  }
  const uint64_t params = reinterpret_cast<uint64_t>(warp.cta.grid().params);
  const uint64_t param_bytes = warp.cta.grid().program.param_bytes;
  if (!writes && address >= params && address + bytes <= params + param_bytes) {
    place.data = reinterpret_cast<uint8_t*>(address);
    return place;
  }
  if (space == Space::param)
    throw Fault(Status::illegal_address, std::string(what) + in_lane(lane) + " is outside of the " +
                                             std::to_string(param_bytes) + " bytes of parameters");
  place.data = resolve_global(warp.cta, address, bytes, writes, what);
  place.is_global = true;
  return place;
}

GlobalAccess global_access(const Warp& warp, const Instruction& i, AccessKind kind, Stamp stamp) {
  const Cta& cta = warp.cta;
  const Dim3 grid = cta.grid().shape.grid;
  GlobalAccess access;
  access.kind = kind;
  access.strong = i.order != MemoryOrder::weak;
  access.scope = i.scope;
  access.line = i.line;
  access.cta = cta.index.x + grid.x * (cta.index.y + grid.y * cta.index.z);
  access.warp = static_cast<uint16_t>(warp.index);
  access.cluster = cta.cluster.number;
  access.stamp = stamp;
  return access;
}

void record_global(Cta& cta, const GlobalAccess& access, const Knowledge& knows, uint64_t address, uint64_t bytes,
                   const char* what) {
  if (!cta.grid().options.check_races) return;
  const GlobalConflict conflict = cta.scheduler().global_view.record(access, knows, address, bytes);
  if (conflict.kind != Conflict::Kind::none) report_global_conflict(cta.grid(), conflict, access, what);
}

}  // namespace jax_fa4::emulator

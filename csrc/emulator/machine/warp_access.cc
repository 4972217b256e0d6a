// See warp_access.h.
#include "warp_access.h"

#include <algorithm>
#include <bit>

#include "grid.h"
#include "scheduler.h"

namespace jax_fa4::emulator {
namespace {

bool is_active(uint32_t lanes, int lane) { return ((lanes >> lane) & 1) != 0; }

}  // namespace

LaneAddresses::LaneAddresses(const Warp& warp, const Instruction& i, uint32_t lanes, uint32_t bytes)
    : lanes_(lanes), bytes_(bytes) {
  const uint32_t* plane = warp.source(i.a);
  const uint64_t added = static_cast<uint64_t>(i.offset);
  if (i.wide_address)
    for (int lane = 0; lane < kLanes; lane++)
      address[lane] = (plane[lane] | uint64_t{plane[lane + kLanes]} << 32) + added;
  else
    for (int lane = 0; lane < kLanes; lane++) address[lane] = static_cast<uint32_t>(plane[lane] + added);
  if (~lanes != 0) {
    const uint64_t one = address[std::countr_zero(lanes)];
    for (int lane = 0; lane < kLanes; lane++) address[lane] = is_active(lanes, lane) ? address[lane] : one;
  }
  uint64_t all = 0, least = address[0], most = address[0];
  for (int lane = 0; lane < kLanes; lane++) all |= address[lane];
  for (int lane = 1; lane < kLanes; lane++) {
    least = std::min(least, address[lane]);
    most = std::max(most, address[lane]);
  }
  aligned_ = (all & (bytes - 1)) == 0;
  const bool may_be_shared = i.space == Space::shared || i.space == Space::shared_cluster ||
                             (i.space == Space::generic && least >= kSharedWindow);
  if (!aligned_ || !may_be_shared) return;
  const uint64_t window = (least >= kSharedWindow ? kSharedWindow : 0) + (uint64_t{warp.cta.rank} << kRankShift);
  if (least < window + kReservedShared || most + bytes > window + warp.cta.shared.size()) return;
  in_shared_ = true;
  for (int lane = 0; lane < kLanes; lane++) offset[lane] = static_cast<uint32_t>(address[lane] - window);
}

template <class Place, class Run>
void LaneAddresses::each_run(const Place* place, Run run) const {
  for (int lane = 0; lane < kLanes; lane++) {
    if (!is_active(lanes_, lane)) continue;
    const int first = lane;
    uint32_t together = bytes_;
    while (lane + 1 < kLanes && is_active(lanes_, lane + 1)) {
      if (place[lane + 1] == place[first] + together)
        together += bytes_;
      else if (place[lane + 1] != place[lane])
        break;
      lane++;
    }
    run(first, together);
  }
}

void LaneAddresses::touch_shared(Warp& warp, bool writes, const char* what) const {
  const Actor actor = actor_of(warp);
  SharedPass pass(warp.cta, actor, writes, what);
  each_run(offset, [&](int lane, uint32_t together) { pass.touch(offset[lane], together); });
}

bool LaneAddresses::in_global(Warp& warp, const Instruction& i, bool writes) const {
  if (!aligned_ || (i.space != Space::global && i.space != Space::generic)) return false;
  bool all = true;
  each_run(address, [&](int lane, uint32_t together) {
    all = all && global_is_plain(warp.cta, address[lane], together, writes);
  });
  return all;
}

void LaneAddresses::touch_global(Warp& warp, const Instruction& i, AccessKind kind, bool repeats,
                                 const char* what) const {
  GlobalAccess access = global_access(warp, i, kind, warp.stamp());
  access.repeats = repeats && kind == AccessKind::write;
  each_run(address, [&](int lane, uint32_t together) {
    resolve_global(warp.cta, address[lane], together, kind == AccessKind::write, what);
    record_global(warp.cta, access, warp.knows, address[lane], together, what);
  });
}

namespace {

uint64_t cycles_by_bank(const uint32_t* offsets, uint32_t lanes, uint32_t bytes) {
  constexpr int kBanks = 32, kMostWords = 32;  // in one bank and pass: a word of each lane
  const int lanes_a_pass = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
  uint64_t extra = 0;
  uint32_t words[kBanks][kMostWords];
  for (int first = 0; first < kLanes; first += lanes_a_pass) {
    int used[kBanks] = {}, most = 1;
    for (int lane = first; lane < first + lanes_a_pass; lane++) {
      if (((lanes >> lane) & 1) == 0) continue;
      for (uint32_t word = offsets[lane] / 4; word * 4 < offsets[lane] + bytes; word++) {
        uint32_t* bank = words[word % kBanks];
        int& count = used[word % kBanks];
        if (std::find(bank, bank + count, word) != bank + count || count == kMostWords) continue;
        bank[count++] = word;
        most = std::max(most, count);
      }
    }
    extra += static_cast<uint64_t>(most - 1);
  }
  return extra;
}

}  // namespace

uint64_t extra_shared_cycles(const uint32_t* offsets, uint32_t lanes, uint32_t bytes) {
  uint32_t apart = ~lanes;
  for (uint32_t lane = 0; lane < kLanes; lane++) apart |= offsets[lane] ^ (offsets[0] + lane * bytes);
  if (apart == 0) return 0;
  // Pieces of a lane's size fill a pass without conflict if no two different ones want the same place in it.
  const uint32_t size = std::max(bytes, 4u), places = 128 / size;
  const int lanes_a_pass = static_cast<int>(std::min(places, 32u));
  for (int first = 0; first < kLanes && bytes <= 16; first += lanes_a_pass) {
    uint32_t wanted[32];
    uint32_t taken = 0;
    for (int lane = first; lane < first + lanes_a_pass; lane++) {
      if (!is_active(lanes, lane)) continue;
      const uint32_t piece = offsets[lane] / size, place = piece % places;
      if (((taken >> place) & 1) != 0 && wanted[place] != piece) return cycles_by_bank(offsets, lanes, bytes);
      wanted[place] = piece;
      taken |= 1u << place;
    }
  }
  return bytes <= 16 ? 0 : cycles_by_bank(offsets, lanes, bytes);
}

}  // namespace jax_fa4::emulator

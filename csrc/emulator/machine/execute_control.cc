// Branches, exits, and what the lanes of a warp do together: shuffles, votes, matches, elections. Source: PTX ISA,
// "Control Flow Instructions", "shfl.sync", "vote.sync", "match.sync", "redux.sync", "elect.sync".
#include <algorithm>
#include <bit>

#include "cta.h"
#include "handlers.h"
#include "lane_functions.h"
#include "scheduler.h"

namespace jax_fa4::emulator {

EMULATOR_HANDLER(execute_branch) {
  warp.split(i.target, lanes);
  return Flow::jumped;
}

EMULATOR_HANDLER(execute_branch_indexed) {
  const std::vector<int32_t>& targets = warp.cta.grid().program.branch_tables[static_cast<size_t>(i.immediate)];
  const uint32_t* index = warp.source(i.a);
  const uint32_t first = index[std::countr_zero(lanes)];
  if (first >= targets.size())
    throw Fault(Status::launch_failed,
                "brx.idx takes index " + std::to_string(first) + " of " + std::to_string(targets.size()) + " targets");
  uint32_t same = 0;
  for (int lane = 0; lane < kLanes; lane++)
    if (((lanes >> lane) & 1) != 0 && index[lane] == first) same |= 1u << lane;
  // The others meet the instruction again.
  const uint32_t rest = warp.current.lanes & ~same;
  if (rest != 0) {
    warp.others.push_back({warp.current.pc, rest, {}});
    warp.current.lanes = same;
  }
  warp.current.pc = targets[first];
  return Flow::jumped;
}

EMULATOR_HANDLER(execute_exit) {
  const uint32_t stay = warp.current.lanes & ~lanes;
  warp.exit_lanes(lanes);
  warp.current.lanes = stay;
  return Flow::next;
}

EMULATOR_HANDLER(execute_trap) {
  throw Fault(Status::launch_failed, "the kernel trapped in lane " + std::to_string(std::countr_zero(lanes)));
}

EMULATOR_HANDLER(execute_nothing) { return Flow::next; }

EMULATOR_HANDLER(execute_yield) {
  warp.yield = true;
  return Flow::next;
}

namespace {

// The member mask of a .sync instruction: the lanes named by its mask operand in the first lane.
uint32_t members_of(const Warp& warp, Slot slot, uint32_t lanes) { return warp.source(slot)[std::countr_zero(lanes)]; }

// True once all members are here. Otherwise the lanes wait for the others.
bool gather(Warp& warp, uint32_t members, uint32_t lanes) {
  if ((members & lanes) != lanes)
    throw Fault(Status::launch_failed, "a lane that executes a .sync instruction is not in its member mask");
  if (warp.converged(members, lanes)) return true;
  warp.current.wait = {Wait::Kind::reconvergence, members};
  return false;
}

}  // namespace

EMULATOR_HANDLER(execute_warp_sync) {
  if (!gather(warp, members_of(warp, i.a, lanes), lanes)) return Flow::blocked;
  return Flow::next;
}

// mode: up, down, bfly, idx.
EMULATOR_HANDLER(execute_shuffle) {
  if (!gather(warp, members_of(warp, i.e, lanes), lanes)) return Flow::blocked;
  const uint32_t* value = warp.source(i.a);
  const uint32_t* operand = warp.source(i.b);
  const uint32_t* control = warp.source(i.c);
  uint32_t result[kLanes], inside = 0;
  for (int lane = 0; lane < kLanes; lane++) {
    const int b = static_cast<int>(operand[lane] & 31), clamp = static_cast<int>(control[lane] & 31),
              segment = static_cast<int>((control[lane] >> 8) & 31);
    const int high = (lane & segment) | (clamp & ~segment), low = lane & segment;
    int from = lane;
    bool valid = true;
    switch (i.mode) {
      case 0:
        from = lane - b;
        valid = from >= high;
        break;
      case 1:
        from = lane + b;
        valid = from <= high;
        break;
      case 2:
        from = lane ^ b;
        valid = from <= high;
        break;
      default:
        from = low | (b & ~segment);
        valid = from <= high;
        break;
    }
    if (!valid) from = lane;
    result[lane] = value[from & 31];
    inside |= static_cast<uint32_t>(valid) << lane;
  }
  warp.write(i.d, result, 1, lanes);
  if (i.p >= 0) warp.write_predicate(i.p, inside, lanes);
  return Flow::next;
}

// mode: all, any, uni, ballot. p is the destination, or d; q the source.
EMULATOR_HANDLER(execute_vote) {
  if (!gather(warp, members_of(warp, i.e, lanes), lanes)) return Flow::blocked;
  const uint32_t value = i.p_negated ? ~warp.predicate(i.q) : warp.predicate(i.q);
  const uint32_t set = value & lanes;
  if (i.mode == 3) {
    uint32_t result[kLanes];
    std::fill(result, result + kLanes, set);
    warp.write(i.d, result, 1, lanes);
    return Flow::next;
  }
  const bool holds = i.mode == 0 ? set == lanes : i.mode == 1 ? set != 0 : set == lanes || set == 0;
  warp.write_predicate(i.p, holds ? 0xffffffffu : 0, lanes);
  return Flow::next;
}

// mode 0: any (mask of lanes with the same value); 1: all (the mask, or 0; p tells which).
EMULATOR_HANDLER(execute_match) {
  if (!gather(warp, members_of(warp, i.e, lanes), lanes)) return Flow::blocked;
  const bool is_wide = type_bits(i.type) == 64;
  const auto value = [&](int lane) { return is_wide ? warp.wide_source(i.a, lane) : warp.source(i.a)[lane]; };
  uint32_t result[kLanes] = {};
  bool all = true;
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    for (int other = 0; other < kLanes; other++)
      if (((lanes >> other) & 1) != 0 && value(other) == value(lane)) result[lane] |= 1u << other;
    all = all && result[lane] == lanes;
  }
  if (i.mode == 1)
    for (uint32_t& one : result) one = all ? lanes : 0;
  warp.write(i.d, result, 1, lanes);
  if (i.p >= 0) warp.write_predicate(i.p, all ? 0xffffffffu : 0, lanes);
  return Flow::next;
}

// mode: add, min, max, and, or, xor.
EMULATOR_HANDLER(execute_redux) {
  if (!gather(warp, members_of(warp, i.e, lanes), lanes)) return Flow::blocked;
  const uint32_t* value = warp.source(i.a);
  uint32_t total = value[std::countr_zero(lanes)];
  const MinMaxOptions options{false, (i.flags & kPropagateNan) != 0, false, (i.flags & kAbsolute) != 0};
  if (i.type == Type::f32 && (i.flags & kAbsolute) != 0) total &= 0x7fffffffu;
  for (int lane = std::countr_zero(lanes) + 1; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    const uint32_t x = value[lane];
    const bool less = is_signed(i.type) ? static_cast<int32_t>(x) < static_cast<int32_t>(total) : x < total;
    switch (i.mode) {
      case 0:
        total += x;
        break;
      case 1:
        total = i.type == Type::f32 ? min_f32(total, x, options) : less ? x : total;
        break;
      case 2:
        total = i.type == Type::f32 ? max_f32(total, x, options) : less ? total : x;
        break;
      case 3:
        total &= x;
        break;
      case 4:
        total |= x;
        break;
      default:
        total ^= x;
        break;
    }
  }
  uint32_t result[kLanes];
  std::fill(result, result + kLanes, total);
  warp.write(i.d, result, 1, lanes);
  return Flow::next;
}

EMULATOR_HANDLER(execute_elect) {
  const uint32_t members = members_of(warp, i.a, lanes);
  if (!gather(warp, members, lanes)) return Flow::blocked;
  const int leader = std::countr_zero(lanes);
  uint32_t result[kLanes];
  std::fill(result, result + kLanes, static_cast<uint32_t>(leader));
  warp.write(i.d, result, 1, lanes);
  if (i.p >= 0) warp.write_predicate(i.p, 1u << leader, lanes);
  return Flow::next;
}

EMULATOR_HANDLER(execute_active_mask) {
  uint32_t result[kLanes];
  std::fill(result, result + kLanes, lanes);
  warp.write(i.d, result, 1, lanes);
  return Flow::next;
}

}  // namespace jax_fa4::emulator

// Arithmetic, comparisons, selection and moves. See handlers.h.
#include <bit>
#include <cmath>

#include "cta.h"
#include "handlers.h"
#include "lane_functions.h"
#include "scheduler.h"

namespace jax_fa4::emulator {
namespace {

uint32_t spread(uint32_t mask, int lane) { return 0u - ((mask >> lane) & 1u); }

}  // namespace

EMULATOR_HANDLER(execute_lanes) {
  alignas(64) uint32_t result[2 * kLanes];
  i.lane_function(result, warp.source(i.a), warp.source(i.b), warp.source(i.c), i);
  warp.write(i.d, result, i.out_slots, lanes);
  return Flow::next;
}

// flags: 1 takes the carry in, 2 gives it out; mode 1 subtracts.
EMULATOR_HANDLER(execute_carry) {
  const int bits = type_bits(i.type);
  const uint32_t carry_in = (i.flags & 1) ? warp.predicate(i.p) : 0;
  uint32_t result[2 * kLanes], carry_out = 0;
  for (int lane = 0; lane < kLanes; lane++) {
    using Wide = unsigned __int128;
    const uint64_t x = bits == 64 ? warp.wide_source(i.a, lane) : warp.source(i.a)[lane];
    const uint64_t y = bits == 64 ? warp.wide_source(i.b, lane) : warp.source(i.b)[lane];
    const Wide c = (carry_in >> lane) & 1;
    const Wide sum = i.mode != 0 ? Wide{x} - y - c : Wide{x} + y + c;
    result[lane] = static_cast<uint32_t>(sum);
    result[lane + kLanes] = static_cast<uint32_t>(sum >> 32);
    carry_out |= static_cast<uint32_t>((sum >> bits) & 1) << lane;
  }
  warp.write(i.d, result, i.out_slots, lanes);
  if (i.flags & 2) warp.write_predicate(i.p, carry_out, lanes);
  return Flow::next;
}

// mode: and, or, xor, not. q and target are the sources.
EMULATOR_HANDLER(execute_predicate_logic) {
  const uint32_t a = i.p_negated ? ~warp.predicate(i.q) : warp.predicate(i.q);
  uint32_t b = i.target >= 0 ? warp.predicate(i.target) : 0;
  if (i.flags != 0) b = ~b;
  const uint32_t result = i.mode == 0 ? a & b : i.mode == 1 ? a | b : i.mode == 2 ? a ^ b : ~a;
  warp.write_predicate(i.p, result, lanes);
  return Flow::next;
}

EMULATOR_HANDLER(execute_bit_field_insert) {
  const int bits = type_bits(i.type);
  uint32_t result[2 * kLanes];
  for (int lane = 0; lane < kLanes; lane++) {
    const uint64_t x = bits == 64 ? warp.wide_source(i.a, lane) : warp.source(i.a)[lane];
    const uint64_t y = bits == 64 ? warp.wide_source(i.b, lane) : warp.source(i.b)[lane];
    const uint64_t value = bit_field_insert(x, y, warp.source(i.c)[lane] & 0xff, warp.source(i.e)[lane] & 0xff, bits);
    result[lane] = static_cast<uint32_t>(value);
    result[lane + kLanes] = static_cast<uint32_t>(value >> 32);
  }
  warp.write(i.d, result, i.out_slots, lanes);
  return Flow::next;
}

// p = (a op b) [bool] target; q = !(a op b) [bool] target.
EMULATOR_HANDLER(execute_setp) {
  const uint32_t compared = i.compare(warp.source(i.a), warp.source(i.b), i);
  uint32_t third = i.target >= 0 ? warp.predicate(i.target) : 0;
  if (i.p_negated) third = ~third;
  const auto combine = [&](uint32_t value) {
    return i.flags == 1 ? value & third : i.flags == 2 ? value | third : i.flags == 3 ? value ^ third : value;
  };
  if (i.p >= 0) warp.write_predicate(i.p, combine(compared), lanes);
  if (i.q >= 0) warp.write_predicate(i.q, combine(~compared), lanes);
  return Flow::next;
}

EMULATOR_HANDLER(execute_set) {
  const uint32_t compared = i.compare(warp.source(i.a), warp.source(i.b), i);
  const uint32_t one = i.type == Type::f32 ? 0x3f800000u : 0xffffffffu;
  uint32_t result[kLanes];
  for (int lane = 0; lane < kLanes; lane++) result[lane] = one & spread(compared, lane);
  warp.write(i.d, result, 1, lanes);
  return Flow::next;
}

EMULATOR_HANDLER(execute_selp) {
  const uint32_t chosen = i.p_negated ? ~warp.predicate(i.p) : warp.predicate(i.p);
  uint32_t result[4 * kLanes];
  for (int plane = 0; plane < i.out_slots; plane++) {
    const uint32_t* a = warp.source(i.a) + plane * kLanes;
    const uint32_t* b = warp.source(i.b) + plane * kLanes;
    for (int lane = 0; lane < kLanes; lane++)
      result[plane * kLanes + lane] = (a[lane] & spread(chosen, lane)) | (b[lane] & ~spread(chosen, lane));
  }
  warp.write(i.d, result, i.out_slots, lanes);
  return Flow::next;
}

EMULATOR_HANDLER(execute_testp) {
  uint32_t result = 0;
  for (int lane = 0; lane < kLanes; lane++) {
    const double value = i.source_type == Type::f64 ? std::bit_cast<double>(warp.wide_source(i.a, lane))
                                                    : std::bit_cast<float>(warp.source(i.a)[lane]);
    const int kind = i.source_type == Type::f64 ? std::fpclassify(value) : std::fpclassify(static_cast<float>(value));
    const bool holds[] = {kind != FP_NAN && kind != FP_INFINITE,
                          kind == FP_INFINITE,
                          kind != FP_NAN,
                          kind == FP_NAN,
                          kind == FP_NORMAL,
                          kind == FP_SUBNORMAL};
    result |= static_cast<uint32_t>(holds[i.mode]) << lane;
  }
  warp.write_predicate(i.p, result, lanes);
  return Flow::next;
}

EMULATOR_HANDLER(execute_move) {
  warp.write(i.d, warp.source(i.a), i.out_slots, lanes);
  return Flow::next;
}

// q is the source, or none: the constant in mode.
EMULATOR_HANDLER(execute_move_predicate) {
  const uint32_t value = i.q < 0       ? (i.mode != 0 ? 0xffffffffu : 0u)
                         : i.p_negated ? ~warp.predicate(i.q)
                                       : warp.predicate(i.q);
  warp.write_predicate(i.p, value, lanes);
  return Flow::next;
}

// mov d, {list}: elements of mode bits each, lowest first.
EMULATOR_HANDLER(execute_pack) {
  const Slot* list = warp.list(i);
  uint32_t result[4 * kLanes] = {};
  const int bits = i.mode;
  for (uint32_t element = 0; element < i.list_count; element++) {
    if (bits >= 32) {
      const int planes = bits / 32;
      for (int plane = 0; plane < planes; plane++) {
        const uint32_t* from = warp.source(list[element]) + plane * kLanes;
        std::copy(from, from + kLanes,
                  result + (element * static_cast<uint32_t>(planes) + static_cast<uint32_t>(plane)) * kLanes);
      }
      continue;
    }
    const uint32_t* from = warp.source(list[element]);
    const uint32_t at = element * static_cast<uint32_t>(bits);
    for (int lane = 0; lane < kLanes; lane++)
      result[at / 32 * kLanes + static_cast<uint32_t>(lane)] |= (from[lane] & ((1u << bits) - 1)) << (at % 32);
  }
  warp.write(i.d, result, i.out_slots, lanes);
  return Flow::next;
}

EMULATOR_HANDLER(execute_unpack) {
  const Slot* list = warp.list(i);
  const int bits = i.mode;
  // The source may be among the destinations.
  uint32_t all[4 * kLanes];
  const uint32_t* source = warp.source(i.a);
  std::copy(source, source + i.out_slots * kLanes, all);
  for (uint32_t element = 0; element < i.list_count; element++) {
    if (bits >= 32) {
      warp.write(list[element], all + element * static_cast<uint32_t>(bits / 32) * kLanes, bits / 32, lanes);
      continue;
    }
    uint32_t result[kLanes];
    const uint32_t at = element * static_cast<uint32_t>(bits);
    for (int lane = 0; lane < kLanes; lane++)
      result[lane] = (all[at / 32 * kLanes + static_cast<uint32_t>(lane)] >> (at % 32)) & ((1u << bits) - 1);
    warp.write(list[element], result, 1, lanes);
  }
  return Flow::next;
}

// %clock, %clock64, %globaltimer: the emulator counts instructions, not time.
EMULATOR_HANDLER(execute_clock) {
  const uint64_t now = warp.cta.scheduler().now() + warp.executed;
  uint32_t result[2 * kLanes];
  for (int lane = 0; lane < kLanes; lane++) {
    result[lane] = static_cast<uint32_t>(now);
    result[lane + kLanes] = static_cast<uint32_t>(now >> 32);
  }
  warp.write(i.d, result, i.out_slots, lanes);
  return Flow::next;
}

}  // namespace jax_fa4::emulator

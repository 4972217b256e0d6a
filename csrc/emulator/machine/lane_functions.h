// Arithmetic of one instruction on the 32 lanes of a warp, chosen once when a program is decoded. Registers are planes
// of 32 words; a 64-bit value is two planes, low words first; 16-bit values have zeros above.
#pragma once

#include "../ptx/program.h"

namespace jax_fa4::emulator {

enum class IntegerOperation : uint8_t {
  add,
  sub,
  mul_lo,
  mul_hi,
  mad_lo,
  mad_hi,
  divide,
  remainder,
  minimum,
  maximum,
  minimum_relu,
  maximum_relu,
  absolute,
  negate,
  bit_and,
  bit_or,
  bit_xor,
  bit_not,
  cnot,
  shift_left,
  shift_right,
  popc,
  clz,
  reverse,
  sad
};
// Null where the operation has no such type.
LaneFunction integer_function(IntegerOperation operation, Type type);
// mul.wide and mad.wide: 16 -> 32 and 32 -> 64 bits.
LaneFunction wide_function(bool add, Type type);
// bfind, bfe, bfi, lop3, prmt, shf, dp4a, dp2a, fns, mul24: by name; `mode` and `flags` of the instruction hold the
// variant.
LaneFunction bit_function(const char* name, Type type);

enum class FloatOperation : uint8_t { add, sub, mul, fma, divide, minimum, maximum, negate, absolute, copysign };
LaneFunction float_function(FloatOperation operation, Type type);
// fma.rn.f32.bf16 and the like: two narrow factors, an f32 addend; add and sub: a narrow first operand.
LaneFunction mixed_float_function(FloatOperation operation, Type narrow);
// ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh with .approx; rcp, sqrt, div with a rounding mode (exact).
LaneFunction unary_float_function(const char* name, Type type, bool exact);

// cvt; null where the pair is unknown.
LaneFunction convert_function(Type to, Type from);

enum class Comparison : uint8_t { eq, ne, lt, le, gt, ge, equ, neu, ltu, leu, gtu, geu, num, nan };
CompareFunction compare_function(Comparison comparison, Type type);

// Bits of Instruction::flags for float minimum and maximum.
inline constexpr uint8_t kPropagateNan = 1, kXorSign = 2, kThreeInputs = 4, kAbsolute = 8, kRelu = 16;

inline uint64_t wide(const uint32_t* plane, int lane) { return plane[lane] | uint64_t{plane[lane + kLanes]} << 32; }
inline void put_wide(uint32_t* plane, int lane, uint64_t value) {
  plane[lane] = static_cast<uint32_t>(value);
  plane[lane + kLanes] = static_cast<uint32_t>(value >> 32);
}

}  // namespace jax_fa4::emulator

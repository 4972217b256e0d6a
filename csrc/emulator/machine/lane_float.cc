// Floating-point operations on 32 lanes: thin loops over the units. Source: PTX ISA, "Floating Point Instructions",
// "Half Precision Floating Point Instructions", "Mixed Precision Floating Point Instructions".
#include <cmath>
#include <cstring>
#include <limits>

#include "../units/approx.h"
#include "lane_functions.h"

namespace jax_fa4::emulator {
namespace lanes {

#define EMULATOR_FLOAT(name)                                                                       \
  void name(uint32_t* out, const uint32_t* a [[maybe_unused]], const uint32_t* b [[maybe_unused]], \
            const uint32_t* c [[maybe_unused]], const Instruction& i [[maybe_unused]])

ArithmeticOptions options(const Instruction& i) { return {i.rounding, i.flush, i.saturate}; }
MinMaxOptions minmax_options(const Instruction& i) {
  return {i.flush, (i.flags & kPropagateNan) != 0, (i.flags & kXorSign) != 0, (i.flags & kAbsolute) != 0};
}

// f32 and f32x2: the packed forms are the same on two planes.
#define EMULATOR_FLOAT_PAIR(name, call)                \
  EMULATOR_FLOAT(name##_f32) {                         \
    constexpr int h = 0;                               \
    call;                                              \
  }                                                    \
  EMULATOR_FLOAT(name##_f32x2) {                       \
    for (int h = 0; h < 2 * kLanes; h += kLanes) call; \
  }
EMULATOR_FLOAT_PAIR(add, add_f32_lanes(out + h, a + h, b + h, options(i)))
EMULATOR_FLOAT_PAIR(sub, sub_f32_lanes(out + h, a + h, b + h, options(i)))
EMULATOR_FLOAT_PAIR(mul, mul_f32_lanes(out + h, a + h, b + h, options(i)))
EMULATOR_FLOAT_PAIR(fma, fma_f32_lanes(out + h, a + h, b + h, c + h, options(i)))

EMULATOR_FLOAT(minimum_f32) {
  if (i.flags & kThreeInputs) {
    for (int lane = 0; lane < kLanes; lane++) out[lane] = min3_f32(a[lane], b[lane], c[lane], minmax_options(i));
  } else {
    min_f32_lanes(out, a, b, minmax_options(i));
  }
}
EMULATOR_FLOAT(maximum_f32) {
  if (i.flags & kThreeInputs) {
    for (int lane = 0; lane < kLanes; lane++) out[lane] = max3_f32(a[lane], b[lane], c[lane], minmax_options(i));
  } else {
    max_f32_lanes(out, a, b, minmax_options(i));
  }
}
EMULATOR_FLOAT(divide_f32) {
  for (int lane = 0; lane < kLanes; lane++) {
    if (i.mode == 0)
      out[lane] = div_f32(a[lane], b[lane], options(i));
    else
      out[lane] = div_approx_f32(a[lane], b[lane], i.flush, i.mode == 2);
  }
}

uint32_t flushed(uint32_t bits, bool flush) { return flush && (bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits; }
EMULATOR_FLOAT(negate_f32) {
  for (int lane = 0; lane < kLanes; lane++) out[lane] = flushed(a[lane], i.flush) ^ 0x80000000u;
}
EMULATOR_FLOAT(absolute_f32) {
  for (int lane = 0; lane < kLanes; lane++) out[lane] = flushed(a[lane], i.flush) & 0x7fffffffu;
}
EMULATOR_FLOAT(copysign_f32) {
  for (int lane = 0; lane < kLanes; lane++) out[lane] = (a[lane] & 0x80000000u) | (b[lane] & 0x7fffffffu);
}

// ------------------------------------------------------------------------------------------------------------------
// f64
double real(const uint32_t* plane, int lane) { return std::bit_cast<double>(wide(plane, lane)); }
void put_real(uint32_t* plane, int lane, double value) { put_wide(plane, lane, std::bit_cast<uint64_t>(value)); }

#define EMULATOR_DOUBLE(name, expression)                                      \
  EMULATOR_FLOAT(name##_f64) {                                                 \
    for (int lane = 0; lane < kLanes; lane++) put_real(out, lane, expression); \
  }
EMULATOR_DOUBLE(add, add_f64(real(a, lane), real(b, lane), i.rounding))
EMULATOR_DOUBLE(sub, add_f64(real(a, lane), -real(b, lane), i.rounding))
EMULATOR_DOUBLE(mul, mul_f64(real(a, lane), real(b, lane), i.rounding))
EMULATOR_DOUBLE(fma, fma_f64(real(a, lane), real(b, lane), real(c, lane), i.rounding))
EMULATOR_DOUBLE(divide, real(a, lane) / real(b, lane))
EMULATOR_DOUBLE(minimum, std::fmin(real(a, lane), real(b, lane)))
EMULATOR_DOUBLE(maximum, std::fmax(real(a, lane), real(b, lane)))
EMULATOR_DOUBLE(negate, -real(a, lane))
EMULATOR_DOUBLE(absolute, std::fabs(real(a, lane)))
EMULATOR_DOUBLE(copysign, std::copysign(real(b, lane), real(a, lane)))
EMULATOR_DOUBLE(rcp, 1.0 / real(a, lane))
EMULATOR_DOUBLE(sqrt, std::sqrt(real(a, lane)))
EMULATOR_DOUBLE(rsqrt, 1.0 / std::sqrt(real(a, lane)))

// ---------------------------------------------------------------------------------------------------------- f16, bf16
Format half_format(Type type) { return type == Type::f16 || type == Type::f16x2 ? Format::f16 : Format::bf16; }
bool is_packed(Type type) { return type == Type::f16x2 || type == Type::bf16x2; }

template <class Function>
void half_lanes(uint32_t* out, const uint32_t* a, const uint32_t* b, Type type, Function function) {
  for (int lane = 0; lane < kLanes; lane++)
    out[lane] =
        is_packed(type) ? packed(function, a[lane], b[lane]) : function(a[lane] & 0xffff, b[lane] & 0xffff) & 0xffff;
}

#define EMULATOR_HALF(name)                                                                      \
  EMULATOR_FLOAT(name##_half) {                                                                  \
    const HalfOptions o{half_format(i.type), i.flush, i.saturate, (i.flags & kRelu) != 0};       \
    half_lanes(out, a, b, i.type, [&](uint32_t x, uint32_t y) { return name##_half(x, y, o); }); \
  }
EMULATOR_HALF(add)
EMULATOR_HALF(sub)
EMULATOR_HALF(mul)
EMULATOR_FLOAT(fma_half) {
  const HalfOptions o{half_format(i.type), i.flush, i.saturate, (i.flags & kRelu) != 0};
  const auto function = [&](uint32_t x, uint32_t y, uint32_t z) { return jax_fa4::emulator::fma_half(x, y, z, o); };
  for (int lane = 0; lane < kLanes; lane++)
    out[lane] = is_packed(i.type) ? packed(function, a[lane], b[lane], c[lane])
                                  : function(a[lane] & 0xffff, b[lane] & 0xffff, c[lane] & 0xffff) & 0xffff;
}
EMULATOR_FLOAT(minimum_half) {
  half_lanes(out, a, b, i.type,
             [&](uint32_t x, uint32_t y) { return min_half(x, y, half_format(i.type), minmax_options(i)); });
}
EMULATOR_FLOAT(maximum_half) {
  half_lanes(out, a, b, i.type,
             [&](uint32_t x, uint32_t y) { return max_half(x, y, half_format(i.type), minmax_options(i)); });
}
EMULATOR_FLOAT(negate_half) {
  const uint32_t signs = is_packed(i.type) ? 0x80008000u : 0x8000u;
  for (int lane = 0; lane < kLanes; lane++) out[lane] = a[lane] ^ signs;
}
EMULATOR_FLOAT(absolute_half) {
  const uint32_t signs = is_packed(i.type) ? 0x80008000u : 0x8000u;
  for (int lane = 0; lane < kLanes; lane++) out[lane] = a[lane] & ~signs;
}

// fma.f32.bf16: exact widening, one rounding.
void widen(uint32_t* out, const uint32_t* a, Type narrow) {
  for (int lane = 0; lane < kLanes; lane++)
    out[lane] = bits_of(narrow == Type::f16 ? f16_to_f32(a[lane] & 0xffff) : bf16_to_f32(a[lane] & 0xffff));
}
EMULATOR_FLOAT(mixed_fma) {
  Words wide_a, wide_b;
  widen(wide_a, a, i.source_type);
  widen(wide_b, b, i.source_type);
  fma_f32_lanes(out, wide_a, wide_b, c, options(i));
}
EMULATOR_FLOAT(mixed_add) {
  Words wide_a;
  widen(wide_a, a, i.source_type);
  add_f32_lanes(out, wide_a, b, options(i));
}
EMULATOR_FLOAT(mixed_sub) {
  Words wide_a;
  widen(wide_a, a, i.source_type);
  sub_f32_lanes(out, wide_a, b, options(i));
}

// --------------------------------------------------------------------------------------------------------------- unary
EMULATOR_FLOAT(ex2_f32) { ex2_approx_f32_lanes(out, a, i.flush); }
#define EMULATOR_UNARY(name, expression)                              \
  EMULATOR_FLOAT(name) {                                              \
    for (int lane = 0; lane < kLanes; lane++) out[lane] = expression; \
  }
EMULATOR_UNARY(lg2_f32, lg2_approx_f32(a[lane], i.flush))
EMULATOR_UNARY(rcp_f32_approx, rcp_approx_f32(a[lane], i.flush))
EMULATOR_UNARY(rcp_f32_exact, rcp_f32(a[lane], options(i)))
EMULATOR_UNARY(sqrt_f32_approx, sqrt_approx_f32(a[lane], i.flush))
EMULATOR_UNARY(sqrt_f32_exact, sqrt_f32(a[lane], options(i)))
EMULATOR_UNARY(rsqrt_f32, rsqrt_approx_f32(a[lane], i.flush))
EMULATOR_UNARY(sin_f32, sin_approx_f32(a[lane], i.flush))
EMULATOR_UNARY(cos_f32, cos_approx_f32(a[lane], i.flush))
EMULATOR_UNARY(tanh_f32, tanh_approx_f32(a[lane]))
EMULATOR_UNARY(ex2_half,
               is_packed(i.type)
                   ? packed1([&](uint32_t x) { return ex2_approx_half(x, half_format(i.type), i.flush); }, a[lane])
                   : ex2_approx_half(a[lane] & 0xffff, half_format(i.type), i.flush) & 0xffff)
EMULATOR_UNARY(tanh_half, is_packed(i.type)
                              ? packed1([&](uint32_t x) { return tanh_approx_half(x, half_format(i.type)); }, a[lane])
                              : tanh_approx_half(a[lane] & 0xffff, half_format(i.type)) & 0xffff)

}  // namespace lanes

namespace {

LaneFunction by_float(Type type, LaneFunction f32, LaneFunction f32x2, LaneFunction f64, LaneFunction half) {
  switch (type) {
    case Type::f32:
      return f32;
    case Type::f32x2:
      return f32x2;
    case Type::f64:
      return f64;
    case Type::f16:
    case Type::f16x2:
    case Type::bf16:
    case Type::bf16x2:
      return half;
    default:
      return nullptr;
  }
}

}  // namespace

LaneFunction float_function(FloatOperation operation, Type type) {
  using O = FloatOperation;
  switch (operation) {
    case O::add:
      return by_float(type, lanes::add_f32, lanes::add_f32x2, lanes::add_f64, lanes::add_half);
    case O::sub:
      return by_float(type, lanes::sub_f32, lanes::sub_f32x2, lanes::sub_f64, lanes::sub_half);
    case O::mul:
      return by_float(type, lanes::mul_f32, lanes::mul_f32x2, lanes::mul_f64, lanes::mul_half);
    case O::fma:
      return by_float(type, lanes::fma_f32, lanes::fma_f32x2, lanes::fma_f64, lanes::fma_half);
    case O::divide:
      return by_float(type, lanes::divide_f32, nullptr, lanes::divide_f64, nullptr);
    case O::minimum:
      return by_float(type, lanes::minimum_f32, nullptr, lanes::minimum_f64, lanes::minimum_half);
    case O::maximum:
      return by_float(type, lanes::maximum_f32, nullptr, lanes::maximum_f64, lanes::maximum_half);
    case O::negate:
      return by_float(type, lanes::negate_f32, nullptr, lanes::negate_f64, lanes::negate_half);
    case O::absolute:
      return by_float(type, lanes::absolute_f32, nullptr, lanes::absolute_f64, lanes::absolute_half);
    case O::copysign:
      return by_float(type, lanes::copysign_f32, nullptr, lanes::copysign_f64, nullptr);
  }
  return nullptr;
}

LaneFunction mixed_float_function(FloatOperation operation, Type narrow) {
  if (narrow != Type::f16 && narrow != Type::bf16) return nullptr;
  switch (operation) {
    case FloatOperation::fma:
      return lanes::mixed_fma;
    case FloatOperation::add:
      return lanes::mixed_add;
    case FloatOperation::sub:
      return lanes::mixed_sub;
    default:
      return nullptr;
  }
}

LaneFunction unary_float_function(const char* name, Type type, bool exact) {
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  const bool half = type == Type::f16 || type == Type::f16x2 || type == Type::bf16 || type == Type::bf16x2;
  if (is("ex2")) return type == Type::f32 ? lanes::ex2_f32 : half ? lanes::ex2_half : nullptr;
  if (is("tanh")) return type == Type::f32 ? lanes::tanh_f32 : half ? lanes::tanh_half : nullptr;
  if (type == Type::f64)
    return is("rcp") ? lanes::rcp_f64 : is("sqrt") ? lanes::sqrt_f64 : is("rsqrt") ? lanes::rsqrt_f64 : nullptr;
  if (type != Type::f32) return nullptr;
  if (is("rcp")) return exact ? lanes::rcp_f32_exact : lanes::rcp_f32_approx;
  if (is("sqrt")) return exact ? lanes::sqrt_f32_exact : lanes::sqrt_f32_approx;
  if (is("lg2")) return lanes::lg2_f32;
  if (is("rsqrt")) return lanes::rsqrt_f32;
  if (is("sin")) return lanes::sin_f32;
  if (is("cos")) return lanes::cos_f32;
  return nullptr;
}

}  // namespace jax_fa4::emulator

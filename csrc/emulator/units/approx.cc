// Deterministic stand-ins for the approximate instructions, inside the documented error.
#include "approx.h"

#include <cmath>

namespace jax_fa4::emulator {
namespace {

constexpr uint32_t kNan = 0x7fffffff;

EMULATOR_INLINE uint32_t flush_subnormal(uint32_t a) { return (a & 0x7f800000) == 0 ? a & 0x80000000 : a; }

// Rounds once to f32, with the canonical NaN and .ftz of the result.
uint32_t finish(double value, bool flush) {
  if (std::isnan(value)) return kNan;
  const uint32_t bits = bits_of(static_cast<float>(value));
  return flush ? flush_subnormal(bits) : bits;
}

double input(uint32_t a, bool flush) { return float_of(flush ? flush_subnormal(a) : a); }

// 2^x in f64 for |x| <= 200, straight-line so that it vectorises: x = n + f with |f| <= 1/2, Taylor polynomial of exp(f
// ln 2) to degree 10 (relative error below 2^-40), exponent added to the bits.
EMULATOR_INLINE double exp2_core(double x) {
  constexpr double shift = 0x1.8p52;  // adding it leaves the rounded integer in the low bits
  const double shifted = x + shift;
  const double f = (x - (shifted - shift)) * 0.6931471805599453;
  double p = 1.0 / 3628800;
  p = p * f + 1.0 / 362880;
  p = p * f + 1.0 / 40320;
  p = p * f + 1.0 / 5040;
  p = p * f + 1.0 / 720;
  p = p * f + 1.0 / 120;
  p = p * f + 1.0 / 24;
  p = p * f + 1.0 / 6;
  p = p * f + 0.5;
  p = p * f + 1.0;
  p = p * f + 1.0;
  return std::bit_cast<double>(std::bit_cast<uint64_t>(p) + (std::bit_cast<uint64_t>(shifted) << 52));
}

EMULATOR_INLINE uint32_t exp2_bits(uint32_t a, bool flush) {
  const float x = float_of(flush ? flush_subnormal(a) : a);
  // Beyond these bounds the result is 0 or infinite anyway; the order of the comparison lets NaN through as -200.
  float bounded = x > -200.0f ? x : -200.0f;
  bounded = bounded < 200.0f ? bounded : 200.0f;
  uint32_t bits = bits_of(static_cast<float>(exp2_core(bounded)));
  if (flush) bits = flush_subnormal(bits);
  return (a & 0x7fffffff) > 0x7f800000 ? kNan : bits;
}

}  // namespace

uint32_t ex2_approx_f32(uint32_t a, bool flush) { return exp2_bits(a, flush); }

EMULATOR_CLONES void ex2_approx_f32_lanes(uint32_t* out, const uint32_t* a, bool flush) {
  if (flush) {
    for (int i = 0; i < kLanes; i++) out[i] = exp2_bits(a[i], true);
  } else {
    for (int i = 0; i < kLanes; i++) out[i] = exp2_bits(a[i], false);
  }
}

uint32_t lg2_approx_f32(uint32_t a, bool flush) { return finish(std::log2(input(a, flush)), flush); }
uint32_t rcp_approx_f32(uint32_t a, bool flush) { return finish(1.0 / input(a, flush), flush); }
uint32_t rsqrt_approx_f32(uint32_t a, bool flush) { return finish(1.0 / std::sqrt(input(a, flush)), flush); }
uint32_t sqrt_approx_f32(uint32_t a, bool flush) { return finish(std::sqrt(input(a, flush)), flush); }
uint32_t sin_approx_f32(uint32_t a, bool flush) { return finish(std::sin(input(a, flush)), flush); }
uint32_t cos_approx_f32(uint32_t a, bool flush) { return finish(std::cos(input(a, flush)), flush); }
uint32_t tanh_approx_f32(uint32_t a) { return finish(std::tanh(input(a, false)), false); }

uint32_t div_approx_f32(uint32_t a, uint32_t b, bool flush, bool full_range) {
  const double numerator = input(a, flush), denominator = input(b, flush);
  const double magnitude = std::fabs(denominator);
  const bool hole = magnitude > 0x1p126 && magnitude < 0x1p128;
  if (hole && !full_range)  // the reciprocal underflows: 0 of the quotient's sign, NaN for an infinite numerator
    return finish(numerator * std::copysign(0.0, denominator), flush);
  return finish(numerator / denominator, flush);
}

uint32_t ex2_approx_half(uint32_t a, Format half, bool flush) {
  const bool subnormal = (a & (half == Format::f16 ? 0x7c00u : 0x7f80u)) == 0;
  const float x = flush && subnormal ? 0.0f : to_f32(half, a);
  if (std::isnan(x)) return 0x7fff;
  const uint32_t result = from_f64(half, std::exp2(double{x}));
  const bool tiny = (result & (half == Format::f16 ? 0x7c00u : 0x7f80u)) == 0;
  return flush && tiny ? 0 : result;
}

uint32_t tanh_approx_half(uint32_t a, Format half) { return from_f64(half, std::tanh(double{to_f32(half, a)})); }

}  // namespace jax_fa4::emulator

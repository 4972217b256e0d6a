// f16 and bf16 arithmetic: computed exactly as a sum of two doubles, rounded once.
#include <cmath>

#include "formats.h"

namespace jax_fa4::emulator {
namespace {

double value_of(uint32_t bits, const HalfOptions& options) {
  const bool subnormal = options.half == Format::f16 && (bits & 0x7c00) == 0;
  const uint32_t kept = options.flush && subnormal ? bits & 0x8000 : bits;
  return to_f32(options.half, kept);
}

// The double next to x + y that rounds to 16 bits as x + y itself does: where the sum is inexact, its odd neighbour.
double sum_for_rounding(double x, double y) {
  const double sum = x + y;
  const double y_part = sum - x;
  const double error = (x - (sum - y_part)) + (y - y_part);
  const uint64_t bits = std::bit_cast<uint64_t>(sum);
  if (error == 0 || (bits & 1) || !std::isfinite(sum)) return sum;
  return std::bit_cast<double>((error > 0) == (sum > 0) ? bits + 1 : bits - 1);
}

uint32_t finish(double value, const HalfOptions& options) {
  ConvertOptions convert;
  convert.relu = options.relu;
  convert.saturate = options.saturate;
  const uint32_t result = from_f64(options.half, value, convert);
  const bool subnormal = options.half == Format::f16 && (result & 0x7c00) == 0;
  return options.flush && subnormal ? result & 0x8000 : result;
}

uint32_t min_max_half(uint32_t a, uint32_t b, Format half, const MinMaxOptions& options, bool maximum) {
  MinMaxOptions wide = options;
  wide.flush = false;  // f16 subnormals are normal in f32: flush them here
  HalfOptions read;
  read.half = half;
  read.flush = options.flush;
  const uint32_t x = bits_of(static_cast<float>(value_of(a, read)));
  const uint32_t y = bits_of(static_cast<float>(value_of(b, read)));
  return from_f32(half, float_of(maximum ? max_f32(x, y, wide) : min_f32(x, y, wide)));
}

}  // namespace

uint32_t add_half(uint32_t a, uint32_t b, const HalfOptions& options) {
  return finish(sum_for_rounding(value_of(a, options), value_of(b, options)), options);
}

uint32_t sub_half(uint32_t a, uint32_t b, const HalfOptions& options) {
  return finish(sum_for_rounding(value_of(a, options), -value_of(b, options)), options);
}

uint32_t mul_half(uint32_t a, uint32_t b, const HalfOptions& options) {
  return finish(value_of(a, options) * value_of(b, options), options);  // exact: at most 22 bits
}

uint32_t fma_half(uint32_t a, uint32_t b, uint32_t c, const HalfOptions& options) {
  return finish(sum_for_rounding(value_of(a, options) * value_of(b, options), value_of(c, options)), options);
}

uint32_t min_half(uint32_t a, uint32_t b, Format half, const MinMaxOptions& options) {
  return min_max_half(a, b, half, options, false);
}

uint32_t max_half(uint32_t a, uint32_t b, Format half, const MinMaxOptions& options) {
  return min_max_half(a, b, half, options, true);
}

}  // namespace jax_fa4::emulator

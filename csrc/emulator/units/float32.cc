// f32 and f64 arithmetic in every rounding mode, minimum and maximum.
#include <cfloat>
#include <cmath>

#include "formats.h"

namespace jax_fa4::emulator {
namespace {

constexpr uint32_t kNan = 0x7fffffff;
constexpr uint32_t kSign = 0x80000000;

EMULATOR_INLINE uint32_t flush_subnormal(uint32_t a) { return (a & 0x7f800000) == 0 ? a & kSign : a; }
EMULATOR_INLINE uint32_t canonical(uint32_t a) { return (a & ~kSign) > 0x7f800000 ? kNan : a; }

inline uint32_t finish(uint32_t result, const ArithmeticOptions& options) {
  result = canonical(result);
  if (options.flush) result = flush_subnormal(result);
  if (options.saturate) {
    const float value = float_of(result);
    result = value > 0 ? bits_of(value < 1 ? value : 1.0f) : 0;  // NaN fails the comparison
  }
  return result;
}

// A real number as the sum of two doubles: `value` is the nearest double, `error` has at least the right sign.
struct Exact {
  double value;
  double error;
};

EMULATOR_INLINE Exact exact_sum(double a, double b) {
  const double sum = a + b;
  const double b_part = sum - a;
  return {sum, (a - (sum - b_part)) + (b - b_part)};
}

// Where the nearest double is not the number itself, the odd one of the two neighbours: rounding it again to a shorter
// format is then the same as rounding the number (53 bits >= 24 + 2).
double round_to_odd(const Exact& exact) {
  const uint64_t bits = std::bit_cast<uint64_t>(exact.value);
  if (exact.error == 0 || (bits & 1) || !std::isfinite(exact.value)) return exact.value;
  if (exact.value == 0) return std::copysign(0x1p-1074, exact.error);
  const bool outward = (exact.error > 0) == (exact.value > 0);
  return std::bit_cast<double>(outward ? bits + 1 : bits - 1);
}

// Bits of the float next to `odd` (of a finite number, as round_to_odd gives it) in the direction of the mode.
uint32_t round_directed(double odd, Rounding rounding) {
  const float nearest = static_cast<float>(odd);
  const double as_double = nearest;
  if (as_double == odd || std::isnan(odd)) return bits_of(nearest);
  const bool too_high = as_double > odd;
  const bool want_low = rounding == Rounding::down || (rounding == Rounding::toward_zero && odd > 0);
  if (want_low == too_high) return bits_of(std::nextafterf(nearest, too_high ? -INFINITY : INFINITY));
  return bits_of(nearest);
}

bool is_nearest(Rounding rounding) { return rounding == Rounding::nearest_even || rounding == Rounding::nearest_away; }

// x + y in a directed mode. An exact zero of operands with different signs is -0 when rounding down, else +0.
uint32_t directed_sum(double x, double y, Rounding rounding) {
  const Exact exact = exact_sum(x, y);
  if (!std::isfinite(exact.value)) return bits_of(static_cast<float>(exact.value));
  if (exact.value == 0 && exact.error == 0) {
    if (std::signbit(x) == std::signbit(y)) return std::signbit(x) ? kSign : 0;
    return rounding == Rounding::down ? kSign : 0;
  }
  return round_directed(round_to_odd(exact), rounding);
}

inline float input(uint32_t bits, bool flush) { return float_of(flush ? flush_subnormal(bits) : bits); }

uint32_t directed_add(uint32_t a, uint32_t b, const ArithmeticOptions& options) {
  return finish(directed_sum(input(a, options.flush), input(b, options.flush), options.rounding), options);
}

uint32_t directed_mul(uint32_t a, uint32_t b, const ArithmeticOptions& options) {
  const double product = double{input(a, options.flush)} * input(b, options.flush);  // exact: 48 bits
  return finish(
      std::isfinite(product) ? round_directed(product, options.rounding) : bits_of(static_cast<float>(product)),
      options);
}

uint32_t directed_fma(uint32_t a, uint32_t b, uint32_t c, const ArithmeticOptions& options) {
  const double product = double{input(a, options.flush)} * input(b, options.flush);
  return finish(directed_sum(product, input(c, options.flush), options.rounding), options);
}

}  // namespace

uint32_t add_f32(uint32_t a, uint32_t b, const ArithmeticOptions& options) {
  if (!is_nearest(options.rounding)) return directed_add(a, b, options);
  return finish(bits_of(input(a, options.flush) + input(b, options.flush)), options);
}

uint32_t sub_f32(uint32_t a, uint32_t b, const ArithmeticOptions& options) { return add_f32(a, b ^ kSign, options); }

uint32_t mul_f32(uint32_t a, uint32_t b, const ArithmeticOptions& options) {
  if (!is_nearest(options.rounding)) return directed_mul(a, b, options);
  return finish(bits_of(input(a, options.flush) * input(b, options.flush)), options);
}

uint32_t fma_f32(uint32_t a, uint32_t b, uint32_t c, const ArithmeticOptions& options) {
  if (!is_nearest(options.rounding)) return directed_fma(a, b, c, options);
  return finish(bits_of(std::fmaf(input(a, options.flush), input(b, options.flush), input(c, options.flush))), options);
}

uint32_t div_f32(uint32_t a, uint32_t b, const ArithmeticOptions& options) {
  const float numerator = input(a, options.flush), denominator = input(b, options.flush);
  if (is_nearest(options.rounding)) return finish(bits_of(numerator / denominator), options);
  const double quotient = double{numerator} / denominator;
  if (!std::isfinite(quotient) || quotient == 0) return finish(bits_of(static_cast<float>(quotient)), options);
  const double remainder = std::fma(-quotient, denominator, numerator);
  return finish(round_directed(round_to_odd({quotient, denominator > 0 ? remainder : -remainder}), options.rounding),
                options);
}

uint32_t sqrt_f32(uint32_t a, const ArithmeticOptions& options) {
  const float value = input(a, options.flush);
  if (is_nearest(options.rounding) || !(value > 0) || std::isinf(value))
    return finish(bits_of(std::sqrt(value)), options);
  const double root = std::sqrt(double{value});
  return finish(round_directed(round_to_odd({root, std::fma(-root, root, double{value})}), options.rounding), options);
}

uint32_t rcp_f32(uint32_t a, const ArithmeticOptions& options) { return div_f32(bits_of(1.0f), a, options); }

namespace {

// out = operation(a, b, c) on all lanes, to nearest: with and without .ftz as two straight loops.
template <class Operation>
EMULATOR_INLINE void nearest_lanes(uint32_t* out, const uint32_t* a, const uint32_t* b, const uint32_t* c, bool flush,
                                   Operation&& operation) {
  if (!flush) {
    for (int i = 0; i < kLanes; i++)
      out[i] = canonical(bits_of(operation(float_of(a[i]), float_of(b[i]), float_of(c[i]))));
    return;
  }
  for (int i = 0; i < kLanes; i++) {
    const float x = float_of(flush_subnormal(a[i])), y = float_of(flush_subnormal(b[i])),
                z = float_of(flush_subnormal(c[i]));
    out[i] = flush_subnormal(canonical(bits_of(operation(x, y, z))));
  }
}

// x + y rounded down, as directed_sum does it but without branches: what software floor uses in inner loops.
EMULATOR_INLINE uint32_t sum_down(double x, double y) {
  const Exact exact = exact_sum(x, y);
  const int64_t bits = std::bit_cast<int64_t>(exact.value);
  const int64_t outward = (exact.error > 0) == (exact.value > 0) ? 1 : -1;
  const bool rounds = (exact.error > 0 || exact.error < 0) && (bits & 1) == 0;  // no error known at infinity
  const double odd = std::bit_cast<double>(rounds ? bits + outward : bits);
  const float nearest = static_cast<float>(odd);
  const int32_t word = std::bit_cast<int32_t>(nearest);
  const int32_t below = nearest > 0 ? word - 1 : nearest < 0 ? word + 1 : static_cast<int32_t>(kSign | 1);
  const int32_t rounded = double{nearest} > odd ? below : word;
  const int32_t zero = std::signbit(x) || std::signbit(y) ? static_cast<int32_t>(kSign) : 0;
  return canonical(static_cast<uint32_t>(exact.value == 0 ? zero : rounded));
}

bool scalar_only(const ArithmeticOptions& options) { return options.saturate || !is_nearest(options.rounding); }

}  // namespace

EMULATOR_CLONES void add_f32_lanes(uint32_t* out, const uint32_t* a, const uint32_t* b,
                                   const ArithmeticOptions& options) {
  if (options.rounding == Rounding::down && !options.flush && !options.saturate) {
    for (int i = 0; i < kLanes; i++) out[i] = sum_down(float_of(a[i]), float_of(b[i]));
  } else if (scalar_only(options)) {
    for (int i = 0; i < kLanes; i++) out[i] = add_f32(a[i], b[i], options);
  } else {
    nearest_lanes(out, a, b, a, options.flush, [](float x, float y, float) { return x + y; });
  }
}

void sub_f32_lanes(uint32_t* out, const uint32_t* a, const uint32_t* b, const ArithmeticOptions& options) {
  Words negated;
  for (int i = 0; i < kLanes; i++) negated[i] = b[i] ^ kSign;
  add_f32_lanes(out, a, negated, options);
}

EMULATOR_CLONES void mul_f32_lanes(uint32_t* out, const uint32_t* a, const uint32_t* b,
                                   const ArithmeticOptions& options) {
  if (scalar_only(options)) {
    for (int i = 0; i < kLanes; i++) out[i] = mul_f32(a[i], b[i], options);
    return;
  }
  nearest_lanes(out, a, b, a, options.flush, [](float x, float y, float) { return x * y; });
}

EMULATOR_CLONES void fma_f32_lanes(uint32_t* out, const uint32_t* a, const uint32_t* b, const uint32_t* c,
                                   const ArithmeticOptions& options) {
  if (scalar_only(options)) {
    for (int i = 0; i < kLanes; i++) out[i] = fma_f32(a[i], b[i], c[i], options);
    return;
  }
  nearest_lanes(out, a, b, c, options.flush, [](float x, float y, float z) { return __builtin_fmaf(x, y, z); });
}

// ---------------------------------------------------------------------------------------------------------- f64

namespace {

double step(const Exact& exact, Rounding rounding) {
  if (exact.error == 0 || !std::isfinite(exact.value) || is_nearest(rounding)) return exact.value;
  const bool too_high = exact.error < 0;
  const bool want_low = rounding == Rounding::down || (rounding == Rounding::toward_zero && exact.value > 0);
  return want_low == too_high ? std::nextafter(exact.value, too_high ? -INFINITY : INFINITY) : exact.value;
}

// What a finite operation gives when the nearest double is infinite, or an exact zero of operands with different signs.
double special(double result, bool finite_operands, bool signs_differ, Rounding rounding) {
  if (std::isinf(result) && finite_operands) {
    const bool inward = rounding == Rounding::toward_zero || rounding == (result > 0 ? Rounding::down : Rounding::up);
    return inward ? std::copysign(DBL_MAX, result) : result;
  }
  return result == 0 && signs_differ && rounding == Rounding::down ? -0.0 : result;
}

}  // namespace

double add_f64(double a, double b, Rounding rounding) {
  const bool finite = std::isfinite(a) && std::isfinite(b);
  return special(step(exact_sum(a, b), rounding), finite, std::signbit(a) != std::signbit(b), rounding);
}

double mul_f64(double a, double b, Rounding rounding) {
  const double product = a * b;
  const bool finite = std::isfinite(a) && std::isfinite(b);
  return special(step({product, std::isfinite(product) ? std::fma(a, b, -product) : 0}, rounding), finite, false,
                 rounding);
}

double fma_f64(double a, double b, double c, Rounding rounding) {
  const double result = std::fma(a, b, c);
  const bool finite = std::isfinite(a) && std::isfinite(b) && std::isfinite(c);
  if (is_nearest(rounding) || !std::isfinite(result)) return special(result, finite, false, rounding);
  // a b + c - result = (product - result + c) + low, where product + low = a b exactly.
  const double product = a * b, low = std::fma(a, b, -product);
  const Exact with_c = exact_sum(product, c);
  const Exact rest = exact_sum(with_c.value - result, with_c.error + low);
  return special(step({result, rest.value + rest.error}, rounding), finite, std::signbit(product) != std::signbit(c),
                 rounding);
}

// ------------------------------------------------------------------------------------------------ min and max

namespace {

// Total order of numbers as signed integers: -0 just below +0.
EMULATOR_INLINE int32_t order_key(uint32_t a) {
  return static_cast<int32_t>(a ^ static_cast<uint32_t>(static_cast<int32_t>(a) >> 31) >> 1);
}
EMULATOR_INLINE bool is_nan(uint32_t a) { return (a & ~kSign) > 0x7f800000; }

template <bool kMaximum>
EMULATOR_INLINE uint32_t select(uint32_t a, uint32_t b, bool propagate_nan) {
  const bool take_a = kMaximum ? order_key(a) > order_key(b) : order_key(a) < order_key(b);
  uint32_t result = take_a ? a : b;
  result = is_nan(b) ? (propagate_nan ? kNan : a) : result;
  result = is_nan(a) ? (propagate_nan ? kNan : b) : result;
  return canonical(result);
}

template <bool kMaximum>
uint32_t min_max(uint32_t a, uint32_t b, const MinMaxOptions& options) {
  if (options.flush) {
    a = flush_subnormal(a);
    b = flush_subnormal(b);
  }
  if (!options.xor_sign_abs && !options.absolute) return select<kMaximum>(a, b, options.propagate_nan);
  const uint32_t magnitude = select<kMaximum>(a & ~kSign, b & ~kSign, options.propagate_nan);
  if (!options.xor_sign_abs || is_nan(magnitude)) return magnitude;
  return magnitude | ((a ^ b) & kSign);
}

template <bool kMaximum>
EMULATOR_INLINE void min_max_lanes(uint32_t* out, const uint32_t* a, const uint32_t* b, const MinMaxOptions& options) {
  if (options.flush || options.propagate_nan || options.xor_sign_abs || options.absolute) {
    for (int i = 0; i < kLanes; i++) out[i] = min_max<kMaximum>(a[i], b[i], options);
    return;
  }
  for (int i = 0; i < kLanes; i++) out[i] = select<kMaximum>(a[i], b[i], false);
}

}  // namespace

uint32_t min_f32(uint32_t a, uint32_t b, const MinMaxOptions& options) { return min_max<false>(a, b, options); }
uint32_t max_f32(uint32_t a, uint32_t b, const MinMaxOptions& options) { return min_max<true>(a, b, options); }
uint32_t min3_f32(uint32_t a, uint32_t b, uint32_t c, const MinMaxOptions& options) {
  return min_f32(min_f32(a, b, options), c, options);
}
uint32_t max3_f32(uint32_t a, uint32_t b, uint32_t c, const MinMaxOptions& options) {
  return max_f32(max_f32(a, b, options), c, options);
}
EMULATOR_CLONES void min_f32_lanes(uint32_t* out, const uint32_t* a, const uint32_t* b, const MinMaxOptions& options) {
  min_max_lanes<false>(out, a, b, options);
}
EMULATOR_CLONES void max_f32_lanes(uint32_t* out, const uint32_t* a, const uint32_t* b, const MinMaxOptions& options) {
  min_max_lanes<true>(out, a, b, options);
}

}  // namespace jax_fa4::emulator

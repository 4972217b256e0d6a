// Conversions between number formats: one rounding step for every source and target.
#include <array>
#include <cmath>
#include <limits>

#include "formats.h"

namespace jax_fa4::emulator {
namespace {

// A binary format: value = sign, 2^(biased - bias) * 1.mantissa; biased 0 is subnormal.
struct Layout {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  uint32_t largest;   // magnitude code of the largest finite value
  uint32_t infinity;  // 0: the format has none
  uint32_t nan;       // 0: the format has none
  int sign_bit;
  int position;  // left shift of the code within its word (tf32 sits in the high bits of an f32)
};

constexpr Layout layout_of(Format format) {
  switch (format) {
    case Format::f32:
      return {8, 23, 127, 0x7f7fffff, 0x7f800000, 0x7fffffff, 31, 0};
    case Format::f16:
      return {5, 10, 15, 0x7bff, 0x7c00, 0x7fff, 15, 0};
    case Format::bf16:
      return {8, 7, 127, 0x7f7f, 0x7f80, 0x7fff, 15, 0};
    case Format::tf32:
      return {8, 10, 127, 0x3fbff, 0x3fc00, 0x3ffff, 18, 13};
    case Format::e4m3:
      return {4, 3, 7, 0x7e, 0, 0x7f, 7, 0};
    case Format::e5m2:
      return {5, 2, 15, 0x7b, 0x7c, 0x7f, 7, 0};
    case Format::e3m2:
      return {3, 2, 3, 0x1f, 0, 0, 5, 0};
    case Format::e2m3:
      return {2, 3, 1, 0x1f, 0, 0, 5, 0};
    case Format::e2m1:
      return {2, 1, 1, 0x7, 0, 0, 3, 0};
    case Format::ue8m0:
      break;
  }
  return {8, 0, 127, 0xfe, 0, 0xff, 8, 0};
}

// A finite non-zero real number: significand * 2^exponent; `sticky` says that a little more than that was cut off
// below.
struct Real {
  bool negative;
  uint64_t significand;
  int exponent;
};

bool rounds_away(Rounding rounding, bool negative, bool odd, uint64_t remainder, uint64_t half) {
  switch (rounding) {
    case Rounding::nearest_even:
      return remainder > half || (remainder == half && odd);
    case Rounding::nearest_away:
      return remainder >= half;
    case Rounding::toward_zero:
      return false;
    case Rounding::down:
      return negative && remainder != 0;
    case Rounding::up:
      return !negative && remainder != 0;
  }
  return false;
}

// Magnitude code of `real` rounded to the format, overflow not yet handled (the code is then above `largest`).
uint64_t round_magnitude(const Layout& layout, const Real& real, Rounding rounding) {
  const int top = 63 - std::countl_zero(real.significand);  // position of the leading one
  const int exponent = real.exponent + top;                 // value is in [2^exponent, 2^(exponent + 1))
  const int smallest_normal = 1 - layout.bias;
  const int reference = exponent > smallest_normal ? exponent : smallest_normal;
  const int shift =
      reference - layout.mantissa_bits - real.exponent;  // weight of the last kept bit, relative to the significand's
  uint64_t kept, remainder = 0, half = 1;
  if (shift <= 0) {
    kept = real.significand << -shift;
  } else if (shift < 64) {
    kept = real.significand >> shift;
    remainder = real.significand & ((uint64_t{1} << shift) - 1);
    half = uint64_t{1} << (shift - 1);
  } else {
    kept = 0;  // below half of the smallest subnormal, except exactly at 2^63 and more for shift 64
    remainder = shift == 64 ? real.significand : 1;
    half = shift == 64 ? uint64_t{1} << 63 : 2;
  }
  if (rounds_away(rounding, real.negative, kept & 1, remainder, half)) kept++;
  // The hidden bit of a normal `kept` adds one to the exponent field.
  return (static_cast<uint64_t>(reference - smallest_normal) << layout.mantissa_bits) + kept;
}

uint32_t with_sign(const Layout& layout, uint64_t magnitude, bool negative) {
  return static_cast<uint32_t>((magnitude | (negative ? uint64_t{1} << layout.sign_bit : 0)) << layout.position);
}

uint32_t nan_of(Format format, const Layout& layout) {
  if (format == Format::tf32) return 0x7fffffff;
  return layout.nan != 0 ? layout.nan : layout.largest;
}

uint32_t infinity_of(const Layout& layout, bool negative, const ConvertOptions& options) {
  if (options.saturate_finite || layout.infinity == 0) return with_sign(layout, layout.largest, negative);
  return with_sign(layout, layout.infinity, negative);
}

uint32_t finite_to(const Layout& layout, const Real& real, const ConvertOptions& options) {
  const uint64_t code = round_magnitude(layout, real, options.rounding);
  if (code <= layout.largest) return with_sign(layout, code, real.negative);
  const bool toward_zero =
      options.rounding == Rounding::toward_zero || options.rounding == (real.negative ? Rounding::up : Rounding::down);
  if (toward_zero) return with_sign(layout, layout.largest, real.negative);
  return infinity_of(layout, real.negative, options);
}

// ue8m0 holds powers of two 2^(code - 127), no sign and no zero.
uint32_t to_power_of_two(double magnitude, Rounding rounding) {
  if (magnitude == 0) return 0;
  if (std::isinf(magnitude)) return 0xfe;
  int exponent;
  const double fraction = std::frexp(magnitude, &exponent);  // in [0.5, 1)
  int code = exponent - 1 + 127;
  if (rounding == Rounding::up && fraction != 0.5) code++;
  return code < 0 ? 0 : code > 0xfe ? 0xfe : static_cast<uint32_t>(code);
}

Real real_of(double value) {
  int exponent;
  const double fraction = std::frexp(std::fabs(value), &exponent);
  return {std::signbit(value), static_cast<uint64_t>(std::ldexp(fraction, 53)), exponent - 53};
}

uint32_t clamp_to_unit(double value, const Layout& layout, const ConvertOptions& options) {
  if (!(value > 0)) return 0;
  return finite_to(layout, real_of(value < 1 ? value : 1.0), options);
}

template <int kExponentBits, int kMantissaBits, bool kHasInfinity>
constexpr std::array<float, 256> narrow_table() {
  std::array<float, 256> table{};
  constexpr int bias = (1 << (kExponentBits - 1)) - 1;
  for (int code = 0; code < 256; code++) {
    const int biased = (code >> kMantissaBits) & ((1 << kExponentBits) - 1);
    const int mantissa = code & ((1 << kMantissaBits) - 1);
    double value = biased == 0 ? mantissa : mantissa + (1 << kMantissaBits);
    for (int i = (biased == 0 ? 1 : biased) - bias - kMantissaBits; i != 0; i += i < 0 ? 1 : -1)
      value *= i < 0 ? 0.5 : 2.0;
    float result = static_cast<float>(value);
    const bool top = biased == (1 << kExponentBits) - 1;
    if (kHasInfinity && top)
      result = mantissa == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
    else if (kExponentBits == 4 && top && mantissa == 7)
      result = std::numeric_limits<float>::quiet_NaN();
    table[static_cast<size_t>(code)] = (code >> (kExponentBits + kMantissaBits)) & 1 ? -result : result;
  }
  return table;
}
constexpr auto kE4m3 = narrow_table<4, 3, false>();
constexpr auto kE5m2 = narrow_table<5, 2, true>();
constexpr auto kE3m2 = narrow_table<3, 2, false>();
constexpr auto kE2m3 = narrow_table<2, 3, false>();
constexpr auto kE2m1 = narrow_table<2, 1, false>();

}  // namespace

float e4m3_to_f32(uint32_t bits) { return kE4m3[bits & 0xff]; }
float e5m2_to_f32(uint32_t bits) { return kE5m2[bits & 0xff]; }

uint32_t from_f64(Format format, double value, const ConvertOptions& options) {
  const Layout layout = layout_of(format);
  if (format == Format::ue8m0) return std::isnan(value) ? 0xff : to_power_of_two(std::fabs(value), options.rounding);
  if (options.saturate) return clamp_to_unit(value, layout, options);
  if (std::isnan(value)) return nan_of(format, layout);
  if (options.relu && std::signbit(value)) return 0;
  if (value == 0) return with_sign(layout, 0, std::signbit(value));
  if (std::isinf(value)) return infinity_of(layout, value < 0, options);
  const uint32_t result = finite_to(layout, real_of(value), options);
  const bool subnormal_f32 = format == Format::f32 && (result & 0x7f800000) == 0;
  return options.flush && subnormal_f32 ? result & 0x80000000 : result;
}

uint32_t from_f32(Format format, float value, const ConvertOptions& options) {
  const bool subnormal = (bits_of(value) & 0x7f800000) == 0;
  if (options.flush && subnormal) value = std::copysign(0.0f, value);
  return from_f64(format, value, options);
}

uint32_t from_integer(Format format, uint64_t magnitude, bool negative, const ConvertOptions& options) {
  const Layout layout = layout_of(format);
  if (magnitude == 0 || (options.relu && negative)) return 0;
  if (options.saturate) return negative ? 0 : finite_to(layout, {false, 1, 0}, options);
  return finite_to(layout, {negative, magnitude, 0}, options);
}

float to_f32(Format format, uint32_t bits) {
  switch (format) {
    case Format::f32:
      return float_of(bits);
    case Format::f16:
      return f16_to_f32(bits & 0xffff);
    case Format::bf16:
      return bf16_to_f32(bits & 0xffff);
    case Format::tf32:
      return float_of(bits & 0xffffe000);
    case Format::e4m3:
      return kE4m3[bits & 0xff];
    case Format::e5m2:
      return kE5m2[bits & 0xff];
    case Format::e3m2:
      return kE3m2[bits & 0x3f];
    case Format::e2m3:
      return kE2m3[bits & 0x3f];
    case Format::e2m1:
      return kE2m1[bits & 0xf];
    case Format::ue8m0:
      break;
  }
  const int code = static_cast<int>(bits & 0xff);
  return code == 0xff ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, code - 127);
}

int storage_bits(Format format) {
  switch (format) {
    case Format::f32:
    case Format::tf32:
      return 32;
    case Format::f16:
    case Format::bf16:
      return 16;
    case Format::e2m1:
      return 4;
    default:
      return 8;
  }
}

uint32_t pack2_from_f32(Format format, float upper, float lower, const ConvertOptions& options) {
  return from_f32(format, upper, options) << storage_bits(format) | from_f32(format, lower, options);
}

uint32_t unpack2_to_half(Format format, uint32_t packed, Format half, bool relu) {
  ConvertOptions options;
  options.relu = relu;
  const uint32_t upper = from_f32(half, to_f32(format, packed >> storage_bits(format)), options);
  return upper << 16 | from_f32(half, to_f32(format, packed), options);
}

double round_to_integral_f64(double a, Rounding rounding) {
  switch (rounding) {
    case Rounding::nearest_even:
      return std::nearbyint(a);
    case Rounding::nearest_away:
      return std::round(a);
    case Rounding::toward_zero:
      return std::trunc(a);
    case Rounding::down:
      return std::floor(a);
    case Rounding::up:
      return std::ceil(a);
  }
  return a;
}

uint32_t round_to_integral_f32(uint32_t a, Rounding rounding, bool flush) {
  if (flush && (a & 0x7f800000) == 0) a &= 0x80000000;
  const float value = float_of(a);
  if (std::isnan(value)) return 0x7fffffff;
  return bits_of(static_cast<float>(round_to_integral_f64(value, rounding)));
}

uint64_t integer_from_f64(double value, int bits, bool is_signed, Rounding rounding, bool source_is_f64) {
  if (std::isnan(value)) return source_is_f64 || bits == 64 ? uint64_t{1} << (bits - 1) : 0;
  const double integral = round_to_integral_f64(value, rounding);
  const double limit = std::ldexp(1.0, is_signed ? bits - 1 : bits);  // first value above the range
  if (is_signed) {
    const int64_t largest = static_cast<int64_t>(~uint64_t{0} >> (65 - bits));
    if (integral >= limit) return static_cast<uint64_t>(largest);
    if (integral < -limit) return static_cast<uint64_t>(-largest - 1);
    return static_cast<uint64_t>(static_cast<int64_t>(integral));
  }
  if (integral >= limit) return ~uint64_t{0} >> (64 - bits);
  return integral <= 0 ? 0 : static_cast<uint64_t>(integral);
}

namespace {

EMULATOR_INLINE uint32_t bf16_nearest(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded;
}

// f32 to f16, ties to even: normal results by integer rounding; subnormal ones by adding a float whose last bit weighs
// 2^-24.
EMULATOR_INLINE uint32_t f16_nearest(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
  uint32_t result = magnitude < 0x38800000 ? subnormal : normal;
  result = magnitude >= 0x477ff000 ? 0x7c00 : result;
  const uint32_t sign = (bits >> 16) & 0x8000;
  return magnitude > 0x7f800000 ? 0x7fff : (result | sign);
}

}  // namespace

EMULATOR_CLONES void pack_bf16x2_lanes(uint32_t* out, const uint32_t* upper, const uint32_t* lower) {
  for (int i = 0; i < kLanes; i++) out[i] = bf16_nearest(upper[i]) << 16 | bf16_nearest(lower[i]);
}

EMULATOR_CLONES void pack_f16x2_lanes(uint32_t* out, const uint32_t* upper, const uint32_t* lower) {
  for (int i = 0; i < kLanes; i++) out[i] = f16_nearest(upper[i]) << 16 | f16_nearest(lower[i]);
}

}  // namespace jax_fa4::emulator

// Number formats and exact scalar arithmetic of PTX: conversions, f32 arithmetic in all rounding modes, minimum and
// maximum, integer and bit helpers.
//
// Source: PTX ISA, "Data Movement and Conversion Instructions: cvt, cvt.pack", "Floating Point Instructions",
// "Half Precision Floating Point Instructions", "Integer Arithmetic Instructions", "Logic and Shift Instructions",
// "prmt". Values travel as bit patterns in 32-bit registers, as they do in the machine; a function that takes or gives
// a float says so. NaN results are the canonical NaN of their format (f32 0x7fffffff, f16 and bf16 0x7fff).
#pragma once

#include <bit>
#include <cstdint>

#include "lanes.h"

namespace jax_fa4::emulator {

// ---------------------------------------------------------------------------------------------------- conversions

// PTX suffixes .rn, .rz, .rm, .rp, .rna (ties away from zero).
enum class Rounding : uint8_t { nearest_even, toward_zero, down, up, nearest_away };

// The narrow formats that cvt reaches from f32. The fp8, fp6 and fp4 names give exponent and mantissa bits.
enum class Format : uint8_t { f32, f16, bf16, tf32, e4m3, e5m2, e3m2, e2m3, e2m1, ue8m0 };

// Modifiers of cvt. `flush` is .ftz: a subnormal f32 *input* counts as zero of its sign. `relu` turns negative results
// and NaN-free negatives into +0 (NaN stays NaN). `saturate_finite` (.satfinite) clamps to the largest finite
// magnitude; for f16, bf16 and tf32 NaN stays NaN, formats without NaN give their largest finite value with a plus
// sign. `saturate` (.sat) clamps to [0, 1] with NaN to 0.
struct ConvertOptions {
  Rounding rounding = Rounding::nearest_even;
  bool flush = false;
  bool relu = false;
  bool saturate_finite = false;
  bool saturate = false;
};

// Bits of `value` in `format`, in the low bits of the result (tf32: a full 32-bit pattern with 13 low zero bits).
uint32_t from_f32(Format format, float value, const ConvertOptions& options = {});

// The value of a bit pattern; higher bits of `bits` are ignored. Every format fits in f32, so this is exact.
float to_f32(Format format, uint32_t bits);

// Bits that one element takes in registers and memory: 32, 16, 8, 8 (6-bit formats sit in bytes), 4 for e2m1.
int storage_bits(Format format);

// cvt.<format>x2.f32 d, a, b: `a` in the upper half, `b` in the lower (halves of 16 bits, 8 bits or 4 bits).
uint32_t pack2_from_f32(Format format, float upper, float lower, const ConvertOptions& options = {});

// cvt.f16x2/bf16x2.<format>x2: the two packed elements of a narrow format as two 16-bit floats in one register.
uint32_t unpack2_to_half(Format format, uint32_t packed, Format half, bool relu = false);

// The same from f64 and from integers (sign and magnitude), rounded once. f32 as target format covers
// cvt.<rounding>.f32.f64 / .f32.s32.
uint32_t from_f64(Format format, double value, const ConvertOptions& options = {});
uint32_t from_integer(Format format, uint64_t magnitude, bool negative, const ConvertOptions& options = {});

// cvt.<rni|rzi|rmi|rpi> from any float (every f32, f16 and bf16 is exact in f64) to an integer of 8 to 64 bits, sign-
// or zero-extended to 64. Out-of-range values clamp. NaN gives 0, or 1 << (bits - 1) where source or target is 64 bits
// wide
// (`source_is_f64` says the former).
uint64_t integer_from_f64(double value, int bits, bool is_signed, Rounding rounding, bool source_is_f64 = false);
// cvt.<rni|rzi|rmi|rpi>.f32.f32 (and f64): rounded to an integral value, which stays a float.
uint32_t round_to_integral_f32(uint32_t a, Rounding rounding, bool flush);
double round_to_integral_f64(double a, Rounding rounding);

inline float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

// Exact widening of the usual formats, inline because operand gathering and lane loops call them by the million.
inline float bf16_to_f32(uint32_t bits) { return float_of(bits << 16); }
inline float f16_to_f32(uint32_t bits) {
  // Exponent and mantissa moved into f32 position; the product with 2^112 puts the bias right and normalises
  // subnormals.
  const uint32_t magnitude = (bits & 0x7fff) << 13;
  const uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
  const uint32_t result = magnitude >= 0x0f800000 ? magnitude + 0x70000000 : finite;
  return float_of(result | (bits & 0x8000) << 16);
}
float e4m3_to_f32(uint32_t bits);
float e5m2_to_f32(uint32_t bits);

// Whole-warp forms of the conversions that attention kernels use in their inner loops (.rn, no saturation).
void pack_bf16x2_lanes(uint32_t* out, const uint32_t* upper, const uint32_t* lower);
void pack_f16x2_lanes(uint32_t* out, const uint32_t* upper, const uint32_t* lower);

// ------------------------------------------------------------------------------------------------- f32 arithmetic

// `flush` is .ftz: subnormal inputs and results become zero of their sign. `saturate` is .sat: clamp to [0, 1], NaN to
// +0.
struct ArithmeticOptions {
  Rounding rounding = Rounding::nearest_even;
  bool flush = false;
  bool saturate = false;
};

// Correctly rounded in every mode: the directed modes look at the exact remainder, so tiny operands round too
// (1 + 2^-100 rounded up is 1 + 2^-23; an exact zero sum is -0 only when rounding down).
uint32_t add_f32(uint32_t a, uint32_t b, const ArithmeticOptions& options = {});
uint32_t sub_f32(uint32_t a, uint32_t b, const ArithmeticOptions& options = {});
uint32_t mul_f32(uint32_t a, uint32_t b, const ArithmeticOptions& options = {});
uint32_t fma_f32(uint32_t a, uint32_t b, uint32_t c, const ArithmeticOptions& options = {});
uint32_t div_f32(uint32_t a, uint32_t b, const ArithmeticOptions& options = {});
uint32_t sqrt_f32(uint32_t a, const ArithmeticOptions& options = {});
uint32_t rcp_f32(uint32_t a, const ArithmeticOptions& options = {});

// The same on 32 lanes. f32x2 instructions call these once for each half.
void add_f32_lanes(uint32_t* out, const uint32_t* a, const uint32_t* b, const ArithmeticOptions& options = {});
void sub_f32_lanes(uint32_t* out, const uint32_t* a, const uint32_t* b, const ArithmeticOptions& options = {});
void mul_f32_lanes(uint32_t* out, const uint32_t* a, const uint32_t* b, const ArithmeticOptions& options = {});
void fma_f32_lanes(uint32_t* out, const uint32_t* a, const uint32_t* b, const uint32_t* c,
                   const ArithmeticOptions& options = {});

// f64 in all rounding modes. The directed modes use the remainder in f64, which is exact unless a product is below
// 2^-968.
double add_f64(double a, double b, Rounding rounding);
double mul_f64(double a, double b, Rounding rounding);
double fma_f64(double a, double b, double c, Rounding rounding);

// min/max: NaN loses against a number unless `propagate_nan` (.NaN); both NaN give the canonical NaN; -0 < +0.
// `absolute` (.abs, three-input form) compares magnitudes; `xor_sign` (.xorsign.abs) gives the result the product's
// sign.
struct MinMaxOptions {
  bool flush = false;
  bool propagate_nan = false;
  bool xor_sign_abs = false;
  bool absolute = false;
};
uint32_t min_f32(uint32_t a, uint32_t b, const MinMaxOptions& options = {});
uint32_t max_f32(uint32_t a, uint32_t b, const MinMaxOptions& options = {});
uint32_t min3_f32(uint32_t a, uint32_t b, uint32_t c, const MinMaxOptions& options = {});
uint32_t max3_f32(uint32_t a, uint32_t b, uint32_t c, const MinMaxOptions& options = {});
void min_f32_lanes(uint32_t* out, const uint32_t* a, const uint32_t* b, const MinMaxOptions& options = {});
void max_f32_lanes(uint32_t* out, const uint32_t* a, const uint32_t* b, const MinMaxOptions& options = {});

// ------------------------------------------------------------------------------- f16, bf16 and their packed forms

// Scalar 16-bit arithmetic, correctly rounded to nearest even. `half` is f16 or bf16; `flush` is .ftz (f16 only).
// `relu` is fma.relu. bf16 has no .ftz and keeps subnormals.
struct HalfOptions {
  Format half = Format::f16;
  bool flush = false;
  bool saturate = false;
  bool relu = false;
};
uint32_t add_half(uint32_t a, uint32_t b, const HalfOptions& options);
uint32_t sub_half(uint32_t a, uint32_t b, const HalfOptions& options);
uint32_t mul_half(uint32_t a, uint32_t b, const HalfOptions& options);
uint32_t fma_half(uint32_t a, uint32_t b, uint32_t c, const HalfOptions& options);
uint32_t min_half(uint32_t a, uint32_t b, Format half, const MinMaxOptions& options = {});
uint32_t max_half(uint32_t a, uint32_t b, Format half, const MinMaxOptions& options = {});
// Applies a two-operand scalar function to both halves of a packed register.
template <class Function>
uint32_t packed(Function&& function, uint32_t a, uint32_t b) {
  return (function(a >> 16, b >> 16) << 16) | (function(a & 0xffff, b & 0xffff) & 0xffff);
}
template <class Function>
uint32_t packed(Function&& function, uint32_t a, uint32_t b, uint32_t c) {
  return (function(a >> 16, b >> 16, c >> 16) << 16) | (function(a & 0xffff, b & 0xffff, c & 0xffff) & 0xffff);
}

// -------------------------------------------------------------------------------------------- integers and bits

inline uint32_t mul_hi_u32(uint32_t a, uint32_t b) { return static_cast<uint32_t>((uint64_t{a} * b) >> 32); }
inline uint32_t mul_hi_s32(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((int64_t{static_cast<int32_t>(a)} * static_cast<int32_t>(b)) >> 32);
}
uint64_t mul_hi_u64(uint64_t a, uint64_t b);
uint64_t mul_hi_s64(uint64_t a, uint64_t b);

// bfe: `length` bits from `position`, sign-extended if `is_signed`; positions and lengths use their low 8 bits.
uint64_t bit_field_extract(uint64_t a, uint32_t position, uint32_t length, int bits, bool is_signed);
// bfi: `a`'s low `length` bits put into `b` at `position`.
uint64_t bit_field_insert(uint64_t a, uint64_t b, uint32_t position, uint32_t length, int bits);
// bfind: position of the highest one (signed: of the highest bit that differs from the sign); 0xffffffff if none.
// `shift_amount` (.shiftamt) gives the left shift that brings it to the top instead.
uint32_t bit_find(uint64_t a, int bits, bool is_signed, bool shift_amount);
uint64_t bit_reverse(uint64_t a, int bits);
// fns: position of the n-th set bit from `base` (n > 0 upward, n < 0 downward, 0: base itself if set), else 0xffffffff.
uint32_t find_nth_set(uint32_t mask, uint32_t base, int32_t n);

enum class PermuteMode : uint8_t { index, forward4, backward4, replicate8, edge_left, edge_right, replicate16 };
uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector, PermuteMode mode = PermuteMode::index);

inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (int i = 0; i < 8; i++)
    if ((table >> i) & 1) result |= ((i & 4) ? a : ~a) & ((i & 2) ? b : ~b) & ((i & 1) ? c : ~c);
  return result;
}
void lop3_lanes(uint32_t* out, const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t table);

// shf.l / shf.r on the 64-bit value (high:low); `wrap` takes the amount modulo 32, else it clamps to 32.
uint32_t funnel_shift_left(uint32_t low, uint32_t high, uint32_t amount, bool wrap);
uint32_t funnel_shift_right(uint32_t low, uint32_t high, uint32_t amount, bool wrap);
// shl/shr clamp the amount to the width (a shift by 32 or more gives 0, or the sign).
uint64_t shift_left(uint64_t a, uint32_t amount, int bits);
uint64_t shift_right(uint64_t a, uint32_t amount, int bits, bool is_signed);

// dp4a / dp2a: four (two) products of bytes (halves of `a` with bytes of `b`) added to `c`.
uint32_t dot4(uint32_t a, uint32_t b, uint32_t c, bool a_signed, bool b_signed);
uint32_t dot2(uint32_t a, uint32_t b, uint32_t c, bool a_signed, bool b_signed, bool high_half);

}  // namespace jax_fa4::emulator

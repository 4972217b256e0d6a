// The approximate instructions: ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh, div.approx.
//
// Source: PTX ISA, "Floating Point Instructions" (ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh, div) and "Half Precision
// Floating Point Instructions" (ex2, tanh). The hardware's tables are not public, so these functions do not give the
// chip's last bits: they give a deterministic value inside the documented error, with the documented special cases.
// Arguments and results are bit patterns; `flush` is .ftz (subnormal inputs and results become zero of their sign).
//
//   function  documented error                                         here
//   ex2       2 ulp over the full range                                 at most 0.501 ulp (f64, rounded once)
//   lg2       absolute 2^-22 for x in (0.5, 2), 2 ulp elsewhere          correctly rounded
//   rcp       1 ulp                                                    correctly rounded
//   rsqrt     relative 2^-22.9                                         correctly rounded
//   sqrt      relative 2^-23                                           correctly rounded
//   sin, cos  absolute 2^-20.5 in [-pi, pi]                              correctly rounded of the reduced argument
//   tanh      relative 2^-11 (f32), 2^-10.987 (f16), 2^-8 (bf16)        correctly rounded
//   div       2 ulp for |b| in [2^-126, 2^126]; 2^126 < |b| < 2^128: 0     correctly rounded in the range
// "Correctly rounded" is of the f64 library function: at most one last-place slip in 2^28 arguments.
#pragma once

#include <cstdint>

#include "formats.h"
#include "lanes.h"

namespace jax_fa4::emulator {

uint32_t ex2_approx_f32(uint32_t a, bool flush);
uint32_t lg2_approx_f32(uint32_t a, bool flush);
uint32_t rcp_approx_f32(uint32_t a, bool flush);
uint32_t rsqrt_approx_f32(uint32_t a, bool flush);
uint32_t sqrt_approx_f32(uint32_t a, bool flush);
uint32_t sin_approx_f32(uint32_t a, bool flush);
uint32_t cos_approx_f32(uint32_t a, bool flush);
uint32_t tanh_approx_f32(uint32_t a);
// div.approx: 0 for 2^126 < |b| < 2^128 and finite a; `full_range` (div.full) has no such hole.
uint32_t div_approx_f32(uint32_t a, uint32_t b, bool flush, bool full_range);

// f16 and bf16 forms (one 16-bit element; use packed1 for the x2 forms). ex2.approx.ftz.bf16 flushes, ex2.approx.f16
// has both.
uint32_t ex2_approx_half(uint32_t a, Format half, bool flush);
uint32_t tanh_approx_half(uint32_t a, Format half);
template <class Function>
uint32_t packed1(Function&& function, uint32_t a) {
  return (function(a >> 16) << 16) | (function(a & 0xffff) & 0xffff);
}

// 32 lanes at once, by a polynomial that vectorises; bit-equal to the scalar form.
void ex2_approx_f32_lanes(uint32_t* out, const uint32_t* a, bool flush);

}  // namespace jax_fa4::emulator

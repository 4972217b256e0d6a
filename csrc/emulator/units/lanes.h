// What every unit shares: the width of a warp and the form of register arrays.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__)
// One body, compiled for plain x86-64 and for AVX2 with fused multiply-add; the loader picks one.
#define EMULATOR_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define EMULATOR_CLONES
#endif
// Helpers of such functions must be inlined into each clone, or they stay plain x86-64.
#if defined(__GNUC__)
#define EMULATOR_INLINE inline __attribute__((always_inline))
#else
#define EMULATOR_INLINE inline
#endif

namespace jax_fa4::emulator {

inline constexpr int kLanes = 32;

// A 32-bit register of a warp: one word a lane. Lane functions compute all 32 lanes; the caller keeps the lanes that
// its execution mask names. They may be called in place (out == a).
using Words = uint32_t[kLanes];

}  // namespace jax_fa4::emulator

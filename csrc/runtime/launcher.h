// From a loaded kernel and the values of one call to cuLaunchKernelEx. Nothing here allocates, loads or waits, so a
// launch may be captured into a CUDA graph.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "runtime/registry.h"

namespace jax_fa4 {

// What one call brings; the counts are those of the recipe.
struct CallValues {
  const driver_api::DevicePointer* operands = nullptr;
  std::size_t operand_count = 0;
  const driver_api::DevicePointer* results = nullptr;
  std::size_t result_count = 0;
  const std::int64_t* integers = nullptr;
  std::size_t integer_count = 0;
  const float* floats = nullptr;
  std::size_t float_count = 0;
};

// Division of a 32-bit n by d >= 1 as a kernel does it, after Granlund and Montgomery (PLDI 1994), in the layout of
// CuTe-DSL's FastDivmodDivisor:  t = high32(n * multiplier);  n / d = (t + ((n - t) >> shift1)) >> shift2.
struct Divisor {
  std::uint32_t divisor;
  std::uint32_t multiplier;
  std::uint8_t shift1;
  std::uint8_t shift2;
  std::uint8_t padding[2];
};
static_assert(sizeof(Divisor) == 12);
Divisor MakeDivisor(std::uint32_t divisor);

// The bytes that the kernel sees as its parameters, and the pointers into them that the driver takes.
struct ParameterBlock {
  alignas(64) std::array<std::byte, kMaxParameterBytes> bytes;
  std::array<void*, kMaxParameters> pointers;
  std::size_t size = 0;
};

// Fills the block. Throws RuntimeFailure on values that the recipe cannot take: wrong counts, an integer that does not
// fit.
void FillParameters(const LaunchRecipe& recipe, const CallValues& values, ParameterBlock* block);

// Launches on `stream`; a grid with an extent of 0 launches nothing. Throws RuntimeFailure naming kernel, device,
// launch shape and the driver's error.
void Launch(const LoadedKernel& kernel, const CallValues& values, driver_api::Stream stream);

}  // namespace jax_fa4

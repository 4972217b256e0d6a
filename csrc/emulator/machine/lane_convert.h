// The forms of cvt that convert_function does not cover: packing and unpacking of two values.
#pragma once

#include "../ptx/program.h"

namespace jax_fa4::emulator {

// Bits of Instruction::flags of a cvt.
inline constexpr uint8_t kConvertRelu = 1, kConvertSaturateFinite = 2, kConvertIntegral = 4;

// cvt.<format>x2.f32 d, a, b. `plain`: round to nearest even, no modifier. Otherwise `mode` holds the format.
LaneFunction pack_function(Format format, bool plain);
// cvt.f16x2 / bf16x2 from two packed narrow values; `mode` holds the narrow format.
LaneFunction unpack_function();
// cvt.pack.sat.
LaneFunction pack_integer_function();

}  // namespace jax_fa4::emulator

// The bits of a tensor map and the driver's argument checks.
#include "tensor_map.h"

#include <cstring>
#include <iterator>

namespace jax_fa4::emulator {
namespace {

constexpr uint64_t kBaseMask = 0x01ffffffffffffff;

// How the hardware names an element type: a code, and a bit that asks for conversion to tf32.
struct HardwareElement {
  uint32_t code;
  uint32_t to_tf32;
};

HardwareElement hardware_element(Element element) {
  switch (element) {
    case Element::f64:
      return {9, 0};
    case Element::bf16:
      return {10, 0};
    case Element::f32_ftz:
      return {8, 0};
    case Element::tf32:
      return {7, 1};
    case Element::tf32_ftz:
      return {8, 1};
    default:
      return {static_cast<uint32_t>(element), 0};  // u8 .. f32 have the driver's numbers
  }
}

bool element_of(uint32_t code, uint32_t to_tf32, Element& element) {
  for (int i = 0; i <= static_cast<int>(Element::tf32_ftz); i++) {
    element = static_cast<Element>(i);
    const HardwareElement hardware = hardware_element(element);
    if (hardware.code == code && hardware.to_tf32 == to_tf32) return true;
  }
  return false;
}

struct HardwareSwizzle {
  uint32_t code;
  uint32_t atomicity;
};

HardwareSwizzle hardware_swizzle(Swizzle swizzle) {
  const uint32_t value = static_cast<uint32_t>(swizzle);
  return value <= 3 ? HardwareSwizzle{value, 0} : HardwareSwizzle{3, value - 3};
}

uint64_t bits(uint64_t word, int position, int count) { return (word >> position) & ((uint64_t{1} << count) - 1); }

bool is_float(Element element) {
  return element == Element::f16 || (element >= Element::f32 && element <= Element::tf32_ftz);
}

std::string number(uint64_t value) { return std::to_string(value); }

std::string indexed(const char* name, int index) { return std::string(name) + "[" + std::to_string(index) + "]"; }

std::string check_dimension(const TensorMap& map, int d) {
  if (map.extent[d] == 0 || map.extent[d] > uint64_t{1} << 32)
    return indexed("globalDim", d) + " is " + number(map.extent[d]) + "; accepted are 1 to 2^32.";
  if (map.box[d] == 0 || map.box[d] > 256)
    return indexed("boxDim", d) + " is " + number(map.box[d]) + "; accepted are 1 to 256.";
  if (map.element_stride[d] == 0 || map.element_stride[d] > 8)
    return indexed("elementStrides", d) + " is " + number(map.element_stride[d]) + "; accepted are 1 to 8.";
  if (d > 0 && (map.stride[d] % 16 != 0 || map.stride[d] >= uint64_t{1} << 40))
    return indexed("globalStrides", d - 1) + " is " + number(map.stride[d]) +
           " bytes; accepted are multiples of 16 below 2^40.";
  return {};
}

}  // namespace

int element_bytes(Element element) {
  switch (element) {
    case Element::u8:
      return 1;
    case Element::u16:
    case Element::f16:
    case Element::bf16:
      return 2;
    case Element::u64:
    case Element::s64:
    case Element::f64:
      return 8;
    case Element::u4x16_align8:
    case Element::u4x16_align16:
    case Element::u6x16_align16:
      return 0;
    default:
      return 4;
  }
}

const char* element_name(Element element) {
  static constexpr const char* names[] = {"u8",
                                          "u16",
                                          "u32",
                                          "s32",
                                          "u64",
                                          "s64",
                                          "f16",
                                          "f32",
                                          "f64",
                                          "bf16",
                                          "f32.ftz",
                                          "tf32",
                                          "tf32.ftz",
                                          "u4x16 (align 8)",
                                          "u4x16 (align 16)",
                                          "u6x16 (align 16)"};
  const auto index = static_cast<size_t>(element);
  return index < std::size(names) ? names[index] : "unknown";
}

int swizzle_width(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::none:
      return 0;
    case Swizzle::bytes32:
      return 32;
    case Swizzle::bytes64:
      return 64;
    default:
      return 128;
  }
}

std::string check_tensor_map(const TensorMap& map) {
  if (map.rank < 1 || map.rank > 5) return "tensorRank is " + std::to_string(map.rank) + "; accepted are 1 to 5.";
  const int size = element_bytes(map.element);
  if (size == 0 || map.element > Element::u6x16_align16)
    return std::string("tensorDataType is ") + element_name(map.element) +
           ", which is not emulated; accepted are types of whole bytes.";
  if (map.interleave != Interleave::none)
    return "interleave is " + std::to_string(static_cast<int>(map.interleave)) +
           ", which is not emulated; accepted is CU_TENSOR_MAP_INTERLEAVE_NONE.";
  if (map.swizzle > Swizzle::bytes128_atom64)
    return "swizzle is " + std::to_string(static_cast<int>(map.swizzle)) + "; accepted are 0 to 6.";
  if (map.l2_promotion > L2Promotion::bytes256)
    return "l2Promotion is " + std::to_string(static_cast<int>(map.l2_promotion)) + "; accepted are 0 to 3.";
  if (map.fill > OutOfBoundsFill::nan)
    return "oobFill is " + std::to_string(static_cast<int>(map.fill)) + "; accepted are 0 and 1.";
  if (map.fill == OutOfBoundsFill::nan && !is_float(map.element))
    return std::string("oobFill asks for NaN with tensorDataType ") + element_name(map.element) +
           "; accepted are floating-point types.";
  if (map.base % 16 != 0) return "globalAddress is " + number(map.base) + ", which is not a multiple of 16 bytes.";
  if (map.base > kBaseMask) return "globalAddress is " + number(map.base) + "; accepted are addresses below 2^57.";
  for (int d = 0; d < map.rank; d++)
    if (std::string error = check_dimension(map, d); !error.empty()) return error;
  const uint32_t inner = map.box[0] * static_cast<uint32_t>(size);
  if (inner % 16 != 0)
    return "boxDim[0] is " + number(map.box[0]) + " elements, " + number(inner) +
           " bytes; accepted are multiples of 16 bytes.";
  const int width = swizzle_width(map.swizzle);
  if (width != 0 && inner > static_cast<uint32_t>(width))
    return "boxDim[0] is " + number(map.box[0]) + " elements, " + number(inner) + " bytes, wider than the swizzle of " +
           std::to_string(width) + " bytes; use several boxes.";
  return {};
}

std::string decode_tensor_map(const void* source, TensorMap& map) {
  uint64_t word[8];
  std::memcpy(word, source, sizeof word);
  map = TensorMap{};
  map.base = word[0] & kBaseMask;
  map.rank = static_cast<int>(bits(word[1], 4, 3)) + 1;
  if (!element_of(static_cast<uint32_t>(bits(word[1], 7, 4)), static_cast<uint32_t>(bits(word[1], 16, 1)), map.element))
    return "The tensor map has element type code " + number(bits(word[1], 7, 4)) + ", which is not emulated.";
  map.interleave = static_cast<Interleave>(bits(word[1], 11, 2));
  const uint64_t swizzle = bits(word[1], 13, 2), atomicity = bits(word[1], 19, 2);
  if (atomicity != 0 && swizzle != 3)
    return "The tensor map has swizzle code " + number(swizzle) + " with atomicity " + number(atomicity) +
           "; accepted with an atomicity is the 128-byte swizzle.";
  map.swizzle = static_cast<Swizzle>(swizzle + atomicity);
  map.fill = static_cast<OutOfBoundsFill>(bits(word[1], 15, 1));
  map.l2_promotion = static_cast<L2Promotion>(bits(word[1], 17, 2));
  const uint64_t stride_low[5] = {0, bits(word[1], 32, 32), bits(word[2], 0, 32), bits(word[2], 32, 32),
                                  bits(word[3], 0, 32)};
  const uint64_t extent[5] = {bits(word[4], 0, 32), bits(word[4], 32, 32), bits(word[5], 0, 32), bits(word[5], 32, 32),
                              bits(word[6], 0, 32)};
  map.stride[0] = static_cast<uint64_t>(element_bytes(map.element));
  for (int d = 0; d < map.rank && d < 5; d++) {
    map.extent[d] = extent[d] + 1;
    map.element_stride[d] = static_cast<uint32_t>(bits(word[6], 32 + 3 * d, 3)) + 1;
    map.box[d] = static_cast<uint32_t>(d == 0 ? bits(word[6], 56, 8) : bits(word[7], 8 * (d - 1), 8)) + 1;
    if (d > 0) map.stride[d] = (bits(word[3], 32 + 4 * (d - 1), 4) << 32 | stride_low[d]) << 4;
  }
  const std::string error = check_tensor_map(map);
  return error.empty() ? error : "The tensor map is malformed: " + error;
}

std::string encode_tensor_map(const TensorMap& map, void* destination) {
  if (std::string error = check_tensor_map(map); !error.empty()) return error;
  const HardwareElement element = hardware_element(map.element);
  const HardwareSwizzle swizzle = hardware_swizzle(map.swizzle);
  uint64_t stride[5] = {}, extent[5] = {}, box[5] = {}, step[5] = {};
  for (int d = 0; d < map.rank; d++) {
    extent[d] = map.extent[d] - 1;
    box[d] = map.box[d] - 1;
    step[d] = map.element_stride[d] - 1;
    if (d > 0) stride[d] = map.stride[d] >> 4;
  }
  const auto low = [](uint64_t value) { return value & 0xffffffff; };
  uint64_t word[16] = {};
  word[0] = map.base;
  word[1] = static_cast<uint64_t>(map.rank - 1) << 4 | uint64_t{element.code} << 7 |
            static_cast<uint64_t>(map.interleave) << 11 | uint64_t{swizzle.code} << 13 |
            static_cast<uint64_t>(map.fill) << 15 | uint64_t{element.to_tf32} << 16 |
            static_cast<uint64_t>(map.l2_promotion) << 17 | uint64_t{swizzle.atomicity} << 19 | low(stride[1]) << 32;
  word[2] = low(stride[2]) | low(stride[3]) << 32;
  word[3] = low(stride[4]);
  for (int d = 1; d < 5; d++) word[3] |= (stride[d] >> 32 & 15) << (32 + 4 * (d - 1));
  word[4] = extent[0] | extent[1] << 32;
  word[5] = extent[2] | extent[3] << 32;
  word[6] = extent[4] | box[0] << 56;
  for (int d = 0; d < 5; d++) word[6] |= step[d] << (32 + 3 * d);
  for (int d = 1; d < 5; d++) word[7] |= box[d] << (8 * (d - 1));
  std::memcpy(destination, word, sizeof word);
  return {};
}

}  // namespace jax_fa4::emulator

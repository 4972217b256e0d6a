// The 128-byte tensor map that TMA instructions read: encode (the driver's cuTensorMapEncodeTiled) and decode.
//
// Sources: CUDA driver API, "Tensor Map Object Management" (arguments and their limits); PTX ISA, "Tensors" and
// "tensormap.replace" (fields). The bit positions are those that nvidia-cutlass-dsl's host code writes and the driver
// gives on sm_90:
//   word 0  base address                  word 1  bits 4-6 rank-1, 7-10 element type, 11-12 interleave, 13-14 swizzle,
//                                                 15 NaN fill, 16 tf32/ftz conversion, 17-18 L2 promotion,
//                                                 19-20 swizzle atomicity, 32-63 stride 1 / 16
//   word 2  strides 2, 3 / 16             word 3  stride 4 / 16, then bits 32-47: four high bits of each stride
//   word 4  extents 0, 1 minus one        word 5  extents 2, 3 minus one
//   word 6  extent 4 minus one, bits 32-46 element strides minus one (3 bits each), 56-63 box 0 minus one
//   word 7  boxes 1-4 minus one, 8 bits each
// The upper 64 bytes are not used; host code may leave them unwritten.
#pragma once

#include <cstdint>
#include <string>

namespace jax_fa4::emulator {

// Values of CUtensorMapDataType.
enum class Element : uint8_t {
  u8,
  u16,
  u32,
  s32,
  u64,
  s64,
  f16,
  f32,
  f64,
  bf16,
  f32_ftz,
  tf32,
  tf32_ftz,
  u4x16_align8,
  u4x16_align16,
  u6x16_align16
};
// Values of CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill.
enum class Interleave : uint8_t { none, bytes16, bytes32 };
enum class Swizzle : uint8_t {
  none,
  bytes32,
  bytes64,
  bytes128,
  bytes128_atom32,
  bytes128_atom32_flip8,
  bytes128_atom64
};
enum class L2Promotion : uint8_t { none, bytes64, bytes128, bytes256 };
enum class OutOfBoundsFill : uint8_t { zero, nan };

struct TensorMap {
  uint64_t base = 0;  // global address, bytes
  int rank = 0;       // 1..5
  Element element = Element::u8;
  Interleave interleave = Interleave::none;
  Swizzle swizzle = Swizzle::none;
  L2Promotion l2_promotion = L2Promotion::none;
  OutOfBoundsFill fill = OutOfBoundsFill::zero;
  uint64_t extent[5] = {1, 1, 1, 1, 1};          // elements, dimension 0 innermost
  uint64_t stride[5] = {0, 0, 0, 0, 0};          // bytes; stride[0] is the element size
  uint32_t box[5] = {1, 1, 1, 1, 1};             // elements
  uint32_t element_stride[5] = {1, 1, 1, 1, 1};  // 1..8; the box then holds ceil(box / element_stride) elements
};

// Bytes of one element in global and shared memory (packed 4- and 6-bit types: 0, they have no whole-byte element).
int element_bytes(Element element);
const char* element_name(Element element);

// Width of the swizzle pattern in bytes (none: 0): the widest inner box it takes.
int swizzle_width(Swizzle swizzle);

// All functions that can fail return an empty string, or one sentence that names the argument and its value.

// Reads a map of 128 bytes (the first 64 matter).
std::string decode_tensor_map(const void* words, TensorMap& map);

// Writes 128 bytes after checking what the driver checks. The arguments of cuTensorMapEncodeTiled are the fields of
// `map` (global strides in stride[1..rank-1]; stride[0] is ignored).
std::string encode_tensor_map(const TensorMap& map, void* words);

// The driver's checks alone: rank, alignment of base and strides, limits of extents, boxes and element strides, box
// against swizzle.
std::string check_tensor_map(const TensorMap& map);

}  // namespace jax_fa4::emulator

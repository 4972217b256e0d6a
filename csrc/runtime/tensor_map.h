// Tensor maps (CUtensorMap): how the TMA unit sees a tensor in global memory. EncodeTensorMap makes the words in host
// arithmetic, on each call; EncodeTensorMapWithDriver asks cuTensorMapEncodeTiled for the same, for comparison.
//
// The bits that matter, as read off maps that the driver and nvidia-cutlass-dsl make (word: bits: content):
//   0: 0-63 address
//   1: 4-6 rank - 1; 7-10 element code; 11-12 interleave; 13-14 swizzle; 15 fill with NaN; 16 round to tf32; 17-18 L2;
//      32-63 stride of dimension 1, in units of 16 bytes, as all strides are
//   2: 0-31 and 32-63 strides of dimensions 2 and 3
//   3: 0-31 stride of dimension 4; 32-47 four more high bits of each of the four strides
//   4, 5, 6: extents - 1 of dimensions 0 to 4, 32 bits each; 6: 32-46 element strides - 1, 3 bits each
//   6: 56-63 and 7: 0-31 box extents - 1, 8 bits each
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "runtime/driver.h"
#include "runtime/driver_api.h"

namespace jax_fa4 {

inline constexpr std::size_t kMaxTensorMapRank = 5;

enum class ElementType { kUint8, kInt32, kFloat16, kBfloat16, kFloat32, kTfloat32 };
enum class Swizzle { kNone = 0, k32Bytes = 1, k64Bytes = 2, k128Bytes = 3 };
enum class L2Promotion { kNone = 0, k64Bytes = 1, k128Bytes = 2, k256Bytes = 3 };

// What is known of a map before the call. `extents` and `strides` are positions in the call's list of integers:
// dimension 0 is the contiguous one and has no stride; strides are in bytes.
struct TensorMapRecipe {
  bool is_result = false;  // which list `buffer` counts in: the call's results or its operands
  std::uint32_t buffer = 0;
  ElementType element = ElementType::kBfloat16;
  std::vector<std::uint32_t> extents;
  std::vector<std::uint32_t> strides;
  std::vector<std::uint32_t> box;  // in elements
  Swizzle swizzle = Swizzle::kNone;
  L2Promotion l2 = L2Promotion::kNone;
};

// The values of one map in one call.
struct TensorMapValues {
  driver_api::DevicePointer address = 0;
  std::array<std::uint64_t, kMaxTensorMapRank> extents{};
  std::array<std::uint64_t, kMaxTensorMapRank> strides{};  // [0] unused
};

std::size_t BytesOf(ElementType element);

// Refuses what can be known to be wrong before the call: rank, box extents, a box wider than its swizzle.
void CheckRecipe(const TensorMapRecipe& recipe);

// Gathers a call's values. A dimension of extent 1 takes any stride, so a stride that the unit would refuse is replaced
// there. Throws RuntimeFailure on a misaligned address or stride, and on an extent out of range.
TensorMapValues GatherValues(const TensorMapRecipe& recipe, driver_api::DevicePointer address,
                             const std::int64_t* integers);

void EncodeTensorMap(const TensorMapRecipe& recipe, const TensorMapValues& values, driver_api::TensorMapWords* map);
void EncodeTensorMapWithDriver(const Driver& driver, const TensorMapRecipe& recipe, const TensorMapValues& values,
                               driver_api::TensorMapWords* map);

}  // namespace jax_fa4

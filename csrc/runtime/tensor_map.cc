#include "runtime/tensor_map.h"

#include <string>

namespace jax_fa4 {
namespace {

struct ElementFacts {
  std::uint64_t code;     // in the map's words
  bool round_to_tf32;     // likewise
  int driver_enumerator;  // CUtensorMapDataType
  std::size_t bytes;
};

ElementFacts FactsOf(ElementType element) {
  switch (element) {
    case ElementType::kUint8:
      return {0, false, 0, 1};
    case ElementType::kInt32:
      return {3, false, 3, 4};
    case ElementType::kFloat16:
      return {6, false, 6, 2};
    case ElementType::kBfloat16:
      return {10, false, 9, 2};
    case ElementType::kFloat32:
      return {7, false, 7, 4};
    case ElementType::kTfloat32:
      return {7, true, 11, 4};
  }
  throw RuntimeFailure("A tensor map has an element type of no known number.");
}

std::uint64_t Low(std::uint64_t value, unsigned bits) { return value & ((std::uint64_t{1} << bits) - 1); }

}  // namespace

std::size_t BytesOf(ElementType element) { return FactsOf(element).bytes; }

void CheckRecipe(const TensorMapRecipe& recipe) {
  const std::size_t rank = recipe.extents.size();
  if (rank < 1 || rank > kMaxTensorMapRank || recipe.strides.size() != rank - 1 || recipe.box.size() != rank) {
    throw RuntimeFailure("A tensor map has " + std::to_string(rank) + " extents, " +
                         std::to_string(recipe.strides.size()) + " strides and " + std::to_string(recipe.box.size()) +
                         " box extents; it takes 1 to 5 extents, one stride fewer, and as many box extents.");
  }
  for (std::uint32_t extent : recipe.box) {
    if (extent < 1 || extent > 256) {
      throw RuntimeFailure("A tensor map's box has an extent of " + std::to_string(extent) + "; it takes 1 to 256.");
    }
  }
  const std::size_t inner_bytes = recipe.box[0] * BytesOf(recipe.element);
  const std::size_t span_bytes = recipe.swizzle == Swizzle::kNone ? 0 : std::size_t{16} << int(recipe.swizzle);
  if (inner_bytes % 16 != 0 || (span_bytes != 0 && inner_bytes > span_bytes)) {
    throw RuntimeFailure("A tensor map's box is " + std::to_string(inner_bytes) +
                         " bytes wide; it takes a multiple of 16, at most the swizzle's span (" +
                         std::to_string(span_bytes) + " bytes, 0: no swizzle).");
  }
}

TensorMapValues GatherValues(const TensorMapRecipe& recipe, driver_api::DevicePointer address,
                             const std::int64_t* integers) {
  TensorMapValues values;
  values.address = address;
  if (address % 16 != 0) throw RuntimeFailure("A tensor map's buffer is not aligned to 16 bytes.");
  std::uint64_t dense_bytes = BytesOf(recipe.element);
  for (std::size_t i = 0; i < recipe.extents.size(); ++i) {
    const std::int64_t extent = integers[recipe.extents[i]];
    if (extent < 1 || extent > (std::int64_t{1} << 32)) {
      throw RuntimeFailure("A tensor map has an extent of " + std::to_string(extent) + "; it takes 1 to 2^32.");
    }
    values.extents[i] = static_cast<std::uint64_t>(extent);
    if (i > 0) {
      std::int64_t stride = integers[recipe.strides[i - 1]];
      if (extent == 1) stride = static_cast<std::int64_t>((dense_bytes + 15) / 16 * 16);
      if (stride <= 0 || stride % 16 != 0 || stride >= (std::int64_t{1} << 40)) {
        throw RuntimeFailure("A tensor map has a stride of " + std::to_string(stride) +
                             " bytes; it takes multiples of 16 below 2^40.");
      }
      values.strides[i] = static_cast<std::uint64_t>(stride);
    }
    dense_bytes = (i == 0 ? dense_bytes : values.strides[i]) * values.extents[i];
  }
  return values;
}

void EncodeTensorMap(const TensorMapRecipe& recipe, const TensorMapValues& values, driver_api::TensorMapWords* map) {
  const ElementFacts facts = FactsOf(recipe.element);
  const std::size_t rank = recipe.extents.size();
  std::array<std::uint64_t, kMaxTensorMapRank> units{};  // strides in 16 bytes
  std::array<std::uint64_t, kMaxTensorMapRank> last{};   // extents - 1
  std::array<std::uint64_t, kMaxTensorMapRank> box{};    // box extents - 1
  for (std::size_t i = 0; i < rank; ++i) {
    units[i] = values.strides[i] / 16;
    last[i] = values.extents[i] - 1;
    box[i] = recipe.box[i] - 1;
  }
  auto& words = map->words;
  for (std::uint64_t& word : words) word = 0;
  words[0] = values.address;
  words[1] = (rank - 1) << 4 | facts.code << 7 | std::uint64_t(recipe.swizzle) << 13 |
             std::uint64_t(facts.round_to_tf32) << 16 | std::uint64_t(recipe.l2) << 17 | Low(units[1], 32) << 32;
  words[2] = Low(units[2], 32) | Low(units[3], 32) << 32;
  words[3] = Low(units[4], 32);
  for (std::size_t i = 1; i < kMaxTensorMapRank; ++i) words[3] |= (units[i] >> 32 & 15) << (32 + 4 * (i - 1));
  words[4] = last[0] | last[1] << 32;
  words[5] = last[2] | last[3] << 32;
  words[6] = last[4] | box[0] << 56;  // element strides of 1 are stored as 0
  words[7] = box[1] | box[2] << 8 | box[3] << 16 | box[4] << 24;
}

void EncodeTensorMapWithDriver(const Driver& driver, const TensorMapRecipe& recipe, const TensorMapValues& values,
                               driver_api::TensorMapWords* map) {
  if (driver.tensor_map_encode_tiled == nullptr) {
    throw RuntimeFailure("Driver '" + driver.name() + "' has no function cuTensorMapEncodeTiled.");
  }
  const std::array<std::uint32_t, kMaxTensorMapRank> element_strides{1, 1, 1, 1, 1};
  driver.Check(driver.tensor_map_encode_tiled(
                   map, FactsOf(recipe.element).driver_enumerator, static_cast<unsigned>(recipe.extents.size()),
                   reinterpret_cast<void*>(values.address), values.extents.data(), values.strides.data() + 1,
                   recipe.box.data(), element_strides.data(), 0, int(recipe.swizzle), int(recipe.l2), 0),
               "Encoding a tensor map");
}

}  // namespace jax_fa4

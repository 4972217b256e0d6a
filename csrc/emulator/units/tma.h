// Where a TMA tile copy reads and writes: the walk of a box as contiguous runs, swizzles, fill, and reductions.
//
// Sources: PTX ISA, "Tensors" (tiled mode, bounding box, out-of-bound access, swizzling modes) and
// "cp.async.bulk.tensor", "cp.reduce.async.bulk(.tensor)". im2col and scatter/gather modes are not modelled.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "tensor_map.h"

namespace jax_fa4::emulator {

// XOR of absolute shared-memory address bits: 32B: bit 4 ^= 7; 64B: 4-5 ^= 7-8; 128B: 4-6 ^= 7-9; 128B with 32-byte
// atoms: 5-6 ^= 7-8 (with 8-byte flip: bit 3 ^= 7 as well); 128B with 64-byte atoms: 6 ^= 7.
inline uint32_t swizzle_address(uint32_t address, Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::none:
      return address;
    case Swizzle::bytes32:
      return address ^ ((address >> 3) & 0x10);
    case Swizzle::bytes64:
      return address ^ ((address >> 3) & 0x30);
    case Swizzle::bytes128:
      return address ^ ((address >> 3) & 0x70);
    case Swizzle::bytes128_atom32:
      return address ^ ((address >> 2) & 0x60);
    case Swizzle::bytes128_atom32_flip8:
      return address ^ ((address >> 2) & 0x60) ^ ((address >> 4) & 0x8);
    case Swizzle::bytes128_atom64:
      return address ^ ((address >> 1) & 0x40);
  }
  return address;
}

// A piece of a box that is contiguous in global and in shared memory. At most one swizzle atom long where swizzled.
struct BoxRun {
  uint64_t global_address;  // meaningless unless in_bounds
  uint32_t shared_address;  // absolute, swizzle applied
  uint32_t bytes;
  bool in_bounds;  // false: loads fill, stores and reductions drop
};

// Elements that the box has along a dimension: its size over the element stride, rounded up. Dimension 0 has no element
// stride (the driver ignores it without interleave).
uint32_t box_count(const TensorMap& map, int dimension);

// Bytes that the box takes in shared memory; also what complete_tx counts, out-of-bounds parts included.
uint32_t box_bytes(const TensorMap& map);

// What the instruction checks: rank of the instruction against the map, alignment of the shared address (128 bytes), of
// the global address, an inner box of a multiple of 16 bytes that fits the swizzle. Empty, or one sentence.
std::string check_tile_copy(const TensorMap& map, int instruction_rank, uint32_t shared_address);

// Calls visit(const BoxRun&) for every run, inner dimension first, then in order of box rows. `coordinates` has rank
// entries, dimension 0 first, and may be negative or beyond the extents. The map must have passed check_tile_copy.
template <class Visit>
void walk_box(const TensorMap& map, const int32_t* coordinates, uint32_t shared_address, Visit&& visit);

// One row of the box (dimension 0) before swizzling: what a range check of global memory wants.
struct BoxRow {
  uint64_t global_address;         // of the first in-bounds element
  uint32_t global_bytes;           // contiguous; 0: nothing of the row is in bounds
  uint32_t linear_shared_address;  // of the row's first element, swizzle not applied
};
template <class Visit>
void walk_box_rows(const TensorMap& map, const int32_t* coordinates, uint32_t shared_address, Visit&& visit);

// Writes what an out-of-bounds load leaves: zeros, or the element type's NaN.
void fill_out_of_bounds(const TensorMap& map, void* shared, uint32_t bytes);

// What a load leaves in shared memory besides the bytes: tf32 and ftz element types convert on the way (f32_ftz
// flushes, tf32 rounds to nearest, tf32_ftz does both). No change for other types.
void convert_loaded(const TensorMap& map, void* shared, uint32_t bytes);

// Reductions: and/or/xor on integers of 32 and 64 bits; add, min and max as the instruction lists them; inc and dec on
// u32 (wrap at the source's value).
enum class Reduction : uint8_t { add, min, max, inc, dec, bit_and, bit_or, bit_xor };
std::string check_reduction(Reduction reduction, Element element);
// destination[i] = destination[i] op source[i] for bytes / element size elements. Floating-point additions round to
// nearest even and keep subnormals.
void reduce_elements(Reduction reduction, Element element, void* destination, const void* source, uint32_t bytes);

// ------------------------------------------------------------------------------------------------ implementation

namespace detail {

// In-bounds part of a box row: box indices [first, last) of dimension 0.
struct InnerRange {
  uint32_t first;
  uint32_t last;
};
InnerRange inner_range(const TensorMap& map, int32_t coordinate);

// Longest stretch of unswizzled shared memory that swizzling keeps together; 0: no limit.
uint32_t swizzle_atom(Swizzle swizzle);

}  // namespace detail

template <class Visit>
void walk_box_rows(const TensorMap& map, const int32_t* coordinates, uint32_t shared_address, Visit&& visit) {
  const uint32_t size = static_cast<uint32_t>(map.stride[0]);
  const detail::InnerRange inner = detail::inner_range(map, coordinates[0]);
  const uint64_t inner_offset = static_cast<uint64_t>(coordinates[0] + int64_t{inner.first}) * size;
  uint32_t index[5] = {0, 0, 0, 0, 0}, counts[5];
  for (int d = 0; d < map.rank; d++) counts[d] = box_count(map, d);
  uint32_t linear = shared_address;
  for (;;) {
    bool inside = inner.first < inner.last;
    uint64_t address = map.base + inner_offset;
    for (int d = 1; d < map.rank; d++) {
      const int64_t at = coordinates[d] + int64_t{index[d]} * map.element_stride[d];
      inside = inside && at >= 0 && static_cast<uint64_t>(at) < map.extent[d];
      address += static_cast<uint64_t>(at) * map.stride[d];
    }
    visit(BoxRow{address, inside ? (inner.last - inner.first) * size : 0, linear});
    linear += map.box[0] * size;
    int d = 1;
    while (d < map.rank && ++index[d] == counts[d]) index[d++] = 0;
    if (d >= map.rank) return;
  }
}

template <class Visit>
void walk_box(const TensorMap& map, const int32_t* coordinates, uint32_t shared_address, Visit&& visit) {
  const uint32_t size = static_cast<uint32_t>(map.stride[0]);
  const uint32_t row_bytes = map.box[0] * size;
  const detail::InnerRange inner = detail::inner_range(map, coordinates[0]);
  const uint32_t first = inner.first * size, last = inner.last * size;  // in-bounds bytes of a row
  const uint32_t atom = detail::swizzle_atom(map.swizzle);
  walk_box_rows(map, coordinates, shared_address, [&](const BoxRow& row) {
    const bool inside = row.global_bytes != 0;
    uint32_t at = 0;
    while (at < row_bytes) {
      // A run ends at the row's end, at a swizzle atom, or at the edge of the tensor.
      const uint32_t linear = row.linear_shared_address + at;
      const bool in_bounds = inside && at >= first && at < last;
      uint32_t end = row_bytes;
      if (atom != 0) end = std::min(end, at + atom - linear % atom);
      if (inside && at < first) end = std::min(end, first);
      if (in_bounds) end = std::min(end, last);
      visit(BoxRun{in_bounds ? row.global_address + (at - first) : 0, swizzle_address(linear, map.swizzle), end - at,
                   in_bounds});
      at = end;
    }
  });
}

}  // namespace jax_fa4::emulator

// Tensor memory of one CTA: 128 lanes x 512 columns of 32 bits, the allocator, and who touched what. Accesses are
// recorded per column and 16 lanes: that is the finest piece that an instruction can name.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "../units/matrix.h"
#include "access_record.h"

namespace jax_fa4::emulator {

class TensorMemory {
 public:
  explicit TensorMemory(bool track);

  uint32_t* data() { return cells_.data(); }

  // First column of `columns` (a power of two from 32 to 512) free ones, or -1.
  int allocate(int columns);
  // False if exactly this was not allocated.
  bool release(int column, int columns);
  bool allocated(int column, int columns) const;
  int allocated_columns() const;

  bool relinquished = false;
  uint32_t pair_allocations = 0;  // tcgen05.alloc.cta_group::2 that this CTA has come to

  // Records an access. `first_piece` and `pieces` count 16 lanes each; `offset` of a conflict is piece << 16 | column.
  Conflict touch(int first_piece, int pieces, int column, int columns, const Actor& actor, bool writes);

 private:
  bool tracked_;
  std::vector<uint32_t> cells_;
  AccessRecord record_;                          // a word a column of each piece
  std::array<int16_t, kTensorColumns> owner_{};  // first column + 1 of the allocation that holds the column; 0: free
};

}  // namespace jax_fa4::emulator

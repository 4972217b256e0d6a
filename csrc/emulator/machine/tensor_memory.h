// Tensor memory of one CTA: 128 lanes x 512 columns of 32 bits, the allocator, and who touched what. Accesses are
// recorded per column and 16 lanes: that is the finest piece that an instruction can name.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "../units/matrix.h"
#include "shared_memory.h"

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

  // `first_piece` and `pieces` count 16 lanes each. `offset` of a conflict is piece << 16 | column.
  Conflict read(int first_piece, int pieces, int column, int columns, const Actor& actor);
  Conflict write(int first_piece, int pieces, int column, int columns, const Actor& actor);

 private:
  struct Cell {
    Stamp writer, reader;
    bool written = false;
  };
  static constexpr int kPieces = kTensorLanes / 16;
  Cell& cell(int piece, int column) { return track_[static_cast<size_t>(piece * kTensorColumns + column)]; }

  bool tracked_;
  std::vector<uint32_t> cells_;
  std::vector<Cell> track_;
  std::array<int16_t, kTensorColumns> owner_{};  // first column + 1 of the allocation that holds the column; 0: free
};

}  // namespace jax_fa4::emulator

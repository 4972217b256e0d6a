// The dense product behind every MMA.
#include <cstring>

#include "matrix.h"

namespace jax_fa4::emulator {
namespace {

constexpr int kTile = 32;  // columns of D held in registers: 4 rows x 32 floats are 16 AVX2 registers' worth with B

// Adds the product of `kRows` rows of A with `width` columns of B to sums in place; k outermost, so that every sum is
// taken in order of k.
template <int kRows>
inline void add_tile(float* const* d, int first_column, int width, int k, const float* a, size_t a_pitch,
                     const float* b, size_t b_pitch, bool accumulate) {
  float sums[kRows][kTile] = {};
  if (accumulate)
    for (int r = 0; r < kRows; r++)
      std::memcpy(sums[r], d[r] + first_column, sizeof(float) * static_cast<size_t>(width));
  for (int depth = 0; depth < k; depth++) {
    float row[kTile] = {};
    std::memcpy(row, b + static_cast<size_t>(depth) * b_pitch + first_column,
                sizeof(float) * static_cast<size_t>(width));
    for (int r = 0; r < kRows; r++) {
      const float factor = a[static_cast<size_t>(r) * a_pitch + depth];
      for (int j = 0; j < kTile; j++) sums[r][j] = __builtin_fmaf(factor, row[j], sums[r][j]);
    }
  }
  for (int r = 0; r < kRows; r++) std::memcpy(d[r] + first_column, sums[r], sizeof(float) * static_cast<size_t>(width));
}

}  // namespace

EMULATOR_CLONES void multiply_rows_pitched(float* const* d, int rows, int n, int k, const float* a, const float* b,
                                           size_t b_pitch, bool accumulate) {
  const size_t a_pitch = static_cast<size_t>(k);
  for (int column = 0; column < n; column += kTile) {
    const int width = n - column < kTile ? n - column : kTile;
    int row = 0;
    while (row < rows) {
      if (d[row] == nullptr) {
        row++;
        continue;
      }
      const bool pair = row + 1 < rows && d[row + 1] != nullptr;
      if (pair)
        add_tile<2>(d + row, column, width, k, a + static_cast<size_t>(row) * a_pitch, a_pitch, b, b_pitch, accumulate);
      else
        add_tile<1>(d + row, column, width, k, a + static_cast<size_t>(row) * a_pitch, a_pitch, b, b_pitch, accumulate);
      row += pair ? 2 : 1;
    }
  }
}

void multiply_rows(float* const* d, int rows, int n, int k, const float* a, const float* b, bool accumulate) {
  multiply_rows_pitched(d, rows, n, k, a, b, static_cast<size_t>(n), accumulate);
}

}  // namespace jax_fa4::emulator

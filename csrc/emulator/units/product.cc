// The dense product behind every MMA.
#include <cmath>
#include <cstring>

#include "matrix.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define EMULATOR_HAS_AVX2 1
#endif

namespace jax_fa4::emulator {
namespace {

struct Product {
  float* const* d;
  int n, k;
  const float* a;
  const float* b;
  size_t b_pitch;
  bool accumulate;
};

// One element of D, in order of k.
float element(const Product& product, int row, int column) {
  float sum = product.accumulate ? product.d[row][column] : 0.0f;
  for (int depth = 0; depth < product.k; depth++)
    sum = std::fmaf(product.a[static_cast<size_t>(row) * product.k + depth],
                    product.b[depth * product.b_pitch + column], sum);
  return sum;
}

void portable_rows(const Product& product, int first_row, int rows, int first_column) {
  for (int row = first_row; row < first_row + rows; row++)
    for (int column = first_column; product.d[row] != nullptr && column < product.n; column++)
      product.d[row][column] = element(product, row, column);
}

#ifdef EMULATOR_HAS_AVX2

// Sums of some rows and columns stay in registers over k. With 16 registers four rows of two vectors, with 32 eight.
struct Avx2 {
  static constexpr int kRows = 4, kColumns = 16;
};
struct Avx512 {
  static constexpr int kRows = 8, kColumns = 32;
};

__attribute__((target("avx2,fma"))) void tile(Avx2, const Product& product, int row, int column) {
  constexpr int kRows = Avx2::kRows;
  __m256 sums[kRows][2];
  for (int r = 0; r < kRows; r++)
    for (int half = 0; half < 2; half++)
      sums[r][half] =
          product.accumulate ? _mm256_loadu_ps(product.d[row + r] + column + 8 * half) : _mm256_setzero_ps();
  const float* a = product.a + static_cast<size_t>(row) * product.k;
  const float* b = product.b + column;
  for (int depth = 0; depth < product.k; depth++, b += product.b_pitch) {
    const __m256 low = _mm256_loadu_ps(b), high = _mm256_loadu_ps(b + 8);
    for (int r = 0; r < kRows; r++) {
      const __m256 factor = _mm256_broadcast_ss(a + static_cast<size_t>(r) * product.k + depth);
      sums[r][0] = _mm256_fmadd_ps(factor, low, sums[r][0]);
      sums[r][1] = _mm256_fmadd_ps(factor, high, sums[r][1]);
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int half = 0; half < 2; half++) _mm256_storeu_ps(product.d[row + r] + column + 8 * half, sums[r][half]);
}

__attribute__((target("avx512f"))) void tile(Avx512, const Product& product, int row, int column) {
  constexpr int kRows = Avx512::kRows;
  __m512 sums[kRows][2];
  for (int r = 0; r < kRows; r++)
    for (int half = 0; half < 2; half++)
      sums[r][half] =
          product.accumulate ? _mm512_loadu_ps(product.d[row + r] + column + 16 * half) : _mm512_setzero_ps();
  const float* a = product.a + static_cast<size_t>(row) * product.k;
  const float* b = product.b + column;
  for (int depth = 0; depth < product.k; depth++, b += product.b_pitch) {
    const __m512 low = _mm512_loadu_ps(b), high = _mm512_loadu_ps(b + 16);
    for (int r = 0; r < kRows; r++) {
      const __m512 factor = _mm512_set1_ps(a[static_cast<size_t>(r) * product.k + depth]);
      sums[r][0] = _mm512_fmadd_ps(factor, low, sums[r][0]);
      sums[r][1] = _mm512_fmadd_ps(factor, high, sums[r][1]);
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int half = 0; half < 2; half++) _mm512_storeu_ps(product.d[row + r] + column + 16 * half, sums[r][half]);
}

bool all_present(const Product& product, int row, int rows) {
  for (int r = 0; r < rows; r++)
    if (product.d[row + r] == nullptr) return false;
  return true;
}

// From a column that is a multiple of the vectors' columns; what does not fill them is left to the next narrower way.
void avx2_rows(const Product& product, int row, int rows, int first_column) {
  const int whole = product.n - (product.n - first_column) % Avx2::kColumns, end = row + rows;
  for (; row + Avx2::kRows <= end; row += Avx2::kRows) {
    if (!all_present(product, row, Avx2::kRows)) {
      portable_rows(product, row, Avx2::kRows, first_column);
      continue;
    }
    for (int column = first_column; column < whole; column += Avx2::kColumns) tile(Avx2{}, product, row, column);
    portable_rows(product, row, Avx2::kRows, whole);
  }
  portable_rows(product, row, end - row, first_column);
}

void avx512_rows(const Product& product, int rows) {
  const int whole = product.n - product.n % Avx512::kColumns;
  int row = 0;
  for (; row + Avx512::kRows <= rows; row += Avx512::kRows) {
    if (!all_present(product, row, Avx512::kRows)) {
      avx2_rows(product, row, Avx512::kRows, 0);
      continue;
    }
    for (int column = 0; column < whole; column += Avx512::kColumns) tile(Avx512{}, product, row, column);
    avx2_rows(product, row, Avx512::kRows, whole);
  }
  avx2_rows(product, row, rows - row, 0);
}

#endif

}  // namespace

void multiply_rows_pitched(float* const* d, int rows, int n, int k, const float* a, const float* b, size_t b_pitch,
                           bool accumulate) {
  const Product product{d, n, k, a, b, b_pitch, accumulate};
#ifdef EMULATOR_HAS_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return __builtin_cpu_supports("avx512f") ? avx512_rows(product, rows) : avx2_rows(product, 0, rows, 0);
#endif
  portable_rows(product, 0, rows, 0);
}

void multiply_rows(float* const* d, int rows, int n, int k, const float* a, const float* b, bool accumulate) {
  multiply_rows_pitched(d, rows, n, k, a, b, static_cast<size_t>(n), accumulate);
}

}  // namespace jax_fa4::emulator

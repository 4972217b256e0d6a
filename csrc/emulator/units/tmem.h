// Which lane and register holds which element: tcgen05.ld / st / cp, ldmatrix / stmatrix, movmatrix.
//
// Sources: PTX ISA, "Tensor Memory load and store instructions", "tcgen05.cp", "Matrix fragments", "ldmatrix",
// "stmatrix", "movmatrix". A tensor-memory address has the lane in bits 16-31 and the column in bits 0-15.
#pragma once

#include <cstdint>
#include <string>

#include "lanes.h"
#include "matrix.h"

namespace jax_fa4::emulator {

enum class TensorShape : uint8_t { lanes32_bits32, lanes16_bits64, lanes16_bits128, lanes16_bits256, lanes16_bits32x2 };

// One tcgen05.ld or st: `registers` 32-bit registers a thread. `pack` is .pack::16b (ld) or .unpack::16b (st): a
// register holds the low halves of two adjacent columns. `half_split` is the immediate of 16x32bx2: the columns between
// its two halves.
struct TensorAccess {
  TensorShape shape = TensorShape::lanes32_bits32;
  int registers = 1;
  bool pack = false;
  int half_split = 0;
};

// Registers a thread for the repeat count of .xN (1..128): 1, 1, 2, 4, 1 per repeat by shape; with pack, the same count
// of registers covers twice the columns.
int registers_per_repeat(TensorShape shape);
// Lanes (32 or 16) and columns that the access spans from its address (16x32bx2: columns of one half).
int tensor_access_lanes(const TensorAccess& access);
int tensor_access_columns(const TensorAccess& access);

// Element `index` of a thread: index = register without pack; 2 * register + half with pack.
struct TensorPlace {
  int lane;
  int column;
};
TensorPlace tensor_place(const TensorAccess& access, int thread, int index);

// Empty, or one sentence: lanes outside the quarter of the warp (warp index mod 4), a lane offset that is neither 0 nor
// 16 for 16-lane shapes (0 for 32x32b), columns beyond 512.
std::string check_tensor_access(const TensorAccess& access, uint32_t address, int warp_index);

// registers[i] is a Words array. Row pointers: tensor_memory is uint32_t[128][512].
void load_tensor(const TensorAccess& access, uint32_t address, const uint32_t* tensor_memory,
                 uint32_t* const* registers);
void store_tensor(const TensorAccess& access, uint32_t address, uint32_t* tensor_memory,
                  const uint32_t* const* registers);
// Calls visit(lane, column) once for every 32-bit cell that the access touches.
template <class Visit>
void walk_tensor_access(const TensorAccess& access, uint32_t address, Visit&& visit);

// tcgen05.cp: shared memory (through a tcgen05 matrix descriptor, K-major rows) to tensor memory.
//   128x256b: 128 lanes x 32 bytes; 128x128b: 128 lanes x 16 bytes; 4x256b: lanes 0-3 x 32 bytes (rows to lanes 0, 32,
//   64, 96); 64x128b.warpx2::02_13 / 01_23: 64 rows x 16 bytes, copied to two warps' lanes; 32x128b.warpx4: 32 rows x
//   16 bytes, to all four.
enum class TensorCopyShape : uint8_t {
  rows128_bits256,
  rows128_bits128,
  rows4_bits256,
  rows64_bits128_02_13,
  rows64_bits128_01_23,
  rows32_bits128_x4
};
// Calls visit(uint32_t shared_address, int lane, int column) for each 16-byte piece: four columns from `column`
// (relative to the instruction's address). Pieces that are broadcast are visited once a destination.
template <class Visit>
void walk_tensor_copy(TensorCopyShape shape, const MatrixDescriptor& source, Visit&& visit);
int tensor_copy_columns(TensorCopyShape shape);

// ldmatrix / stmatrix, 8x8 matrices of 16-bit elements: matrix i's row r is at the address that lane 8 i + r gives.
// rows[8] are the 16-byte rows in register order: thread t holds elements 2 (t mod 4), +1 of row t / 4; `transpose`
// exchanges row and column.
void load_matrix(const uint16_t rows[8][8], bool transpose, uint32_t* registers);
void store_matrix(uint16_t rows[8][8], bool transpose, const uint32_t* registers);
// stmatrix.m16n8.b8.trans: one register of 4 bytes a thread; rows[8][16] are the 16-byte rows of the transposed matrix.
void store_matrix_b8(uint8_t rows[8][16], const uint32_t* registers);
// movmatrix.m8n8.trans.b16
void transpose_matrix(uint32_t* out, const uint32_t* in);

// ------------------------------------------------------------------------------------------------ implementation

template <class Visit>
void walk_tensor_access(const TensorAccess& access, uint32_t address, Visit&& visit) {
  const int lane0 = static_cast<int>(address >> 16), column0 = static_cast<int>(address & 0xffff);
  const int elements = access.registers * (access.pack ? 2 : 1);
  for (int thread = 0; thread < kLanes; thread++)
    for (int index = 0; index < elements; index++) {
      const TensorPlace place = tensor_place(access, thread, index);
      visit(lane0 + place.lane, column0 + place.column);
    }
}

namespace detail {
// Rows of the source, 16-byte pieces a row, and the lanes that row `row` goes to (up to 4, -1 ends the list).
struct CopyPlan {
  int rows;
  int pieces;
};
CopyPlan copy_plan(TensorCopyShape shape);
void copy_lanes(TensorCopyShape shape, int row, int lanes[4]);
}  // namespace detail

template <class Visit>
void walk_tensor_copy(TensorCopyShape shape, const MatrixDescriptor& source, Visit&& visit) {
  const detail::CopyPlan plan = detail::copy_plan(shape);
  const detail::PieceLayout layout = detail::piece_layout({source, Major::k, Format::f32, plan.rows, plan.pieces * 4});
  for (int row = 0; row < plan.rows; row++) {
    int lanes[4];
    detail::copy_lanes(shape, row, lanes);
    for (int piece = 0; piece < plan.pieces; piece++) {
      const uint32_t offset = layout.offset(static_cast<uint32_t>(piece), static_cast<uint32_t>(row));
      const uint32_t address = swizzle_address(offset, source.swizzle);
      for (int i = 0; i < 4 && lanes[i] >= 0; i++) visit(address, lanes[i], piece * 4);
    }
  }
}

}  // namespace jax_fa4::emulator

// Matrix operands and products of the tensor cores: wgmma (sm_90a) and tcgen05.mma (sm_100a and later).
//
// Sources: PTX ISA, "Asynchronous warpgroup level matrix instructions" (matrix descriptor, shared memory layouts,
// register fragments), "TensorCore 5th Generation Family Instructions" (shared memory descriptor, instruction
// descriptor, data path layout organization, canonical layouts). Shared memory is passed as a pointer to the byte whose
// absolute shared address is 0, so that swizzles act on absolute bits. Products: operands are exact in f32; sums are
// f32 in order of k with fused multiply-add. The hardware aligns and truncates partial products instead, so the last
// bits of inexact sums differ from silicon.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "formats.h"
#include "lanes.h"
#include "tma.h"

namespace jax_fa4::emulator {

// --------------------------------------------------------------------------------------- shared memory descriptors

struct MatrixDescriptor {
  uint32_t start = 0;          // shared address of the operand, bytes (18 bits)
  uint32_t leading_bytes = 0;  // LBO
  uint32_t stride_bytes = 0;   // SBO
  Swizzle swizzle = Swizzle::none;
};
// Empty, or one sentence. Refuses a non-zero base offset, an absolute leading dimension, unknown layout codes and, for
// tcgen05, a version field that is not 1.
std::string decode_wgmma_descriptor(uint64_t bits, MatrixDescriptor& descriptor);
std::string decode_tcgen05_descriptor(uint64_t bits, MatrixDescriptor& descriptor);
// The inverse, for tests and kernels made by hand.
uint64_t encode_wgmma_descriptor(const MatrixDescriptor& descriptor);
uint64_t encode_tcgen05_descriptor(const MatrixDescriptor& descriptor);

// Which dimension is contiguous in shared memory.
enum class Major : uint8_t { k, mn };

// A rows x depth operand (M x K of A, N x K of B) behind a descriptor. Everything is read in pieces of 16 bytes that
// lie together: K-major, 16 bytes of one row; MN-major, one k of several rows.
struct SharedOperand {
  MatrixDescriptor descriptor;
  Major major = Major::k;
  Format format = Format::bf16;  // f16, bf16, tf32, e4m3, e5m2; or f32 for 32-bit data taken whole
  int rows = 0;
  int depth = 0;
  int first_row = 0;  // of the matrix that the descriptor names; a multiple of 16 bytes along contiguous rows
};
// Empty, or one sentence: sub-byte formats, MN-major tf32 without the 32-byte-atom swizzle, a start not aligned to 16
// bytes.
std::string check_operand(const SharedOperand& operand);

// Calls visit(uint32_t shared_address) for each 16-byte piece, swizzle applied; the pieces may come in any order and do
// not overlap. Hazard checks at issue use this.
template <class Visit>
void walk_operand(const SharedOperand& operand, Visit&& visit);

// Reads the operand as f32 into out[rows][row_pitch] (k contiguous) or, transposed, out[depth][row_pitch] (rows
// contiguous). tf32 drops the 13 low mantissa bits. `negate` flips signs.
void gather_rows(const SharedOperand& operand, const uint8_t* shared, bool negate, float* out, size_t row_pitch);
void gather_transposed(const SharedOperand& operand, const uint8_t* shared, bool negate, float* out, size_t row_pitch);
// 8-bit integers as int32, for kind::i8 and wgmma .s8/.u8. `operand.format` is ignored but must be one byte wide.
void gather_rows_s32(const SharedOperand& operand, const uint8_t* shared, bool is_signed, int32_t* out,
                     size_t row_pitch);

// ------------------------------------------------------------------------------------------------------- tcgen05.mma

enum class MmaKind : uint8_t { f16, tf32, f8f6f4, i8 };

struct MmaShape {
  int m = 0;  // rows of D over the whole CTA group: 64, 128 or 256
  int n = 0;
  int k = 0;  // elements of K in one instruction: 32 bytes of operand (dense)
};
struct InstructionDescriptor {
  MmaShape shape;
  Format a_format = Format::f16;
  Format b_format = Format::f16;
  bool a_signed = false, b_signed = false;  // kind::i8
  bool accumulate_f16 = false;              // D is f16 (one element in the low half of each column)
  bool saturate_s32 = false;                // kind::i8
  bool negate_a = false, negate_b = false;
  Major a_major = Major::k, b_major = Major::k;
};
// Decodes and checks the 32-bit descriptor for the kind and CTA group (1 or 2): reserved bits, formats, M and N.
// Sparse, block-scaled and sub-byte forms are refused. Empty, or one sentence.
std::string decode_instruction_descriptor(uint32_t bits, MmaKind kind, int cta_group,
                                          InstructionDescriptor& descriptor);
uint32_t encode_instruction_descriptor(const InstructionDescriptor& descriptor, MmaKind kind);

// Tensor memory of a CTA: 128 lanes x 512 columns of 32 bits, lane-major.
inline constexpr int kTensorLanes = 128;
inline constexpr int kTensorColumns = 512;

// How one CTA's part of D lies in tensor memory. D of the CTA has `rows` rows and n columns; it is held in `blocks`
// column blocks of n / blocks columns, all at the same tensor-memory columns, block b in other lanes.
//   cta_group 1: m 128: lane = row.  m 64: rows 16 i + j in lanes 32 i + j (j < 16).
//   cta_group 2: m 256: each CTA holds 128 rows, lane = row.  m 128: each CTA holds 64 rows; columns [0, n/2) in lanes
//   0-63,
//                columns [n/2, n) in lanes 64-127.
struct AccumulatorMap {
  int rows;
  int blocks;
  int columns;  // tensor-memory columns used
  bool spread;  // m 64 in one CTA
  int lane(int row, int block) const { return spread ? (row / 16) * 32 + row % 16 : row + 64 * block; }
};
AccumulatorMap accumulator_map(const MmaShape& shape, int cta_group);

// One CTA's share of an MMA, when the operands have been gathered.
struct MmaProduct {
  InstructionDescriptor instruction;
  MmaKind kind = MmaKind::f16;
  int cta_group = 1;
  bool accumulate = false;        // enable-input-d
  int scale_input_d = 0;          // D is scaled by 2^-scale_input_d before the addition
  uint32_t lane = 0, column = 0;  // tensor-memory address of D
  // disable-output-lane: 4 (cta_group 1) or 8 (group 2) words, bit r of word w: lane 32 w + r is not written; null:
  // none.
  const uint32_t* disabled_lanes = nullptr;
};
// `a` is float[rows of this CTA][k] (for A in tensor memory of a 2-CTA M=128 product: [2][64][k], one copy a block,
// a_blocks = 2); `b` is float[k][n], the rows of both CTAs side by side. `tensor_memory` is uint32_t[128][512] of this
// CTA. Checks nothing; D must lie inside (check_accumulator).
void multiply_into_tensor_memory(const MmaProduct& product, const float* a, int a_blocks, const float* b,
                                 uint32_t* tensor_memory);
// kind::i8: the same with int32 operands.
void multiply_into_tensor_memory_s32(const MmaProduct& product, const int32_t* a, const int32_t* b,
                                     uint32_t* tensor_memory);
// Empty, or a sentence: D beyond 512 columns or with a lane that the layout does not allow.
std::string check_accumulator(const MmaProduct& product);

// A in tensor memory at (lane, column): packed 32-bit columns (two f16/bf16, four fp8, one tf32). Reads the rows of
// `block` (0, or 0 and 1 for the 2-CTA M=128 form, whose halves each read their own lanes) as float[rows][k].
int a_columns(const InstructionDescriptor& instruction);
void gather_a_from_tensor_memory(const InstructionDescriptor& instruction, int cta_group, int block, uint32_t lane,
                                 uint32_t column, const uint32_t* tensor_memory, float* out);

// ------------------------------------------------------------------------------------------------------------- wgmma

// m64nNk(32 bytes). Warp w of the warpgroup owns rows 16 w .. 16 w + 15. Lane l, register 4 j + {0,1,2,3}: rows r, r,
// r+8, r+8 with r = l / 4, columns 8 j + 2 (l mod 4) + {0,1,0,1}. f16 accumulators pack two columns in a register:
// register 2 j + {0,1}.
struct FragmentPlace {
  int row;  // within the warp's 16 rows
  int column;
};
inline FragmentPlace wgmma_place(int lane, int register_index) {
  return {lane / 4 + 8 * ((register_index >> 1) & 1),
          8 * (register_index >> 2) + 2 * (lane & 3) + (register_index & 1)};
}
// A from registers (four 32-bit registers of packed elements): element e of register i of a lane is at row
// lane/4 + 8 (i mod 2), k = per_register * (lane mod 4) + e + 4 per_register (i / 2).
void gather_a_from_registers(Format format, const uint32_t* const registers[4], bool negate, float* out /*[16][k]*/);

// One warp's 16 rows: registers[i] is a Words array of accumulator register i (n / 2 registers for f32, n / 4 for f16).
// `a` float[16][k], `b` float[k][n].
struct WgmmaProduct {
  int n = 0;
  int k = 0;
  bool accumulate = true;  // scale-d
  bool accumulate_f16 = false;
};
void multiply_into_registers(const WgmmaProduct& product, const float* a, const float* b, uint32_t* const* registers);

// ---------------------------------------------------------------------------------------------------------- mma.sync

// mma.sync.m16n8k8 / k16 / k32, f32 accumulators: A has k * bytes / 8 registers of packed elements (2 or 4), B half of
// that, C/D four registers. Supports f16, bf16 (k8, k16), tf32 (k4, k8), e4m3, e5m2 (k32).
void mma_sync_m16n8(Format a_format, Format b_format, int k, const uint32_t* const* a, const uint32_t* const* b,
                    const uint32_t* const c[4], uint32_t* const d[4]);

// ------------------------------------------------------------------------------------------------------------ product

// d[i][0..n) = (accumulate ? d[i][0..n) : 0) + sum over k of a[i][k] * b[k][0..n), for rows whose pointer is not null.
// `a` is float[rows][k]; rows of `b` are n (or b_pitch) floats apart.
void multiply_rows(float* const* d, int rows, int n, int k, const float* a, const float* b, bool accumulate);
void multiply_rows_pitched(float* const* d, int rows, int n, int k, const float* a, const float* b, size_t b_pitch,
                           bool accumulate);

// ------------------------------------------------------------------------------------------------ implementation

namespace detail {
int format_bytes(Format format);

inline constexpr uint32_t kAddressMask = 0x3ffff;  // of addresses in descriptors

// The swizzles of operands: address ^ ((address >> shift) & mask).
struct SwizzleBits {
  uint32_t shift, mask;
};
inline SwizzleBits swizzle_bits(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::bytes32:
      return {3, 0x10};
    case Swizzle::bytes64:
      return {3, 0x30};
    case Swizzle::bytes128:
      return {3, 0x70};
    case Swizzle::bytes128_atom32:
      return {2, 0x60};
    default:
      return {0, 0};
  }
}

// Where the 16-byte pieces of an operand lie before swizzling. `inner` counts pieces along the contiguous dimension,
// `outer` elements along the other one: inner pieces lie 16 bytes apart inside a group, outer ones `pitch` apart inside
// an atom.
struct PieceLayout {
  uint32_t start;
  uint32_t inner_shift, group_step;        // group: 1 << inner_shift pieces
  uint32_t outer_shift, pitch, atom_step;  // atom: 1 << outer_shift elements
  uint32_t offset(uint32_t inner, uint32_t outer) const {
    const uint32_t in_group = inner & ((1u << inner_shift) - 1), in_atom = outer & ((1u << outer_shift) - 1);
    return (start + in_group * 16 + (inner >> inner_shift) * group_step + in_atom * pitch +
            (outer >> outer_shift) * atom_step) &
           kAddressMask;
  }
};
PieceLayout piece_layout(const SharedOperand& operand);
}  // namespace detail

namespace detail {

// Calls visit(shared address, index of the piece along the contiguous dimension, index along the other one).
template <class Visit>
EMULATOR_INLINE void walk_pieces(const SharedOperand& operand, Visit&& visit) {
  constexpr uint32_t kMostPieces = 64;  // 256 elements of 4 bytes
  const PieceLayout layout = piece_layout(operand);
  const bool k_major = operand.major == Major::k;
  const uint32_t contiguous = static_cast<uint32_t>(k_major ? operand.depth : operand.rows);
  const uint32_t other = static_cast<uint32_t>(k_major ? operand.rows : operand.depth);
  const uint32_t bytes = static_cast<uint32_t>(format_bytes(operand.format));
  const uint32_t pieces = contiguous * bytes / 16;
  const uint32_t first_outer = k_major ? static_cast<uint32_t>(operand.first_row) : 0;
  const uint32_t first_piece = k_major ? 0 : static_cast<uint32_t>(operand.first_row) * bytes / 16;
  const uint32_t start = layout.offset(0, 0);
  uint32_t inner[kMostPieces];
  for (uint32_t piece = 0; piece < pieces; piece++) inner[piece] = layout.offset(first_piece + piece, 0) - start;
  const SwizzleBits swizzle = swizzle_bits(operand.descriptor.swizzle);
  for (uint32_t outer = 0; outer < other; outer++) {
    const uint32_t row = layout.offset(0, first_outer + outer);
    for (uint32_t piece = 0; piece < pieces; piece++) {
      const uint32_t address = (row + inner[piece]) & kAddressMask;
      visit(address ^ ((address >> swizzle.shift) & swizzle.mask), piece, outer);
    }
  }
}

}  // namespace detail

template <class Visit>
void walk_operand(const SharedOperand& operand, Visit&& visit) {
  detail::walk_pieces(operand, [&](uint32_t address, uint32_t, uint32_t) { visit(address); });
}

}  // namespace jax_fa4::emulator

// Matrix descriptors, operand gathering and the layout of accumulators.
#include "matrix.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define EMULATOR_HAS_AVX2 1
#endif

namespace jax_fa4::emulator {
namespace {

uint64_t bits(uint64_t word, int position, int count) { return (word >> position) & ((uint64_t{1} << count) - 1); }

std::string hexadecimal(uint64_t value) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string text = "0x";
  int shift = 60;
  while (shift > 0 && (value >> shift) == 0) shift -= 4;
  for (; shift >= 0; shift -= 4) text += digits[(value >> shift) & 15];
  return text;
}

MatrixDescriptor common_fields(uint64_t word) {
  MatrixDescriptor descriptor;
  descriptor.start = static_cast<uint32_t>(bits(word, 0, 14)) << 4;
  descriptor.leading_bytes = static_cast<uint32_t>(bits(word, 16, 14)) << 4;
  descriptor.stride_bytes = static_cast<uint32_t>(bits(word, 32, 14)) << 4;
  return descriptor;
}

uint64_t common_bits(const MatrixDescriptor& descriptor) {
  return uint64_t{descriptor.start >> 4 & 0x3fff} | uint64_t{descriptor.leading_bytes >> 4 & 0x3fff} << 16 |
         uint64_t{descriptor.stride_bytes >> 4 & 0x3fff} << 32;
}

// Layout codes: index is the code.
constexpr Swizzle kHopperLayouts[] = {Swizzle::none, Swizzle::bytes128, Swizzle::bytes64, Swizzle::bytes32};
struct BlackwellLayout {
  Swizzle swizzle;
  uint32_t code;
};
constexpr BlackwellLayout kBlackwellLayouts[] = {{Swizzle::none, 0},
                                                 {Swizzle::bytes128_atom32, 1},
                                                 {Swizzle::bytes128, 2},
                                                 {Swizzle::bytes64, 4},
                                                 {Swizzle::bytes32, 6}};

}  // namespace

std::string decode_wgmma_descriptor(uint64_t word, MatrixDescriptor& descriptor) {
  descriptor = common_fields(word);
  descriptor.swizzle = kHopperLayouts[bits(word, 62, 2)];
  if (bits(word, 49, 3) != 0)
    return "The wgmma descriptor " + hexadecimal(word) + " has base offset " + std::to_string(bits(word, 49, 3)) +
           "; emulated is 0: align the operand to its swizzle pattern.";
  return {};
}

std::string decode_tcgen05_descriptor(uint64_t word, MatrixDescriptor& descriptor) {
  descriptor = common_fields(word);
  const std::string name = "The tcgen05 descriptor " + hexadecimal(word);
  if (bits(word, 46, 3) != 1)
    return name + " has version field " + std::to_string(bits(word, 46, 3)) + "; it must be 1.";
  if (bits(word, 49, 3) != 0)
    return name + " has base offset " + std::to_string(bits(word, 49, 3)) +
           "; emulated is 0: align the operand to its swizzle pattern.";
  if (bits(word, 52, 1) != 0) return name + " asks for the absolute leading dimension mode, which is not emulated.";
  const uint32_t code = static_cast<uint32_t>(bits(word, 61, 3));
  for (const BlackwellLayout& layout : kBlackwellLayouts)
    if (layout.code == code) {
      descriptor.swizzle = layout.swizzle;
      return {};
    }
  return name + " has layout code " + std::to_string(code) + "; accepted are 0, 1, 2, 4 and 6.";
}

uint64_t encode_wgmma_descriptor(const MatrixDescriptor& descriptor) {
  const auto* found = std::find(std::begin(kHopperLayouts), std::end(kHopperLayouts), descriptor.swizzle);
  return common_bits(descriptor) | static_cast<uint64_t>(found - std::begin(kHopperLayouts)) << 62;
}

uint64_t encode_tcgen05_descriptor(const MatrixDescriptor& descriptor) {
  uint64_t code = 0;
  for (const BlackwellLayout& layout : kBlackwellLayouts)
    if (layout.swizzle == descriptor.swizzle) code = layout.code;
  return common_bits(descriptor) | uint64_t{1} << 46 | code << 61;
}

// ------------------------------------------------------------------------------------------------------ operands

namespace detail {

int format_bytes(Format format) {
  switch (format) {
    case Format::f32:
    case Format::tf32:
      return 4;
    case Format::f16:
    case Format::bf16:
      return 2;
    default:
      return 1;
  }
}

PieceLayout piece_layout(const SharedOperand& operand) {
  constexpr uint32_t unbounded = 31;  // shift of a group that never ends
  const MatrixDescriptor& descriptor = operand.descriptor;
  const uint32_t width = static_cast<uint32_t>(swizzle_width(descriptor.swizzle));
  const uint32_t leading = descriptor.leading_bytes, stride = descriptor.stride_bytes;
  const uint32_t pitch = width == 0 ? 16 : width;
  // K-major: eight rows form a core matrix, groups of eight rows lie SBO apart; without swizzle pieces along k lie LBO
  // apart.
  if (operand.major == Major::k) return {descriptor.start, width == 0 ? 0 : unbounded, leading, 3, pitch, stride};
  // MN-major without swizzle: pieces along MN lie SBO apart, groups of eight k LBO apart.
  if (width == 0) return {descriptor.start, 0, stride, 3, pitch, leading};
  // MN-major: swizzle-wide groups along MN lie LBO apart, atoms of eight k (four with 32-byte atoms) SBO apart.
  const uint32_t atom_shift = descriptor.swizzle == Swizzle::bytes128_atom32 ? 2 : 3;
  return {descriptor.start, static_cast<uint32_t>(std::countr_zero(width / 16)), leading, atom_shift, pitch, stride};
}

}  // namespace detail

std::string check_operand(const SharedOperand& operand) {
  switch (operand.format) {
    case Format::f32:
    case Format::f16:
    case Format::bf16:
    case Format::tf32:
    case Format::e4m3:
    case Format::e5m2:
      break;
    default:
      return "A matrix operand has 4- or 6-bit elements, which are not emulated.";
  }
  const bool wide = detail::format_bytes(operand.format) == 4;
  if (operand.major == Major::mn && wide && operand.descriptor.swizzle != Swizzle::bytes128_atom32)
    return "An MN-major operand of 32-bit elements needs the 128-byte swizzle with 32-byte atoms.";
  return {};
}

namespace {

template <Format kFormat>
constexpr int kPieceElements = kFormat == Format::tf32 || kFormat == Format::f32   ? 4
                               : kFormat == Format::f16 || kFormat == Format::bf16 ? 8
                                                                                   : 16;

// Widens the elements of one 16-byte piece.
template <Format kFormat>
EMULATOR_INLINE void widen(const uint8_t* piece, float* out) {
  constexpr int count = kPieceElements<kFormat>;
  if constexpr (count == 8) {
    uint16_t halves[8];
    std::memcpy(halves, piece, 16);
    for (int i = 0; i < 8; i++) out[i] = kFormat == Format::bf16 ? bf16_to_f32(halves[i]) : f16_to_f32(halves[i]);
  } else if constexpr (count == 4) {
    uint32_t words[4];
    std::memcpy(words, piece, 16);
    for (int i = 0; i < 4; i++) out[i] = float_of(kFormat == Format::tf32 ? words[i] & 0xffffe000 : words[i]);
  } else {
    for (int i = 0; i < 16; i++) out[i] = kFormat == Format::e4m3 ? e4m3_to_f32(piece[i]) : e5m2_to_f32(piece[i]);
  }
}

// Where a gathered operand goes: steps in the output of one element along the contiguous dimension and along the other
// one.
struct Target {
  size_t contiguous_step;
  size_t other_step;
};

Target target_of(const SharedOperand& operand, size_t pitch, bool transposed) {
  const bool contiguous = (operand.major == Major::k) != transposed;
  return {contiguous ? 1 : pitch, contiguous ? pitch : 1};
}

// Calls place(const uint8_t* piece, size_t first element along the contiguous dimension, size_t index along the other).
template <class Place>
EMULATOR_INLINE void each_piece(const SharedOperand& operand, const uint8_t* shared, uint32_t per_piece,
                                Place&& place) {
  detail::walk_pieces(operand, [&](uint32_t address, uint32_t piece, uint32_t outer) {
    place(shared + address, size_t{piece} * per_piece, size_t{outer});
  });
}

template <Format kFormat>
EMULATOR_INLINE void gather_as(const SharedOperand& operand, const uint8_t* shared, bool negate, float* out,
                               const Target& target) {
  constexpr int count = kPieceElements<kFormat>;
  const float sign = negate ? -1.0f : 1.0f;
  each_piece(operand, shared, count, [&](const uint8_t* piece, size_t first, size_t outer) {
    float elements[count];
    widen<kFormat>(piece, elements);
    for (int i = 0; i < count; i++) elements[i] *= sign;
    float* to = out + first * target.contiguous_step + outer * target.other_step;
    if (target.contiguous_step == 1)
      std::memcpy(to, elements, sizeof elements);
    else
      for (size_t i = 0; i < count; i++) to[i * target.contiguous_step] = elements[i];
  });
}

#ifdef EMULATOR_HAS_AVX2

// Eight pieces of eight 16-bit elements, widened: element i of piece j to out[i * pitch + j].
__attribute__((target("avx2,f16c"))) void transpose_pieces(const uint8_t* const pieces[8], Format format, bool negate,
                                                           float* out, size_t pitch) {
  __m128i rows[8], pairs[8], quads[8];
  for (int j = 0; j < 8; j++) rows[j] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pieces[j]));
  for (int j = 0; j < 4; j++) {
    pairs[2 * j] = _mm_unpacklo_epi16(rows[2 * j], rows[2 * j + 1]);
    pairs[2 * j + 1] = _mm_unpackhi_epi16(rows[2 * j], rows[2 * j + 1]);
  }
  for (int j = 0; j < 2; j++)
    for (int half = 0; half < 2; half++) {
      quads[4 * j + 2 * half] = _mm_unpacklo_epi32(pairs[4 * j + half], pairs[4 * j + half + 2]);
      quads[4 * j + 2 * half + 1] = _mm_unpackhi_epi32(pairs[4 * j + half], pairs[4 * j + half + 2]);
    }
  const __m128i signs = _mm_set1_epi16(negate ? INT16_MIN : 0);
  for (int i = 0; i < 8; i++) {
    const __m128i low = quads[i / 2], high = quads[i / 2 + 4];
    const __m128i element =
        _mm_xor_si128(i % 2 == 0 ? _mm_unpacklo_epi64(low, high) : _mm_unpackhi_epi64(low, high), signs);
    const __m256 wide = format == Format::bf16
                            ? _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(element), 16))
                            : _mm256_cvtph_ps(element);
    _mm256_storeu_ps(out + static_cast<size_t>(i) * pitch, wide);
  }
}

// Pieces that go to columns of the output, eight at a time.
bool gather_by_blocks(const SharedOperand& operand, const uint8_t* shared, bool negate, float* out,
                      const Target& target) {
  const int other = operand.major == Major::k ? operand.rows : operand.depth;
  if ((operand.format != Format::bf16 && operand.format != Format::f16) || target.other_step != 1 || other % 8 != 0)
    return false;
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return false;
  constexpr int kMostInner = 32;  // pieces along the contiguous dimension: 256 elements
  const uint8_t* pieces[kMostInner][8];
  each_piece(operand, shared, 8, [&](const uint8_t* piece, size_t first, size_t outer) {
    pieces[first / 8][outer % 8] = piece;
    if (outer % 8 == 7)
      transpose_pieces(pieces[first / 8], operand.format, negate, out + first * target.contiguous_step + outer - 7,
                       target.contiguous_step);
  });
  return true;
}

#else
bool gather_by_blocks(const SharedOperand&, const uint8_t*, bool, float*, const Target&) { return false; }
#endif

EMULATOR_CLONES void gather_any(const SharedOperand& operand, const uint8_t* shared, bool negate, float* out,
                                const Target& target) {
  switch (operand.format) {
    case Format::f16:
      return gather_as<Format::f16>(operand, shared, negate, out, target);
    case Format::bf16:
      return gather_as<Format::bf16>(operand, shared, negate, out, target);
    case Format::tf32:
      return gather_as<Format::tf32>(operand, shared, negate, out, target);
    case Format::e4m3:
      return gather_as<Format::e4m3>(operand, shared, negate, out, target);
    case Format::e5m2:
      return gather_as<Format::e5m2>(operand, shared, negate, out, target);
    default:
      return gather_as<Format::f32>(operand, shared, negate, out, target);
  }
}

void gather(const SharedOperand& operand, const uint8_t* shared, bool negate, float* out, const Target& target) {
  if (!gather_by_blocks(operand, shared, negate, out, target)) gather_any(operand, shared, negate, out, target);
}

}  // namespace

void gather_rows(const SharedOperand& operand, const uint8_t* shared, bool negate, float* out, size_t row_pitch) {
  gather(operand, shared, negate, out, target_of(operand, row_pitch, false));
}

void gather_transposed(const SharedOperand& operand, const uint8_t* shared, bool negate, float* out, size_t row_pitch) {
  gather(operand, shared, negate, out, target_of(operand, row_pitch, true));
}

void gather_rows_s32(const SharedOperand& operand, const uint8_t* shared, bool is_signed, int32_t* out,
                     size_t row_pitch) {
  const Target target = target_of(operand, row_pitch, false);
  each_piece(operand, shared, 16, [&](const uint8_t* piece, size_t first, size_t outer) {
    int32_t* to = out + first * target.contiguous_step + outer * target.other_step;
    for (size_t i = 0; i < 16; i++)
      to[i * target.contiguous_step] = is_signed ? static_cast<int8_t>(piece[i]) : static_cast<int32_t>(piece[i]);
  });
}

// ------------------------------------------------------------------------------------------ instruction descriptor

namespace {

// Element formats by the 3-bit codes of each kind; false: the code does not exist or is not emulated.
bool element_format(MmaKind kind, uint32_t code, Format& format) {
  switch (kind) {
    case MmaKind::f16:
      format = code == 0 ? Format::f16 : Format::bf16;
      return code <= 1;
    case MmaKind::tf32:
      format = Format::tf32;
      return code == 2;
    case MmaKind::f8f6f4:
      format = code == 0 ? Format::e4m3 : Format::e5m2;
      return code <= 1;
    case MmaKind::i8:
      format = Format::e4m3;
      return code <= 1;  // one byte; signedness is kept apart
  }
  return false;
}

uint32_t element_code(MmaKind kind, Format format, bool is_signed) {
  switch (kind) {
    case MmaKind::f16:
      return format == Format::bf16;
    case MmaKind::tf32:
      return 2;
    case MmaKind::f8f6f4:
      return format == Format::e5m2;
    case MmaKind::i8:
      return is_signed;
  }
  return 0;
}

int depth_of(MmaKind kind) { return kind == MmaKind::f16 ? 16 : kind == MmaKind::tf32 ? 8 : 32; }

// The widest rules that CUTLASS and PTX give: N in steps of 8 a CTA; of 16 for MN-major bytes; kind::i8 of 16, or 8
// and 24.
std::string check_shape(const InstructionDescriptor& instruction, int cta_group, MmaKind kind,
                        const std::string& name) {
  const MmaShape& shape = instruction.shape;
  const bool m_ok = cta_group == 1 ? shape.m == 64 || shape.m == 128 : shape.m == 128 || shape.m == 256;
  if (!m_ok)
    return name + " has M " + std::to_string(shape.m) + "; accepted with cta_group::" + std::to_string(cta_group) +
           (cta_group == 1 ? " are 64 and 128." : " are 128 and 256.");
  const bool bytes = kind == MmaKind::f8f6f4 || kind == MmaKind::i8;
  const bool wide = kind == MmaKind::i8 || (bytes && instruction.b_major == Major::mn);
  const int step = (wide ? 16 : 8) * cta_group;
  const bool small_i8 = kind == MmaKind::i8 && cta_group == 1 && (shape.n == 8 || shape.n == 24);
  if (!small_i8 && (shape.n < step || shape.n > 256 || shape.n % step != 0))
    return name + " has N " + std::to_string(shape.n) + "; accepted are multiples of " + std::to_string(step) +
           " up to 256.";
  return {};
}

}  // namespace

std::string decode_instruction_descriptor(uint32_t word, MmaKind kind, int cta_group,
                                          InstructionDescriptor& descriptor) {
  descriptor = InstructionDescriptor{};
  const std::string name = "The instruction descriptor " + hexadecimal(word);
  if (bits(word, 2, 1)) return name + " asks for a sparse product, which is not emulated.";
  const uint32_t d_code = static_cast<uint32_t>(bits(word, 4, 2));
  const uint32_t a_code = static_cast<uint32_t>(bits(word, 7, 3)), b_code = static_cast<uint32_t>(bits(word, 10, 3));
  if (!element_format(kind, a_code, descriptor.a_format) || !element_format(kind, b_code, descriptor.b_format))
    return name + " has element codes " + std::to_string(a_code) + " and " + std::to_string(b_code) +
           ", which its kind does not have or which are not emulated.";
  const uint32_t wanted = kind == MmaKind::i8 ? 2 : 1;
  const bool f16_allowed = kind == MmaKind::f8f6f4 || (kind == MmaKind::f16 && a_code == 0 && b_code == 0);
  if (d_code != wanted && !(f16_allowed && d_code == 0))
    return name + " has accumulator code " + std::to_string(d_code) + ", which its kind does not accept.";
  descriptor.accumulate_f16 = d_code == 0;
  descriptor.a_signed = kind == MmaKind::i8 && a_code == 1;
  descriptor.b_signed = kind == MmaKind::i8 && b_code == 1;
  descriptor.saturate_s32 = kind == MmaKind::i8 && bits(word, 3, 1);
  descriptor.negate_a = bits(word, 13, 1);
  descriptor.negate_b = bits(word, 14, 1);
  if (kind == MmaKind::i8 && (descriptor.negate_a || descriptor.negate_b)) return name + " negates an integer operand.";
  descriptor.a_major = bits(word, 15, 1) ? Major::mn : Major::k;
  descriptor.b_major = bits(word, 16, 1) ? Major::mn : Major::k;
  descriptor.shape = {static_cast<int>(bits(word, 24, 5)) * 16, static_cast<int>(bits(word, 17, 6)) * 8,
                      depth_of(kind)};
  if (bits(word, 6, 1) || bits(word, 23, 1) || bits(word, 29, 1)) return name + " has a reserved bit set.";
  return check_shape(descriptor, cta_group, kind, name);
}

uint32_t encode_instruction_descriptor(const InstructionDescriptor& descriptor, MmaKind kind) {
  const uint32_t d_code = kind == MmaKind::i8 ? 2 : descriptor.accumulate_f16 ? 0 : 1;
  return uint32_t{descriptor.saturate_s32} << 3 | d_code << 4 |
         element_code(kind, descriptor.a_format, descriptor.a_signed) << 7 |
         element_code(kind, descriptor.b_format, descriptor.b_signed) << 10 | uint32_t{descriptor.negate_a} << 13 |
         uint32_t{descriptor.negate_b} << 14 | uint32_t{descriptor.a_major == Major::mn} << 15 |
         uint32_t{descriptor.b_major == Major::mn} << 16 | static_cast<uint32_t>(descriptor.shape.n / 8) << 17 |
         static_cast<uint32_t>(descriptor.shape.m / 16) << 24;
}

// --------------------------------------------------------------------------------------------------- tensor memory

AccumulatorMap accumulator_map(const MmaShape& shape, int cta_group) {
  if (cta_group == 1) return {shape.m, 1, shape.n, shape.m == 64};
  const bool halves = shape.m == 128;
  return {shape.m / 2, halves ? 2 : 1, halves ? shape.n / 2 : shape.n, false};
}

std::string check_accumulator(const MmaProduct& product) {
  const AccumulatorMap map = accumulator_map(product.instruction.shape, product.cta_group);
  if (product.column + static_cast<uint32_t>(map.columns) > kTensorColumns)
    return "D starts at tensor-memory column " + std::to_string(product.column) + " and takes " +
           std::to_string(map.columns) + " columns, beyond 512.";
  const bool lane_ok = product.lane == 0 || (map.spread && product.lane == 16);
  if (!lane_ok)
    return "D starts at tensor-memory lane " + std::to_string(product.lane) + "; accepted " +
           (map.spread ? "are 0 and 16." : "is 0.");
  return {};
}

namespace {

bool lane_disabled(const MmaProduct& product, int lane) {
  return product.disabled_lanes != nullptr && ((product.disabled_lanes[lane / 32] >> (lane % 32)) & 1);
}

// Rows of one block of D as pointers into tensor memory, null where disabled.
void accumulator_rows(const MmaProduct& product, const AccumulatorMap& map, int block, uint32_t* tensor_memory,
                      uint32_t* rows[128]) {
  for (int row = 0; row < map.rows; row++) {
    const int lane = map.lane(row, block) + static_cast<int>(product.lane);
    rows[row] = lane_disabled(product, lane)
                    ? nullptr
                    : tensor_memory + static_cast<size_t>(lane) * kTensorColumns + product.column;
  }
}

// Tensor-memory words that hold floats are read and written by memcpy only, here and in the product.
void scale_row(void* row, int columns, int exponent) {
  float values[kTensorColumns];
  const size_t bytes = sizeof(float) * static_cast<size_t>(columns);
  std::memcpy(values, row, bytes);
  for (int j = 0; j < columns; j++) values[j] = std::ldexp(values[j], -exponent);
  std::memcpy(row, values, bytes);
}

// A row of 16-bit sums (one a register) through f32 scratch: widened, accumulated, rounded once.
void widen_f16_row(const uint32_t* row, int columns, float* out) {
  for (int j = 0; j < columns; j++) out[j] = f16_to_f32(row[j] & 0xffff);
}
void narrow_f16_row(const float* in, int columns, uint32_t* row) {
  for (int j = 0; j < columns; j++) row[j] = from_f32(Format::f16, in[j]);
}

}  // namespace

void multiply_into_tensor_memory(const MmaProduct& product, const float* a, int a_blocks, const float* b,
                                 uint32_t* tensor_memory) {
  const MmaShape& shape = product.instruction.shape;
  const AccumulatorMap map = accumulator_map(shape, product.cta_group);
  std::vector<float> scratch(product.instruction.accumulate_f16 ? static_cast<size_t>(map.rows * map.columns) : 0);
  for (int block = 0; block < map.blocks; block++) {
    uint32_t* rows[128];
    float* sums[128];
    accumulator_rows(product, map, block, tensor_memory, rows);
    for (int row = 0; row < map.rows; row++) {
      sums[row] = rows[row] == nullptr ? nullptr : reinterpret_cast<float*>(rows[row]);
      if (product.instruction.accumulate_f16 && rows[row] != nullptr) {
        sums[row] = scratch.data() + static_cast<size_t>(row * map.columns);
        if (product.accumulate) widen_f16_row(rows[row], map.columns, sums[row]);
      }
      if (product.accumulate && product.scale_input_d != 0 && sums[row] != nullptr)
        scale_row(sums[row], map.columns, product.scale_input_d);
    }
    const float* a_block = a + (a_blocks > 1 ? static_cast<size_t>(block * map.rows * shape.k) : 0);
    multiply_rows_pitched(sums, map.rows, map.columns, shape.k, a_block, b + block * map.columns,
                          static_cast<size_t>(shape.n), product.accumulate);
    if (product.instruction.accumulate_f16)
      for (int row = 0; row < map.rows; row++)
        if (rows[row] != nullptr) narrow_f16_row(sums[row], map.columns, rows[row]);
  }
}

void multiply_into_tensor_memory_s32(const MmaProduct& product, const int32_t* a, const int32_t* b,
                                     uint32_t* tensor_memory) {
  const MmaShape& shape = product.instruction.shape;
  const AccumulatorMap map = accumulator_map(shape, product.cta_group);
  for (int block = 0; block < map.blocks; block++) {
    uint32_t* rows[128];
    accumulator_rows(product, map, block, tensor_memory, rows);
    for (int row = 0; row < map.rows; row++) {
      if (rows[row] == nullptr) continue;
      for (int j = 0; j < map.columns; j++) {
        int64_t sum = product.accumulate ? static_cast<int32_t>(rows[row][j]) : 0;
        for (int k = 0; k < shape.k; k++)
          sum += int64_t{a[row * shape.k + k]} * b[k * shape.n + block * map.columns + j];
        if (product.instruction.saturate_s32) sum = std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX);
        rows[row][j] = static_cast<uint32_t>(sum);
      }
    }
  }
}

namespace {

// Elements of packed 32-bit words.
void unpack_words(Format format, const uint32_t* words, int count, float* out) {
  switch (detail::format_bytes(format)) {
    case 4:
      for (int i = 0; i < count; i++) out[i] = to_f32(format, words[i]);
      return;
    case 2:
      for (int i = 0; i < count; i++) {
        const uint32_t low = words[i] & 0xffff, high = words[i] >> 16;
        out[2 * i] = format == Format::bf16 ? bf16_to_f32(low) : f16_to_f32(low);
        out[2 * i + 1] = format == Format::bf16 ? bf16_to_f32(high) : f16_to_f32(high);
      }
      return;
    default:
      for (int i = 0; i < 4 * count; i++) out[i] = to_f32(format, words[i / 4] >> (8 * (i % 4)));
  }
}

}  // namespace

int a_columns(const InstructionDescriptor& instruction) {
  return instruction.shape.k * detail::format_bytes(instruction.a_format) / 4;
}

void gather_a_from_tensor_memory(const InstructionDescriptor& instruction, int cta_group, int block, uint32_t lane,
                                 uint32_t column, const uint32_t* tensor_memory, float* out) {
  const AccumulatorMap map = accumulator_map(instruction.shape, cta_group);
  const int depth = instruction.shape.k, columns = a_columns(instruction);
  for (int row = 0; row < map.rows; row++) {
    const size_t at = static_cast<size_t>(map.lane(row, block)) + lane;
    float* to = out + static_cast<size_t>(row * depth);
    unpack_words(instruction.a_format, tensor_memory + at * kTensorColumns + column, columns, to);
    if (instruction.negate_a)
      for (int k = 0; k < depth; k++) to[k] = -to[k];
  }
}

// ------------------------------------------------------------------------------------------------------- registers

void gather_a_from_registers(Format format, const uint32_t* const registers[4], bool negate, float* out) {
  const int per_register = 4 / detail::format_bytes(format), depth = 8 * per_register;
  for (int i = 0; i < 4; i++)
    for (int lane = 0; lane < kLanes; lane++) {
      float elements[4];
      unpack_words(format, &registers[i][lane], 1, elements);
      const int row = lane / 4 + 8 * (i % 2), k = per_register * (lane % 4 + 4 * (i / 2));
      for (int e = 0; e < per_register; e++) out[row * depth + k + e] = negate ? -elements[e] : elements[e];
    }
}

namespace {

// Accumulators of one warp: register fragments to float[16][n] and back. Elements 2 p and 2 p + 1 of the lanes are one
// row segment of eight columns each four lanes: rows 8 (p mod 2) and up, columns 8 (p / 2) and up.
struct Segment {
  int first_row;
  int first_column;
};
Segment segment_of(int pair) { return {8 * (pair % 2), 8 * (pair / 2)}; }

// Eight columns of a row from the even and odd columns of four lanes, and back.
#ifdef EMULATOR_HAS_AVX2
void interleave(const uint32_t* even, const uint32_t* odd, float* to) {
  const __m128 low = _mm_loadu_ps(reinterpret_cast<const float*>(even));
  const __m128 high = _mm_loadu_ps(reinterpret_cast<const float*>(odd));
  _mm_storeu_ps(to, _mm_unpacklo_ps(low, high));
  _mm_storeu_ps(to + 4, _mm_unpackhi_ps(low, high));
}
void separate(const float* from, uint32_t* even, uint32_t* odd) {
  const __m128 low = _mm_loadu_ps(from), high = _mm_loadu_ps(from + 4);
  _mm_storeu_ps(reinterpret_cast<float*>(even), _mm_shuffle_ps(low, high, 0x88));
  _mm_storeu_ps(reinterpret_cast<float*>(odd), _mm_shuffle_ps(low, high, 0xdd));
}
#else
void interleave(const uint32_t* even, const uint32_t* odd, float* to) {
  for (int i = 0; i < 4; i++) {
    to[2 * i] = float_of(even[i]);
    to[2 * i + 1] = float_of(odd[i]);
  }
}
void separate(const float* from, uint32_t* even, uint32_t* odd) {
  for (int i = 0; i < 4; i++) {
    even[i] = bits_of(from[2 * i]);
    odd[i] = bits_of(from[2 * i + 1]);
  }
}
#endif

void read_fragments(const WgmmaProduct& product, const uint32_t* const* registers, float* sums) {
  for (int pair = 0; pair < product.n / 4; pair++) {
    const Segment segment = segment_of(pair);
    const uint32_t* even = registers[product.accumulate_f16 ? pair : 2 * pair];
    const uint32_t* odd = registers[product.accumulate_f16 ? pair : 2 * pair + 1];
    for (int row = 0; row < 8; row++) {
      float* to = sums + (segment.first_row + row) * product.n + segment.first_column;
      if (!product.accumulate_f16) {
        interleave(even + 4 * row, odd + 4 * row, to);
        continue;
      }
      for (int i = 0; i < 4; i++) {
        to[2 * i] = f16_to_f32(even[4 * row + i] & 0xffff);
        to[2 * i + 1] = f16_to_f32(odd[4 * row + i] >> 16);
      }
    }
  }
}

void write_fragments(const WgmmaProduct& product, const float* sums, uint32_t* const* registers) {
  for (int pair = 0; pair < product.n / 4; pair++) {
    const Segment segment = segment_of(pair);
    for (int row = 0; row < 8; row++) {
      const float* from = sums + (segment.first_row + row) * product.n + segment.first_column;
      if (!product.accumulate_f16) {
        separate(from, registers[2 * pair] + 4 * row, registers[2 * pair + 1] + 4 * row);
        continue;
      }
      for (int i = 0; i < 4; i++)
        registers[pair][4 * row + i] = pack2_from_f32(Format::f16, from[2 * i + 1], from[2 * i]);
    }
  }
}

}  // namespace

void multiply_into_registers(const WgmmaProduct& product, const float* a, const float* b, uint32_t* const* registers) {
  float sums[16 * 256];
  float* rows[16];
  for (int row = 0; row < 16; row++) rows[row] = sums + row * product.n;
  if (product.accumulate) read_fragments(product, registers, sums);
  multiply_rows(rows, 16, product.n, product.k, a, b, product.accumulate);
  write_fragments(product, sums, registers);
}

void mma_sync_m16n8(Format a_format, Format b_format, int k, const uint32_t* const* a, const uint32_t* const* b,
                    const uint32_t* const c[4], uint32_t* const d[4]) {
  const int per_register = 4 / detail::format_bytes(a_format),
            chunk = 4 * per_register;  // k covered by one register of B
  float a_rows[16 * 32], b_columns[32 * 8], sums[16 * 8];
  for (int part = 0; part < k / chunk; part++)
    for (int lane = 0; lane < kLanes; lane++) {
      float elements[4];
      const int first_k = part * chunk + per_register * (lane % 4);
      for (int half = 0; half < 2; half++) {
        unpack_words(a_format, &a[2 * part + half][lane], 1, elements);
        for (int e = 0; e < per_register; e++) a_rows[(lane / 4 + 8 * half) * k + first_k + e] = elements[e];
      }
      unpack_words(b_format, &b[part][lane], 1, elements);
      for (int e = 0; e < per_register; e++) b_columns[(first_k + e) * 8 + lane / 4] = elements[e];
    }
  const WgmmaProduct as_fragment{8, k, true, false};
  read_fragments(as_fragment, c, sums);
  float* rows[16];
  for (int row = 0; row < 16; row++) rows[row] = sums + row * 8;
  multiply_rows(rows, 16, 8, k, a_rows, b_columns, true);
  write_fragments(as_fragment, sums, d);
}

}  // namespace jax_fa4::emulator

// A C door to the emulator's units, for tests: arrays in, arrays out. Also arithmetic by the host processor's own
// rounding modes, as the reference for the units' software rounding.
#include <cfenv>
#include <cmath>
#include <cstring>
#include <vector>

#include "approx.h"
#include "formats.h"
#include "matrix.h"
#include "tensor_map.h"
#include "tma.h"
#include "tmem.h"

using namespace jax_fa4::emulator;

namespace {

ConvertOptions convert_options(int rounding, int flags) {
  return {static_cast<Rounding>(rounding), (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0, (flags & 8) != 0};
}

MinMaxOptions min_max_options(int flags) {
  return {(flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0, (flags & 8) != 0};
}

// A sentence into the caller's buffer of 512 bytes; 1 if there is one.
int report(const std::string& error, char* buffer) {
  std::strncpy(buffer, error.c_str(), 511);
  buffer[511] = 0;
  return !error.empty();
}

int host_mode(int rounding) {
  switch (static_cast<Rounding>(rounding)) {
    case Rounding::toward_zero:
      return FE_TOWARDZERO;
    case Rounding::down:
      return FE_DOWNWARD;
    case Rounding::up:
      return FE_UPWARD;
    default:
      return FE_TONEAREST;
  }
}

template <class Number>
Number host_operation(int operation, Number a, Number b, Number c) {
  volatile Number x = a, y = b, z = c, result = 0;  // volatile: evaluated here and now, in the current mode
  switch (operation) {
    case 0:
      result = x + y;
      break;
    case 1:
      result = x - y;
      break;
    case 2:
      result = x * y;
      break;
    case 3:
      result = std::fma(x, y, z);
      break;
    case 4:
      result = x / y;
      break;
    case 5:
      result = std::sqrt(x);
      break;
    case 6:
      result = Number(1) / x;
      break;
  }
  return result;
}

struct MapFields {
  uint64_t base, extent[5], stride[5];
  int32_t rank, element, interleave, swizzle, l2, fill;
  uint32_t box[5], element_stride[5];
};

TensorMap map_of(const MapFields& fields) {
  TensorMap map;
  map.base = fields.base;
  map.rank = fields.rank;
  map.element = static_cast<Element>(fields.element);
  map.interleave = static_cast<Interleave>(fields.interleave);
  map.swizzle = static_cast<Swizzle>(fields.swizzle);
  map.l2_promotion = static_cast<L2Promotion>(fields.l2);
  map.fill = static_cast<OutOfBoundsFill>(fields.fill);
  for (int d = 0; d < 5; d++) {
    map.extent[d] = fields.extent[d];
    map.stride[d] = fields.stride[d];
    map.box[d] = fields.box[d];
    map.element_stride[d] = fields.element_stride[d];
  }
  map.stride[0] = static_cast<uint64_t>(element_bytes(map.element));
  return map;
}

void fields_of(const TensorMap& map, MapFields& fields) {
  fields.base = map.base;
  fields.rank = map.rank;
  fields.element = static_cast<int32_t>(map.element);
  fields.interleave = static_cast<int32_t>(map.interleave);
  fields.swizzle = static_cast<int32_t>(map.swizzle);
  fields.l2 = static_cast<int32_t>(map.l2_promotion);
  fields.fill = static_cast<int32_t>(map.fill);
  for (int d = 0; d < 5; d++) {
    fields.extent[d] = map.extent[d];
    fields.stride[d] = map.stride[d];
    fields.box[d] = map.box[d];
    fields.element_stride[d] = map.element_stride[d];
  }
}

struct OperandFields {
  uint32_t start, leading_bytes, stride_bytes;
  int32_t swizzle, major, format, rows, depth;
};

SharedOperand operand_of(const OperandFields& fields) {
  return {{fields.start, fields.leading_bytes, fields.stride_bytes, static_cast<Swizzle>(fields.swizzle)},
          static_cast<Major>(fields.major),
          static_cast<Format>(fields.format),
          fields.rows,
          fields.depth};
}

struct InstructionFields {
  int32_t m, n, k, a_format, b_format, a_signed, b_signed, accumulate_f16, saturate_s32, negate_a, negate_b, a_major,
      b_major;
};

InstructionDescriptor instruction_of(const InstructionFields& f) {
  InstructionDescriptor instruction;
  instruction.shape = {f.m, f.n, f.k};
  instruction.a_format = static_cast<Format>(f.a_format);
  instruction.b_format = static_cast<Format>(f.b_format);
  instruction.a_signed = f.a_signed;
  instruction.b_signed = f.b_signed;
  instruction.accumulate_f16 = f.accumulate_f16;
  instruction.saturate_s32 = f.saturate_s32;
  instruction.negate_a = f.negate_a;
  instruction.negate_b = f.negate_b;
  instruction.a_major = static_cast<Major>(f.a_major);
  instruction.b_major = static_cast<Major>(f.b_major);
  return instruction;
}

std::vector<uint32_t*> rows_of(uint32_t* words, int count) {
  std::vector<uint32_t*> rows;
  for (int i = 0; i < count; i++) rows.push_back(words + kLanes * i);
  return rows;
}

}  // namespace

extern "C" {

// ------------------------------------------------------------------------------------------------------- formats

void units_from_f32(int format, int rounding, int flags, int n, const float* in, uint32_t* out) {
  for (int i = 0; i < n; i++) out[i] = from_f32(static_cast<Format>(format), in[i], convert_options(rounding, flags));
}
void units_from_f64(int format, int rounding, int flags, int n, const double* in, uint32_t* out) {
  for (int i = 0; i < n; i++) out[i] = from_f64(static_cast<Format>(format), in[i], convert_options(rounding, flags));
}
void units_from_integer(int format, int rounding, int n, const int64_t* in, uint32_t* out) {
  for (int i = 0; i < n; i++) {
    const uint64_t magnitude = in[i] < 0 ? -static_cast<uint64_t>(in[i]) : static_cast<uint64_t>(in[i]);
    out[i] = from_integer(static_cast<Format>(format), magnitude, in[i] < 0, convert_options(rounding, 0));
  }
}
void units_to_f32(int format, int n, const uint32_t* in, float* out) {
  for (int i = 0; i < n; i++) out[i] = to_f32(static_cast<Format>(format), in[i]);
}
void units_integer_from_f64(int bits, int is_signed, int rounding, int source_is_f64, int n, const double* in,
                            uint64_t* out) {
  for (int i = 0; i < n; i++)
    out[i] = integer_from_f64(in[i], bits, is_signed, static_cast<Rounding>(rounding), source_is_f64);
}
uint32_t units_pack2(int format, float upper, float lower) {
  return pack2_from_f32(static_cast<Format>(format), upper, lower);
}
uint32_t units_unpack2(int format, uint32_t packed, int half) {
  return unpack2_to_half(static_cast<Format>(format), packed, static_cast<Format>(half));
}
void units_pack_lanes(int format, int n, const uint32_t* upper, const uint32_t* lower, uint32_t* out) {
  for (int i = 0; i < n; i += kLanes)
    (static_cast<Format>(format) == Format::bf16 ? pack_bf16x2_lanes : pack_f16x2_lanes)(out + i, upper + i, lower + i);
}
uint32_t units_round_to_integral(uint32_t a, int rounding, int flush) {
  return round_to_integral_f32(a, static_cast<Rounding>(rounding), flush);
}

// flags: 1 flush, 2 saturate
void units_f32(int operation, int rounding, int flags, int lanes, int n, const uint32_t* a, const uint32_t* b,
               const uint32_t* c, uint32_t* out) {
  const ArithmeticOptions options{static_cast<Rounding>(rounding), (flags & 1) != 0, (flags & 2) != 0};
  for (int i = 0; i < n; i += lanes ? kLanes : 1) switch (operation) {
      case 0:
        lanes ? add_f32_lanes(out + i, a + i, b + i, options) : void(out[i] = add_f32(a[i], b[i], options));
        break;
      case 1:
        lanes ? sub_f32_lanes(out + i, a + i, b + i, options) : void(out[i] = sub_f32(a[i], b[i], options));
        break;
      case 2:
        lanes ? mul_f32_lanes(out + i, a + i, b + i, options) : void(out[i] = mul_f32(a[i], b[i], options));
        break;
      case 3:
        lanes ? fma_f32_lanes(out + i, a + i, b + i, c + i, options)
              : void(out[i] = fma_f32(a[i], b[i], c[i], options));
        break;
      case 4:
        out[i] = div_f32(a[i], b[i], options);
        break;
      case 5:
        out[i] = sqrt_f32(a[i], options);
        break;
      case 6:
        out[i] = rcp_f32(a[i], options);
        break;
    }
}
void units_f64(int operation, int rounding, int n, const double* a, const double* b, const double* c, double* out) {
  const Rounding mode = static_cast<Rounding>(rounding);
  for (int i = 0; i < n; i++)
    out[i] = operation == 0   ? add_f64(a[i], b[i], mode)
             : operation == 2 ? mul_f64(a[i], b[i], mode)
                              : fma_f64(a[i], b[i], c[i], mode);
}
void host_f32(int operation, int rounding, int n, const float* a, const float* b, const float* c, float* out) {
  const int before = std::fegetround();
  std::fesetround(host_mode(rounding));
  for (int i = 0; i < n; i++) out[i] = host_operation(operation, a[i], b[i], c[i]);
  std::fesetround(before);
}
void host_f64(int operation, int rounding, int n, const double* a, const double* b, const double* c, double* out) {
  const int before = std::fegetround();
  std::fesetround(host_mode(rounding));
  for (int i = 0; i < n; i++) out[i] = host_operation(operation, a[i], b[i], c[i]);
  std::fesetround(before);
}
void units_min_max(int maximum, int flags, int lanes, int n, const uint32_t* a, const uint32_t* b, uint32_t* out) {
  const MinMaxOptions options = min_max_options(flags);
  for (int i = 0; i < n; i += lanes ? kLanes : 1) {
    if (lanes)
      (maximum ? max_f32_lanes : min_f32_lanes)(out + i, a + i, b + i, options);
    else
      out[i] = (maximum ? max_f32 : min_f32)(a[i], b[i], options);
  }
}
uint32_t units_min_max3(int maximum, int flags, uint32_t a, uint32_t b, uint32_t c) {
  return (maximum ? max3_f32 : min3_f32)(a, b, c, min_max_options(flags));
}
// operation: 0 add, 1 sub, 2 mul, 3 fma, 4 min, 5 max; flags: 1 flush, 2 saturate, 4 relu
void units_half(int operation, int half, int flags, int n, const uint32_t* a, const uint32_t* b, const uint32_t* c,
                uint32_t* out) {
  const HalfOptions options{static_cast<Format>(half), (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0};
  for (int i = 0; i < n; i++) switch (operation) {
      case 0:
        out[i] = add_half(a[i], b[i], options);
        break;
      case 1:
        out[i] = sub_half(a[i], b[i], options);
        break;
      case 2:
        out[i] = mul_half(a[i], b[i], options);
        break;
      case 3:
        out[i] = fma_half(a[i], b[i], c[i], options);
        break;
      case 4:
        out[i] = min_half(a[i], b[i], options.half, {options.flush, false, false, false});
        break;
      case 5:
        out[i] = max_half(a[i], b[i], options.half, {options.flush, false, false, false});
        break;
    }
}

// ------------------------------------------------------------------------------------------------------ integers

uint64_t units_mul_hi(uint64_t a, uint64_t b, int bits, int is_signed) {
  if (bits == 64) return is_signed ? mul_hi_s64(a, b) : mul_hi_u64(a, b);
  const uint32_t x = static_cast<uint32_t>(a), y = static_cast<uint32_t>(b);
  return is_signed ? mul_hi_s32(x, y) : mul_hi_u32(x, y);
}
uint64_t units_bfe(uint64_t a, uint32_t position, uint32_t length, int bits, int is_signed) {
  return bit_field_extract(a, position, length, bits, is_signed);
}
uint64_t units_bfi(uint64_t a, uint64_t b, uint32_t position, uint32_t length, int bits) {
  return bit_field_insert(a, b, position, length, bits);
}
uint32_t units_bfind(uint64_t a, int bits, int is_signed, int shift_amount) {
  return bit_find(a, bits, is_signed, shift_amount);
}
uint64_t units_brev(uint64_t a, int bits) { return bit_reverse(a, bits); }
uint32_t units_fns(uint32_t mask, uint32_t base, int32_t n) { return find_nth_set(mask, base, n); }
uint32_t units_prmt(uint32_t a, uint32_t b, uint32_t selector, int mode) {
  return permute_bytes(a, b, selector, static_cast<PermuteMode>(mode));
}
uint32_t units_lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) { return lop3(a, b, c, table); }
void units_lop3_lanes(const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t table, uint32_t* out) {
  lop3_lanes(out, a, b, c, table);
}
uint32_t units_shf(uint32_t low, uint32_t high, uint32_t amount, int left, int wrap) {
  return left ? funnel_shift_left(low, high, amount, wrap) : funnel_shift_right(low, high, amount, wrap);
}
uint64_t units_shift(uint64_t a, uint32_t amount, int bits, int left, int is_signed) {
  return left ? shift_left(a, amount, bits) : shift_right(a, amount, bits, is_signed);
}
uint32_t units_dot(uint32_t a, uint32_t b, uint32_t c, int a_signed, int b_signed, int parts, int high) {
  return parts == 4 ? dot4(a, b, c, a_signed, b_signed) : dot2(a, b, c, a_signed, b_signed, high);
}

// -------------------------------------------------------------------------------------------------------- approx

void units_approx(int operation, int flush, int lanes, int n, const uint32_t* in, uint32_t* out) {
  using Unary = uint32_t (*)(uint32_t, bool);
  static constexpr Unary functions[] = {ex2_approx_f32,  lg2_approx_f32, rcp_approx_f32, rsqrt_approx_f32,
                                        sqrt_approx_f32, sin_approx_f32, cos_approx_f32};
  for (int i = 0; i < n; i += lanes ? kLanes : 1) {
    if (lanes)
      ex2_approx_f32_lanes(out + i, in + i, flush);
    else
      out[i] = operation == 7 ? tanh_approx_f32(in[i]) : functions[operation](in[i], flush);
  }
}
void units_approx_half(int tanh, int half, int flush, int n, const uint32_t* in, uint32_t* out) {
  const Format format = static_cast<Format>(half);
  for (int i = 0; i < n; i++) out[i] = tanh ? tanh_approx_half(in[i], format) : ex2_approx_half(in[i], format, flush);
}
uint32_t units_div_approx(uint32_t a, uint32_t b, int flush, int full) { return div_approx_f32(a, b, flush, full); }

// ------------------------------------------------------------------------------------------------ tensor maps, TMA

int units_encode_map(const MapFields* fields, void* words, char* error) {
  return report(encode_tensor_map(map_of(*fields), words), error);
}
int units_decode_map(const void* words, MapFields* fields, char* error) {
  TensorMap map;
  const std::string sentence = decode_tensor_map(words, map);
  fields_of(map, *fields);
  return report(sentence, error);
}
int units_check_tile_copy(const MapFields* fields, int rank, uint32_t shared_address, char* error) {
  return report(check_tile_copy(map_of(*fields), rank, shared_address), error);
}
uint32_t units_box_bytes(const MapFields* fields) { return box_bytes(map_of(*fields)); }
// runs: 4 values each (global address, shared address, bytes, in bounds); gives the number of runs.
int units_walk_box(const MapFields* fields, const int32_t* coordinates, uint32_t shared_address, uint64_t* runs) {
  int count = 0;
  walk_box(map_of(*fields), coordinates, shared_address, [&](const BoxRun& run) {
    uint64_t* to = runs + 4 * count++;
    to[0] = run.global_address;
    to[1] = run.shared_address;
    to[2] = run.bytes;
    to[3] = run.in_bounds;
  });
  return count;
}
int units_walk_rows(const MapFields* fields, const int32_t* coordinates, uint32_t shared_address, uint64_t* rows) {
  int count = 0;
  walk_box_rows(map_of(*fields), coordinates, shared_address, [&](const BoxRow& row) {
    uint64_t* to = rows + 3 * count++;
    to[0] = row.global_address;
    to[1] = row.global_bytes;
    to[2] = row.linear_shared_address;
  });
  return count;
}
// A whole load: global memory begins at address `origin`.
void units_load_box(const MapFields* fields, const int32_t* coordinates, uint32_t shared_address, const uint8_t* global,
                    uint64_t origin, uint8_t* shared) {
  const TensorMap map = map_of(*fields);
  walk_box(map, coordinates, shared_address, [&](const BoxRun& run) {
    uint8_t* to = shared + run.shared_address;
    if (!run.in_bounds) return fill_out_of_bounds(map, to, run.bytes);
    std::memcpy(to, global + (run.global_address - origin), run.bytes);
    convert_loaded(map, to, run.bytes);
  });
}
uint32_t units_swizzle(uint32_t address, int swizzle) {
  return swizzle_address(address, static_cast<Swizzle>(swizzle));
}
int units_reduce(int reduction, int element, void* destination, const void* source, uint32_t bytes, char* error) {
  const std::string sentence = check_reduction(static_cast<Reduction>(reduction), static_cast<Element>(element));
  if (sentence.empty())
    reduce_elements(static_cast<Reduction>(reduction), static_cast<Element>(element), destination, source, bytes);
  return report(sentence, error);
}

// ------------------------------------------------------------------------------------------------------ matrices

int units_decode_descriptor(int blackwell, uint64_t bits, uint32_t* fields, char* error) {
  MatrixDescriptor descriptor;
  const std::string sentence =
      blackwell ? decode_tcgen05_descriptor(bits, descriptor) : decode_wgmma_descriptor(bits, descriptor);
  fields[0] = descriptor.start;
  fields[1] = descriptor.leading_bytes;
  fields[2] = descriptor.stride_bytes;
  fields[3] = static_cast<uint32_t>(descriptor.swizzle);
  return report(sentence, error);
}
uint64_t units_encode_descriptor(int blackwell, const OperandFields* fields) {
  const MatrixDescriptor descriptor = operand_of(*fields).descriptor;
  return blackwell ? encode_tcgen05_descriptor(descriptor) : encode_wgmma_descriptor(descriptor);
}
int units_check_operand(const OperandFields* fields, char* error) {
  return report(check_operand(operand_of(*fields)), error);
}
void units_gather(const OperandFields* fields, const uint8_t* shared, int negate, int transposed, float* out,
                  uint64_t pitch) {
  (transposed ? gather_transposed : gather_rows)(operand_of(*fields), shared, negate, out, pitch);
}
void units_gather_s32(const OperandFields* fields, const uint8_t* shared, int is_signed, int32_t* out, uint64_t pitch) {
  gather_rows_s32(operand_of(*fields), shared, is_signed, out, pitch);
}
int units_walk_operand(const OperandFields* fields, uint32_t* addresses) {
  int count = 0;
  walk_operand(operand_of(*fields), [&](uint32_t address) { addresses[count++] = address; });
  return count;
}
int units_decode_instruction(uint32_t bits, int kind, int cta_group, InstructionFields* f, char* error) {
  InstructionDescriptor instruction;
  const std::string sentence = decode_instruction_descriptor(bits, static_cast<MmaKind>(kind), cta_group, instruction);
  *f = {instruction.shape.m,
        instruction.shape.n,
        instruction.shape.k,
        static_cast<int32_t>(instruction.a_format),
        static_cast<int32_t>(instruction.b_format),
        instruction.a_signed,
        instruction.b_signed,
        instruction.accumulate_f16,
        instruction.saturate_s32,
        instruction.negate_a,
        instruction.negate_b,
        static_cast<int32_t>(instruction.a_major),
        static_cast<int32_t>(instruction.b_major)};
  return report(sentence, error);
}
uint32_t units_encode_instruction(const InstructionFields* f, int kind) {
  return encode_instruction_descriptor(instruction_of(*f), static_cast<MmaKind>(kind));
}
int units_multiply_tensor(const InstructionFields* f, int kind, int cta_group, int accumulate, int scale, uint32_t lane,
                          uint32_t column, const uint32_t* disabled, const float* a, int a_blocks, const float* b,
                          uint32_t* tensor_memory, char* error) {
  MmaProduct product{
      instruction_of(*f), static_cast<MmaKind>(kind), cta_group, accumulate != 0, scale, lane, column, disabled};
  const std::string sentence = check_accumulator(product);
  if (sentence.empty()) multiply_into_tensor_memory(product, a, a_blocks, b, tensor_memory);
  return report(sentence, error);
}
void units_multiply_tensor_s32(const InstructionFields* f, int cta_group, int accumulate, const int32_t* a,
                               const int32_t* b, uint32_t* tensor_memory) {
  MmaProduct product;
  product.instruction = instruction_of(*f);
  product.kind = MmaKind::i8;
  product.cta_group = cta_group;
  product.accumulate = accumulate;
  multiply_into_tensor_memory_s32(product, a, b, tensor_memory);
}
void units_gather_a_tensor(const InstructionFields* f, int cta_group, int block, uint32_t lane, uint32_t column,
                           const uint32_t* tensor_memory, float* out) {
  gather_a_from_tensor_memory(instruction_of(*f), cta_group, block, lane, column, tensor_memory, out);
}
void units_gather_a_registers(int format, uint32_t* registers, int negate, float* out) {
  const std::vector<uint32_t*> rows = rows_of(registers, 4);
  gather_a_from_registers(static_cast<Format>(format), rows.data(), negate, out);
}
void units_wgmma(int n, int k, int accumulate, int accumulate_f16, const float* a, const float* b,
                 uint32_t* registers) {
  multiply_into_registers({n, k, accumulate != 0, accumulate_f16 != 0}, a, b, rows_of(registers, n / 2).data());
}
void units_mma_sync(int a_format, int b_format, int k, uint32_t* a, int a_registers, uint32_t* b, uint32_t* c,
                    uint32_t* d) {
  mma_sync_m16n8(static_cast<Format>(a_format), static_cast<Format>(b_format), k, rows_of(a, a_registers).data(),
                 rows_of(b, a_registers / 2).data(), rows_of(c, 4).data(), rows_of(d, 4).data());
}

// ------------------------------------------------------------------------------------------------- tensor memory

int units_tensor_access(int shape, int registers, int pack, int split, uint32_t address, int warp, int store,
                        uint32_t* tensor_memory, uint32_t* words, char* error) {
  const TensorAccess access{static_cast<TensorShape>(shape), registers, pack != 0, split};
  const std::string sentence = check_tensor_access(access, address, warp);
  if (sentence.empty()) {
    const std::vector<uint32_t*> rows = rows_of(words, registers);
    if (store)
      store_tensor(access, address, tensor_memory, rows.data());
    else
      load_tensor(access, address, tensor_memory, rows.data());
  }
  return report(sentence, error);
}
int units_walk_tensor(int shape, int registers, int pack, int split, uint32_t address, int32_t* cells) {
  int count = 0;
  walk_tensor_access({static_cast<TensorShape>(shape), registers, pack != 0, split}, address,
                     [&](int lane, int column) {
                       cells[2 * count] = lane;
                       cells[2 * count++ + 1] = column;
                     });
  return count;
}
int units_tensor_columns(int shape, int registers, int pack) {
  return tensor_access_columns({static_cast<TensorShape>(shape), registers, pack != 0, 0});
}
int units_walk_copy(int shape, const OperandFields* fields, int32_t* pieces) {
  int count = 0;
  walk_tensor_copy(static_cast<TensorCopyShape>(shape), operand_of(*fields).descriptor,
                   [&](uint32_t address, int lane, int column) {
                     int32_t* to = pieces + 3 * count++;
                     to[0] = static_cast<int32_t>(address);
                     to[1] = lane;
                     to[2] = column;
                   });
  return count;
}
void units_load_matrix(const uint16_t* rows, int transpose, uint32_t* registers) {
  load_matrix(reinterpret_cast<const uint16_t (*)[8]>(rows), transpose, registers);
}
void units_store_matrix(uint16_t* rows, int transpose, const uint32_t* registers) {
  store_matrix(reinterpret_cast<uint16_t (*)[8]>(rows), transpose, registers);
}
void units_store_matrix_b8(uint8_t* rows, const uint32_t* registers) {
  store_matrix_b8(reinterpret_cast<uint8_t (*)[16]>(rows), registers);
}
void units_transpose_matrix(uint32_t* out, const uint32_t* in) { transpose_matrix(out, in); }

}  // extern "C"

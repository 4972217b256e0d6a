// Tensor-memory access shapes and 8x8 matrix fragments.
#include "tmem.h"

namespace jax_fa4::emulator {
namespace {

// Place of a thread's 32-bit register when nothing is packed.
EMULATOR_INLINE TensorPlace register_place(TensorShape shape, int thread, int index) {
  switch (shape) {
    case TensorShape::lanes32_bits32:
      return {thread, index};
    case TensorShape::lanes16_bits64:
      return {thread / 4 + 8 * (thread & 1), 2 * index + (thread >> 1 & 1)};
    case TensorShape::lanes16_bits128:
      return {thread / 4 + 8 * (index & 1), 4 * (index >> 1) + (thread & 3)};
    case TensorShape::lanes16_bits256:
      return {thread / 4 + 8 * (index >> 1 & 1), 8 * (index >> 2) + 2 * (thread & 3) + (index & 1)};
    case TensorShape::lanes16_bits32x2:
      return {thread & 15, index};
  }
  return {0, 0};
}

size_t cell(int lane, int column) { return static_cast<size_t>(lane) * kTensorColumns + static_cast<size_t>(column); }

}  // namespace

int registers_per_repeat(TensorShape shape) {
  switch (shape) {
    case TensorShape::lanes16_bits128:
      return 2;
    case TensorShape::lanes16_bits256:
      return 4;
    default:
      return 1;
  }
}

int tensor_access_lanes(const TensorAccess& access) { return access.shape == TensorShape::lanes32_bits32 ? 32 : 16; }

int tensor_access_columns(const TensorAccess& access) {
  const bool one_a_register =
      access.shape == TensorShape::lanes32_bits32 || access.shape == TensorShape::lanes16_bits32x2;
  return access.registers * (one_a_register ? 1 : 2) * (access.pack ? 2 : 1);
}

TensorPlace tensor_place(const TensorAccess& access, int thread, int index) {
  TensorPlace place = register_place(access.shape, thread, access.pack ? index / 2 : index);
  if (access.pack) place.column = 2 * place.column + index % 2;
  if (access.shape == TensorShape::lanes16_bits32x2 && thread >= 16) place.column += access.half_split;
  return place;
}

std::string check_tensor_access(const TensorAccess& access, uint32_t address, int warp_index) {
  const int lane = static_cast<int>(address >> 16), column = static_cast<int>(address & 0xffff);
  const int first = 32 * (warp_index % 4), lanes = tensor_access_lanes(access);
  if (lane < first || lane + lanes > first + 32 || (lane - first) % lanes != 0)
    return "Warp " + std::to_string(warp_index) + " accesses tensor-memory lanes " + std::to_string(lane) + " to " +
           std::to_string(lane + lanes - 1) + "; it may access lanes " + std::to_string(first) + " to " +
           std::to_string(first + 31) + (lanes == 16 ? " in halves of 16." : " only.");
  int last = column + tensor_access_columns(access);
  if (access.shape == TensorShape::lanes16_bits32x2) last += access.half_split;
  if (last > kTensorColumns)
    return "A tensor-memory access of columns " + std::to_string(column) + " to " + std::to_string(last - 1) +
           " goes beyond column 511.";
  return {};
}

namespace {

// Calls visit(register, thread, cell of the first element) with the shape known at compile time: the maps are then
// plain arithmetic.
template <TensorShape kShape, class Visit>
EMULATOR_INLINE void each_register_of(const TensorAccess& access, Visit&& visit) {
  const int scale = access.pack ? 2 : 1;
  for (int index = 0; index < access.registers; index++)
    for (int thread = 0; thread < kLanes; thread++) {
      const TensorPlace place = register_place(kShape, thread, index);
      const int split = kShape == TensorShape::lanes16_bits32x2 && thread >= 16 ? access.half_split : 0;
      visit(index, thread, cell(place.lane, place.column * scale + split));
    }
}

template <class Visit>
EMULATOR_INLINE void each_register(const TensorAccess& access, Visit&& visit) {
  switch (access.shape) {
    case TensorShape::lanes32_bits32:
      return each_register_of<TensorShape::lanes32_bits32>(access, visit);
    case TensorShape::lanes16_bits64:
      return each_register_of<TensorShape::lanes16_bits64>(access, visit);
    case TensorShape::lanes16_bits128:
      return each_register_of<TensorShape::lanes16_bits128>(access, visit);
    case TensorShape::lanes16_bits256:
      return each_register_of<TensorShape::lanes16_bits256>(access, visit);
    case TensorShape::lanes16_bits32x2:
      return each_register_of<TensorShape::lanes16_bits32x2>(access, visit);
  }
}

size_t origin_of(uint32_t address) { return cell(static_cast<int>(address >> 16), static_cast<int>(address & 0xffff)); }

}  // namespace

void load_tensor(const TensorAccess& access, uint32_t address, const uint32_t* tensor_memory,
                 uint32_t* const* registers) {
  const uint32_t* origin = tensor_memory + origin_of(address);
  if (!access.pack)
    return each_register(access, [&](int index, int thread, size_t at) { registers[index][thread] = origin[at]; });
  each_register(access, [&](int index, int thread, size_t at) {
    registers[index][thread] = (origin[at] & 0xffff) | origin[at + 1] << 16;
  });
}

void store_tensor(const TensorAccess& access, uint32_t address, uint32_t* tensor_memory,
                  const uint32_t* const* registers) {
  uint32_t* origin = tensor_memory + origin_of(address);
  if (!access.pack)
    return each_register(access, [&](int index, int thread, size_t at) { origin[at] = registers[index][thread]; });
  each_register(access, [&](int index, int thread, size_t at) {
    origin[at] = registers[index][thread] & 0xffff;
    origin[at + 1] = registers[index][thread] >> 16;
  });
}

// ----------------------------------------------------------------------------------------------------- tcgen05.cp

namespace detail {

CopyPlan copy_plan(TensorCopyShape shape) {
  switch (shape) {
    case TensorCopyShape::rows128_bits256:
      return {128, 2};
    case TensorCopyShape::rows128_bits128:
      return {128, 1};
    case TensorCopyShape::rows4_bits256:
      return {4, 2};
    case TensorCopyShape::rows64_bits128_02_13:
    case TensorCopyShape::rows64_bits128_01_23:
      return {64, 1};
    case TensorCopyShape::rows32_bits128_x4:
      return {32, 1};
  }
  return {0, 0};
}

void copy_lanes(TensorCopyShape shape, int row, int lanes[4]) {
  for (int i = 0; i < 4; i++) lanes[i] = -1;
  switch (shape) {
    case TensorCopyShape::rows128_bits256:
    case TensorCopyShape::rows128_bits128:
      lanes[0] = row;
      return;
    case TensorCopyShape::rows4_bits256:
      lanes[0] = 32 * row;
      return;
    case TensorCopyShape::rows64_bits128_02_13:
      lanes[0] = row;
      lanes[1] = row + 64;
      return;
    case TensorCopyShape::rows64_bits128_01_23:
      lanes[0] = 64 * (row / 32) + row % 32;
      lanes[1] = lanes[0] + 32;
      return;
    case TensorCopyShape::rows32_bits128_x4:
      for (int i = 0; i < 4; i++) lanes[i] = row + 32 * i;
  }
}

}  // namespace detail

int tensor_copy_columns(TensorCopyShape shape) { return 4 * detail::copy_plan(shape).pieces; }

// ------------------------------------------------------------------------------------------------------- matrices

void load_matrix(const uint16_t rows[8][8], bool transpose, uint32_t* registers) {
  for (int thread = 0; thread < kLanes; thread++) {
    const int major = thread / 4, minor = 2 * (thread % 4);
    const uint32_t low = transpose ? rows[minor][major] : rows[major][minor];
    const uint32_t high = transpose ? rows[minor + 1][major] : rows[major][minor + 1];
    registers[thread] = low | high << 16;
  }
}

void store_matrix(uint16_t rows[8][8], bool transpose, const uint32_t* registers) {
  for (int thread = 0; thread < kLanes; thread++) {
    const int major = thread / 4, minor = 2 * (thread % 4);
    for (int i = 0; i < 2; i++) {
      const uint16_t element = static_cast<uint16_t>(registers[thread] >> (16 * i));
      (transpose ? rows[minor + i][major] : rows[major][minor + i]) = element;
    }
  }
}

void store_matrix_b8(uint8_t rows[8][16], const uint32_t* registers) {
  for (int thread = 0; thread < kLanes; thread++)
    for (int i = 0; i < 4; i++)
      rows[2 * (thread % 4) + i % 2][thread / 4 + 8 * (i / 2)] = static_cast<uint8_t>(registers[thread] >> (8 * i));
}

void transpose_matrix(uint32_t* out, const uint32_t* in) {
  uint16_t rows[8][8];
  store_matrix(rows, false, in);
  load_matrix(rows, true, out);
}

}  // namespace jax_fa4::emulator

// Integer and bit instructions of PTX.
#include <algorithm>
#include <bit>

#include "formats.h"

namespace jax_fa4::emulator {
namespace {

constexpr uint64_t low_mask(int bits) { return bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1; }

int64_t sign_extend(uint64_t a, int bits) { return static_cast<int64_t>(a << (64 - bits)) >> (64 - bits); }

int32_t byte_of(uint32_t word, int index, bool is_signed) {
  const uint32_t byte = (word >> (8 * index)) & 0xff;
  return is_signed ? static_cast<int8_t>(byte) : static_cast<int32_t>(byte);
}

int32_t half_of(uint32_t word, int index, bool is_signed) {
  const uint32_t half = (word >> (16 * index)) & 0xffff;
  return is_signed ? static_cast<int16_t>(half) : static_cast<int32_t>(half);
}

}  // namespace

uint64_t mul_hi_u64(uint64_t a, uint64_t b) {
  const uint64_t a_low = a & 0xffffffff, a_high = a >> 32, b_low = b & 0xffffffff, b_high = b >> 32;
  const uint64_t middle = a_high * b_low + ((a_low * b_low) >> 32);
  const uint64_t carry = a_low * b_high + (middle & 0xffffffff);
  return a_high * b_high + (middle >> 32) + (carry >> 32);
}

uint64_t mul_hi_s64(uint64_t a, uint64_t b) { return mul_hi_u64(a, b) - ((a >> 63) ? b : 0) - ((b >> 63) ? a : 0); }

uint64_t bit_field_extract(uint64_t a, uint32_t position, uint32_t length, int bits, bool is_signed) {
  position &= 0xff;
  length &= 0xff;
  a &= low_mask(bits);
  const uint32_t width = static_cast<uint32_t>(bits);
  // Bits beyond the register read as its sign (signed) or as zero.
  const uint64_t wide = is_signed ? static_cast<uint64_t>(sign_extend(a, bits)) : a;
  if (length == 0) return 0;
  uint64_t field;
  if (position >= width)
    field = is_signed && (a >> (bits - 1)) ? ~uint64_t{0} : 0;
  else
    field = is_signed ? static_cast<uint64_t>(static_cast<int64_t>(wide) >> position) : wide >> position;
  if (length >= width) return field & low_mask(bits);
  field &= low_mask(static_cast<int>(length));
  return (is_signed ? static_cast<uint64_t>(sign_extend(field, static_cast<int>(length))) : field) & low_mask(bits);
}

uint64_t bit_field_insert(uint64_t a, uint64_t b, uint32_t position, uint32_t length, int bits) {
  position &= 0xff;
  length &= 0xff;
  if (position >= static_cast<uint32_t>(bits) || length == 0) return b & low_mask(bits);
  const uint64_t mask = low_mask(static_cast<int>(std::min(length, 64u))) << position;
  return ((b & ~mask) | ((a << position) & mask)) & low_mask(bits);
}

uint32_t bit_find(uint64_t a, int bits, bool is_signed, bool shift_amount) {
  a &= low_mask(bits);
  if (is_signed && (a >> (bits - 1))) a = ~a & low_mask(bits);
  if (a == 0) return 0xffffffff;
  const uint32_t position = 63 - static_cast<uint32_t>(std::countl_zero(a));
  return shift_amount ? static_cast<uint32_t>(bits) - 1 - position : position;
}

uint64_t bit_reverse(uint64_t a, int bits) {
  uint64_t result = 0;
  for (int i = 0; i < bits; i++) result |= ((a >> i) & 1) << (bits - 1 - i);
  return result;
}

uint32_t find_nth_set(uint32_t mask, uint32_t base, int32_t n) {
  if (base > 31) return 0xffffffff;
  if (n == 0) return (mask >> base) & 1 ? base : 0xffffffff;
  const int direction = n > 0 ? 1 : -1;
  int64_t left = n > 0 ? n : -int64_t{n};
  for (int at = static_cast<int>(base); at >= 0 && at < 32; at += direction)
    if (((mask >> at) & 1) && --left == 0) return static_cast<uint32_t>(at);
  return 0xffffffff;
}

uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector, PermuteMode mode) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  const auto byte_at = [&](uint32_t index) { return static_cast<uint32_t>(bytes >> (8 * (index & 7))) & 0xff; };
  uint32_t result = 0;
  const uint32_t start = selector & 3;
  for (uint32_t i = 0; i < 4; i++) {
    uint32_t byte = 0;
    switch (mode) {
      case PermuteMode::index: {
        const uint32_t nibble = (selector >> (4 * i)) & 0xf;
        byte = byte_at(nibble & 7);
        if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
        break;
      }
      case PermuteMode::forward4:
        byte = byte_at(start + i);
        break;
      case PermuteMode::backward4:
        byte = byte_at(start - i);
        break;
      case PermuteMode::replicate8:
        byte = byte_at(start);
        break;
      case PermuteMode::edge_left:
        byte = byte_at(std::max(start, i));
        break;
      case PermuteMode::edge_right:
        byte = byte_at(std::min(start, i));
        break;
      case PermuteMode::replicate16:
        byte = byte_at((start & 1) * 2 + (i & 1));
        break;
    }
    result |= byte << (8 * i);
  }
  return result;
}

EMULATOR_CLONES void lop3_lanes(uint32_t* out, const uint32_t* a, const uint32_t* b, const uint32_t* c,
                                uint32_t table) {
  uint32_t use[8];
  for (int i = 0; i < 8; i++) use[i] = (table >> i) & 1 ? ~0u : 0u;
  for (int lane = 0; lane < kLanes; lane++) {
    const uint32_t x = a[lane], y = b[lane], z = c[lane];
    out[lane] = (use[7] & x & y & z) | (use[6] & x & y & ~z) | (use[5] & x & ~y & z) | (use[4] & x & ~y & ~z) |
                (use[3] & ~x & y & z) | (use[2] & ~x & y & ~z) | (use[1] & ~x & ~y & z) | (use[0] & ~x & ~y & ~z);
  }
}

uint32_t funnel_shift_left(uint32_t low, uint32_t high, uint32_t amount, bool wrap) {
  const uint32_t shift = wrap ? amount & 31 : std::min(amount, 32u);
  return static_cast<uint32_t>(((uint64_t{high} << 32 | low) << shift) >> 32);
}

uint32_t funnel_shift_right(uint32_t low, uint32_t high, uint32_t amount, bool wrap) {
  const uint32_t shift = wrap ? amount & 31 : std::min(amount, 32u);
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> shift);
}

uint64_t shift_left(uint64_t a, uint32_t amount, int bits) {
  return amount >= static_cast<uint32_t>(bits) ? 0 : (a << amount) & low_mask(bits);
}

uint64_t shift_right(uint64_t a, uint32_t amount, int bits, bool is_signed) {
  const uint32_t width = static_cast<uint32_t>(bits);
  a &= low_mask(bits);
  if (!is_signed) return amount >= width ? 0 : a >> amount;
  return static_cast<uint64_t>(sign_extend(a, bits) >> std::min(amount, width - 1)) & low_mask(bits);
}

uint32_t dot4(uint32_t a, uint32_t b, uint32_t c, bool a_signed, bool b_signed) {
  for (int i = 0; i < 4; i++) c += static_cast<uint32_t>(byte_of(a, i, a_signed) * byte_of(b, i, b_signed));
  return c;
}

uint32_t dot2(uint32_t a, uint32_t b, uint32_t c, bool a_signed, bool b_signed, bool high_half) {
  for (int i = 0; i < 2; i++)
    c += static_cast<uint32_t>(half_of(a, i, a_signed) * byte_of(b, i + (high_half ? 2 : 0), b_signed));
  return c;
}

}  // namespace jax_fa4::emulator

// Integer and bit operations on 32 lanes. Source: PTX ISA, "Integer Arithmetic Instructions", "Logic and Shift
// Instructions".
#include <algorithm>
#include <bit>
#include <cstring>

#include "lane_functions.h"

namespace jax_fa4::emulator {
namespace lanes {

// One operation in three widths: U, S are the unsigned and signed element types, W a type that holds a product. The
// expression sees x, y, z (unsigned) and `bits`.
#define EMULATOR_LANES_NARROW(name, width, wider, expression)                                                 \
  EMULATOR_CLONES void name##_##width(uint32_t* out, const uint32_t* a, const uint32_t* b, const uint32_t* c, \
                                      const Instruction&) {                                                   \
    using U = uint##width##_t;                                                                                \
    using S [[maybe_unused]] = int##width##_t;                                                                \
    using W [[maybe_unused]] = uint##wider##_t;                                                               \
    using SW [[maybe_unused]] = int##wider##_t;                                                               \
    constexpr int bits [[maybe_unused]] = width;                                                              \
    for (int lane = 0; lane < kLanes; lane++) {                                                               \
      const U x [[maybe_unused]] = static_cast<U>(a[lane]), y [[maybe_unused]] = static_cast<U>(b[lane]),     \
                z [[maybe_unused]] = static_cast<U>(c[lane]);                                                 \
      out[lane] = static_cast<U>(expression);                                                                 \
    }                                                                                                         \
  }
#define EMULATOR_LANES_WIDE(name, expression)                                                            \
  EMULATOR_CLONES void name##_64(uint32_t* out, const uint32_t* a, const uint32_t* b, const uint32_t* c, \
                                 const Instruction& i [[maybe_unused]]) {                                \
    using U = uint64_t;                                                                                  \
    using S [[maybe_unused]] = int64_t;                                                                  \
    using W [[maybe_unused]] = unsigned __int128;                                                        \
    using SW [[maybe_unused]] = __int128;                                                                \
    constexpr int bits [[maybe_unused]] = 64;                                                            \
    for (int lane = 0; lane < kLanes; lane++) {                                                          \
      const U x [[maybe_unused]] = wide(a, lane), y [[maybe_unused]] = wide(b, lane),                    \
                z [[maybe_unused]] = wide(c, lane);                                                      \
      put_wide(out, lane, static_cast<U>(expression));                                                   \
    }                                                                                                    \
  }
#define EMULATOR_LANES(name, expression)          \
  EMULATOR_LANES_NARROW(name, 16, 32, expression) \
  EMULATOR_LANES_NARROW(name, 32, 64, expression) \
  EMULATOR_LANES_WIDE(name, expression)

EMULATOR_LANES(add, x + y)
EMULATOR_LANES(sub, x - y)
EMULATOR_LANES(mul_lo, static_cast<W>(x) * y)
EMULATOR_LANES(mul_hi_u, (static_cast<W>(x) * y) >> bits)
EMULATOR_LANES(mul_hi_s, (static_cast<SW>(static_cast<S>(x)) * static_cast<S>(y)) >> bits)
EMULATOR_LANES(mad_lo, static_cast<W>(x) * y + z)
EMULATOR_LANES(mad_hi_u, ((static_cast<W>(x) * y) >> bits) + z)
EMULATOR_LANES(mad_hi_s, ((static_cast<SW>(static_cast<S>(x)) * static_cast<S>(y)) >> bits) + z)
// A division by zero gives an unspecified value: all ones here. The most negative value over -1 wraps.
EMULATOR_LANES(divide_u, y == 0 ? static_cast<U>(-1) : x / y)
EMULATOR_LANES(divide_s, y == 0                    ? static_cast<U>(-1)
                         : static_cast<S>(y) == -1 ? static_cast<U>(U{0} - x)
                                                   : static_cast<S>(x) / static_cast<S>(y))
EMULATOR_LANES(remainder_u, y == 0 ? x : x % y)
EMULATOR_LANES(remainder_s, y == 0 ? x : static_cast<S>(y) == -1 ? U{0} : static_cast<S>(x) % static_cast<S>(y))
EMULATOR_LANES(minimum_u, x < y ? x : y)
EMULATOR_LANES(minimum_s, static_cast<S>(x) < static_cast<S>(y) ? x : y)
EMULATOR_LANES(maximum_u, x > y ? x : y)
EMULATOR_LANES(maximum_s, static_cast<S>(x) > static_cast<S>(y) ? x : y)
// .relu, of s32 alone: a negative result becomes 0.
EMULATOR_LANES_NARROW(minimum_relu, 32, 64, std::max(std::min(static_cast<S>(x), static_cast<S>(y)), S{0}))
EMULATOR_LANES_NARROW(maximum_relu, 32, 64, std::max(std::max(static_cast<S>(x), static_cast<S>(y)), S{0}))
EMULATOR_LANES(absolute, static_cast<S>(x) < 0 ? static_cast<U>(U{0} - x) : x)
EMULATOR_LANES(negate, U{0} - x)
EMULATOR_LANES(bit_and, x& y)
EMULATOR_LANES(bit_or, x | y)
EMULATOR_LANES(bit_xor, x ^ y)
EMULATOR_LANES(bit_not, ~x)
EMULATOR_LANES(cnot, x == 0 ? 1 : 0)
EMULATOR_LANES(sad_u, (x > y ? x - y : y - x) + z)
EMULATOR_LANES(sad_s, (static_cast<S>(x) > static_cast<S>(y) ? x - y : y - x) + z)

// Shift amounts are 32-bit registers for every type and clamp to the width.
#define EMULATOR_SHIFT(name, width, expression)                                                             \
  EMULATOR_CLONES void name##_##width(uint32_t* out, const uint32_t* a, const uint32_t* b, const uint32_t*, \
                                      const Instruction&) {                                                 \
    using U = uint##width##_t;                                                                              \
    using S [[maybe_unused]] = int##width##_t;                                                              \
    constexpr uint32_t bits = width;                                                                        \
    for (int lane = 0; lane < kLanes; lane++) {                                                             \
      const U x = static_cast<U>(bits == 64 ? wide(a, lane) : a[lane]);                                     \
      const uint32_t n = b[lane];                                                                           \
      const U result = static_cast<U>(expression);                                                          \
      if (bits == 64)                                                                                       \
        put_wide(out, lane, result);                                                                        \
      else                                                                                                  \
        out[lane] = static_cast<uint32_t>(result);                                                          \
    }                                                                                                       \
  }
#define EMULATOR_SHIFTS(name, expression) \
  EMULATOR_SHIFT(name, 16, expression)    \
  EMULATOR_SHIFT(name, 32, expression)    \
  EMULATOR_SHIFT(name, 64, expression)
EMULATOR_SHIFTS(shift_left, n >= bits ? U{0} : x << (n % bits))
EMULATOR_SHIFTS(shift_right_u, n >= bits ? U{0} : x >> (n % bits))
EMULATOR_SHIFTS(shift_right_s, static_cast<S>(x) >> (n >= bits ? bits - 1 : n))

#define EMULATOR_COUNT(name, width, expression)                                                                 \
  void name##_##width(uint32_t* out, const uint32_t* a, const uint32_t*, const uint32_t*, const Instruction&) { \
    for (int lane = 0; lane < kLanes; lane++) {                                                                 \
      const auto x = static_cast<uint##width##_t>(width == 64 ? wide(a, lane) : a[lane]);                       \
      out[lane] = static_cast<uint32_t>(expression);                                                            \
    }                                                                                                           \
  }
EMULATOR_COUNT(popc, 32, std::popcount(x))
EMULATOR_COUNT(popc, 64, std::popcount(x))
EMULATOR_COUNT(clz, 32, std::countl_zero(x))
EMULATOR_COUNT(clz, 64, std::countl_zero(x))

void reverse_32(uint32_t* out, const uint32_t* a, const uint32_t*, const uint32_t*, const Instruction&) {
  for (int lane = 0; lane < kLanes; lane++) out[lane] = static_cast<uint32_t>(bit_reverse(a[lane], 32));
}
void reverse_64(uint32_t* out, const uint32_t* a, const uint32_t*, const uint32_t*, const Instruction&) {
  for (int lane = 0; lane < kLanes; lane++) put_wide(out, lane, bit_reverse(wide(a, lane), 64));
}

// ------------------------------------------------------------------------------------------------- widening products
#define EMULATOR_WIDENING(name, from, to, kind, addend)                                                              \
  EMULATOR_CLONES void name(uint32_t* out, const uint32_t* a, const uint32_t* b, const uint32_t* c [[maybe_unused]], \
                            const Instruction&) {                                                                    \
    for (int lane = 0; lane < kLanes; lane++) {                                                                      \
      using T = kind##from##_t;                                                                                      \
      const auto product = static_cast<uint##to##_t>(static_cast<kind##to##_t>(static_cast<T>(a[lane])) *            \
                                                     static_cast<kind##to##_t>(static_cast<T>(b[lane])));            \
      const uint64_t sum = uint64_t{product} + (addend);                                                             \
      if (to == 64)                                                                                                  \
        put_wide(out, lane, sum);                                                                                    \
      else                                                                                                           \
        out[lane] = static_cast<uint32_t>(sum);                                                                      \
    }                                                                                                                \
  }
EMULATOR_WIDENING(mul_wide_u16, 16, 32, uint, 0)
EMULATOR_WIDENING(mul_wide_s16, 16, 32, int, 0)
EMULATOR_WIDENING(mul_wide_u32, 32, 64, uint, 0)
EMULATOR_WIDENING(mul_wide_s32, 32, 64, int, 0)
EMULATOR_WIDENING(mad_wide_u16, 16, 32, uint, c[lane])
EMULATOR_WIDENING(mad_wide_s16, 16, 32, int, c[lane])
EMULATOR_WIDENING(mad_wide_u32, 32, 64, uint, wide(c, lane))
EMULATOR_WIDENING(mad_wide_s32, 32, 64, int, wide(c, lane))

// ---------------------------------------------------------------------------------------------------------------- bits
#define EMULATOR_BITS(name)                                                                        \
  void name(uint32_t* out, const uint32_t* a [[maybe_unused]], const uint32_t* b [[maybe_unused]], \
            const uint32_t* c [[maybe_unused]], const Instruction& i [[maybe_unused]])

EMULATOR_BITS(bfind) {
  const int bits = type_bits(i.source_type);
  for (int lane = 0; lane < kLanes; lane++)
    out[lane] = bit_find(bits == 64 ? wide(a, lane) : a[lane], bits, is_signed(i.source_type), i.mode != 0);
}
EMULATOR_BITS(bfe_32) {
  for (int lane = 0; lane < kLanes; lane++)
    out[lane] =
        static_cast<uint32_t>(bit_field_extract(a[lane], b[lane] & 0xff, c[lane] & 0xff, 32, is_signed(i.type)));
}
EMULATOR_BITS(bfe_64) {
  for (int lane = 0; lane < kLanes; lane++)
    put_wide(out, lane, bit_field_extract(wide(a, lane), b[lane] & 0xff, c[lane] & 0xff, 64, is_signed(i.type)));
}
// lop3 with its table in `mode`; the fourth operand of bfi comes through lists (see decode): here mode-less forms only.
EMULATOR_BITS(lop3) { lop3_lanes(out, a, b, c, i.mode); }
EMULATOR_BITS(permute) {
  for (int lane = 0; lane < kLanes; lane++)
    out[lane] = permute_bytes(a[lane], b[lane], c[lane], static_cast<PermuteMode>(i.mode));
}
EMULATOR_BITS(funnel_left) {
  for (int lane = 0; lane < kLanes; lane++) out[lane] = funnel_shift_left(a[lane], b[lane], c[lane], i.mode != 0);
}
EMULATOR_BITS(funnel_right) {
  for (int lane = 0; lane < kLanes; lane++) out[lane] = funnel_shift_right(a[lane], b[lane], c[lane], i.mode != 0);
}
EMULATOR_BITS(dp4a) {
  for (int lane = 0; lane < kLanes; lane++)
    out[lane] = dot4(a[lane], b[lane], c[lane], is_signed(i.type), is_signed(i.source_type));
}
EMULATOR_BITS(dp2a) {
  for (int lane = 0; lane < kLanes; lane++)
    out[lane] = dot2(a[lane], b[lane], c[lane], is_signed(i.type), is_signed(i.source_type), i.mode != 0);
}
EMULATOR_BITS(fns) {
  for (int lane = 0; lane < kLanes; lane++) out[lane] = find_nth_set(a[lane], b[lane], static_cast<int32_t>(c[lane]));
}

}  // namespace lanes

namespace {

LaneFunction by_width(Type type, LaneFunction narrow, LaneFunction word, LaneFunction wide_one) {
  switch (type_bits(type)) {
    case 16:
      return narrow;
    case 32:
      return word;
    case 64:
      return wide_one;
    default:
      return nullptr;
  }
}

}  // namespace

#define EMULATOR_WIDTHS(name) by_width(type, lanes::name##_16, lanes::name##_32, lanes::name##_64)
#define EMULATOR_SIGNS(name) (is_signed(type) ? EMULATOR_WIDTHS(name##_s) : EMULATOR_WIDTHS(name##_u))

LaneFunction integer_function(IntegerOperation operation, Type type) {
  using O = IntegerOperation;
  switch (operation) {
    case O::add:
      return EMULATOR_WIDTHS(add);
    case O::sub:
      return EMULATOR_WIDTHS(sub);
    case O::mul_lo:
      return EMULATOR_WIDTHS(mul_lo);
    case O::mul_hi:
      return EMULATOR_SIGNS(mul_hi);
    case O::mad_lo:
      return EMULATOR_WIDTHS(mad_lo);
    case O::mad_hi:
      return EMULATOR_SIGNS(mad_hi);
    case O::divide:
      return EMULATOR_SIGNS(divide);
    case O::remainder:
      return EMULATOR_SIGNS(remainder);
    case O::minimum:
      return EMULATOR_SIGNS(minimum);
    case O::maximum:
      return EMULATOR_SIGNS(maximum);
    case O::minimum_relu:
      return type == Type::s32 ? lanes::minimum_relu_32 : nullptr;
    case O::maximum_relu:
      return type == Type::s32 ? lanes::maximum_relu_32 : nullptr;
    case O::absolute:
      return EMULATOR_WIDTHS(absolute);
    case O::negate:
      return EMULATOR_WIDTHS(negate);
    case O::bit_and:
      return EMULATOR_WIDTHS(bit_and);
    case O::bit_or:
      return EMULATOR_WIDTHS(bit_or);
    case O::bit_xor:
      return EMULATOR_WIDTHS(bit_xor);
    case O::bit_not:
      return EMULATOR_WIDTHS(bit_not);
    case O::cnot:
      return EMULATOR_WIDTHS(cnot);
    case O::shift_left:
      return EMULATOR_WIDTHS(shift_left);
    case O::shift_right:
      return EMULATOR_SIGNS(shift_right);
    case O::popc:
      return by_width(type, nullptr, lanes::popc_32, lanes::popc_64);
    case O::clz:
      return by_width(type, nullptr, lanes::clz_32, lanes::clz_64);
    case O::reverse:
      return by_width(type, nullptr, lanes::reverse_32, lanes::reverse_64);
    case O::sad:
      return EMULATOR_SIGNS(sad);
  }
  return nullptr;
}

LaneFunction wide_function(bool add, Type type) {
  switch (type) {
    case Type::u16:
      return add ? lanes::mad_wide_u16 : lanes::mul_wide_u16;
    case Type::s16:
      return add ? lanes::mad_wide_s16 : lanes::mul_wide_s16;
    case Type::u32:
      return add ? lanes::mad_wide_u32 : lanes::mul_wide_u32;
    case Type::s32:
      return add ? lanes::mad_wide_s32 : lanes::mul_wide_s32;
    default:
      return nullptr;
  }
}

LaneFunction bit_function(const char* name, Type type) {
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("bfind")) return lanes::bfind;
  if (is("bfe")) return by_width(type, nullptr, lanes::bfe_32, lanes::bfe_64);
  if (is("lop3")) return lanes::lop3;
  if (is("prmt")) return lanes::permute;
  if (is("shf.l")) return lanes::funnel_left;
  if (is("shf.r")) return lanes::funnel_right;
  if (is("dp4a")) return lanes::dp4a;
  if (is("dp2a")) return lanes::dp2a;
  if (is("fns")) return lanes::fns;
  return nullptr;
}

}  // namespace jax_fa4::emulator

// cvt and comparisons on 32 lanes. Source: PTX ISA, "cvt", "cvt.pack", "setp", "set".
#include "lane_convert.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "lane_functions.h"

namespace jax_fa4::emulator {
namespace lanes {

#define EMULATOR_CONVERT(name)                                                                     \
  void name(uint32_t* out, const uint32_t* a [[maybe_unused]], const uint32_t* b [[maybe_unused]], \
            const uint32_t* c [[maybe_unused]], const Instruction& i [[maybe_unused]])

Format float_format(Type type) {
  return type == Type::f16    ? Format::f16
         : type == Type::bf16 ? Format::bf16
         : type == Type::tf32 ? Format::tf32
                              : Format::f32;
}

uint64_t load_integer(const uint32_t* a, int lane, Type type) {
  switch (type) {
    case Type::s8:
      return static_cast<uint64_t>(int64_t{static_cast<int8_t>(a[lane])});
    case Type::s16:
      return static_cast<uint64_t>(int64_t{static_cast<int16_t>(a[lane])});
    case Type::s32:
      return static_cast<uint64_t>(int64_t{static_cast<int32_t>(a[lane])});
    default:
      break;
  }
  switch (type_bits(type)) {
    case 8:
      return a[lane] & 0xff;
    case 16:
      return a[lane] & 0xffff;
    case 32:
      return a[lane];
    default:
      return wide(a, lane);
  }
}

void store_integer(uint32_t* out, int lane, Type type, uint64_t value) {
  switch (type_bits(type)) {
    case 8:
      out[lane] = is_signed(type) ? static_cast<uint32_t>(int32_t{static_cast<int8_t>(value)}) & 0xffff : value & 0xff;
      break;
    case 16:
      out[lane] = value & 0xffff;
      break;
    case 32:
      out[lane] = static_cast<uint32_t>(value);
      break;
    default:
      put_wide(out, lane, value);
  }
}

uint64_t saturated(uint64_t value, Type to, Type from) {
  const int bits = type_bits(to);
  const bool negative = is_signed(from) && static_cast<int64_t>(value) < 0;
  if (is_signed(to)) {
    const int64_t high = bits == 64 ? INT64_MAX : (int64_t{1} << (bits - 1)) - 1;
    if (negative) return static_cast<uint64_t>(std::max(static_cast<int64_t>(value), -high - 1));
    return std::min(value, static_cast<uint64_t>(high));
  }
  if (negative) return 0;
  return bits == 64 ? value : std::min(value, (uint64_t{1} << bits) - 1);
}

EMULATOR_CONVERT(integer_to_integer) {
  for (int lane = 0; lane < kLanes; lane++) {
    const uint64_t value = load_integer(a, lane, i.source_type);
    store_integer(out, lane, i.type, i.saturate ? saturated(value, i.type, i.source_type) : value);
  }
}

double load_float(const uint32_t* a, int lane, Type type, bool flush) {
  switch (type) {
    case Type::f16:
      return f16_to_f32(a[lane] & 0xffff);
    case Type::bf16:
      return bf16_to_f32(a[lane] & 0xffff);
    case Type::f64:
      return std::bit_cast<double>(wide(a, lane));
    default: {
      const uint32_t bits = a[lane];
      return float_of(flush && (bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
    }
  }
}

EMULATOR_CONVERT(float_to_integer) {
  const int bits = type_bits(i.type);
  for (int lane = 0; lane < kLanes; lane++) {
    const double value = load_float(a, lane, i.source_type, i.flush);
    const uint64_t result = integer_from_f64(value, bits, is_signed(i.type), i.rounding, i.source_type == Type::f64);
    store_integer(out, lane, i.type, result);
  }
}

EMULATOR_CONVERT(integer_to_float) {
  for (int lane = 0; lane < kLanes; lane++) {
    const uint64_t value = load_integer(a, lane, i.source_type);
    const bool negative = is_signed(i.source_type);
    if (i.type == Type::f64) {
      put_wide(out, lane,
               std::bit_cast<uint64_t>(negative ? static_cast<double>(static_cast<int64_t>(value))
                                                : static_cast<double>(value)));
      continue;
    }
    const bool below_zero = negative && static_cast<int64_t>(value) < 0;
    out[lane] = from_integer(float_format(i.type), below_zero ? 0 - value : value, below_zero, {i.rounding});
  }
}

ConvertOptions convert_options(const Instruction& i) {
  return {i.rounding, i.flush, (i.flags & kConvertRelu) != 0, (i.flags & kConvertSaturateFinite) != 0, i.saturate};
}

EMULATOR_CONVERT(float_to_float) {
  for (int lane = 0; lane < kLanes; lane++) {
    const double value = load_float(a, lane, i.source_type, i.flush);
    switch (i.type) {
      case Type::f64:
        put_wide(out, lane, std::bit_cast<uint64_t>(value));
        break;
      case Type::f32: {
        uint32_t bits = i.source_type == Type::f64 ? from_f64(Format::f32, value, {i.rounding, i.flush})
                                                   : bits_of(static_cast<float>(value));
        if (i.flags & kConvertIntegral) bits = round_to_integral_f32(bits, i.rounding, i.flush);
        if (i.saturate) bits = add_f32(bits, 0x80000000u, {Rounding::nearest_even, false, true});
        out[lane] = bits;
        break;
      }
      default:
        out[lane] = i.source_type == Type::f64
                        ? from_f64(float_format(i.type), value, convert_options(i))
                        : from_f32(float_format(i.type), static_cast<float>(value), convert_options(i));
    }
  }
}

EMULATOR_CONVERT(bf16_to_single) {
  for (int lane = 0; lane < kLanes; lane++) out[lane] = a[lane] << 16;
}

EMULATOR_CONVERT(pack_bf16x2) { pack_bf16x2_lanes(out, a, b); }
EMULATOR_CONVERT(pack_f16x2) { pack_f16x2_lanes(out, a, b); }
EMULATOR_CONVERT(pack_narrow) {
  for (int lane = 0; lane < kLanes; lane++)
    out[lane] = pack2_from_f32(static_cast<Format>(i.mode), float_of(a[lane]), float_of(b[lane]), convert_options(i));
}
EMULATOR_CONVERT(unpack_narrow) {
  const Format half = i.type == Type::f16x2 ? Format::f16 : Format::bf16;
  for (int lane = 0; lane < kLanes; lane++)
    out[lane] = unpack2_to_half(static_cast<Format>(i.mode), a[lane] & 0xffff, half, (i.flags & kConvertRelu) != 0);
}
// cvt.pack.sat.<to>.s32.b32 d, a, b, c: for 16-bit targets c is not read.
EMULATOR_CONVERT(pack_integers) {
  const int bits = type_bits(i.type);
  const uint32_t mask = (1u << bits) - 1;
  for (int lane = 0; lane < kLanes; lane++) {
    const uint64_t upper = saturated(load_integer(a, lane, Type::s32), i.type, Type::s32) & mask;
    const uint64_t lower = saturated(load_integer(b, lane, Type::s32), i.type, Type::s32) & mask;
    const uint64_t rest = bits == 16 ? 0 : uint64_t{c[lane]} << (2 * bits);
    out[lane] = static_cast<uint32_t>(rest | upper << bits | lower);
  }
}

// --------------------------------------------------------------------------------------------------------- comparisons
struct Equal {
  template <class T>
  bool operator()(T x, T y) const {
    return x == y;
  }
};
struct NotEqual {
  template <class T>
  bool operator()(T x, T y) const {
    return x != y;
  }
};
struct Less {
  template <class T>
  bool operator()(T x, T y) const {
    return x < y;
  }
};
struct LessEqual {
  template <class T>
  bool operator()(T x, T y) const {
    return x <= y;
  }
};
struct Greater {
  template <class T>
  bool operator()(T x, T y) const {
    return x > y;
  }
};
struct GreaterEqual {
  template <class T>
  bool operator()(T x, T y) const {
    return x >= y;
  }
};

template <class T, class Operation>
uint32_t compare_integers(const uint32_t* a, const uint32_t* b, const Instruction&) {
  uint32_t result = 0;
  for (int lane = 0; lane < kLanes; lane++) {
    const T x = static_cast<T>(sizeof(T) == 8 ? wide(a, lane) : a[lane]),
            y = static_cast<T>(sizeof(T) == 8 ? wide(b, lane) : b[lane]);
    result |= static_cast<uint32_t>(Operation()(x, y)) << lane;
  }
  return result;
}

// Ordered comparisons are false with a NaN, unordered ones (mode 1) true.
template <class Operation>
uint32_t compare_floats(const uint32_t* a, const uint32_t* b, const Instruction& i) {
  uint32_t result = 0;
  for (int lane = 0; lane < kLanes; lane++) {
    const double x = load_float(a, lane, i.source_type, i.flush), y = load_float(b, lane, i.source_type, i.flush);
    const bool is_true = std::isnan(x) || std::isnan(y) ? i.mode != 0 : Operation()(x, y);
    result |= static_cast<uint32_t>(is_true) << lane;
  }
  return result;
}

uint32_t both_numbers(const uint32_t* a, const uint32_t* b, const Instruction& i) {
  uint32_t result = 0;
  for (int lane = 0; lane < kLanes; lane++)
    result |= static_cast<uint32_t>(!std::isnan(load_float(a, lane, i.source_type, false)) &&
                                    !std::isnan(load_float(b, lane, i.source_type, false)))
              << lane;
  return result;
}
uint32_t any_nan(const uint32_t* a, const uint32_t* b, const Instruction& i) { return ~both_numbers(a, b, i); }

}  // namespace lanes

LaneFunction convert_function(Type to, Type from) {
  if (to == Type::f32 && from == Type::bf16) return lanes::bf16_to_single;
  if (is_float(to)) return is_float(from) ? lanes::float_to_float : lanes::integer_to_float;
  return is_float(from) ? lanes::float_to_integer : lanes::integer_to_integer;
}

LaneFunction pack_function(Format format, bool plain) {
  if (plain && format == Format::bf16) return lanes::pack_bf16x2;
  if (plain && format == Format::f16) return lanes::pack_f16x2;
  return lanes::pack_narrow;
}
LaneFunction unpack_function() { return lanes::unpack_narrow; }
LaneFunction pack_integer_function() { return lanes::pack_integers; }

namespace {

template <class T>
CompareFunction integer_comparison(Comparison comparison) {
  switch (comparison) {
    case Comparison::eq:
      return lanes::compare_integers<T, lanes::Equal>;
    case Comparison::ne:
      return lanes::compare_integers<T, lanes::NotEqual>;
    case Comparison::lt:
      return lanes::compare_integers<T, lanes::Less>;
    case Comparison::le:
      return lanes::compare_integers<T, lanes::LessEqual>;
    case Comparison::gt:
      return lanes::compare_integers<T, lanes::Greater>;
    case Comparison::ge:
      return lanes::compare_integers<T, lanes::GreaterEqual>;
    default:
      return nullptr;
  }
}

CompareFunction float_comparison(Comparison comparison) {
  switch (comparison) {
    case Comparison::eq:
    case Comparison::equ:
      return lanes::compare_floats<lanes::Equal>;
    case Comparison::ne:
    case Comparison::neu:
      return lanes::compare_floats<lanes::NotEqual>;
    case Comparison::lt:
    case Comparison::ltu:
      return lanes::compare_floats<lanes::Less>;
    case Comparison::le:
    case Comparison::leu:
      return lanes::compare_floats<lanes::LessEqual>;
    case Comparison::gt:
    case Comparison::gtu:
      return lanes::compare_floats<lanes::Greater>;
    case Comparison::ge:
    case Comparison::geu:
      return lanes::compare_floats<lanes::GreaterEqual>;
    case Comparison::num:
      return lanes::both_numbers;
    case Comparison::nan:
      return lanes::any_nan;
  }
  return nullptr;
}

}  // namespace

CompareFunction compare_function(Comparison comparison, Type type) {
  switch (type) {
    case Type::b16:
    case Type::u16:
      return integer_comparison<uint16_t>(comparison);
    case Type::s16:
      return integer_comparison<int16_t>(comparison);
    case Type::b32:
    case Type::u32:
      return integer_comparison<uint32_t>(comparison);
    case Type::s32:
      return integer_comparison<int32_t>(comparison);
    case Type::b64:
    case Type::u64:
      return integer_comparison<uint64_t>(comparison);
    case Type::s64:
      return integer_comparison<int64_t>(comparison);
    case Type::f16:
    case Type::bf16:
    case Type::f32:
    case Type::f64:
      return float_comparison(comparison);
    default:
      return nullptr;
  }
}

}  // namespace jax_fa4::emulator

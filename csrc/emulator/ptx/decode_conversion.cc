// Decodes mov, cvt and address conversions.
#include <cstdlib>

#include "../machine/handlers.h"
#include "../machine/lane_convert.h"
#include "../machine/lane_functions.h"
#include "decoder.h"

namespace jax_fa4::emulator {
namespace {

void handle(Decoder& d, Handler handler, Class kind) {
  d.out.handler = handler;
  d.out.kind = kind;
}

int element_bits(const Decoder& d, Type type, size_t elements) {
  const int bits = elements == 0 ? 0 : type_bits(type) / static_cast<int>(elements);
  if (bits < 8 || bits * static_cast<int>(elements) != type_bits(type)) d.fail("the vector does not fit the type");
  return bits;
}

Type bits_type(int bits) { return bits == 8 ? Type::b8 : bits == 16 ? Type::b16 : bits == 32 ? Type::b32 : Type::b64; }

void decode_mov_predicate(Decoder& d) {
  d.out.p = d.predicate(d.argument(0), nullptr);
  const Argument& from = d.argument(1);
  if (from.kind == Argument::Kind::integer)
    d.out.mode = from.bits != 0;
  else
    d.out.q = d.predicate(from, &d.out.p_negated);
  handle(d, execute_move_predicate, Class::move);
}

void decode_mov(Decoder& d) {
  const Type type = d.take_type();
  d.expect_count(2, 2);
  if (type == Type::pred) return decode_mov_predicate(d);
  const Argument& to = d.argument(0);
  const Argument& from = d.argument(1);
  d.out.type = type;
  d.out.out_slots = static_cast<uint8_t>(slots_of(type));
  if (to.kind == Argument::Kind::vector) {
    d.out.mode = static_cast<uint8_t>(element_bits(d, type, to.items.size()));
    d.out.a = d.source(1, type);
    d.list_destinations(to, bits_type(d.out.mode));
    return handle(d, execute_unpack, Class::move);
  }
  d.out.d = d.destination(0, type);
  if (from.kind == Argument::Kind::vector) {
    d.out.mode = static_cast<uint8_t>(element_bits(d, type, from.items.size()));
    d.list_sources(from, bits_type(d.out.mode));
    return handle(d, execute_pack, Class::move);
  }
  if (from.kind == Argument::Kind::special &&
      (from.name == "%clock" || from.name == "%clock64" || from.name == "%clock_hi" || from.name == "%globaltimer"))
    return handle(d, execute_clock, Class::move);
  d.out.a = d.source(1, type);
  handle(d, execute_move, Class::move);
}

// The narrow packed formats, which are no register types.
struct NarrowName {
  std::string_view name;
  Format format;
};
constexpr NarrowName kNarrow[] = {{"e4m3x2", Format::e4m3}, {"e5m2x2", Format::e5m2}, {"e3m2x2", Format::e3m2},
                                  {"e2m3x2", Format::e2m3}, {"e2m1x2", Format::e2m1}, {"ue8m0x2", Format::ue8m0}};
const NarrowName* narrow_named(std::string_view name) {
  for (const NarrowName& one : kNarrow)
    if (one.name == name) return &one;
  return nullptr;
}

void take_convert_modifiers(Decoder& d) {
  switch (d.take_any({"rni", "rzi", "rmi", "rpi"})) {
    case 0:
      d.out.flags |= kConvertIntegral;
      break;
    case 1:
      d.out.flags |= kConvertIntegral, d.out.rounding = Rounding::toward_zero;
      break;
    case 2:
      d.out.flags |= kConvertIntegral, d.out.rounding = Rounding::down;
      break;
    case 3:
      d.out.flags |= kConvertIntegral, d.out.rounding = Rounding::up;
      break;
    default:
      d.take_rounding();
  }
  d.out.flush = d.take("ftz");
  d.out.saturate = d.take("sat");
  if (d.take("relu")) d.out.flags |= kConvertRelu;
  if (d.take("satfinite")) d.out.flags |= kConvertSaturateFinite;
}

void decode_cvt_pack(Decoder& d) {
  d.out.saturate = d.take("sat");
  d.out.type = d.take_type();
  d.take_one({"s32"}, ".s32");
  const bool third = d.take("b32");
  d.expect_count(third ? 4 : 3, third ? 4 : 3);
  d.out.d = d.destination(0, Type::b32);
  d.out.a = d.source(1, Type::b32);
  d.out.b = d.source(2, Type::b32);
  if (third) d.out.c = d.source(3, Type::b32);
  d.out.lane_function = pack_integer_function();
  handle(d, execute_lanes, Class::conversion);
}

// cvt.<format>x2.f32 d, a, b and cvt.<half>x2.<format>x2 d, a.
void decode_cvt_narrow(Decoder& d, const NarrowName* to, Type to_type, const NarrowName* from) {
  const Type narrow_register = (to != nullptr ? to->format : from->format) == Format::e2m1 ? Type::b8 : Type::b16;
  if (to != nullptr) {
    d.out.mode = static_cast<uint8_t>(to->format);
    if (d.take_type_or(Type::none) != Type::f32) d.fail("the emulator converts packed narrow formats from f32 only");
    d.expect_count(3, 3);
    d.out.d = d.destination(0, narrow_register);
    d.out.a = d.source(1, Type::f32);
    d.out.b = d.source(2, Type::f32);
    d.out.lane_function = pack_function(to->format, false);
  } else {
    if (to_type != Type::f16x2 && to_type != Type::bf16x2) d.fail("packed narrow formats convert to f16x2 or bf16x2");
    d.expect_count(2, 2);
    d.out.mode = static_cast<uint8_t>(from->format);
    d.out.type = to_type;
    d.out.d = d.destination(0, Type::b32);
    d.out.a = d.source(1, narrow_register);
    d.out.lane_function = unpack_function();
  }
  handle(d, execute_lanes, Class::conversion);
}

void decode_cvt(Decoder& d) {
  if (d.take("pack")) return decode_cvt_pack(d);
  take_convert_modifiers(d);
  const NarrowName* narrow_to = narrow_named(d.peek());
  const Type to = narrow_to != nullptr ? (d.next(), Type::b16) : d.take_type();
  const NarrowName* narrow_from = narrow_to == nullptr ? narrow_named(d.peek()) : nullptr;
  if (narrow_from != nullptr) d.next();
  if (narrow_to != nullptr || narrow_from != nullptr) return decode_cvt_narrow(d, narrow_to, to, narrow_from);
  const Type from = d.take_type();
  d.out.type = to;
  d.out.source_type = from;
  if (to == Type::f16x2 || to == Type::bf16x2) {
    if (from != Type::f32) d.fail("packed conversions start from f32");
    const Format format = to == Type::f16x2 ? Format::f16 : Format::bf16;
    const bool plain = d.out.rounding == Rounding::nearest_even && d.out.flags == 0 && !d.out.flush && !d.out.saturate;
    d.expect_count(3, 3);
    d.out.mode = static_cast<uint8_t>(format);
    d.out.d = d.destination(0, Type::b32);
    d.out.a = d.source(1, Type::f32);
    d.out.b = d.source(2, Type::f32);
    d.out.lane_function = pack_function(format, plain);
    return handle(d, execute_lanes, Class::conversion);
  }
  d.expect_count(2, 2);
  const Argument& target = d.argument(0);
  const int slots = slots_of(to);
  d.out.out_slots = static_cast<uint8_t>(slots);
  // A register may be wider than an integer type: the value is extended into it.
  if (target.kind == Argument::Kind::register_ && !is_float(to) && target.reg.bits > type_bits(to) &&
      target.reg.slots <= 2) {
    d.out.type = target.reg.bits == 64   ? (is_signed(to) ? Type::s64 : Type::u64)
                 : target.reg.bits == 32 ? (is_signed(to) ? Type::s32 : Type::u32)
                                         : to;
    d.out.out_slots = target.reg.slots;
    if (type_bits(from) > type_bits(to)) d.fail("a narrowing cvt into a wider register is not supported");
    d.out.d = static_cast<Slot>(target.reg.index);
  } else {
    d.out.d = d.destination(0, to);
  }
  d.out.a = d.relaxed_source(1, from);
  d.out.lane_function = convert_function(d.out.type, from);
  handle(d, execute_lanes, Class::conversion);
}

void decode_cvta(Decoder& d) {
  d.out.mode = d.take("to");
  d.out.space = d.take_space();
  const Type type = d.take_type();
  if (type_bits(type) != 64) d.fail("addresses have 64 bits");
  d.expect_count(2, 2);
  d.out.out_slots = 2;
  d.out.d = d.destination(0, type);
  d.out.a = d.source(1, type);
  handle(d, execute_convert_address, Class::move);
}

void decode_isspacep(Decoder& d) {
  d.out.space = d.take_space();
  d.expect_count(2, 2);
  d.out.p = d.predicate(d.argument(0), nullptr);
  d.out.a = d.source(1, Type::u64);
  handle(d, execute_is_space, Class::compare);
}

void decode_mapa(Decoder& d) {
  d.out.space = d.take_space();
  const Type type = d.take_type();
  d.expect_count(3, 3);
  d.out.out_slots = static_cast<uint8_t>(slots_of(type));
  d.out.d = d.destination(0, type);
  d.out.a = d.source(1, type);
  d.out.b = d.source(2, Type::u32);
  handle(d, execute_map_address, Class::move);
}

void decode_getctarank(Decoder& d) {
  d.out.space = d.take_space();
  const Type type = d.take_type();
  d.expect_count(2, 2);
  d.out.d = d.destination(0, Type::u32);
  d.out.a = d.source(1, type);
  handle(d, execute_cta_rank, Class::move);
}

}  // namespace

void add_conversion(DecodeTable& table) {
  table["mov"] = decode_mov;
  table["cvt"] = decode_cvt;
  table["cvta"] = decode_cvta;
  table["isspacep"] = decode_isspacep;
  table["mapa"] = decode_mapa;
  table["getctarank"] = decode_getctarank;
}

}  // namespace jax_fa4::emulator

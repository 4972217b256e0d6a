// Decodes integer, floating-point, logic, comparison and selection instructions.
#include "../machine/handlers.h"
#include "../machine/lane_functions.h"
#include "decoder.h"

namespace jax_fa4::emulator {
namespace {

void lane_instruction(Decoder& d, LaneFunction function, Class kind = Class::arithmetic) {
  if (function == nullptr) d.fail("the emulator does not know this type here");
  d.out.handler = execute_lanes;
  d.out.lane_function = function;
  d.out.kind = kind;
}

// d = op(sources...), all of the instruction's type.
void regular(Decoder& d, Type type, LaneFunction function, size_t sources, Class kind = Class::arithmetic) {
  d.expect_count(sources + 1, sources + 1);
  d.out.type = type;
  d.out.out_slots = static_cast<uint8_t>(slots_of(type));
  d.out.d = d.destination(0, type);
  d.out.a = d.source(1, type);
  if (sources > 1) d.out.b = d.source(2, type);
  if (sources > 2) d.out.c = d.source(3, type);
  lane_instruction(d, function, kind);
}

// The carry flag lives in a predicate of its own, made when first used.
void carry(Decoder& d, IntegerOperation operation, bool carry_in, bool carry_out) {
  d.out.mode = static_cast<uint8_t>(operation == IntegerOperation::sub);
  d.out.flags = static_cast<uint8_t>((carry_in ? 1 : 0) | (carry_out ? 2 : 0));
  d.out.p = d.carry_predicate();
  d.out.handler = execute_carry;
}

void add_or_sub(Decoder& d, IntegerOperation integer, FloatOperation real) {
  const bool carries = d.take("cc");
  d.take_arithmetic();
  const Type type = d.take_type();
  const Type narrow = d.take_type_or(Type::none);
  if (narrow != Type::none) {
    if (type != Type::f32) d.fail("only f32 results mix widths");
    d.expect_count(3, 3);
    d.out.source_type = narrow;
    d.out.d = d.destination(0, type);
    d.out.a = d.source(1, narrow);
    d.out.b = d.source(2, type);
    return lane_instruction(d, mixed_float_function(real, narrow));
  }
  if (is_float(type)) return regular(d, type, float_function(real, type), 2);
  if (d.out.saturate) d.fail(".sat on integers is not supported");
  regular(d, type, integer_function(integer, type), 2);
  if (carries) carry(d, integer, false, true);
}

void decode_addc(Decoder& d) {
  const bool subtract = d.mnemonic() == "subc";
  const bool carries = d.take("cc");
  const Type type = d.take_type();
  const IntegerOperation operation = subtract ? IntegerOperation::sub : IntegerOperation::add;
  regular(d, type, integer_function(operation, type), 2);
  carry(d, operation, true, carries);
}

void decode_mul(Decoder& d) {
  const int part = d.take_any({"lo", "hi", "wide"});
  d.take_arithmetic();
  const Type type = d.take_type();
  if (is_float(type)) return regular(d, type, float_function(FloatOperation::mul, type), 2);
  if (part == 2) {
    d.expect_count(3, 3);
    d.out.type = type;
    d.out.out_slots = type_bits(type) == 32 ? 2 : 1;
    d.out.d = d.destination(0, type_bits(type) == 32 ? Type::b64 : Type::b32);
    d.out.a = d.source(1, type);
    d.out.b = d.source(2, type);
    return lane_instruction(d, wide_function(false, type));
  }
  regular(d, type, integer_function(part == 1 ? IntegerOperation::mul_hi : IntegerOperation::mul_lo, type), 2);
}

void decode_mad(Decoder& d) {
  const int part = d.take_any({"lo", "hi", "wide"});
  d.take_arithmetic();
  const Type type = d.take_type();
  if (is_float(type)) return regular(d, type, float_function(FloatOperation::fma, type), 3);
  if (d.out.saturate) d.fail(".sat on integers is not supported");
  if (part == 2) {
    const Type product = type_bits(type) == 32 ? Type::b64 : Type::b32;
    d.expect_count(4, 4);
    d.out.type = type;
    d.out.out_slots = static_cast<uint8_t>(slots_of(product));
    d.out.d = d.destination(0, product);
    d.out.a = d.source(1, type);
    d.out.b = d.source(2, type);
    d.out.c = d.source(3, product);
    return lane_instruction(d, wide_function(true, type));
  }
  regular(d, type, integer_function(part == 1 ? IntegerOperation::mad_hi : IntegerOperation::mad_lo, type), 3);
}

void decode_fma(Decoder& d) {
  d.take_arithmetic();
  if (d.take("relu")) d.out.flags |= kRelu;
  const Type type = d.take_type();
  const Type narrow = d.take_type_or(Type::none);
  if (narrow == Type::none) return regular(d, type, float_function(FloatOperation::fma, type), 3);
  if (type != Type::f32) d.fail("only f32 results mix widths");
  d.expect_count(4, 4);
  d.out.source_type = narrow;
  d.out.d = d.destination(0, type);
  d.out.a = d.source(1, narrow);
  d.out.b = d.source(2, narrow);
  d.out.c = d.source(3, type);
  lane_instruction(d, mixed_float_function(FloatOperation::fma, narrow));
}

void decode_div(Decoder& d) {
  const bool approximate = d.take("approx"), full = d.take("full");
  d.take_arithmetic();
  const Type type = d.take_type();
  d.out.mode = approximate ? 1 : full ? 2 : 0;
  if (is_float(type)) return regular(d, type, float_function(FloatOperation::divide, type), 2, Class::special_function);
  regular(d, type, integer_function(IntegerOperation::divide, type), 2);
}

void min_or_max(Decoder& d, IntegerOperation integer, IntegerOperation relu, FloatOperation real) {
  if (d.take("relu")) {
    const Type type = d.take_type();
    return regular(d, type, integer_function(relu, type), 2);
  }
  d.out.flush = d.take("ftz");
  if (d.take("NaN")) d.out.flags |= kPropagateNan;
  if (d.take("xorsign")) d.out.flags |= kXorSign;
  if (d.take("abs")) d.out.flags |= (d.out.flags & kXorSign) ? 0 : kAbsolute;
  const Type type = d.take_type();
  if (!is_float(type)) return regular(d, type, integer_function(integer, type), 2);
  const bool three = d.count() == 4;
  if (three && type != Type::f32) d.fail("three inputs need f32");
  if (three) d.out.flags |= kThreeInputs;
  regular(d, type, float_function(real, type), three ? 3 : 2);
}

void abs_or_neg(Decoder& d, IntegerOperation integer, FloatOperation real) {
  d.out.flush = d.take("ftz");
  const Type type = d.take_type();
  regular(d, type, is_float(type) ? float_function(real, type) : integer_function(integer, type), 1);
}

template <IntegerOperation operation, size_t sources>
void integer_only(Decoder& d) {
  const Type type = d.take_type();
  regular(d, type, integer_function(operation, type), sources);
}

// and, or, xor, not: registers or predicates.
template <IntegerOperation operation, size_t sources>
void logic(Decoder& d) {
  const Type type = d.take_type();
  if (type != Type::pred) return regular(d, type, integer_function(operation, type), sources);
  d.expect_count(sources + 1, sources + 1);
  d.out.mode = static_cast<uint8_t>(operation == IntegerOperation::bit_and   ? 0
                                    : operation == IntegerOperation::bit_or  ? 1
                                    : operation == IntegerOperation::bit_xor ? 2
                                                                             : 3);
  d.predicate_logic(sources);
}

void decode_shift(Decoder& d) {
  const Type type = d.take_type();
  d.expect_count(3, 3);
  d.out.type = type;
  d.out.out_slots = static_cast<uint8_t>(slots_of(type));
  d.out.d = d.destination(0, type);
  d.out.a = d.source(1, type);
  d.out.b = d.source(2, Type::u32);
  lane_instruction(
      d, integer_function(d.mnemonic() == "shl" ? IntegerOperation::shift_left : IntegerOperation::shift_right, type));
}

template <IntegerOperation operation>
void count_bits(Decoder& d) {
  const Type type = d.take_type();
  d.expect_count(2, 2);
  d.out.type = type;
  d.out.d = d.destination(0, Type::u32);
  d.out.a = d.source(1, type);
  lane_instruction(d, integer_function(operation, type));
}

void decode_bfind(Decoder& d) {
  d.out.mode = d.take("shiftamt");
  d.out.source_type = d.take_type();
  d.expect_count(2, 2);
  d.out.d = d.destination(0, Type::u32);
  d.out.a = d.source(1, d.out.source_type);
  lane_instruction(d, bit_function("bfind", d.out.source_type));
}

void decode_bfe(Decoder& d) {
  const Type type = d.take_type();
  d.expect_count(4, 4);
  d.out.type = type;
  d.out.out_slots = static_cast<uint8_t>(slots_of(type));
  d.out.d = d.destination(0, type);
  d.out.a = d.source(1, type);
  d.out.b = d.source(2, Type::u32);
  d.out.c = d.source(3, Type::u32);
  lane_instruction(d, bit_function("bfe", type));
}

void decode_bfi(Decoder& d) {
  const Type type = d.take_type();
  d.expect_count(5, 5);
  d.out.type = type;
  d.out.out_slots = static_cast<uint8_t>(slots_of(type));
  d.out.d = d.destination(0, type);
  d.out.a = d.source(1, type);
  d.out.b = d.source(2, type);
  d.out.c = d.source(3, Type::u32);
  d.out.e = d.source(4, Type::u32);
  d.out.handler = execute_bit_field_insert;
  d.out.kind = Class::arithmetic;
}

// d = function(a, b, c) on 32-bit words; `third` is the type of c.
void three_words(Decoder& d, const char* function, Type third = Type::b32) {
  d.out.d = d.destination(0, Type::b32);
  d.out.a = d.source(1, Type::b32);
  d.out.b = d.source(2, Type::b32);
  d.out.c = d.source(3, third);
  lane_instruction(d, bit_function(function, Type::b32));
}

void decode_lop3(Decoder& d) {
  d.take_type();
  d.expect_count(5, 5);
  d.out.mode = static_cast<uint8_t>(d.immediate(4));
  three_words(d, "lop3");
}

void decode_prmt(Decoder& d) {
  d.take("b32");
  d.out.mode = static_cast<uint8_t>(d.take_any({"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"}) + 1);
  d.expect_count(4, 4);
  three_words(d, "prmt");
}

void decode_shf(Decoder& d) {
  const bool left = d.take_one({"l", "r"}, ".l or .r") == 0;
  d.out.mode = d.take_one({"clamp", "wrap"}, ".clamp or .wrap") == 1;
  d.take_type();
  d.expect_count(4, 4);
  three_words(d, left ? "shf.l" : "shf.r", Type::u32);
}

void decode_dot(Decoder& d) {
  if (d.mnemonic() == "dp2a") d.out.mode = d.take_one({"lo", "hi"}, ".lo or .hi") == 1;
  d.out.type = d.take_type();
  d.out.source_type = d.take_type_or(d.out.type);
  d.expect_count(4, 4);
  three_words(d, d.mnemonic() == "dp4a" ? "dp4a" : "dp2a");
}

void decode_fns(Decoder& d) {
  d.take_type();
  d.expect_count(4, 4);
  three_words(d, "fns");
}

void decode_unary(Decoder& d) {
  const bool approximate = d.take("approx");
  d.take_arithmetic();
  const Type type = d.take_type();
  const std::string name(d.mnemonic());
  regular(d, type, unary_float_function(name.c_str(), type, !approximate), 1, Class::special_function);
}

void decode_copysign(Decoder& d) {
  const Type type = d.take_type();
  regular(d, type, float_function(FloatOperation::copysign, type), 2);
}

// --------------------------------------------------------------------------------------------- comparison and
// selection

Comparison take_comparison(Decoder& d) {
  static constexpr std::string_view kNames[] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                                                "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};
  // Unsigned comparisons of integers have names of their own.
  static constexpr std::string_view kUnsigned[] = {"lo", "ls", "hi", "hs"};
  static constexpr Comparison kUnsignedMeaning[] = {Comparison::lt, Comparison::le, Comparison::gt, Comparison::ge};
  const std::string_view name = d.next();
  for (int i = 0; i < 14; i++)
    if (kNames[i] == name) {
      d.out.mode = (i >= 6 && i <= 11) || i == 13;
      return static_cast<Comparison>(i);
    }
  for (int i = 0; i < 4; i++)
    if (kUnsigned[i] == name) return kUnsignedMeaning[i];
  d.fail("unknown comparison");
}

void decode_setp(Decoder& d) {
  const Comparison comparison = take_comparison(d);
  const int boolean = d.take_any({"and", "or", "xor"});
  d.out.flush = d.take("ftz");
  const Type type = d.take_type();
  d.expect_count(boolean < 0 ? 3 : 4, boolean < 0 ? 3 : 4);
  const Argument& target = d.argument(0);
  if (target.kind == Argument::Kind::pair) {
    d.out.p = d.predicate(target.items[0], nullptr);
    d.out.q = d.predicate(target.items[1], nullptr);
  } else {
    d.out.p = d.predicate(target, nullptr);
  }
  d.out.source_type = type;
  d.out.a = d.source(1, type);
  d.out.b = d.source(2, type);
  d.out.flags = static_cast<uint8_t>(boolean + 1);
  if (boolean >= 0) d.out.target = d.predicate(d.argument(3), &d.out.p_negated);
  d.out.compare = compare_function(comparison, type);
  if (d.out.compare == nullptr) d.fail("this comparison has no such type");
  d.out.handler = execute_setp;
  d.out.kind = Class::compare;
}

void decode_set(Decoder& d) {
  const Comparison comparison = take_comparison(d);
  d.out.flush = d.take("ftz");
  const Type to = d.take_type(), from = d.take_type();
  d.expect_count(3, 3);
  d.out.type = to;
  d.out.source_type = from;
  d.out.d = d.destination(0, to);
  d.out.a = d.source(1, from);
  d.out.b = d.source(2, from);
  d.out.compare = compare_function(comparison, from);
  if (d.out.compare == nullptr || type_bits(to) != 32) d.fail("the emulator does not know this form");
  d.out.handler = execute_set;
  d.out.kind = Class::compare;
}

void decode_selp(Decoder& d) {
  const Type type = d.take_type();
  d.expect_count(4, 4);
  d.out.type = type;
  d.out.out_slots = static_cast<uint8_t>(slots_of(type));
  d.out.d = d.destination(0, type);
  d.out.a = d.source(1, type);
  d.out.b = d.source(2, type);
  d.out.p = d.predicate(d.argument(3), &d.out.p_negated);
  d.out.handler = execute_selp;
  d.out.kind = Class::move;
}

void decode_testp(Decoder& d) {
  d.out.mode = static_cast<uint8_t>(
      d.take_one({"finite", "infinite", "number", "notanumber", "normal", "subnormal"}, "a property"));
  d.out.source_type = d.take_type();
  d.expect_count(2, 2);
  d.out.p = d.predicate(d.argument(0), nullptr);
  d.out.a = d.source(1, d.out.source_type);
  d.out.handler = execute_testp;
  d.out.kind = Class::compare;
}

}  // namespace

void add_arithmetic(DecodeTable& table) {
  using O = IntegerOperation;
  table["add"] = [](Decoder& d) { add_or_sub(d, O::add, FloatOperation::add); };
  table["sub"] = [](Decoder& d) { add_or_sub(d, O::sub, FloatOperation::sub); };
  table["addc"] = decode_addc;
  table["subc"] = decode_addc;
  table["mul"] = decode_mul;
  table["mad"] = decode_mad;
  table["fma"] = decode_fma;
  table["div"] = decode_div;
  table["rem"] = integer_only<O::remainder, 2>;
  table["min"] = [](Decoder& d) { min_or_max(d, O::minimum, O::minimum_relu, FloatOperation::minimum); };
  table["max"] = [](Decoder& d) { min_or_max(d, O::maximum, O::maximum_relu, FloatOperation::maximum); };
  table["abs"] = [](Decoder& d) { abs_or_neg(d, O::absolute, FloatOperation::absolute); };
  table["neg"] = [](Decoder& d) { abs_or_neg(d, O::negate, FloatOperation::negate); };
  table["sad"] = integer_only<O::sad, 3>;
  table["and"] = logic<O::bit_and, 2>;
  table["or"] = logic<O::bit_or, 2>;
  table["xor"] = logic<O::bit_xor, 2>;
  table["not"] = logic<O::bit_not, 1>;
  table["cnot"] = integer_only<O::cnot, 1>;
  table["brev"] = integer_only<O::reverse, 1>;
  table["shl"] = decode_shift;
  table["shr"] = decode_shift;
  table["popc"] = count_bits<O::popc>;
  table["clz"] = count_bits<O::clz>;
  table["bfind"] = decode_bfind;
  table["bfe"] = decode_bfe;
  table["bfi"] = decode_bfi;
  table["lop3"] = decode_lop3;
  table["prmt"] = decode_prmt;
  table["shf"] = decode_shf;
  table["dp4a"] = decode_dot;
  table["dp2a"] = decode_dot;
  table["fns"] = decode_fns;
  for (const std::string_view name : {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"})
    table[name] = decode_unary;
  table["copysign"] = decode_copysign;
  table["setp"] = decode_setp;
  table["set"] = decode_set;
  table["selp"] = decode_selp;
  table["testp"] = decode_testp;
}

}  // namespace jax_fa4::emulator

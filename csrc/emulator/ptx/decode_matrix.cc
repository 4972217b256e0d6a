// Decodes wgmma, tcgen05 and mma.sync.
#include "../machine/handlers.h"
#include "../machine/lane_functions.h"
#include "../units/matrix.h"
#include "../units/tmem.h"
#include "decoder.h"

namespace jax_fa4::emulator {
namespace {

void handle(Decoder& d, Handler handler, Class kind) {
  d.out.handler = handler;
  d.out.kind = kind;
}

Format take_format(Decoder& d) {
  static constexpr Format kFormats[] = {Format::f16, Format::bf16, Format::tf32, Format::e4m3, Format::e5m2};
  return kFormats[d.take_one({"f16", "bf16", "tf32", "e4m3", "e5m2"}, "an operand type that the emulator knows")];
}

int number_behind(Decoder& d, std::string_view text, char letter) {
  const size_t at = text.find(letter);
  int value = 0;
  for (size_t i = at + 1;
       at != std::string_view::npos && i < text.size() && text[i] >= '0' && text[i] <= '9' && value < 10000; i++)
    value = value * 10 + (text[i] - '0');
  if (value == 0) d.fail("unknown shape ." + std::string(text.substr(0, 20)));
  return value;
}

// An operand that switches: a predicate, or the constants 0 and 1.
void take_switch(Decoder& d, size_t index) {
  const Argument& given = d.argument(index);
  if (given.kind == Argument::Kind::integer)
    d.out.immediate = given.bits != 0;
  else
    d.out.p = d.predicate(given, &d.out.p_negated);
}

// --------------------------------------------------------------------------------------------------------------- wgmma

void decode_wgmma_mma(Decoder& d) {
  const std::string_view shape = d.next();
  const int m = number_behind(d, shape, 'm'), n = number_behind(d, shape, 'n'), k = number_behind(d, shape, 'k');
  const bool narrow = d.peek() == "f16";
  if (d.take_one({"f32", "f16"}, "an accumulator type that the emulator knows") != (narrow ? 1 : 0))
    d.fail("unknown accumulator type");
  const Format a = take_format(d), b = take_format(d);
  if (m != 64 || n % 8 != 0 || n > 256 || k * detail::format_bytes(a) != 32) d.fail("unknown shape");
  d.out.mode = static_cast<uint8_t>(n / 8);
  d.out.type_code_a = static_cast<uint8_t>(a);
  d.out.type_code_b = static_cast<uint8_t>(b);
  d.expect_count(4, 8);
  const size_t registers = static_cast<size_t>(n / (narrow ? 4 : 2));
  if (d.argument(0).items.size() != registers)
    d.fail("has " + std::to_string(d.argument(0).items.size()) + " accumulator registers, not " +
           std::to_string(registers));
  d.list_destinations(d.argument(0), Type::b32);
  uint8_t flags = narrow ? 32 : 0;
  if (d.argument(1).kind == Argument::Kind::vector) {
    if (d.argument(1).items.size() != 4) d.fail("A takes 4 registers");
    d.list_sources(d.argument(1), Type::b32);
    flags |= 1;
  } else {
    d.out.a = d.source(1, Type::b64);
  }
  d.out.b = d.source(2, Type::b64);
  take_switch(d, 3);
  size_t at = 4;
  const auto constant = [&](int64_t low, int64_t high) {
    const int64_t value = static_cast<int64_t>(d.immediate(at++));
    if (value != low && value != high) d.fail("a scale or transpose operand is out of range");
    return value;
  };
  if (at < d.count()) {
    if (constant(-1, 1) < 0) flags |= 2;
    if (constant(-1, 1) < 0) flags |= 4;
  }
  if (at < d.count() && !(flags & 1) && constant(0, 1) != 0) flags |= 8;
  if (at < d.count() && constant(0, 1) != 0) flags |= 16;
  if (at != d.count()) d.fail("has too many operands");
  if ((flags & 24) != 0 && detail::format_bytes(a) != 2) d.fail("only 16-bit operands can be transposed");
  d.out.flags = flags;
  handle(d, execute_wgmma, Class::matrix);
}

void decode_wgmma(Decoder& d) {
  const int operation = d.take_one({"mma_async", "fence", "commit_group", "wait_group"}, "an operation");
  d.take_one({"sync"}, ".sync");
  d.take_one({"aligned"}, ".aligned");
  if (operation == 0) return decode_wgmma_mma(d);
  if (operation == 3) {
    d.expect_count(1, 1);
    d.out.immediate = d.immediate(0);
    return handle(d, execute_wgmma_wait, Class::matrix_control);
  }
  d.expect_count(0, 0);
  handle(d, operation == 1 ? execute_wgmma_fence : execute_wgmma_commit, Class::matrix_control);
}

void decode_mma_sync(Decoder& d) {
  d.take_one({"sync"}, ".sync");
  d.take_one({"aligned"}, ".aligned");
  const std::string_view shape = d.next();
  const int m = number_behind(d, shape, 'm'), n = number_behind(d, shape, 'n'), k = number_behind(d, shape, 'k');
  d.take_one({"row"}, ".row for A");
  d.take_one({"col"}, ".col for B");
  d.take_one({"f32"}, "an f32 accumulator");
  const Format a = take_format(d), b = take_format(d);
  d.take_one({"f32"}, "an f32 accumulator");
  const int bytes = detail::format_bytes(a), a_registers = k * bytes / 8;
  if (m != 16 || n != 8 || bytes != detail::format_bytes(b) || (k * bytes != 16 && k * bytes != 32))
    d.fail("the emulator does not know this shape");
  d.out.mode = static_cast<uint8_t>(k);
  d.out.type_code_a = static_cast<uint8_t>(a);
  d.out.type_code_b = static_cast<uint8_t>(b);
  d.expect_count(4, 4);
  d.list_destinations(d.argument(0), Type::b32);
  for (size_t i = 1; i < 4; i++) d.list_sources(d.argument(i), Type::b32);
  if (d.out.list_count != static_cast<uint32_t>(8 + a_registers + a_registers / 2))
    d.fail("the operands do not have as many registers as the shape");
  handle(d, execute_mma_sync, Class::matrix);
}

// ------------------------------------------------------------------------------------------------------------- tcgen05

void take_group(Decoder& d) {
  const int group = d.take_cta_group();
  if (group == 0) d.fail("no .cta_group is given");
  d.out.cta_group = static_cast<uint8_t>(group);
}

void decode_tensor_mma(Decoder& d) {
  take_group(d);
  static constexpr MmaKind kKinds[] = {MmaKind::f16, MmaKind::tf32, MmaKind::f8f6f4, MmaKind::i8};
  d.out.mode = static_cast<uint8_t>(
      kKinds[d.take_one({"kind::f16", "kind::tf32", "kind::f8f6f4", "kind::i8"}, "a kind that the emulator knows")]);
  // Collector hints say what to keep in a buffer; they change no result.
  while (d.take_any({"collector::a::fill", "collector::a::use", "collector::a::lastuse", "collector::a::discard"}) >=
         0) {
  }
  d.expect_count(5, 7);
  d.address(0);
  if (d.argument(1).kind == Argument::Kind::address) {
    d.out.flags |= 1;
    d.out.second = d.memory_operand(1);
  } else {
    d.out.b = d.source(1, Type::b64);
  }
  d.out.c = d.source(2, Type::b64);
  d.out.e = d.source(3, Type::b32);
  size_t at = 4;
  if (d.argument(at).kind == Argument::Kind::vector) {
    const size_t words = d.argument(at).items.size();
    if (words != static_cast<size_t>(4 * d.out.cta_group))
      d.fail("disable-output-lane takes " + std::to_string(4 * d.out.cta_group) + " registers");
    d.list_sources(d.argument(at++), Type::b32);
  }
  take_switch(d, at++);
  if (at != d.count()) d.fail("scale-input-d is not supported");
  handle(d, execute_tensor_mma, Class::matrix);
}

void decode_tensor_commit(Decoder& d) {
  take_group(d);
  d.take_one({"mbarrier::arrive::one"}, ".mbarrier::arrive::one");
  d.take_space();
  if (d.take("multicast::cluster")) d.out.flags = 1;
  d.take_one({"b64"}, ".b64");
  d.expect_count(d.out.flags ? 2 : 1, d.out.flags ? 2 : 1);
  d.address(0);
  if (d.out.flags) d.out.e = d.source(1, Type::b16);
  handle(d, execute_tensor_commit, Class::matrix_control);
}

// tcgen05.ld.red: the least or greatest of a thread's registers goes to d. type_code_a: 1 min, 2 max; type_code_b:
// kPropagateNan, kAbsolute. Compute capability 10.3 has it, 10.0 has not.
void take_load_reduction(Decoder& d, int shape) {
  if (d.program().target < 103) d.fail("tcgen05.ld.red needs compute capability 10.3");
  if (shape != 0 && shape != 4) d.fail("tcgen05.ld.red takes the shapes .32x32b and .16x32bx2");
  d.out.type_code_a = static_cast<uint8_t>(1 + d.take_one({"min", "max"}, ".min or .max"));
  if (d.take("abs")) d.out.type_code_b |= kAbsolute;
  if (d.take("NaN")) d.out.type_code_b |= kPropagateNan;
  d.out.type = d.take_type();
  if (d.out.type != Type::f32 && d.out.type != Type::u32 && d.out.type != Type::s32)
    d.fail("tcgen05.ld.red takes .f32, .u32 and .s32");
  if (d.out.type_code_b != 0 && d.out.type != Type::f32) d.fail(".abs and .NaN are for .f32");
  d.out.d = d.destination(1, d.out.type);
}

void decode_tensor_access(Decoder& d, bool load) {
  const bool reduces = load && d.take("red");
  d.take_one({"sync"}, ".sync");
  d.take_one({"aligned"}, ".aligned");
  const int shape =
      d.take_one({"32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"}, "a shape that the emulator knows");
  const int repeat = 1 << d.take_one({"x1", "x2", "x4", "x8", "x16", "x32", "x64", "x128"}, "a repeat count");
  if (d.take(load ? "pack::16b" : "unpack::16b")) d.out.flags = 1;
  const bool split = shape == 4;
  const size_t operands = (split ? 3 : 2) + (reduces ? 1 : 0);
  d.expect_count(operands, operands);
  if (reduces)
    take_load_reduction(d, shape);
  else
    d.take_one({"b32"}, ".b32");
  if (reduces && (repeat < 2 || d.out.flags != 0)) d.fail("tcgen05.ld.red takes .x2 and more, and does not pack");
  d.out.mode = static_cast<uint8_t>(shape);
  d.address(load ? (reduces ? 2 : 1) : 0);
  const Argument& registers = d.argument(load ? 0 : d.count() - 1);
  if (load)
    d.list_destinations(registers, Type::b32);
  else
    d.list_sources(registers, Type::b32);
  const uint32_t expected = static_cast<uint32_t>(repeat * registers_per_repeat(static_cast<TensorShape>(shape)));
  if (d.out.list_count != expected || expected > 128)
    d.fail("has " + std::to_string(d.out.list_count) + " registers, not " + std::to_string(expected));
  if (split) d.out.immediate = d.immediate(load ? operands - 1 : 1);
  handle(d, load ? execute_tensor_memory_load : execute_tensor_memory_store,
         load ? Class::tensor_load : Class::tensor_store);
}

void decode_tensor_copy(Decoder& d) {
  take_group(d);
  const int shape =
      d.take_one({"128x256b", "128x128b", "4x256b", "64x128b", "32x128b"}, "a shape that the emulator knows");
  TensorCopyShape code = TensorCopyShape::rows128_bits256;
  if (shape == 1) code = TensorCopyShape::rows128_bits128;
  if (shape == 2) code = TensorCopyShape::rows4_bits256;
  if (shape == 3)
    code = d.take_one({"warpx2::02_13", "warpx2::01_23"}, "a multicast") == 0 ? TensorCopyShape::rows64_bits128_02_13
                                                                              : TensorCopyShape::rows64_bits128_01_23;
  if (shape == 4) {
    d.take_one({"warpx4"}, ".warpx4");
    code = TensorCopyShape::rows32_bits128_x4;
  }
  d.out.mode = static_cast<uint8_t>(code);
  d.expect_count(2, 2);
  d.address(0);
  d.out.b = d.source(1, Type::b64);
  handle(d, execute_tensor_memory_copy, Class::matrix);
}

void decode_tensor_allocation(Decoder& d, std::string_view operation) {
  take_group(d);
  d.take_one({"sync"}, ".sync");
  d.take_one({"aligned"}, ".aligned");
  if (operation == "relinquish_alloc_permit") {
    d.expect_count(0, 0);
    return handle(d, execute_tensor_relinquish, Class::other);
  }
  d.take_space();
  d.take_one({"b32"}, ".b32");
  d.expect_count(2, 2);
  if (operation == "alloc")
    d.address(0);
  else
    d.out.a = d.source(0, Type::b32);
  d.out.b = d.source(1, Type::b32);
  handle(d, operation == "alloc" ? execute_tensor_allocate : execute_tensor_deallocate, Class::other);
}

void decode_tcgen05(Decoder& d) {
  const std::string_view operation = d.next();
  if (operation == "mma") return decode_tensor_mma(d);
  if (operation == "commit") return decode_tensor_commit(d);
  if (operation == "ld" || operation == "st") return decode_tensor_access(d, operation == "ld");
  if (operation == "cp") return decode_tensor_copy(d);
  if (operation == "alloc" || operation == "dealloc" || operation == "relinquish_alloc_permit")
    return decode_tensor_allocation(d, operation);
  d.expect_count(0, 0);
  if (operation == "wait::ld" || operation == "wait::st") {
    d.take_one({"sync"}, ".sync");
    d.take_one({"aligned"}, ".aligned");
    d.out.mode = operation == "wait::st";
    return handle(d, execute_tensor_wait, Class::matrix_control);
  }
  d.out.mode = operation == "fence::after_thread_sync";
  if (operation == "fence::before_thread_sync" || operation == "fence::after_thread_sync")
    return handle(d, execute_tensor_fence, Class::fence);
  d.fail("the emulator does not know this instruction");
}

}  // namespace

void add_matrix(DecodeTable& table) {
  table["wgmma"] = decode_wgmma;
  table["mma"] = decode_mma_sync;
  table["tcgen05"] = decode_tcgen05;
}

}  // namespace jax_fa4::emulator

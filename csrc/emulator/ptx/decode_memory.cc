// Decodes loads, stores, atomics, fences, hints, ldmatrix and stmatrix.
#include "../machine/handlers.h"
#include "decoder.h"

namespace jax_fa4::emulator {
namespace {

void handle(Decoder& d, Handler handler, Class kind) {
  d.out.handler = handler;
  d.out.kind = kind;
}

MemoryOrder take_order(Decoder& d) {
  switch (d.take_any({"weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio"})) {
    case 1:
      return MemoryOrder::relaxed;
    case 2:
      return MemoryOrder::acquire;
    case 3:
      return MemoryOrder::release;
    case 4:
      return MemoryOrder::acquire_release;
    case 5:
    case 6:
      return MemoryOrder::relaxed;
    default:
      return MemoryOrder::weak;
  }
}

// Cache hints change nothing here. A cache policy operand is read by nobody.
void take_cache_hints(Decoder& d) {
  while (d.take_any({"ca",
                     "cg",
                     "cs",
                     "lu",
                     "cv",
                     "wb",
                     "wt",
                     "nc",
                     "L1::evict_normal",
                     "L1::evict_unchanged",
                     "L1::evict_first",
                     "L1::evict_last",
                     "L1::no_allocate",
                     "L2::64B",
                     "L2::128B",
                     "L2::256B",
                     "L2::evict_normal",
                     "L2::evict_first",
                     "L2::evict_last",
                     "L2::cache_hint"}) >= 0) {
  }
}

uint8_t take_vector(Decoder& d) {
  switch (d.take_any({"v2", "v4", "v8"})) {
    case 0:
      return 2;
    case 1:
      return 4;
    case 2:
      return 8;
    default:
      return 1;
  }
}

Class load_class(Space space) {
  return space == Space::global || space == Space::generic          ? Class::load_global
         : space == Space::shared || space == Space::shared_cluster ? Class::load_shared
                                                                    : Class::load_other;
}
Class store_class(Space space) {
  return space == Space::shared || space == Space::shared_cluster ? Class::store_shared : Class::store_global;
}

void take_element(Decoder& d, const Argument& data) {
  d.out.vector = take_vector(d);
  d.out.type = d.take_type();
  if (type_bits(d.out.type) * d.out.vector > 256) d.fail("a memory access has at most 32 bytes");
  const size_t elements = data.kind == Argument::Kind::vector ? data.items.size() : 1;
  if (elements != d.out.vector)
    d.fail("the operand has " + std::to_string(elements) + " elements, the instruction " +
           std::to_string(d.out.vector));
}

// ld.param names a place in the parameter block that is known now.
bool load_parameter(Decoder& d) {
  const Argument& from = d.argument(1);
  if (from.kind != Argument::Kind::address || from.items[0].kind != Argument::Kind::symbol) return false;
  const Variable& variable = d.program().symbols[from.items[0].symbol];
  if (variable.space != Space::param) return false;
  const int64_t bytes = int64_t{type_bits(d.out.type)} / 8 * d.out.vector;
  d.out.offset = static_cast<int64_t>(variable.offset + static_cast<uint64_t>(from.offset));
  if (from.offset < 0 || from.offset > (1 << 16) || d.out.offset + bytes > d.program().param_bytes)
    d.fail("the load is outside of the parameters");
  handle(d, execute_load_param, Class::load_other);
  return true;
}

void decode_ld(Decoder& d) {
  d.out.order = take_order(d);
  d.take_scope();
  d.out.space = d.take_space();
  take_cache_hints(d);
  d.expect_count(2, 3);
  take_element(d, d.argument(0));
  d.list_loaded(d.argument(0), d.out.type);
  if (d.out.space == Space::param && load_parameter(d)) return;
  d.address(1);
  handle(d, execute_load, load_class(d.out.space));
}

void decode_st(Decoder& d) {
  if (d.take("async")) return decode_store_async(d);
  d.take("bulk");
  d.out.order = take_order(d);
  d.take_scope();
  d.out.space = d.take_space();
  take_cache_hints(d);
  d.expect_count(2, 3);
  take_element(d, d.argument(1));
  d.address(0);
  d.list_stored(d.argument(1), d.out.type);
  handle(d, execute_store, store_class(d.out.space));
}

void decode_prefetch(Decoder& d) {
  while (!d.next().empty()) {
  }
  handle(d, execute_nothing, Class::other);
}

void decode_createpolicy(Decoder& d) {
  while (!d.next().empty()) {
  }
  d.out.d = d.destination(0, Type::b64);
  d.out.a = d.constant64(0);
  d.out.out_slots = 2;
  handle(d, execute_move, Class::other);
}

// ---------------------------------------------------------------------------------------------------------------
// atomics

void atomic(Decoder& d, bool has_destination) {
  d.out.order = take_order(d);
  if (d.out.order == MemoryOrder::weak) d.out.order = MemoryOrder::relaxed;
  d.take_scope();
  d.out.space = d.take_space();
  take_cache_hints(d);
  const int operation =
      d.take_one({"add", "min", "max", "and", "or", "xor", "inc", "dec", "exch", "cas"}, "an operation");
  static constexpr uint8_t kModes[] = {0, 1, 2, 5, 6, 7, 8, 9, 10, 11};
  d.out.mode = kModes[operation];
  d.take("noftz");
  d.out.vector = take_vector(d);
  d.out.type = d.take_type();
  if (type_bits(d.out.type) == 128) d.fail("128-bit atomics are not supported");
  const size_t first = has_destination ? 1 : 0;
  d.expect_count(first + 2, first + 4);
  d.address(first);
  d.list_sources(d.argument(first + 1), d.out.type);
  if (d.out.list_count != d.out.vector) d.fail("the operand does not have as many elements as the instruction");
  if (has_destination) {
    d.out.flags = 1;
    d.list_destinations(d.argument(0), d.out.type);
    if (d.out.list_count != 2u * d.out.vector)
      d.fail("the destination does not have as many elements as the instruction");
  }
  if (d.out.mode == 11) d.out.c = d.source(first + 2, d.out.type);
  handle(d, execute_atomic, Class::atomic);
}

void decode_red(Decoder& d) {
  if (d.take("async")) return decode_store_async(d);
  atomic(d, false);
}

// ----------------------------------------------------------------------------------------------------------------
// fences

// mode: 0 nothing that the emulator would see, 1 fence.proxy.async, 2 a memory fence, 3 fence.mbarrier_init. flags of
// fence.proxy.async: 1 shared memory, 2 global memory.
void decode_fence(Decoder& d) {
  constexpr uint8_t kShared = 1, kGlobal = 2;
  handle(d, execute_fence, Class::fence);
  d.expect_count(0, 2);
  if (d.take("proxy")) {
    // Memory behind .proxy.tensormap and .proxy.alias is always coherent here.
    const bool restricted = d.peek() == "async::generic";
    if (restricted || d.peek() == "async") {
      d.next();
      d.out.mode = 1;
      d.out.flags = restricted || d.peek().starts_with("shared") ? kShared
                    : d.peek() == "global"                       ? kGlobal
                                                                 : kShared | kGlobal;
    }
    while (!d.next().empty()) {
    }
    return;
  }
  if (d.take("mbarrier_init")) {
    d.out.mode = 3;
    d.take_one({"release"}, ".release");
    d.take_one({"cluster"}, ".cluster");
    return;
  }
  d.out.mode = 2;
  d.take_any({"sc", "acq_rel", "acquire", "release"});
  if (d.take_any({"sync_restrict::shared::cta", "sync_restrict::shared::cluster"}) < 0 && d.take("gl")) return;
  d.take_scope();
}

void decode_matrix_move(Decoder& d, bool load) {
  d.take_one({"sync"}, ".sync");
  d.take_one({"aligned"}, ".aligned");
  const int shape = d.take_one({"m8n8", "m16n8"}, "a shape that the emulator knows");
  const int count = d.take_one({"x1", "x2", "x4"}, "a count");
  d.out.mode = static_cast<uint8_t>(1 << count);
  if (d.take("trans")) d.out.flags |= 1;
  d.out.space = d.take_space();
  const bool narrow = d.take("b8");
  if (!narrow) d.take_one({"b16"}, ".b16");
  if (narrow != (shape == 1) || (narrow && (load || !(d.out.flags & 1))))
    d.fail("the emulator does not know this shape");
  if (narrow) d.out.flags |= 2;
  d.expect_count(2, 2);
  d.address(load ? 1 : 0);
  if (load)
    d.list_destinations(d.argument(0), Type::b32);
  else
    d.list_sources(d.argument(1), Type::b32);
  if (d.out.list_count != d.out.mode) d.fail("the operand does not have as many registers as the instruction");
  handle(d, load ? execute_load_matrix : execute_store_matrix, load ? Class::load_shared : Class::store_shared);
}

}  // namespace

void add_memory(DecodeTable& table) {
  table["ld"] = decode_ld;
  table["ldu"] = decode_ld;
  table["st"] = decode_st;
  table["prefetch"] = decode_prefetch;
  table["prefetchu"] = decode_prefetch;
  table["discard"] = decode_prefetch;
  table["applypriority"] = decode_prefetch;
  table["createpolicy"] = decode_createpolicy;
  table["atom"] = [](Decoder& d) { atomic(d, true); };
  table["red"] = decode_red;
  table["fence"] = decode_fence;
  table["membar"] = decode_fence;
  table["ldmatrix"] = [](Decoder& d) { decode_matrix_move(d, true); };
  table["stmatrix"] = [](Decoder& d) { decode_matrix_move(d, false); };
}

}  // namespace jax_fa4::emulator

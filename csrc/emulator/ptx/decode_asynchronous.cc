// Decodes asynchronous copies, st.async and clusterlaunchcontrol.
#include "../machine/handlers.h"
#include "../units/tma.h"
#include "decoder.h"

namespace jax_fa4::emulator {
namespace {

void handle(Decoder& d, Handler handler, Class kind) {
  d.out.handler = handler;
  d.out.kind = kind;
}

bool is_cache_policy(const Argument& argument) {
  return argument.kind == Argument::Kind::register_ && argument.reg.slots == 2;
}

// The operands behind `at`: a multicast mask if there is one, and a cache policy, which changes nothing.
void trailing_operands(Decoder& d, size_t at, bool multicast, bool cache_hint) {
  if (multicast) {
    d.out.flags |= 1;
    d.out.e = d.source(at++, Type::b16);
  }
  if (cache_hint && at < d.count() &&
      (is_cache_policy(d.argument(at)) || d.argument(at).kind == Argument::Kind::integer))
    at++;
  if (at != d.count()) d.fail("has " + std::to_string(d.count() - at) + " operands too many");
}

int take_reduction(Decoder& d) { return d.take_any({"add", "min", "max", "inc", "dec", "and", "or", "xor"}); }

Reduction reduction_of(int index) {
  static constexpr Reduction kReductions[] = {Reduction::add,    Reduction::min,    Reduction::max,
                                              Reduction::inc,    Reduction::dec,    Reduction::bit_and,
                                              Reduction::bit_or, Reduction::bit_xor};
  return kReductions[index];
}

Element element_of(Decoder& d, Type type) {
  switch (type) {
    case Type::f32:
      return Element::f32;
    case Type::f64:
      return Element::f64;
    case Type::f16:
      return Element::f16;
    case Type::bf16:
      return Element::bf16;
    case Type::u32:
    case Type::b32:
      return Element::u32;
    case Type::s32:
      return Element::s32;
    case Type::u64:
    case Type::b64:
      return Element::u64;
    case Type::s64:
      return Element::s64;
    default:
      d.fail("the emulator does not reduce this type");
  }
}

// -------------------------------------------------------------------------------------------------------------
// cp.async

void decode_copy_async(Decoder& d) {
  if (d.take("commit_group")) {
    d.expect_count(0, 0);
    return handle(d, execute_copy_commit, Class::bulk_copy);
  }
  if (d.take("wait_group")) {
    d.expect_count(1, 1);
    d.out.immediate = d.immediate(0);
    return handle(d, execute_copy_wait, Class::bulk_wait);
  }
  if (d.take("wait_all")) {
    d.expect_count(0, 0);
    d.out.flags = 1;  // the open group too
    return handle(d, execute_copy_wait, Class::bulk_wait);
  }
  if (d.take("mbarrier")) {
    d.take_one({"arrive"}, ".arrive");
    if (d.take("noinc")) d.out.flags |= 1;
    d.take_space();
    d.take_one({"b64"}, ".b64");
    d.expect_count(1, 1);
    d.address(0);
    return handle(d, execute_copy_arrive, Class::mbarrier_arrive);
  }
  d.take_one({"ca", "cg"}, ".ca or .cg");
  d.take_one({"shared", "shared::cta"}, ".shared");
  d.take_one({"global"}, ".global");
  d.take_any({"L2::64B", "L2::128B", "L2::256B"});
  const bool cache_hint = d.take("L2::cache_hint");
  d.expect_count(3, 5);
  d.address(0);
  d.out.second = d.memory_operand(1);
  d.out.immediate = d.immediate(2);
  if (d.out.immediate != 4 && d.out.immediate != 8 && d.out.immediate != 16)
    d.fail("copies 4, 8 or 16 bytes, not " + std::to_string(d.out.immediate));
  if (d.count() > 3 && !(cache_hint && d.count() == 4)) {
    if (d.argument(3).kind == Argument::Kind::predicate) {
      bool negated = false;
      d.out.p = d.predicate(d.argument(3), &negated);
      if (negated) d.fail("a negated ignore-source predicate is not supported");
    } else {
      d.out.flags |= 1;
      d.out.b = d.source(3, Type::b32);
    }
  }
  handle(d, execute_copy_async, Class::bulk_copy);
}

// ---------------------------------------------------------------------------------------------------------- bulk
// copies

int take_dimensions(Decoder& d) {
  const int dimensions = d.take_any({"1d", "2d", "3d", "4d", "5d"}) + 1;
  if (dimensions == 0) d.fail("the number of dimensions is missing");
  d.take("tile");
  return dimensions;
}

// The tensor map and the coordinates of [map, {coordinates}].
void tensor_operand(Decoder& d, size_t index, int dimensions) {
  d.out.second = d.memory_operand(index);
  const Argument& given = d.argument(index);
  if (given.items.size() != static_cast<size_t>(dimensions) + 1)
    d.fail("has " + std::to_string(given.items.size() - 1) + " coordinates, not " + std::to_string(dimensions));
  Argument coordinates;
  coordinates.kind = Argument::Kind::vector;
  coordinates.items.assign(given.items.begin() + 1, given.items.end());
  d.list_sources(coordinates, Type::s32);
}

void decode_tensor_copy(Decoder& d, bool reduces) {
  const int dimensions = take_dimensions(d);
  const bool cache_hint = d.take("L2::cache_hint");
  const bool to_shared = d.peek() != "global";
  if (to_shared) {
    d.take_one({"shared::cluster", "shared::cta"}, "a destination");
    d.take_one({"global"}, ".global as source");
    d.take_one({"mbarrier::complete_tx::bytes"}, ".mbarrier::complete_tx::bytes");
    const bool multicast = d.take("multicast::cluster");
    d.out.cta_group = static_cast<uint8_t>(d.take_cta_group());
    d.expect_count(3, 5);
    d.address(0);
    tensor_operand(d, 1, dimensions);
    d.out.third = d.memory_operand(2);
    trailing_operands(d, 3, multicast, cache_hint);
    return handle(d, execute_tensor_load, Class::bulk_copy);
  }
  d.take_one({"global"}, ".global");
  d.take_one({"shared::cta"}, ".shared::cta as source");
  d.take_one({"bulk_group"}, ".bulk_group");
  if (reduces) {
    const int reduction = take_reduction(d);
    if (reduction < 0) d.fail("the reduction is missing");
    d.out.immediate = static_cast<uint64_t>(reduction_of(reduction));
    d.out.mode = 1;
  }
  d.expect_count(2, 3);
  tensor_operand(d, 0, dimensions);
  d.address(1);
  trailing_operands(d, 2, false, cache_hint);
  handle(d, execute_tensor_store, Class::bulk_copy);
}

// mode: 0 global to shared, 1 shared to shared of the cluster, 2 shared to global.
void take_direction(Decoder& d) {
  const int target = d.take_one({"global", "shared::cluster", "shared::cta"}, "a destination");
  const int source = d.take_one({"global", "shared::cta"}, "a source");
  if (target == 0 && source == 0) d.fail("one side must be shared memory");
  d.out.mode = target == 0 ? 2 : source == 0 ? 0 : 1;
}

void decode_bulk_copy(Decoder& d) {
  const bool cache_hint = d.take("L2::cache_hint");
  // The destination comes first in the text.
  if (d.peek() == "global") {
    d.next();
    d.take_one({"shared::cta"}, ".shared::cta as source");
    d.take_one({"bulk_group"}, ".bulk_group");
    d.out.mode = 2;
  } else {
    d.take_one({"shared::cluster", "shared::cta"}, "a destination");
    d.out.mode = d.take_one({"global", "shared::cta"}, "a source") == 0 ? 0 : 1;
    d.take_one({"mbarrier::complete_tx::bytes"}, ".mbarrier::complete_tx::bytes");
  }
  const bool multicast = d.take("multicast::cluster");
  d.expect_count(3, 6);
  d.address(0);
  d.out.second = d.memory_operand(1);
  d.out.b = d.source(2, Type::u32);
  if (d.out.mode != 2) d.out.third = d.memory_operand(3);
  trailing_operands(d, d.out.mode == 2 ? 3 : 4, multicast, cache_hint);
  handle(d, execute_bulk_copy, Class::bulk_copy);
}

void decode_bulk_reduce(Decoder& d) {
  const bool cache_hint = d.take("L2::cache_hint");
  take_direction(d);
  if (d.out.mode == 0) d.fail("a reduction starts from shared memory");
  d.take_one({"bulk_group", "mbarrier::complete_tx::bytes"}, "a completion");
  d.take("noftz");
  const int reduction = take_reduction(d);
  if (reduction < 0) d.fail("the reduction is missing");
  d.out.immediate = static_cast<uint64_t>(reduction_of(reduction));
  const Element element = element_of(d, d.take_type());
  const std::string problem = check_reduction(reduction_of(reduction), element);
  if (!problem.empty()) d.fail(problem);
  d.expect_count(3, 5);
  d.address(0);
  d.out.second = d.memory_operand(1);
  d.out.b = d.source(2, Type::u32);
  if (d.out.mode == 1) d.out.third = d.memory_operand(3);
  trailing_operands(d, d.out.mode == 2 ? 3 : 4, false, cache_hint);
  d.out.flags = static_cast<uint8_t>(element);
  handle(d, execute_bulk_reduce, Class::bulk_copy);
}

void decode_cp(Decoder& d) {
  const bool reduces = d.take("reduce");
  d.take_one({"async"}, ".async");
  if (!d.take("bulk")) {
    if (reduces) d.fail("the emulator does not know this instruction");
    return decode_copy_async(d);
  }
  if (d.take("commit_group")) {
    d.expect_count(0, 0);
    return handle(d, execute_bulk_commit, Class::bulk_copy);
  }
  if (d.take("wait_group")) {
    d.out.flags = d.take("read");
    d.expect_count(1, 1);
    d.out.immediate = d.immediate(0);
    return handle(d, execute_bulk_wait, Class::bulk_wait);
  }
  if (d.take("prefetch")) {
    while (!d.next().empty()) {
    }
    return handle(d, execute_nothing, Class::other);
  }
  if (d.take("tensor")) return decode_tensor_copy(d, reduces);
  if (reduces) return decode_bulk_reduce(d);
  decode_bulk_copy(d);
}

void decode_cluster_launch(Decoder& d) {
  if (d.take("try_cancel")) {
    d.take_one({"async"}, ".async");
    d.take_space();
    d.take_one({"mbarrier::complete_tx::bytes"}, ".mbarrier::complete_tx::bytes");
    if (d.take("multicast::cluster::all")) d.out.flags |= 1;
    d.take_one({"b128"}, ".b128");
    d.expect_count(2, 2);
    d.address(0);
    d.out.third = d.memory_operand(1);
    return handle(d, execute_cluster_launch, Class::bulk_copy);
  }
  d.take_one({"query_cancel"}, ".try_cancel or .query_cancel");
  if (d.take("is_canceled")) {
    d.take_one({"pred"}, ".pred");
    d.take_one({"b128"}, ".b128");
    d.expect_count(2, 2);
    d.out.p = d.predicate(d.argument(0), nullptr);
  } else {
    const int part =
        d.take_one({"get_first_ctaid", "get_first_ctaid::x", "get_first_ctaid::y", "get_first_ctaid::z"}, "a query");
    d.take_any({"v4", "b32"});
    d.take("b32");
    d.take_one({"b128"}, ".b128");
    d.expect_count(2, 2);
    d.out.mode = static_cast<uint8_t>(part == 0 ? 4 : part);
    if (part == 0)
      d.list_destinations(d.argument(0), Type::b32);
    else
      d.out.d = d.destination(0, Type::b32);
  }
  d.out.a = d.source(1, Type::b128);
  handle(d, execute_cluster_query, Class::other);
}

}  // namespace

void decode_store_async(Decoder& d) {
  const bool reduces = d.mnemonic() == "red";
  d.take_any({"weak", "relaxed"});
  d.take_scope();
  d.take_space();
  d.take_one({"mbarrier::complete_tx::bytes"}, ".mbarrier::complete_tx::bytes");
  d.out.mode = 255;
  if (reduces) {
    const int reduction = take_reduction(d);
    if (reduction < 0) d.fail("the reduction is missing");
    d.out.mode = static_cast<uint8_t>(reduction_of(reduction));
  }
  d.take_any({"v2", "v4"});
  d.out.type = d.take_type();
  d.expect_count(3, 3);
  d.address(0);
  d.list_sources(d.argument(1), d.out.type);
  d.out.third = d.memory_operand(2);
  handle(d, execute_store_async, Class::store_shared);
}

void add_asynchronous(DecodeTable& table) {
  table["cp"] = decode_cp;
  table["clusterlaunchcontrol"] = decode_cluster_launch;
}

}  // namespace jax_fa4::emulator

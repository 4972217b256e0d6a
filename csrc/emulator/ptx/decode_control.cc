// Decodes branches, warp-wide instructions, barriers and mbarriers.
#include "../machine/handlers.h"
#include "../machine/lane_functions.h"
#include "decoder.h"

namespace jax_fa4::emulator {
namespace {

void handle(Decoder& d, Handler handler, Class kind) {
  d.out.handler = handler;
  d.out.kind = kind;
}

void decode_bra(Decoder& d) {
  d.take("uni");
  d.expect_count(1, 1);
  d.out.target = d.statement().target;
  if (d.out.target < 0) d.fail("the target must be a label");
  handle(d, execute_branch, Class::branch);
}

void decode_brx(Decoder& d) {
  d.take_one({"idx"}, ".idx");
  d.take("uni");
  d.expect_count(2, 2);
  if (d.statement().targets.empty()) d.fail("the targets must be a .branchtargets list");
  d.out.a = d.source(0, Type::u32);
  d.out.immediate = d.program().branch_tables.size();
  d.program().branch_tables.push_back(d.statement().targets);
  handle(d, execute_branch_indexed, Class::branch);
}

void decode_exit(Decoder& d) {
  d.take("uni");
  d.expect_count(0, 0);
  handle(d, execute_exit, Class::branch);
}

void decode_nanosleep(Decoder& d) {
  d.take("u32");
  handle(d, execute_yield, Class::other);
}

void decode_shfl(Decoder& d) {
  d.take_one({"sync"}, ".sync (the form without it is gone from the architecture)");
  d.out.mode = static_cast<uint8_t>(d.take_one({"up", "down", "bfly", "idx"}, "a mode"));
  d.take_type();
  d.expect_count(5, 5);
  const Argument& target = d.argument(0);
  if (target.kind == Argument::Kind::pair) {
    d.out.d = d.destination(target.items[0], Type::b32);
    d.out.p = d.predicate(target.items[1], nullptr);
  } else {
    d.out.d = d.destination(target, Type::b32);
  }
  d.out.a = d.source(1, Type::b32);
  d.out.b = d.source(2, Type::b32);
  d.out.c = d.source(3, Type::b32);
  d.out.e = d.source(4, Type::b32);
  handle(d, execute_shuffle, Class::shuffle);
}

void decode_vote(Decoder& d) {
  d.take_one({"sync"}, ".sync");
  d.out.mode = static_cast<uint8_t>(d.take_one({"all", "any", "uni", "ballot"}, "a mode"));
  d.take_type();
  d.expect_count(3, 3);
  if (d.out.mode == 3)
    d.out.d = d.destination(0, Type::b32);
  else
    d.out.p = d.predicate(d.argument(0), nullptr);
  d.out.q = d.predicate(d.argument(1), &d.out.p_negated);
  d.out.e = d.source(2, Type::b32);
  handle(d, execute_vote, Class::shuffle);
}

void decode_match(Decoder& d) {
  d.out.mode = static_cast<uint8_t>(d.take_one({"any", "all"}, "a mode"));
  d.take_one({"sync"}, ".sync");
  d.out.type = d.take_type();
  d.expect_count(3, 3);
  const Argument& target = d.argument(0);
  if (target.kind == Argument::Kind::pair) d.out.p = d.predicate(target.items[1], nullptr);
  d.out.d = d.destination(target.kind == Argument::Kind::pair ? target.items[0] : target, Type::b32);
  d.out.a = d.source(1, d.out.type);
  d.out.e = d.source(2, Type::b32);
  handle(d, execute_match, Class::shuffle);
}

void decode_redux(Decoder& d) {
  d.take_one({"sync"}, ".sync");
  d.out.mode = static_cast<uint8_t>(d.take_one({"add", "min", "max", "and", "or", "xor"}, "an operation"));
  if (d.take("NaN")) d.out.flags |= kPropagateNan;
  if (d.take("abs")) d.out.flags |= kAbsolute;
  d.out.type = d.take_type();
  d.expect_count(3, 3);
  d.out.d = d.destination(0, Type::b32);
  d.out.a = d.source(1, Type::b32);
  d.out.e = d.source(2, Type::b32);
  handle(d, execute_redux, Class::shuffle);
}

void decode_elect(Decoder& d) {
  d.take_one({"sync"}, ".sync");
  d.expect_count(2, 2);
  const Argument& target = d.argument(0);
  if (target.kind != Argument::Kind::pair) d.fail("the destination must be a pair d|p");
  d.out.d = d.destination(target.items[0], Type::b32);
  d.out.p = d.predicate(target.items[1], nullptr);
  d.out.a = d.source(1, Type::b32);
  handle(d, execute_elect, Class::shuffle);
}

void decode_active_mask(Decoder& d) {
  d.take_type();
  d.expect_count(1, 1);
  d.out.d = d.destination(0, Type::b32);
  handle(d, execute_active_mask, Class::shuffle);
}

// -------------------------------------------------------------------------------------------------------------
// barriers

// bar and barrier: mode 0 sync, 1 arrive, 2.. red popc/and/or. a: id, b: threads (flags 1: given).
void decode_barrier(Decoder& d) {
  if (d.take("cluster")) {
    d.out.mode = static_cast<uint8_t>(d.take_one({"arrive", "wait"}, ".arrive or .wait"));
    d.out.flags = d.take_any({"acquire", "release", "relaxed"}) == 2;
    d.take("aligned");
    d.expect_count(0, 0);
    return handle(d, execute_cluster_barrier, Class::barrier);
  }
  if (d.take("warp")) {
    d.take_one({"sync"}, ".sync");
    d.expect_count(1, 1);
    d.out.a = d.source(0, Type::b32);
    return handle(d, execute_warp_sync, Class::barrier);
  }
  d.take("cta");
  const int operation = d.take_one({"sync", "arrive", "red"}, "an operation");
  d.take("aligned");
  size_t at = 0;
  d.out.mode = static_cast<uint8_t>(operation);
  if (operation == 2) {
    d.out.mode = static_cast<uint8_t>(2 + d.take_one({"popc", "and", "or"}, "a reduction"));
    d.take_type();
    d.expect_count(3, 4);
    if (d.out.mode == 2)
      d.out.d = d.destination(0, Type::b32);
    else
      d.out.p = d.predicate(d.argument(0), nullptr);
    d.out.q = d.predicate(d.argument(d.count() - 1), &d.out.p_negated);
    at = 1;
  } else {
    d.expect_count(1, 2);
  }
  d.out.a = d.source(at, Type::b32);
  const size_t last = operation == 2 ? d.count() - 1 : d.count();
  if (at + 1 < last) {
    d.out.b = d.source(at + 1, Type::b32);
    d.out.flags = 1;
  } else if (operation == 1) {
    d.fail("an arrive needs the number of threads");
  }
  handle(d, execute_barrier, Class::barrier);
}

// The state word of an arrival: d, or `_`.
void barrier_state(Decoder& d, size_t& at) {
  d.out.out_slots = 0;
  if (d.argument(0).kind == Argument::Kind::address) return;
  at = 1;
  if (d.argument(0).kind == Argument::Kind::sink) return;
  d.out.d = d.destination(0, Type::b64);
  d.out.out_slots = 2;
}

// mode: 0 arrive, 1 arrive_drop; flags: 1 expect_tx as well, 2 no_complete.
void decode_mbarrier_arrive(Decoder& d, bool drop) {
  if (d.take("expect_tx")) d.out.flags |= 1;
  if (d.take("noComplete")) d.out.flags |= 2;
  d.out.mode = drop;
  d.take_any({"release", "relaxed"});
  d.take_scope();
  d.out.space = d.take_space();
  d.take_one({"b64"}, ".b64");
  size_t at = 0;
  barrier_state(d, at);
  d.address(at);
  d.expect_count(at + 1, at + 2);
  if (d.count() == at + 2)
    d.out.b = d.source(at + 1, Type::b32);
  else if (d.out.flags & 3)
    d.fail("the count is missing");
  else
    d.out.b = d.constant32(1);
  handle(d, execute_mbarrier_arrive, Class::mbarrier_arrive);
}

// flags: 1 parity, 2 try (may wait).
void decode_mbarrier_wait(Decoder& d, bool may_wait) {
  d.out.flags = static_cast<uint8_t>((may_wait ? 2 : 0) | (d.take("parity") ? 1 : 0));
  d.take_any({"acquire", "relaxed"});
  d.take_scope();
  d.out.space = d.take_space();
  d.take_one({"b64"}, ".b64");
  d.expect_count(3, may_wait ? 4 : 3);
  d.out.p = d.predicate(d.argument(0), nullptr);
  d.address(1);
  d.out.b = d.source(2, (d.out.flags & 1) ? Type::b32 : Type::b64);
  handle(d, execute_mbarrier_wait, Class::mbarrier_wait);
}

void decode_mbarrier(Decoder& d) {
  const std::string_view operation = d.next();
  if (operation == "arrive" || operation == "arrive_drop") return decode_mbarrier_arrive(d, operation == "arrive_drop");
  if (operation == "try_wait" || operation == "test_wait") return decode_mbarrier_wait(d, operation == "try_wait");
  if (operation == "pending_count") {
    d.take_one({"b64"}, ".b64");
    d.expect_count(2, 2);
    d.out.d = d.destination(0, Type::b32);
    d.out.a = d.source(1, Type::b64);
    return handle(d, execute_mbarrier_pending, Class::other);
  }
  d.take_any({"relaxed"});
  d.take_scope();
  d.out.space = d.take_space();
  if (operation == "init" || operation == "inval") {
    d.take_one({"b64"}, ".b64");
    d.address(0);
    if (operation == "inval") return handle(d, execute_mbarrier_invalidate, Class::other);
    d.expect_count(2, 2);
    d.out.b = d.source(1, Type::b32);
    return handle(d, execute_mbarrier_init, Class::other);
  }
  if (operation != "expect_tx" && operation != "complete_tx") d.fail("the emulator does not know this instruction");
  d.take("b64");
  d.expect_count(2, 2);
  d.address(0);
  d.out.b = d.source(1, Type::b32);
  handle(d, operation == "expect_tx" ? execute_mbarrier_expect : execute_mbarrier_complete, Class::mbarrier_arrive);
}

void decode_setmaxnreg(Decoder& d) {
  d.out.mode = static_cast<uint8_t>(d.take_one({"dec", "inc"}, ".inc or .dec"));
  d.take_one({"sync"}, ".sync");
  d.take("aligned");
  d.take_type();
  d.expect_count(1, 1);
  d.out.immediate = d.immediate(0);
  if (d.out.immediate < 24 || d.out.immediate > 256 || d.out.immediate % 8 != 0)
    d.fail("the register count must be a multiple of 8 from 24 to 256, not " + std::to_string(d.out.immediate));
  handle(d, execute_set_registers, Class::other);
}

void decode_griddepcontrol(Decoder& d) {
  d.out.mode = static_cast<uint8_t>(d.take_one({"wait", "launch_dependents"}, ".wait or .launch_dependents"));
  handle(d, execute_dependency, Class::other);
}

}  // namespace

void add_control(DecodeTable& table) {
  table["bra"] = decode_bra;
  table["brx"] = decode_brx;
  table["ret"] = decode_exit;
  table["exit"] = decode_exit;
  table["trap"] = [](Decoder& d) { handle(d, execute_trap, Class::other); };
  table["brkpt"] = [](Decoder& d) { handle(d, execute_nothing, Class::other); };
  table["pmevent"] = [](Decoder& d) { handle(d, execute_nothing, Class::other); };
  table["nanosleep"] = decode_nanosleep;
  table["shfl"] = decode_shfl;
  table["vote"] = decode_vote;
  table["match"] = decode_match;
  table["redux"] = decode_redux;
  table["elect"] = decode_elect;
  table["activemask"] = decode_active_mask;
  table["bar"] = decode_barrier;
  table["barrier"] = decode_barrier;
  table["mbarrier"] = decode_mbarrier;
  table["setmaxnreg"] = decode_setmaxnreg;
  table["griddepcontrol"] = decode_griddepcontrol;
}

}  // namespace jax_fa4::emulator

// See register_record.h.
#include "register_record.h"

#include <bit>

#include "cta.h"
#include "grid.h"
#include "handlers.h"

namespace jax_fa4::emulator {
namespace {

constexpr uint32_t kAll = 0xffffffffu;

[[noreturn]] void report(const char* what, uint32_t missing) {
  throw Fault(Status::launch_failed,
              std::string(what) + " was never written in lane " + std::to_string(std::countr_zero(missing)));
}

bool accumulates(const Warp& warp, const Instruction& i) {
  return i.p >= 0 ? ((warp.predicate(i.p) & 1) != 0) != i.p_negated : i.immediate != 0;
}

}  // namespace

RegisterRecord::RegisterRecord(const Program& program)
    : program_(program), registers_(program.register_slots + 4, 0), predicates_(program.predicates + 1, 0) {
  for (const Preset& preset : program.presets)
    for (uint32_t slot = preset.slot; slot < preset.slot + preset.slots; slot++) registers_[slot] = kAll;
}

// Lanes in which all registers and predicates that the instruction reads were written.
uint32_t RegisterRecord::reads(const Instruction& i) const {
  const uint32_t* use = program_.uses.data() + i.uses;
  uint32_t defined = kAll;
  for (int r = 0; r < i.register_reads; r++) defined &= registers_[use[r]];
  use += i.register_reads + i.register_writes;
  for (int p = 0; p < i.predicate_reads; p++) defined &= predicates_[use[p]];
  return defined;
}

void RegisterRecord::check(const Warp& warp, const Instruction& i, uint32_t active, uint32_t lanes) const {
  if (i.guard >= 0) {
    const uint32_t missing = active & ~predicates_[static_cast<size_t>(i.guard)];
    if (missing != 0) report("the predicate that guards this instruction", missing);
  }
  if (i.definedness != Definedness::needed || lanes == 0) return;
  if (const uint32_t missing = lanes & ~reads(i); missing != 0)
    report("a register that this instruction reads", missing);
  if (i.handler != execute_wgmma || !accumulates(warp, i)) return;
  const uint32_t* written = program_.uses.data() + i.uses + i.register_reads;
  for (int r = 0; r < i.register_writes; r++)
    if (const uint32_t missing = lanes & ~registers_[written[r]]; missing != 0)
      report("an accumulator of this wgmma, which adds to it,", missing);
}

// A result that one defined operand decides is defined: the false one of an and, the true one of an or.
void RegisterRecord::update_predicates(const Warp& warp, const Instruction& i, uint32_t lanes,
                                       uint32_t from_registers) {
  const uint32_t* use = program_.uses.data() + i.uses + i.register_reads + i.register_writes;
  uint32_t defined = from_registers;
  if (i.handler == execute_predicate_logic && i.predicate_reads == 2 && i.mode < 2) {
    const uint32_t a = i.p_negated ? ~warp.predicate(i.q) : warp.predicate(i.q);
    const uint32_t b = i.flags != 0 ? ~warp.predicate(i.target) : warp.predicate(i.target);
    const uint32_t decides_a = i.mode == 0 ? ~a : a, decides_b = i.mode == 0 ? ~b : b;
    defined |= (predicates_[use[0]] & decides_a) | (predicates_[use[1]] & decides_b);
  }
  use += i.predicate_reads;
  for (int p = 0; p < i.predicate_writes; p++) predicates_[use[p]] = (predicates_[use[p]] & ~lanes) | (defined & lanes);
}

void RegisterRecord::update(const Warp& warp, const Instruction& i, uint32_t lanes) {
  const uint32_t* read = program_.uses.data() + i.uses;
  const uint32_t* written = read + i.register_reads;
  switch (i.definedness) {
    case Definedness::needed: {
      for (int r = 0; r < i.register_writes; r++) write(written[r], lanes, kAll);
      return update_predicates(warp, i, lanes, kAll);
    }
    case Definedness::by_plane:  // plane k of the result comes from plane k of each source
      for (int r = 0; r < i.register_writes; r++) {
        uint32_t defined = kAll;
        for (int s = r; s < i.register_reads; s += i.register_writes) defined &= registers_[read[s]];
        write(written[r], lanes, defined);
      }
      return;
    case Definedness::chosen: {  // selp
      const uint32_t takes_a = i.p_negated ? ~warp.predicate(i.p) : warp.predicate(i.p);
      const uint32_t known = predicates_[program_.uses[i.uses + i.register_reads + i.register_writes]];
      // A constant has no entry: then it is defined.
      const bool has_a = i.a >= 0, has_b = i.b >= 0;
      for (int r = 0; r < i.register_writes; r++) {
        const uint32_t a = has_a ? registers_[static_cast<size_t>(i.a + r)] : kAll;
        const uint32_t b = has_b ? registers_[static_cast<size_t>(i.b + r)] : kAll;
        write(written[r], lanes, known & ((takes_a & a) | (~takes_a & b)));
      }
      return;
    }
    case Definedness::passed_on: {
      const uint32_t defined = reads(i);
      for (int r = 0; r < i.register_writes; r++) write(written[r], lanes, defined);
      return update_predicates(warp, i, lanes, defined);
    }
  }
}

}  // namespace jax_fa4::emulator

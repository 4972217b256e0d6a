// Which registers of a warp were ever written, by lane. A register that was not may be moved and computed with, as
// compilers do with values that nobody needs; it may not decide anything: be an address, be stored, guard an
// instruction.
#pragma once

#include <cstdint>
#include <vector>

#include "../ptx/program.h"

namespace jax_fa4::emulator {

class Warp;

class RegisterRecord {
 public:
  explicit RegisterRecord(const Program& program);

  // Before an instruction runs in `lanes`: throws a Fault if it needs a register that was never written; what it is
  // about to write is written from now on, or as unwritten as what it is made of. `active`: lanes that look at its
  // guard.
  void note(const Warp& warp, const Instruction& i, uint32_t active, uint32_t lanes) {
    check(warp, i, active, lanes);
    if (lanes != 0) update(warp, i, lanes);
  }

 private:
  void check(const Warp& warp, const Instruction& i, uint32_t active, uint32_t lanes) const;
  void update(const Warp& warp, const Instruction& i, uint32_t lanes);
  uint32_t reads(const Instruction& i) const;
  void write(size_t slot, uint32_t lanes, uint32_t defined) {
    registers_[slot] = (registers_[slot] & ~lanes) | (defined & lanes);
  }
  void update_predicates(const Warp& warp, const Instruction& i, uint32_t lanes, uint32_t from_registers);

  const Program& program_;
  std::vector<uint32_t> registers_, predicates_;  // lanes in which they were written
};

}  // namespace jax_fa4::emulator

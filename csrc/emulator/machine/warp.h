// A warp: registers of 32 lanes, where the lanes are in the program, and what they wait for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../ptx/program.h"
#include "clock.h"
#include "memory.h"

namespace jax_fa4::emulator {

class Cta;

// What blocked lanes wait for; `object` tells things of one kind apart (a barrier's address, a lane mask).
struct Wait {
  enum class Kind : uint8_t {
    none, reconvergence, barrier, cluster_barrier, mbarrier, bulk_group, copy_group, wgmma, tensor_memory, tensor_wait, registers, poll
  };
  Kind kind = Kind::none;
  uint64_t object = 0;
  bool operator==(const Wait&) const = default;
};
const char* wait_name(Wait::Kind kind);

// Lanes at one place of the program.
struct Group {
  int32_t pc = 0;
  uint32_t lanes = 0;
  Wait wait;  // none: may run
};

// One asynchronous group that a warp waits for in order (bulk groups, cp.async groups, wgmma groups).
struct PendingGroups {
  uint32_t open = 0;                 // operations since the last commit that are not complete
  std::vector<uint32_t> unfinished;  // operations left in each committed group, oldest first
  std::vector<uint32_t> unread;      // of these, operations whose source may not be reused yet
  uint32_t open_unread = 0;
  uint32_t first = 0;                // number of the oldest group in `unfinished`
  uint32_t current() const { return first + static_cast<uint32_t>(unfinished.size()); }
};

class Warp {
 public:
  Warp(Cta& cta, int index, uint32_t lanes);

  // Runs up to `budget` instructions; how many it ran. Stops when all lanes are blocked or gone.
  uint64_t run(uint64_t budget);
  bool finished() const { return current.lanes == 0 && others.empty(); }
  bool blocked() const { return blocked_; }
  // Lets lanes that wait for this look again.
  void wake(const Wait& wait);
  bool waits_for(const Wait& wait) const;

  // ------------------------------------------------------------------------------------------------------- for handlers
  const uint32_t* source(Slot slot) const {
    if (slot < 0) return constants_ + static_cast<size_t>(~slot) * kLanes;
    if (in_flight_count_ != 0) check_in_flight(slot);
    return registers_.data() + static_cast<size_t>(slot) * kLanes;
  }
  uint32_t* destination(Slot slot) {
    if (in_flight_count_ != 0) check_in_flight(slot);
    return registers_.data() + static_cast<size_t>(slot) * kLanes;
  }
  uint32_t* raw(Slot slot) { return registers_.data() + static_cast<size_t>(slot) * kLanes; }
  // Writes `planes` planes of `value` for the lanes.
  void write(Slot slot, const uint32_t* value, int planes, uint32_t lanes);
  void write_lane(Slot slot, int lane, uint32_t value) { destination(slot)[lane] = value; }
  uint64_t wide_source(Slot slot, int lane) const {
    const uint32_t* plane = source(slot);
    return plane[lane] | uint64_t{plane[lane + kLanes]} << 32;
  }
  uint32_t predicate(int32_t index) const { return predicates_[static_cast<size_t>(index)]; }
  void write_predicate(int32_t index, uint32_t value, uint32_t lanes) {
    uint32_t& p = predicates_[static_cast<size_t>(index)];
    p = (p & ~lanes) | (value & lanes);
  }
  const Slot* list(const Instruction& i) const;
  // The address of an instruction's memory operand in a lane, before any window is taken off.
  uint64_t address(const Instruction& i, int lane) const {
    const uint32_t* plane = source(i.a);
    const uint64_t base = i.wide_address ? plane[lane] | uint64_t{plane[lane + kLanes]} << 32 : plane[lane];
    return i.wide_address ? base + static_cast<uint64_t>(i.offset) : static_cast<uint32_t>(base + static_cast<uint64_t>(i.offset));
  }
  Flow block(Wait wait) {
    current.wait = wait;
    return Flow::blocked;
  }
  // True if all lanes of `members` that still run are here; otherwise the caller blocks on reconvergence.
  bool converged(uint32_t members, uint32_t lanes) const { return (members & ~exited & ~lanes) == 0; }
  void exit_lanes(uint32_t lanes);
  void split(int32_t target, uint32_t lanes);  // these lanes go to target, the rest go on

  // Registers that an asynchronous matrix instruction will write: touching them before the wait is an error.
  void mark_in_flight(Slot slot, int change);
  bool any_in_flight() const { return in_flight_count_ != 0; }

  // Clocks: a release gives others what the warp knows; an acquire takes it over.
  Stamp stamp() const { return {agent, time}; }
  void release_into(Knowledge& other);
  void acquire(const Knowledge& other) { knows.join(other); }

  Cta& cta;
  const int index;
  const uint32_t initial_lanes;
  Group current;
  std::vector<Group> others;
  uint32_t exited = 0;
  uint64_t executed = 0;
  bool yield = false;  // set by a handler: let others run
  Agent agent = 0;
  uint32_t time = 1;
  Knowledge knows;
  int registers_per_thread = 0;   // setmaxnreg
  PendingGroups bulk[kLanes];     // per thread
  PendingGroups copies;           // cp.async, of the warp
  PendingGroups matrix;           // wgmma
  bool barrier_waiting = false;   // arrived at a named barrier, in this generation:
  uint64_t barrier_generation = 0;
  bool cluster_arrived = false;   // at the cluster barrier, in this phase:
  uint32_t cluster_phase = 0;
  bool tried = false;             // the last try_wait failed
  std::vector<uint8_t> local;     // 32 x local_bytes

 private:
  void choose_group();
  void check_in_flight(Slot slot) const;

  std::vector<uint32_t> registers_;
  std::vector<uint32_t> predicates_;
  std::vector<uint8_t> in_flight_;
  const uint32_t* constants_;
  uint32_t in_flight_count_ = 0;
  bool blocked_ = false;
};

}  // namespace jax_fa4::emulator

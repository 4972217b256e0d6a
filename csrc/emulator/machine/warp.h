// A warp: registers of 32 lanes, where the lanes are in the program, and what they wait for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "../ptx/program.h"
#include "clock.h"
#include "flags.h"
#include "memory.h"
#include "register_record.h"
#include "shared_memory.h"

namespace jax_fa4::emulator {

class Cta;

// What blocked lanes wait for; `object` tells things of one kind apart (a barrier's address, a lane mask).
struct Wait {
  enum class Kind : uint8_t {
    none,
    reconvergence,
    barrier,
    cluster_barrier,
    mbarrier,
    bulk_group,
    copy_group,
    wgmma,
    tensor_memory,
    tensor_wait,
    registers,
    poll
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

// Groups of asynchronous operations that are waited for in order: bulk groups, cp.async groups, wgmma groups.
struct GroupQueue {
  struct Group {
    uint32_t unread = 0;      // operations whose source may not be reused yet
    uint32_t unfinished = 0;  // operations that are not complete
    uint32_t last_time = 0;   // of the agent that carries them out
    uint32_t write_time = 0;  // of the agent that writes their results, where that is another one
  };
  std::vector<Group> groups{1};  // oldest first; the last one is still open
  uint64_t first = 0;            // number of the oldest
  uint32_t gone_writes = 0;      // the last write_time of those that were forgotten
  uint32_t gone = 0;             // their last last_time

  uint64_t open_number() const { return first + groups.size() - 1; }
  Group& open() { return groups.back(); }
  Group* find(uint64_t number) { return number < first ? nullptr : &groups[number - first]; }
  void commit() { groups.push_back({}); }
  // All but the newest `pending` committed groups are done (their sources free, if `reads_only`).
  bool done(uint64_t pending, bool reads_only) const {
    for (size_t i = 0; i + 1 + pending < groups.size(); i++)
      if ((reads_only ? groups[i].unread : groups[i].unfinished) != 0) return false;
    return true;
  }
  // Of the groups before `number`: whether they are committed and complete, and the time up to which they go.
  bool complete_before(uint64_t number) const {
    for (uint64_t one = first; one < number; one++)
      if (one >= open_number() || groups[one - first].unfinished != 0) return false;
    return true;
  }
  uint32_t time_before(uint64_t number) const {
    uint32_t time = gone;
    for (uint64_t one = first; one < number && one < open_number(); one++)
      time = std::max(time, groups[one - first].last_time);
    return time;
  }
  // The time up to which the writes of the waited-for operations go.
  uint32_t writes(uint64_t pending) const {
    uint32_t time = gone_writes;
    for (size_t i = 0; i + 1 + pending < groups.size(); i++) time = std::max(time, groups[i].write_time);
    return time;
  }
  // The time up to which the waited-for operations go; forgets the groups that are complete.
  uint32_t acquire(uint64_t pending) {
    uint32_t time = 0;
    for (size_t i = 0; i + 1 + pending < groups.size(); i++) time = std::max(time, groups[i].last_time);
    while (groups.size() > 1 && groups.front().unfinished == 0 && groups.front().last_time <= time) {
      gone_writes = std::max(gone_writes, groups.front().write_time);
      gone = std::max(gone, groups.front().last_time);
      groups.erase(groups.begin());
      first++;
    }
    return time;
  }
};

class Warp {
 public:
  Warp(Cta& cta, int index, uint32_t lanes);
  ~Warp();

  // Runs up to `budget` instructions; how many it ran. Stops when all lanes are blocked or gone.
  uint64_t run(uint64_t budget);
  bool finished() const { return current.lanes == 0 && others.empty(); }
  bool blocked() const { return blocked_; }
  // Lets lanes that wait for this look again.
  void wake(const Wait& wait);
  bool waits_for(const Wait& wait) const;

  // ------------------------------------------------------------------------------------------------------- for
  // handlers
  const uint32_t* source(Slot slot) const {
    if (slot < 0) return constants_ + static_cast<size_t>(~slot) * kLanes;
    if (watching_) touch(slot, false);
    return registers_.data() + static_cast<size_t>(slot) * kLanes;
  }
  uint32_t* destination(Slot slot) {
    if (watching_) touch(slot, true);
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
  const Slot* list(const Instruction& i) const { return lists_ + i.list; }
  // The address of an instruction's memory operand in a lane, before any window is taken off.
  uint64_t address(const Instruction& i, int lane) const {
    const uint32_t* plane = source(i.a);
    const uint64_t base = i.wide_address ? plane[lane] | uint64_t{plane[lane + kLanes]} << 32 : plane[lane];
    return i.wide_address ? base + static_cast<uint64_t>(i.offset)
                          : static_cast<uint32_t>(base + static_cast<uint64_t>(i.offset));
  }
  uint64_t address(const MemoryOperand& operand, int lane) const {
    const uint32_t* plane = source(operand.base);
    const uint64_t base = operand.wide ? plane[lane] | uint64_t{plane[lane + kLanes]} << 32 : plane[lane];
    return operand.wide ? base + static_cast<uint64_t>(operand.offset)
                        : static_cast<uint32_t>(base + static_cast<uint64_t>(operand.offset));
  }
  Flow block(Wait wait) {
    current.wait = wait;
    return Flow::blocked;
  }
  // True if all lanes of `members` that still run are here; otherwise the caller blocks on reconvergence.
  bool converged(uint32_t members, uint32_t lanes) const { return (members & ~exited & ~lanes) == 0; }
  void exit_lanes(uint32_t lanes);
  void split(int32_t target, uint32_t lanes);  // these lanes go to target, the rest go on

  // Registers that an asynchronous matrix instruction writes may not be touched before the wait; those that it reads
  // may not be written.
  void hold(uint64_t group, std::vector<Slot> written, std::vector<Slot> read);
  void let_go(uint64_t before_group);
  // Registers that a tcgen05.ld of this time fills: its read of tensor memory is over once one of them is touched.
  void expect_load(uint32_t load_time, std::vector<Slot> registers);
  void complete_loads(uint32_t load_time) const;
  // wgmma.fence orders registers that other instructions touched before a wgmma; true if one of these needs it.
  void fence_registers();
  bool needs_fence(const std::vector<Slot>& registers) const;

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
  mutable Knowledge knows;                               // a read of a loaded register completes the load
  std::shared_ptr<const Knowledge> known_by_operations;  // what the last asynchronous operation took over of it
  std::unique_ptr<TensorView> tensor_view;               // null: tcgen05.fence is not looked at
  std::unique_ptr<FenceState> fences;                    // null: none yet, and no relaxed read of a flag
  int registers_per_thread = 0;                          // setmaxnreg
  bool registers_known = false;                          // it was executed
  uint32_t pair_allocations = 0;  // tcgen05.alloc.cta_group::2 that this warp completes with the other CTA
  GroupQueue bulk[kLanes];        // per thread
  GroupQueue copies;              // cp.async
  GroupQueue matrix;              // wgmma
  // Who carries them out; 0: none yet. Bulk copies have one that reads shared memory and one that writes global memory.
  Agent bulk_agent = 0, bulk_write_agent = 0, copy_agent = 0, matrix_agent = 0, tensor_agent = 0, load_agent = 0;
  uint32_t load_time = 0;    // of the last tcgen05.ld
  uint32_t tensor_time = 0;  // of the last tcgen05.st
  Agent pipe_agent = 0;      // this warp's tcgen05.mma, cp and commit, which run in order
  uint64_t pipe_due = 0;     // when the last of them runs
  uint64_t matrix_due = 0;   // when the last wgmma runs
  // Registers that wgmma groups write or read until they are waited for.
  struct Held {
    uint64_t group;
    std::vector<Slot> written, read;
  };
  std::vector<Held> held;
  bool barrier_waiting = false;  // arrived at a named barrier, in this generation:
  uint64_t barrier_generation = 0;
  bool cluster_arrived = false;  // at the cluster barrier, in this phase:
  uint32_t cluster_phase = 0;
  bool tried = false;          // the last try_wait failed
  std::vector<uint8_t> local;  // 32 x local_bytes

 private:
  void choose_group();
  // An instruction reads or writes a register that something asynchronous concerns.
  void touch(Slot slot, bool writes) const;

  std::vector<uint32_t> registers_;
  std::vector<uint32_t> predicates_;
  // By slot: what concerns the register. Touching it may complete a tensor-memory load, so a read changes what is
  // known.
  static constexpr uint8_t kWritten = 1, kRead = 2, kLoading = 4, kMatrix = 8, kTouched = 16;
  mutable std::vector<uint8_t> holds_;
  mutable std::vector<Held> loads_;
  bool watching_ = false;
  bool fenced_registers_ = false;            // a wgmma.fence was executed
  std::unique_ptr<RegisterRecord> written_;  // null: not looked at
  const uint32_t* constants_;
  const Slot* lists_;
  bool blocked_ = false;
};

}  // namespace jax_fa4::emulator

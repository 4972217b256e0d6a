// The 32 lanes of a load or store looked at together: what nearly all of them are, data of one space within bounds and
// aligned, costs little then. Where a lane is anything else, callers go lane by lane, which finds out what is wrong.
#pragma once

#include "access.h"

namespace jax_fa4::emulator {

// Where the active lanes of an instruction read or write `bytes` bytes each.
class LaneAddresses {
 public:
  LaneAddresses(const Warp& warp, const Instruction& i, uint32_t lanes, uint32_t bytes);

  uint64_t address[kLanes];  // an inactive lane's is that of some active one
  uint32_t offset[kLanes];   // in the shared memory of the warp's CTA, if in_shared

  // All of them are shared memory of the warp's own CTA.
  bool in_shared() const { return in_shared_; }
  void touch_shared(Warp& warp, bool writes, const char* what) const;
  // All of them are global memory that may be read (was written), or written.
  bool in_global(Warp& warp, const Instruction& i, bool writes) const;
  void touch_global(Warp& warp, const Instruction& i, AccessKind kind, bool repeats, const char* what) const;

 private:
  // Calls run(first lane, bytes together) for lanes whose places follow each other, or are the same.
  template <class Place, class Run>
  void each_run(const Place* place, Run run) const;

  const uint32_t lanes_, bytes_;
  bool aligned_ = false, in_shared_ = false;
};

// Shared-memory cycles beyond one for each 128 bytes: the most words that a bank must give in one pass of 128 bytes.
uint64_t extra_shared_cycles(const uint32_t* offsets, uint32_t lanes, uint32_t bytes);

}  // namespace jax_fa4::emulator

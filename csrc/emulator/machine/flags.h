// Synchronisation through words of memory: what is told with a release at a flag, and what an acquire of it learns.
// Relaxed operations take part together with fences: what a thread knew at a fence is told by its later writes, what it
// read is learnt at its next fence. Source: PTX ISA, "Release and acquire patterns".
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>

#include "../ptx/program.h"
#include "clock.h"

namespace jax_fa4::emulator {

class Warp;

// What was told at flags, by address, in one CTA, cluster or grid.
using Flags = std::map<uint64_t, Knowledge>;

// The flags of a grid: only what matters in other clusters too.
class GridFlags {
 public:
  void tell(uint64_t address, uint64_t cluster, const Knowledge& knows);
  // Joins what was told into `knows`, of an agent of the cluster.
  void learn(uint64_t address, uint64_t cluster, Knowledge& knows) const;

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<const Elsewhere>> told_;
};

// Between the fences of a warp.
struct FenceState {
  std::array<bool, kScopes> has_released{};
  std::array<Knowledge, kScopes> released;  // known at the last fence of at least this scope
  std::array<Knowledge, kScopes> seen;      // told at flags that were read since
};

// A strong read, or write, of the flag at an address.
void read_flag(Warp& warp, uint64_t address, MemoryOrder order, MemoryScope scope);
void write_flag(Warp& warp, uint64_t address, MemoryOrder order, MemoryScope scope);
// fence.acq_rel, fence.sc, membar.
void fence_memory(Warp& warp, MemoryScope scope);

}  // namespace jax_fa4::emulator

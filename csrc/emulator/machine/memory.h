// Global memory: the ranges of host memory that kernels may touch. Device addresses are host addresses.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

namespace jax_fa4::emulator {

// Generic addresses outside of global memory. The low 32 bits of a shared one are the address in the shared window,
// where the CTA's rank in its cluster stands in bits 24 and up; 1 KiB at the start of each CTA's window is reserved.
inline constexpr uint64_t kSharedWindow = uint64_t{1} << 56;
inline constexpr uint64_t kLocalWindow = uint64_t{2} << 56;
inline constexpr int kRankShift = 24;
inline constexpr uint32_t kOffsetMask = (1u << kRankShift) - 1;
inline constexpr uint32_t kReservedShared = 1024;

class GlobalMemory {
 public:
  struct Range {
    uint64_t begin = 0;
    uint64_t end = 0;
    bool owned = false;
    // One bit a byte, set once written; empty: all of it counts as written.
    std::shared_ptr<std::vector<uint8_t>> written;
  };

  // Fresh memory: every byte is 0xFF (NaN) and counts as uninitialised until it is written. Null if there is none.
  void* allocate(uint64_t bytes);
  bool release(void* address);
  // Memory that belongs to somebody else and may be touched until it is removed. Ranges that overlap are merged into
  // one.
  void add(const void* address, uint64_t bytes);
  void remove(const void* address);

  // The range that holds [address, address + bytes), or an empty range.
  Range find(uint64_t address, uint64_t bytes) const;
  // Marks bytes as written by the host.
  void mark_written(uint64_t address, uint64_t bytes);
  uint64_t allocated_bytes() const;

 private:
  mutable std::shared_mutex mutex_;
  std::map<uint64_t, Range> ranges_;    // by begin; they do not overlap
  std::map<uint64_t, uint64_t> added_;  // how often an address was added
  uint64_t allocated_ = 0;
};

}  // namespace jax_fa4::emulator

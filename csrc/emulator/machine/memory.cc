// See memory.h.
#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace jax_fa4::emulator {
namespace {

constexpr uint64_t kAllocationAlign = 512;

}  // namespace

void* GlobalMemory::allocate(uint64_t bytes) {
  const uint64_t rounded = (std::max<uint64_t>(bytes, 1) + kAllocationAlign - 1) / kAllocationAlign * kAllocationAlign;
  if (rounded < bytes) return nullptr;
  void* address = std::aligned_alloc(kAllocationAlign, rounded);
  if (address == nullptr) return nullptr;
  std::memset(address, 0xff, rounded);
  Range range;
  range.begin = reinterpret_cast<uint64_t>(address);
  range.end = range.begin + std::max<uint64_t>(bytes, 1);
  range.owned = true;
  range.written = std::make_shared<std::vector<uint8_t>>((rounded + 7) / 8, uint8_t{0});
  std::unique_lock lock(mutex_);
  ranges_[range.begin] = range;
  allocated_ += bytes;
  return address;
}

bool GlobalMemory::release(void* address) {
  std::unique_lock lock(mutex_);
  const auto found = ranges_.find(reinterpret_cast<uint64_t>(address));
  if (found == ranges_.end() || !found->second.owned) return false;
  allocated_ -= std::min(allocated_, found->second.end - found->second.begin);
  ranges_.erase(found);
  std::free(address);
  return true;
}

void GlobalMemory::add(const void* address, uint64_t bytes) {
  if (bytes == 0) return;
  std::unique_lock lock(mutex_);
  const uint64_t begin = reinterpret_cast<uint64_t>(address);
  Range merged{begin, begin + bytes, false, nullptr};
  auto next = ranges_.lower_bound(begin);
  if (next != ranges_.begin() && std::prev(next)->second.end > begin) --next;
  // Memory that the emulator itself allocated keeps its own record.
  while (next != ranges_.end() && next->second.begin < merged.end) {
    if (next->second.owned) return;
    merged.begin = std::min(merged.begin, next->second.begin);
    merged.end = std::max(merged.end, next->second.end);
    next = ranges_.erase(next);
  }
  ranges_[merged.begin] = merged;
  added_[begin]++;
}

void GlobalMemory::remove(const void* address) {
  std::unique_lock lock(mutex_);
  const uint64_t begin = reinterpret_cast<uint64_t>(address);
  const auto times = added_.find(begin);
  if (times == added_.end() || --times->second > 0) return;
  added_.erase(times);
  const auto found = ranges_.find(begin);
  if (found == ranges_.end() || found->second.owned) return;
  ranges_.erase(found);
}

GlobalMemory::Range GlobalMemory::find(uint64_t address, uint64_t bytes) const {
  std::shared_lock lock(mutex_);
  auto next = ranges_.upper_bound(address);
  if (next == ranges_.begin()) return {};
  const Range& range = std::prev(next)->second;
  return address < range.end && bytes <= range.end - address ? range : Range{};
}

void GlobalMemory::mark_written(uint64_t address, uint64_t bytes) {
  const Range range = find(address, bytes);
  if (range.written == nullptr) return;
  for (uint64_t at = address - range.begin; bytes > 0; at++, bytes--) {
    if (at % 8 == 0 && bytes >= 8) {
      const uint64_t whole = bytes / 8;
      std::memset(range.written->data() + at / 8, 0xff, whole);
      at += whole * 8 - 1;
      bytes -= whole * 8 - 1;
      continue;
    }
    (*range.written)[at / 8] |= static_cast<uint8_t>(1u << (at % 8));
  }
}

uint64_t GlobalMemory::allocated_bytes() const {
  std::shared_lock lock(mutex_);
  return allocated_;
}

}  // namespace jax_fa4::emulator

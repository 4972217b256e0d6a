// See flags.h.
#include "flags.h"

#include "grid.h"

namespace jax_fa4::emulator {
namespace {

constexpr int kGridLevel = static_cast<int>(MemoryScope::gpu);

bool is_global(uint64_t address) { return address < kSharedWindow; }

// What was told at a level (a scope, seen from this warp) joins `knows`.
void learn(const Warp& warp, int level, uint64_t address, Knowledge& knows) {
  const Cluster& cluster = warp.cta.cluster;
  if (level == kGridLevel) {
    if (is_global(address)) cluster.grid.flags.learn(address, cluster.number, knows);
    return;
  }
  const Flags& flags = level == 0 ? warp.cta.flags : cluster.flags;
  const auto found = flags.find(address);
  if (found != flags.end()) knows.join(found->second);
}

void tell(Warp& warp, int level, uint64_t address, const Knowledge& knows) {
  Cluster& cluster = warp.cta.cluster;
  if (level == kGridLevel) {
    if (is_global(address)) cluster.grid.flags.tell(address, cluster.number, knows);
    return;
  }
  (level == 0 ? warp.cta.flags : cluster.flags)[address].join(knows);
}

bool acquires(MemoryOrder order) { return order == MemoryOrder::acquire || order == MemoryOrder::acquire_release; }
bool releases(MemoryOrder order) { return order == MemoryOrder::release || order == MemoryOrder::acquire_release; }

FenceState& state_of(Warp& warp) {
  if (warp.fences == nullptr) warp.fences = std::make_unique<FenceState>();
  return *warp.fences;
}

}  // namespace

void GridFlags::tell(uint64_t address, uint64_t cluster, const Knowledge& knows) {
  std::lock_guard lock(mutex_);
  std::shared_ptr<const Elsewhere>& told = told_[address];
  auto more = told == nullptr ? std::make_shared<Elsewhere>() : std::make_shared<Elsewhere>(*told);
  more->join({cluster, knows.happened, knows.fenced_global});
  if (knows.elsewhere != nullptr) more->join(*knows.elsewhere);
  told = std::move(more);
}

void GridFlags::learn(uint64_t address, uint64_t cluster, Knowledge& knows) const {
  std::shared_ptr<const Elsewhere> told;
  {
    std::lock_guard lock(mutex_);
    const auto found = told_.find(address);
    if (found == told_.end()) return;
    told = found->second;
  }
  if (const Elsewhere::Clocks* own = told->find(cluster)) {
    knows.happened.join(own->happened);
    knows.fenced_global.join(own->fenced);
  }
  knows.join_elsewhere(told);
}

void read_flag(Warp& warp, uint64_t address, MemoryOrder order, MemoryScope scope) {
  for (int level = 0; level <= static_cast<int>(scope); level++)
    learn(warp, level, address, acquires(order) ? warp.knows : state_of(warp).seen[static_cast<size_t>(level)]);
}

void write_flag(Warp& warp, uint64_t address, MemoryOrder order, MemoryScope scope) {
  if (!releases(order)) {
    if (warp.fences == nullptr) return;
    for (size_t level = 0; level <= static_cast<size_t>(scope); level++)
      if (warp.fences->has_released[level]) tell(warp, static_cast<int>(level), address, warp.fences->released[level]);
    return;
  }
  warp.knows.happened.raise(warp.agent, warp.time);
  for (int level = 0; level <= static_cast<int>(scope); level++) tell(warp, level, address, warp.knows);
  warp.time++;
}

void fence_memory(Warp& warp, MemoryScope scope) {
  FenceState& fences = state_of(warp);
  for (size_t level = 0; level <= static_cast<size_t>(scope); level++) {
    warp.knows.join(fences.seen[level]);
    fences.seen[level].clear();
  }
  warp.knows.happened.raise(warp.agent, warp.time);
  for (size_t level = 0; level <= static_cast<size_t>(scope); level++) {
    fences.released[level] = warp.knows;
    fences.has_released[level] = true;
  }
  warp.time++;
}

}  // namespace jax_fa4::emulator

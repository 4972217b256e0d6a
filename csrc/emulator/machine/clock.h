// Vector clocks: what has happened before what. Every warp is an agent; so is every stream of asynchronous work (the
// copies that complete on one barrier, the bulk groups of a warp, a tensor-core pipe). An access is stamped with its
// agent and that agent's time; it happened before an agent's next action if the agent's clock has reached the stamp.
// Agents are numbered within their cluster.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace jax_fa4::emulator {

using Agent = uint32_t;
// The one agent that is the same in all clusters: kernels that were launched before, on the same stream.
inline constexpr Agent kEarlierKernels = 0;

class VectorClock {
 public:
  uint32_t at(Agent agent) const { return agent < times_.size() ? times_[agent] : 0; }
  void raise(Agent agent, uint32_t time) {
    if (agent >= times_.size()) times_.resize(agent + 1, 0);
    times_[agent] = std::max(times_[agent], time);
  }
  void join(const VectorClock& other) {
    if (other.times_.size() > times_.size()) times_.resize(other.times_.size(), 0);
    for (size_t i = 0; i < other.times_.size(); i++) times_[i] = std::max(times_[i], other.times_[i]);
  }
  void clear() { times_.clear(); }
  bool operator==(const VectorClock&) const = default;

 private:
  std::vector<uint32_t> times_;
};

// What is known of other clusters, by their number: mostly nothing. Never changed once it is made, so it is shared.
class Elsewhere {
 public:
  struct Clocks {
    uint64_t cluster = 0;
    VectorClock happened, fenced;
  };

  const Clocks* find(uint64_t cluster) const {
    const auto found = std::lower_bound(all_.begin(), all_.end(), cluster, is_before);
    return found != all_.end() && found->cluster == cluster ? &*found : nullptr;
  }
  void join(const Clocks& one) {
    const auto place = std::lower_bound(all_.begin(), all_.end(), one.cluster, is_before);
    if (place == all_.end() || place->cluster != one.cluster) {
      all_.insert(place, one);
      return;
    }
    place->happened.join(one.happened);
    place->fenced.join(one.fenced);
  }
  void join(const Elsewhere& other) {
    for (const Clocks& one : other.all_) join(one);
  }
  std::vector<Clocks>& all() { return all_; }
  const std::vector<Clocks>& all() const { return all_; }

 private:
  static bool is_before(const Clocks& one, uint64_t cluster) { return one.cluster < cluster; }
  std::vector<Clocks> all_;  // by number
};

// What an agent knows: everything that happened before it; which of it the asynchronous proxy may see, in shared and in
// global memory (a fence.proxy.async lay between); which mbarriers' initialisation a fence.mbarrier_init told the
// cluster of; and what tensor-core work tcgen05.fence ordered.
struct Knowledge {
  VectorClock happened;
  VectorClock fenced;
  VectorClock fenced_global;
  VectorClock initialized;
  VectorClock tensor_fenced;
  std::shared_ptr<const Elsewhere> elsewhere;

  void join(const Knowledge& other) {
    happened.join(other.happened);
    fenced.join(other.fenced);
    fenced_global.join(other.fenced_global);
    initialized.join(other.initialized);
    tensor_fenced.join(other.tensor_fenced);
    join_elsewhere(other.elsewhere);
  }
  void join_elsewhere(const std::shared_ptr<const Elsewhere>& other) {
    if (other == nullptr || other == elsewhere) return;
    if (elsewhere == nullptr) {
      elsewhere = other;
      return;
    }
    auto both = std::make_shared<Elsewhere>(*elsewhere);
    both->join(*other);
    elsewhere = std::move(both);
  }
  // fence.proxy.async for global memory: also of what happened in other clusters.
  void fence_global() {
    fenced_global.join(happened);
    if (elsewhere == nullptr) return;
    auto fenced_too = std::make_shared<Elsewhere>(*elsewhere);
    for (Elsewhere::Clocks& one : fenced_too->all()) one.fenced.join(one.happened);
    elsewhere = std::move(fenced_too);
  }
  void clear() { *this = {}; }
  bool operator==(const Knowledge&) const = default;
};

// One access.
struct Stamp {
  Agent agent = 0;
  uint32_t time = 0;
};

}  // namespace jax_fa4::emulator

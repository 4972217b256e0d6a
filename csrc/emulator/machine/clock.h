// Vector clocks: what has happened before what. Every warp is an agent; so is every stream of asynchronous work (the
// copies that complete on one barrier, the bulk groups of a warp, a tensor-core pipe). An access is stamped with its
// agent and that agent's time; it happened before an agent's next action if the agent's clock has reached the stamp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace jax_fa4::emulator {

using Agent = uint32_t;

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

 private:
  std::vector<uint32_t> times_;
};

// What an agent knows: everything that happened before it, and which of it the asynchronous proxy may see (a
// fence.proxy.async lay between).
struct Knowledge {
  VectorClock happened;
  VectorClock fenced;

  void join(const Knowledge& other) {
    happened.join(other.happened);
    fenced.join(other.fenced);
  }
  void clear() {
    happened.clear();
    fenced.clear();
  }
};

// One access.
struct Stamp {
  Agent agent = 0;
  uint32_t time = 0;
};

}  // namespace jax_fa4::emulator

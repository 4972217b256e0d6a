// Work that an instruction starts and that completes later: who carries it out, and what that agent knows.
#pragma once

#include <memory>

#include "access.h"

namespace jax_fa4::emulator {

// One asynchronous operation. What happened before its issue happened before it; who acquires its completion knows
// both.
struct Operation {
  Stamp stamp;
  std::shared_ptr<const Knowledge> knows;
  const TensorView* tensor = nullptr;  // of the warp
  Actor actor() const { return {stamp, knows.get(), true, tensor}; }
};

// An operation of `agent`, issued by a warp.
Operation start_operation(Warp& warp, Agent agent);
// The agent of the copies that complete on the mbarrier at this place, for one that a warp starts.
Agent barrier_agent(const Warp& warp, Cta& cta, uint32_t offset);
// An agent of a warp, made when first used.
Agent warp_agent(Warp& warp, Agent& agent, const char* what);
// What those who wait for the operation learn.
Knowledge completion_of(const Operation& operation);

}  // namespace jax_fa4::emulator

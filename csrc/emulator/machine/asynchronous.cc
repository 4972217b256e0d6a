// See asynchronous.h.
#include "asynchronous.h"

#include "report.h"

namespace jax_fa4::emulator {

Operation start_operation(Warp& warp, Agent agent) {
  Operation operation;
  operation.stamp = {agent, warp.cta.cluster.tick(agent)};
  // Operations that a warp starts one after the other mostly share what they know.
  warp.knows.happened.raise(warp.agent, warp.time);
  if (warp.known_by_operations == nullptr || *warp.known_by_operations != warp.knows)
    warp.known_by_operations = std::make_shared<const Knowledge>(warp.knows);
  operation.knows = warp.known_by_operations;
  operation.tensor = warp.tensor_view.get();
  return operation;
}

Agent barrier_agent(const Warp& warp, Cta& cta, uint32_t offset) {
  MemoryBarrier& barrier = cta.mbarrier(offset, warp);
  if (barrier.channel == 0)
    barrier.channel = cta.cluster.new_agent("the asynchronous work that completes on the mbarrier at " +
                                            shared_name(cta, offset) + " of " + cta_name(cta));
  return barrier.channel;
}

Agent warp_agent(Warp& warp, Agent& agent, const char* what) {
  if (agent == 0) {
    agent = warp.cta.cluster.new_agent(std::string(what) + " of " + warp.cta.cluster.agent_name(warp.agent));
    if (warp.tensor_view != nullptr) {
      const Agent own[3] = {warp.pipe_agent, warp.load_agent, warp.tensor_agent};
      std::copy(own, own + 3, warp.tensor_view->own);
    }
  }
  return agent;
}

Knowledge completion_of(const Operation& operation) {
  Knowledge knows = *operation.knows;
  knows.happened.raise(operation.stamp.agent, operation.stamp.time);
  return knows;
}

}  // namespace jax_fa4::emulator

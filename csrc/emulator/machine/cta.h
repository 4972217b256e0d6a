// A CTA and its cluster: shared memory, barriers, tensor memory, warps.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "flags.h"
#include "options.h"
#include "shared_memory.h"
#include "tensor_memory.h"
#include "warp.h"

namespace jax_fa4::emulator {

class Cluster;
class Scheduler;
class Grid;

struct Dim3 {
  uint32_t x = 1, y = 1, z = 1;
  uint64_t product() const { return uint64_t{x} * y * z; }
};

// Who arrived at an mbarrier: a warp, or an asynchronous operation; and the PTX line.
struct Arrival {
  const char* operation = nullptr;
  const Warp* warp = nullptr;
  uint32_t line = 0;
};

// An mbarrier object. A phase ends when neither arrivals nor bytes are pending.
struct MemoryBarrier {
  uint32_t expected = 0;  // arrivals a phase
  int64_t pending = 0;    // arrivals left
  int64_t bytes = 0;      // transaction count left; negative if bytes came before they were expected
  uint64_t phase = 0;     // phases completed
  Knowledge arrived;      // what those who arrived in this phase knew
  Knowledge completed;    // of the phases that ended
  Arrival last_arrival;   // for reports
  Agent channel = 0;      // of asynchronous work that completes here; 0: none yet
  Stamp initialized;      // by whom, when
};

// bar.sync and friends: ids 0..15.
struct NamedBarrier {
  uint32_t expected = 0;  // threads; 0: idle
  uint32_t arrived = 0;
  uint64_t generation = 0;
  Knowledge knowledge;     // of this generation
  Knowledge completed;     // of the last
  uint32_t reduction = 0;  // bar.red, of this generation
  uint32_t result = 0;     // of the last
  uint32_t line = 0;       // of the first arrival
};

class Cta {
 public:
  Cta(Cluster& cluster, uint32_t rank, Dim3 index);

  Cluster& cluster;
  const uint32_t rank;  // in the cluster
  const Dim3 index;     // ctaid
  SharedMemory shared;
  std::unique_ptr<TensorMemory> tensor;         // from 10.0 on
  std::map<uint32_t, MemoryBarrier> mbarriers;  // by offset
  NamedBarrier barriers[16];
  std::vector<std::unique_ptr<Warp>> warps;
  int warps_left = 0;
  Flags flags;             // of CTA scope
  int free_registers = 0;  // of what the launch allotted, given back by setmaxnreg

  Grid& grid() const;
  Scheduler& scheduler() const;
  void wake(const Wait& wait);

  // The barrier at a shared offset. Throws Fault if there is none.
  MemoryBarrier& mbarrier(uint32_t offset);
  // The same, for a use by a warp of the cluster, which the initialisation must be ordered before.
  MemoryBarrier& mbarrier(uint32_t offset, const Warp& user);
  // Arrivals and bytes come off; ends the phase if due. `knows`: what the arriving agent knew.
  void arrive(uint32_t offset, int64_t arrivals, int64_t bytes, const Knowledge& knows, const Arrival& who);
  void expect_bytes(uint32_t offset, int64_t bytes);

  // Records an access of shared memory and reports a conflict.
  void read_shared(uint32_t offset, uint32_t bytes, const Actor& actor, const char* what);
  void write_shared(uint32_t offset, uint32_t bytes, const Actor& actor, const char* what);
  // An atomic operation: it races with nothing strong, but must find something written.
  void atomic_shared(uint32_t offset, uint32_t bytes, const Actor& actor);
};

// The accesses of one instruction or operation to a CTA's shared memory; reports a conflict.
class SharedPass {
 public:
  SharedPass(Cta& cta, const Actor& actor, bool writes, const char* what)
      : cta_(cta), actor_(actor), what_(what), pass_(cta.shared, actor, writes) {}
  void touch(uint32_t offset, uint32_t bytes) {
    const Conflict conflict = pass_.touch(offset, bytes);
    if (conflict.kind != Conflict::Kind::none) fail(conflict);
  }

 private:
  [[noreturn]] void fail(const Conflict& conflict) const;

  Cta& cta_;
  const Actor& actor_;
  const char* what_;
  SharedMemory::Pass pass_;
};

class Cluster {
 public:
  Cluster(Grid& grid, Scheduler& scheduler, uint64_t number);

  Grid& grid;
  Scheduler& scheduler;
  const uint64_t number;
  std::vector<std::unique_ptr<Cta>> ctas;
  int pending_events = 0;
  int ctas_left = 0;

  // barrier.cluster: warps that arrived in the current phase.
  uint32_t barrier_arrived = 0;
  uint32_t barrier_phase = 0;
  Knowledge barrier_knowledge, barrier_completed;
  uint32_t warps_total = 0;
  uint32_t warps_exited = 0;
  void check_barrier();

  Agent new_agent(std::string name);
  const std::string& agent_name(Agent agent) const { return agent_names_[agent]; }
  // The next time of an agent that is no warp.
  uint32_t tick(Agent agent) { return ++agent_times_[agent]; }
  uint32_t time_of(Agent agent) const { return agent_times_[agent]; }
  Flags flags;  // of cluster scope
  bool finished() const { return ctas_left == 0 && pending_events == 0; }
  void wake(const Wait& wait);

 private:
  std::vector<std::string> agent_names_;
  std::vector<uint32_t> agent_times_;
};

inline Grid& Cta::grid() const { return cluster.grid; }
inline Scheduler& Cta::scheduler() const { return cluster.scheduler; }

}  // namespace jax_fa4::emulator

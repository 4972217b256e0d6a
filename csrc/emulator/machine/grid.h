// One launch: what all CTAs share, and what is counted.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cta.h"
#include "flags.h"
#include "global_record.h"
#include "memory.h"
#include "options.h"

namespace jax_fa4::emulator {

// Counts of one launch.
struct Statistics {
  std::string kernel;
  uint32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1}, cluster[3] = {1, 1, 1};
  uint64_t warp_instructions = 0;
  uint64_t events = 0;     // asynchronous completions
  double seconds = 0;      // of the host
  double cpu_seconds = 0;  // of its cores: the time that its threads ran
  // executed[warp * code size + pc]: warp instructions, summed over CTAs.
  std::vector<uint64_t> executed;
  std::vector<uint64_t> waited;  // the same: times that lanes blocked there
  // Bytes by path.
  uint64_t global_read = 0, global_written = 0, shared_read = 0, shared_written = 0;
  uint64_t tensor_copy_in = 0, tensor_copy_out = 0, bulk_in = 0, bulk_out = 0, peer = 0;
  uint64_t matrix_shared_read = 0, tensor_memory_read = 0, tensor_memory_written = 0;
  uint64_t multiply_adds = 0;
  uint64_t bank_conflicts = 0;  // extra shared-memory cycles over one a warp access of 128 bytes
  void add(const Statistics& other);
};

struct LaunchShape {
  Dim3 grid, block, cluster;
  uint32_t dynamic_shared_bytes = 0;
  bool programmatic = false;  // launched with programmatic stream serialization
};

class Grid {
 public:
  // `earlier`: what the kernel before on the stream did to global memory; null if it has ended for sure.
  Grid(const Program& program, const Module& module, const LaunchShape& shape, const void* params, GlobalMemory& memory,
       const Options& options, const std::vector<void*>& module_variables, std::shared_ptr<const GlobalRecord> earlier);

  // Runs all CTAs. Throws Fault; its text says where.
  void run();

  const Program& program;
  const LaunchShape shape;
  const Options options;
  GlobalMemory& memory;
  const uint8_t* params;                       // the parameter block, 64-byte aligned
  const std::vector<void*>& module_variables;  // addresses by symbol index; null for those that are not global
  uint32_t shared_bytes = 0;                   // of a CTA, the reserved part included
  int warps_per_cta = 0;
  int threads_per_cta = 0;
  int launch_registers = 0;  // a thread, before setmaxnreg

  // The next cluster to start, or -1. `random` order is fixed by the seed.
  int64_t next_cluster();
  // clusterlaunchcontrol: takes a cluster that has not started; -1 if there is none.
  int64_t cancel_cluster() { return next_cluster(); }
  uint64_t clusters() const { return clusters_; }
  void fail(const Fault& fault);
  bool failed() const { return failed_.load(std::memory_order_relaxed); }
  void collect(const Statistics& part);
  const Statistics& statistics() const { return statistics_; }
  Dim3 cluster_index(uint64_t number) const;
  int resident_limit() const { return resident_limit_; }
  // Progress of all schedulers together: true if it moved since `seen`.
  void note_progress() { progress_.fetch_add(1, std::memory_order_relaxed); }
  bool others_progress(uint64_t& seen) const;
  const std::string& source;  // PTX text
  std::mutex atomics;         // atomic operations of all CTAs, one at a time
  GridFlags flags;            // of device scope
  const std::shared_ptr<GlobalRecord> record;

 private:
  std::unique_ptr<uint8_t[]> param_storage_;
  uint64_t clusters_ = 0;
  std::atomic<uint64_t> next_{0};
  std::vector<uint32_t> order_;
  std::atomic<bool> failed_{false};
  std::atomic<uint64_t> progress_{0};
  std::mutex mutex_;
  Fault fault_{Status::success, ""};
  Statistics statistics_;
  int resident_limit_ = 2;
};

}  // namespace jax_fa4::emulator

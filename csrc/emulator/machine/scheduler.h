// Who runs next. One scheduler a host thread: it owns the clusters that are resident on it, gives random bursts to
// random warps, and completes asynchronous work when its time has come. Everything is drawn from one seed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cta.h"
#include "grid.h"
#include "random.h"

namespace jax_fa4::emulator {

class Scheduler {
 public:
  Scheduler(Grid& grid, uint64_t seed);

  // Runs clusters until none is left to start and all are finished. Throws Fault.
  void run();

  // Work that completes by itself later. `not_before` keeps order within a pipe: the returned time is when it will run.
  uint64_t later(Cluster& cluster, std::function<void()> work, uint64_t not_before = 0);
  Random& random() { return random_; }
  uint64_t now() const { return now_; }
  // Something changed that a stuck kernel would not change.
  void progress() {
    last_progress_ = now_;
    turn_progress_ = true;
  }
  void make_runnable(Warp& warp) { runnable_.push_back(&warp); }

  Statistics counts;
  GlobalRecord::View global_view;

  // The range of global memory that holds these bytes, or an empty one.
  const GlobalMemory::Range& find_global(uint64_t address, uint64_t bytes);

  // For error messages: what executes.
  const Warp* running = nullptr;
  const Instruction* instruction = nullptr;
  std::string deadlock_report() const;

 private:
  struct Event {
    uint64_t due;
    uint64_t order;
    Cluster* cluster;
    const Warp* issuer;
    const Instruction* issued;
    std::function<void()> work;
    bool operator>(const Event& other) const { return due != other.due ? due > other.due : order > other.order; }
  };
  bool admit();
  void run_due(bool force);
  void run_warp(Warp& warp);
  void retire();
  bool stuck();

  Grid& grid_;
  Random random_;
  uint64_t now_ = 0;
  uint64_t last_progress_ = 0;
  uint64_t events_made_ = 0;
  uint64_t seen_progress_ = 0;  // of the grid
  bool turn_progress_ = false;
  std::vector<Event> events_;  // a heap, the next one first
  std::vector<std::unique_ptr<Cluster>> clusters_;
  std::vector<Warp*> runnable_;
  GlobalMemory::Range recent_[8];  // ranges found lately
  uint32_t recent_next_ = 0;
  GlobalMemory::Range missing_;
};

}  // namespace jax_fa4::emulator

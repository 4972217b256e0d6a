// See grid.h.
#include "grid.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <ctime>
#include <numeric>
#include <thread>

#include "random.h"
#include "report.h"
#include "scheduler.h"

namespace jax_fa4::emulator {
namespace {

// Clusters that are resident at a time on one host thread. More are admitted when these cannot go on without them.
constexpr int kResident = 2;
constexpr uint64_t kParamAlign = 128;

std::vector<uint32_t> shuffled(uint64_t count, uint64_t seed) {
  std::vector<uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0u);
  Random random(seed ^ 0x5bd1e995u);
  // Hardware starts CTAs about in order: a cluster moves by a few places only.
  for (uint64_t i = 0; i + 1 < count; i++)
    std::swap(order[i], order[i + random.below(std::min<uint64_t>(4, count - i))]);
  return order;
}

}  // namespace

void Statistics::add(const Statistics& other) {
  warp_instructions += other.warp_instructions;
  events += other.events;
  if (executed.size() < other.executed.size()) executed.resize(other.executed.size(), 0);
  if (waited.size() < other.waited.size()) waited.resize(other.waited.size(), 0);
  for (size_t i = 0; i < other.executed.size(); i++) executed[i] += other.executed[i];
  for (size_t i = 0; i < other.waited.size(); i++) waited[i] += other.waited[i];
  global_read += other.global_read;
  global_written += other.global_written;
  shared_read += other.shared_read;
  shared_written += other.shared_written;
  tensor_copy_in += other.tensor_copy_in;
  tensor_copy_out += other.tensor_copy_out;
  bulk_in += other.bulk_in;
  bulk_out += other.bulk_out;
  peer += other.peer;
  matrix_shared_read += other.matrix_shared_read;
  tensor_memory_read += other.tensor_memory_read;
  tensor_memory_written += other.tensor_memory_written;
  multiply_adds += other.multiply_adds;
  cpu_seconds += other.cpu_seconds;
  bank_conflicts += other.bank_conflicts;
}

Grid::Grid(const Program& what, const Module& module, const LaunchShape& launch, const void* param_bytes,
           GlobalMemory& global, const Options& given, const std::vector<void*>& variables,
           std::shared_ptr<const GlobalRecord> earlier)
    : program(what),
      shape(launch),
      options(given),
      memory(global),
      params(nullptr),
      module_variables(variables),
      source(module.source),
      record(std::make_shared<GlobalRecord>(std::move(earlier))) {
  threads_per_cta = static_cast<int>(shape.block.product());
  warps_per_cta = (threads_per_cta + kLanes - 1) / kLanes;
  shared_bytes = kReservedShared + program.static_shared_bytes + shape.dynamic_shared_bytes;
  // What ptxas would allot: the register file over the threads, in units of 8, at most 255 (the launch bound of
  // setmaxnreg).
  launch_registers = std::clamp(65536 / std::max(1, warps_per_cta * kLanes) / 8 * 8, 24, 248);
  param_storage_ = std::make_unique<uint8_t[]>(program.param_bytes + 2 * kParamAlign);
  uint8_t* aligned =
      param_storage_.get() + (kParamAlign - reinterpret_cast<uint64_t>(param_storage_.get()) % kParamAlign);
  if (program.param_bytes != 0) std::memcpy(aligned, param_bytes, program.param_bytes);
  params = aligned;
  clusters_ = shape.grid.product() / shape.cluster.product();
  order_ = shuffled(clusters_, options.seed);
  statistics_.kernel = program.name;
  const Dim3 dims[3] = {shape.grid, shape.block, shape.cluster};
  uint32_t* const to[3] = {statistics_.grid, statistics_.block, statistics_.cluster};
  for (int i = 0; i < 3; i++) {
    to[i][0] = dims[i].x;
    to[i][1] = dims[i].y;
    to[i][2] = dims[i].z;
  }
  resident_limit_ = kResident;
}

int64_t Grid::next_cluster() {
  const uint64_t next = next_.fetch_add(1, std::memory_order_relaxed);
  return next < clusters_ ? static_cast<int64_t>(order_[next]) : -1;
}

Dim3 Grid::cluster_index(uint64_t number) const {
  const uint64_t nx = shape.grid.x / shape.cluster.x, ny = shape.grid.y / shape.cluster.y;
  return {static_cast<uint32_t>(number % nx), static_cast<uint32_t>(number / nx % ny),
          static_cast<uint32_t>(number / nx / ny)};
}

void Grid::fail(const Fault& fault) {
  std::lock_guard lock(mutex_);
  if (failed_.load()) return;
  fault_ = fault;
  failed_.store(true);
}

bool Grid::others_progress(uint64_t& seen) const {
  const uint64_t now = progress_.load(std::memory_order_relaxed);
  const bool moved = now != seen;
  seen = now;
  return moved;
}

void Grid::collect(const Statistics& part) {
  std::lock_guard lock(mutex_);
  statistics_.add(part);
}

namespace {

// Processor time of the calling thread.
double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

std::string fault_text(const Grid& grid, const Scheduler& scheduler, const Fault& fault) {
  std::string text = fault.what();
  if (fault.status() == Status::launch_timeout) return text + "in kernel " + grid.program.name;
  if (scheduler.instruction != nullptr) text += "; " + line_text(grid.source, scheduler.instruction->line);
  if (scheduler.running != nullptr)
    text += "; " + cta_name(scheduler.running->cta) + ", warp " + std::to_string(scheduler.running->index);
  return text + "; kernel " + grid.program.name;
}

}  // namespace

void Grid::run() {
  const auto start = std::chrono::steady_clock::now();
  const uint64_t hardware = std::max(1u, std::thread::hardware_concurrency());
  const uint64_t wanted = options.threads > 0 ? static_cast<uint64_t>(options.threads) : hardware;
  const uint64_t threads = std::min(wanted, clusters_);
  const auto work = [this](uint64_t number) {
    const double begin = thread_seconds();
    Scheduler scheduler(*this, options.seed * 0x9e3779b97f4a7c15u + number + 1);
    try {
      scheduler.run();
    } catch (const Fault& fault) {
      fail(Fault(fault.status(), fault_text(*this, scheduler, fault)));
    } catch (const std::bad_alloc&) {
      fail(Fault(Status::out_of_memory, "the host has no memory left for the emulated CTAs"));
    }
    scheduler.counts.cpu_seconds = thread_seconds() - begin;
    collect(scheduler.counts);
  };
  std::vector<std::thread> helpers;
  for (uint64_t i = 1; i < threads; i++) helpers.emplace_back(work, i);
  work(0);
  for (std::thread& helper : helpers) helper.join();
  statistics_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (failed_.load()) throw fault_;
}

}  // namespace jax_fa4::emulator

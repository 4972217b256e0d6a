// What a user may set before a launch, and the error that stops one.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace jax_fa4::emulator {

// When asynchronous work completes. random: after a heavy-tailed delay; eager: at once; lazy: only when no warp can
// run.
enum class Completion : uint8_t { random, eager, lazy };

struct Options {
  uint64_t seed = 0;
  int architecture = 100;  // 90, 100, 103: compute capability times ten
  int sm_count = 148;
  int threads = 0;  // of the host; 0: as many as it has
  Completion completion = Completion::random;
  bool check_races = true;
  bool check_uninitialized = true;
  bool check_registers = true;
  bool check_exit_reads = true;      // nothing documents that shared memory outlives its CTA
  bool check_tensor_fences = false;  // kernels that are right on silicon leave tcgen05.fence out
  // A launch that executes so many warp instructions without any memory or barrier changing its state is stuck.
  uint64_t stuck_after = 4'000'000;
};

// Result codes of the driver API that the emulator gives (values of CUresult).
enum class Status : int {
  success = 0,
  invalid_value = 1,
  out_of_memory = 2,
  not_initialized = 3,
  no_device = 100,
  invalid_device = 101,
  invalid_image = 200,
  invalid_context = 201,
  no_binary_for_gpu = 209,
  invalid_ptx = 218,
  not_found = 500,
  invalid_handle = 400,
  not_ready = 600,
  illegal_address = 700,
  launch_out_of_resources = 701,
  launch_timeout = 702,
  invalid_cluster_size = 912,
  assert = 710,
  hardware_stack_error = 714,
  illegal_instruction = 715,
  misaligned_address = 716,
  invalid_address_space = 717,
  launch_failed = 719,
  not_supported = 801,
  unknown = 999
};

// Stops a launch: what the kernel did wrong, as one sentence; the place is added by who catches it.
class Fault : public std::runtime_error {
 public:
  Fault(Status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  Status status() const { return status_; }

 private:
  Status status_;
};

}  // namespace jax_fa4::emulator

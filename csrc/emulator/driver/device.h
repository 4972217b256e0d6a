// The emulated device behind the driver API: memory, loaded modules, launches. One per process, safe to use from many
// threads.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../machine/grid.h"

namespace jax_fa4::emulator {

class LoadedModule;

// What a CUfunction and a CUkernel point to.
struct Kernel {
  LoadedModule* module = nullptr;
  const Program* program = nullptr;
  int max_dynamic_shared = 48 * 1024;
  bool nonportable_cluster = false;
  int required_cluster[3] = {0, 0, 0};
};

// What a CUmodule and a CUlibrary point to.
class LoadedModule {
 public:
  LoadedModule(std::unique_ptr<Module> module, int loaded_for, GlobalMemory& memory);
  ~LoadedModule();

  Kernel* find(const std::string& name);
  // Address and bytes of a module variable; null if there is none.
  void* variable(const std::string& name, uint64_t* bytes) const;

  const std::unique_ptr<Module> module;
  const int architecture;  // of the device that it was loaded for, and that its kernels run on
  std::vector<std::unique_ptr<Kernel>> kernels;
  std::vector<void*> addresses;  // by variable; null: not in global memory

 private:
  GlobalMemory& memory_;
};

class Device {
 public:
  static Device& get();

  GlobalMemory memory;

  Options options() const;
  void set_options(const Options& options);
  // For the calling thread, the device's architecture whatever the option says; 0: what the option says.
  static void use_architecture(int architecture);

  // All that can fail throw Fault.
  LoadedModule* load(const void* image);
  void unload(LoadedModule* module);
  Kernel* check_kernel(const void* handle) const;
  LoadedModule* check_module(const void* handle) const;
  // `params`: one pointer for each parameter, or null with `block` and `block_bytes` for all of them. `stream` tells
  // apart what may follow what.
  void launch(const Kernel& kernel, const LaunchShape& shape, const void* stream, void* const* params,
              const void* block, uint64_t block_bytes);

  // The host, or a copy in a stream, waited for the kernels so far: none that follows overlaps with them.
  void wait_for_kernels();

  // The PTX text that stands for a cubin.
  void register_ptx(const void* image, uint64_t bytes, std::string ptx);

  void set_last_error(const std::string& text);
  std::string last_error() const;
  // Statistics of the launches since the last call, as JSON.
  std::string take_statistics();

 private:
  struct Registered {
    std::string image;
    std::string ptx;
  };
  std::string ptx_of(const void* image) const;
  void check_shape(const Kernel& kernel, const LaunchShape& shape) const;

  mutable std::mutex mutex_;
  Options options_;
  std::set<const void*> kernels_;
  std::map<const void*, std::unique_ptr<LoadedModule>> modules_;
  std::vector<Registered> registered_;
  std::string last_error_;
  std::deque<std::string> statistics_;
  // By stream, what its last kernel did to global memory: a programmatic launch may overlap with it.
  std::map<const void*, std::shared_ptr<const GlobalRecord>> last_records_;
};

// Counts of a launch as a JSON object: totals, bytes by path, and by warp and loop the instructions of each class.
std::string statistics_json(const Statistics& counts, const Program& program);

}  // namespace jax_fa4::emulator

// See device.h.
#include "device.h"

#include <algorithm>
#include <cfenv>
#include <cstring>

#include "../machine/report.h"
#include "../ptx/token.h"

namespace jax_fa4::emulator {
namespace {

constexpr uint32_t kMaxShared = 232448;  // opt-in, of a CTA: 9.0 and 10.x
constexpr size_t kKeptStatistics = 4096;
constexpr size_t kKeptPages = 8192;  // of 4 KiB, whose records take 128 MiB; those of larger kernels are not kept
constexpr size_t kElfHeader = 64;
thread_local int used_architecture = 0;

// What a target name says of the devices that run it: `a` one, `f` its family, none all that follow.
bool target_runs_on(const std::string& name, int target, int architecture) {
  const char kind = name.empty() ? '\0' : name.back();
  if (kind == 'a') return target == architecture;
  if (kind == 'f') return target / 10 == architecture / 10 && target <= architecture;
  return target <= architecture;
}

// The host's arithmetic as the emulator expects it, for a scope, and on threads started in it: XLA's threads flush
// subnormals to zero, which would lose small f16 values.
class UsualArithmetic {
 public:
  UsualArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~UsualArithmetic() { std::fesetenv(&before_); }
  UsualArithmetic(const UsualArithmetic&) = delete;
  UsualArithmetic& operator=(const UsualArithmetic&) = delete;

 private:
  std::fenv_t before_;
};

std::string shape_text(const Dim3& d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

}  // namespace

LoadedModule::LoadedModule(std::unique_ptr<Module> loaded, int loaded_for, GlobalMemory& memory)
    : module(std::move(loaded)), architecture(loaded_for), memory_(memory) {
  for (const Variable& variable : module->variables) {
    void* address = nullptr;
    if (variable.space == Space::global || variable.space == Space::constant) {
      address = memory.allocate(std::max<uint64_t>(variable.bytes, 1));
      if (address == nullptr) throw Fault(Status::out_of_memory, "no memory for variable '" + variable.name + "'");
      std::memset(address, 0, variable.bytes);
      std::copy(variable.initial.begin(), variable.initial.end(), static_cast<uint8_t*>(address));
      memory.mark_written(reinterpret_cast<uint64_t>(address), variable.bytes);
    }
    addresses.push_back(address);
  }
  for (const auto& program : module->programs) {
    auto kernel = std::make_unique<Kernel>();
    kernel->module = this;
    kernel->program = program.get();
    kernels.push_back(std::move(kernel));
  }
}

LoadedModule::~LoadedModule() {
  for (void* address : addresses)
    if (address != nullptr) memory_.release(address);
}

Kernel* LoadedModule::find(const std::string& name) {
  for (const auto& kernel : kernels)
    if (kernel->program->name == name) return kernel.get();
  return nullptr;
}

void* LoadedModule::variable(const std::string& name, uint64_t* bytes) const {
  for (size_t i = 0; i < module->variables.size(); i++)
    if (module->variables[i].name == name && addresses[i] != nullptr) {
      *bytes = module->variables[i].bytes;
      return addresses[i];
    }
  return nullptr;
}

Device& Device::get() {
  // Never destroyed: other threads may still launch while the process ends.
  static Device* const device = new Device;
  return *device;
}

Options Device::options() const {
  std::lock_guard lock(mutex_);
  Options options = options_;
  if (used_architecture != 0) options.architecture = used_architecture;
  return options;
}

void Device::use_architecture(int architecture) { used_architecture = architecture; }

void Device::set_options(const Options& options) {
  std::lock_guard lock(mutex_);
  options_ = options;
}

void Device::set_last_error(const std::string& text) {
  std::lock_guard lock(mutex_);
  last_error_ = text;
}

std::string Device::last_error() const {
  std::lock_guard lock(mutex_);
  return last_error_;
}

void Device::register_ptx(const void* image, uint64_t bytes, std::string ptx) {
  std::lock_guard lock(mutex_);
  std::string key(static_cast<const char*>(image), bytes);
  for (Registered& one : registered_)
    if (one.image == key) {
      one.ptx = std::move(ptx);
      return;
    }
  registered_.push_back({std::move(key), std::move(ptx)});
}

namespace {

constexpr uint32_t kFatWrapper = 0x466243b1, kFatBinary = 0xba55ed50;
constexpr uint16_t kElfEntry = 2;

template <class T>
T value_at(const char* data, size_t offset) {
  T value;
  std::memcpy(&value, data + offset, sizeof value);
  return value;
}

// The cubin inside of a fat binary: the first entry that is an uncompressed ELF image. Other data come back unchanged.
const char* unwrap(const char* data) {
  if (value_at<uint32_t>(data, 0) == kFatWrapper) data = value_at<const char*>(data, 8);
  if (data == nullptr || value_at<uint32_t>(data, 0) != kFatBinary) return data;
  const size_t header = value_at<uint16_t>(data, 6), end = header + value_at<uint64_t>(data, 8);
  for (size_t at = header; at + 64 <= end;) {
    const uint16_t kind = value_at<uint16_t>(data, at);
    const uint32_t entry_header = value_at<uint32_t>(data, at + 4);
    const uint64_t bytes = value_at<uint64_t>(data, at + 8);
    const char* payload = data + at + entry_header;
    if (kind == kElfEntry && std::memcmp(payload, "\177ELF", 4) == 0) return payload;
    if (entry_header == 0 || bytes > end) break;
    at += entry_header + bytes;
  }
  throw Fault(Status::invalid_image, "the fat binary holds no uncompressed cubin");
}

}  // namespace

std::string Device::ptx_of(const void* image) const {
  if (image == nullptr) throw Fault(Status::invalid_value, "the image is a null pointer");
  const char* text = static_cast<const char*>(image);
  // Text is at least a directive and its closing zero long.
  if (text[0] != '\0' && text[1] != '\0' && text[2] != '\0') text = unwrap(text);
  if (text == nullptr) throw Fault(Status::invalid_image, "the fat binary is a null pointer");
  if (std::strncmp(text, "\177ELF", 4) != 0) return text;
  std::lock_guard lock(mutex_);
  // The header holds the place of every section, so images of equal headers are of one size.
  for (const Registered& one : registered_)
    if (one.image.size() >= kElfHeader && std::memcmp(text, one.image.data(), kElfHeader) == 0 &&
        std::memcmp(text, one.image.data(), one.image.size()) == 0)
      return one.ptx;
  throw Fault(Status::no_binary_for_gpu,
              "the emulator runs PTX: register the PTX text of this cubin first (jax_fa4_emulator_register_ptx)");
}

LoadedModule* Device::load(const void* image) {
  std::string ptx = ptx_of(image);
  std::unique_ptr<Module> module;
  try {
    module = load_module(std::move(ptx));
  } catch (const PtxError& error) {
    throw Fault(Status::invalid_ptx, error.what());
  }
  const int architecture = options().architecture;
  if (!target_runs_on(module->target_name, module->target, architecture))
    throw Fault(Status::no_binary_for_gpu,
                "the PTX is for " + module->target_name + ", the emulated device is of compute capability " +
                    std::to_string(architecture / 10) + "." + std::to_string(architecture % 10));
  auto loaded = std::make_unique<LoadedModule>(std::move(module), architecture, memory);
  std::lock_guard lock(mutex_);
  LoadedModule* handle = loaded.get();
  for (const auto& kernel : handle->kernels) kernels_.insert(kernel.get());
  modules_[handle] = std::move(loaded);
  return handle;
}

void Device::unload(LoadedModule* module) {
  std::unique_ptr<LoadedModule> gone;
  std::lock_guard lock(mutex_);
  const auto found = modules_.find(module);
  if (found == modules_.end()) throw Fault(Status::invalid_handle, "no module or library has this handle");
  for (const auto& kernel : module->kernels) kernels_.erase(kernel.get());
  gone = std::move(found->second);
  modules_.erase(found);
}

Kernel* Device::check_kernel(const void* handle) const {
  std::lock_guard lock(mutex_);
  if (kernels_.count(handle) == 0) throw Fault(Status::invalid_handle, "no kernel has this handle");
  return static_cast<Kernel*>(const_cast<void*>(handle));
}

LoadedModule* Device::check_module(const void* handle) const {
  std::lock_guard lock(mutex_);
  const auto found = modules_.find(handle);
  if (found == modules_.end()) throw Fault(Status::invalid_handle, "no module or library has this handle");
  return found->second.get();
}

void Device::check_shape(const Kernel& kernel, const LaunchShape& shape) const {
  const Program& program = *kernel.program;
  const auto refuse = [&](Status status, const std::string& text) {
    throw Fault(status, text + "; kernel " + program.name);
  };
  if (shape.grid.product() == 0 || shape.block.product() == 0 || shape.cluster.product() == 0)
    refuse(Status::invalid_value, "grid, block and cluster dimensions must be positive: grid " +
                                      shape_text(shape.grid) + ", block " + shape_text(shape.block));
  if (shape.grid.x > 0x7fffffffu || shape.grid.y > 65535 || shape.grid.z > 65535)
    refuse(Status::invalid_value, "grid " + shape_text(shape.grid) + " exceeds (2147483647, 65535, 65535)");
  if (shape.block.product() > 1024 || shape.block.x > 1024 || shape.block.y > 1024 || shape.block.z > 64)
    refuse(Status::invalid_value, "block " + shape_text(shape.block) + " exceeds 1024 threads or (1024, 1024, 64)");
  if (shape.grid.product() > 0xffffffffu) refuse(Status::not_supported, "the emulator runs at most 4294967295 CTAs");
  const uint32_t* required = program.required_block;
  if (required[0] != 0 &&
      (required[0] != shape.block.x || required[1] != shape.block.y || required[2] != shape.block.z))
    refuse(Status::invalid_value, "block " + shape_text(shape.block) + " is not the .reqntid " +
                                      shape_text({required[0], required[1], required[2]}) + " of the kernel");
  if (program.max_threads != 0 && shape.block.product() > program.max_threads)
    refuse(Status::invalid_value, "block " + shape_text(shape.block) + " exceeds the .maxntid of the kernel, " +
                                      std::to_string(program.max_threads) + " threads");
  const uint64_t shared = uint64_t{program.static_shared_bytes} + shape.dynamic_shared_bytes;
  if (shared > kMaxShared)
    refuse(Status::invalid_value,
           std::to_string(shared) + " bytes of shared memory exceed the " + std::to_string(kMaxShared) + " of a CTA");
  if (static_cast<int64_t>(shape.dynamic_shared_bytes) > std::max(kernel.max_dynamic_shared, 48 * 1024))
    refuse(Status::invalid_value,
           std::to_string(shape.dynamic_shared_bytes) + " bytes of dynamic shared memory exceed the kernel's " +
               std::to_string(kernel.max_dynamic_shared) + ": set CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES");
  const uint64_t cluster = shape.cluster.product();
  if (cluster > (kernel.nonportable_cluster ? 16u : 8u))
    refuse(
        Status::invalid_cluster_size,
        "a cluster of " + std::to_string(cluster) + " CTAs exceeds " +
            (kernel.nonportable_cluster ? "16" : "8, or 16 with CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED"));
  if (shape.grid.x % shape.cluster.x != 0 || shape.grid.y % shape.cluster.y != 0 || shape.grid.z % shape.cluster.z != 0)
    refuse(Status::invalid_cluster_size,
           "grid " + shape_text(shape.grid) + " is not a multiple of cluster " + shape_text(shape.cluster));
}

void Device::launch(const Kernel& kernel, const LaunchShape& given, const void* stream, void* const* params,
                    const void* block, uint64_t block_bytes) {
  const Program& program = *kernel.program;
  LaunchShape shape = given;
  if (program.required_cluster[0] != 0)
    shape.cluster = {program.required_cluster[0], program.required_cluster[1], program.required_cluster[2]};
  check_shape(kernel, shape);
  const UsualArithmetic arithmetic;
  std::vector<uint8_t> bytes(program.param_bytes + 1, 0);
  if (block != nullptr) {
    if (block_bytes != program.param_bytes)
      throw Fault(Status::invalid_value, "the parameter block has " + std::to_string(block_bytes) + " bytes, kernel " +
                                             program.name + " takes " + std::to_string(program.param_bytes));
    std::memcpy(bytes.data(), block, block_bytes);
  } else {
    for (size_t i = 0; i < program.params.size(); i++) {
      if (params == nullptr || params[i] == nullptr)
        throw Fault(Status::invalid_value, "parameter " + std::to_string(i) + " of " +
                                               std::to_string(program.params.size()) + " is missing; kernel " +
                                               program.name);
      std::memcpy(bytes.data() + program.params[i].offset, params[i], program.params[i].bytes);
    }
  }
  Options chosen = options();
  chosen.architecture = kernel.module->architecture;
  std::shared_ptr<const GlobalRecord> earlier;
  if (shape.programmatic) {
    std::lock_guard lock(mutex_);
    earlier = last_records_[stream];
  }
  Grid grid(program, *kernel.module->module, shape, bytes.data(), memory, chosen, kernel.module->addresses, earlier);
  const auto keep = [&] {
    std::string json = statistics_json(grid.statistics(), program);
    grid.record->end();
    std::lock_guard lock(mutex_);
    last_records_[stream] = grid.record->pages() <= kKeptPages ? grid.record : nullptr;
    statistics_.push_back(std::move(json));
    if (statistics_.size() > kKeptStatistics) statistics_.pop_front();
  };
  try {
    grid.run();
  } catch (const Fault&) {
    keep();
    throw;
  }
  keep();
}

void Device::wait_for_kernels() {
  std::lock_guard lock(mutex_);
  last_records_.clear();
}

std::string Device::take_statistics() {
  std::lock_guard lock(mutex_);
  std::string all = "[";
  for (const std::string& one : statistics_) all += (all.size() > 1 ? ",\n" : "") + one;
  statistics_.clear();
  return all + "]";
}

}  // namespace jax_fa4::emulator

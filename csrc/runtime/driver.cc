#include "runtime/driver.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <utility>

namespace jax_fa4 {
namespace {

void* FindSymbol(void* library, const char* symbol, const std::string& path, bool required) {
  void* address = dlsym(library, symbol);
  if (address == nullptr && required) {
    throw RuntimeFailure("The driver library '" + path + "' has no function " + symbol +
                         "; jax_fa4 needs an NVIDIA driver of CUDA 12.0 or later.");
  }
  return address;
}

struct DeclaredDriver {
  std::string path;
  ImageKind image;
  Capability emulated;
  std::unique_ptr<Driver> opened;
};

// Leaked on purpose: XLA's threads may still execute while the process's statics are torn down.
std::shared_mutex& DriversMutex() {
  static auto* mutex = new std::shared_mutex;
  return *mutex;
}
std::map<std::string, DeclaredDriver, std::less<>>& Drivers() {
  static auto* drivers = new std::map<std::string, DeclaredDriver, std::less<>>;
  return *drivers;
}

}  // namespace

Driver::Driver(std::string name, std::string path, ImageKind image, Capability emulated)
    : name_(std::move(name)), path_(std::move(path)), image_(image), emulated_(emulated) {
  void* library = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    throw RuntimeFailure("The driver library '" + path_ + "' (driver '" + name_ +
                         "') cannot be opened: " + (reason ? reason : "no reason given") + ".");
  }
#define JAX_FA4_FIND(required, symbol, member) \
  member = reinterpret_cast<decltype(member)>(FindSymbol(library, #symbol, path_, required));
#define JAX_FA4_REQUIRED(symbol, member, ...) JAX_FA4_FIND(true, symbol, member)
#define JAX_FA4_OPTIONAL(symbol, member, ...) JAX_FA4_FIND(false, symbol, member)
  JAX_FA4_DRIVER_FUNCTIONS(JAX_FA4_REQUIRED, JAX_FA4_OPTIONAL)
#undef JAX_FA4_OPTIONAL
#undef JAX_FA4_REQUIRED
#undef JAX_FA4_FIND
  emulator_add_memory =
      reinterpret_cast<decltype(emulator_add_memory)>(FindSymbol(library, "jax_fa4_emulator_add_memory", path_, false));
  emulator_remove_memory = reinterpret_cast<decltype(emulator_remove_memory)>(
      FindSymbol(library, "jax_fa4_emulator_remove_memory", path_, false));
  emulator_last_error =
      reinterpret_cast<decltype(emulator_last_error)>(FindSymbol(library, "jax_fa4_emulator_last_error", path_, false));
  emulator_use_architecture = reinterpret_cast<decltype(emulator_use_architecture)>(
      FindSymbol(library, "jax_fa4_emulator_use_architecture", path_, false));
  Check(init(0), "Starting driver '" + name_ + "'");
  int device_count = 0;
  Check(device_get_count(&device_count), "Counting the devices of driver '" + name_ + "'");
  if (device_count == 0) throw RuntimeFailure("Driver '" + name_ + "' has no device.");
  primary_contexts_ = std::vector<std::atomic<driver_api::Context>>(device_count);
}

std::string Driver::Describe(driver_api::Result result) const {
  const char* error_name = nullptr;
  const char* text = nullptr;
  if (get_error_name(result, &error_name) != driver_api::kSuccess) error_name = nullptr;
  if (get_error_string(result, &text) != driver_api::kSuccess) text = nullptr;
  std::string described = error_name ? error_name : "driver error " + std::to_string(result);
  if (text != nullptr) described += std::string(": ") + text;
  if (emulator_last_error != nullptr) {
    std::string sentence(emulator_last_error(nullptr, 0), '\0');
    emulator_last_error(sentence.data(), sentence.size() + 1);
    if (!sentence.empty()) described += ": " + sentence;
  }
  return described;
}

void Driver::Check(driver_api::Result result, std::string_view doing) const {
  if (result != driver_api::kSuccess) throw RuntimeFailure(std::string(doing) + " failed: " + Describe(result) + ".");
}

driver_api::Context Driver::ContextFor(int ordinal) {
  driver_api::Context context = nullptr;
  Check(context_get_current(&context), "Reading the current context");
  if (context != nullptr) return context;
  std::atomic<driver_api::Context>& kept = primary_contexts_[ordinal % primary_contexts_.size()];
  context = kept.load(std::memory_order_acquire);
  if (context != nullptr) return context;
  driver_api::Device device = 0;
  Check(device_get(&device, ordinal % static_cast<int>(primary_contexts_.size())),
        "Finding device " + std::to_string(ordinal));
  Check(device_primary_context_retain(&context, device),
        "Taking the primary context of device " + std::to_string(ordinal));
  kept.store(context, std::memory_order_release);  // the same value from every thread
  return context;
}

driver_api::Device Driver::DeviceOf(driver_api::Context context) const {
  ScopedContext scope(*this, context);
  driver_api::Device device = 0;
  Check(context_get_device(&device), "Finding the device of a context");
  return device;
}

Capability Driver::CapabilityOf(driver_api::Device device) const {
  Capability capability;
  Check(device_get_attribute(&capability.major, driver_api::kDeviceComputeCapabilityMajor, device),
        "Reading the compute capability");
  Check(device_get_attribute(&capability.minor, driver_api::kDeviceComputeCapabilityMinor, device),
        "Reading the compute capability");
  return capability;
}

std::string Driver::DeviceName(driver_api::Device device) const {
  char text[128] = "unnamed device";
  if (device_get_name(text, sizeof(text), device) != driver_api::kSuccess) return "unnamed device";
  return text;
}

ScopedContext::ScopedContext(const Driver& driver, driver_api::Context context) : driver_(driver) {
  driver_.Check(driver_.context_get_current(&previous_), "Reading the current context");
  if (previous_ == context) return;
  driver_.Check(driver_.context_set_current(context), "Making a context current");
  changed_ = true;
}

ScopedContext::~ScopedContext() {
  if (changed_) driver_.context_set_current(previous_);
}

ScopedArchitecture::ScopedArchitecture(const Driver& driver) : driver_(driver) {
  const Capability capability = driver.emulated();
  if (driver.emulator_use_architecture != nullptr) {
    driver.emulator_use_architecture(10 * capability.major + capability.minor);
  }
}

ScopedArchitecture::~ScopedArchitecture() {
  if (driver_.emulator_use_architecture != nullptr) driver_.emulator_use_architecture(0);
}

void DeclareDriver(const std::string& name, const std::string& path, ImageKind image, Capability emulated) {
  std::unique_lock lock(DriversMutex());
  auto [entry, is_new] = Drivers().try_emplace(name, DeclaredDriver{path, image, emulated, nullptr});
  DeclaredDriver& declared = entry->second;
  const bool is_same = declared.path == path && declared.image == image && declared.emulated.major == emulated.major &&
                       declared.emulated.minor == emulated.minor;
  if (is_new || is_same) return;
  if (declared.opened) {
    throw RuntimeFailure("Driver '" + name + "' is open from '" + declared.path + "' already and cannot move to '" +
                         path + "'; give the second library another name.");
  }
  declared.path = path;
  declared.image = image;
  declared.emulated = emulated;
}

Driver& FindDriver(std::string_view name) {
  {
    std::shared_lock lock(DriversMutex());
    auto found = Drivers().find(name);
    if (found != Drivers().end() && found->second.opened) return *found->second.opened;
  }
  std::unique_lock lock(DriversMutex());
  auto found = Drivers().find(name);
  if (found == Drivers().end()) {
    std::string known;
    for (const auto& [known_name, declared] : Drivers()) known += (known.empty() ? "" : ", ") + known_name;
    throw RuntimeFailure("No driver is called '" + std::string(name) + "'; there are: " + known + ".");
  }
  DeclaredDriver& declared = found->second;
  if (!declared.opened) {
    declared.opened = std::make_unique<Driver>(found->first, declared.path, declared.image, declared.emulated);
  }
  return *declared.opened;
}

}  // namespace jax_fa4

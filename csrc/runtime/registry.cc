#include "runtime/registry.h"

#include <pthread.h>

#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <tuple>
#include <utility>

namespace jax_fa4 {
namespace {

using LoadedKey = std::tuple<const Driver*, driver_api::Context, std::string_view>;  // the view is of the binary's hash

// Leaked on purpose, like the drivers. Readers are executions; the one writer registers or loads.
struct Tables {
  std::shared_mutex* mutex = new std::shared_mutex;
  std::map<std::string, KernelBinary, std::less<>> binaries;
  std::map<LoadedKey, std::unique_ptr<LoadedKernel>> loaded;
  BinaryFinder finder;
};

Tables& TheTables() {
  static Tables* tables = [] {
    auto* made = new Tables;
    // A forked child inherits neither contexts nor kernels; it keeps the binaries and loads again. The lock is held
    // over the fork, so that the tables are whole in the child; there the mutex is made anew, since glibc knows a
    // writer by its thread's id, which the child's thread does not have.
    pthread_atfork([] { TheTables().mutex->lock(); }, [] { TheTables().mutex->unlock(); },
                   [] {
                     TheTables().mutex = new std::shared_mutex;
                     TheTables().loaded.clear();
                   });
    return made;
  }();
  return *tables;
}

std::uint32_t BytesOf(ParameterKind kind) {
  switch (kind) {
    case ParameterKind::kOperand:
    case ParameterKind::kResult:
    case ParameterKind::kInt64:
      return 8;
    case ParameterKind::kInt32:
    case ParameterKind::kFloat32:
      return 4;
    case ParameterKind::kDivisor:
      return 12;
    case ParameterKind::kTensorMap:
      return sizeof(driver_api::TensorMapWords);
  }
  throw RuntimeFailure("A kernel parameter is of no known kind.");
}

std::uint32_t AlignmentOf(ParameterKind kind) {
  if (kind == ParameterKind::kTensorMap) return alignof(driver_api::TensorMapWords);
  return BytesOf(kind) % 8 == 0 ? 8 : 4;
}

std::size_t CountOf(const LaunchRecipe& recipe, ParameterKind kind) {
  switch (kind) {
    case ParameterKind::kOperand:
      return recipe.operand_count;
    case ParameterKind::kResult:
      return recipe.result_count;
    case ParameterKind::kInt32:
    case ParameterKind::kInt64:
    case ParameterKind::kDivisor:
      return recipe.integer_count;
    case ParameterKind::kFloat32:
      return recipe.float_count;
    case ParameterKind::kTensorMap:
      return recipe.tensor_maps.size();
  }
  return 0;
}

void Require(bool holds, const KernelBinary& binary, const std::string& what) {
  if (!holds) throw RuntimeFailure("Kernel '" + binary.name + "' has a bad launch recipe: " + what + ".");
}

void CheckBinary(const KernelBinary& binary) {
  const LaunchRecipe& recipe = binary.recipe;
  Require(recipe.parameters.size() <= kMaxParameters, binary,
          std::to_string(recipe.parameters.size()) + " parameters, at most " + std::to_string(kMaxParameters));
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < recipe.parameters.size(); ++i) {
    const Parameter& parameter = recipe.parameters[i];
    const std::string which = "parameter " + std::to_string(i);
    Require(parameter.bytes == BytesOf(parameter.kind), binary,
            which + " has " + std::to_string(parameter.bytes) + " bytes where its kind fills " +
                std::to_string(BytesOf(parameter.kind)));
    Require(parameter.offset % AlignmentOf(parameter.kind) == 0 && parameter.offset >= end, binary,
            which + " at offset " + std::to_string(parameter.offset) + " is misaligned or overlaps");
    Require(parameter.index < CountOf(recipe, parameter.kind), binary, which + " names a value that no call has");
    end = std::uint64_t{parameter.offset} + parameter.bytes;
  }
  Require(end <= kMaxParameterBytes, binary, "a parameter block of " + std::to_string(end) + " bytes");
  for (const TensorMapRecipe& map : recipe.tensor_maps) {
    CheckRecipe(map);
    Require(map.buffer < (map.is_result ? recipe.result_count : recipe.operand_count), binary,
            "a tensor map names a buffer that no call has");
    for (std::uint32_t i : map.extents) Require(i < recipe.integer_count, binary, "a tensor map's extent is missing");
    for (std::uint32_t i : map.strides) Require(i < recipe.integer_count, binary, "a tensor map's stride is missing");
  }
  for (std::uint32_t i : recipe.grid) Require(i < recipe.integer_count, binary, "a grid extent is missing");
  for (int i = 0; i < 3; ++i) {
    Require(recipe.block[i] >= 1 && recipe.cluster[i] >= 1, binary, "a block or cluster extent is 0");
  }
}

const KernelBinary& FindBinary(const Tables& tables, std::string_view hash) {
  auto found = tables.binaries.find(hash);
  if (found == tables.binaries.end()) {
    throw RuntimeFailure("No kernel with content hash '" + std::string(hash) +
                         "' is registered in this process, and the installed jax_fa4 carries none. A program that was "
                         "exported or compiled elsewhere needs the jax_fa4 of that place; install it, or trace the "
                         "call again here.");
  }
  return found->second;
}

// Compares the recipe with what the driver says of the loaded kernel, where the driver can say it. Sizes only: the
// launch passes an address for each parameter and the driver places them. Its offsets count from a base that is no
// multiple of 64 on compute capability 9.0 (0x210), so that a tensor map which comes first is said to lie at 48.
void CheckParameters(const Driver& driver, driver_api::Kernel kernel, const KernelBinary& binary) {
  if (driver.kernel_get_param_info == nullptr) return;
  for (std::size_t i = 0; i < binary.recipe.parameters.size(); ++i) {
    const Parameter& parameter = binary.recipe.parameters[i];
    std::size_t offset = 0;
    std::size_t bytes = 0;
    driver.Check(driver.kernel_get_param_info(kernel, i, &offset, &bytes),
                 "Reading parameter " + std::to_string(i) + " of the kernel");
    Require(bytes == parameter.bytes, binary,
            "parameter " + std::to_string(i) + " is " + std::to_string(bytes) + " bytes in the loaded code, " +
                std::to_string(parameter.bytes) + " in the recipe");
  }
}

void LoadInto(LoadedKernel* loaded) {
  const Driver& driver = *loaded->driver;
  const KernelBinary& binary = *loaded->binary;
  ScopedContext scope(driver, loaded->context);
  const std::string& image = driver.image() == ImageKind::kPtx ? binary.ptx : binary.cubin;
  if (image.empty()) throw RuntimeFailure("the binary holds no image of the kind that the driver loads.");
  driver_api::Library library = nullptr;
  driver.Check(driver.library_load_data(&library, image.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0), "loading");
  try {
    driver_api::Kernel kernel = nullptr;
    driver.Check(driver.library_get_kernel(&kernel, library, binary.entry.c_str()), "finding entry " + binary.entry);
    CheckParameters(driver, kernel, binary);
    driver.Check(driver.kernel_get_function(&loaded->function, kernel), "binding to the context");
    if (binary.recipe.dynamic_shared_bytes > 0) {
      driver.Check(driver.function_set_attribute(loaded->function, driver_api::kFunctionMaxDynamicSharedBytes,
                                                 static_cast<int>(binary.recipe.dynamic_shared_bytes)),
                   "taking " + std::to_string(binary.recipe.dynamic_shared_bytes) + " bytes of shared memory");
    }
    const auto& cluster = binary.recipe.cluster;
    if (cluster[0] * cluster[1] * cluster[2] > 8) {  // the largest cluster that every device must offer
      driver.Check(driver.function_set_attribute(loaded->function, driver_api::kFunctionNonPortableClusterAllowed, 1),
                   "allowing the cluster");
    }
  } catch (...) {
    driver.library_unload(library);
    throw;
  }
}

}  // namespace

bool ArchitectureRule::Accepts(Capability device) const {
  const bool is_11_0 = device.major == 10 && device.minor == 1;  // by its older number; another family
  if (device.major != capability.major || is_11_0) return false;
  return family ? device.minor >= capability.minor : device.minor == capability.minor;
}

void RegisterBinary(KernelBinary binary) {
  CheckBinary(binary);
  Tables& tables = TheTables();
  std::unique_lock lock(*tables.mutex);
  std::string hash = binary.hash;
  tables.binaries.try_emplace(std::move(hash), std::move(binary));
}

bool IsRegistered(std::string_view hash) {
  Tables& tables = TheTables();
  std::shared_lock lock(*tables.mutex);
  return tables.binaries.find(hash) != tables.binaries.end();
}

void SetBinaryFinder(BinaryFinder finder) {
  Tables& tables = TheTables();
  std::unique_lock lock(*tables.mutex);
  tables.finder = std::move(finder);
}

const LoadedKernel& Load(Driver& driver, std::string_view hash, int ordinal) {
  const driver_api::Context context = driver.ContextFor(ordinal);
  Tables& tables = TheTables();
  BinaryFinder finder;
  {
    std::shared_lock lock(*tables.mutex);
    auto found = tables.loaded.find({&driver, context, hash});
    if (found != tables.loaded.end()) return *found->second;
    if (tables.binaries.find(hash) == tables.binaries.end()) finder = tables.finder;
  }
  if (finder) finder(std::string(hash));
  std::unique_lock lock(*tables.mutex);
  auto found = tables.loaded.find({&driver, context, hash});
  if (found != tables.loaded.end()) return *found->second;

  const KernelBinary& binary = FindBinary(tables, hash);
  const ScopedArchitecture architecture(driver);
  const driver_api::Device device = driver.DeviceOf(context);
  const Capability capability = driver.CapabilityOf(device);
  auto loaded = std::make_unique<LoadedKernel>();
  loaded->binary = &binary;
  loaded->driver = &driver;
  loaded->context = context;
  loaded->device = "device " + std::to_string(device) + " (" + driver.DeviceName(device) + ", compute capability " +
                   std::to_string(capability.major) + "." + std::to_string(capability.minor) + ", driver '" +
                   driver.name() + "')";
  if (!binary.architecture.Accepts(capability)) {
    throw RuntimeFailure("Kernel '" + binary.name + "' was built for " + binary.architecture.name +
                         " and cannot run on " + loaded->device + ". It exists for: " + binary.alternatives +
                         ". Trace the call for the device it runs on, or choose another implementation.");
  }
  try {
    LoadInto(loaded.get());
  } catch (const RuntimeFailure& failure) {
    throw RuntimeFailure("Kernel '" + binary.name + "' cannot be loaded on " + loaded->device + ": " + failure.what());
  }
  return *tables.loaded.emplace(LoadedKey{&driver, context, binary.hash}, std::move(loaded)).first->second;
}

const LoadedKernel& FindLoaded(Driver& driver, std::string_view hash, int ordinal) {
  const driver_api::Context context = driver.ContextFor(ordinal);
  Tables& tables = TheTables();
  std::shared_lock lock(*tables.mutex);
  auto found = tables.loaded.find({&driver, context, hash});
  if (found != tables.loaded.end()) return *found->second;
  const KernelBinary& binary = FindBinary(tables, hash);
  throw RuntimeFailure("Kernel '" + binary.name + "' is executed on a device for which it was not initialised.");
}

}  // namespace jax_fa4

// Kernel binaries, known by the hash of their content, and where each is loaded. Python registers a binary when a call
// is traced; XLA's initialise stage loads it, once for each driver and context, under one lock; execution only looks it
// up.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/driver.h"
#include "runtime/tensor_map.h"

namespace jax_fa4 {

enum class ParameterKind {
  kOperand,    // address of operand `index`
  kResult,     // address of result `index`
  kInt32,      // integer `index` of the call, which must fit
  kInt64,      // likewise
  kFloat32,    // float `index` of the call
  kDivisor,    // 12 bytes that let a kernel divide by integer `index` with a multiplication (see launcher.h)
  kTensorMap,  // tensor map `index` of the recipe
};

// One kernel parameter: what fills it, and where it lies in the parameter block, as the PTX declares it.
struct Parameter {
  ParameterKind kind;
  std::uint32_t index;
  std::uint32_t offset;
  std::uint32_t bytes;
};

struct LaunchRecipe {
  std::vector<Parameter> parameters;
  std::vector<TensorMapRecipe> tensor_maps;
  std::uint32_t operand_count = 0;
  std::uint32_t result_count = 0;
  std::uint32_t integer_count = 0;
  std::uint32_t float_count = 0;
  std::array<std::uint32_t, 3> grid{};  // positions in the call's integers
  std::array<std::uint32_t, 3> block{1, 1, 1};
  std::array<std::uint32_t, 3> cluster{1, 1, 1};
  std::uint32_t dynamic_shared_bytes = 0;
  bool programmatic_launch = false;  // may start before its predecessor ends; the kernel then waits itself
};

// The devices an architecture's code runs on: the capability itself, or with `family` later minors of it as well,
// all but 10.1, the older number of 11.0.
struct ArchitectureRule {
  std::string name;  // "sm_90a"
  Capability capability;
  bool family = false;
  bool Accepts(Capability device) const;
};

struct KernelBinary {
  std::string hash;
  std::string name;  // readable: the plan's key
  std::string entry;
  std::string cubin;
  std::string ptx;
  ArchitectureRule architecture;
  std::string alternatives;  // the architectures for which this kernel exists, for messages
  LaunchRecipe recipe;
};

// Most parameters and bytes a recipe may have: the launcher keeps them on the stack.
inline constexpr std::size_t kMaxParameters = 64;
inline constexpr std::size_t kMaxParameterBytes = 4096;

// Registers a binary; again with the same hash, nothing happens. Throws RuntimeFailure on a recipe that contradicts
// itself.
void RegisterBinary(KernelBinary binary);
bool IsRegistered(std::string_view hash);

// Asked for a binary that is not registered when it is to be loaded: it may register it, or do nothing. So a program
// that another process compiled finds its kernels. Called without locks, from any thread.
using BinaryFinder = std::function<void(const std::string& hash)>;
void SetBinaryFinder(BinaryFinder finder);

struct LoadedKernel {
  const KernelBinary* binary = nullptr;
  Driver* driver = nullptr;
  driver_api::Context context = nullptr;
  driver_api::Function function = nullptr;
  std::string device;  // "device 0 (NVIDIA H200, compute capability 9.0)"
};

// Loads the binary into the context of this thread or device, unless that was done. Throws RuntimeFailure naming the
// kernel, the device and the driver's error.
const LoadedKernel& Load(Driver& driver, std::string_view hash, int ordinal);

// What Load made for this context. Throws RuntimeFailure if it was not called.
const LoadedKernel& FindLoaded(Driver& driver, std::string_view hash, int ordinal);

}  // namespace jax_fa4

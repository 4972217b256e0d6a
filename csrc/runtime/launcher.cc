#include "runtime/launcher.h"

#include <cstring>
#include <limits>
#include <string>

namespace jax_fa4 {
namespace {

void CheckCount(const char* what, std::size_t given, std::size_t expected) {
  if (given != expected) {
    throw RuntimeFailure("The call brings " + std::to_string(given) + " " + what + " and the recipe takes " +
                         std::to_string(expected) + ".");
  }
}

template <typename Narrow>
Narrow Fit(std::int64_t value, const char* what, std::int64_t least = std::numeric_limits<Narrow>::min()) {
  if (value < least || value > static_cast<std::int64_t>(std::numeric_limits<Narrow>::max())) {
    throw RuntimeFailure(std::string(what) + " of " + std::to_string(value) + " is out of its range.");
  }
  return static_cast<Narrow>(value);
}

template <typename Value>
void Put(std::byte* to, const Value& value) {
  std::memcpy(to, &value, sizeof(value));
}

void PutTensorMap(const TensorMapRecipe& recipe, const CallValues& values, std::byte* to) {
  const driver_api::DevicePointer address =
      recipe.is_result ? values.results[recipe.buffer] : values.operands[recipe.buffer];
  driver_api::TensorMapWords map;
  EncodeTensorMap(recipe, GatherValues(recipe, address, values.integers), &map);
  Put(to, map);
}

std::string Shape(const unsigned (&extents)[3]) {
  return std::to_string(extents[0]) + " x " + std::to_string(extents[1]) + " x " + std::to_string(extents[2]);
}

}  // namespace

Divisor MakeDivisor(std::uint32_t divisor) {
  if (divisor == 0) throw RuntimeFailure("A divisor is 0; it takes 1 to 2^32 - 1.");
  unsigned log2_up = 0;
  while ((std::uint64_t{1} << log2_up) < divisor) ++log2_up;
  const std::uint64_t excess = (std::uint64_t{1} << log2_up) - divisor;
  Divisor made{};
  made.divisor = divisor;
  made.multiplier = static_cast<std::uint32_t>((excess << 32) / divisor + 1);
  made.shift1 = static_cast<std::uint8_t>(log2_up < 1 ? log2_up : 1);
  made.shift2 = static_cast<std::uint8_t>(log2_up < 1 ? 0 : log2_up - 1);
  return made;
}

void FillParameters(const LaunchRecipe& recipe, const CallValues& values, ParameterBlock* block) {
  CheckCount("operands", values.operand_count, recipe.operand_count);
  CheckCount("results", values.result_count, recipe.result_count);
  CheckCount("integers", values.integer_count, recipe.integer_count);
  CheckCount("floats", values.float_count, recipe.float_count);
  block->size = recipe.parameters.empty() ? 0 : recipe.parameters.back().offset + recipe.parameters.back().bytes;
  std::memset(block->bytes.data(), 0, block->size);
  for (std::size_t i = 0; i < recipe.parameters.size(); ++i) {
    const Parameter& parameter = recipe.parameters[i];
    std::byte* to = block->bytes.data() + parameter.offset;
    block->pointers[i] = to;
    switch (parameter.kind) {
      case ParameterKind::kOperand:
        Put(to, values.operands[parameter.index]);
        break;
      case ParameterKind::kResult:
        Put(to, values.results[parameter.index]);
        break;
      case ParameterKind::kInt32:
        Put(to, Fit<std::int32_t>(values.integers[parameter.index], "A 32-bit kernel parameter"));
        break;
      case ParameterKind::kInt64:
        Put(to, values.integers[parameter.index]);
        break;
      case ParameterKind::kFloat32:
        Put(to, values.floats[parameter.index]);
        break;
      case ParameterKind::kDivisor:
        Put(to, MakeDivisor(Fit<std::uint32_t>(values.integers[parameter.index], "A divisor", 1)));
        break;
      case ParameterKind::kTensorMap:
        PutTensorMap(recipe.tensor_maps[parameter.index], values, to);
        break;
    }
  }
}

void Launch(const LoadedKernel& kernel, const CallValues& values, driver_api::Stream stream) {
  const LaunchRecipe& recipe = kernel.binary->recipe;
  driver_api::LaunchConfig config{};
  ParameterBlock block;  // left uninitialised: FillParameters writes what is used
  try {
    FillParameters(recipe, values, &block);
    for (int i = 0; i < 3; ++i) {
      config.grid[i] = Fit<std::uint32_t>(values.integers[recipe.grid[i]], "A grid extent", 0);
      config.block[i] = recipe.block[i];
    }
  } catch (const RuntimeFailure& failure) {
    throw RuntimeFailure("Kernel '" + kernel.binary->name + "' cannot be launched on " + kernel.device + ": " +
                         failure.what());
  }
  if (config.grid[0] == 0 || config.grid[1] == 0 || config.grid[2] == 0) return;

  driver_api::LaunchAttribute attributes[2]{};
  if (recipe.cluster[0] * recipe.cluster[1] * recipe.cluster[2] > 1) {
    driver_api::LaunchAttribute& attribute = attributes[config.attribute_count++];
    attribute.id = driver_api::kLaunchClusterDimension;
    attribute.value.cluster = {recipe.cluster[0], recipe.cluster[1], recipe.cluster[2]};
  }
  if (recipe.programmatic_launch) {
    driver_api::LaunchAttribute& attribute = attributes[config.attribute_count++];
    attribute.id = driver_api::kLaunchProgrammaticStreamSerialization;
    attribute.value.programmatic_stream_serialization = 1;
  }
  config.attributes = attributes;
  config.dynamic_shared_bytes = recipe.dynamic_shared_bytes;
  config.stream = stream;
  ScopedContext scope(*kernel.driver, kernel.context);
  const driver_api::Result result =
      kernel.driver->launch_kernel_ex(&config, kernel.function, block.pointers.data(), nullptr);
  if (result != driver_api::kSuccess) {
    throw RuntimeFailure("Launching kernel '" + kernel.binary->name + "' on " + kernel.device + " failed (grid " +
                         Shape(config.grid) + ", block " + Shape(config.block) + ", " +
                         std::to_string(config.dynamic_shared_bytes) +
                         " bytes of dynamic shared memory): " + kernel.driver->Describe(result) + ".");
  }
}

}  // namespace jax_fa4

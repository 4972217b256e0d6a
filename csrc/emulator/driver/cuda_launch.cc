// Driver API: modules, libraries, kernels, launches.
#include <cstdio>
#include <string>
#include <vector>

#include "cuda_api.h"
#include "device.h"

namespace jax_fa4::emulator {
namespace {

// CUfunction_attribute.
constexpr int kMaxDynamicShared = 8, kRequiredClusterWidth = 11, kRequiredClusterHeight = 12,
              kRequiredClusterDepth = 13, kNonPortableCluster = 14;

Device& device() { return Device::get(); }

std::string read_file(const char* path) {
  std::string text;
  std::FILE* file = path == nullptr ? nullptr : std::fopen(path, "rb");
  if (file == nullptr)
    throw Fault(Status::not_found, std::string("cannot read ") + (path == nullptr ? "(null)" : path));
  char piece[65536];
  for (size_t got; (got = std::fread(piece, 1, sizeof piece, file)) > 0;) text.append(piece, got);
  std::fclose(file);
  return text;
}

void set_kernel_attribute(Kernel& kernel, int attribute, int value) {
  switch (attribute) {
    case kMaxDynamicShared:
      if (value < 0 || static_cast<uint32_t>(value) + kernel.program->static_shared_bytes > 232448)
        throw Fault(Status::invalid_value, std::to_string(value) +
                                               " bytes of dynamic shared memory exceed 232448 with the kernel's " +
                                               std::to_string(kernel.program->static_shared_bytes) + " static ones");
      kernel.max_dynamic_shared = value;
      break;
    case kNonPortableCluster:
      kernel.nonportable_cluster = value != 0;
      break;
    default:
      break;  // hints: cache preference, carve-out, scheduling policy
  }
}

int kernel_attribute(const Kernel& kernel, int attribute) {
  switch (attribute) {
    case 0:
      return kernel.program->max_threads != 0 ? static_cast<int>(kernel.program->max_threads)
             : kernel.program->required_block[0] != 0
                 ? static_cast<int>(kernel.program->required_block[0] * kernel.program->required_block[1] *
                                    kernel.program->required_block[2])
                 : 1024;
    case 1:
      return static_cast<int>(kernel.program->static_shared_bytes);
    case 3:
      return static_cast<int>(kernel.program->local_bytes);
    case 4:
      return 128;  // registers: not known before ptxas
    case 5:
      return kernel.module->module->target;
    case 6:
      return kernel.module->module->target;
    case kMaxDynamicShared:
      return kernel.max_dynamic_shared;
    case kRequiredClusterWidth:
      return static_cast<int>(kernel.program->required_cluster[0]);
    case kRequiredClusterHeight:
      return static_cast<int>(kernel.program->required_cluster[1]);
    case kRequiredClusterDepth:
      return static_cast<int>(kernel.program->required_cluster[2]);
    case kNonPortableCluster:
      return kernel.nonportable_cluster;
    default:
      return 0;
  }
}

void launch(Handle function, LaunchShape shape, Handle stream, void** params, void** extra) {
  const Kernel& kernel = *device().check_kernel(function);
  const void* block = nullptr;
  uint64_t bytes = 0;
  // CU_LAUNCH_PARAM_BUFFER_POINTER 1, _SIZE 2, _END 0.
  for (; extra != nullptr && *extra != nullptr; extra += 2) {
    if (reinterpret_cast<uintptr_t>(extra[0]) == 1) block = extra[1];
    if (reinterpret_cast<uintptr_t>(extra[0]) == 2) bytes = *static_cast<size_t*>(extra[1]);
  }
  device().launch(kernel, shape, stream, params, block, bytes);
}

}  // namespace

EMULATOR_EXPORT CUresult cuModuleLoadData(Handle* module, const void* image) {
  if (module == nullptr) return failure(Status::invalid_value, "cuModuleLoadData: module is a null pointer");
  return guarded([&] { *module = device().load(image); });
}
EMULATOR_EXPORT CUresult cuModuleLoadDataEx(Handle* module, const void* image, unsigned, int*, void**) {
  return cuModuleLoadData(module, image);
}
EMULATOR_EXPORT CUresult cuModuleLoad(Handle* module, const char* path) {
  if (module == nullptr) return failure(Status::invalid_value, "cuModuleLoad: module is a null pointer");
  return guarded([&] { *module = device().load(read_file(path).c_str()); });
}
EMULATOR_EXPORT CUresult cuModuleUnload(Handle module) {
  return guarded([&] { device().unload(device().check_module(module)); });
}
EMULATOR_EXPORT CUresult cuLibraryLoadData(Handle* library, const void* image, int*, void**, unsigned, int*, void**,
                                           unsigned) {
  return cuModuleLoadData(library, image);
}
EMULATOR_EXPORT CUresult cuLibraryLoadFromFile(Handle* library, const char* path, int*, void**, unsigned, int*, void**,
                                               unsigned) {
  return cuModuleLoad(library, path);
}
EMULATOR_EXPORT CUresult cuLibraryUnload(Handle library) { return cuModuleUnload(library); }
EMULATOR_EXPORT CUresult cuLibraryGetModule(Handle* module, Handle library) {
  if (module == nullptr) return failure(Status::invalid_value, "cuLibraryGetModule: module is a null pointer");
  return guarded([&] { *module = device().check_module(library); });
}

EMULATOR_EXPORT CUresult cuModuleGetFunction(Handle* function, Handle module, const char* name) {
  if (function == nullptr || name == nullptr)
    return failure(Status::invalid_value, "cuModuleGetFunction: an argument is a null pointer");
  return guarded([&] {
    Kernel* kernel = device().check_module(module)->find(name);
    if (kernel == nullptr) throw Fault(Status::not_found, std::string("the module has no kernel '") + name + "'");
    *function = kernel;
  });
}
EMULATOR_EXPORT CUresult cuLibraryGetKernel(Handle* kernel, Handle library, const char* name) {
  return cuModuleGetFunction(kernel, library, name);
}
EMULATOR_EXPORT CUresult cuLibraryGetKernelCount(unsigned* count, Handle library) {
  if (count == nullptr) return failure(Status::invalid_value, "cuLibraryGetKernelCount: count is a null pointer");
  return guarded([&] { *count = static_cast<unsigned>(device().check_module(library)->kernels.size()); });
}
EMULATOR_EXPORT CUresult cuLibraryEnumerateKernels(Handle* kernels, unsigned count, Handle library) {
  if (kernels == nullptr) return failure(Status::invalid_value, "cuLibraryEnumerateKernels: kernels is a null pointer");
  return guarded([&] {
    LoadedModule* module = device().check_module(library);
    for (unsigned i = 0; i < count && i < module->kernels.size(); i++) kernels[i] = module->kernels[i].get();
  });
}
EMULATOR_EXPORT CUresult cuKernelGetFunction(Handle* function, Handle kernel) {
  if (function == nullptr) return failure(Status::invalid_value, "cuKernelGetFunction: function is a null pointer");
  return guarded([&] { *function = device().check_kernel(kernel); });
}
EMULATOR_EXPORT CUresult cuKernelGetLibrary(Handle* library, Handle kernel) {
  if (library == nullptr) return failure(Status::invalid_value, "cuKernelGetLibrary: library is a null pointer");
  return guarded([&] { *library = device().check_kernel(kernel)->module; });
}
EMULATOR_EXPORT CUresult cuFuncGetName(const char** name, Handle function) {
  if (name == nullptr) return failure(Status::invalid_value, "cuFuncGetName: name is a null pointer");
  return guarded([&] { *name = device().check_kernel(function)->program->name.c_str(); });
}
EMULATOR_EXPORT CUresult cuKernelGetName(const char** name, Handle kernel) { return cuFuncGetName(name, kernel); }

EMULATOR_EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr* address, size_t* bytes, Handle module, const char* name) {
  if (name == nullptr) return failure(Status::invalid_value, "cuModuleGetGlobal: name is a null pointer");
  return guarded([&] {
    uint64_t size = 0;
    void* found = device().check_module(module)->variable(name, &size);
    if (found == nullptr)
      throw Fault(Status::not_found, std::string("the module has no global variable '") + name + "'");
    if (address != nullptr) *address = reinterpret_cast<CUdeviceptr>(found);
    if (bytes != nullptr) *bytes = size;
  });
}
EMULATOR_EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr* address, size_t* bytes, Handle library, const char* name) {
  return cuModuleGetGlobal_v2(address, bytes, library, name);
}

EMULATOR_EXPORT CUresult cuFuncSetAttribute(Handle function, int attribute, int value) {
  return guarded([&] { set_kernel_attribute(*device().check_kernel(function), attribute, value); });
}
EMULATOR_EXPORT CUresult cuKernelSetAttribute(int attribute, int value, Handle kernel, CUdevice) {
  return cuFuncSetAttribute(kernel, attribute, value);
}
EMULATOR_EXPORT CUresult cuFuncGetAttribute(int* value, int attribute, Handle function) {
  if (value == nullptr) return failure(Status::invalid_value, "cuFuncGetAttribute: value is a null pointer");
  return guarded([&] { *value = kernel_attribute(*device().check_kernel(function), attribute); });
}
EMULATOR_EXPORT CUresult cuKernelGetAttribute(int* value, int attribute, Handle kernel, CUdevice) {
  return cuFuncGetAttribute(value, attribute, kernel);
}
EMULATOR_EXPORT CUresult cuFuncSetCacheConfig(Handle, int) { return 0; }
EMULATOR_EXPORT CUresult cuKernelGetParamInfo(Handle kernel, size_t index, size_t* offset, size_t* bytes) {
  return guarded([&] {
    const std::vector<Variable>& params = device().check_kernel(kernel)->program->params;
    if (index >= params.size())
      throw Fault(Status::invalid_value, "the kernel has " + std::to_string(params.size()) +
                                             " parameters, not one of index " + std::to_string(index));
    if (offset != nullptr) *offset = params[index].offset;
    if (bytes != nullptr) *bytes = params[index].bytes;
  });
}
EMULATOR_EXPORT CUresult cuFuncGetParamInfo(Handle function, size_t index, size_t* offset, size_t* bytes) {
  return cuKernelGetParamInfo(function, index, offset, bytes);
}

EMULATOR_EXPORT CUresult cuLaunchKernel(Handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                        unsigned by, unsigned bz, unsigned shared, Handle stream, void** params,
                                        void** extra) {
  return guarded([&] { launch(function, {{gx, gy, gz}, {bx, by, bz}, {}, shared, false}, stream, params, extra); });
}
EMULATOR_EXPORT CUresult cuLaunchCooperativeKernel(Handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                                   unsigned by, unsigned bz, unsigned shared, Handle stream,
                                                   void** params) {
  return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, params, nullptr);
}
EMULATOR_EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, Handle function, void** params, void** extra) {
  if (config == nullptr || (config->attribute_count != 0 && config->attributes == nullptr))
    return failure(Status::invalid_value, "cuLaunchKernelEx: config or its attributes are a null pointer");
  LaunchShape shape{{config->grid_x, config->grid_y, config->grid_z},
                    {config->block_x, config->block_y, config->block_z},
                    {},
                    config->shared_bytes,
                    false};
  for (unsigned i = 0; i < config->attribute_count; i++) {
    const CUlaunchAttribute& attribute = config->attributes[i];
    if (attribute.id == kAttributeCluster)
      shape.cluster = {attribute.value.cluster.x, attribute.value.cluster.y, attribute.value.cluster.z};
    if (attribute.id == kAttributeProgrammatic) shape.programmatic = attribute.value.flag != 0;
  }
  return guarded([&] { launch(function, shape, config->stream, params, extra); });
}

EMULATOR_EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Handle function, int threads,
                                                                     size_t shared) {
  if (blocks == nullptr)
    return failure(Status::invalid_value, "cuOccupancyMaxActiveBlocksPerMultiprocessor: blocks is a null pointer");
  return guarded([&] {
    const Kernel& kernel = *device().check_kernel(function);
    const size_t bytes = shared + kernel.program->static_shared_bytes + kReservedShared;
    const int by_shared = static_cast<int>(233472 / bytes), by_threads = threads > 0 ? 2048 / threads : 0;
    *blocks = std::max(0, std::min({by_shared, by_threads, 32}));
  });
}
EMULATOR_EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, Handle function, int threads,
                                                                              size_t shared, unsigned) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}
EMULATOR_EXPORT CUresult cuOccupancyMaxActiveClusters(int* clusters, Handle function, const CUlaunchConfig* config) {
  if (clusters == nullptr || config == nullptr)
    return failure(Status::invalid_value, "cuOccupancyMaxActiveClusters: an argument is a null pointer");
  int blocks = 0;
  const CUresult result = cuOccupancyMaxActiveBlocksPerMultiprocessor(
      &blocks, function, static_cast<int>(config->block_x * config->block_y * config->block_z), config->shared_bytes);
  unsigned size = 1;
  for (unsigned i = 0; i < config->attribute_count; i++)
    if (config->attributes[i].id == kAttributeCluster)
      size = std::max(1u, config->attributes[i].value.cluster.x * config->attributes[i].value.cluster.y *
                              config->attributes[i].value.cluster.z);
  *clusters = blocks * device().options().sm_count / static_cast<int>(size);
  return result;
}

}  // namespace jax_fa4::emulator

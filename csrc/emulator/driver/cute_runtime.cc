// The second door: what host code compiled by nvidia-cutlass-dsl calls (the library that CUTE_DSL_LIBS names), in terms
// of the driver API. So CuTe-DSL programs by others run with their own launchers.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "cuda_api.h"
#include "device.h"

namespace jax_fa4::emulator {

EMULATOR_EXPORT CUresult cuModuleLoadData(Handle*, const void*);
EMULATOR_EXPORT CUresult cuModuleUnload(Handle);
EMULATOR_EXPORT CUresult cuModuleGetFunction(Handle*, Handle, const char*);
EMULATOR_EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr*, size_t*, Handle, const char*);
EMULATOR_EXPORT CUresult cuFuncSetAttribute(Handle, int, int);
EMULATOR_EXPORT CUresult cuFuncGetAttribute(int*, int, Handle);
EMULATOR_EXPORT CUresult cuDeviceGetAttribute(int*, int, CUdevice);
EMULATOR_EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig*, Handle, void**, void**);
EMULATOR_EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int*, Handle, int, size_t);
EMULATOR_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr*, size_t);
EMULATOR_EXPORT CUresult cuMemFree_v2(CUdeviceptr);
EMULATOR_EXPORT CUresult cuMemcpy(CUdeviceptr, CUdeviceptr, size_t);
EMULATOR_EXPORT CUresult cuMemsetD8_v2(CUdeviceptr, unsigned char, size_t);
EMULATOR_EXPORT CUresult cuGetErrorName(CUresult, const char**);

namespace {

// cudaLaunchConfig_t: sizes as in the runtime API, where shared memory is a size_t.
struct RuntimeLaunchConfig {
  unsigned grid[3], block[3];
  size_t shared_bytes;
  Handle stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
};

// Hands a failure on: as a raised error of tvm_ffi, where compiled functions are called through it, and on stderr.
int told(int error) {
  if (error == 0) return 0;
  const std::string text = Device::get().last_error();
  std::fprintf(stderr, "the emulated launch failed with error %d: %s\n", error, text.c_str());
  using Raise = void (*)(const char* kind, const char* message);
  if (void* raise = dlsym(RTLD_DEFAULT, "TVMFFIErrorSetRaisedFromCStr"))
    reinterpret_cast<Raise>(raise)("RuntimeError", text.c_str());
  return error;
}

}  // namespace

EMULATOR_EXPORT int _cudaLibraryLoadData(Handle* library, const void* data, void*, void*, int, void*, void*, int) {
  return told(cuModuleLoadData(library, data));
}
EMULATOR_EXPORT int _cudaLibraryUnload(Handle library) { return cuModuleUnload(library); }
EMULATOR_EXPORT int _cudaLibraryGetKernel(Handle* kernel, Handle library, const char* name) {
  return cuModuleGetFunction(kernel, library, name);
}
EMULATOR_EXPORT int _cudaLibraryGetGlobal(CUdeviceptr* address, size_t* bytes, Handle library, const char* name) {
  return cuModuleGetGlobal_v2(address, bytes, library, name);
}
EMULATOR_EXPORT int _cuKernelGetAttribute(int* value, int attribute, Handle kernel, int) {
  return cuFuncGetAttribute(value, attribute, kernel);
}
EMULATOR_EXPORT int _cudaDeviceGetAttribute(int* value, int attribute, int device) {
  return cuDeviceGetAttribute(value, attribute, device);
}
EMULATOR_EXPORT int _cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}
EMULATOR_EXPORT int _cudaGetDeviceCount(int* count) {
  *count = 1;
  return 0;
}
EMULATOR_EXPORT int _cudaSetDevice(int) { return 0; }
EMULATOR_EXPORT int _cudaKernelSetAttributeForDevice(Handle kernel, int attribute, int value, int) {
  return cuFuncSetAttribute(kernel, attribute, value);
}
EMULATOR_EXPORT int _cudaFuncSetAttribute(Handle kernel, int attribute, int value) {
  return cuFuncSetAttribute(kernel, attribute, value);
}
EMULATOR_EXPORT int _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Handle kernel, int threads,
                                                                   size_t shared) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared);
}
EMULATOR_EXPORT int _cudaLaunchKernelEx(const RuntimeLaunchConfig* config, Handle kernel, void** params) {
  const CUlaunchConfig driver{config->grid[0],
                              config->grid[1],
                              config->grid[2],
                              config->block[0],
                              config->block[1],
                              config->block[2],
                              static_cast<unsigned>(config->shared_bytes),
                              config->stream,
                              config->attributes,
                              config->attribute_count};
  return told(cuLaunchKernelEx(&driver, kernel, params, nullptr));
}
EMULATOR_EXPORT int _cudaLaunchKernel(Handle kernel, int gx, int gy, int gz, int bx, int by, int bz, Handle stream,
                                      size_t shared, void** params) {
  const RuntimeLaunchConfig config{{static_cast<unsigned>(gx), static_cast<unsigned>(gy), static_cast<unsigned>(gz)},
                                   {static_cast<unsigned>(bx), static_cast<unsigned>(by), static_cast<unsigned>(bz)},
                                   shared,
                                   stream,
                                   nullptr,
                                   0};
  return _cudaLaunchKernelEx(&config, kernel, params);
}
EMULATOR_EXPORT int _cudaDeviceSynchronize() {
  Device::get().wait_for_kernels();
  return 0;
}
EMULATOR_EXPORT int _cudaStreamSynchronize(Handle) { return _cudaDeviceSynchronize(); }
EMULATOR_EXPORT int _cudaMalloc(void** address, size_t bytes) {
  return cuMemAlloc_v2(reinterpret_cast<CUdeviceptr*>(address), bytes);
}
EMULATOR_EXPORT int _cudaFree(void* address) { return cuMemFree_v2(reinterpret_cast<CUdeviceptr>(address)); }
EMULATOR_EXPORT int _cudaMemcpy(void* to, const void* from, size_t bytes, int) {
  return cuMemcpy(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from), bytes);
}
EMULATOR_EXPORT int _cudaMemset(void* address, int value, size_t bytes) {
  return cuMemsetD8_v2(reinterpret_cast<CUdeviceptr>(address), static_cast<unsigned char>(value), bytes);
}

// Helpers of the compiler's own host dialect.
EMULATOR_EXPORT void cuda_dialect_assert_success(int error) {
  if (error != 0) std::abort();
}
EMULATOR_EXPORT void cuda_dialect_print_on_error(int) {}
EMULATOR_EXPORT const char* cuda_dialect_get_error_name(int error) {
  const char* name = nullptr;
  return cuGetErrorName(error, &name) == 0 ? name : "unknown error";
}
EMULATOR_EXPORT int cuda_dialect_init_library_once(void** state, int (*init)(void**), int (*load)(void**, int), void*) {
  if (*state != nullptr) return 0;
  const int first = init(state);
  return first != 0 ? first : load(state, 0);
}
EMULATOR_EXPORT void cuda_dialect_unload_library_once(void** state) { *state = nullptr; }
EMULATOR_EXPORT void CuteDSLRT_TVMFFISetRaisedCudaError(void*, int) {}
EMULATOR_EXPORT void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(void*, int) {}

}  // namespace jax_fa4::emulator

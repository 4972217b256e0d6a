// Driver API: the device, contexts, errors, function look-up.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "cuda_api.h"
#include "device.h"

namespace jax_fa4::emulator {
namespace {

constexpr int kDriverVersion = 13000;
// There is one context; its handle only has to be something.
int context_object = 0;
const Handle kContext = &context_object;
thread_local Handle current_context = nullptr;

struct ErrorText {
  Status status;
  const char* name;
  const char* text;
};
constexpr ErrorText kErrors[] = {
    {Status::success, "CUDA_SUCCESS", "no error"},
    {Status::invalid_value, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {Status::out_of_memory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {Status::not_initialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {Status::no_device, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {Status::invalid_device, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {Status::invalid_image, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {Status::invalid_context, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {Status::no_binary_for_gpu, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {Status::invalid_ptx, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {Status::invalid_handle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {Status::not_found, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {Status::not_ready, "CUDA_ERROR_NOT_READY", "device not ready"},
    {Status::illegal_address, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {Status::launch_out_of_resources, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {Status::launch_timeout, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {Status::assert, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {Status::hardware_stack_error, "CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error"},
    {Status::illegal_instruction, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"},
    {Status::misaligned_address, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {Status::invalid_address_space, "CUDA_ERROR_INVALID_ADDRESS_SPACE",
     "operation not supported on global/shared address space"},
    {Status::launch_failed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {Status::not_supported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {Status::invalid_cluster_size, "CUDA_ERROR_INVALID_CLUSTER_SIZE", "invalid cluster size"},
    {Status::unknown, "CUDA_ERROR_UNKNOWN", "unknown error"}};

const ErrorText* error_text(CUresult result) {
  for (const ErrorText& one : kErrors)
    if (static_cast<int>(one.status) == result) return &one;
  return nullptr;
}

int device_attribute(int attribute) {
  const Options options = Device::get().options();
  switch (attribute) {
    case 1:
      return 1024;  // threads per block
    case 2:
    case 3:
      return 1024;  // block x, y
    case 4:
      return 64;  // block z
    case 5:
      return 0x7fffffff;  // grid x
    case 6:
    case 7:
      return 65535;
    case 8:
      return 48 * 1024;  // shared memory per block
    case 9:
      return 65536;  // constant memory
    case 10:
      return 32;  // warp size
    case 12:
      return 65536;  // registers per block
    case 13:
      return 1'800'000;  // clock, kHz
    case 14:
      return 512;
    case 16:
      return options.sm_count;
    case 20:
      return 0;  // compute mode: default
    case 31:
    case 40:
      return 1;  // concurrent kernels, async engines
    case 38:
      return 50 << 20;  // L2
    case 39:
      return 2048;  // threads per SM
    case 41:
      return 1;  // unified addressing
    case 75:
      return options.architecture / 10;
    case 76:
      return options.architecture % 10;
    case 81:
      return 233472;  // shared memory per SM
    case 82:
      return 65536;  // registers per SM
    case 83:
    case 89:
      return 1;
    case 95:
      return 1;  // cooperative launch
    case 97:
      return 232448;  // shared memory per block, opt in
    case 106:
      return 32;  // blocks per SM
    case 111:
      return kReservedShared;  // reserved shared memory per block
    case 115:
    case 119:
      return 1;  // memory pools, cluster launch
    case 120:
      return 1;
    case 125:
      return 1;  // tensor map access
    default:
      return 0;
  }
}

}  // namespace

CUresult failure(Status status, const char* sentence) {
  Device::get().set_last_error(sentence);
  return static_cast<CUresult>(status);
}

CUresult guarded(const std::function<void()>& work) {
  try {
    work();
    return 0;
  } catch (const Fault& fault) {
    return failure(fault.status(), fault.what());
  } catch (const std::bad_alloc&) {
    return failure(Status::out_of_memory, "the host has no memory left");
  } catch (const std::exception& error) {
    return failure(Status::unknown, error.what());
  }
}

// Names without a version mean the current one, as in cuda.h.
void* exported(const char* name) {
  const std::string base = name;
  void* self = nullptr;
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&failure), &info) != 0) self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  if (self == nullptr) return nullptr;
  void* found = nullptr;
  for (const char* suffix : {"_v2", ""}) {
    found = dlsym(self, (base + suffix).c_str());
    if (found != nullptr) break;
  }
  dlclose(self);
  return found;
}

EMULATOR_EXPORT CUresult cuInit(unsigned) { return 0; }
EMULATOR_EXPORT CUresult cuDriverGetVersion(int* version) {
  if (version == nullptr) return failure(Status::invalid_value, "cuDriverGetVersion: version is a null pointer");
  *version = kDriverVersion;
  return 0;
}
EMULATOR_EXPORT CUresult cuDeviceGetCount(int* count) {
  if (count == nullptr) return failure(Status::invalid_value, "cuDeviceGetCount: count is a null pointer");
  *count = 1;
  return 0;
}
EMULATOR_EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (device == nullptr || ordinal != 0)
    return failure(Status::invalid_device, "cuDeviceGet: the emulator has one device, of ordinal 0");
  *device = 0;
  return 0;
}
EMULATOR_EXPORT CUresult cuDeviceGetName(char* name, int length, CUdevice) {
  if (name == nullptr || length <= 0)
    return failure(Status::invalid_value, "cuDeviceGetName: name is a null pointer or has no room");
  const int architecture = Device::get().options().architecture;
  std::snprintf(name, static_cast<size_t>(length), "jax_fa4 emulated GPU (compute capability %d.%d)", architecture / 10,
                architecture % 10);
  return 0;
}
EMULATOR_EXPORT CUresult cuDeviceGetUuid_v2(char* uuid, CUdevice) {
  if (uuid == nullptr) return failure(Status::invalid_value, "cuDeviceGetUuid: uuid is a null pointer");
  std::memcpy(uuid, "jax_fa4-emulator", 16);
  return 0;
}
EMULATOR_EXPORT CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
  if (bytes == nullptr) return failure(Status::invalid_value, "cuDeviceTotalMem: bytes is a null pointer");
  *bytes = size_t{64} << 30;
  return 0;
}
EMULATOR_EXPORT CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  if (value == nullptr || device != 0)
    return failure(Status::invalid_value, "cuDeviceGetAttribute: value is a null pointer or the device is not 0");
  *value = device_attribute(attribute);
  return 0;
}
EMULATOR_EXPORT CUresult cuDeviceComputeCapability(int* major, int* minor, CUdevice device) {
  const CUresult first = cuDeviceGetAttribute(major, 75, device);
  return first != 0 ? first : cuDeviceGetAttribute(minor, 76, device);
}

EMULATOR_EXPORT CUresult cuDevicePrimaryCtxRetain(Handle* context, CUdevice) {
  if (context == nullptr) return failure(Status::invalid_value, "cuDevicePrimaryCtxRetain: context is a null pointer");
  *context = kContext;
  return 0;
}
EMULATOR_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return 0; }
EMULATOR_EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice, unsigned) { return 0; }
EMULATOR_EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice) { return 0; }
EMULATOR_EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  if (flags != nullptr) *flags = 0;
  if (active != nullptr) *active = 1;
  return 0;
}
EMULATOR_EXPORT CUresult cuCtxCreate_v2(Handle* context, unsigned, CUdevice) {
  current_context = kContext;
  return cuDevicePrimaryCtxRetain(context, 0);
}
EMULATOR_EXPORT CUresult cuCtxDestroy_v2(Handle) { return 0; }
EMULATOR_EXPORT CUresult cuCtxGetCurrent(Handle* context) {
  if (context == nullptr) return failure(Status::invalid_value, "cuCtxGetCurrent: context is a null pointer");
  *context = current_context;
  return 0;
}
EMULATOR_EXPORT CUresult cuCtxSetCurrent(Handle context) {
  current_context = context;
  return 0;
}
EMULATOR_EXPORT CUresult cuCtxPushCurrent_v2(Handle context) { return cuCtxSetCurrent(context); }
EMULATOR_EXPORT CUresult cuCtxPopCurrent_v2(Handle* context) {
  if (context != nullptr) *context = current_context;
  return 0;
}
EMULATOR_EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  if (device == nullptr) return failure(Status::invalid_value, "cuCtxGetDevice: device is a null pointer");
  *device = 0;
  return 0;
}
EMULATOR_EXPORT CUresult cuCtxGetApiVersion(Handle, unsigned* version) {
  if (version != nullptr) *version = kDriverVersion;
  return 0;
}
EMULATOR_EXPORT CUresult cuCtxSynchronize() {
  Device::get().wait_for_kernels();
  return 0;
}

EMULATOR_EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
  const ErrorText* found = error_text(error);
  if (name == nullptr) return failure(Status::invalid_value, "cuGetErrorName: name is a null pointer");
  *name = found == nullptr ? nullptr : found->name;
  return found == nullptr ? static_cast<CUresult>(Status::invalid_value) : 0;
}
EMULATOR_EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  const ErrorText* found = error_text(error);
  if (text == nullptr) return failure(Status::invalid_value, "cuGetErrorString: text is a null pointer");
  *text = found == nullptr ? nullptr : found->text;
  return found == nullptr ? static_cast<CUresult>(Status::invalid_value) : 0;
}

EMULATOR_EXPORT CUresult cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* found) {
  if (name == nullptr || function == nullptr)
    return failure(Status::invalid_value, "cuGetProcAddress: an argument is a null pointer");
  *function = exported(name);
  if (found != nullptr) *found = *function == nullptr ? 1 : 0;
  if (*function != nullptr) return 0;
  return failure(Status::not_found, (std::string("the emulated driver has no function ") + name).c_str());
}
EMULATOR_EXPORT CUresult cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

}  // namespace jax_fa4::emulator

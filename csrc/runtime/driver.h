// One driver library, opened with dlopen: the real libcuda.so.1, a stub in tests, or the emulator. Several can be open
// in one process; each has a name, by which the calls that XLA executes refer to it.
#pragma once

#include <atomic>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/driver_api.h"

namespace jax_fa4 {

// What every part of the runtime throws; the message is a whole sentence for the user.
class RuntimeFailure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Which image of a kernel a driver loads. The emulator executes PTX, as text.
enum class ImageKind { kCubin, kPtx };

struct Capability {
  int major = 0;
  int minor = 0;
};

class Driver {
 public:
  // Opens `path` and finds every function; throws RuntimeFailure naming what is missing. Never closed: kernels,
  // contexts and XLA's own use of the library may outlive any owner we could give it.
  Driver(std::string name, std::string path, ImageKind image, Capability emulated);
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  const std::string& name() const { return name_; }
  ImageKind image() const { return image_; }
  // The compute capability of which an emulated device is made; 0.0: the one that it says.
  Capability emulated() const { return emulated_; }

  // Throws RuntimeFailure "<doing>: <error name>: <error text>" unless `result` is success.
  void Check(driver_api::Result result, std::string_view doing) const;
  // "CUDA_ERROR_X: text", as the driver puts it; the emulator says more: what was wrong, where in the PTX.
  std::string Describe(driver_api::Result result) const;

  // The context that is current on this thread, else the primary one of device `ordinal` (modulo the number of devices,
  // so that eight CPU devices of JAX can share one emulated GPU).
  driver_api::Context ContextFor(int ordinal);
  driver_api::Device DeviceOf(driver_api::Context context) const;
  Capability CapabilityOf(driver_api::Device device) const;
  std::string DeviceName(driver_api::Device device) const;

#define JAX_FA4_DRIVER_FUNCTIONS(REQUIRED, OPTIONAL)                                                                  \
  REQUIRED(cuInit, init, unsigned)                                                                                    \
  REQUIRED(cuGetErrorName, get_error_name, driver_api::Result, const char**)                                          \
  REQUIRED(cuGetErrorString, get_error_string, driver_api::Result, const char**)                                      \
  REQUIRED(cuDeviceGetCount, device_get_count, int*)                                                                  \
  REQUIRED(cuDeviceGet, device_get, driver_api::Device*, int)                                                         \
  REQUIRED(cuDeviceGetName, device_get_name, char*, int, driver_api::Device)                                          \
  REQUIRED(cuDeviceGetAttribute, device_get_attribute, int*, int, driver_api::Device)                                 \
  REQUIRED(cuDevicePrimaryCtxRetain, device_primary_context_retain, driver_api::Context*, driver_api::Device)         \
  REQUIRED(cuCtxGetCurrent, context_get_current, driver_api::Context*)                                                \
  REQUIRED(cuCtxSetCurrent, context_set_current, driver_api::Context)                                                 \
  REQUIRED(cuCtxGetDevice, context_get_device, driver_api::Device*)                                                   \
  REQUIRED(cuLibraryLoadData, library_load_data, driver_api::Library*, const void*, int*, void**, unsigned, int*,     \
           void**, unsigned)                                                                                          \
  REQUIRED(cuLibraryUnload, library_unload, driver_api::Library)                                                      \
  REQUIRED(cuLibraryGetKernel, library_get_kernel, driver_api::Kernel*, driver_api::Library, const char*)             \
  REQUIRED(cuKernelGetFunction, kernel_get_function, driver_api::Function*, driver_api::Kernel)                       \
  REQUIRED(cuFuncSetAttribute, function_set_attribute, driver_api::Function, int, int)                                \
  REQUIRED(cuLaunchKernelEx, launch_kernel_ex, const driver_api::LaunchConfig*, driver_api::Function, void**, void**) \
  REQUIRED(cuStreamSynchronize, stream_synchronize, driver_api::Stream)                                               \
  OPTIONAL(cuKernelGetParamInfo, kernel_get_param_info, driver_api::Kernel, std::size_t, std::size_t*, std::size_t*)  \
  OPTIONAL(cuTensorMapEncodeTiled, tensor_map_encode_tiled, driver_api::TensorMapWords*, int, unsigned, void*,        \
           const std::uint64_t*, const std::uint64_t*, const std::uint32_t*, const std::uint32_t*, int, int, int, int)

#define JAX_FA4_MEMBER(symbol, member, ...) driver_api::Result (*member)(__VA_ARGS__) = nullptr;
  JAX_FA4_DRIVER_FUNCTIONS(JAX_FA4_MEMBER, JAX_FA4_MEMBER)
#undef JAX_FA4_MEMBER

  // Of the emulator alone, else null: memory that is not the driver's own, which kernels may touch until it is taken
  // back.
  void (*emulator_add_memory)(const void*, std::size_t) = nullptr;
  void (*emulator_remove_memory)(const void*) = nullptr;
  // Of the emulator alone, else null: the sentence of the last call that failed; its size, whether or not it fits.
  std::size_t (*emulator_last_error)(char*, std::size_t) = nullptr;
  // Of the emulator alone, else null: for this thread, the compute capability times ten of the device; 0: as its
  // options say.
  void (*emulator_use_architecture)(int) = nullptr;

 private:
  std::string name_;
  std::string path_;
  ImageKind image_;
  Capability emulated_;
  std::vector<std::atomic<driver_api::Context>> primary_contexts_;  // by device, null until first asked for
};

// Makes `context` current for a scope, and puts back what was there. Does nothing where it is current already.
class ScopedContext {
 public:
  ScopedContext(const Driver& driver, driver_api::Context context);
  ~ScopedContext();
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

 private:
  const Driver& driver_;
  driver_api::Context previous_ = nullptr;
  bool changed_ = false;
};

// For a scope and thread, an emulated device is of the driver's compute capability. Of other drivers, nothing.
class ScopedArchitecture {
 public:
  explicit ScopedArchitecture(const Driver& driver);
  ~ScopedArchitecture();
  ScopedArchitecture(const ScopedArchitecture&) = delete;
  ScopedArchitecture& operator=(const ScopedArchitecture&) = delete;

 private:
  const Driver& driver_;
};

// Says where the library of a name lies, and for the emulator's which compute capability it is to have under that name;
// it is opened at its first use. Saying the same again changes nothing; another path for a name that is in use throws.
void DeclareDriver(const std::string& name, const std::string& path, ImageKind image, Capability emulated = {});

// The driver of that name, opened if need be. Throws RuntimeFailure with the names that were declared.
Driver& FindDriver(std::string_view name);

}  // namespace jax_fa4

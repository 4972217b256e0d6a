// The part of the CUDA driver's binary interface that this package uses, in our own declarations, so that nothing of
// the CUDA toolkit is needed to build. Names without a prefix say what a thing is; the driver's own name stands beside
// it where it differs. Layouts and numbers are those of the driver API since CUDA 12.0, when the library functions
// came.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jax_fa4::driver_api {

using Result = int;  // CUresult
using Device = int;  // CUdevice
using DevicePointer = std::uint64_t;
struct ContextObject;
struct LibraryObject;
struct KernelObject;
struct FunctionObject;
struct StreamObject;
using Context = ContextObject*;
using Library = LibraryObject*;
using Kernel = KernelObject*;
using Function = FunctionObject*;
using Stream = StreamObject*;

inline constexpr Result kSuccess = 0;

// CUdevice_attribute
inline constexpr int kDeviceComputeCapabilityMajor = 75;
inline constexpr int kDeviceComputeCapabilityMinor = 76;

// CUfunction_attribute
inline constexpr int kFunctionMaxDynamicSharedBytes = 8;
inline constexpr int kFunctionNonPortableClusterAllowed = 14;

// CUlaunchAttributeID
inline constexpr int kLaunchClusterDimension = 4;
inline constexpr int kLaunchProgrammaticStreamSerialization = 6;

struct LaunchAttribute {  // CUlaunchAttribute
  int id;
  int padding;
  union {
    struct {
      unsigned x, y, z;
    } cluster;
    int programmatic_stream_serialization;
    std::uint64_t words[8];
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72 && offsetof(LaunchAttribute, value) == 8);

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3];
  unsigned block[3];
  unsigned dynamic_shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(offsetof(LaunchConfig, stream) == 32 && sizeof(LaunchConfig) == 56);

// CUtensorMap: opaque to the API's users, 128 bytes that the kernel takes by value.
struct alignas(64) TensorMapWords {
  std::uint64_t words[16];
};
static_assert(sizeof(TensorMapWords) == 128);

}  // namespace jax_fa4::driver_api

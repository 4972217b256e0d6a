// The types of the CUDA driver API, as far as the emulator exports it, and the list of what it exports. Source: CUDA
// Driver API reference (names, argument orders, values of constants).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "../machine/options.h"

#define EMULATOR_EXPORT extern "C" __attribute__((visibility("default")))

namespace jax_fa4::emulator {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using Handle = void*;  // CUcontext, CUmodule, CUlibrary, CUfunction, CUkernel, CUstream, CUevent

struct CUlaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int flag;
  } value;
};
struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  Handle stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
};
inline constexpr int kAttributeCluster = 4, kAttributeProgrammatic = 6;

// Runs `work`; turns what it throws into a result code and keeps the sentence for the user.
CUresult guarded(const std::function<void()>& work);
CUresult failure(Status status, const char* sentence);
// The exported function of this name, versions resolved; null if there is none.
void* exported(const char* name);

}  // namespace jax_fa4::emulator

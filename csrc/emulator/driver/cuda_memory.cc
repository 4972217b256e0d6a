// Driver API: memory, streams, events, tensor maps. Everything is complete when the call returns, so streams and events
// have no state beyond their time.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>

#include "../units/tensor_map.h"
#include "cuda_api.h"
#include "device.h"

namespace jax_fa4::emulator {
namespace {

Device& device() { return Device::get(); }

struct Event {
  std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now();
};

// Of a copy or fill, which waits for the kernels before it in its stream.
void check_range(CUdeviceptr address, size_t bytes, const char* what) {
  device().wait_for_kernels();
  if (bytes != 0 && device().memory.find(address, bytes).end == 0)
    throw Fault(Status::invalid_value, std::string(what) + ": " + std::to_string(bytes) +
                                           " bytes at this address do not lie in one allocation of the device");
}

void fill(CUdeviceptr address, const void* pattern, size_t element, size_t count) {
  check_range(address, element * count, "cuMemset");
  uint8_t* to = reinterpret_cast<uint8_t*>(address);
  for (size_t i = 0; i < count; i++) std::memcpy(to + i * element, pattern, element);
  device().memory.mark_written(address, element * count);
}

}  // namespace

EMULATOR_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  if (address == nullptr || bytes == 0)
    return failure(Status::invalid_value, "cuMemAlloc: the address is a null pointer or the size is 0");
  void* memory = device().memory.allocate(bytes);
  if (memory == nullptr) return failure(Status::out_of_memory, "cuMemAlloc: the host has no memory left");
  *address = reinterpret_cast<CUdeviceptr>(memory);
  return 0;
}
EMULATOR_EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
  device().wait_for_kernels();
  if (address == 0 || device().memory.release(reinterpret_cast<void*>(address))) return 0;
  return failure(Status::invalid_value, "cuMemFree: nothing was allocated at this address");
}
EMULATOR_EXPORT CUresult cuMemAllocAsync(CUdeviceptr* address, size_t bytes, Handle) {
  return cuMemAlloc_v2(address, bytes);
}
EMULATOR_EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, Handle) { return cuMemFree_v2(address); }
EMULATOR_EXPORT CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  if (address == nullptr) return failure(Status::invalid_value, "cuMemHostAlloc: address is a null pointer");
  *address = device().memory.allocate(bytes);
  if (*address != nullptr) device().memory.mark_written(reinterpret_cast<uint64_t>(*address), bytes);
  return *address == nullptr ? failure(Status::out_of_memory, "cuMemHostAlloc: the host has no memory left") : 0;
}
EMULATOR_EXPORT CUresult cuMemAllocHost_v2(void** address, size_t bytes) { return cuMemHostAlloc(address, bytes, 0); }
EMULATOR_EXPORT CUresult cuMemFreeHost(void* address) { return cuMemFree_v2(reinterpret_cast<CUdeviceptr>(address)); }

EMULATOR_EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  return guarded([&] {
    check_range(to, bytes, "cuMemcpyHtoD");
    if (bytes != 0) std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    device().memory.mark_written(to, bytes);
  });
}
EMULATOR_EXPORT CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  return guarded([&] {
    check_range(from, bytes, "cuMemcpyDtoH");
    if (bytes != 0) std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  });
}
EMULATOR_EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return guarded([&] {
    check_range(from, bytes, "cuMemcpyDtoD");
    check_range(to, bytes, "cuMemcpyDtoD");
    if (bytes != 0) std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    device().memory.mark_written(to, bytes);
  });
}
EMULATOR_EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  device().wait_for_kernels();
  if (bytes != 0) std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  device().memory.mark_written(to, bytes);
  return 0;
}
EMULATOR_EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, Handle) {
  return cuMemcpy(to, from, bytes);
}
EMULATOR_EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, Handle) {
  return cuMemcpyHtoD_v2(to, from, bytes);
}
EMULATOR_EXPORT CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, Handle) {
  return cuMemcpyDtoH_v2(to, from, bytes);
}
EMULATOR_EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, Handle) {
  return cuMemcpyDtoD_v2(to, from, bytes);
}

EMULATOR_EXPORT CUresult cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t count) {
  return guarded([&] { fill(address, &value, 1, count); });
}
EMULATOR_EXPORT CUresult cuMemsetD16_v2(CUdeviceptr address, unsigned short value, size_t count) {
  return guarded([&] { fill(address, &value, 2, count); });
}
EMULATOR_EXPORT CUresult cuMemsetD32_v2(CUdeviceptr address, unsigned value, size_t count) {
  return guarded([&] { fill(address, &value, 4, count); });
}
EMULATOR_EXPORT CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t count, Handle) {
  return cuMemsetD8_v2(address, value, count);
}
EMULATOR_EXPORT CUresult cuMemsetD16Async(CUdeviceptr address, unsigned short value, size_t count, Handle) {
  return cuMemsetD16_v2(address, value, count);
}
EMULATOR_EXPORT CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, Handle) {
  return cuMemsetD32_v2(address, value, count);
}

EMULATOR_EXPORT CUresult cuMemGetInfo_v2(size_t* available, size_t* total) {
  constexpr size_t kTotal = size_t{64} << 30;
  const size_t used = device().memory.allocated_bytes();
  if (available != nullptr) *available = used < kTotal ? kTotal - used : 0;
  if (total != nullptr) *total = kTotal;
  return 0;
}
EMULATOR_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr* begin, size_t* bytes, CUdeviceptr address) {
  const GlobalMemory::Range range = device().memory.find(address, 1);
  if (range.end == 0) return failure(Status::not_found, "cuMemGetAddressRange: nothing was allocated at this address");
  if (begin != nullptr) *begin = range.begin;
  if (bytes != nullptr) *bytes = range.end - range.begin;
  return 0;
}
// CU_POINTER_ATTRIBUTE_CONTEXT 1, MEMORY_TYPE 2 (device: 2), DEVICE_POINTER 3, HOST_POINTER 4, DEVICE_ORDINAL 9.
EMULATOR_EXPORT CUresult cuPointerGetAttribute(void* data, int attribute, CUdeviceptr address) {
  if (data == nullptr || device().memory.find(address, 1).end == 0)
    return failure(Status::invalid_value, "cuPointerGetAttribute: nothing was allocated at this address");
  switch (attribute) {
    case 2:
      *static_cast<unsigned*>(data) = 2;
      return 0;
    case 3:
    case 4:
      *static_cast<CUdeviceptr*>(data) = address;
      return 0;
    case 9:
      *static_cast<int*>(data) = 0;
      return 0;
    default:
      return failure(Status::not_supported, "cuPointerGetAttribute: the emulator does not know this attribute");
  }
}

// -------------------------------------------------------------------------------------------------- streams and events

EMULATOR_EXPORT CUresult cuStreamCreate(Handle* stream, unsigned) {
  if (stream == nullptr) return failure(Status::invalid_value, "cuStreamCreate: stream is a null pointer");
  *stream = new char;
  return 0;
}
EMULATOR_EXPORT CUresult cuStreamCreateWithPriority(Handle* stream, unsigned flags, int) {
  return cuStreamCreate(stream, flags);
}
EMULATOR_EXPORT CUresult cuStreamDestroy_v2(Handle stream) {
  delete static_cast<char*>(stream);
  return 0;
}
EMULATOR_EXPORT CUresult cuStreamSynchronize(Handle) {
  device().wait_for_kernels();
  return 0;
}
EMULATOR_EXPORT CUresult cuStreamQuery(Handle) { return 0; }
EMULATOR_EXPORT CUresult cuStreamWaitEvent(Handle, Handle, unsigned) { return 0; }
EMULATOR_EXPORT CUresult cuStreamIsCapturing(Handle, int* status) {
  if (status != nullptr) *status = 0;
  return 0;
}
EMULATOR_EXPORT CUresult cuLaunchHostFunc(Handle, void (*function)(void*), void* data) {
  if (function == nullptr) return failure(Status::invalid_value, "cuLaunchHostFunc: function is a null pointer");
  function(data);
  return 0;
}
EMULATOR_EXPORT CUresult cuEventCreate(Handle* event, unsigned) {
  if (event == nullptr) return failure(Status::invalid_value, "cuEventCreate: event is a null pointer");
  *event = new Event;
  return 0;
}
EMULATOR_EXPORT CUresult cuEventDestroy_v2(Handle event) {
  delete static_cast<Event*>(event);
  return 0;
}
EMULATOR_EXPORT CUresult cuEventRecord(Handle event, Handle) {
  if (event == nullptr) return failure(Status::invalid_handle, "cuEventRecord: event is a null pointer");
  static_cast<Event*>(event)->time = std::chrono::steady_clock::now();
  return 0;
}
EMULATOR_EXPORT CUresult cuEventSynchronize(Handle) { return cuStreamSynchronize(nullptr); }
EMULATOR_EXPORT CUresult cuEventQuery(Handle) { return 0; }
EMULATOR_EXPORT CUresult cuEventElapsedTime(float* milliseconds, Handle start, Handle end) {
  if (milliseconds == nullptr || start == nullptr || end == nullptr)
    return failure(Status::invalid_value, "cuEventElapsedTime: an argument is a null pointer");
  *milliseconds =
      std::chrono::duration<float, std::milli>(static_cast<Event*>(end)->time - static_cast<Event*>(start)->time)
          .count();
  return 0;
}
EMULATOR_EXPORT CUresult cuEventElapsedTime_v2(float* milliseconds, Handle start, Handle end) {
  return cuEventElapsedTime(milliseconds, start, end);
}

// -------------------------------------------------------------------------------------------------------- tensor maps

EMULATOR_EXPORT CUresult cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address,
                                                const uint64_t* extents, const uint64_t* strides, const uint32_t* box,
                                                const uint32_t* element_strides, int interleave, int swizzle,
                                                int promotion, int fill_mode) {
  if (map == nullptr || extents == nullptr || box == nullptr || element_strides == nullptr ||
      (rank > 1 && strides == nullptr))
    return failure(Status::invalid_value, "cuTensorMapEncodeTiled: an argument is a null pointer");
  if (rank < 1 || rank > 5) return failure(Status::invalid_value, "cuTensorMapEncodeTiled: the rank must be 1 to 5");
  if (type < 0 || type > 15 || interleave < 0 || interleave > 2 || swizzle < 0 || swizzle > 6 || promotion < 0 ||
      promotion > 3 || fill_mode < 0 || fill_mode > 1)
    return failure(Status::invalid_value,
                   "cuTensorMapEncodeTiled: the element type, interleave, swizzle, promotion or fill is out of range");
  return guarded([&] {
    TensorMap decoded;
    decoded.base = reinterpret_cast<uint64_t>(address);
    decoded.rank = static_cast<int>(rank);
    decoded.element = static_cast<Element>(type);
    decoded.interleave = static_cast<Interleave>(interleave);
    decoded.swizzle = static_cast<Swizzle>(swizzle);
    decoded.l2_promotion = static_cast<L2Promotion>(promotion);
    decoded.fill = static_cast<OutOfBoundsFill>(fill_mode);
    decoded.stride[0] = static_cast<uint64_t>(element_bytes(decoded.element));
    for (unsigned d = 0; d < rank; d++) {
      decoded.extent[d] = extents[d];
      decoded.box[d] = box[d];
      decoded.element_stride[d] = element_strides[d];
      if (d > 0) decoded.stride[d] = strides[d - 1];
    }
    const std::string problem = encode_tensor_map(decoded, map);
    if (!problem.empty()) throw Fault(Status::invalid_value, "cuTensorMapEncodeTiled: " + problem);
  });
}
EMULATOR_EXPORT CUresult cuTensorMapReplaceAddress(void* map, void* address) {
  if (map == nullptr || reinterpret_cast<uint64_t>(address) % 16 != 0)
    return failure(Status::invalid_value,
                   "cuTensorMapReplaceAddress: the map is a null pointer or the address is not aligned to 16 bytes");
  std::memcpy(map, &address, sizeof address);
  return 0;
}

}  // namespace jax_fa4::emulator

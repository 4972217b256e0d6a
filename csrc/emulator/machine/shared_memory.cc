// See shared_memory.h.
#include "shared_memory.h"

#include <algorithm>

namespace jax_fa4::emulator {
namespace {

constexpr uint32_t kWordBytes = 4;

}  // namespace

SharedMemory::SharedMemory(uint32_t bytes, bool track)
    : size_(bytes),
      track_(track),
      bytes_((bytes + 15u) / 16u * 16u + 16u, 0xff),
      record_(AccessRecord::Memory::shared, track ? bytes_.size() / kWordBytes : 0) {}

Conflict SharedMemory::Pass::touch_any(uint32_t offset, uint32_t bytes) {
  Conflict conflict;
  const uint32_t end = offset + bytes;
  for (uint32_t at = offset; at < end && conflict.kind == Conflict::Kind::none;) {
    const uint32_t word = at / kWordBytes;
    if (at % kWordBytes == 0 && end - at >= kWordBytes) {
      const uint32_t count = (end - at) / kWordBytes;
      conflict = words_.touch(word, count);
      at += count * kWordBytes;
      continue;
    }
    const uint32_t stop = std::min(end, (word + 1) * kWordBytes);
    const uint32_t mask =
        AccessRecord::kWhole << (at % kWordBytes) & AccessRecord::kWhole >> (kWordBytes - 1 - (stop - 1) % kWordBytes);
    conflict = words_.touch(word, 1, static_cast<uint8_t>(mask));
    at = stop;
  }
  conflict.offset *= kWordBytes;
  return conflict;
}

}  // namespace jax_fa4::emulator

// Shared memory of one CTA, with what is known of every 4-byte word: which bytes were ever written, who wrote last and
// through which proxy, and who read since. Every access goes through here, so races show where they happen.
#pragma once

#include <cstdint>
#include <vector>

#include "access_record.h"

namespace jax_fa4::emulator {

class SharedMemory {
 public:
  SharedMemory(uint32_t bytes, bool track);

  uint32_t size() const { return size_; }
  uint8_t* data() { return bytes_.data(); }
  bool contains(uint32_t offset, uint32_t bytes) const { return offset <= size_ && bytes <= size_ - offset; }

  // Records the accesses of one instruction or operation; the bytes must lie inside. The data themselves move by
  // data().
  class Pass {
   public:
    Pass(SharedMemory& memory, const Actor& actor, bool writes)
        : tracks_(memory.track_), words_(memory.record_, actor, writes) {}
    Conflict touch(uint32_t offset, uint32_t bytes) {
      if (!tracks_ || (bytes == 16 && offset % 4 == 0 && words_.touch_four_alike(offset / 4))) return {};
      return touch_any(offset, bytes);
    }

   private:
    Conflict touch_any(uint32_t offset, uint32_t bytes);

    const bool tracks_;
    AccessRecord::Pass words_;
  };

 private:
  uint32_t size_;
  bool track_;
  std::vector<uint8_t> bytes_;
  AccessRecord record_;
};

}  // namespace jax_fa4::emulator

// Shared memory of one CTA, with what is known of every 4-byte word: which bytes were ever written, who wrote last and
// through which proxy, and who read since. Every access goes through here, so races show where they happen.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "clock.h"

namespace jax_fa4::emulator {

// The tcgen05 work that a warp may follow: its own, and what a pair of tcgen05.fence ordered before.
struct TensorView {
  VectorClock fenced;
  Agent own[3] = {0, 0, 0};
  bool may_follow(const Stamp& other) const {
    return other.agent == own[0] || other.agent == own[1] || other.agent == own[2] ||
           fenced.at(other.agent) >= other.time;
  }
};

// Who accesses, and what that agent knows.
struct Actor {
  Stamp stamp;
  const Knowledge* knows = nullptr;
  bool asynchronous = false;           // TMA, bulk copies and tensor cores: the async proxy
  const TensorView* tensor = nullptr;  // null: not looked at
  bool strong = false;  // a load or store with an order, an atomic operation: does not race with its like
};

// A conflict, in words for a report: "a write by ... is not ordered before". Empty if there is none.
struct Conflict {
  enum class Kind : uint8_t {
    none,
    uninitialized,
    read_after_write,
    write_after_read,
    write_after_write,
    proxy,
    tensor_fence
  };
  Kind kind = Kind::none;
  uint32_t offset = 0;
  Stamp other;
};

class SharedMemory {
 public:
  SharedMemory(uint32_t bytes, bool track);

  uint32_t size() const { return size_; }
  uint8_t* data() { return bytes_.data(); }
  bool contains(uint32_t offset, uint32_t bytes) const { return offset <= size_ && bytes <= size_ - offset; }

  // Records an access; the bytes must lie inside. The data themselves move by data().
  Conflict read(uint32_t offset, uint32_t bytes, const Actor& actor);
  Conflict write(uint32_t offset, uint32_t bytes, const Actor& actor);
  void forget(uint32_t offset, uint32_t bytes);  // counts as never written

 private:
  struct Cell {
    uint32_t write_time = 0;
    uint32_t read_time = 0;
    uint16_t write_agent = 0;
    uint16_t read_agent = 0;
    uint8_t written = 0;         // bits of bytes
    uint8_t last_bytes = 0;      // bytes of the last write
    bool asynchronous = false;   // last write
    bool strong = false;         // last write
    uint8_t shared_readers = 0;  // index + 1 into readers_ would not fit: 1 if more_readers_ has the cell
  };
  Conflict read_cell(uint32_t index, uint8_t mask, const Actor& actor);
  Conflict write_cell(uint32_t index, uint8_t mask, const Actor& actor);

  uint32_t size_;
  bool track_;
  std::vector<uint8_t> bytes_;
  std::vector<Cell> cells_;
  std::vector<std::vector<Stamp>> more_readers_;  // by cell, made when a second agent reads
};

}  // namespace jax_fa4::emulator

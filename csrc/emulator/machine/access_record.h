// Who touched which word: the record behind the race checks of shared and of tensor memory. Words with the same history
// share it, so an access of many words is mostly a comparison and a copy of numbers; what an access makes of a history
// is worked out once and remembered.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
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

// Who accesses, and what that agent knows. An agent's knowledge grows only, and an asynchronous operation's is fixed.
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
  uint32_t offset = 0;  // of the word: its number, unless the memory says otherwise
  Stamp other;
};

class AccessRecord {
 public:
  // A word that holds several bytes is written and read by bits of a mask, one a byte.
  static constexpr uint8_t kWhole = 0xf;

  // Of shared memory writes may need a proxy fence, of tensor memory any work a tcgen05.fence.
  enum class Memory : uint8_t { shared, tensor };

  AccessRecord(Memory memory, size_t words) : memory_(memory), words_(words, 0), histories_(1) {}

  // One instruction's accesses, or one operation's: reads or writes by one actor. Keeps what it learnt of the last
  // word.
  class Pass {
   public:
    Pass(AccessRecord& record, const Actor& actor, bool writes) : record_(record), actor_(actor), writes_(writes) {}
    // Records an access of `count` words from `first` on, the bytes of `mask` of each.
    Conflict touch(uint32_t first, uint32_t count, uint8_t mask = kWhole);
    // The same of four whole words: true if they were in the state of the last ones, or have what that became.
    bool touch_four_alike(uint32_t first) {
      if (mask_ != kWhole || collections_ != record_.collections_) return false;
      uint32_t* words = record_.words_.data() + first;
      uint64_t pairs[2];
      std::memcpy(pairs, words, sizeof pairs);
      const uint64_t two_from = from_ * kTwice, two_to = to_ * kTwice;
      if (pairs[0] == two_from && pairs[1] == two_from) {
        pairs[0] = pairs[1] = two_to;
        std::memcpy(words, pairs, sizeof pairs);
        return true;
      }
      return pairs[0] == two_to && pairs[1] == two_to;
    }

   private:
    static constexpr uint64_t kTwice = 0x1'0000'0001;
    Conflict step(uint32_t index, uint8_t mask);

    AccessRecord& record_;
    const Actor& actor_;
    const bool writes_;
    // A word of history `from_` gets `to_`; so it does for another access of the bytes `mask_`.
    uint32_t from_ = kNone, to_ = kNone;
    uint8_t mask_ = 0;
    uint32_t collections_ = 0;  // of the record, when these numbers were learnt
  };

 private:
  static constexpr uint32_t kNone = 0xffffffffu;
  static constexpr size_t kRemembered = 1024;    // a power of two
  static constexpr size_t kFewHistories = 8192;  // before those that no word has are looked for

  // The accesses that a later one must be ordered after.
  struct History {
    Stamp writer;                // time 0: none
    std::vector<Stamp> readers;  // since the write; nothing orders them
    uint8_t written = 0;         // bytes
    uint8_t last_bytes = 0;      // of the last write
    bool asynchronous = false;   // the last write
    bool strong = false;         // the last write
  };
  // What an access made of a history.
  struct Step {
    uint32_t from = kNone, to = 0;
    Stamp stamp;
    uint32_t kind = 0;
  };

  Conflict conflict_of(const History& history, const Actor& actor, bool writes, uint8_t mask) const;
  Conflict missing_fence(const History& history, const Actor& actor, bool writes) const;
  uint32_t after(uint32_t id, const Actor& actor, bool writes, uint8_t mask);
  uint32_t add(History history);
  void collect();

  const Memory memory_;
  std::vector<uint32_t> words_;  // numbers of histories; 0: never touched
  std::vector<History> histories_;
  size_t most_histories_ = kFewHistories;
  uint32_t collections_ = 0;  // times that histories were renumbered
  std::array<Step, kRemembered> steps_;
};

}  // namespace jax_fa4::emulator

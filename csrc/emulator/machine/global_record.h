// What is known of global memory in one launch: for every 4 bytes that were touched, the accesses that a later one must
// be ordered after, whichever CTA made them. Pages of records are made when memory is first touched, so they cost four
// times what a kernel uses. CTAs on several host threads share a record.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "../ptx/program.h"
#include "clock.h"
#include "shared_memory.h"

namespace jax_fa4::emulator {

enum class AccessKind : uint8_t { read, write, reduce };

// One access of global memory. A strong one (an atomic operation, a reduction, a load or store with an order) does not
// race with other strong ones whose scope has both threads in it.
struct GlobalAccess {
  AccessKind kind = AccessKind::read;
  bool strong = false;
  bool asynchronous = false;
  bool repeats = false;  // writes what is there already: then an unordered write before it does no harm
  MemoryScope scope = MemoryScope::gpu;
  uint32_t line = 0;  // of the PTX
  uint32_t cta = 0;   // that issued it, numbered in the grid
  uint16_t warp = 0;
  uint64_t cluster = 0;
  Stamp stamp;
};

struct GlobalConflict {
  Conflict::Kind kind = Conflict::Kind::none;
  uint64_t address = 0;
  bool earlier = false;  // with a kernel that was launched before
  GlobalAccess other;
};

class GlobalRecord {
 public:
  // `earlier`: of the kernel before on the stream, if this one need not wait for its end; else null.
  explicit GlobalRecord(std::shared_ptr<const GlobalRecord> earlier);
  ~GlobalRecord();

  // A page covers 4 KiB.
  static constexpr uint64_t kPageBytes = 4096;
  struct Page;
  // The accesses of 4 bytes that matter for later ones. `more` names a set of further ones that nothing orders.
  struct Word {
    uint32_t writer = 0;
    uint32_t reader = 0;
    uint32_t more = 0;
    uint8_t written_bytes = 0;
    uint8_t read_bytes = 0;
    uint16_t unused = 0;
    bool is(const Word& other) const {
      uint64_t mine[2], others[2];
      std::memcpy(mine, this, sizeof mine);
      std::memcpy(others, &other, sizeof others);
      return mine[0] == others[0] && mine[1] == others[1];
    }
  };

  // What one host thread remembers: the pages and the access that it used last, and comparisons that it need not make
  // again.
  class View {
   public:
    explicit View(GlobalRecord& record) : record_(record), known_(kKnown), joins_(kKnown) {}
    // Records an access of bytes; what it conflicts with.
    GlobalConflict record(const GlobalAccess& access, const Knowledge& knows, uint64_t address, uint64_t bytes);

   private:
    friend class GlobalRecord;
    static constexpr size_t kPages = 256;
    Page* page(uint64_t number);
    uint32_t id_of(const GlobalAccess& access);
    uint32_t new_id(const GlobalAccess& access);

    GlobalRecord& record_;
    std::array<std::pair<uint64_t, Page*>, kPages> pages_{};
    // Accesses that have a number: warps that poll in turn make the same ones over and over. And what joining an access
    // to a set gave. Entries are found by a hash, and overwritten.
    static constexpr size_t kKnown = 1024;
    struct Known {
      GlobalAccess access;
      uint32_t id = 0;  // 0: none
    };
    struct Join {
      uint32_t set = 0, access = 0, joined = 0;  // access 0: none
    };
    uint32_t joined(uint32_t set, uint32_t access);
    std::vector<Known> known_;
    std::vector<Join> joins_;
    uint32_t last_id_ = 0, next_id_ = 0, ids_left_ = 0;
    // Of the current access: one that was found to be ordered before it, and a set of such.
    // And what the last whole word was, and became: others are mostly the same.
    static constexpr uint32_t kNoWord = ~0u;
    Word met_{.writer = kNoWord}, left_{.writer = kNoWord};
    uint32_t ordered_ = 0, passed_set_ = 0;
  };

  // Forgets what was recorded of the kernel before: one that comes after is checked against this one alone.
  void end() { earlier_.reset(); }
  // Touched so far.
  size_t pages() const {
    std::shared_lock lock(pages_mutex_);
    return pages_.size();
  }

 private:
  static constexpr uint32_t kChunk = 4096, kChunks = 1 << 16;
  static constexpr size_t kMostInSet = 16;

  bool touched(uint64_t address, bool by_write) const;
  const GlobalAccess& access(uint32_t id) const { return chunks_[id / kChunk].load()[id % kChunk]; }
  // The set with one more access.
  uint32_t joined(uint32_t set, uint32_t id);
  std::vector<uint32_t> members(uint32_t set) const;
  uint32_t set_of(std::vector<uint32_t> members);

  std::shared_ptr<const GlobalRecord> earlier_;
  mutable std::shared_mutex pages_mutex_;
  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;
  std::mutex accesses_mutex_;
  uint32_t accesses_ = 1;  // 0: none
  std::unique_ptr<std::atomic<GlobalAccess*>[]> chunks_ = std::make_unique<std::atomic<GlobalAccess*>[]>(kChunks);
  mutable std::mutex sets_mutex_;
  std::vector<std::vector<uint32_t>> sets_{{}};
  struct Hash {
    size_t operator()(const std::vector<uint32_t>& set) const;
  };
  std::unordered_map<std::vector<uint32_t>, uint32_t, Hash> set_ids_;
};

}  // namespace jax_fa4::emulator

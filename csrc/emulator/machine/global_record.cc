// See global_record.h.
#include "global_record.h"

#include <algorithm>

namespace jax_fa4::emulator {
namespace {

constexpr uint64_t kWordBytes = 4;
constexpr uint8_t kWholeWord = 0xf;
constexpr uint32_t kIdsAtATime = 64;  // that a host thread takes for itself; divides a chunk

bool writes(const GlobalAccess& access) { return access.kind != AccessKind::read; }

bool same_thread_group(const GlobalAccess& a, const GlobalAccess& b) {
  return a.cluster == b.cluster && a.stamp.agent == b.stamp.agent;
}

// Both are strong, and each one's scope has the other in it.
bool are_compatible(const GlobalAccess& a, const GlobalAccess& b) {
  if (!a.strong || !b.strong) return false;
  const MemoryScope least = std::min(a.scope, b.scope);
  return least == MemoryScope::gpu || (least == MemoryScope::cluster && a.cluster == b.cluster) || a.cta == b.cta;
}

uint32_t known(const GlobalAccess& other, const GlobalAccess& access, const Knowledge& knows, bool fenced) {
  if (other.cluster == access.cluster) return (fenced ? knows.fenced_global : knows.happened).at(other.stamp.agent);
  if (knows.elsewhere == nullptr) return 0;
  const Elsewhere::Clocks* clocks = knows.elsewhere->find(other.cluster);
  if (clocks == nullptr) return 0;
  return (fenced ? clocks->fenced : clocks->happened).at(other.stamp.agent);
}

bool is_ordered(const GlobalAccess& other, const GlobalAccess& access, const Knowledge& knows) {
  return same_thread_group(other, access) || known(other, access, knows, false) >= other.stamp.time;
}

Conflict::Kind kind_of(const GlobalAccess& other, const GlobalAccess& access) {
  if (!writes(access)) return Conflict::Kind::read_after_write;
  return writes(other) ? Conflict::Kind::write_after_write : Conflict::Kind::write_after_read;
}

// What is wrong with `access` after `other`, of the same bytes.
Conflict::Kind conflict_between(const GlobalAccess& other, const GlobalAccess& access, const Knowledge& knows) {
  if (!writes(other) && !writes(access)) return Conflict::Kind::none;
  if (are_compatible(other, access)) return Conflict::Kind::none;
  if (!is_ordered(other, access, knows)) return kind_of(other, access);
  // What threads wrote must be fenced before the asynchronous proxy reads it, or adds to it.
  const bool crosses = access.asynchronous && !other.asynchronous && writes(other) && access.kind != AccessKind::write;
  if (crosses && known(other, access, knows, true) < other.stamp.time) return Conflict::Kind::proxy;
  return Conflict::Kind::none;
}

}  // namespace

struct GlobalRecord::Page {
  std::atomic_flag busy;
  std::array<Word, kPageBytes / kWordBytes> words;
};

GlobalRecord::GlobalRecord(std::shared_ptr<const GlobalRecord> earlier) : earlier_(std::move(earlier)) {}

GlobalRecord::~GlobalRecord() {
  for (uint32_t i = 0; i < kChunks; i++) delete[] chunks_[i].load();
}

size_t GlobalRecord::Hash::operator()(const std::vector<uint32_t>& set) const {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const uint32_t one : set) hash = (hash ^ one) * 0x100000001b3u;
  return hash;
}

std::vector<uint32_t> GlobalRecord::members(uint32_t set) const {
  std::lock_guard lock(sets_mutex_);
  return sets_[set];
}

uint32_t GlobalRecord::set_of(std::vector<uint32_t> members) {
  if (members.empty()) return 0;
  std::lock_guard lock(sets_mutex_);
  const auto [entry, fresh] = set_ids_.try_emplace(members, static_cast<uint32_t>(sets_.size()));
  if (fresh) sets_.push_back(std::move(members));
  return entry->second;
}

// Reads beyond the most are forgotten, oldest first: a race with one of those may pass unseen.
uint32_t GlobalRecord::joined(uint32_t set, uint32_t id) {
  std::vector<uint32_t> all = members(set);
  if (std::find(all.begin(), all.end(), id) != all.end()) return set;
  if (all.size() >= kMostInSet) all.erase(all.begin());
  all.push_back(id);
  return set_of(std::move(all));
}

bool GlobalRecord::touched(uint64_t address, bool by_write) const {
  std::shared_lock lock(pages_mutex_);
  const auto found = pages_.find(address / kPageBytes);
  if (found == pages_.end()) return false;
  const Word& word = found->second->words[address % kPageBytes / kWordBytes];
  return word.writer != 0 || (!by_write && word.reader != 0);
}

GlobalRecord::Page* GlobalRecord::View::page(uint64_t number) {
  auto& slot = pages_[number % kPages];
  if (slot.second != nullptr && slot.first == number) return slot.second;
  Page* found = nullptr;
  {
    std::shared_lock lock(record_.pages_mutex_);
    const auto place = record_.pages_.find(number);
    if (place != record_.pages_.end()) found = place->second.get();
  }
  if (found == nullptr) {
    std::unique_lock lock(record_.pages_mutex_);
    std::unique_ptr<Page>& fresh = record_.pages_[number];
    if (fresh == nullptr) fresh = std::make_unique<Page>();
    found = fresh.get();
  }
  slot = {number, found};
  return found;
}

uint32_t GlobalRecord::View::id_of(const GlobalAccess& access) {
  const auto same = [](const GlobalAccess& a, const GlobalAccess& b) {
    return a.stamp.time == b.stamp.time && a.stamp.agent == b.stamp.agent && a.line == b.line &&
           a.cluster == b.cluster && a.kind == b.kind && a.strong == b.strong && a.asynchronous == b.asynchronous &&
           a.repeats == b.repeats;
  };
  Known& known =
      known_[(access.stamp.time * 31 + access.stamp.agent * 131 + access.line * 7 + access.cluster * 1009) % kKnown];
  if (known.id != 0 && known.id == last_id_ && same(access, known.access)) return last_id_;
  ordered_ = passed_set_ = 0;
  met_ = left_ = {.writer = kNoWord};
  if (known.id == 0 || !same(access, known.access)) known = {access, new_id(access)};
  last_id_ = known.id;
  return last_id_;
}

uint32_t GlobalRecord::View::new_id(const GlobalAccess& access) {
  if (ids_left_ == 0) {
    std::lock_guard lock(record_.accesses_mutex_);
    next_id_ = (record_.accesses_ + kIdsAtATime - 1) / kIdsAtATime * kIdsAtATime;
    if (next_id_ / kChunk >= kChunks) throw std::bad_alloc();
    record_.accesses_ = next_id_ + kIdsAtATime;
    ids_left_ = kIdsAtATime;
    std::atomic<GlobalAccess*>& chunk = record_.chunks_[next_id_ / kChunk];
    if (chunk.load() == nullptr) chunk.store(new GlobalAccess[kChunk]);
  }
  ids_left_--;
  const uint32_t id = next_id_++;
  record_.chunks_[id / kChunk].load()[id % kChunk] = access;
  return id;
}

uint32_t GlobalRecord::View::joined(uint32_t set, uint32_t access) {
  Join& known = joins_[(set * 31 + access) % kKnown];
  if (known.access != access || known.set != set) known = {set, access, record_.joined(set, access)};
  return known.joined;
}

GlobalConflict GlobalRecord::View::record(const GlobalAccess& access, const Knowledge& knows, uint64_t address,
                                          uint64_t bytes) {
  const uint32_t id = id_of(access);
  const bool is_write = writes(access);
  const bool may_overlap = record_.earlier_ != nullptr && knows.happened.at(kEarlierKernels) == 0;
  GlobalConflict conflict;
  const auto found = [&](uint64_t at, uint32_t other) {
    const GlobalAccess& before = record_.access(other);
    const Conflict::Kind kind = conflict_between(before, access, knows);
    if (kind == Conflict::Kind::none) return false;
    if (kind == Conflict::Kind::write_after_write && access.repeats) return false;
    conflict = {kind, at, false, before};
    return true;
  };
  const auto dominated = [&](uint32_t other) {
    if (other == ordered_) return true;
    if (!is_ordered(record_.access(other), access, knows)) return false;
    ordered_ = other;
    return true;
  };
  uint32_t checked_writer = 0, checked_reader = 0;  // fine with this access
  const uint64_t end = address + bytes;
  for (uint64_t at = address / kWordBytes * kWordBytes; at < end;) {
    Page* page = this->page(at / kPageBytes);
    const uint64_t page_end = std::min(end, (at / kPageBytes + 1) * kPageBytes);
    while (page->busy.test_and_set(std::memory_order_acquire)) {
    }
    for (; at < page_end && conflict.kind == Conflict::Kind::none; at += kWordBytes) {
      uint8_t mask = kWholeWord;
      if (at < address) mask &= static_cast<uint8_t>(kWholeWord << (address - at));
      if (at + kWordBytes > end) mask &= static_cast<uint8_t>(kWholeWord >> (at + kWordBytes - end));
      Word& word = page->words[at % kPageBytes / kWordBytes];
      if (mask == kWholeWord && (word.is(left_) || word.is(met_))) {
        // And those that follow, up to the last, which may not be whole.
        for (Word* next = &word; at + kWordBytes <= page_end; at += kWordBytes, next++) {
          if (next->is(left_)) continue;
          if (!next->is(met_)) break;
          *next = left_;
        }
        at -= kWordBytes;
        continue;
      }
      const Word before = word;
      if (may_overlap && record_.earlier_->touched(at, !is_write)) {
        conflict = {is_write ? Conflict::Kind::write_after_write : Conflict::Kind::read_after_write, at, true, {}};
        break;
      }
      if (word.writer != 0 && word.writer != checked_writer && (word.written_bytes & mask) != 0) {
        if (found(at, word.writer)) break;
        checked_writer = word.writer;
      }
      if (is_write && word.reader != 0 && word.reader != checked_reader && (word.read_bytes & mask) != 0) {
        if (found(at, word.reader)) break;
        checked_reader = word.reader;
      }
      if (word.more != 0 && word.more != passed_set_ && mask == kWholeWord) {
        for (const uint32_t other : record_.members(word.more))
          if (found(at, other)) break;
        if (conflict.kind != Conflict::Kind::none) break;
        passed_set_ = word.more;
      }
      // The old access of this kind goes, or stays among the others if this one is not after it.
      uint32_t& place = is_write ? word.writer : word.reader;
      if (place != 0 && place != id && mask == kWholeWord && !dominated(place)) {
        word.more = joined(word.more, place);
      }
      place = id;
      (is_write ? word.written_bytes : word.read_bytes) = mask;
      if (is_write && !access.strong) {  // all others are before it
        word.reader = word.more = 0;
      }
      if (mask == kWholeWord && !may_overlap) {
        met_ = before;
        left_ = word;
      }
    }
    page->busy.clear(std::memory_order_release);
    if (conflict.kind != Conflict::Kind::none) break;
  }
  return conflict;
}

}  // namespace jax_fa4::emulator

// See access_record.h.
#include "access_record.h"

#include <algorithm>

namespace jax_fa4::emulator {

Conflict AccessRecord::conflict_of(const History& history, const Actor& actor, bool writes, uint8_t mask) const {
  const VectorClock& happened = actor.knows->happened;
  const Stamp& writer = history.writer;
  const auto unordered = [&](const Stamp& one) {
    return one.agent != actor.stamp.agent && happened.at(one.agent) < one.time;
  };
  if (!writes && (history.written & mask) != mask) return {Conflict::Kind::uninitialized, 0, {}};
  if (writer.time != 0 && (history.last_bytes & mask) != 0 && !(history.strong && actor.strong) && unordered(writer))
    return {writes ? Conflict::Kind::write_after_write : Conflict::Kind::read_after_write, 0, writer};
  if (writes)
    for (const Stamp& reader : history.readers)
      if (unordered(reader)) return {Conflict::Kind::write_after_read, 0, reader};
  return missing_fence(history, actor, writes);
}

// What is ordered may still need a fence.
Conflict AccessRecord::missing_fence(const History& history, const Actor& actor, bool writes) const {
  const Stamp& writer = history.writer;
  if (memory_ == Memory::shared) {
    const bool crosses = !writes && writer.time != 0 && actor.asynchronous && !history.asynchronous;
    if (crosses && actor.knows->fenced.at(writer.agent) < writer.time) return {Conflict::Kind::proxy, 0, writer};
    return {};
  }
  if (actor.tensor == nullptr) return {};
  if (writer.time != 0 && !actor.tensor->may_follow(writer)) return {Conflict::Kind::tensor_fence, 0, writer};
  if (writes)
    for (const Stamp& reader : history.readers)
      if (!actor.tensor->may_follow(reader)) return {Conflict::Kind::tensor_fence, 0, reader};
  return {};
}

// The number of the history that a conflict-free access leaves: the old one's if it changes nothing.
uint32_t AccessRecord::after(uint32_t id, const Actor& actor, bool writes, uint8_t mask) {
  const History& old = histories_[id];
  const auto is_actor = [&](const Stamp& one) {
    return one.agent == actor.stamp.agent && one.time == actor.stamp.time;
  };
  History fresh;
  if (writes) {
    const bool same_kind = old.asynchronous == actor.asynchronous && old.strong == actor.strong;
    if (is_actor(old.writer) && same_kind && old.last_bytes == mask && old.readers.empty()) return id;
    fresh.writer = actor.stamp;
    fresh.written = old.written | mask;
    fresh.last_bytes = mask;
    fresh.asynchronous = actor.asynchronous;
    fresh.strong = actor.strong;
    return add(std::move(fresh));
  }
  if (actor.strong) return id;  // a write that follows is strong too, or comes after a flag
  if (std::any_of(old.readers.begin(), old.readers.end(), is_actor)) return id;
  fresh.writer = old.writer;
  fresh.written = old.written;
  fresh.last_bytes = old.last_bytes;
  fresh.asynchronous = old.asynchronous;
  fresh.strong = old.strong;
  fresh.readers.reserve(old.readers.size() + 1);
  // Readers that this one comes after need not be remembered: who is ordered after it is ordered after them.
  const VectorClock& happened = actor.knows->happened;
  for (const Stamp& one : old.readers)
    if (one.agent != actor.stamp.agent && happened.at(one.agent) < one.time) fresh.readers.push_back(one);
  fresh.readers.push_back(actor.stamp);
  return add(std::move(fresh));
}

uint32_t AccessRecord::add(History history) {
  histories_.push_back(std::move(history));
  return static_cast<uint32_t>(histories_.size() - 1);
}

// Forgets the histories that no word has any more.
void AccessRecord::collect() {
  std::vector<uint32_t> renamed(histories_.size(), kNone);
  std::vector<History> kept(1);
  renamed[0] = 0;
  for (uint32_t& word : words_) {
    uint32_t& name = renamed[word];
    if (name == kNone) {
      name = static_cast<uint32_t>(kept.size());
      kept.push_back(std::move(histories_[word]));
    }
    word = name;
  }
  histories_ = std::move(kept);
  most_histories_ = std::max(kFewHistories, 2 * histories_.size());
  steps_.fill({});
  collections_++;
}

Conflict AccessRecord::Pass::step(uint32_t index, uint8_t mask) {
  AccessRecord& record = record_;
  if (record.histories_.size() >= record.most_histories_) record.collect();
  const uint32_t from = record.words_[index];
  const Stamp& stamp = actor_.stamp;
  const uint32_t kind = mask | (writes_ ? 16u : 0) | (actor_.strong ? 32u : 0) | (actor_.asynchronous ? 64u : 0);
  Step& known = record.steps_[(from * 7 + stamp.agent * 131 + stamp.time * 31 + kind) % kRemembered];
  if (known.from != from || known.stamp.agent != stamp.agent || known.stamp.time != stamp.time || known.kind != kind) {
    const Conflict conflict = record.conflict_of(record.histories_[from], actor_, writes_, mask);
    if (conflict.kind != Conflict::Kind::none) return {conflict.kind, index, conflict.other};
    known = {from, record.after(from, actor_, writes_, mask), stamp, kind};
  }
  from_ = from;
  to_ = known.to;
  mask_ = mask;
  collections_ = record.collections_;
  record.words_[index] = to_;
  return {};
}

Conflict AccessRecord::Pass::touch(uint32_t first, uint32_t count, uint8_t mask) {
  uint32_t* words = record_.words_.data();
  if (mask != mask_ || collections_ != record_.collections_) from_ = to_ = kNone;
  uint32_t index = first;
  const uint32_t end = first + count;
  while (index < end) {
    if (mask == kWhole)
      while (index + 4 <= end && touch_four_alike(index)) index += 4;
    // One word by itself: it may bring the next ones into step again.
    for (const uint32_t stop = std::min(end, index + 4); index < stop; index++) {
      if (words[index] == to_) continue;
      if (words[index] == from_) {
        words[index] = to_;
        continue;
      }
      const Conflict conflict = step(index, mask);
      if (conflict.kind != Conflict::Kind::none) return conflict;
    }
  }
  return {};
}

}  // namespace jax_fa4::emulator

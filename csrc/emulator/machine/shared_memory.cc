// See shared_memory.h.
#include "shared_memory.h"

#include <algorithm>

namespace jax_fa4::emulator {

SharedMemory::SharedMemory(uint32_t bytes, bool track)
    : size_(bytes), track_(track), bytes_((bytes + 15u) / 16u * 16u + 16u, 0xff) {
  if (track_) cells_.resize(bytes_.size() / 4);
}

Conflict SharedMemory::read_cell(uint32_t index, uint8_t mask, const Actor& actor) {
  Cell& cell = cells_[index];
  const VectorClock& happened = actor.knows->happened;
  const Stamp writer{cell.write_agent, cell.write_time};
  if ((cell.written & mask) != mask) return {Conflict::Kind::uninitialized, index * 4, {}};
  if (cell.write_time != 0 && writer.agent != actor.stamp.agent && (cell.last_bytes & mask) != 0 &&
      !(cell.strong && actor.strong)) {
    if (happened.at(writer.agent) < writer.time) return {Conflict::Kind::read_after_write, index * 4, writer};
  }
  if (cell.write_time != 0 && actor.asynchronous && !cell.asynchronous &&
      actor.knows->fenced.at(writer.agent) < writer.time)
    return {Conflict::Kind::proxy, index * 4, writer};
  if (actor.strong) return {};  // a write that follows is strong too, or comes after a flag
  if (cell.read_time == 0 || cell.read_agent == actor.stamp.agent || happened.at(cell.read_agent) >= cell.read_time) {
    // The former reader is known to be done, or it is the same one.
    cell.read_agent = static_cast<uint16_t>(actor.stamp.agent);
    cell.read_time = actor.stamp.time;
    return {};
  }
  if (more_readers_.empty()) more_readers_.resize(cells_.size());
  std::vector<Stamp>& readers = more_readers_[index];
  const auto same =
      std::find_if(readers.begin(), readers.end(), [&](const Stamp& one) { return one.agent == actor.stamp.agent; });
  if (same != readers.end())
    same->time = actor.stamp.time;
  else
    readers.push_back(actor.stamp);
  cell.shared_readers = 1;
  return {};
}

Conflict SharedMemory::write_cell(uint32_t index, uint8_t mask, const Actor& actor) {
  Cell& cell = cells_[index];
  const VectorClock& happened = actor.knows->happened;
  Conflict conflict;
  const Stamp writer{cell.write_agent, cell.write_time}, reader{cell.read_agent, cell.read_time};
  if (writer.time != 0 && writer.agent != actor.stamp.agent && (cell.last_bytes & mask) != 0 &&
      !(cell.strong && actor.strong) && happened.at(writer.agent) < writer.time)
    conflict = {Conflict::Kind::write_after_write, index * 4, writer};
  else if (reader.time != 0 && reader.agent != actor.stamp.agent && happened.at(reader.agent) < reader.time)
    conflict = {Conflict::Kind::write_after_read, index * 4, reader};
  if (cell.shared_readers != 0) {
    for (const Stamp& one : more_readers_[index])
      if (one.agent != actor.stamp.agent && happened.at(one.agent) < one.time && conflict.kind == Conflict::Kind::none)
        conflict = {Conflict::Kind::write_after_read, index * 4, one};
    more_readers_[index].clear();
    cell.shared_readers = 0;
  }
  cell.write_agent = static_cast<uint16_t>(actor.stamp.agent);
  cell.write_time = actor.stamp.time;
  cell.last_bytes = mask;
  cell.written |= mask;
  cell.asynchronous = actor.asynchronous;
  cell.strong = actor.strong;
  cell.read_time = 0;
  return conflict;
}

Conflict SharedMemory::read(uint32_t offset, uint32_t bytes, const Actor& actor) {
  if (!track_) return {};
  const uint32_t end = offset + bytes;
  for (uint32_t index = offset / 4; index * 4 < end; index++) {
    uint8_t mask = 0xf;
    if (index * 4 < offset) mask &= static_cast<uint8_t>(0xf << (offset - index * 4));
    if (index * 4 + 4 > end) mask &= static_cast<uint8_t>(0xf >> (index * 4 + 4 - end));
    const Conflict conflict = read_cell(index, mask, actor);
    if (conflict.kind != Conflict::Kind::none) return conflict;
  }
  return {};
}

Conflict SharedMemory::write(uint32_t offset, uint32_t bytes, const Actor& actor) {
  Conflict first;
  if (!track_) return first;
  const uint32_t end = offset + bytes;
  for (uint32_t index = offset / 4; index * 4 < end; index++) {
    uint8_t mask = 0xf;
    if (index * 4 < offset) mask &= static_cast<uint8_t>(0xf << (offset - index * 4));
    if (index * 4 + 4 > end) mask &= static_cast<uint8_t>(0xf >> (index * 4 + 4 - end));
    const Conflict conflict = write_cell(index, mask, actor);
    if (first.kind == Conflict::Kind::none) first = conflict;
  }
  return first;
}

void SharedMemory::forget(uint32_t offset, uint32_t bytes) {
  if (!track_) return;
  for (uint32_t index = offset / 4; index * 4 < offset + bytes; index++) cells_[index].written = 0;
}

}  // namespace jax_fa4::emulator

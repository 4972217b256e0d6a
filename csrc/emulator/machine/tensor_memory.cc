// See tensor_memory.h.
#include "tensor_memory.h"

namespace jax_fa4::emulator {

TensorMemory::TensorMemory(bool track) : tracked_(track), cells_(kTensorLanes * kTensorColumns, 0x7fffffffu) {
  if (track) track_.resize(kPieces * kTensorColumns);
}

int TensorMemory::allocate(int columns) {
  for (int first = 0; first + columns <= kTensorColumns; first += columns) {
    bool is_free = true;
    for (int i = first; i < first + columns; i++) is_free = is_free && owner_[static_cast<size_t>(i)] == 0;
    if (!is_free) continue;
    for (int i = first; i < first + columns; i++) owner_[static_cast<size_t>(i)] = static_cast<int16_t>(first + 1);
    return first;
  }
  return -1;
}

bool TensorMemory::release(int column, int columns) {
  if (column < 0 || columns <= 0 || column + columns > kTensorColumns) return false;
  for (int i = column; i < column + columns; i++)
    if (owner_[static_cast<size_t>(i)] != column + 1) return false;
  if (column + columns < kTensorColumns && owner_[static_cast<size_t>(column + columns)] == column + 1) return false;
  for (int i = column; i < column + columns; i++) owner_[static_cast<size_t>(i)] = 0;
  return true;
}

bool TensorMemory::allocated(int column, int columns) const {
  if (column < 0 || column + columns > kTensorColumns) return false;
  for (int i = column; i < column + columns; i++)
    if (owner_[static_cast<size_t>(i)] == 0) return false;
  return true;
}

int TensorMemory::allocated_columns() const {
  int count = 0;
  for (const int16_t owner : owner_) count += owner != 0;
  return count;
}

Conflict TensorMemory::read(int first_piece, int pieces, int column, int columns, const Actor& actor) {
  if (!tracked_) return {};
  const VectorClock& happened = actor.knows->happened;
  for (int piece = first_piece; piece < first_piece + pieces; piece++)
    for (int at = column; at < column + columns; at++) {
      Cell& one = cell(piece, at);
      const uint32_t place = static_cast<uint32_t>(piece << 16 | at);
      if (!one.written) return {Conflict::Kind::uninitialized, place, {}};
      if (one.writer.agent != actor.stamp.agent && happened.at(one.writer.agent) < one.writer.time)
        return {Conflict::Kind::read_after_write, place, one.writer};
      if (actor.tensor != nullptr && one.writer.time != 0 && !actor.tensor->may_follow(one.writer))
        return {Conflict::Kind::tensor_fence, place, one.writer};
      one.reader = actor.stamp;
    }
  return {};
}

Conflict TensorMemory::write(int first_piece, int pieces, int column, int columns, const Actor& actor) {
  Conflict first;
  if (!tracked_) return first;
  const VectorClock& happened = actor.knows->happened;
  for (int piece = first_piece; piece < first_piece + pieces; piece++)
    for (int at = column; at < column + columns; at++) {
      Cell& one = cell(piece, at);
      const uint32_t place = static_cast<uint32_t>(piece << 16 | at);
      if (first.kind == Conflict::Kind::none) {
        if (one.writer.time != 0 && one.writer.agent != actor.stamp.agent &&
            happened.at(one.writer.agent) < one.writer.time)
          first = {Conflict::Kind::write_after_write, place, one.writer};
        else if (one.reader.time != 0 && one.reader.agent != actor.stamp.agent &&
                 happened.at(one.reader.agent) < one.reader.time)
          first = {Conflict::Kind::write_after_read, place, one.reader};
        else if (actor.tensor != nullptr && one.writer.time != 0 && !actor.tensor->may_follow(one.writer))
          first = {Conflict::Kind::tensor_fence, place, one.writer};
        else if (actor.tensor != nullptr && one.reader.time != 0 && !actor.tensor->may_follow(one.reader))
          first = {Conflict::Kind::tensor_fence, place, one.reader};
      }
      one.writer = actor.stamp;
      one.reader = {};
      one.written = true;
    }
  return first;
}

}  // namespace jax_fa4::emulator

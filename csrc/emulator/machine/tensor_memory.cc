// See tensor_memory.h.
#include "tensor_memory.h"

namespace jax_fa4::emulator {
namespace {

constexpr int kPieces = kTensorLanes / 16;

}  // namespace

TensorMemory::TensorMemory(bool track)
    : tracked_(track),
      cells_(kTensorLanes * kTensorColumns, 0x7fffffffu),
      record_(AccessRecord::Memory::tensor, track ? kPieces * kTensorColumns : 0) {}

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

Conflict TensorMemory::touch(int first_piece, int pieces, int column, int columns, const Actor& actor, bool writes) {
  if (!tracked_) return {};
  AccessRecord::Pass pass(record_, actor, writes);
  for (int piece = first_piece; piece < first_piece + pieces; piece++) {
    Conflict conflict =
        pass.touch(static_cast<uint32_t>(piece * kTensorColumns + column), static_cast<uint32_t>(columns));
    if (conflict.kind == Conflict::Kind::none) continue;
    conflict.offset = static_cast<uint32_t>(piece << 16) | conflict.offset % kTensorColumns;
    return conflict;
  }
  return {};
}

}  // namespace jax_fa4::emulator

// From an address in a lane to the byte it names: state spaces, windows, bounds, alignment.
#pragma once

#include "cta.h"
#include "global_record.h"

namespace jax_fa4::emulator {

struct Place {
  uint8_t* data = nullptr;
  Cta* owner = nullptr;  // of shared memory; null: another space
  uint32_t offset = 0;   // in shared memory
  bool is_global = false;
};

// The place of `bytes` at `address` as `lane` sees it. Throws a Fault that names the lane for a bad one. `align` 0: not
// checked.
Place resolve(Warp& warp, Space space, uint64_t address, uint32_t bytes, uint32_t align, int lane, bool writes);

// The shared memory at an address of the shared window (any CTA of the cluster). `what` names the operand.
struct SharedPlace {
  Cta* cta = nullptr;
  uint32_t offset = 0;
};
SharedPlace resolve_shared(Warp& warp, uint64_t address, uint32_t bytes, const char* what);

// Global memory for asynchronous copies; checks the range and, for reads, that it was written. The bytes are counted if
// `counts`.
uint8_t* resolve_global(Cta& cta, uint64_t address, uint64_t bytes, bool writes, const char* what, bool counts = true);

// Whether these bytes are global memory that may be written, or read: then of something that was written, and no
// parameters.
bool global_is_plain(Cta& cta, uint64_t address, uint64_t bytes, bool writes);

// An access of global memory by an instruction of a warp, stamped with the warp's own time or an operation's.
GlobalAccess global_access(const Warp& warp, const Instruction& i, AccessKind kind, Stamp stamp);
// Records an access of global memory and reports a conflict. `knows`: what its agent knows.
void record_global(Cta& cta, const GlobalAccess& access, const Knowledge& knows, uint64_t address, uint64_t bytes,
                   const char* what);

// What a warp's own loads and stores are for the record.
inline Actor actor_of(const Warp& warp) { return {warp.stamp(), &warp.knows, false}; }

}  // namespace jax_fa4::emulator

// Sentences: where something is, who did it, what conflicts with what.
#pragma once

#include <string>

#include "cta.h"
#include "global_record.h"

namespace jax_fa4::emulator {

// "0x1400 (shared offset 4096 behind __dynamic_shmem__0)"
std::string shared_name(const Cta& cta, uint32_t offset);
std::string hex(uint64_t value);
std::string cta_name(const Cta& cta);
// "PTX line 12: add.s32 %r1, %r2, %r3"
std::string line_text(const std::string& source, uint32_t line);

// Throws a Fault that tells of the conflict.
[[noreturn]] void report_shared_conflict(const Cta& cta, const Conflict& conflict, const Actor& actor,
                                         const char* what);
[[noreturn]] void report_tensor_conflict(const Cta& cta, const Conflict& conflict, const Actor& actor,
                                         const char* what);

[[noreturn]] void report_global_conflict(const Grid& grid, const GlobalConflict& conflict, const GlobalAccess& access,
                                         const char* what);

// Where every warp of the cluster waits.
std::string waiting_warps(const Cluster& cluster, const std::string& source);

}  // namespace jax_fa4::emulator

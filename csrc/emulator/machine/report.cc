// See report.h.
#include "report.h"

#include <cstdio>

#include "grid.h"

namespace jax_fa4::emulator {

std::string hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

std::string shared_name(const Cta& cta, uint32_t offset) {
  std::string name = hex(offset);
  const Variable* best = nullptr;
  for (const Variable& variable : cta.grid().program.symbols)
    if (variable.space == Space::shared && kReservedShared + variable.offset <= offset &&
        (best == nullptr || variable.offset >= best->offset))
      best = &variable;
  if (best != nullptr)
    name += " (" + best->name + " + " + std::to_string(offset - kReservedShared - best->offset) + ")";
  return name;
}

std::string cta_name(const Cta& cta) {
  return "CTA (" + std::to_string(cta.index.x) + ", " + std::to_string(cta.index.y) + ", " +
         std::to_string(cta.index.z) + ")";
}

std::string line_text(const std::string& source, uint32_t line) {
  size_t at = 0;
  for (uint32_t i = 1; i < line && at != std::string::npos; i++) {
    at = source.find('\n', at);
    if (at != std::string::npos) at++;
  }
  std::string text = "PTX line " + std::to_string(line);
  if (at == std::string::npos) return text;
  const size_t start = source.find_first_not_of(" \t", at);
  const size_t end = source.find('\n', at);
  if (start == std::string::npos || (end != std::string::npos && start >= end)) return text;
  std::string code =
      source.substr(start, std::min<size_t>(end == std::string::npos ? source.size() - start : end - start, 160));
  for (char& c : code)
    if (c == '\t') c = ' ';
  return text + ": " + code;
}

namespace {

std::string conflict_text(const Cluster& cluster, const Conflict& conflict, const Actor& actor,
                          const std::string& place, const char* what) {
  const std::string me = cluster.agent_name(actor.stamp.agent);
  const std::string other = cluster.agent_name(conflict.other.agent);
  switch (conflict.kind) {
    case Conflict::Kind::uninitialized:
      return std::string(what) + " by " + me + " reads " + place + ", which was never written";
    case Conflict::Kind::read_after_write:
      return std::string(what) + " by " + me + " reads " + place + ", but nothing orders it after the write by " +
             other;
    case Conflict::Kind::write_after_read:
      return std::string(what) + " by " + me + " writes " + place + ", but nothing orders it after the read by " +
             other;
    case Conflict::Kind::write_after_write:
      return std::string(what) + " by " + me + " writes " + place + ", but nothing orders it after the write by " +
             other;
    case Conflict::Kind::proxy:
      return std::string(what) + " by " + me + " reads " + place +
             " through the asynchronous proxy, but no fence.proxy.async lies between it and the write by " + other;
    case Conflict::Kind::tensor_fence:
      return std::string(what) + " by " + me + " touches " + place +
             ", but no tcgen05.fence::before_thread_sync and tcgen05.fence::after_thread_sync order it after what " +
             other + " did there";
    case Conflict::Kind::none:
      break;
  }
  return what;
}

}  // namespace

void report_shared_conflict(const Cta& cta, const Conflict& conflict, const Actor& actor, const char* what) {
  throw Fault(Status::launch_failed,
              conflict_text(cta.cluster, conflict, actor,
                            "shared memory of " + cta_name(cta) + " at " + shared_name(cta, conflict.offset), what));
}

void report_tensor_conflict(const Cta& cta, const Conflict& conflict, const Actor& actor, const char* what) {
  const uint32_t lane = (conflict.offset >> 16) * 16, column = conflict.offset & 0xffff;
  const std::string place = "tensor memory of " + cta_name(cta) + " at lanes " + std::to_string(lane) + " to " +
                            std::to_string(lane + 15) + ", column " + std::to_string(column);
  throw Fault(Status::launch_failed, conflict_text(cta.cluster, conflict, actor, place, what));
}

namespace {

std::string access_text(const Grid& grid, const GlobalAccess& access) {
  const Dim3 size = grid.shape.grid;
  return "warp " + std::to_string(access.warp) + " of CTA (" + std::to_string(access.cta % size.x) + ", " +
         std::to_string(access.cta / size.x % size.y) + ", " + std::to_string(access.cta / size.x / size.y) +
         ") in PTX line " + std::to_string(access.line);
}

}  // namespace

void report_global_conflict(const Grid& grid, const GlobalConflict& conflict, const GlobalAccess& access,
                            const char* what) {
  const GlobalMemory::Range range = grid.memory.find(conflict.address, 1);
  std::string text = std::string(what) + " by " + access_text(grid, access) +
                     (access.kind == AccessKind::read ? " reads" : " writes") + " global memory at " +
                     hex(conflict.address) + " (byte " + std::to_string(conflict.address - range.begin) +
                     " of its allocation)";
  if (conflict.earlier)
    text +=
        ", which the kernel before it in the stream touched, and no griddepcontrol.wait comes before: the launch "
        "allows them to overlap";
  else if (conflict.kind == Conflict::Kind::proxy)
    text +=
        " through the asynchronous proxy, but no fence.proxy.async of global memory lies between it and the write by " +
        access_text(grid, conflict.other);
  else
    text += std::string(", but nothing orders it after the ") +
            (conflict.other.kind == AccessKind::read ? "read" : "write") + " by " + access_text(grid, conflict.other);
  throw Fault(Status::launch_failed, text);
}

namespace {

std::string arrival_name(const Arrival& arrival) {
  if (arrival.line == 0) return "none";
  const std::string line = "PTX line " + std::to_string(arrival.line);
  if (arrival.warp == nullptr) return std::string(arrival.operation) + " of " + line;
  return "warp " + std::to_string(arrival.warp->index) + " of " + cta_name(arrival.warp->cta) + " in " + line;
}

std::string wait_text(const Warp& warp, const Group& group, const std::string& source) {
  const Instruction& i = warp.cta.grid().program.code[static_cast<size_t>(group.pc)];
  std::string text = "  " + cta_name(warp.cta) + " warp " + std::to_string(warp.index) + " lanes " + hex(group.lanes) +
                     " wait for " + wait_name(group.wait.kind);
  if (group.wait.kind == Wait::Kind::mbarrier) {
    const uint32_t offset = static_cast<uint32_t>(group.wait.object);
    text += " at " + shared_name(warp.cta, offset);
    const auto found = warp.cta.mbarriers.find(offset);
    if (found != warp.cta.mbarriers.end()) {
      const MemoryBarrier& b = found->second;
      text += ": phase " + std::to_string(b.phase) + " (parity " + std::to_string(b.phase & 1) + ") is open with " +
              std::to_string(b.pending) + " of " + std::to_string(b.expected) + " arrivals and " +
              std::to_string(b.bytes) + " bytes to come; last arrival: " + arrival_name(b.last_arrival);
    }
  } else if (group.wait.kind == Wait::Kind::barrier) {
    const NamedBarrier& b = warp.cta.barriers[group.wait.object & 15];
    text += " " + std::to_string(group.wait.object) + ": " + std::to_string(b.arrived) + " of " +
            std::to_string(b.expected) + " threads arrived, the first in PTX line " + std::to_string(b.line);
  } else if (group.wait.kind == Wait::Kind::reconvergence) {
    text += " " + hex(group.wait.object);
  }
  return text + "; " + line_text(source, i.line) + "\n";
}

}  // namespace

std::string waiting_warps(const Cluster& cluster, const std::string& source) {
  std::string text;
  for (const auto& cta : cluster.ctas)
    for (const auto& warp : cta->warps) {
      if (warp->current.lanes != 0) text += wait_text(*warp, warp->current, source);
      for (const Group& group : warp->others) text += wait_text(*warp, group, source);
    }
  return text;
}

}  // namespace jax_fa4::emulator

// Counts of a launch as JSON. Instructions are grouped by warp (a role is a set of warps) and by the innermost loop
// that holds them: a loop is what lies between a label and the last branch back to it.
#include <map>

#include "device.h"

namespace jax_fa4::emulator {
namespace {

struct Loop {
  size_t first;
  size_t last;
};

std::vector<Loop> loops_of(const Program& program) {
  std::map<size_t, size_t> last;  // by first
  for (size_t pc = 0; pc < program.code.size(); pc++) {
    const int32_t target = program.code[pc].kind == Class::branch ? program.code[pc].target : -1;
    if (target >= 0 && static_cast<size_t>(target) <= pc)
      last[static_cast<size_t>(target)] = std::max(last[static_cast<size_t>(target)], pc);
  }
  std::vector<Loop> loops;
  for (const auto& [first, end] : last) loops.push_back({first, end});
  return loops;
}

// Index of the smallest loop around each instruction, or -1.
std::vector<int> innermost(const Program& program, const std::vector<Loop>& loops) {
  std::vector<int> inner(program.code.size(), -1);
  for (size_t i = 0; i < loops.size(); i++)
    for (size_t pc = loops[i].first; pc <= loops[i].last; pc++) {
      const int old = inner[pc];
      if (old < 0 ||
          loops[static_cast<size_t>(old)].last - loops[static_cast<size_t>(old)].first > loops[i].last - loops[i].first)
        inner[pc] = static_cast<int>(i);
    }
  return inner;
}

std::string number(const char* name, uint64_t value) {
  return std::string("\"") + name + "\": " + std::to_string(value);
}
std::string triple(const char* name, const uint32_t* value) {
  return std::string("\"") + name + "\": [" + std::to_string(value[0]) + ", " + std::to_string(value[1]) + ", " +
         std::to_string(value[2]) + "]";
}

// One region (a loop, or the code outside of loops) of one warp.
std::string region_json(const uint64_t* by_class, uint64_t waited, size_t warp, const std::string& lines) {
  std::string text =
      "{" + number("warp", warp) + ", \"lines\": " + lines + ", " + number("waits", waited) + ", \"instructions\": {";
  bool first = true;
  for (int kind = 0; kind < kClasses; kind++) {
    if (by_class[kind] == 0) continue;
    text += (first ? "" : ", ") + number(class_name(static_cast<Class>(kind)), by_class[kind]);
    first = false;
  }
  return text + "}}";
}

std::string regions_json(const Statistics& counts, const Program& program) {
  const std::vector<Loop> loops = loops_of(program);
  const std::vector<int> inner = innermost(program, loops);
  const size_t size = program.code.size(), warps = size == 0 ? 0 : counts.executed.size() / size;
  struct Region {
    uint64_t by_class[kClasses] = {}, waited = 0;
    bool executed = false;
  };
  std::string text;
  for (size_t warp = 0; warp < warps; warp++) {
    std::vector<Region> regions(loops.size() + 1);  // the first: outside of loops
    for (size_t pc = 0; pc < size; pc++) {
      const uint64_t count = counts.executed[warp * size + pc];
      Region& region = regions[static_cast<size_t>(inner[pc] + 1)];
      region.by_class[static_cast<int>(program.code[pc].kind)] += count;
      region.waited += counts.waited[warp * size + pc];
      region.executed = region.executed || count != 0;
    }
    for (size_t region = 0; region < regions.size(); region++) {
      if (!regions[region].executed) continue;
      std::string lines = "null";
      if (region > 0) {
        const Loop& loop = loops[region - 1];
        lines = "[" + std::to_string(program.code[loop.first].line) + ", " +
                std::to_string(program.code[loop.last].line) + "]";
      }
      text +=
          (text.empty() ? "" : ",\n  ") + region_json(regions[region].by_class, regions[region].waited, warp, lines);
    }
  }
  return text;
}

}  // namespace

std::string statistics_json(const Statistics& counts, const Program& program) {
  std::string text = "{\"kernel\": \"" + counts.kernel + "\", " + triple("grid", counts.grid) + ", " +
                     triple("block", counts.block) + ", " + triple("cluster", counts.cluster);
  text += ", " + number("warp_instructions", counts.warp_instructions) + ", " +
          number("asynchronous_events", counts.events);
  text += ", \"seconds\": " + std::to_string(counts.seconds) +
          ", \"cpu_seconds\": " + std::to_string(counts.cpu_seconds) + ", " +
          number("multiply_adds", counts.multiply_adds) + ", " + number("bank_conflicts", counts.bank_conflicts);
  text += ",\n \"bytes\": {" + number("global_read", counts.global_read) + ", " +
          number("global_written", counts.global_written) + ", " + number("shared_read", counts.shared_read) + ", " +
          number("shared_written", counts.shared_written) + ", " + number("tensor_copy_in", counts.tensor_copy_in) +
          ", " + number("tensor_copy_out", counts.tensor_copy_out) + ", " + number("bulk_in", counts.bulk_in) + ", " +
          number("bulk_out", counts.bulk_out) + ", " + number("peer", counts.peer) + ", " +
          number("matrix_shared_read", counts.matrix_shared_read) + ", " +
          number("tensor_memory_read", counts.tensor_memory_read) + ", " +
          number("tensor_memory_written", counts.tensor_memory_written) + "}";
  return text + ",\n \"regions\": [" + regions_json(counts, program) + "]}";
}

}  // namespace jax_fa4::emulator

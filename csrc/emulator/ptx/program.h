// What the machine executes: instructions with operands as slots of the register file and a handler to call. No text is
// looked at once a program is decoded.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../units/formats.h"
#include "../units/lanes.h"
#include "syntax.h"

namespace jax_fa4::emulator {

class Warp;
struct Instruction;

// What a handler did. `blocked`: nothing, the lanes wait at this instruction; `jumped`: the handler moved the lanes
// itself.
enum class Flow : uint8_t { next, jumped, blocked };

// `lanes` are the active lanes for which the guard holds.
using Handler = Flow (*)(Warp&, const Instruction&, uint32_t lanes);
// Computes all 32 lanes. A 64-bit value is two planes of 32 words, low words first; `out` never overlaps the sources.
using LaneFunction = void (*)(uint32_t* out, const uint32_t* a, const uint32_t* b, const uint32_t* c,
                              const Instruction&);
// Bit i of the result is the comparison of lane i.
using CompareFunction = uint32_t (*)(const uint32_t* a, const uint32_t* b, const Instruction&);

enum class Type : uint8_t {
  none,
  pred,
  b8,
  u8,
  s8,
  b16,
  u16,
  s16,
  b32,
  u32,
  s32,
  b64,
  u64,
  s64,
  b128,
  f16,
  f16x2,
  bf16,
  bf16x2,
  tf32,
  f32,
  f32x2,
  f64
};
constexpr int type_bits(Type type) {
  switch (type) {
    case Type::none:
      return 0;
    case Type::pred:
      return 1;
    case Type::b8:
    case Type::u8:
    case Type::s8:
      return 8;
    case Type::b16:
    case Type::u16:
    case Type::s16:
    case Type::f16:
    case Type::bf16:
      return 16;
    case Type::b64:
    case Type::u64:
    case Type::s64:
    case Type::f64:
    case Type::f32x2:
      return 64;
    case Type::b128:
      return 128;
    default:
      return 32;
  }
}

constexpr bool is_signed(Type type) {
  return type == Type::s8 || type == Type::s16 || type == Type::s32 || type == Type::s64;
}
constexpr bool is_float(Type type) { return type >= Type::f16; }

// Where an operand lives: a register slot (>= 0) or a constant of the program (~index).
using Slot = int32_t;

// Classes of instructions that statistics tell apart.
enum class Class : uint8_t {
  arithmetic,
  special_function,
  conversion,
  compare,
  move,
  branch,
  shuffle,
  load_global,
  store_global,
  load_shared,
  store_shared,
  load_other,
  atomic,
  barrier,
  mbarrier_arrive,
  mbarrier_wait,
  fence,
  bulk_copy,
  bulk_wait,
  matrix,
  matrix_control,
  tensor_load,
  tensor_store,
  other
};
inline constexpr int kClasses = static_cast<int>(Class::other) + 1;
const char* class_name(Class value);

enum class MemoryOrder : uint8_t { weak, relaxed, acquire, release, acquire_release };

// The threads between which an operation orders; sys is gpu, since the emulated system has one device. Source: PTX ISA,
// "Scope".
enum class MemoryScope : uint8_t { cta, cluster, gpu };
inline constexpr int kScopes = 3;

// How an instruction treats registers that were never written: it needs written ones, or its result is as unwritten as
// all that it reads, as the same plane of each source (moves, packed pairs), or as the source that it chooses.
enum class Definedness : uint8_t { needed, passed_on, by_plane, chosen };

// An address operand besides the first one.
struct MemoryOperand {
  Slot base = 0;
  bool wide = false;
  int64_t offset = 0;
};

struct Instruction {
  Handler handler = nullptr;
  union {
    LaneFunction lane_function = nullptr;
    CompareFunction compare;
  };
  uint32_t line = 0;
  int32_t guard = -1;
  bool guard_negated = false;
  Class kind = Class::other;
  Type type = Type::none;
  Type source_type = Type::none;
  Rounding rounding = Rounding::nearest_even;
  bool flush = false;
  bool saturate = false;
  Space space = Space::generic;
  MemoryOrder order = MemoryOrder::weak;
  MemoryScope scope = MemoryScope::gpu;
  bool wide_address = false;  // the base is a 64-bit register
  uint8_t out_slots = 1;      // planes that lane_function writes
  uint8_t vector = 1;         // elements of a vector load or store
  uint8_t mode = 0;           // the operation's own variants
  uint8_t flags = 0;          // the operation's own options, bits
  uint8_t cta_group = 1;
  Definedness definedness = Definedness::needed;
  // Program::uses from `uses` on: slots that are read, and written, then predicates that are read, and written.
  uint32_t uses = 0;
  uint16_t register_reads = 0, register_writes = 0;
  uint8_t predicate_reads = 0, predicate_writes = 0;
  uint8_t type_code_a = 0, type_code_b = 0;  // Format of matrix operands
  // d: destination; a, b, c, e: sources. predicate slots: p destination or source, q second.
  Slot d = 0, a = 0, b = 0, c = 0, e = 0;
  int32_t p = -1, q = -1;
  bool p_negated = false;
  int32_t target = -1;  // instruction of a branch
  uint32_t list = 0;    // first of `list_count` slots in Program::lists: vectors of registers, coordinates
  uint32_t list_count = 0;
  int64_t offset = 0;  // added to the address in `a`
  MemoryOperand second, third;
  uint64_t immediate = 0;
};

// A register that is written once, when a warp starts.
struct Preset {
  enum class Kind : uint8_t {
    tid_x,
    tid_y,
    tid_z,
    ntid_x,
    ntid_y,
    ntid_z,
    ctaid_x,
    ctaid_y,
    ctaid_z,
    nctaid_x,
    nctaid_y,
    nctaid_z,
    laneid,
    warpid,
    nwarpid,
    smid,
    nsmid,
    gridid,
    lanemask_eq,
    lanemask_le,
    lanemask_lt,
    lanemask_ge,
    lanemask_gt,
    clusterid_x,
    clusterid_y,
    clusterid_z,
    nclusterid_x,
    nclusterid_y,
    nclusterid_z,
    cluster_ctaid_x,
    cluster_ctaid_y,
    cluster_ctaid_z,
    cluster_nctaid_x,
    cluster_nctaid_y,
    cluster_nctaid_z,
    cluster_ctarank,
    cluster_nctarank,
    is_explicit_cluster,
    dynamic_smem_size,
    total_smem_size,
    reserved_smem_begin,
    reserved_smem_end,
    reserved_smem_cap,
    shared_symbol,
    global_symbol,
    param_symbol,
    local_symbol
  };
  Kind kind;
  uint32_t slot;
  uint8_t slots;    // 1 or 2
  uint32_t symbol;  // of *_symbol
  int64_t offset;
};

struct Program {
  std::string name;
  std::vector<Instruction> code;
  std::vector<Slot> lists;
  std::vector<uint32_t> uses;
  std::vector<uint32_t> constants;  // 32 equal words each
  std::vector<Preset> presets;
  std::vector<Variable> symbols;
  std::vector<Variable> params;
  std::vector<std::vector<int32_t>> branch_tables;
  uint32_t register_slots = 0;
  uint32_t predicates = 0;
  uint32_t param_bytes = 0;
  uint32_t local_bytes = 0;
  uint32_t static_shared_bytes = 0;
  uint32_t required_block[3] = {0, 0, 0};
  uint32_t max_threads = 0;
  uint32_t required_cluster[3] = {0, 0, 0};
  int target = 0;
};

struct Module {
  std::string source;
  std::string target_name;
  int target = 0;
  std::vector<std::unique_ptr<Program>> programs;
  std::vector<Variable> variables;
};

// Parses and decodes. Throws PtxError, also for an instruction that the emulator does not know.
std::unique_ptr<Module> load_module(std::string source);

}  // namespace jax_fa4::emulator

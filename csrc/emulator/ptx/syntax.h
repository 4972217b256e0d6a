// A PTX module as read: variables, entries, and statements whose registers, labels and symbols are resolved.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace jax_fa4::emulator {

// State spaces that variables and memory instructions name.
enum class Space : uint8_t { generic, global, shared, shared_cluster, local, constant, param };

// A register of a function. Predicates are numbered on their own; other registers by 32-bit slots (a 64-bit register
// takes two consecutive ones, low half first).
struct Register {
  bool is_predicate = false;
  uint8_t slots = 1;
  uint8_t bits = 32;
  uint32_t index = 0;
};

struct Argument {
  enum class Kind : uint8_t {
    sink,       // _
    register_,  // reg
    predicate,  // reg; `negated` for !p
    integer,    // bits (two's complement)
    real32,     // bits
    real64,     // bits
    special,    // name: %tid.x and the like
    symbol,     // variable of the module or a parameter: symbol index, offset
    name,       // a word that names nothing known: a label or an option
    vector,     // items
    address,  // items[0] is the base (register, symbol or integer), `offset` its byte offset; items[1..] coordinates of
              // a tensor
    pair,     // d|p: items[0], items[1]
  };
  Kind kind = Kind::sink;
  bool negated = false;
  Register reg;
  uint32_t symbol = 0;
  uint64_t bits = 0;
  int64_t offset = 0;
  std::string_view name;
  std::vector<Argument> items;
};

struct Statement {
  int line = 0;
  std::string_view opcode;
  int32_t guard = -1;  // predicate index; -1: none
  bool guard_negated = false;
  int32_t target = -1;  // statement index of a branch's label
  std::vector<Argument> arguments;
  std::vector<int32_t> targets;  // brx.idx: statement indices of the .branchtargets list
};

struct Variable {
  std::string name;
  Space space = Space::global;
  uint64_t bytes = 0;
  uint32_t align = 1;
  bool dynamic = false;          // extern .shared x[]: lies behind the static variables
  uint64_t offset = 0;           // within its space (entry parameters: within the parameter block)
  std::vector<uint8_t> initial;  // shorter than `bytes`: the rest is zero
};

struct Entry {
  std::string name;
  int line = 0;
  std::vector<Variable> params;
  uint32_t param_bytes = 0;
  uint32_t required_block[3] = {0, 0, 0};    // .reqntid; 0: not given
  uint32_t max_threads = 0;                  // .maxntid product; 0: not given
  uint32_t required_cluster[3] = {0, 0, 0};  // .reqnctapercluster
  uint32_t register_slots = 0;
  uint32_t predicates = 0;
  uint32_t local_bytes = 0;          // of one thread
  uint32_t static_shared_bytes = 0;  // where dynamic shared memory starts
  std::vector<Statement> statements;
  std::vector<Variable>
      symbols;  // what Argument::symbol indexes: module variables first, then parameters and local ones
};

struct ModuleSyntax {
  int target = 0;  // 90 for sm_90a
  std::string target_name;
  std::vector<Variable> variables;
  std::vector<Entry> entries;
};

}  // namespace jax_fa4::emulator

// Names inside a function: registers and labels of nested scopes. Inline assembly opens a scope with `{`; what it
// declares there is its own, what it declares outside of braces belongs to the function.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "syntax.h"

namespace jax_fa4::emulator {

class Scopes {
 public:
  Scopes(Entry& entry) : entry_(entry) { open(); }

  void open();
  // Resolves the branches that name labels of the scope; the others wait for the parent.
  void close(int line);
  size_t depth() const { return scopes_.size(); }

  // `count` 0 declares one register `name`; otherwise name0 .. name(count-1).
  void declare(std::string_view name, uint32_t count, std::string_view type, int line);
  // A vector of 2 or 4 registers: `name` names all of them, name.x, .y, .z and .w (or .r, .g, .b, .a) each.
  void declare_vector(std::string_view name, uint32_t count, std::string_view type, int line);
  const Register* find(std::string_view name);
  // The registers of a vector; none for another name.
  std::vector<Register> find_vector(std::string_view name) const;

  void label(std::string_view name, int line);
  void branch_targets(std::string_view name, std::vector<std::string_view> labels, int line);
  // The statement at the end of entry.statements jumps to `name` (or through the list of that name).
  void jump(std::string_view name);

 private:
  struct Range {
    Register first;
    uint32_t count;
  };
  struct Jump {
    size_t statement;
    std::string_view name;
  };
  struct Scope {
    std::unordered_map<std::string_view, Register> registers;
    std::unordered_map<std::string_view, Range> ranges;
    std::unordered_map<std::string_view, Range> vectors;
    std::unordered_map<std::string_view, int32_t> labels;
    std::unordered_map<std::string_view, std::vector<std::string_view>> lists;
    std::vector<Jump> jumps;
  };
  const Register* find_component(std::string_view name);
  bool resolve(const Scope& scope, const Jump& jump);

  Entry& entry_;
  std::vector<Scope> scopes_;
  Register found_;
};

}  // namespace jax_fa4::emulator

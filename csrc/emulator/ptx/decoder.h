// One statement on its way to an Instruction: its modifiers, which must all be understood, and its operands.
#pragma once

#include <initializer_list>
#include <string_view>
#include <unordered_map>

#include "program.h"
#include "token.h"

namespace jax_fa4::emulator {

class Decoder {
 public:
  Decoder(Program& program) : program_(program) {}

  // Decodes into a fresh instruction. Throws PtxError.
  Instruction decode(const Statement& statement);

  Instruction out;

  [[noreturn]] void fail(const std::string& message) const;
  int line() const { return statement_->line; }
  std::string_view mnemonic() const { return mnemonic_; }
  Program& program() { return program_; }
  const Statement& statement() const { return *statement_; }

  // ------------------------------------------------------------------------------------------------------ modifiers
  bool take(std::string_view modifier);  // removes the first that is equal
  // Removes the one of `choices` that is there; its index, or -1 for none.
  int take_any(std::initializer_list<std::string_view> choices);
  int take_one(std::initializer_list<std::string_view> choices, const char* what);  // fails for none
  std::string_view next();  // removes and gives the first modifier; empty if none is left
  std::string_view peek() const;
  Type take_type();  // first modifier that names a type; fails for none
  Type take_type_or(Type fallback);
  void take_rounding();    // .rn .rz .rm .rp .rna into out.rounding
  void take_arithmetic();  // rounding, .ftz, .sat
  void take_scope();       // .cta .cluster .gpu .sys into out.scope
  Space take_space();
  int take_cta_group();

  // ------------------------------------------------------------------------------------------------------- operands
  size_t count() const { return statement_->arguments.size(); }
  const Argument& argument(size_t index) const;
  void expect_count(size_t low, size_t high) const;
  Slot source(size_t index, Type type) { return source(argument(index), type); }
  Slot source(const Argument& argument, Type type);
  Slot destination(size_t index, Type type) { return destination(argument(index), type); }
  Slot destination(const Argument& argument, Type type);
  int32_t predicate(const Argument& argument, bool* negated);  // negated null: a destination; -1 for `_`
  uint64_t immediate(size_t index) const;
  bool is_immediate(size_t index) const { return argument(index).kind == Argument::Kind::integer; }
  // The base into out.a / wide_address, its offset into out.offset.
  void address(size_t index);
  // A base for a second address: its slot (low 32 bits count), the offset apart.
  Slot address_slot(const Argument& argument, int64_t* offset);
  MemoryOperand memory_operand(size_t index);
  // A source of cvt, st and shfl: a register that may be wider than the type.
  Slot relaxed_source(size_t index, Type type) { return relaxed_source(argument(index), type); }
  Slot relaxed_source(const Argument& argument, Type type);
  // Appends slots of a vector (or single) operand to the list; first call sets out.list.
  void list_sources(const Argument& argument, Type type);
  void list_destinations(const Argument& argument, Type type);
  // The same for st and ld, whose registers may be wider than the type: what is loaded is then extended. Sets out_slots
  // to the planes of a register, and flags to whether 8 and 16 bits are extended to 32.
  void list_stored(const Argument& argument, Type type);
  void list_loaded(const Argument& argument, Type type);
  Slot constant32(uint32_t value);
  Slot constant64(uint64_t value);
  int32_t carry_predicate();             // the condition code of add.cc and friends
  void predicate_logic(size_t sources);  // and.pred d, a, b: p = op(q, target)
  Slot scratch(int slots);               // a register of its own, for results that are thrown away

 private:
  void split(std::string_view opcode);
  Slot preset(Preset::Kind kind, uint32_t symbol, int64_t offset, int slots);
  Slot special(const Argument& argument, int slots);
  Slot symbol(const Argument& argument, int slots);
  Slot real(const Argument& argument, Type type);
  void append(Slot slot);
  void note(std::vector<uint32_t>& uses, uint32_t first, int slots);
  void record_uses();

  Program& program_;
  const Statement* statement_ = nullptr;
  std::string_view mnemonic_;
  std::vector<std::string_view> modifiers_;
  std::unordered_map<uint64_t, Slot> constants_;
  Slot sink_[5] = {-1, -1, -1, -1, -1};
  // Of the statement: slots and predicates.
  std::vector<uint32_t> reads_, writes_, predicate_reads_, predicate_writes_;
  bool has_list_ = false;
  int32_t carry_ = -1;
};

int slots_of(Type type);
Type type_of(std::string_view word);  // Type::none for a word that is no type

using Decode = void (*)(Decoder&);
using DecodeTable = std::unordered_map<std::string_view, Decode>;
// By mnemonic (the word before the first dot).
void decode_store_async(Decoder& d);  // st.async and red.async, what follows .async
void add_arithmetic(DecodeTable& table);
void add_conversion(DecodeTable& table);
void add_memory(DecodeTable& table);
void add_control(DecodeTable& table);
void add_asynchronous(DecodeTable& table);
void add_matrix(DecodeTable& table);

}  // namespace jax_fa4::emulator

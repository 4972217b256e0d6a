// See decoder.h.
#include "decoder.h"

#include <algorithm>
#include <bit>

#include "../machine/handlers.h"
#include "parser.h"

namespace jax_fa4::emulator {
namespace {

struct SpecialName {
  std::string_view name;
  Preset::Kind kind;
};
using K = Preset::Kind;
constexpr SpecialName kSpecials[] = {{"%tid.x", K::tid_x},
                                     {"%tid.y", K::tid_y},
                                     {"%tid.z", K::tid_z},
                                     {"%ntid.x", K::ntid_x},
                                     {"%ntid.y", K::ntid_y},
                                     {"%ntid.z", K::ntid_z},
                                     {"%ctaid.x", K::ctaid_x},
                                     {"%ctaid.y", K::ctaid_y},
                                     {"%ctaid.z", K::ctaid_z},
                                     {"%nctaid.x", K::nctaid_x},
                                     {"%nctaid.y", K::nctaid_y},
                                     {"%nctaid.z", K::nctaid_z},
                                     {"%laneid", K::laneid},
                                     {"%warpid", K::warpid},
                                     {"%nwarpid", K::nwarpid},
                                     {"%smid", K::smid},
                                     {"%nsmid", K::nsmid},
                                     {"%gridid", K::gridid},
                                     {"%lanemask_eq", K::lanemask_eq},
                                     {"%lanemask_le", K::lanemask_le},
                                     {"%lanemask_lt", K::lanemask_lt},
                                     {"%lanemask_ge", K::lanemask_ge},
                                     {"%lanemask_gt", K::lanemask_gt},
                                     {"%clusterid.x", K::clusterid_x},
                                     {"%clusterid.y", K::clusterid_y},
                                     {"%clusterid.z", K::clusterid_z},
                                     {"%nclusterid.x", K::nclusterid_x},
                                     {"%nclusterid.y", K::nclusterid_y},
                                     {"%nclusterid.z", K::nclusterid_z},
                                     {"%cluster_ctaid.x", K::cluster_ctaid_x},
                                     {"%cluster_ctaid.y", K::cluster_ctaid_y},
                                     {"%cluster_ctaid.z", K::cluster_ctaid_z},
                                     {"%cluster_nctaid.x", K::cluster_nctaid_x},
                                     {"%cluster_nctaid.y", K::cluster_nctaid_y},
                                     {"%cluster_nctaid.z", K::cluster_nctaid_z},
                                     {"%cluster_ctarank", K::cluster_ctarank},
                                     {"%cluster_nctarank", K::cluster_nctarank},
                                     {"%is_explicit_cluster", K::is_explicit_cluster},
                                     {"%dynamic_smem_size", K::dynamic_smem_size},
                                     {"%total_smem_size", K::total_smem_size},
                                     {"%reserved_smem_offset_begin", K::reserved_smem_begin},
                                     {"%reserved_smem_offset_end", K::reserved_smem_end},
                                     {"%reserved_smem_offset_cap", K::reserved_smem_cap}};

const DecodeTable& table() {
  static const DecodeTable table = [] {
    DecodeTable all;
    add_arithmetic(all);
    add_conversion(all);
    add_memory(all);
    add_control(all);
    add_asynchronous(all);
    add_matrix(all);
    return all;
  }();
  return table;
}

}  // namespace

int slots_of(Type type) { return std::max(1, type_bits(type) / 32); }

Type type_of(std::string_view word) {
  static const std::unordered_map<std::string_view, Type> kTypes = {
      {"pred", Type::pred},   {"b8", Type::b8},     {"u8", Type::u8},         {"s8", Type::s8},     {"b16", Type::b16},
      {"u16", Type::u16},     {"s16", Type::s16},   {"b32", Type::b32},       {"u32", Type::u32},   {"s32", Type::s32},
      {"b64", Type::b64},     {"u64", Type::u64},   {"s64", Type::s64},       {"b128", Type::b128}, {"f16", Type::f16},
      {"f16x2", Type::f16x2}, {"bf16", Type::bf16}, {"bf16x2", Type::bf16x2}, {"tf32", Type::tf32}, {"f32", Type::f32},
      {"f32x2", Type::f32x2}, {"f64", Type::f64}};
  const auto found = kTypes.find(word);
  return found == kTypes.end() ? Type::none : found->second;
}

const char* class_name(Class value) {
  static const char* const kNames[kClasses] = {
      "arithmetic", "special_function", "conversion",      "compare",       "move",         "branch",
      "shuffle",    "load_global",      "store_global",    "load_shared",   "store_shared", "load_other",
      "atomic",     "barrier",          "mbarrier_arrive", "mbarrier_wait", "fence",        "bulk_copy",
      "bulk_wait",  "matrix",           "matrix_control",  "tensor_load",   "tensor_store", "other"};
  return kNames[static_cast<int>(value)];
}

void Decoder::fail(const std::string& message) const {
  throw PtxError(statement_->line, std::string(statement_->opcode.substr(0, 160)) + ": " + message);
}

void Decoder::split(std::string_view opcode) {
  modifiers_.clear();
  size_t start = 0;
  for (;;) {
    const size_t dot = opcode.find('.', start);
    modifiers_.push_back(opcode.substr(start, dot == std::string_view::npos ? dot : dot - start));
    if (dot == std::string_view::npos) break;
    start = dot + 1;
  }
  mnemonic_ = modifiers_.front();
  modifiers_.erase(modifiers_.begin());
}

namespace {

Definedness definedness_of(const Instruction& i, size_t reads, size_t writes) {
  static constexpr Handler kPassedOn[] = {execute_lanes,
                                          execute_carry,
                                          execute_predicate_logic,
                                          execute_setp,
                                          execute_set,
                                          execute_bit_field_insert,
                                          execute_testp,
                                          execute_move_predicate,
                                          execute_pack,
                                          execute_unpack,
                                          execute_shuffle,
                                          execute_convert_address};
  // Whole registers side by side: as many planes of each source as of the result.
  const bool is_pair = i.handler == execute_lanes && i.type == Type::f32x2 && reads % 2 == 0;
  const bool is_copy = i.handler == execute_move && reads == writes;
  const bool is_split = (i.handler == execute_pack || i.handler == execute_unpack) && i.mode >= 32 && reads == writes;
  if (is_pair || is_copy || is_split) return Definedness::by_plane;
  if (i.handler == execute_selp) return Definedness::chosen;
  if (i.handler == execute_move) return Definedness::passed_on;
  const bool passes = std::find(std::begin(kPassedOn), std::end(kPassedOn), i.handler) != std::end(kPassedOn);
  return passes ? Definedness::passed_on : Definedness::needed;
}

}  // namespace

Instruction Decoder::decode(const Statement& statement) {
  statement_ = &statement;
  out = Instruction{};
  has_list_ = false;
  for (std::vector<uint32_t>* uses : {&reads_, &writes_, &predicate_reads_, &predicate_writes_}) uses->clear();
  out.line = static_cast<uint32_t>(statement.line);
  out.guard = statement.guard;
  out.guard_negated = statement.guard_negated;
  split(statement.opcode);
  const auto found = table().find(mnemonic_);
  if (found == table().end()) fail("the emulator does not know this instruction");
  found->second(*this);
  if (!modifiers_.empty())
    fail("the emulator does not know the modifier ." + std::string(modifiers_.front()) + " here");
  if (out.handler == nullptr) fail("the emulator does not know this form");
  record_uses();
  return out;
}

// ------------------------------------------------------------------------------------------------------------
// modifiers

bool Decoder::take(std::string_view modifier) {
  const auto found = std::find(modifiers_.begin(), modifiers_.end(), modifier);
  if (found == modifiers_.end()) return false;
  modifiers_.erase(found);
  return true;
}

int Decoder::take_any(std::initializer_list<std::string_view> choices) {
  int index = 0;
  for (const std::string_view choice : choices) {
    if (take(choice)) return index;
    index++;
  }
  return -1;
}

int Decoder::take_one(std::initializer_list<std::string_view> choices, const char* what) {
  const int index = take_any(choices);
  if (index < 0) fail(std::string("expected ") + what);
  return index;
}

std::string_view Decoder::next() {
  if (modifiers_.empty()) return {};
  const std::string_view first = modifiers_.front();
  modifiers_.erase(modifiers_.begin());
  return first;
}

std::string_view Decoder::peek() const { return modifiers_.empty() ? std::string_view() : modifiers_.front(); }

Type Decoder::take_type() {
  const Type type = take_type_or(Type::none);
  if (type == Type::none) fail("no type is given");
  return type;
}

Type Decoder::take_type_or(Type fallback) {
  for (size_t i = 0; i < modifiers_.size(); i++) {
    const Type type = type_of(modifiers_[i]);
    if (type == Type::none) continue;
    modifiers_.erase(modifiers_.begin() + static_cast<std::ptrdiff_t>(i));
    return type;
  }
  return fallback;
}

void Decoder::take_rounding() {
  switch (take_any({"rn", "rz", "rm", "rp", "rna"})) {
    case 1:
      out.rounding = Rounding::toward_zero;
      break;
    case 2:
      out.rounding = Rounding::down;
      break;
    case 3:
      out.rounding = Rounding::up;
      break;
    case 4:
      out.rounding = Rounding::nearest_away;
      break;
    default:
      break;
  }
}

void Decoder::take_arithmetic() {
  take_rounding();
  out.flush = take("ftz");
  out.saturate = take("sat");
}

void Decoder::take_scope() {
  const int scope = take_any({"cta", "cluster", "gpu", "sys"});
  out.scope = scope < 0 ? MemoryScope::gpu : static_cast<MemoryScope>(std::min(scope, kScopes - 1));
}

Space Decoder::take_space() {
  switch (take_any({"global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "param::entry"})) {
    case 0:
      return Space::global;
    case 1:
    case 2:
      return Space::shared;
    case 3:
      return Space::shared_cluster;
    case 4:
      return Space::local;
    case 5:
      return Space::constant;
    case 6:
    case 7:
      return Space::param;
    default:
      return Space::generic;
  }
}

int Decoder::take_cta_group() {
  if (take("cta_group::2")) return 2;
  if (take("cta_group::1")) return 1;
  return 0;
}

// -------------------------------------------------------------------------------------------------------------
// operands

const Argument& Decoder::argument(size_t index) const {
  if (index >= count()) fail("operand " + std::to_string(index + 1) + " is missing");
  return statement_->arguments[index];
}

void Decoder::expect_count(size_t low, size_t high) const {
  if (count() < low || count() > high)
    fail("takes " + std::to_string(low) + (low == high ? "" : " to " + std::to_string(high)) + " operands, not " +
         std::to_string(count()));
}

Slot Decoder::constant32(uint32_t value) {
  const auto [entry, fresh] = constants_.try_emplace(value, 0);
  if (fresh) {
    entry->second = ~static_cast<Slot>(program_.constants.size() / kLanes);
    program_.constants.insert(program_.constants.end(), kLanes, value);
  }
  return entry->second;
}

// Both planes lie together, so a 64-bit constant is its own entry.
Slot Decoder::constant64(uint64_t value) {
  const Slot slot = ~static_cast<Slot>(program_.constants.size() / kLanes);
  program_.constants.insert(program_.constants.end(), kLanes, static_cast<uint32_t>(value));
  program_.constants.insert(program_.constants.end(), kLanes, static_cast<uint32_t>(value >> 32));
  return slot;
}

Slot Decoder::scratch(int slots) {
  Slot& slot = sink_[slots];
  if (slot < 0) {
    slot = static_cast<Slot>(program_.register_slots);
    program_.register_slots += static_cast<uint32_t>(slots);
  }
  return slot;
}

Slot Decoder::preset(Preset::Kind kind, uint32_t symbol, int64_t offset, int slots) {
  for (const Preset& one : program_.presets)
    if (one.kind == kind && one.symbol == symbol && one.offset == offset && one.slots == slots)
      return static_cast<Slot>(one.slot);
  const uint32_t slot = program_.register_slots;
  program_.register_slots += static_cast<uint32_t>(slots);
  program_.presets.push_back({kind, slot, static_cast<uint8_t>(slots), symbol, offset});
  return static_cast<Slot>(slot);
}

Slot Decoder::special(const Argument& argument, int slots) {
  for (const SpecialName& one : kSpecials)
    if (one.name == argument.name) return preset(one.kind, 0, 0, slots);
  if (argument.name == "WARP_SZ") return slots == 2 ? constant64(kLanes) : constant32(kLanes);
  fail("unknown register '" + std::string(argument.name.substr(0, 60)) + "'");
}

Slot Decoder::symbol(const Argument& argument, int slots) {
  const Variable& variable = program_.symbols[argument.symbol];
  Preset::Kind kind = Preset::Kind::global_symbol;
  if (variable.space == Space::shared) kind = Preset::Kind::shared_symbol;
  if (variable.space == Space::param) kind = Preset::Kind::param_symbol;
  if (variable.space == Space::local) kind = Preset::Kind::local_symbol;
  return preset(kind, argument.symbol, argument.offset, slots);
}

Slot Decoder::real(const Argument& argument, Type type) {
  const double value = argument.kind == Argument::Kind::real64
                           ? std::bit_cast<double>(argument.bits)
                           : static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(argument.bits)));
  switch (type) {
    case Type::f64:
      return constant64(std::bit_cast<uint64_t>(value));
    case Type::f16:
      return constant32(from_f32(Format::f16, static_cast<float>(value)));
    case Type::bf16:
      return constant32(from_f32(Format::bf16, static_cast<float>(value)));
    default:
      break;
  }
  if (argument.kind == Argument::Kind::real32) return constant32(static_cast<uint32_t>(argument.bits));
  if (type_bits(type) == 64) return constant64(argument.bits);
  return constant32(std::bit_cast<uint32_t>(static_cast<float>(value)));
}

Slot Decoder::source(const Argument& argument, Type type) {
  const int slots = slots_of(type);
  switch (argument.kind) {
    case Argument::Kind::register_:
      note(reads_, argument.reg.index, argument.reg.slots);
      if (argument.reg.slots != slots)
        fail("a source register of " + std::to_string(argument.reg.slots * 32) + " bits does not fit the type");
      return static_cast<Slot>(argument.reg.index);
    case Argument::Kind::integer: {
      if (is_float(type) && type_bits(type) != 64) return constant32(static_cast<uint32_t>(argument.bits));
      if (slots == 2) return constant64(argument.bits);
      if (slots == 4) fail("a 128-bit immediate is not possible");
      const uint32_t low = static_cast<uint32_t>(argument.bits);
      return constant32(type_bits(type) == 16 ? low & 0xffff : type_bits(type) == 8 ? low & 0xff : low);
    }
    case Argument::Kind::real32:
    case Argument::Kind::real64:
      return real(argument, type);
    case Argument::Kind::special:
    case Argument::Kind::name:
      return special(argument, slots);
    case Argument::Kind::symbol:
      return symbol(argument, slots);
    default:
      fail("an operand is of the wrong kind");
  }
}

Slot Decoder::destination(const Argument& argument, Type type) {
  const int slots = slots_of(type);
  if (argument.kind == Argument::Kind::sink) {
    const Slot slot = scratch(slots);
    note(writes_, static_cast<uint32_t>(slot), slots);
    return slot;
  }
  if (argument.kind != Argument::Kind::register_) fail("the destination must be a register");
  if (argument.reg.slots != slots)
    fail("a destination register of " + std::to_string(argument.reg.slots * 32) + " bits does not fit the type");
  note(writes_, argument.reg.index, slots);
  return static_cast<Slot>(argument.reg.index);
}

Slot Decoder::relaxed_source(const Argument& given, Type type) {
  if (given.kind == Argument::Kind::register_ && given.reg.slots > slots_of(type)) {
    note(reads_, given.reg.index, slots_of(type));
    return static_cast<Slot>(given.reg.index);
  }
  return source(given, type);
}

int32_t Decoder::carry_predicate() {
  if (carry_ < 0) carry_ = static_cast<int32_t>(program_.predicates++);
  return carry_;
}

void Decoder::predicate_logic(size_t sources) {
  bool second_negated = false;
  out.p = predicate(argument(0), nullptr);
  out.q = predicate(argument(1), &out.p_negated);
  if (sources > 1) out.target = predicate(argument(2), &second_negated);
  out.flags = second_negated;
  out.handler = execute_predicate_logic;
  out.kind = Class::compare;
}

int32_t Decoder::predicate(const Argument& argument, bool* negated) {
  if (negated != nullptr) *negated = argument.negated;
  if (argument.kind == Argument::Kind::sink && negated == nullptr) return -1;
  if (argument.kind != Argument::Kind::predicate || (negated == nullptr && argument.negated))
    fail("an operand must be a predicate");
  (negated == nullptr ? predicate_writes_ : predicate_reads_).push_back(argument.reg.index);
  return static_cast<int32_t>(argument.reg.index);
}

uint64_t Decoder::immediate(size_t index) const {
  if (argument(index).kind != Argument::Kind::integer)
    fail("operand " + std::to_string(index + 1) + " must be a constant");
  return argument(index).bits;
}

Slot Decoder::address_slot(const Argument& argument, int64_t* offset) {
  const Argument& base = argument.kind == Argument::Kind::address ? argument.items[0] : argument;
  *offset = argument.kind == Argument::Kind::address ? argument.offset : 0;
  if (base.kind == Argument::Kind::register_) {
    if (base.reg.slots > 2) fail("an address is a 32-bit or 64-bit register");
    note(reads_, base.reg.index, base.reg.slots);
    return static_cast<Slot>(base.reg.index);
  }
  if (base.kind == Argument::Kind::symbol) {
    Argument bare = base;
    bare.offset = 0;
    if (argument.kind != Argument::Kind::address) *offset = base.offset;
    return symbol(bare, 2);
  }
  if (base.kind == Argument::Kind::integer) return constant64(base.bits);
  fail("an address must be a register or a variable");
}

void Decoder::address(size_t index) {
  const Argument& given = argument(index);
  if (given.kind != Argument::Kind::address)
    fail("operand " + std::to_string(index + 1) + " must be an address in brackets");
  const Argument& base = given.items[0];
  out.wide_address = !(base.kind == Argument::Kind::register_ && base.reg.slots == 1);
  out.a = address_slot(given, &out.offset);
}

MemoryOperand Decoder::memory_operand(size_t index) {
  const Argument& given = argument(index);
  if (given.kind != Argument::Kind::address)
    fail("operand " + std::to_string(index + 1) + " must be an address in brackets");
  const Argument& base = given.items[0];
  MemoryOperand operand;
  operand.wide = !(base.kind == Argument::Kind::register_ && base.reg.slots == 1);
  operand.base = address_slot(given, &operand.offset);
  return operand;
}

void Decoder::note(std::vector<uint32_t>& uses, uint32_t first, int slots) {
  for (int slot = 0; slot < slots; slot++) uses.push_back(first + static_cast<uint32_t>(slot));
}

// What the instruction touches, for the record of registers that were never written.
void Decoder::record_uses() {
  out.uses = static_cast<uint32_t>(program_.uses.size());
  for (const std::vector<uint32_t>* uses : {&reads_, &writes_, &predicate_reads_, &predicate_writes_})
    program_.uses.insert(program_.uses.end(), uses->begin(), uses->end());
  out.register_reads = static_cast<uint16_t>(reads_.size());
  out.register_writes = static_cast<uint16_t>(writes_.size());
  out.predicate_reads = static_cast<uint8_t>(predicate_reads_.size());
  out.predicate_writes = static_cast<uint8_t>(predicate_writes_.size());
  out.definedness = definedness_of(out, reads_.size(), writes_.size());
}

void Decoder::append(Slot slot) {
  if (!has_list_) {
    has_list_ = true;
    out.list = static_cast<uint32_t>(program_.lists.size());
  }
  program_.lists.push_back(slot);
  out.list_count++;
}

void Decoder::list_sources(const Argument& argument, Type type) {
  if (argument.kind != Argument::Kind::vector) return append(source(argument, type));
  for (const Argument& one : argument.items) append(source(one, type));
}

void Decoder::list_destinations(const Argument& argument, Type type) {
  if (argument.kind != Argument::Kind::vector) return append(destination(argument, type));
  for (const Argument& one : argument.items) append(destination(one, type));
}

void Decoder::list_stored(const Argument& argument, Type type) {
  if (argument.kind != Argument::Kind::vector) return append(relaxed_source(argument, type));
  for (const Argument& one : argument.items) append(relaxed_source(one, type));
}

void Decoder::list_loaded(const Argument& argument, Type type) {
  const bool is_vector = argument.kind == Argument::Kind::vector;
  const size_t count = is_vector ? argument.items.size() : 1;
  // The registers of a vector have one width.
  const Register* first = nullptr;
  for (size_t i = 0; i < count && first == nullptr; i++) {
    const Argument& one = is_vector ? argument.items[i] : argument;
    if (one.kind == Argument::Kind::register_) first = &one.reg;
  }
  out.flags = first != nullptr && first->bits >= 32;
  out.out_slots = static_cast<uint8_t>(slots_of(type));
  if (first != nullptr && first->slots == 2 && out.out_slots == 1) out.out_slots = 2;
  const Type width = out.out_slots == 2 && slots_of(type) == 1 ? Type::b64 : type;
  for (size_t i = 0; i < count; i++) append(destination(is_vector ? argument.items[i] : argument, width));
}

// --------------------------------------------------------------------------------------------------------------
// modules

namespace {

std::unique_ptr<Program> decode_entry(const Entry& entry, int target) {
  auto program = std::make_unique<Program>();
  program->name = entry.name;
  program->symbols = entry.symbols;
  program->params = entry.params;
  program->register_slots = entry.register_slots;
  program->predicates = entry.predicates;
  program->param_bytes = entry.param_bytes;
  program->local_bytes = entry.local_bytes;
  program->static_shared_bytes = entry.static_shared_bytes;
  std::copy(entry.required_block, entry.required_block + 3, program->required_block);
  std::copy(entry.required_cluster, entry.required_cluster + 3, program->required_cluster);
  program->max_threads = entry.max_threads;
  program->target = target;
  Decoder decoder(*program);
  program->code.reserve(entry.statements.size() + 1);
  for (const Statement& statement : entry.statements) program->code.push_back(decoder.decode(statement));
  // Running off the end is a return; labels at the end point here too.
  Statement end;
  end.line = entry.statements.empty() ? entry.line : entry.statements.back().line;
  end.opcode = "ret";
  program->code.push_back(decoder.decode(end));
  return program;
}

}  // namespace

std::unique_ptr<Module> load_module(std::string source) {
  auto module = std::make_unique<Module>();
  module->source = std::move(source);
  ModuleSyntax syntax = parse_module(module->source);
  module->target = syntax.target;
  module->target_name = syntax.target_name;
  for (const Entry& entry : syntax.entries) module->programs.push_back(decode_entry(entry, syntax.target));
  module->variables = std::move(syntax.variables);
  return module;
}

}  // namespace jax_fa4::emulator

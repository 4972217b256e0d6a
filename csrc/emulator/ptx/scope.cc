// See scope.h.
#include "scope.h"

#include "parser.h"
#include "token.h"

namespace jax_fa4::emulator {
namespace {

constexpr size_t kMaxDepth = 64;
constexpr uint32_t kMaxRegisterSlots = 1u << 20;

bool split_number(std::string_view name, std::string_view& prefix, uint32_t& number) {
  size_t at = name.size();
  while (at > 0 && name[at - 1] >= '0' && name[at - 1] <= '9') at--;
  const size_t digits = name.size() - at;
  if (at == 0 || digits == 0 || digits > 7 || (digits > 1 && name[at] == '0')) return false;
  prefix = name.substr(0, at);
  number = 0;
  for (size_t i = at; i < name.size(); i++) number = number * 10 + (name[i] - '0');
  return true;
}

}  // namespace

void Scopes::open() {
  if (scopes_.size() == kMaxDepth) throw PtxError(entry_.line, "braces are nested deeper than 64");
  scopes_.emplace_back();
}

bool Scopes::resolve(const Scope& scope, const Jump& jump) {
  Statement& statement = entry_.statements[jump.statement];
  if (const auto label = scope.labels.find(jump.name); label != scope.labels.end()) {
    statement.target = label->second;
    return true;
  }
  const auto list = scope.lists.find(jump.name);
  if (list == scope.lists.end()) return false;
  for (const std::string_view name : list->second) {
    const auto label = scope.labels.find(name);
    if (label == scope.labels.end())
      throw PtxError(statement.line, "no label '" + std::string(name) + "' in reach of its .branchtargets");
    statement.targets.push_back(label->second);
  }
  return true;
}

void Scopes::close(int line) {
  Scope scope = std::move(scopes_.back());
  scopes_.pop_back();
  for (const Jump& jump : scope.jumps) {
    if (resolve(scope, jump)) continue;
    if (scopes_.empty())
      throw PtxError(
          entry_.statements[jump.statement].line,
          "no label '" + std::string(jump.name) + "' in reach (function ends in line " + std::to_string(line) + ")");
    scopes_.back().jumps.push_back(jump);
  }
}

void Scopes::declare(std::string_view name, uint32_t count, std::string_view type, int line) {
  Register reg;
  const uint32_t copies = count == 0 ? 1 : count;
  if (type == ".pred") {
    reg.is_predicate = true;
    reg.index = entry_.predicates;
    if (copies > kMaxRegisterSlots - entry_.predicates) throw PtxError(line, "too many predicates");
    entry_.predicates += copies;
  } else {
    const int bytes = type_bytes(type);
    if (bytes == 0) throw PtxError(line, "unknown register type '" + std::string(type) + "'");
    reg.slots = static_cast<uint8_t>(bytes <= 4 ? 1 : bytes / 4);
    reg.bits = static_cast<uint8_t>(bytes * 8);
    reg.index = entry_.register_slots;
    if (copies > (kMaxRegisterSlots - entry_.register_slots) / reg.slots) throw PtxError(line, "too many registers");
    entry_.register_slots += copies * reg.slots;
  }
  Scope& scope = scopes_.back();
  const bool fresh =
      count == 0 ? scope.registers.emplace(name, reg).second : scope.ranges.emplace(name, Range{reg, count}).second;
  if (!fresh) throw PtxError(line, "register '" + std::string(name) + "' is declared twice");
}

void Scopes::declare_vector(std::string_view name, uint32_t count, std::string_view type, int line) {
  declare(name, count, type, line);
  Scope& scope = scopes_.back();
  scope.vectors.insert(scope.ranges.extract(name));
}

std::vector<Register> Scopes::find_vector(std::string_view name) const {
  std::vector<Register> all;
  for (size_t i = scopes_.size(); i-- > 0 && all.empty();) {
    const auto vector = scopes_[i].vectors.find(name);
    if (vector == scopes_[i].vectors.end()) continue;
    all.assign(vector->second.count, vector->second.first);
    for (uint32_t at = 0; at < all.size(); at++) all[at].index += at * (all[at].is_predicate ? 1 : all[at].slots);
  }
  return all;
}

const Register* Scopes::find_component(std::string_view name) {
  if (name.size() < 3 || name[name.size() - 2] != '.') return nullptr;
  static constexpr std::string_view kPlaces = "xyzw", kColours = "rgba";
  size_t place = kPlaces.find(name.back());
  if (place == std::string_view::npos) place = kColours.find(name.back());
  const std::vector<Register> all = find_vector(name.substr(0, name.size() - 2));
  if (place >= all.size()) return nullptr;
  found_ = all[place];
  return &found_;
}

const Register* Scopes::find(std::string_view name) {
  std::string_view prefix;
  uint32_t number = 0;
  const bool numbered = split_number(name, prefix, number);
  for (size_t i = scopes_.size(); i-- > 0;) {
    const Scope& scope = scopes_[i];
    if (const auto single = scope.registers.find(name); single != scope.registers.end()) return &single->second;
    if (!numbered) continue;
    const auto range = scope.ranges.find(prefix);
    if (range == scope.ranges.end() || number >= range->second.count) continue;
    found_ = range->second.first;
    found_.index += number * (found_.is_predicate ? 1 : found_.slots);
    return &found_;
  }
  return find_component(name);
}

void Scopes::label(std::string_view name, int line) {
  if (!scopes_.back().labels.emplace(name, static_cast<int32_t>(entry_.statements.size())).second)
    throw PtxError(line, "label '" + std::string(name) + "' is defined twice");
}

void Scopes::branch_targets(std::string_view name, std::vector<std::string_view> labels, int line) {
  if (!scopes_.back().lists.emplace(name, std::move(labels)).second)
    throw PtxError(line, ".branchtargets '" + std::string(name) + "' is defined twice");
}

void Scopes::jump(std::string_view name) { scopes_.back().jumps.push_back({entry_.statements.size() - 1, name}); }

}  // namespace jax_fa4::emulator

// See parser.h.
#include "parser.h"

#include <algorithm>
#include <map>
#include <unordered_map>

#include "scope.h"
#include "token.h"

namespace jax_fa4::emulator {
namespace {

constexpr uint64_t kMaxVariableBytes = 1u << 28;
constexpr uint32_t kMaxParamBytes = 32764;  // PTX ISA: limit of kernel parameters from sm_70 on
constexpr size_t kMaxVectorItems = 256;     // wgmma m64n256 has 128 registers, tcgen05.ld .x128 has 128

uint64_t align_up(uint64_t value, uint64_t align) { return (value + align - 1) / align * align; }

Space space_of(std::string_view directive) {
  if (directive == ".shared") return Space::shared;
  if (directive == ".local") return Space::local;
  if (directive == ".const") return Space::constant;
  if (directive == ".param") return Space::param;
  return Space::global;
}

class Parser {
 public:
  explicit Parser(std::string_view source) : tokens_(tokenize(source)) {}

  ModuleSyntax run() {
    while (current().kind != Token::Kind::end) top_level();
    if (module_.target == 0) fail("the module has no .target sm_NN");
    for (Entry& entry : module_.entries) place_shared(entry);
    return std::move(module_);
  }

 private:
  // ------------------------------------------------------------------------------------------------- token helpers
  const Token& current() const { return tokens_[at_]; }
  const Token& ahead(size_t n) const { return tokens_[std::min(at_ + n, tokens_.size() - 1)]; }
  [[noreturn]] void fail(const std::string& message) const { throw PtxError(current().line, message); }
  [[noreturn]] void fail_at_token(const std::string& wanted) const {
    const std::string seen = current().kind == Token::Kind::end ? "the end of the text"
                                                                : "'" + std::string(current().text.substr(0, 60)) + "'";
    fail("expected " + wanted + ", found " + seen);
  }
  Token take() {
    Token token = current();
    if (token.kind != Token::Kind::end) at_++;
    return token;
  }
  bool accept(char c) {
    if (!current().is(c)) return false;
    at_++;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) fail_at_token(std::string("'") + c + "'");
  }
  std::string_view word(const char* what) {
    if (current().kind != Token::Kind::word) fail_at_token(what);
    return take().text;
  }
  uint64_t integer(const char* what) {
    if (current().kind != Token::Kind::integer) fail_at_token(what);
    return take().bits;
  }
  void skip_to(char c) {
    while (!current().is(c)) {
      if (current().kind == Token::Kind::end) fail_at_token(std::string("'") + c + "'");
      at_++;
    }
    at_++;
  }

  // ------------------------------------------------------------------------------------------------------ top level
  void top_level() {
    const Token token = current();
    if (token.is_directive(".version")) {
      at_ += 1;
      take();
    } else if (token.is_directive(".target")) {
      at_++;
      target();
    } else if (token.is_directive(".address_size")) {
      at_++;
      if (integer("an address size") != 64) throw PtxError(token.line, ".address_size must be 64");
    } else if (token.is_directive(".file")) {
      while (current().line == token.line && current().kind != Token::Kind::end) at_++;
    } else if (token.is_directive(".section")) {
      skip_to('{');
      skip_to('}');
    } else if (token.kind == Token::Kind::directive) {
      declaration();
    } else if (!accept(';')) {
      fail_at_token("a directive");
    }
  }

  void target() {
    const std::string_view name = word("a target such as sm_90a");
    int number = 0;
    if (name.size() > 3 && name.substr(0, 3) == "sm_")
      for (size_t i = 3; i < name.size() && name[i] >= '0' && name[i] <= '9' && number < 1000; i++)
        number = number * 10 + (name[i] - '0');
    if (number < 50) fail("unknown target '" + std::string(name.substr(0, 40)) + "'");
    module_.target = number;
    module_.target_name = name;
    while (accept(',')) word("a target option");
  }

  // Linkage words, then an entry, a function or a variable.
  void declaration() {
    bool is_extern = false;
    while (current().kind == Token::Kind::directive) {
      const std::string_view text = current().text;
      if (text == ".extern") is_extern = true;
      if (text != ".extern" && text != ".visible" && text != ".weak" && text != ".common") break;
      at_++;
    }
    const std::string_view text = current().kind == Token::Kind::directive ? current().text : "";
    if (text == ".entry") return entry();
    if (text == ".func") {
      if (!is_extern) fail("device functions (.func with a body) are not supported; inline them");
      return skip_to(';');
    }
    if (text == ".pragma") return skip_to(';');
    if (text == ".global" || text == ".const" || text == ".shared") return variable(module_.variables, is_extern);
    fail_at_token("an entry or a variable");
  }

  // .space [.align n] [.ptr ...] .type name[dims] [= initialiser] {, ...} ;
  void variable(std::vector<Variable>& into, bool is_extern) {
    Variable proto;
    proto.space = space_of(take().text);
    int element = attributes(proto);
    do {
      Variable one = proto;
      one.name = word("a variable's name");
      one.bytes = element;
      bool open_ended = false;
      while (accept('[')) {
        if (accept(']')) {
          open_ended = true;
          continue;
        }
        const uint64_t count = integer("an array length");
        if (count > kMaxVariableBytes || one.bytes * count > kMaxVariableBytes)
          fail("variable '" + one.name + "' is larger than 256 MiB");
        one.bytes *= count;
        expect(']');
      }
      one.dynamic = is_extern && one.space == Space::shared;
      if (accept('='))
        initializer(one, element, open_ended);
      else if (open_ended && !one.dynamic)
        fail("variable '" + one.name + "' has no length");
      if (one.dynamic) one.bytes = 0;
      into.push_back(std::move(one));
    } while (accept(','));
    expect(';');
  }

  // Reads .align, .ptr and its words, .vN and the type; returns the bytes of one element.
  int attributes(Variable& variable) {
    int vector = 1, element = 0;
    while (current().kind == Token::Kind::directive) {
      const std::string_view text = take().text;
      if (text == ".align") {
        const uint64_t align = integer("an alignment");
        if (align == 0 || align > 4096 || (align & (align - 1)) != 0)
          fail("alignment " + std::to_string(align) + " is not a power of two up to 4096");
        variable.align = std::max(variable.align, static_cast<uint32_t>(align));
      } else if (text == ".ptr") {
        while (current().is_directive(".global") || current().is_directive(".shared") ||
               current().is_directive(".const") || current().is_directive(".local"))
          at_++;
        if (current().is_directive(".align")) {
          at_++;
          integer("an alignment");
        }
      } else if (text == ".v2" || text == ".v4") {
        vector = text[2] - '0';
      } else if (text == ".attribute") {
        skip_to(')');
      } else {
        const int bytes = type_bytes(text);
        if (bytes == 0) fail("unknown type '" + std::string(text) + "'");
        element = bytes * vector;
      }
    }
    if (element == 0) fail_at_token("a type");
    variable.align = std::max(variable.align, static_cast<uint32_t>(element));
    return element;
  }

  void initializer(Variable& variable, int element, bool open_ended) {
    const auto put = [&](uint64_t bits) {
      for (int i = 0; i < element; i++) variable.initial.push_back(i < 8 ? static_cast<uint8_t>(bits >> (8 * i)) : 0);
      if (variable.initial.size() > kMaxVariableBytes) fail("initialiser is too long");
    };
    const bool braces = accept('{');
    if (!(braces && current().is('}'))) {
      do {
        const bool negative = accept('-');
        const Token token = take();
        if (token.kind != Token::Kind::integer && token.kind != Token::Kind::real32 &&
            token.kind != Token::Kind::real64)
          fail("variable '" + variable.name + "': an initialiser must be a number");
        put(negative ? 0 - token.bits : token.bits);
      } while (braces && accept(','));
    }
    if (braces) expect('}');
    if (open_ended) variable.bytes = variable.initial.size();
    if (variable.initial.size() > variable.bytes)
      fail("variable '" + variable.name + "' has more initial values than room");
  }

  // -------------------------------------------------------------------------------------------------------- entries
  void entry() {
    Entry entry;
    entry.line = take().line;
    entry.name = word("an entry's name");
    if (accept('(') && !accept(')')) {
      do parameter(entry);
      while (accept(','));
      expect(')');
    }
    performance_directives(entry);
    if (accept(';')) return;
    entry.symbols = module_.variables;
    for (const Variable& param : entry.params) entry.symbols.push_back(param);
    names_.clear();
    for (size_t i = 0; i < entry.symbols.size(); i++) names_[entry.symbols[i].name] = static_cast<uint32_t>(i);
    expect('{');
    body(entry);
    module_.entries.push_back(std::move(entry));
  }

  void parameter(Entry& entry) {
    if (!current().is_directive(".param")) fail_at_token(".param");
    at_++;
    Variable param;
    param.space = Space::param;
    param.bytes = attributes(param);
    param.name = word("a parameter's name");
    if (accept('[')) {
      const uint64_t count = integer("an array length");
      if (count > kMaxParamBytes) fail("parameter '" + param.name + "' is too large");
      param.bytes *= count;
      expect(']');
    }
    param.offset = align_up(entry.param_bytes, param.align);
    if (param.offset + param.bytes > kMaxParamBytes) fail("the parameters take more than 32764 bytes");
    entry.param_bytes = static_cast<uint32_t>(param.offset + param.bytes);
    entry.params.push_back(std::move(param));
  }

  void performance_directives(Entry& entry) {
    while (current().kind == Token::Kind::directive) {
      const std::string_view text = take().text;
      uint32_t numbers[3] = {1, 1, 1};
      int count = 0;
      while (current().kind == Token::Kind::integer && count < 3) {
        numbers[count++] = static_cast<uint32_t>(std::min<uint64_t>(take().bits, 1u << 30));
        if (!accept(',')) break;
      }
      if (text == ".reqntid") std::copy(numbers, numbers + 3, entry.required_block);
      if (text == ".maxntid")
        entry.max_threads =
            static_cast<uint32_t>(std::min<uint64_t>(uint64_t{numbers[0]} * numbers[1] * numbers[2], 1024));
      if (text == ".reqnctapercluster") std::copy(numbers, numbers + 3, entry.required_cluster);
      if (text == ".pragma") skip_to(';');
    }
  }

  void body(Entry& entry) {
    Scopes scopes(entry);
    scopes_ = &scopes;
    while (scopes.depth() > 0) {
      const int line = current().line;
      if (accept('{')) {
        scopes.open();
      } else if (accept('}')) {
        scopes.close(line);
      } else if (current().kind == Token::Kind::directive) {
        body_directive(entry);
      } else if (current().kind == Token::Kind::word && ahead(1).is(':')) {
        label();
      } else if (!accept(';')) {
        statement(entry);
      }
    }
    place_local(entry);
    scopes_ = nullptr;
  }

  void body_directive(Entry& entry) {
    const Token token = current();
    if (token.text == ".reg") {
      at_++;
      registers();
    } else if (token.text == ".shared" || token.text == ".local") {
      const size_t first = entry.symbols.size();
      variable(entry.symbols, false);
      for (size_t i = first; i < entry.symbols.size(); i++) names_[entry.symbols[i].name] = static_cast<uint32_t>(i);
    } else if (token.text == ".loc") {
      while (current().line == token.line && current().kind != Token::Kind::end) at_++;
    } else if (token.text == ".pragma") {
      skip_to(';');
    } else {
      fail("unknown directive '" + std::string(token.text.substr(0, 40)) + "'");
    }
  }

  void label() {
    const int line = current().line;
    const std::string_view name = take().text;
    at_++;  // the colon
    if (!current().is_directive(".branchtargets")) return scopes_->label(name, line);
    at_++;
    std::vector<std::string_view> labels;
    do labels.push_back(word("a label"));
    while (accept(','));
    expect(';');
    scopes_->branch_targets(name, std::move(labels), line);
  }

  void registers() {
    if (current().kind != Token::Kind::directive) fail_at_token("a register type");
    const uint32_t elements = current().is_directive(".v4") ? 4 : current().is_directive(".v2") ? 2 : 0;
    if (elements != 0) at_++;
    if (current().kind != Token::Kind::directive) fail_at_token("a register type");
    const std::string_view type = take().text;
    do {
      const int line = current().line;
      const std::string_view name = word("a register's name");
      if (elements != 0) {
        scopes_->declare_vector(name, elements, type, line);
        continue;
      }
      uint32_t count = 0;
      if (accept('<')) {
        count = static_cast<uint32_t>(std::min<uint64_t>(integer("a register count"), 1u << 24));
        expect('>');
        if (count == 0) continue;
      }
      scopes_->declare(name, count, type, line);
    } while (accept(','));
    expect(';');
  }

  // ----------------------------------------------------------------------------------------------------- statements
  void statement(Entry& entry) {
    Statement statement;
    statement.line = current().line;
    if (accept('@')) {
      statement.guard_negated = accept('!');
      const std::string_view name = word("a predicate");
      const Register* reg = scopes_->find(name);
      if (reg == nullptr || !reg->is_predicate)
        throw PtxError(statement.line, "'" + std::string(name) + "' is no predicate");
      statement.guard = static_cast<int32_t>(reg->index);
    }
    statement.opcode = word("an instruction");
    if (!current().is(';')) {
      do statement.arguments.push_back(argument(0));
      while (accept(','));
    }
    expect(';');
    const bool is_branch = statement.opcode.substr(0, 3) == "bra" || statement.opcode.substr(0, 3) == "brx";
    std::string_view label;
    if (is_branch && !statement.arguments.empty() && statement.arguments.back().kind == Argument::Kind::name)
      label = statement.arguments.back().name;
    entry.statements.push_back(std::move(statement));
    if (!label.empty()) scopes_->jump(label);
  }

  Argument argument(int depth) {
    if (depth > 2) fail("operands are nested too deep");
    if (accept('{')) return vector(depth);
    if (accept('[')) return address(depth);
    if (accept('!')) {
      Argument one = argument(depth + 1);
      if (one.kind != Argument::Kind::predicate) fail("'!' needs a predicate");
      one.negated = !one.negated;
      return one;
    }
    Argument first = scalar();
    if (!accept('|')) return first;
    Argument both;
    both.kind = Argument::Kind::pair;
    both.items.push_back(std::move(first));
    both.items.push_back(scalar());
    return both;
  }

  Argument vector(int depth) {
    Argument all;
    all.kind = Argument::Kind::vector;
    if (accept('}')) return all;
    do {
      if (all.items.size() == kMaxVectorItems) fail("a vector operand has more than 256 elements");
      all.items.push_back(argument(depth + 1));
    } while (accept(','));
    expect('}');
    return all;
  }

  // [base], [base+offset], [base, {coordinates}]
  Argument address(int depth) {
    Argument all;
    all.kind = Argument::Kind::address;
    all.items.push_back(scalar());
    all.offset = all.items[0].offset;
    while (current().is('+') || current().is('-')) {
      const bool negative = take().text[0] == '-';
      const bool twice = accept('-');
      const uint64_t value = integer("an offset");
      // Modulo 2^64, as the address itself.
      all.offset = static_cast<int64_t>(static_cast<uint64_t>(all.offset) + (negative != twice ? 0 - value : value));
    }
    if (accept(',')) {
      Argument coordinates = argument(depth + 1);
      if (coordinates.kind != Argument::Kind::vector) fail("a tensor address needs coordinates in braces");
      for (Argument& one : coordinates.items) all.items.push_back(std::move(one));
    }
    expect(']');
    return all;
  }

  Argument scalar() {
    Argument one;
    const bool negative = accept('-');
    if (!negative) accept('+');
    const Token token = take();
    switch (token.kind) {
      case Token::Kind::integer:
        one.kind = Argument::Kind::integer;
        one.bits = negative ? 0 - token.bits : token.bits;
        return one;
      case Token::Kind::real32:
        one.kind = Argument::Kind::real32;
        one.bits = negative ? token.bits ^ 0x80000000u : token.bits;
        return one;
      case Token::Kind::real64:
        one.kind = Argument::Kind::real64;
        one.bits = negative ? token.bits ^ (uint64_t{1} << 63) : token.bits;
        return one;
      case Token::Kind::word:
        if (!negative) return named(token.text);
        [[fallthrough]];
      default:
        throw PtxError(token.line, "expected an operand, found '" + std::string(token.text.substr(0, 60)) + "'");
    }
  }

  Argument named(std::string_view name) {
    Argument one;
    one.name = name;
    if (name == "_") return one;
    if (const Register* reg = scopes_->find(name)) {
      one.kind = reg->is_predicate ? Argument::Kind::predicate : Argument::Kind::register_;
      one.reg = *reg;
      return one;
    }
    if (const std::vector<Register> vector = scopes_->find_vector(name); !vector.empty()) {
      one.kind = Argument::Kind::vector;
      for (const Register& reg : vector) {
        Argument& item = one.items.emplace_back();
        item.kind = reg.is_predicate ? Argument::Kind::predicate : Argument::Kind::register_;
        item.reg = reg;
      }
      return one;
    }
    if (const auto symbol = names_.find(name); symbol != names_.end()) {
      one.kind = Argument::Kind::symbol;
      one.symbol = symbol->second;
      if (current().is('+') && ahead(1).kind == Token::Kind::integer) {
        at_++;
        one.offset = static_cast<int64_t>(take().bits);
      }
      return one;
    }
    one.kind = name[0] == '%' ? Argument::Kind::special : Argument::Kind::name;
    return one;
  }

  // -------------------------------------------------------------------------------------------------------- layout
  // Static shared variables first, the dynamic ones behind them (all at the same place).
  void place_shared(Entry& entry) {
    uint64_t at = 0, dynamic_align = 16;
    for (Variable& variable : entry.symbols) {
      if (variable.space != Space::shared) continue;
      if (variable.dynamic) {
        dynamic_align = std::max<uint64_t>(dynamic_align, variable.align);
        continue;
      }
      variable.offset = align_up(at, variable.align);
      at = variable.offset + variable.bytes;
    }
    const uint64_t dynamic_start = at == 0 ? 0 : align_up(at, dynamic_align);
    for (Variable& variable : entry.symbols)
      if (variable.space == Space::shared && variable.dynamic) variable.offset = dynamic_start;
    if (at > kMaxVariableBytes) throw PtxError(entry.line, "the static shared variables are too large");
    entry.static_shared_bytes = static_cast<uint32_t>(dynamic_start);
  }

  void place_local(Entry& entry) {
    uint64_t at = 0;
    for (Variable& variable : entry.symbols) {
      if (variable.space != Space::local) continue;
      variable.offset = align_up(at, variable.align);
      at = variable.offset + variable.bytes;
    }
    if (at > (1u << 19)) throw PtxError(entry.line, "local variables take more than 512 KiB a thread");
    entry.local_bytes = static_cast<uint32_t>(at);
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  ModuleSyntax module_;
  Scopes* scopes_ = nullptr;
  std::map<std::string, uint32_t, std::less<>> names_;
};

}  // namespace

int type_bytes(std::string_view type) {
  if (!type.empty() && type[0] == '.') type.remove_prefix(1);
  static const std::unordered_map<std::string_view, int> kBytes = {
      {"b8", 1},   {"u8", 1},  {"s8", 1},    {"b16", 2},   {"u16", 2},    {"s16", 2},   {"f16", 2},
      {"bf16", 2}, {"b32", 4}, {"u32", 4},   {"s32", 4},   {"f32", 4},    {"b64", 8},   {"u64", 8},
      {"s64", 8},  {"f64", 8}, {"b128", 16}, {"f16x2", 4}, {"bf16x2", 4}, {"f32x2", 8}, {"tf32", 4}};
  const auto found = kBytes.find(type);
  return found == kBytes.end() ? 0 : found->second;
}

ModuleSyntax parse_module(std::string_view source) { return Parser(source).run(); }

}  // namespace jax_fa4::emulator

// See token.h.
#include "token.h"

#include <bit>
#include <cerrno>
#include <cstdlib>

namespace jax_fa4::emulator {
namespace {

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '$' || c == '%'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_word_part(char c) { return is_letter(c) || is_digit(c); }

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(source) {}

  std::vector<Token> run() {
    std::vector<Token> tokens;
    for (;;) {
      skip_blanks();
      tokens.push_back(next());
      if (tokens.back().kind == Token::Kind::end) return tokens;
    }
  }

 private:
  char peek(size_t ahead = 0) const { return at_ + ahead < source_.size() ? source_[at_ + ahead] : '\0'; }
  bool ended() const { return at_ >= source_.size(); }

  void skip_blanks() {
    while (!ended()) {
      const char c = peek();
      if (c == '\n') line_++;
      if (c == ' ' || c == '\t' || c == '\r' || c == '\n' || c == '\0') {
        at_++;
      } else if (c == '/' && peek(1) == '/') {
        while (!ended() && peek() != '\n') at_++;
      } else if (c == '/' && peek(1) == '*') {
        skip_comment();
      } else {
        return;
      }
    }
  }

  void skip_comment() {
    const int start = line_;
    for (at_ += 2; !(peek() == '*' && peek(1) == '/'); at_++) {
      if (ended()) throw PtxError(start, "the comment is not closed");
      if (peek() == '\n') line_++;
    }
    at_ += 2;
  }

  Token next() {
    if (ended()) return make(Token::Kind::end, at_);
    const char c = peek();
    if (is_letter(c)) return word();
    if (is_digit(c)) return number();
    if (c == '.' && is_letter(peek(1))) {
      const size_t start = at_++;
      word_parts();
      return make(Token::Kind::directive, start);
    }
    if (c == '"') return quoted();
    if (std::string_view("[]{}(),;:+-*!=<>|@&~").find(c) == std::string_view::npos)
      throw PtxError(line_, std::string("unexpected character '") + (c < ' ' || c > '~' ? '?' : c) + "'");
    at_++;
    return make(Token::Kind::punctuation, at_ - 1);
  }

  Token make(Token::Kind kind, size_t start, uint64_t bits = 0) const {
    return {kind, line_, source_.substr(start, at_ - start), bits};
  }

  void word_parts() {
    for (;;) {
      while (is_word_part(peek())) at_++;
      if (peek() == '.' && is_word_part(peek(1))) {
        at_ += 1;
      } else if (peek() == ':' && peek(1) == ':' && is_word_part(peek(2))) {
        at_ += 2;
      } else {
        return;
      }
    }
  }

  Token word() {
    const size_t start = at_;
    word_parts();
    return make(Token::Kind::word, start);
  }

  Token quoted() {
    const size_t start = at_++;
    while (peek() != '"') {
      if (ended() || peek() == '\n') throw PtxError(line_, "the string is not closed");
      at_++;
    }
    at_++;
    return make(Token::Kind::string, start);
  }

  Token number() {
    const size_t start = at_;
    if (peek() == '0' && (peek(1) == 'f' || peek(1) == 'F')) return hex_real(start, 8, Token::Kind::real32);
    if (peek() == '0' && (peek(1) == 'd' || peek(1) == 'D')) return hex_real(start, 16, Token::Kind::real64);
    if (peek() == '0' && (peek(1) == 'x' || peek(1) == 'X')) return radix_integer(start, 16);
    if (peek() == '0' && (peek(1) == 'b' || peek(1) == 'B')) return radix_integer(start, 2);
    while (is_digit(peek())) at_++;
    const bool is_real = (peek() == '.' && is_digit(peek(1))) || peek() == 'e' || peek() == 'E';
    if (!is_real) return decimal_integer(start);
    while (is_digit(peek()) || peek() == '.' || peek() == 'e' || peek() == 'E' ||
           ((peek() == '-' || peek() == '+') && (source_[at_ - 1] == 'e' || source_[at_ - 1] == 'E')))
      at_++;
    const double value = std::strtod(std::string(source_.substr(start, at_ - start)).c_str(), nullptr);
    return make(Token::Kind::real64, start, std::bit_cast<uint64_t>(value));
  }

  Token hex_real(size_t start, int digits, Token::Kind kind) {
    at_ += 2;
    const uint64_t bits = digits_of(16, digits);
    return make(kind, start, bits);
  }

  Token radix_integer(size_t start, int radix) {
    at_ += 2;
    const uint64_t bits = digits_of(radix, 64);
    if (peek() == 'U') at_++;
    return make(Token::Kind::integer, start, bits);
  }

  // Up to `limit` digits; at least one.
  uint64_t digits_of(int radix, int limit) {
    uint64_t bits = 0;
    int count = 0;
    for (;; at_++, count++) {
      const char c = peek();
      const int digit = is_digit(c)            ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : 99;
      if (digit >= radix) break;
      if (count == limit || (radix == 16 && bits >> 60) || (radix == 2 && bits >> 63))
        throw PtxError(line_, "the number has too many digits");
      bits = bits * radix + digit;
    }
    if (count == 0) throw PtxError(line_, "the number has no digits");
    return bits;
  }

  Token decimal_integer(size_t start) {
    const std::string digits(source_.substr(start, at_ - start));
    const bool octal = digits.size() > 1 && digits[0] == '0';
    errno = 0;
    const uint64_t bits = std::strtoull(digits.c_str(), nullptr, octal ? 8 : 10);
    if (errno != 0) throw PtxError(line_, "the number " + digits.substr(0, 40) + " does not fit 64 bits");
    if (peek() == 'U') at_++;
    return make(Token::Kind::integer, start, bits);
  }

  std::string_view source_;
  size_t at_ = 0;
  int line_ = 1;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) { return Lexer(source).run(); }

}  // namespace jax_fa4::emulator

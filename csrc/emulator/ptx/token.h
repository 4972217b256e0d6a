// Cuts PTX text into tokens. A word keeps its dotted suffixes, so `ld.global.v4.b32`, `%tid.x` and
// `cp.async.bulk.shared::cluster.global` are one token each. Source: PTX ISA, "Syntax".
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace jax_fa4::emulator {

// What is wrong with PTX text and in which line (1 is the first). Thrown by every stage that reads PTX; load_module
// (parser.h) and the driver turn it into a sentence.
class PtxError : public std::runtime_error {
 public:
  PtxError(int line, const std::string& message)
      : std::runtime_error("PTX line " + std::to_string(line) + ": " + message), line_(line) {}
  int line() const { return line_; }

 private:
  int line_;
};

struct Token {
  enum class Kind : uint8_t { word, directive, integer, real32, real64, string, punctuation, end };
  Kind kind = Kind::end;
  int line = 0;
  std::string_view text;  // points into the source
  uint64_t bits = 0;      // value of integer; bit pattern of real32 and real64

  bool is(char c) const { return kind == Kind::punctuation && text[0] == c; }
  bool is_directive(std::string_view name) const { return kind == Kind::directive && text == name; }
};

// The last token is `end`. `source` must outlive the tokens.
std::vector<Token> tokenize(std::string_view source);

}  // namespace jax_fa4::emulator

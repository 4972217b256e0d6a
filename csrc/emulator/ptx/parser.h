// Reads PTX text into a ModuleSyntax: declarations, scopes, labels and operands. What an instruction means is decided
// later (decode.h).
#pragma once

#include <string_view>

#include "syntax.h"

namespace jax_fa4::emulator {

// `source` must outlive the result, which points into it. Throws PtxError.
ModuleSyntax parse_module(std::string_view source);

// Slots that a register or variable type takes, and its bytes; 0 for a word that is no type.
int type_bytes(std::string_view type);

}  // namespace jax_fa4::emulator

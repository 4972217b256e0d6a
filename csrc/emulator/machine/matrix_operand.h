// Operands of wgmma and tcgen05.mma in shared memory: their descriptors, and the check of what they read.
#pragma once

#include "../units/matrix.h"
#include "access.h"

namespace jax_fa4::emulator {

// Reads a 64-bit descriptor of one architecture; returns what is wrong with it, or nothing.
using DescriptorDecoder = std::string (*)(uint64_t bits, MatrixDescriptor& descriptor);

// The operand that a descriptor names; `name` ("A", "B") is for the fault of a descriptor that is not valid.
SharedOperand shared_operand(DescriptorDecoder decode, uint64_t bits, int rows, int depth, Format format, Major major,
                             const char* name);

// Marks all of an operand as read by `actor` and counts its bytes. `operand_name` opens the fault of an operand outside
// of the CTA's shared memory; `reader` names the access in reports.
void read_operand(Cta& cta, const SharedOperand& operand, const Actor& actor, const char* operand_name,
                  const char* reader);

}  // namespace jax_fa4::emulator

// See matrix_operand.h. Source: PTX ISA, "Matrix descriptors" of wgmma and of tcgen05.
#include "matrix_operand.h"

#include "grid.h"
#include "report.h"
#include "scheduler.h"

namespace jax_fa4::emulator {

SharedOperand shared_operand(DescriptorDecoder decode, uint64_t bits, int rows, int depth, Format format, Major major,
                             const char* name) {
  SharedOperand operand;
  std::string problem = decode(bits, operand.descriptor);
  operand.major = major;
  operand.format = format;
  operand.rows = rows;
  operand.depth = depth;
  if (problem.empty()) problem = check_operand(operand);
  if (!problem.empty())
    throw Fault(Status::launch_failed,
                std::string("the descriptor ") + hex(bits) + " of " + name + " is not valid: " + problem);
  return operand;
}

void read_operand(Cta& cta, const SharedOperand& operand, const Actor& actor, const char* operand_name,
                  const char* reader) {
  SharedPass pass(cta, actor, false, reader);
  walk_operand(operand, [&](uint32_t address) {
    if (!cta.shared.contains(address, 16) || address < kReservedShared)
      throw Fault(Status::illegal_address, std::string(operand_name) + " reaches shared address " + hex(address) +
                                               ", outside of the CTA's shared memory");
    pass.touch(address, 16);
  });
  cta.scheduler().counts.matrix_shared_read += static_cast<uint64_t>(operand.rows) *
                                               static_cast<uint64_t>(operand.depth) *
                                               static_cast<uint64_t>(detail::format_bytes(operand.format));
}

}  // namespace jax_fa4::emulator

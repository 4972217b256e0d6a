// wgmma and mma.sync. Each warp computes its own 16 of the 64 rows, later and in order. Source: PTX ISA, "Asynchronous
// warpgroup level matrix instructions", "mma.sync".
#include <bit>

#include "../units/matrix.h"
#include "asynchronous.h"
#include "grid.h"
#include "handlers.h"
#include "matrix_operand.h"
#include "report.h"
#include "scheduler.h"

namespace jax_fa4::emulator {
namespace {

constexpr int kRows = 64, kWarpRows = 16;
// Bits of flags: A in registers, negate A, negate B, transposed A, transposed B, f16 accumulators.
constexpr uint8_t kRegisters = 1, kNegateA = 2, kNegateB = 4, kTransposeA = 8, kTransposeB = 16, kNarrow = 32;

int accumulator_registers(const Instruction& i) { return i.mode * 8 / ((i.flags & kNarrow) ? 4 : 2); }

Major major_of(const Instruction& i, uint8_t transposed) { return (i.flags & transposed) ? Major::mn : Major::k; }

struct Work {
  WgmmaProduct product;
  SharedOperand a, b;
  bool negate_a = false, negate_b = false;
  std::vector<float> a_values;  // of this warp's rows, when A comes from registers
  std::vector<uint32_t*> accumulators;
};

std::vector<Warp*> warpgroup_of(const Warp& warp) {
  std::vector<Warp*> all;
  const size_t first = static_cast<size_t>(warp.index) / 4 * 4;
  for (size_t index = first; index < first + 4 && index < warp.cta.warps.size(); index++)
    all.push_back(warp.cta.warps[index].get());
  return all;
}

void wake_group(const Warp& warp) {
  for (Warp* one : warpgroup_of(warp)) one->wake({Wait::Kind::wgmma, 0});
}

void compute(Warp& warp, const Work& work) {
  thread_local std::vector<float> a_rows, b_columns;
  const int n = work.product.n, k = work.product.k;
  const uint8_t* shared = warp.cta.shared.data();
  b_columns.resize(static_cast<size_t>(n) * static_cast<size_t>(k));
  gather_transposed(work.b, shared, work.negate_b, b_columns.data(), static_cast<size_t>(n));
  const float* a = work.a_values.data();
  if (work.a_values.empty()) {
    a_rows.resize(static_cast<size_t>(kWarpRows) * static_cast<size_t>(k));
    gather_rows(work.a, shared, work.negate_a, a_rows.data(), static_cast<size_t>(k));
    a = a_rows.data();
  }
  multiply_into_registers(work.product, a, b_columns.data(), work.accumulators.data());
  warp.cta.scheduler().counts.multiply_adds +=
      static_cast<uint64_t>(kWarpRows) * static_cast<uint64_t>(n) * static_cast<uint64_t>(k);
}

}  // namespace

// list: accumulators, then A's registers; a: A's descriptor; b: B's descriptor; p or immediate: scale-d; mode: N / 8;
// type: of A, source_type: of B (as Format in c and e).
EMULATOR_HANDLER(execute_wgmma) {
  if (!warp.converged(0xffffffffu, lanes) || std::popcount(lanes) != kLanes)
    return warp.block({Wait::Kind::reconvergence, 0xffffffffu});
  const Format a_format = static_cast<Format>(i.type_code_a), b_format = static_cast<Format>(i.type_code_b);
  Work work;
  work.product.n = i.mode * 8;
  work.product.k = 32 / detail::format_bytes(a_format);
  work.product.accumulate = i.p >= 0 ? ((warp.predicate(i.p) & 1) != 0) != i.p_negated : i.immediate != 0;
  work.product.accumulate_f16 = (i.flags & kNarrow) != 0;
  work.negate_a = (i.flags & kNegateA) != 0;
  work.negate_b = (i.flags & kNegateB) != 0;
  const Slot* list = warp.list(i);
  const int accumulators = accumulator_registers(i);
  Operation operation = start_operation(warp, warp_agent(warp, warp.matrix_agent, "wgmma"));
  work.b = shared_operand(decode_wgmma_descriptor, warp.wide_source(i.b, 0), work.product.n, work.product.k, b_format,
                          major_of(i, kTransposeB), "B");
  std::vector<Slot> written(list, list + accumulators), read;
  if (i.flags & kRegisters) {
    const uint32_t* registers[4];
    for (int r = 0; r < 4; r++) {
      registers[r] = warp.raw(list[accumulators + r]);
      read.push_back(list[accumulators + r]);
    }
    work.a_values.resize(static_cast<size_t>(kWarpRows) * static_cast<size_t>(work.product.k));
    gather_a_from_registers(a_format, registers, work.negate_a, work.a_values.data());
  } else {
    work.a = shared_operand(decode_wgmma_descriptor, warp.wide_source(i.a, 0), kRows, work.product.k, a_format,
                            major_of(i, kTransposeA), "A");
    work.a.rows = kWarpRows;
    work.a.first_row = warp.index % 4 * kWarpRows;
    read_operand(warp.cta, work.a, operation.actor(), "a wgmma operand", "a wgmma");
  }
  if (warp.needs_fence(written) || warp.needs_fence(read))
    throw Fault(Status::launch_failed,
                "registers of this wgmma were touched by other instructions, and no wgmma.fence lies between");
  read_operand(warp.cta, work.b, operation.actor(), "a wgmma operand", "a wgmma");
  for (int r = 0; r < accumulators; r++) work.accumulators.push_back(warp.raw(list[r]));
  GroupQueue::Group& group = warp.matrix.open();
  group.unfinished++;
  group.last_time = operation.stamp.time;
  const uint64_t number = warp.matrix.open_number();
  warp.hold(number, std::move(written), std::move(read));
  Warp* issuer = &warp;
  warp.matrix_due = warp.cta.scheduler().later(
      warp.cta.cluster,
      [issuer, number, work = std::move(work)] {
        compute(*issuer, work);
        if (GroupQueue::Group* done = issuer->matrix.find(number)) done->unfinished--;
        wake_group(*issuer);
      },
      warp.matrix_due);
  return Flow::next;
}

EMULATOR_HANDLER(execute_wgmma_fence) {
  warp.fence_registers();
  return Flow::next;
}

EMULATOR_HANDLER(execute_wgmma_commit) {
  warp.matrix.commit();
  wake_group(warp);
  return Flow::next;
}

// A group of wgmma is one of the whole warpgroup: what a warp waits for is complete in all four warps. (CUTLASS's
// attention on Hopper relies on it: it writes its output over operands with no barrier of the warpgroup between.)
EMULATOR_HANDLER(execute_wgmma_wait) {
  const uint64_t open = warp.matrix.open_number(), end = open - std::min<uint64_t>(open, i.immediate);
  for (const Warp* one : warpgroup_of(warp))
    if (!one->matrix.complete_before(end)) return warp.block({Wait::Kind::wgmma, 0});
  for (const Warp* one : warpgroup_of(warp))
    if (one->matrix_agent != 0) warp.knows.happened.raise(one->matrix_agent, one->matrix.time_before(end));
  warp.knows.happened.raise(warp.matrix_agent, warp.matrix.acquire(i.immediate));
  if (open >= i.immediate) warp.let_go(open - i.immediate);
  return Flow::next;
}

// list: d (4), a, b, c (4). mode: K; type codes: formats of A and B.
EMULATOR_HANDLER(execute_mma_sync) {
  if (!warp.converged(0xffffffffu, lanes)) return warp.block({Wait::Kind::reconvergence, 0xffffffffu});
  const Format a_format = static_cast<Format>(i.type_code_a), b_format = static_cast<Format>(i.type_code_b);
  const int a_count = i.mode * detail::format_bytes(a_format) / 8, b_count = a_count / 2;
  const Slot* list = warp.list(i);
  const uint32_t *a[4], *b[2], *c[4];
  uint32_t result[4][kLanes];
  uint32_t* d[4] = {result[0], result[1], result[2], result[3]};
  for (int r = 0; r < a_count; r++) a[r] = warp.source(list[4 + r]);
  for (int r = 0; r < b_count; r++) b[r] = warp.source(list[4 + a_count + r]);
  for (int r = 0; r < 4; r++) c[r] = warp.source(list[4 + a_count + b_count + r]);
  mma_sync_m16n8(a_format, b_format, i.mode, a, b, c, d);
  for (int r = 0; r < 4; r++) warp.write(list[r], result[r], 1, lanes);
  warp.cta.scheduler().counts.multiply_adds += uint64_t{16} * 8 * i.mode;
  return Flow::next;
}

}  // namespace jax_fa4::emulator

// tcgen05: tensor memory, its loads and stores, and the fifth-generation matrix instructions, which run later and in
// the order in which a warp issued them. Source: PTX ISA, "TensorCore 5th Generation Family Instructions".
#include <array>
#include <bit>
#include <cstring>

#include "../units/matrix.h"
#include "../units/tmem.h"
#include "asynchronous.h"
#include "grid.h"
#include "handlers.h"
#include "lane_functions.h"
#include "matrix_operand.h"
#include "report.h"
#include "scheduler.h"

namespace jax_fa4::emulator {
namespace {

constexpr int kPieceLanes = 16;

TensorMemory& tensor_of(Cta& cta) {
  if (cta.tensor == nullptr) throw Fault(Status::illegal_instruction, "tcgen05 needs compute capability 10.0 or later");
  return *cta.tensor;
}

void read_tensor(Cta& cta, int first_piece, int pieces, int column, int columns, const Actor& actor, const char* what) {
  if (!tensor_of(cta).allocated(column, columns))
    throw Fault(Status::illegal_address, std::string(what) + " reads columns " + std::to_string(column) + " to " +
                                             std::to_string(column + columns - 1) +
                                             " of tensor memory, which are not allocated");
  const Conflict conflict = tensor_of(cta).touch(first_piece, pieces, column, columns, actor, false);
  if (conflict.kind != Conflict::Kind::none) report_tensor_conflict(cta, conflict, actor, what);
}

void write_tensor(Cta& cta, int first_piece, int pieces, int column, int columns, const Actor& actor,
                  const char* what) {
  if (!tensor_of(cta).allocated(column, columns))
    throw Fault(Status::illegal_address, std::string(what) + " writes columns " + std::to_string(column) + " to " +
                                             std::to_string(column + columns - 1) +
                                             " of tensor memory, which are not allocated");
  const Conflict conflict = tensor_of(cta).touch(first_piece, pieces, column, columns, actor, true);
  if (conflict.kind != Conflict::Kind::none) report_tensor_conflict(cta, conflict, actor, what);
}

bool whole_warp(const Warp& warp, uint32_t lanes) { return warp.converged(0xffffffffu, lanes); }
Wait reconvergence() { return {Wait::Kind::reconvergence, 0xffffffffu}; }

// The CTAs that a matrix instruction of the group works in, the even rank first.
std::vector<Cta*> group_of(Warp& warp, int cta_group) {
  if (cta_group != 2) return {&warp.cta};
  const uint32_t even = warp.cta.rank & ~1u;
  if (even + 1 >= warp.cta.cluster.ctas.size())
    throw Fault(Status::launch_failed, "cta_group::2 needs a cluster with an even number of CTAs");
  return {warp.cta.cluster.ctas[even].get(), warp.cta.cluster.ctas[even + 1].get()};
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------
// allocation

namespace {

// A pair allocates together: true once the other CTA has come to as many allocations as this one.
bool pair_allocates(Warp& warp) {
  const std::vector<Cta*> pair = group_of(warp, 2);
  Cta& other = *pair[pair[0] == &warp.cta ? 1 : 0];
  if (warp.pair_allocations == 0) {
    warp.pair_allocations = ++warp.cta.tensor->pair_allocations;
    warp.cta.scheduler().progress();
    other.wake({Wait::Kind::tensor_memory, 0});
  }
  return tensor_of(other).pair_allocations >= warp.pair_allocations;
}

}  // namespace

// a: where the address goes; b: columns.
EMULATOR_HANDLER(execute_tensor_allocate) {
  if (!whole_warp(warp, lanes)) return warp.block(reconvergence());
  const int lane = std::countr_zero(lanes);
  TensorMemory& tensor = tensor_of(warp.cta);
  const uint32_t columns = warp.source(i.b)[lane];
  if (columns < 32 || columns > 512 || !std::has_single_bit(columns))
    throw Fault(Status::launch_failed,
                "tcgen05.alloc of " + std::to_string(columns) + " columns: accepted are powers of two from 32 to 512");
  if (tensor.relinquished) throw Fault(Status::launch_failed, "tcgen05.alloc after tcgen05.relinquish_alloc_permit");
  const SharedPlace place = resolve_shared(warp, warp.address(i, lane), 4, "tcgen05.alloc");
  if (i.cta_group == 2 && !pair_allocates(warp)) return warp.block({Wait::Kind::tensor_memory, 0});
  const int column = tensor.allocate(static_cast<int>(columns));
  if (column < 0) return warp.block({Wait::Kind::tensor_memory, 0});
  warp.pair_allocations = 0;
  place.cta->write_shared(place.offset, 4, actor_of(warp), "tcgen05.alloc");
  std::memcpy(place.cta->shared.data() + place.offset, &column, 4);
  warp.cta.scheduler().progress();
  return Flow::next;
}

// a: address; b: columns.
EMULATOR_HANDLER(execute_tensor_deallocate) {
  if (!whole_warp(warp, lanes)) return warp.block(reconvergence());
  const int lane = std::countr_zero(lanes);
  const uint32_t address = warp.source(i.a)[lane], columns = warp.source(i.b)[lane];
  if (!tensor_of(warp.cta).release(static_cast<int>(address & 0xffff), static_cast<int>(columns)))
    throw Fault(Status::launch_failed, "tcgen05.dealloc of " + std::to_string(columns) + " columns at " + hex(address) +
                                           ", which is no allocation");
  warp.cta.scheduler().progress();
  warp.cta.wake({Wait::Kind::tensor_memory, 0});
  return Flow::next;
}

EMULATOR_HANDLER(execute_tensor_relinquish) {
  if (!whole_warp(warp, lanes)) return warp.block(reconvergence());
  tensor_of(warp.cta).relinquished = true;
  return Flow::next;
}

// -------------------------------------------------------------------------------------------------------- loads,
// stores

namespace {

// mode: TensorShape; flags 1: pack/unpack; immediate: the half split of 16x32bx2.
TensorAccess access_of(const Instruction& i) {
  return {static_cast<TensorShape>(i.mode), static_cast<int>(i.list_count), (i.flags & 1) != 0,
          static_cast<int>(i.immediate)};
}

uint32_t checked_address(Warp& warp, const Instruction& i, const TensorAccess& access) {
  const uint32_t address = static_cast<uint32_t>(warp.address(i, 0));
  const std::string problem = check_tensor_access(access, address, warp.index);
  if (!problem.empty())
    throw Fault(Status::illegal_address, "tensor-memory address " + hex(address) + " is not valid for warp " +
                                             std::to_string(warp.index) + ": " + problem);
  return address;
}

template <class Touch>
void each_part(const TensorAccess& access, uint32_t address, Touch touch) {
  const int first_piece = static_cast<int>(address >> 16) / kPieceLanes,
            pieces = tensor_access_lanes(access) / kPieceLanes;
  const int column = static_cast<int>(address & 0xffff), columns = tensor_access_columns(access);
  touch(first_piece, pieces, column, columns);
  if (access.shape == TensorShape::lanes16_bits32x2) touch(first_piece, pieces, column + access.half_split, columns);
}

}  // namespace

namespace {

// The least or greatest of a thread's registers, by the instruction's type codes.
void reduce_registers(const Instruction& i, uint32_t* const* registers, uint32_t* result) {
  const MinMaxOptions options{false, (i.type_code_b & kPropagateNan) != 0, false, (i.type_code_b & kAbsolute) != 0};
  const bool least = i.type_code_a == 1;
  for (int lane = 0; lane < kLanes; lane++) {
    uint32_t found = registers[0][lane];
    if (i.type_code_b & kAbsolute) found &= 0x7fffffffu;
    for (uint32_t r = 1; r < i.list_count; r++) {
      const uint32_t next = registers[r][lane];
      if (i.type == Type::f32) {
        found = least ? min_f32(found, next, options) : max_f32(found, next, options);
        continue;
      }
      const bool below = i.type == Type::s32 ? static_cast<int32_t>(next) < static_cast<int32_t>(found) : next < found;
      if (below == least && next != found) found = next;
    }
    result[lane] = found;
  }
}

}  // namespace

// Registers of a load are interlocked: they can be used at once. For others, the read is over when a register was
// touched, or after tcgen05.wait::ld.
EMULATOR_HANDLER(execute_tensor_memory_load) {
  if (!whole_warp(warp, lanes)) return warp.block(reconvergence());
  const TensorAccess access = access_of(i);
  const uint32_t address = checked_address(warp, i, access);
  const Operation operation = start_operation(warp, warp_agent(warp, warp.load_agent, "tcgen05.ld"));
  warp.load_time = operation.stamp.time;
  each_part(access, address, [&](int piece, int pieces, int column, int columns) {
    read_tensor(warp.cta, piece, pieces, column, columns, operation.actor(), "tcgen05.ld");
  });
  const Slot* list = warp.list(i);
  std::array<uint32_t*, 256> registers;
  for (uint32_t r = 0; r < i.list_count; r++) registers[r] = warp.destination(list[r]);
  load_tensor(access, address, tensor_of(warp.cta).data(), registers.data());
  std::vector<Slot> loaded(list, list + i.list_count);
  if (i.type_code_a != 0) {
    reduce_registers(i, registers.data(), warp.destination(i.d));
    loaded.push_back(i.d);
  }
  warp.expect_load(operation.stamp.time, std::move(loaded));
  warp.cta.scheduler().counts.tensor_memory_read += uint64_t{128} * i.list_count;
  return Flow::next;
}

// A store is complete, for others and for the warp itself, only after tcgen05.wait::st.
EMULATOR_HANDLER(execute_tensor_memory_store) {
  if (!whole_warp(warp, lanes)) return warp.block(reconvergence());
  const TensorAccess access = access_of(i);
  const uint32_t address = checked_address(warp, i, access);
  const Operation operation = start_operation(warp, warp_agent(warp, warp.tensor_agent, "tcgen05.st"));
  warp.tensor_time = operation.stamp.time;
  each_part(access, address, [&](int piece, int pieces, int column, int columns) {
    write_tensor(warp.cta, piece, pieces, column, columns, operation.actor(), "tcgen05.st");
  });
  const Slot* list = warp.list(i);
  std::array<const uint32_t*, 256> registers;
  for (uint32_t r = 0; r < i.list_count; r++) registers[r] = warp.source(list[r]);
  store_tensor(access, address, tensor_of(warp.cta).data(), registers.data());
  warp.cta.scheduler().counts.tensor_memory_written += uint64_t{128} * i.list_count;
  warp.cta.scheduler().progress();
  return Flow::next;
}

// mode: 0 ld, 1 st.
EMULATOR_HANDLER(execute_tensor_wait) {
  if (!whole_warp(warp, lanes)) return warp.block(reconvergence());
  if (i.mode == 1 && warp.tensor_agent != 0) warp.knows.happened.raise(warp.tensor_agent, warp.tensor_time);
  if (i.mode == 0 && warp.load_agent != 0) warp.complete_loads(warp.load_time);
  return Flow::next;
}

// mode: 0 before_thread_sync, 1 after_thread_sync. Between them lies what orders the threads.
EMULATOR_HANDLER(execute_tensor_fence) {
  if (warp.tensor_view == nullptr) return Flow::next;
  if (i.mode == 1) {
    warp.tensor_view->fenced.join(warp.knows.tensor_fenced);
    return Flow::next;
  }
  for (const Agent agent : {warp.pipe_agent, warp.load_agent, warp.tensor_agent})
    if (agent != 0) warp.knows.tensor_fenced.raise(agent, warp.cta.cluster.time_of(agent));
  warp.knows.tensor_fenced.join(warp.tensor_view->fenced);
  return Flow::next;
}

// ------------------------------------------------------------------------------------------------------------ products

namespace {

struct Mma {
  MmaProduct product;
  bool a_in_tensor = false;
  uint32_t a_lane = 0, a_column = 0;
  SharedOperand a, b;
  std::vector<Cta*> ctas;
  std::array<uint32_t, 8> disabled{};
  bool has_disabled = false;
};

// Every column and lane that the instruction touches in tensor memory of one CTA.
void touch_tensor(Cta& cta, const Mma& mma, const Actor& actor) {
  const MmaProduct& product = mma.product;
  const AccumulatorMap map = accumulator_map(product.instruction.shape, product.cta_group);
  const int column = static_cast<int>(product.column), first = static_cast<int>(product.lane) / kPieceLanes;
  if (mma.a_in_tensor) {
    const int lanes = map.spread ? 64 : 128;
    read_tensor(cta, map.spread ? static_cast<int>(mma.a_lane) / kPieceLanes : 0, lanes / kPieceLanes,
                static_cast<int>(mma.a_column), a_columns(product.instruction), actor, "tcgen05.mma");
  }
  const int pieces = map.spread ? 4 : map.rows * map.blocks / kPieceLanes;
  for (int piece = 0; piece < pieces; piece++) {
    const int at = first + (map.spread ? 2 * piece : piece);
    if (product.accumulate) read_tensor(cta, at, 1, column, map.columns, actor, "tcgen05.mma");
    write_tensor(cta, at, 1, column, map.columns, actor, "tcgen05.mma");
  }
}

// Descriptors, instruction descriptor and predicate of the issuing lane. mode: MmaKind; flags 1: A in tensor memory.
Mma mma_of(Warp& warp, const Instruction& i, int lane) {
  Mma mma;
  MmaProduct& product = mma.product;
  product.kind = static_cast<MmaKind>(i.mode);
  product.cta_group = i.cta_group;
  const uint32_t bits = warp.source(i.e)[lane];
  std::string problem = decode_instruction_descriptor(bits, product.kind, i.cta_group, product.instruction);
  if (!problem.empty())
    throw Fault(Status::launch_failed, "the instruction descriptor " + hex(bits) + " is not valid: " + problem);
  const uint32_t target = static_cast<uint32_t>(warp.address(i, lane));
  product.lane = target >> 16;
  product.column = target & 0xffff;
  product.accumulate = i.p >= 0 ? (((warp.predicate(i.p) >> lane) & 1) != 0) != i.p_negated : i.immediate != 0;
  problem = check_accumulator(product);
  if (!problem.empty())
    throw Fault(Status::illegal_address, "the accumulator at " + hex(target) + " is not valid: " + problem);
  const InstructionDescriptor& instruction = product.instruction;
  const int m = instruction.shape.m / i.cta_group, n = instruction.shape.n / i.cta_group, k = instruction.shape.k;
  if (i.flags & 1) {
    const uint32_t address = static_cast<uint32_t>(warp.address(i.second, lane));
    mma.a_in_tensor = true;
    mma.a_lane = address >> 16;
    mma.a_column = address & 0xffff;
  } else {
    mma.a = shared_operand(decode_tcgen05_descriptor, warp.wide_source(i.b, lane), m, k, instruction.a_format,
                           instruction.a_major, "A");
  }
  mma.b = shared_operand(decode_tcgen05_descriptor, warp.wide_source(i.c, lane), n, k, instruction.b_format,
                         instruction.b_major, "B");
  mma.ctas = group_of(warp, i.cta_group);
  const Slot* list = warp.list(i);
  for (uint32_t w = 0; w < i.list_count && w < 8; w++) mma.disabled[w] = warp.source(list[w])[lane];
  mma.has_disabled = i.list_count != 0;
  return mma;
}

void compute_floats(Mma& mma) {
  thread_local std::vector<float> a, b;
  const InstructionDescriptor& instruction = mma.product.instruction;
  const size_t n = static_cast<size_t>(instruction.shape.n), k = static_cast<size_t>(instruction.shape.k);
  const AccumulatorMap map = accumulator_map(instruction.shape, mma.product.cta_group);
  b.resize(n * k);
  for (size_t c = 0; c < mma.ctas.size(); c++)
    gather_transposed(mma.b, mma.ctas[c]->shared.data(), instruction.negate_b, b.data() + c * (n / mma.ctas.size()), n);
  for (Cta* cta : mma.ctas) {
    const int blocks = mma.a_in_tensor ? map.blocks : 1;
    const size_t rows = static_cast<size_t>(map.rows);
    a.resize(rows * k * static_cast<size_t>(blocks));
    if (mma.a_in_tensor) {
      for (int block = 0; block < blocks; block++)
        gather_a_from_tensor_memory(instruction, mma.product.cta_group, block, mma.a_lane, mma.a_column,
                                    cta->tensor->data(), a.data() + static_cast<size_t>(block) * rows * k);
    } else {
      gather_rows(mma.a, cta->shared.data(), instruction.negate_a, a.data(), k);
    }
    multiply_into_tensor_memory(mma.product, a.data(), blocks, b.data(), cta->tensor->data());
    cta->scheduler().counts.multiply_adds += rows * n * k;
  }
}

void compute_integers(Mma& mma) {
  const InstructionDescriptor& instruction = mma.product.instruction;
  const size_t n = static_cast<size_t>(instruction.shape.n), k = static_cast<size_t>(instruction.shape.k);
  std::vector<int32_t> rows(n * k), b(n * k), a;
  for (size_t c = 0; c < mma.ctas.size(); c++)
    gather_rows_s32(mma.b, mma.ctas[c]->shared.data(), instruction.b_signed,
                    rows.data() + c * (n / mma.ctas.size()) * k, k);
  for (size_t column = 0; column < n; column++)
    for (size_t depth = 0; depth < k; depth++) b[depth * n + column] = rows[column * k + depth];
  for (Cta* cta : mma.ctas) {
    const size_t count = static_cast<size_t>(mma.a.rows);
    a.resize(count * k);
    gather_rows_s32(mma.a, cta->shared.data(), instruction.a_signed, a.data(), k);
    multiply_into_tensor_memory_s32(mma.product, a.data(), b.data(), cta->tensor->data());
    cta->scheduler().counts.multiply_adds += count * n * k;
  }
}

}  // namespace

EMULATOR_HANDLER(execute_tensor_mma) {
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    tensor_of(warp.cta);
    Mma mma = mma_of(warp, i, lane);
    if (mma.product.kind == MmaKind::i8 && mma.a_in_tensor)
      throw Fault(Status::not_supported, "kind::i8 with A in tensor memory is not supported");
    const Operation operation = start_operation(warp, warp_agent(warp, warp.pipe_agent, "tcgen05.mma"));
    for (Cta* cta : mma.ctas) {
      if (!mma.a_in_tensor) read_operand(*cta, mma.a, operation.actor(), "a tcgen05.mma operand", "tcgen05.mma");
      read_operand(*cta, mma.b, operation.actor(), "a tcgen05.mma operand", "tcgen05.mma");
      touch_tensor(*cta, mma, operation.actor());
    }
    warp.pipe_due = warp.cta.scheduler().later(
        warp.cta.cluster,
        [mma = std::move(mma)]() mutable {
          mma.product.disabled_lanes = mma.has_disabled ? mma.disabled.data() : nullptr;
          if (mma.product.kind == MmaKind::i8)
            compute_integers(mma);
          else
            compute_floats(mma);
        },
        warp.pipe_due);
  }
  return Flow::next;
}

// a: the mbarrier; e: mask of CTAs if flags 1.
EMULATOR_HANDLER(execute_tensor_commit) {
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    const SharedPlace place = resolve_shared(warp, warp.address(i, lane), 8, "tcgen05.commit");
    std::vector<Cta*> targets{place.cta};
    if (i.flags & 1) {
      targets.clear();
      const uint32_t mask = warp.source(i.e)[lane] & 0xffff;
      for (uint32_t rank = 0; rank < 16; rank++) {
        if (((mask >> rank) & 1) == 0) continue;
        if (rank >= warp.cta.cluster.ctas.size())
          throw Fault(Status::launch_failed, "the multicast mask " + hex(mask) + " of tcgen05.commit names CTA rank " +
                                                 std::to_string(rank) + ", which the cluster does not have");
        targets.push_back(warp.cta.cluster.ctas[rank].get());
      }
    }
    Operation operation = start_operation(warp, warp_agent(warp, warp.pipe_agent, "tcgen05.mma"));
    if (warp.tensor_view != nullptr) {  // it implies tcgen05.fence::before_thread_sync
      auto fenced = std::make_shared<Knowledge>(*operation.knows);
      fenced->tensor_fenced.raise(warp.pipe_agent, operation.stamp.time);
      operation.knows = std::move(fenced);
    }
    for (Cta* cta : targets) cta->mbarrier(place.offset, warp);
    const Arrival who{"tcgen05.commit", nullptr, i.line};
    warp.pipe_due = warp.cta.scheduler().later(
        warp.cta.cluster,
        [=] {
          for (Cta* cta : targets) cta->arrive(place.offset, 1, 0, completion_of(operation), who);
        },
        warp.pipe_due);
  }
  return Flow::next;
}

// a: tensor-memory address; b: descriptor; mode: TensorCopyShape.
EMULATOR_HANDLER(execute_tensor_memory_copy) {
  const TensorCopyShape shape = static_cast<TensorCopyShape>(i.mode);
  for (int lane = 0; lane < kLanes; lane++) {
    if (((lanes >> lane) & 1) == 0) continue;
    const uint32_t address = static_cast<uint32_t>(warp.address(i, lane));
    const uint64_t bits = warp.wide_source(i.b, lane);
    MatrixDescriptor source;
    const std::string problem = decode_tcgen05_descriptor(bits, source);
    if (!problem.empty())
      throw Fault(Status::launch_failed, "the descriptor " + hex(bits) + " of tcgen05.cp is not valid: " + problem);
    const Operation operation = start_operation(warp, warp_agent(warp, warp.pipe_agent, "tcgen05.mma"));
    const std::vector<Cta*> ctas = group_of(warp, i.cta_group);
    const int column = static_cast<int>(address & 0xffff);
    for (Cta* cta : ctas) {
      walk_tensor_copy(shape, source, [&](uint32_t from, int, int) {
        if (!cta->shared.contains(from, 16))
          throw Fault(Status::illegal_address,
                      "tcgen05.cp reaches shared address " + hex(from) + ", outside of the CTA's shared memory");
        cta->read_shared(from, 16, operation.actor(), "tcgen05.cp");
      });
      write_tensor(*cta, 0, kTensorLanes / kPieceLanes, column, tensor_copy_columns(shape), operation.actor(),
                   "tcgen05.cp");
    }
    warp.pipe_due = warp.cta.scheduler().later(
        warp.cta.cluster,
        [=] {
          for (Cta* cta : ctas)
            walk_tensor_copy(shape, source, [&](uint32_t from, int to_lane, int to_column) {
              std::memcpy(cta->tensor->data() + to_lane * kTensorColumns + column + to_column,
                          cta->shared.data() + from, 16);
            });
        },
        warp.pipe_due);
  }
  return Flow::next;
}

}  // namespace jax_fa4::emulator

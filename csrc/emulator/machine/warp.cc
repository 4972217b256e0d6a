// See warp.h.
#include "warp.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "grid.h"
#include "scheduler.h"

namespace jax_fa4::emulator {
namespace {

// Registers start as a quiet NaN that is easy to recognise.
constexpr uint32_t kPoison = 0x7fdeadbau;

// Register files of warps that are gone, for those to come: memory that the host has mapped already.
thread_local std::vector<std::vector<uint32_t>> spare_registers;
constexpr size_t kMostSpare = 64;

// Poison shows where registers that were never written matter. Where that is looked at anyway they may hold anything.
std::vector<uint32_t> fresh_registers(size_t words, bool are_checked) {
  std::vector<uint32_t> registers;
  const auto fits = [&](const std::vector<uint32_t>& spare) { return spare.size() >= words; };
  const auto found = std::find_if(spare_registers.begin(), spare_registers.end(), fits);
  if (found != spare_registers.end()) {
    std::swap(*found, spare_registers.back());
    registers = std::move(spare_registers.back());
    spare_registers.pop_back();
  } else if (spare_registers.size() == kMostSpare) {
    spare_registers.clear();
  }
  if (!are_checked || registers.empty()) registers.assign(words, kPoison);
  return registers;
}

uint64_t preset_value(const Preset& preset, const Warp& warp, int lane) {
  using K = Preset::Kind;
  const Cta& cta = warp.cta;
  const Grid& grid = cta.grid();
  const Dim3 block = grid.shape.block, cluster = grid.shape.cluster, dims = grid.shape.grid;
  const uint32_t thread = static_cast<uint32_t>(warp.index * kLanes + lane);
  const Dim3 in_cluster{cta.index.x % cluster.x, cta.index.y % cluster.y, cta.index.z % cluster.z};
  const uint32_t bit = 1u << lane;
  const uint32_t window = cta.rank << kRankShift;
  switch (preset.kind) {
    case K::tid_x:
      return thread % block.x;
    case K::tid_y:
      return thread / block.x % block.y;
    case K::tid_z:
      return thread / block.x / block.y;
    case K::ntid_x:
      return block.x;
    case K::ntid_y:
      return block.y;
    case K::ntid_z:
      return block.z;
    case K::ctaid_x:
      return cta.index.x;
    case K::ctaid_y:
      return cta.index.y;
    case K::ctaid_z:
      return cta.index.z;
    case K::nctaid_x:
      return dims.x;
    case K::nctaid_y:
      return dims.y;
    case K::nctaid_z:
      return dims.z;
    case K::laneid:
      return static_cast<uint64_t>(lane);
    case K::warpid:
      return static_cast<uint64_t>(warp.index);
    case K::nwarpid:
      return static_cast<uint64_t>(grid.warps_per_cta);
    case K::smid:
      return (cta.cluster.number * cluster.product() + cta.rank) % static_cast<uint64_t>(grid.options.sm_count);
    case K::nsmid:
      return static_cast<uint64_t>(grid.options.sm_count);
    case K::gridid:
      return 1;
    case K::lanemask_eq:
      return bit;
    case K::lanemask_lt:
      return bit - 1;
    case K::lanemask_le:
      return bit | (bit - 1);
    case K::lanemask_gt:
      return ~(bit | (bit - 1));
    case K::lanemask_ge:
      return ~(bit - 1);
    case K::clusterid_x:
      return cta.index.x / cluster.x;
    case K::clusterid_y:
      return cta.index.y / cluster.y;
    case K::clusterid_z:
      return cta.index.z / cluster.z;
    case K::nclusterid_x:
      return dims.x / cluster.x;
    case K::nclusterid_y:
      return dims.y / cluster.y;
    case K::nclusterid_z:
      return dims.z / cluster.z;
    case K::cluster_ctaid_x:
      return in_cluster.x;
    case K::cluster_ctaid_y:
      return in_cluster.y;
    case K::cluster_ctaid_z:
      return in_cluster.z;
    case K::cluster_nctaid_x:
      return cluster.x;
    case K::cluster_nctaid_y:
      return cluster.y;
    case K::cluster_nctaid_z:
      return cluster.z;
    case K::cluster_ctarank:
      return cta.rank;
    case K::cluster_nctarank:
      return cluster.product();
    case K::is_explicit_cluster:
      return cluster.product() > 1;
    case K::dynamic_smem_size:
      return grid.shape.dynamic_shared_bytes;
    case K::total_smem_size:
      return grid.shared_bytes;
    case K::reserved_smem_begin:
      return window;
    case K::reserved_smem_end:
    case K::reserved_smem_cap:
      return window + kReservedShared;
    case K::shared_symbol:
      return window + kReservedShared + grid.program.symbols[preset.symbol].offset +
             static_cast<uint64_t>(preset.offset);
    case K::param_symbol:
      return reinterpret_cast<uint64_t>(grid.params) + grid.program.symbols[preset.symbol].offset +
             static_cast<uint64_t>(preset.offset);
    case K::local_symbol:
      return kLocalWindow + grid.program.symbols[preset.symbol].offset + static_cast<uint64_t>(preset.offset);
    case K::global_symbol:
      return reinterpret_cast<uint64_t>(grid.module_variables[preset.symbol]) + static_cast<uint64_t>(preset.offset);
  }
  return 0;
}

}  // namespace

const char* wait_name(Wait::Kind kind) {
  static const char* const kNames[] = {
      "nothing",        "lanes of its own warp", "named barrier", "cluster barrier",      "mbarrier",  "bulk group",
      "cp.async group", "wgmma group",           "tensor memory", "tensor-memory access", "registers", "a change"};
  return kNames[static_cast<int>(kind)];
}

Warp::Warp(Cta& owner, int warp_index, uint32_t lanes)
    : cta(owner), index(warp_index), initial_lanes(lanes), exited(~lanes) {
  const Grid& grid = owner.grid();
  const Program& program = grid.program;
  registers_ = fresh_registers(static_cast<size_t>(program.register_slots + 4) * kLanes, grid.options.check_registers);
  predicates_.assign(program.predicates + 1, 0);
  holds_.assign(program.register_slots + 4, 0);
  if (grid.options.check_tensor_fences) tensor_view = std::make_unique<TensorView>();
  if (grid.options.check_registers) written_ = std::make_unique<RegisterRecord>(program);
  constants_ = program.constants.data();
  lists_ = program.lists.data();
  current = {0, lanes, {}};
  local.assign(static_cast<size_t>(program.local_bytes) * kLanes, 0xff);
  registers_per_thread = grid.launch_registers;
  for (const Preset& preset : program.presets)
    for (int lane = 0; lane < kLanes; lane++) {
      const uint64_t value = preset_value(preset, *this, lane);
      raw(static_cast<Slot>(preset.slot))[lane] = static_cast<uint32_t>(value);
      if (preset.slots == 2) raw(static_cast<Slot>(preset.slot + 1))[lane] = static_cast<uint32_t>(value >> 32);
    }
}

Warp::~Warp() {
  if (spare_registers.size() < kMostSpare) spare_registers.push_back(std::move(registers_));
}

namespace {

// A plane of 32 words; the places do not overlap, unless they are the same.
void copy_plane(uint32_t* to, const uint32_t* from) {
  for (int lane = 0; lane < kLanes; lane += 4) {
    uint64_t words[2];
    std::memcpy(words, from + lane, sizeof words);
    std::memcpy(to + lane, words, sizeof words);
  }
}

}  // namespace

void Warp::write(Slot slot, const uint32_t* value, int planes, uint32_t lanes) {
  for (int plane = 0; plane < planes; plane++) {
    uint32_t* to = destination(slot + plane);
    const uint32_t* from = value + plane * kLanes;
    if (lanes == 0xffffffffu) {
      copy_plane(to, from);
      continue;
    }
    for (int lane = 0; lane < kLanes; lane++) {
      const uint32_t keep = 0u - ((~lanes >> lane) & 1u);
      to[lane] = (to[lane] & keep) | (from[lane] & ~keep);
    }
  }
}

void Warp::touch(Slot slot, bool writes) const {
  uint8_t& held_for = holds_[static_cast<size_t>(slot)];
  if (held_for == 0) return;
  if (held_for & kWritten)
    throw Fault(Status::launch_failed, "a register that a wgmma is still writing is touched before wgmma.wait_group");
  if (writes && (held_for & kRead) != 0)
    throw Fault(Status::launch_failed,
                "a register that a wgmma is still reading is overwritten before wgmma.wait_group");
  if (held_for & kMatrix) held_for |= kTouched;
  if ((held_for & kLoading) == 0) return;
  for (const Held& load : loads_)
    if (std::find(load.written.begin(), load.written.end(), slot) != load.written.end())
      return complete_loads(static_cast<uint32_t>(load.group));
}

void Warp::hold(uint64_t group, std::vector<Slot> written, std::vector<Slot> read) {
  for (const Slot slot : written) holds_[static_cast<size_t>(slot)] |= kWritten | kMatrix;
  for (const Slot slot : read) holds_[static_cast<size_t>(slot)] |= kRead | kMatrix;
  held.push_back({group, std::move(written), std::move(read)});
  watching_ = true;
}

void Warp::let_go(uint64_t before_group) {
  constexpr uint8_t kOthers = static_cast<uint8_t>(~(kWritten | kRead));
  std::erase_if(held, [&](const Held& one) {
    if (one.group >= before_group) return false;
    for (const Slot slot : one.written) holds_[static_cast<size_t>(slot)] &= kOthers;
    for (const Slot slot : one.read) holds_[static_cast<size_t>(slot)] &= kOthers;
    return true;
  });
  for (const Held& one : held) {
    for (const Slot slot : one.written) holds_[static_cast<size_t>(slot)] |= kWritten;
    for (const Slot slot : one.read) holds_[static_cast<size_t>(slot)] |= kRead;
  }
}

void Warp::expect_load(uint32_t when, std::vector<Slot> registers) {
  for (const Slot slot : registers) holds_[static_cast<size_t>(slot)] |= kLoading;
  loads_.push_back({when, std::move(registers), {}});
  watching_ = true;
}

// Loads of a warp complete in order.
void Warp::complete_loads(uint32_t when) const {
  knows.happened.raise(load_agent, when);
  std::erase_if(loads_, [&](const Held& load) {
    if (load.group > when) return false;
    for (const Slot slot : load.written) holds_[static_cast<size_t>(slot)] &= static_cast<uint8_t>(~kLoading);
    return true;
  });
}

void Warp::fence_registers() {
  for (uint8_t& one : holds_) one &= static_cast<uint8_t>(~kTouched);
  fenced_registers_ = true;
}

bool Warp::needs_fence(const std::vector<Slot>& registers) const {
  if (!fenced_registers_) return true;
  return std::any_of(registers.begin(), registers.end(),
                     [&](Slot slot) { return (holds_[static_cast<size_t>(slot)] & kTouched) != 0; });
}

void Warp::release_into(Knowledge& other) {
  knows.happened.raise(agent, time);
  other.join(knows);
  time++;
}

void Warp::exit_lanes(uint32_t lanes) {
  exited |= lanes;
  current.lanes &= ~lanes;
  for (Group& group : others)
    if (group.wait.kind == Wait::Kind::reconvergence) group.wait = {};
}

void Warp::split(int32_t target, uint32_t lanes) {
  if (lanes == current.lanes) {
    current.pc = target;
    return;
  }
  if (lanes == 0) {
    current.pc++;
    return;
  }
  others.push_back({target, lanes, {}});
  current.lanes &= ~lanes;
  current.pc++;
}

// The runnable lanes that are furthest behind go first, which brings diverged lanes together again.
void Warp::choose_group() {
  if (current.lanes != 0) others.push_back(current);
  size_t best = others.size();
  for (size_t i = 0; i < others.size(); i++)
    if (others[i].wait.kind == Wait::Kind::none && (best == others.size() || others[i].pc < others[best].pc)) best = i;
  if (best == others.size()) best = 0;  // all blocked: one of them stands for the warp
  current = others[best];
  const int32_t pc = current.pc;
  const bool runnable = current.wait.kind == Wait::Kind::none;
  uint32_t lanes = 0;
  std::erase_if(others, [&](const Group& group) {
    if (group.pc != pc || !(runnable || group.wait == current.wait)) return false;
    lanes |= group.lanes;
    return true;
  });
  current.lanes = lanes;
}

uint64_t Warp::run(uint64_t budget) {
  Scheduler& scheduler = cta.scheduler();
  const Instruction* code = cta.grid().program.code.data();
  uint64_t* executed_at =
      scheduler.counts.executed.data() + static_cast<size_t>(index) * cta.grid().program.code.size();
  uint64_t* waited_at = scheduler.counts.waited.data() + static_cast<size_t>(index) * cta.grid().program.code.size();
  uint64_t done = 0;
  blocked_ = false;
  yield = false;
  while (done < budget && !yield) {
    if (!others.empty()) choose_group();
    if (current.lanes == 0) break;
    if (current.wait.kind != Wait::Kind::none) {
      blocked_ = true;
      break;
    }
    const Instruction& i = code[current.pc];
    const int32_t pc = current.pc;
    uint32_t lanes = current.lanes;
    if (i.guard >= 0) lanes &= i.guard_negated ? ~predicate(i.guard) : predicate(i.guard);
    scheduler.instruction = &i;
    if (written_ != nullptr) written_->note(*this, i, current.lanes, lanes);
    const Flow flow = lanes == 0 ? Flow::next : i.handler(*this, i, lanes);
    if (flow == Flow::blocked) {
      waited_at[pc]++;
      continue;
    }
    executed_at[pc]++;
    done++;
    if (flow == Flow::next) current.pc++;
  }
  executed += done;
  return done;
}

bool Warp::waits_for(const Wait& wait) const {
  if (current.wait == wait) return true;
  return std::any_of(others.begin(), others.end(), [&](const Group& group) { return group.wait == wait; });
}

void Warp::wake(const Wait& wait) {
  bool any = false;
  if (current.wait == wait && current.lanes != 0) {
    current.wait = {};
    any = true;
  }
  for (Group& group : others)
    if (group.wait == wait) {
      group.wait = {};
      any = true;
    }
  if (any && blocked_) {
    blocked_ = false;
    cta.scheduler().make_runnable(*this);
  }
}

}  // namespace jax_fa4::emulator

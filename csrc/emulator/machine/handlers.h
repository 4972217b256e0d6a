// What instructions do: one function a family; the decoder puts their addresses into instructions.
#pragma once

#include "../ptx/program.h"

namespace jax_fa4::emulator {

#define EMULATOR_HANDLER(name) \
  Flow name([[maybe_unused]] Warp& warp, [[maybe_unused]] const Instruction& i, [[maybe_unused]] uint32_t lanes)

// execute_scalar.cc
EMULATOR_HANDLER(execute_lanes);  // d = lane_function(a, b, c)
EMULATOR_HANDLER(execute_carry);  // add.cc, addc, sub.cc, subc
EMULATOR_HANDLER(execute_predicate_logic);
EMULATOR_HANDLER(execute_bit_field_insert);
EMULATOR_HANDLER(execute_setp);
EMULATOR_HANDLER(execute_set);
EMULATOR_HANDLER(execute_selp);
EMULATOR_HANDLER(execute_testp);
EMULATOR_HANDLER(execute_move);  // d = a, out_slots planes
EMULATOR_HANDLER(execute_move_predicate);
EMULATOR_HANDLER(execute_pack);  // mov.b64 d, {a, b} and other widths
EMULATOR_HANDLER(execute_unpack);
EMULATOR_HANDLER(execute_clock);

// execute_control.cc
EMULATOR_HANDLER(execute_branch);
EMULATOR_HANDLER(execute_branch_indexed);
EMULATOR_HANDLER(execute_exit);
EMULATOR_HANDLER(execute_trap);
EMULATOR_HANDLER(execute_nothing);  // hints
EMULATOR_HANDLER(execute_yield);    // nanosleep
EMULATOR_HANDLER(execute_warp_sync);
EMULATOR_HANDLER(execute_shuffle);
EMULATOR_HANDLER(execute_vote);
EMULATOR_HANDLER(execute_match);
EMULATOR_HANDLER(execute_redux);
EMULATOR_HANDLER(execute_elect);
EMULATOR_HANDLER(execute_active_mask);

// execute_memory.cc
EMULATOR_HANDLER(execute_load);
EMULATOR_HANDLER(execute_load_param);
EMULATOR_HANDLER(execute_store);
EMULATOR_HANDLER(execute_atomic);
EMULATOR_HANDLER(execute_convert_address);  // cvta
EMULATOR_HANDLER(execute_is_space);
EMULATOR_HANDLER(execute_map_address);  // mapa
EMULATOR_HANDLER(execute_cta_rank);     // getctarank
EMULATOR_HANDLER(execute_load_matrix);
EMULATOR_HANDLER(execute_store_matrix);
EMULATOR_HANDLER(execute_fence);

// execute_barrier.cc
EMULATOR_HANDLER(execute_barrier);  // bar, barrier
EMULATOR_HANDLER(execute_cluster_barrier);
EMULATOR_HANDLER(execute_mbarrier_init);
EMULATOR_HANDLER(execute_mbarrier_invalidate);
EMULATOR_HANDLER(execute_mbarrier_arrive);
EMULATOR_HANDLER(execute_mbarrier_expect);
EMULATOR_HANDLER(execute_mbarrier_complete);
EMULATOR_HANDLER(execute_mbarrier_wait);
EMULATOR_HANDLER(execute_mbarrier_pending);
EMULATOR_HANDLER(execute_set_registers);  // setmaxnreg
EMULATOR_HANDLER(execute_dependency);     // griddepcontrol

// execute_copy.cc
EMULATOR_HANDLER(execute_copy_async);  // cp.async
EMULATOR_HANDLER(execute_copy_commit);
EMULATOR_HANDLER(execute_copy_wait);
EMULATOR_HANDLER(execute_copy_arrive);
EMULATOR_HANDLER(execute_bulk_copy);
EMULATOR_HANDLER(execute_bulk_reduce);
EMULATOR_HANDLER(execute_bulk_commit);
EMULATOR_HANDLER(execute_bulk_wait);
EMULATOR_HANDLER(execute_tensor_load);     // cp.async.bulk.tensor into shared memory
EMULATOR_HANDLER(execute_tensor_store);    // out of it, plain or reducing
EMULATOR_HANDLER(execute_cluster_launch);  // clusterlaunchcontrol.try_cancel
EMULATOR_HANDLER(execute_cluster_query);
EMULATOR_HANDLER(execute_store_async);  // st.async, red.async

// execute_wgmma.cc
EMULATOR_HANDLER(execute_wgmma);
EMULATOR_HANDLER(execute_wgmma_fence);
EMULATOR_HANDLER(execute_wgmma_commit);
EMULATOR_HANDLER(execute_wgmma_wait);
EMULATOR_HANDLER(execute_mma_sync);

// execute_tcgen05.cc
EMULATOR_HANDLER(execute_tensor_allocate);
EMULATOR_HANDLER(execute_tensor_deallocate);
EMULATOR_HANDLER(execute_tensor_relinquish);
EMULATOR_HANDLER(execute_tensor_mma);
EMULATOR_HANDLER(execute_tensor_commit);
EMULATOR_HANDLER(execute_tensor_memory_load);
EMULATOR_HANDLER(execute_tensor_memory_store);
EMULATOR_HANDLER(execute_tensor_memory_copy);
EMULATOR_HANDLER(execute_tensor_wait);
EMULATOR_HANDLER(execute_tensor_fence);

}  // namespace jax_fa4::emulator

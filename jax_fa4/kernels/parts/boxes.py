"""Copies of boxes between global and shared memory by the TMA unit, with the coordinates written out.

A tensor map describes (column, row, head, batch) of a tensor; a box has as many columns as its swizzle is wide, so a
tile that is wider takes several copies, one after the other in shared memory. What lies beyond the tensor is filled
with zeros, and not written. Every function is called by a whole warp, of which one elected lane issues.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import cute as cute_ir
from cutlass._mlir.dialects import cute_nvgpu, llvm

from jax_fa4.kernels.parts.assembly import assembly

_CUTE: Any = cute_ir  # without stubs
_ELECT = "{ .reg .pred elected; elect.sync _|elected, -1; @elected "


def address_of(tensor_map: cute.CopyAtom) -> Int64:
    """The generic address of a tensor map that is a kernel parameter."""
    kind = _CUTE.PtrType.get(Int64.mlir_type, cute.AddressSpace.generic, 64)
    atom = cute_nvgpu.atom_make_exec_tma(tensor_map._trait.value)
    pointer = cute_nvgpu.get_tma_desc_addr(kind, atom)
    return Int64(llvm.ptrtoint(Int64.mlir_type, pointer.to_llvm_ptr()))


def expect(barrier: Int32, size: int, is_expecting: Int32 | None = None) -> None:
    """Arrive at a barrier of this CTA and announce that `size` bytes will arrive there too; not where `is_expecting`
    is 0."""
    text = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size}; }}"
    if is_expecting is None:
        assembly(_ELECT + text, [], barrier)
        return
    both = "{ .reg .pred elected, both; elect.sync _|elected, -1; setp.ne.and.b32 both, $1, 0, elected; @both "
    assembly(both + text, [], barrier, is_expecting)


def load(tensor_map: Int64, to: Int32, corner: tuple[Any, Any, Any, Any], barrier: Int32, ctas: int = 1) -> None:
    """Copy the box at `corner` (column, row, head, batch) to shared memory and signal its bytes to `barrier`.

    With a pair of CTAs the barrier may be either's, as an address of the cluster's shared memory.
    """
    group, space = ("", "shared::cta") if ctas == 1 else (".cta_group::2", "shared::cluster")
    text = (
        _ELECT + f"cp.async.bulk.tensor.4d.{space}.global.tile.mbarrier::complete_tx::bytes{group} "
        "[$0], [$1, {$2, $3, $4, $5}], [$6]; }"
    )
    assembly(text, [], to, tensor_map, *(Int32(one) for one in corner), barrier)


def store(tensor_map: Int64, source: Int32, corner: tuple[Any, Any, Any, Any]) -> None:
    """Copy a box of shared memory to the tensor, in the elected lane's current bulk group."""
    text = _ELECT + "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [$1, {$2, $3, $4, $5}], [$0]; }"
    assembly(text, [], source, tensor_map, *(Int32(one) for one in corner))

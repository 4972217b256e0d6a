"""Bulk copies of flat memory, boxes added to global memory, and 16 bytes at a time of shared memory by address.

Copies are called by a whole warp, of which one elected lane issues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from jax_fa4.kernels.parts.assembly import assembly

_ELECT = "{ .reg .pred elected; elect.sync _|elected, -1;\n@elected "


def load_flat(source: cute.Pointer, to: Int32, size: int, barrier: Int32) -> None:
    """Copy `size` bytes (a multiple of 16) of global memory to shared memory and signal them to `barrier`."""
    text = _ELECT + "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3]; }"
    assembly(text, [], to, Int64(source.toint()), Int32(size), barrier)


def in_cta(address: Int32, rank: Any) -> Int32:
    """Address, in the cluster's shared memory, of the same place in the CTA of that rank."""
    found: Int32 = assembly("mapa.shared::cluster.u32 $0, $1, $2;", [Int32], address, Int32(rank), has_effect=False)
    return found


def send(to: Int32, source: Int32, size: int, barrier: Int32) -> None:
    """Copy `size` bytes of this CTA's shared memory to another's and signal them to `barrier` there (addresses by
    `in_cta`)."""
    copy = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    assembly(_ELECT + copy + " [$0], [$1], $2, [$3]; }", [], to, source, Int32(size), barrier)


def add(tensor_map: Int64, source: Int32, corner: tuple[Any, Any, Any, Any]) -> None:
    """Add a box of float32 of shared memory to the tensor, in the elected lane's current bulk group."""
    text = (
        _ELECT + "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [$1, {$2, $3, $4, $5}], [$0]; }"
    )
    assembly(text, [], source, tensor_map, *(Int32(one) for one in corner))


def read_four(address: Int32, offset: int = 0) -> tuple[Float32, Float32, Float32, Float32]:
    """Four float32 of shared memory."""
    found: tuple[Float32, Float32, Float32, Float32] = assembly(
        f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4 + {offset}];", [Float32] * 4, address
    )
    return found


def write_four(address: Int32, values: Sequence[Float32 | Uint32], offset: int = 0) -> None:
    """Four words to shared memory."""
    assembly(f"st.shared.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}};", [], address, *values)


def fence_for_async() -> None:
    """Let the copy engine and the tensor core see what this thread has written to shared memory."""
    cute.arch.fence_proxy("async.shared", space="cta")

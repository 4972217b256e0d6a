"""The flash recurrence in plain JAX: any device, memory linear in the sequence lengths, exact first-order gradients.

The mask decides which tiles of scores exist: those it rules out are not visited, those it leaves whole skip the
element mask. Tables of tiles are constants where lengths and ids are known as the call is traced, and computed on the
device where not; the loops over them are the same.
"""

from typing import Any

import numpy as np

from jax_fa4.blockwise import backward as _backward
from jax_fa4.blockwise import forward as _forward
from jax_fa4.blockwise.tiling import Tiling, choose_tiling, geometry, tile_table
from jax_fa4.dispatch import Target
from jax_fa4.problem import AttentionOperands, AttentionProblem
from jax_fa4.splitting import Split, run_split

Array = Any

__all__ = ["blockwise"]


class Blockwise:
    """The implementation named "blockwise"; takes every problem."""

    name = "blockwise"

    def why_not(self, problem: AttentionProblem, target: Target) -> str | None:
        """None: it takes every problem on every device."""
        return None

    def forward(self, problem: AttentionProblem, operands: AttentionOperands) -> tuple[Array, Array]:
        """Output (B, T, N, Dv) in the problem's dtype; log-sum-exp (B, T, N), float32 (float64 for float64)."""
        return run_split(_forward.forward, problem, operands, Split(problem.key_splits or 1))

    def backward(
        self,
        problem: AttentionProblem,
        operands: AttentionOperands,
        out: Array,
        lse: Array,
        grad_out: Array,
        grad_lse: Array,
    ) -> AttentionOperands:
        """Cotangents of query, key, value, bias and scale in their shapes and dtypes; None where none is due."""
        return _backward.backward(problem, operands, out, lse, grad_out, grad_lse)

    def describe(self, problem: AttentionProblem, target: Target) -> list[tuple[str, str]]:
        """What a call gets: tile sizes, tiles visited, and the bytes of its working set."""
        if problem.is_empty:
            return [("tiles", "none: the call is empty")]
        shape = None if problem.has_traced_mask else geometry(problem, AttentionOperands())
        tiling = choose_tiling(problem, problem.batch) if shape is None else shape.tiling
        every = tiling.groups * tiling.query_tiles * tiling.key_tiles
        lines = [
            ("tile", f"{tiling.query_tile} queries x {tiling.key_tile} keys"),
            ("group", f"{tiling.rows} batch rows x {tiling.heads} key-value heads, {tiling.groups} groups"),
        ]
        if shape is None:
            lines.append(("tiles visited", f"at most {every}: known when the call runs"))
        else:
            table = tile_table(problem, shape, by_key=False)
            visited = int((table.end - table.begin).sum())
            full = int((table.full_end - table.full_begin).sum())
            share = 100 * full / visited if visited else 0.0
            lines.append(("tiles visited", f"{visited} of {every}, {share:.0f}% without an element mask"))
        return [*lines, ("workspace bytes", f"{_workspace_bytes(problem, tiling):,} (forward)")]


def _workspace_bytes(problem: AttentionProblem, tiling: Tiling) -> int:
    """Tile-major copies of the operands and of the output, and two tiles of scores."""
    widths = problem.head_dim + problem.value_dim
    query_rows = tiling.groups * tiling.query_tiles * tiling.units * tiling.lanes
    key_rows = tiling.groups * tiling.key_tiles * tiling.units * tiling.key_tile
    scores = 2 * tiling.units * tiling.key_tile * tiling.lanes
    return np.dtype(problem.accumulation_dtype).itemsize * (widths * (query_rows + key_rows) + scores)


blockwise = Blockwise()

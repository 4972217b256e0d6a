"""What the forward kernels of every architecture take besides their plan: mask buffers, sizes, scales.

Masks without ids and lengths are arithmetic in the kernel; others become row intervals and a work table, made when the
call is traced where ids and lengths are known then, else by `planning.py`'s kernels or by XLA.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_fa4.cost import Architecture
from jax_fa4.ffi.launch import CUDA_DRIVER, even_section
from jax_fa4.ffi.mask_buffers import hide_unseen, whole_ids, zero_unseen
from jax_fa4.kernels.plan import DTYPES, KernelPlan
from jax_fa4.problem import PLAIN_QUERIES, AttentionOperands, AttentionProblem, QueryLayout
from jax_fa4.schedule.order import Column, Policy, WorkGrid, WorkTable, forward_grid, make_table, work_table
from jax_fa4.schedule.simulate import simulate
from jax_fa4.schedule.tiles import Intervals, MaskRule
from jax_fa4.splitting import lay_queries, rows_as_heads

MaskKind = Literal["causal", "window", "intervals", "ids"]
UNBOUNDED = 1 << 30  # an edge that never binds: beyond any row, and its sum with a row does not overflow
MAX_LENGTH = 1 << 29
MAX_SOFT_CAP = 1e4  # tanh is made of an exponential, whose rounding, 6e-8, the cap multiplies
MAX_PACKED_QUERIES = 64  # more fill a tile by themselves; packing copies more than one
SLACK_LOG2 = 8.0  # the lazy rescaling's threshold (arXiv 2603.05451); see kernels/parts/softmax_row.py
LOG2_E = math.log2(math.e)
REMEDY = "Pass implementation='blockwise'."


def band_edges(rule: MaskRule) -> tuple[int, int]:
    """How far left and right of a row's diagonal place it sees."""
    left, right = (UNBOUNDED if edge is None else min(edge, UNBOUNDED) for edge in rule.band)
    return left, right


def why_no_kernel(problem: AttentionProblem, name: str, dtypes: tuple[str, ...]) -> str | None:
    """Why the forward kernel of the architecture `name` does not take a problem, apart from its head dimensions."""
    if problem.dtype not in dtypes:
        return f"the {name} kernel takes {' and '.join(dtypes)}, not {problem.dtype}. {REMEDY}"
    if problem.has_bias or problem.has_mask:
        return f"the {name} kernel takes no bias and no dense mask. {REMEDY}"
    if problem.scale is None or problem.scale <= 0.0:
        return f"the {name} kernel takes a positive scale that is known when the call is traced. {REMEDY}"
    if (problem.logits_soft_cap or 0.0) > MAX_SOFT_CAP:
        return (
            f"logits_soft_cap is {problem.logits_soft_cap:g}; the {name} kernel takes up to {MAX_SOFT_CAP:g}. {REMEDY}"
        )
    if max(problem.query_length, problem.key_length) > MAX_LENGTH:
        return f"the {name} kernel takes lengths up to {MAX_LENGTH}. {REMEDY}"
    return None


def mask_kind(problem: AttentionProblem) -> MaskKind:
    """The kind of mask of the kernel that takes the problem."""
    if problem.has_segment_ids:
        return "ids"
    if problem.has_query_lengths or problem.has_key_lengths or problem.has_intervals:
        return "intervals"
    return "causal" if problem.mask.band[0] is None else "window"


def softmax_floats(problem: AttentionProblem) -> dict[str, float]:
    """Scores to exponents of 2: directly, or through the cap, c * tanh(scale * s / c)."""
    scale_log2 = float(problem.scale or 0.0) * LOG2_E
    cap, cap_log2 = problem.logits_soft_cap, 0.0
    if cap is not None:
        scale_log2, cap_log2 = cap * LOG2_E, 2.0 * scale_log2 / cap
    return {"scale_log2": scale_log2, "slack": SLACK_LOG2 / scale_log2, "cap_log2": cap_log2}


def add_counter(buffers: dict[str, Any], results: dict[str, jax.ShapeDtypeStruct], aliases: dict[str, str]) -> None:
    """Give the launch of persistent blocks the counter, 0 at first, that hands out their items."""
    buffers["zero_counter"] = jnp.zeros(1, jnp.int32)
    results["counter"] = jax.ShapeDtypeStruct((1,), jnp.int32)
    aliases["zero_counter"] = "counter"


def empty_results(problem: AttentionProblem, operands: AttentionOperands) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp where there are no queries, keys or heads."""
    rows = problem.batch, problem.query_length, problem.query_heads
    sees_nothing = jnp.full(rows, -jnp.inf, jnp.float32)
    if problem.has_sinks:
        sees_nothing = jnp.broadcast_to(operands.sinks.astype(jnp.float32), rows)
    return jnp.zeros((*rows, problem.value_dim), problem.dtype), sees_nothing


@dataclass(frozen=True)
class ForwardCall:
    """One problem for one kernel.

    Attributes:
        problem: the call.
        rows: query rows of a work item.
        key_tile: keys of a step.
        arch: the GPU, for the order of work.
        ctas: CTAs that share an item.
        policy: how the work table orders items, with masks that would need none too; None: longest first, and for those
            no table.
        packed: the query heads that share a KV head are rows of one head: row t * group + g is query t of the group's
            g-th head. For few queries, whose tile would be nearly empty, and which would read keys once a head.
        has_strides: the kernel reads queries, and writes results of packed heads, where they are if strides can say it;
            else, and for other kernels, they are copied.
        hides_tiles: the architecture whose kernel copies tiles with values that nobody sees, which are then read from
            the copy; None: all values are copied.
    """

    problem: AttentionProblem
    rows: int
    key_tile: int
    arch: Architecture
    ctas: int = 1
    policy: Policy | None = None
    packed: bool = False
    has_strides: bool = False
    hides_tiles: str | None = None

    @property
    def seen(self) -> AttentionProblem:
        """The problem as the kernel sees it; where heads are packed, without causality and window."""
        problem = self.problem
        if not self.packed:
            return problem
        rows = problem.query_length * problem.group_size
        mask, layout = MaskRule(rows, problem.key_length), problem.query_layout._replace(group=problem.group_size)
        return dataclasses.replace(
            problem, query_length=rows, query_heads=problem.kv_heads, mask=mask, query_layout=layout
        )

    @property
    def query_layout(self) -> QueryLayout:
        """Where the kernel reads the queries. Heads that are rows have a stride, if there is one query or one head."""
        layout = self.seen.query_layout
        if not self.has_strides:
            return PLAIN_QUERIES
        is_strided = self.seen.query_length == layout.group or self.seen.query_heads == 1
        return layout if is_strided else layout._replace(group=1)

    @property
    def result_group(self) -> int:
        """Neighbouring heads of the results that are rows of the kernel's; 1 where these are written as they are."""
        return self.query_layout.group if self.packed else 1

    @property
    def mask_kind(self) -> MaskKind:
        """The kind of mask of the kernel."""
        kind = mask_kind(self.problem)
        if kind in ("causal", "window") and self.policy is not None:
            return "intervals"
        if kind in ("causal", "window") and self.packed:
            return "causal" if self.is_everything_seen() else "intervals"
        return kind

    @property
    def grid(self) -> WorkGrid:
        """What there is to order."""
        return forward_grid(self.seen, self.rows, self.key_tile, self.arch, ctas=self.ctas)

    def section_heads(self) -> int:
        """Query heads whose blocks run together: as many as fit in L2 with their keys and values, in even sections.

        Sections are of whole groups that share keys and values, and never cross the end, so that no block is without
        work. Where even sections would be more than a grid takes, there is one of all heads.
        """
        problem = self.seen
        groups = even_section(problem.batch * problem.kv_heads, max(self.grid.groups_in_l2, 1))
        return groups * problem.group_size

    def seen_by_band(self) -> tuple[int, int]:
        """The keys [first, last) that some query sees by causality and window alone."""
        problem, offset = self.problem, self.problem.mask.diagonal_offset
        left, right = problem.mask.band
        first = 0 if left is None else max(offset - left, 0)
        last = problem.key_length if right is None else min(problem.query_length + offset + right, problem.key_length)
        return first, last

    def is_everything_seen(self) -> bool:
        """Whether causality and window hide nothing."""
        left, right = self.problem.mask.band
        offset, last = self.problem.mask.diagonal_offset, self.problem.query_length - 1
        is_left_open = left is None or last + offset - left <= 0
        return is_left_open and (right is None or offset + right + 1 >= self.problem.key_length)

    def integers(self) -> dict[str, int]:
        """Every integer that a forward plan may name, for operands without gaps."""
        problem, element_bytes, layout = self.seen, DTYPES[self.problem.dtype], self.query_layout
        head_bytes, value_head_bytes = problem.head_dim * element_bytes, problem.value_dim * element_bytes
        left, right = band_edges(problem.mask)
        section_heads = self.section_heads()
        integers = {
            "batch": problem.batch,
            "query_length": problem.query_length,
            # Keys past the last that is seen do not exist for the kernel: NaN in them is not even copied.
            "key_length": max(self.seen_by_band()[1], 1),
            "heads": problem.query_heads,
            "kv_heads": problem.kv_heads,
            "group_size": problem.group_size,
            "query_copies": layout.copies,
            "query_batch": problem.batch // layout.copies,
            "offset": problem.mask.diagonal_offset,
            "left": left,
            "right": right,
            "section_heads": section_heads,
            "sections": problem.batch * problem.query_heads // section_heads,
            "interval_stride": 0,
            "items": self.items,
            "workers": min(self.items, self.arch.sms // self.ctas),
            "ctas": self.ctas,
            "head_dim": problem.head_dim,
            "value_dim": problem.value_dim,
            "head_bytes": head_bytes,
        }
        rows, keys = (problem.query_length, problem.query_heads), (problem.key_length, problem.kv_heads)
        for name, (length, heads), step, group in (
            ("query", rows, head_bytes, layout.group),
            ("key", keys, head_bytes, 1),
            ("value", keys, value_head_bytes, 1),
            ("out", rows, value_head_bytes, self.result_group),
        ):
            by_row, by_head = _strides(heads, group)
            integers[f"{name}_row_bytes"], integers[f"{name}_head_bytes"] = by_row * step, by_head * step
            integers[f"{name}_batch_bytes"] = length * heads * step
        by_row, by_head = _strides(problem.query_heads, self.result_group)
        of_batch = problem.query_length * problem.query_heads
        return integers | {"lse_batch_stride": of_batch, "lse_row_stride": by_row, "lse_head_stride": by_head}

    def table(self, operands: AttentionOperands) -> WorkTable:
        """The work table."""
        policy = self.policy or Policy.LONGEST_FIRST
        if self.packed and self.seen.query_length > self.rows:
            return make_table(self.grid, self.row_intervals(operands), policy)
        # A tile of a plan holds as many queries as rows here: where one tile holds all rows, it is the same.
        return work_table(self.problem, operands, self.grid, policy, 0)

    def row_intervals(self, operands: AttentionOperands) -> Intervals:
        """What each of the kernel's rows sees."""
        rows, _ = self.problem.intervals(operands)
        if not self.packed:
            return rows
        lo, hi = (one.repeat(self.problem.group_size, axis=1) for one in (rows.lo, rows.hi))
        return Intervals(lo, hi, rows.exact)

    def mask_buffers(self, operands: AttentionOperands, driver: str = CUDA_DRIVER) -> dict[str, Any]:
        """Operands for masks from memory; values that nobody sees, which may be NaN, replaced by zeros."""
        problem = self.problem
        table, rows = self.table(operands), self.row_intervals(operands)
        seen, seen_from = problem.intervals(operands)
        found: dict[str, Any] = {"item_table": table.items, "lo": rows.lo, "hi": rows.hi}
        if self.hides_tiles is not None:
            tiles = -(-self.integers()["key_length"] // self.key_tile)
            where: dict[str, Any] = {"architecture": self.hides_tiles, "driver": driver}
            hidden, flags = hide_unseen(seen_from, seen, self.key_tile, tiles, operands.value, **where)
            found |= {"hidden_value": hidden[0], "hidden_tiles": flags}
        else:
            (found["value"],) = zero_unseen(seen_from.lo < seen_from.hi, operands.value)
        if problem.has_segment_ids:
            query_ids, key_ids = whole_ids(problem, operands)
            if self.packed:
                query_ids = query_ids.repeat(problem.group_size, axis=1)
            # The kernel's batch rows are as long as it believes the keys to be.
            found |= {"query_ids": query_ids, "key_ids": key_ids[:, : self.integers()["key_length"]]}
        return found

    def arguments(
        self, operands: AttentionOperands, driver: str = CUDA_DRIVER
    ) -> tuple[dict[str, Any], dict[str, int]]:
        """Operands and integers of the call, by the plan's names."""
        query = lay_queries(operands.query, self.seen.query_layout, self.query_layout)
        buffers: dict[str, Any] = {"query": query, "key": operands.key, "value": operands.value}
        integers = self.integers()
        if self.problem.has_sinks:
            buffers["sinks"] = operands.sinks.astype(jnp.float32)
        if self.mask_kind in ("intervals", "ids"):
            buffers |= self.mask_buffers(operands, driver)
            integers["interval_stride"] = self.seen.query_length if buffers["lo"].shape[0] > 1 else 0
        elif (first_seen := self.seen_by_band()[0]) > 0:
            buffers["value"] = operands.value.at[:, :first_seen].set(0)
        return buffers, integers

    def unpack(self, result: jax.Array) -> jax.Array:
        """A result of the kernel as the caller wants it, (B, T, N, ...)."""
        is_turned = self.packed and self.result_group == 1
        return rows_as_heads(result, self.problem.group_size) if is_turned else result

    @property
    def items(self) -> int:
        """Work items."""
        return -(-self.seen.query_length // self.rows) * self.seen.query_heads * self.seen.batch

    def workspace_bytes(self) -> int:
        """Bytes beside operands and results: work table, intervals, ids, values without what nobody sees."""
        problem = self.seen
        if self.mask_kind in ("causal", "window"):
            return self.integers()["value_batch_bytes"] * problem.batch if self.seen_by_band()[0] > 0 else 0
        intervals = 2 * problem.query_length
        ids = problem.query_length + problem.key_length if problem.has_segment_ids else 0
        return (
            self.items * len(Column) * 4
            + problem.batch * (intervals + ids) * 4
            + problem.batch * self.integers()["value_batch_bytes"]
        )

    def describe(self, plan: KernelPlan) -> list[tuple[str, str]]:
        """What `explain` says: kernel, tile, schedule, workspace."""
        schedule = f"{self.items:,} items, ordered when the call runs"
        if not self.problem.has_traced_mask:
            table = self.table(AttentionOperands())
            slots = self.arch.sms // self.ctas
            steps = int((table.items[:, Column.END] - table.items[:, Column.BEGIN]).sum())
            run = simulate(table.clocks, slots)
            schedule = (
                f"{self.items:,} items, {steps:,} key tiles; {run.makespan:,} clocks, of which work is "
                f"{run.balance:.0%} of {slots} multiprocessors' time"
            )
        return [
            ("kernel", plan.key),
            ("tile", f"{self.rows} queries x {self.key_tile} keys{', heads of a group packed' if self.packed else ''}"),
            ("schedule", schedule),
            ("shared memory", f"{plan.dynamic_shared_bytes:,} bytes"),
            ("workspace", f"{self.workspace_bytes():,} bytes"),
        ]

    def results(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the kernel's results."""
        problem, group = self.seen, self.result_group
        rows = problem.batch, problem.query_length // group, problem.query_heads * group
        return {
            "out": jax.ShapeDtypeStruct((*rows, problem.value_dim), problem.dtype),
            "lse": jax.ShapeDtypeStruct(rows, jnp.float32),
        }


def _strides(heads: int, group: int) -> tuple[int, int]:
    """From row to row and from head to head of (rows, heads), or of (1, heads * group), heads of a group being rows."""
    return (1 if group > 1 else heads), group


def packs_heads(problem: AttentionProblem, rows: int, key_tile: int, arch: Architecture) -> bool:
    """Whether heads that share keys and values become rows: for few queries, where it takes fewer waves of items."""
    if problem.has_sinks or problem.group_size < 2 or problem.query_length > MAX_PACKED_QUERIES:
        return False
    unpacked, packed = (ForwardCall(problem, rows, key_tile, arch, packed=one) for one in (False, True))
    return -(-packed.items // arch.sms) < -(-unpacked.items // arch.sms)

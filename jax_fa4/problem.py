"""One attention call as two values: what is known when it is traced, and the arrays it works on.

`AttentionProblem` is frozen and hashable: it keys every cache and every trace-time decision (which implementation,
kernel and schedule). `AttentionOperands` is the pytree of arrays that goes with it. Shapes are canonical: the
user's leading batch dimensions are folded into one. `jax_fa4.arguments` makes the two from what the user typed.
"""

import dataclasses
import functools
import hashlib
import math
from typing import Any, NamedTuple

import numpy as np

from jax_fa4.schedule.tiles import Intervals, MaskOperands, MaskRule, key_intervals, query_intervals


class HostArray:
    """A read-only NumPy array that hashes and compares by its content.

    The array is copied, so that the caller may reuse theirs. The digest (BLAKE2b over dtype, shape and bytes) is
    computed once, when first asked for.

    Args:
      array: anything `numpy.array` accepts.
    """

    __slots__ = ("_digest", "array")

    def __init__(self, array: Any):
        self.array: np.ndarray = np.array(array, order="C")
        self.array.flags.writeable = False
        self._digest: bytes | None = None

    @property
    def digest(self) -> bytes:
        """Sixteen bytes that stand for dtype, shape and content."""
        if self._digest is None:
            state = hashlib.blake2b(digest_size=16)
            state.update(f"{self.array.dtype.str}{self.array.shape}".encode())
            state.update(self.array.data if self.array.size else b"")
            self._digest = state.digest()
        return self._digest

    def tiled(self, repeats: int) -> "HostArray":
        """The array `repeats` times, one after the other along its leading axis."""
        return HostArray(np.tile(self.array, (repeats, *(1,) * (self.array.ndim - 1))))

    def __hash__(self) -> int:
        return int.from_bytes(self.digest[:8], "little", signed=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostArray):
            return NotImplemented
        return self is other or self.digest == other.digest

    def __repr__(self) -> str:
        return f"HostArray({self.array.dtype}{list(self.array.shape)}, {self.digest.hex()[:8]})"


class MaskConstants(NamedTuple):
    """Ids and lengths that are known when the call is traced; each an int32 `HostArray`, or None."""

    query_ids: HostArray | None = None  # (B, T)
    key_ids: HostArray | None = None  # (B, S)
    query_lengths: HostArray | None = None  # (B,)
    key_lengths: HostArray | None = None  # (B,)

    def tiled(self, repeats: int) -> "MaskConstants":
        """The constants of `repeats` copies of the batch, one after the other."""
        return MaskConstants(*(None if constant is None else constant.tiled(repeats) for constant in self))


NO_CONSTANTS = MaskConstants()


class AttentionOperands(NamedTuple):
    """The arrays of one call, in canonical shapes; None where absent or where a constant of the problem stands in.

    Also the shape of cotangents: then None means that none is due.
    """

    query: Any = None  # (B, T, N, D)
    key: Any = None  # (B, S, K, D)
    value: Any = None  # (B, S, K, Dv)
    bias: Any = None  # 4-D, broadcastable to (B, N, T, S)
    mask: Any = None  # 4-D boolean, broadcastable to (B, N, T, S)
    sinks: Any = None  # (N,), float32 (float64 beside float64 operands)
    scale: Any = None  # (), float32 (float64 beside float64 operands); None where the problem knows it
    query_ids: Any = None  # (B, T) int32
    key_ids: Any = None  # (B, S) int32
    query_lengths: Any = None  # (B,) int32
    key_lengths: Any = None  # (B,) int32
    # What a `jax_fa4.SegmentPlan` knows already. It can always be computed again from the ids, and must be where a
    # mesh or a map gives a call other queries or keys; all None where there is no plan.
    query_lo: Any = None  # (B, T) int32, with query_hi and query_exact: `Intervals` of queries
    query_hi: Any = None
    query_exact: Any = None  # (B,) bool
    key_lo: Any = None  # (B, S) int32, with key_hi and key_exact: `Intervals` of keys
    key_hi: Any = None
    key_exact: Any = None  # (B,) bool
    forward_items: Any = None  # (n, 8) int32, of a `WorkTable`; see `PlannedGrids`
    backward_items: Any = None


class PlannedGrids(NamedTuple):
    """What a plan's work tables are for: `jax_fa4.schedule.order.WorkGrid` of each pass, None where there is none."""

    forward: Any = None
    backward: Any = None


NO_GRIDS = PlannedGrids()


class QueryLayout(NamedTuple):
    """Where a problem's queries lie in the operand, which is (B / copies, T / group, N * group, D).

    Row r of head n in batch row b is operand[b // copies, r // group, n * group + r % group].

    Attributes:
      copies: neighbouring batch rows that have the same queries.
      group: neighbouring heads of the operand that are rows of one head.
    """

    copies: int = 1
    group: int = 1


PLAIN_QUERIES = QueryLayout()


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """Everything about one attention call that is known when it is traced.

    Attributes:
      batch: B, the product of the caller's leading dimensions (1 when there are none).
      query_length: T.
      key_length: S.
      query_heads: N, a multiple of `kv_heads`.
      kv_heads: K.
      head_dim: D, of queries and keys.
      value_dim: Dv, of values and of the output.
      dtype: the name of the dtype of query, key, value and output.
      mask: causality, window and diagonal.
      scale: factor on the logits; None when it is an operand.
      logits_soft_cap: c in `c * tanh(scale * q.k / c)`; None for no cap.
      has_bias: a bias is among the operands.
      has_mask: a boolean mask is among the operands.
      has_sinks: sinks are among the operands.
      has_query_lengths: query lengths exist, as operand or as constant.
      has_key_lengths: key lengths exist, as operand or as constant.
      has_segment_ids: ids of queries and of keys exist, each as operand or as constant.
      constants: the ids and lengths that are known.
      planned: what the work tables among the operands are for.
      query_layout: where the queries lie, if not as (B, T, N, D).
      has_intervals: what rows see is not to be found from `mask`, but comes with the operands (`query_lo` and so on).
      key_splits: parts of the keys that are computed apart and merged; None: as many as pay.
      return_residual: the caller takes the log-sum-exp too.
      deterministic: the caller asks for gradients that are bitwise equal from run to run.
    """

    batch: int
    query_length: int
    key_length: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    mask: MaskRule
    scale: float | None
    logits_soft_cap: float | None = None
    has_bias: bool = False
    has_mask: bool = False
    has_sinks: bool = False
    has_query_lengths: bool = False
    has_key_lengths: bool = False
    has_segment_ids: bool = False
    constants: MaskConstants = NO_CONSTANTS
    planned: PlannedGrids = NO_GRIDS
    query_layout: QueryLayout = PLAIN_QUERIES
    has_intervals: bool = False
    key_splits: int | None = None
    return_residual: bool = False
    deterministic: bool = False

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def group_size(self) -> int:
        """How many query heads share one key-value head."""
        return self.query_heads // self.kv_heads if self.kv_heads else 0

    @property
    def accumulation_dtype(self) -> str:
        """The dtype of scores, log-sum-exp, sinks and scale: float32, or float64 for float64 operands."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def is_empty(self) -> bool:
        """True when there is no pair of a query and a key at all."""
        return 0 in (self.batch, self.query_length, self.key_length, self.query_heads)

    @property
    def has_traced_mask(self) -> bool:
        """True when some ids or lengths are operands, so that the mask is known only when the call runs."""
        constants = self.constants
        known = (
            (self.has_segment_ids, constants.query_ids is not None and constants.key_ids is not None),
            (self.has_query_lengths, constants.query_lengths is not None),
            (self.has_key_lengths, constants.key_lengths is not None),
        )
        return self.has_intervals or any(exists and not is_known for exists, is_known in known)

    def mask_operands(self, operands: AttentionOperands) -> MaskOperands:
        """The ids and lengths of a call: JAX arrays where they are operands, NumPy arrays where they are constants."""

        def pick(operand: Any, constant: HostArray | None) -> Any:
            return operand if constant is None else constant.array

        return MaskOperands(
            query_ids=pick(operands.query_ids, self.constants.query_ids),
            key_ids=pick(operands.key_ids, self.constants.key_ids),
            query_lengths=pick(operands.query_lengths, self.constants.query_lengths),
            key_lengths=pick(operands.key_lengths, self.constants.key_lengths),
        )

    def intervals(self, operands: AttentionOperands) -> tuple[Intervals, Intervals]:
        """What queries see and what keys are seen by: a plan's, or computed here; NumPy where all is constant."""
        if operands.query_lo is not None:
            return (
                Intervals(operands.query_lo, operands.query_hi, operands.query_exact),
                Intervals(operands.key_lo, operands.key_hi, operands.key_exact),
            )
        mask_operands = self.mask_operands(operands)
        if all(isinstance(operand, np.ndarray | None) for operand in mask_operands):
            return _known_intervals(self.mask, self.constants)
        return query_intervals(self.mask, mask_operands), key_intervals(self.mask, mask_operands)

    def with_copies(self, copies: int) -> "AttentionProblem":
        """The problem of `copies` such batches, one after the other along the batch axis."""
        return dataclasses.replace(self, batch=self.batch * copies, constants=self.constants.tiled(copies))


@functools.lru_cache(maxsize=64)
def _known_intervals(rule: MaskRule, constants: MaskConstants) -> tuple[Intervals, Intervals]:
    operands = MaskOperands(*(None if constant is None else constant.array for constant in constants))
    both = query_intervals(rule, operands), key_intervals(rule, operands)
    for array in (*both[0], *both[1]):
        array.flags.writeable = False
    return both


def interval_operands(queries: Intervals, keys: Intervals) -> dict[str, Any]:
    """What queries see and keys are seen by, as fields of `AttentionOperands`."""
    return {
        f"{side}_{name}": array
        for side, intervals in (("query", queries), ("key", keys))
        for name, array in intervals._asdict().items()
    }


def default_scale(head_dim: int) -> float:
    """1 / sqrt(D), the factor on the logits where the caller names none."""
    return 1.0 / math.sqrt(head_dim)

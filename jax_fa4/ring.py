"""Context parallelism: attention over a sequence that the devices of a mesh axis share.

    device 0        device 1        device 2        device 3
    queries 0       queries 1       queries 2       queries 3        stay
    keys 0    -->   keys 1    -->   keys 2    -->   keys 3    -->    go round the ring

In step s a device holds the keys of the device s places before it. It attends to them while the next keys are on their
way, and merges what it gets by log-sum-exp, which is exact. The backward pass goes the other way round, and the
gradients of keys and values travel with them, one step behind: those of the step before arrive while this step's are
computed. What a device holds is linear in its own share of the sequence.

Each device's share consists of one chunk of the sequence ("contiguous") or of two ("zigzag": one from the front, one
from the back, so that all devices have the same work under a causal mask). Which chunk of queries sees which chunk of
keys, and through what mask, is known when the call is traced: chunk a of queries and chunk b of keys are a problem of
their own, whose diagonal lies elsewhere. Steps in which no device sees anything are left out, their transfers too.

Source: Liu et al. 2023 (ring attention); Zhu 2024 (zigzag); Dao et al. 2022 (merging by log-sum-exp).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fa4.dispatch import DifferentiableOnce, Target
from jax_fa4.problem import NO_CONSTANTS, NO_GRIDS, AttentionOperands, AttentionProblem
from jax_fa4.schedule.tiles import MaskRule
from jax_fa4.varying import varying_zeros

Array = Any
Chunks = tuple[tuple[int, ...], ...]  # for each device, the chunks of the sequence that it holds, in its order

LAYOUTS = ("contiguous", "zigzag")


def chunks_of(layout: str, devices: int) -> Chunks:
    """Which chunks of a sequence each device holds.

    Args:
      layout: "contiguous": device d holds chunk d of `devices`; "zigzag": chunks d and 2 * devices - 1 - d of twice as
        many.
      devices: how many there are.

    Raises:
      ValueError: the layout is neither.
    """
    if layout == "contiguous":
        return tuple((device,) for device in range(devices))
    if layout == "zigzag":
        return tuple((device, 2 * devices - 1 - device) for device in range(devices))
    raise ValueError(f"layout is {layout!r}. One of {', '.join(map(repr, LAYOUTS))} is accepted.")


class Pair(NamedTuple):
    """One slot of a device's queries with one slot of the keys that it holds in a step.

    Attributes:
      query_slot, key_slot: which of the device's chunks.
      rules: the masks that occur on some device; None where the chunks do not see each other.
      choice: for each device, which of `rules` is its own.
    """

    query_slot: int
    key_slot: int
    rules: tuple[MaskRule | None, ...]
    choice: tuple[int, ...]


class Step(NamedTuple):
    """What devices do with the keys of the device `shift` places before them."""

    shift: int
    pairs: tuple[Pair, ...]


def chunk_rule(rule: MaskRule, query_chunk: int, key_chunk: int, sizes: tuple[int, int]) -> MaskRule | None:
    """The mask between two chunks of `sizes` (queries, keys), in its plainest form; None where nothing is visible.

    `rule` is that of the whole sequence; its lengths are not read.
    """
    queries, keys = sizes
    offset = rule.diagonal_offset + query_chunk * queries - key_chunk * keys
    lowest, highest = -(queries - 1) - offset, keys - 1 - offset  # of j - i - offset over the pairs of the chunks
    left, right = rule.band
    if (left is not None and highest < -left) or (right is not None and lowest > right):
        return None
    left = None if left is None or lowest >= -left else left
    right = None if right is None or highest <= right else right
    if left is None and right is None:
        return MaskRule(queries, keys)
    is_causal = right == 0
    return MaskRule(queries, keys, is_causal, (left, None if is_causal else right), offset)


@functools.lru_cache(maxsize=256)
def plan_steps(rule: MaskRule, query_chunks: Chunks, key_chunks: Chunks, sizes: tuple[int, int]) -> tuple[Step, ...]:
    """The steps in which something is visible.

    Args:
      rule: the mask of the whole sequence; its lengths are not read.
      query_chunks: the chunks of queries that each device holds.
      key_chunks: the same for keys, before they travel.
      sizes: length of a chunk of queries and of one of keys.
    """
    devices = len(query_chunks)
    steps = []
    for shift in range(1 if len(set(key_chunks)) == 1 else devices):
        pairs = []
        for query_slot in range(len(query_chunks[0])):
            for key_slot in range(len(key_chunks[0])):
                own = [
                    chunk_rule(rule, query_chunks[d][query_slot], key_chunks[(d - shift) % devices][key_slot], sizes)
                    for d in range(devices)
                ]
                rules = tuple(dict.fromkeys(own))
                if rules != (None,):
                    pairs.append(Pair(query_slot, key_slot, rules, tuple(rules.index(one) for one in own)))
        if pairs:
            steps.append(Step(shift, tuple(pairs)))
    return tuple(steps)


def visible_pairs_of(rule: MaskRule) -> int:
    """How many pairs of a query and a key a band leaves, counted row by row."""
    rows = np.arange(rule.query_length, dtype=np.int64) + rule.diagonal_offset
    left, right = rule.band
    begin = np.zeros_like(rows) if left is None else np.clip(rows - left, 0, rule.key_length)
    end = np.full_like(rows, rule.key_length) if right is None else np.clip(rows + right + 1, 0, rule.key_length)
    return int(np.maximum(end - begin, 0).sum())


def slowest_work(steps: Sequence[Step], devices: int) -> int:
    """Pairs of a query and a key that the slowest device of each step computes, summed: what a call waits for."""

    def work(step: Step, device: int) -> int:
        own = (pair.rules[pair.choice[device]] for pair in step.pairs)
        return sum(visible_pairs_of(rule) for rule in own if rule is not None)

    return sum(max(work(step, device) for device in range(devices)) for step in steps)


def merge(results: tuple[Array, Array], others: tuple[Array, Array]) -> tuple[Array, Array]:
    """The output and log-sum-exp over two disjoint sets of keys, from those over each; exact.

    Args:
      results: output (..., Dv) and log-sum-exp (...), both in the accumulation dtype; -inf where no key is seen.
      others: the same over other keys.

    Returns:
      The two over all keys; where neither saw one, output 0 and log-sum-exp -inf.
    """
    (out, lse), (other_out, other_lse) = results, others
    highest = jnp.maximum(lse, other_lse)
    reference = jnp.where(highest == -jnp.inf, 0, highest)
    weight, other_weight = jnp.exp(lse - reference), jnp.exp(other_lse - reference)
    total = weight + other_weight
    is_empty = total == 0
    divisor = jnp.where(is_empty, 1, total)
    merged = out * (weight / divisor)[..., None] + other_out.astype(out.dtype) * (other_weight / divisor)[..., None]
    return merged, jnp.where(is_empty, -jnp.inf, reference + jnp.log(divisor))


class _Keys(NamedTuple):
    """What travels: (B, S, K, ...) of one device, ids (B, S) or None."""

    key: Array
    value: Array
    key_ids: Array | None


@dataclasses.dataclass(frozen=True)
class Ring:
    """An implementation spread over the devices of mesh axes; an implementation itself, whose problems are the shares.

    A share's problem has the lengths of one device; its mask rule is that of the whole sequence (the lengths in it are
    not read), and lengths that are operands count from the start of the whole sequence.

    Attributes:
      implementation: what each device computes its pairs of chunks with.
      axis: the mesh axes; the position along them, first one major, is the place in the ring.
      devices: how many positions there are.
      layout: "contiguous" or "zigzag".
      has_whole_keys: every device holds all keys; nothing travels, and the gradients of keys are its own queries' part.
    """

    implementation: DifferentiableOnce
    axis: tuple[str, ...]
    devices: int
    layout: str = "contiguous"
    has_whole_keys: bool = False

    @property
    def name(self) -> str:
        """That of the implementation."""
        return self.implementation.name

    def _chunks(self) -> tuple[Chunks, Chunks]:
        queries = chunks_of(self.layout, self.devices)
        return queries, ((0,),) * self.devices if self.has_whole_keys else queries

    def steps(self, problem: AttentionProblem) -> tuple[Step, ...]:
        """The steps of a share."""
        queries, keys = self._chunks()
        sizes = problem.query_length // len(queries[0]), problem.key_length // len(keys[0])
        return plan_steps(problem.mask, queries, keys, sizes)

    def why_not(self, problem: AttentionProblem, target: Target) -> str | None:
        """None where it takes the share of each device; else one sentence with the remedy."""
        if not isinstance(self.implementation, DifferentiableOnce):
            return (
                f"implementation '{self.name}' has no backward pass of its own, which a ring needs; pass "
                "implementation='blockwise'."
            )
        if (problem.has_bias or problem.has_mask) and not self.has_whole_keys:
            argument = "bias" if problem.has_bias else "mask"
            return f"{argument} has a column for every key, and keys travel; gather key and value along {self.axis}."
        for layout, length in zip(self._chunks(), (problem.query_length, problem.key_length), strict=True):
            if length % len(layout[0]):
                return f"a device's share of {length} does not divide into the two halves of layout 'zigzag'."
        rules = {rule for step in self.steps(problem) for pair in step.pairs for rule in pair.rules}
        reasons = (self.implementation.why_not(_of_pair(problem, rule), target) for rule in rules if rule is not None)
        return next((reason for reason in reasons if reason is not None), None)

    def describe(self, problem: AttentionProblem, target: Target) -> list[tuple[str, str]]:
        """Labels and texts about the ring, then about what a device computes first."""
        steps = self.steps(problem)
        lines = [("ring", f"{self.devices} devices along {', '.join(self.axis)}, {self.layout}, {len(steps)} steps")]
        rule = next((rule for step in steps for pair in step.pairs for rule in pair.rules if rule is not None), None)
        return lines if rule is None else [*lines, *self.implementation.describe(_of_pair(problem, rule), target)]

    def forward(self, problem: AttentionProblem, operands: AttentionOperands) -> tuple[Array, Array]:
        """This device's output (B, T, N, Dv) and log-sum-exp (B, T, N)."""
        return _Walk(self, problem, operands).forward()

    def backward(
        self,
        problem: AttentionProblem,
        operands: AttentionOperands,
        out: Array,
        lse: Array,
        grad_out: Array,
        grad_lse: Array,
    ) -> AttentionOperands:
        """Cotangents of this device's operands; those of what devices share (scale) are its part of the sum."""
        return _Walk(self, problem, operands).backward((out, lse, grad_out, grad_lse))


def _of_pair(problem: AttentionProblem, rule: MaskRule) -> AttentionProblem:
    """The problem of one pair of chunks of a share."""
    return dataclasses.replace(
        problem,
        query_length=rule.query_length,
        key_length=rule.key_length,
        mask=rule,
        has_sinks=False,  # they are merged in once, not once a pair
        constants=NO_CONSTANTS,
        planned=NO_GRIDS,
    )


class _Walk:
    """One pass of one share round the ring."""

    def __init__(self, ring: Ring, problem: AttentionProblem, operands: AttentionOperands):
        self.ring, self.problem = ring, problem
        known = problem.mask_operands(operands)._asdict()  # constants become operands, which can travel
        self.operands = operands._replace(
            **{name: None if x is None else self._varying(jnp.asarray(x), operands) for name, x in known.items()}
        )
        self.steps = ring.steps(problem)
        self.query_chunks, self.key_chunks = ring._chunks()
        self.query_size = problem.query_length // len(self.query_chunks[0])
        self.key_size = problem.key_length // len(self.key_chunks[0])
        self.device = lax.axis_index(ring.axis)
        self.wide = jnp.dtype(problem.accumulation_dtype)

    def _varying(self, x: Array, operands: AttentionOperands) -> Array:
        return x + varying_zeros((), x.dtype, operands)

    def _zeros(self, shape: tuple[int, ...]) -> Array:
        return varying_zeros(shape, self.wide, self.operands)

    def _query_rows(self, x: Array | None, slot: int) -> Array | None:
        """(B, T, ...) to the rows of a slot."""
        return None if x is None else x[:, slot * self.query_size : (slot + 1) * self.query_size]

    def _key_rows(self, x: Array | None, slot: int) -> Array | None:
        return None if x is None else x[:, slot * self.key_size : (slot + 1) * self.key_size]

    def _lengths(self, lengths: Array | None, chunks: Chunks, slot: int, size: int, shift: int) -> Array | None:
        """Lengths of the whole sequence as lengths of the chunk in a slot of the device `shift` places before."""
        if lengths is None:
            return None
        first = jnp.asarray([chunks[(d - shift) % self.ring.devices][slot] * size for d in range(self.ring.devices)])
        return jnp.clip(lengths - first[self.device].astype(lengths.dtype), 0, size)

    def _score_rows(self, x: Array | None, slot: int) -> Array | None:
        """The rows of a bias or a mask (1 or B, 1 or N, 1 or T, S) that belong to a slot."""
        if x is None or x.shape[2] == 1:
            return x
        return x[:, :, slot * self.query_size : (slot + 1) * self.query_size]

    def _pair_operands(self, keys: _Keys, pair: Pair, shift: int) -> AttentionOperands:
        mine, slot = self.operands, pair.query_slot
        return AttentionOperands(
            query=self._query_rows(mine.query, slot),
            key=self._key_rows(keys.key, pair.key_slot),
            value=self._key_rows(keys.value, pair.key_slot),
            bias=self._score_rows(mine.bias, slot),
            mask=self._score_rows(mine.mask, slot),
            sinks=None,
            scale=mine.scale,
            query_ids=self._query_rows(mine.query_ids, slot),
            key_ids=self._key_rows(keys.key_ids, pair.key_slot),
            query_lengths=self._lengths(mine.query_lengths, self.query_chunks, slot, self.query_size, 0),
            key_lengths=self._lengths(mine.key_lengths, self.key_chunks, pair.key_slot, self.key_size, shift),
        )

    def _rotate(self, tree: Any, places: int) -> Any:
        """Each device's arrays `places` further round the ring; every array by a transfer of its own.

        XLA has a history of refusing transfers that mix dtypes (jax-ml/jax #32148).
        """
        devices = self.ring.devices
        if places % devices == 0:
            return tree
        ring = [(device, (device + places) % devices) for device in range(devices)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.ring.axis, ring), tree)

    def _on_my_rule(self, pair: Pair, run: Callable[[AttentionProblem], Any], otherwise: Any) -> Any:
        """`run` with the problem of this device's mask, or `otherwise` where it sees nothing."""

        def branch(rule: MaskRule | None) -> Callable[[], Any]:
            return (lambda: otherwise) if rule is None else lambda: run(_of_pair(self.problem, rule))

        branches = [branch(rule) for rule in pair.rules]
        if len(branches) == 1:
            return branches[0]()
        return lax.switch(jnp.asarray(pair.choice, jnp.int32)[self.device], branches)

    def _walk(self, steps: Sequence[Step], visit: Callable[[_Keys, Step], None]) -> None:
        """Visits each step with its keys; those of the next one are on their way meanwhile."""
        own = keys = _Keys(self.operands.key, self.operands.value, self.operands.key_ids)
        shift = 0

        def bring(step: Step) -> _Keys:
            return own if step.shift == 0 else self._rotate(keys, step.shift - shift)

        arriving = bring(steps[0]) if steps else own
        for number, step in enumerate(steps):
            keys, shift = arriving, step.shift
            if number + 1 < len(steps):
                arriving = bring(steps[number + 1])
            visit(keys, step)

    def forward(self) -> tuple[Array, Array]:
        problem, slots = self.problem, range(len(self.query_chunks[0]))
        rows = (problem.batch, self.query_size, problem.query_heads)
        lse = self._zeros(rows) - jnp.inf
        if self.operands.sinks is not None:  # logits without a value: already there when the first key comes
            lse = self._zeros(rows) + self.operands.sinks.astype(self.wide)
        results = [(self._zeros((*rows, problem.value_dim)), lse) for _ in slots]

        def visit(keys: _Keys, step: Step) -> None:
            for pair in step.pairs:
                operands, so_far = self._pair_operands(keys, pair, step.shift), results[pair.query_slot]

                def attend(
                    problem: AttentionProblem, operands: AttentionOperands = operands, so_far: Any = so_far
                ) -> tuple[Array, Array]:
                    return merge(so_far, self.ring.implementation.forward(problem, operands))

                results[pair.query_slot] = self._on_my_rule(pair, attend, so_far)

        self._walk(self.steps, visit)
        out, lse = (jnp.concatenate(parts, axis=1) for parts in zip(*results, strict=True))
        return out.astype(problem.dtype), lse

    def backward(self, results_and_grads: tuple[Array, Array, Array, Array]) -> AttentionOperands:
        mine, slots = self.operands, range(len(self.query_chunks[0]))
        own: dict[str, Any] = {
            "query": [self._zeros(mine.query[:, : self.query_size].shape) for _ in slots],
            "bias": None if mine.bias is None else self._zeros(mine.bias.shape),
            "scale": None if mine.scale is None else self._zeros(()),
        }
        travelling: tuple[Array, ...] | None = None
        last_shift = 0

        def visit(keys: _Keys, step: Step) -> None:
            nonlocal travelling, last_shift
            fresh = [
                tuple(self._zeros(x[:, : self.key_size].shape) for x in (keys.key, keys.value))
                for _ in self.key_chunks[0]
            ]
            for pair in step.pairs:
                self._add_gradients(keys, pair, step.shift, results_and_grads, own, fresh)
            added = tuple(jnp.concatenate(parts, axis=1) for parts in zip(*fresh, strict=True))
            if travelling is None:
                travelling = added
            else:  # this transfer waits for the step before, not for this one's gradients
                arrived = self._rotate(travelling, step.shift - last_shift)
                travelling = tuple(a + b for a, b in zip(arrived, added, strict=True))
            last_shift = step.shift

        # The other way round: gradients come home with the last step, that of a device's own keys. And XLA would find
        # the forward pass's transfers again, and rather keep all that they brought than make them twice.
        self._walk(self.steps[::-1], visit)
        if travelling is None:
            travelling = tuple(self._zeros(x.shape) for x in (mine.key, mine.value))
        grad_key, grad_value = self._rotate(travelling, -last_shift)
        grads = {
            "query": jnp.concatenate(own["query"], axis=1),
            "key": grad_key,
            "value": grad_value,
            "bias": own["bias"],
            "scale": own["scale"],
        }
        return AttentionOperands(
            **{name: None if x is None else x.astype(getattr(mine, name).dtype) for name, x in grads.items()}
        )

    def _add_gradients(
        self,
        keys: _Keys,
        pair: Pair,
        shift: int,
        results_and_grads: tuple[Array, Array, Array, Array],
        own: dict[str, Any],
        fresh: list[tuple[Array, ...]],
    ) -> None:
        """Adds the gradients of one pair to those of its queries and of its keys."""
        operands = self._pair_operands(keys, pair, shift)
        rows: Any = [self._query_rows(x, pair.query_slot) for x in results_and_grads]
        query, bias, scale = own["query"][pair.query_slot], own["bias"], own["scale"]
        key, value = fresh[pair.key_slot]
        so_far = (query, key, value, bias, scale)

        def run(problem: AttentionProblem) -> Any:
            grads = self.ring.implementation.backward(problem, operands, *rows)
            parts = (grads.query, grads.key, grads.value, self._all_score_rows(grads.bias, pair), grads.scale)
            return tuple(
                None if total is None else total + part.astype(self.wide)
                for total, part in zip(so_far, parts, strict=True)
            )

        query, key, value, own["bias"], own["scale"] = self._on_my_rule(pair, run, so_far)
        own["query"][pair.query_slot], fresh[pair.key_slot] = query, (key, value)

    def _all_score_rows(self, x: Array | None, pair: Pair) -> Array | None:
        """The gradient of a slot's rows of the bias among zeros for the others."""
        if x is None or x.shape[2] == 1 or len(self.query_chunks[0]) == 1:
            return x
        before = pair.query_slot * self.query_size
        after = self.problem.query_length - before - self.query_size
        return jnp.pad(x, ((0, 0), (0, 0), (before, after), (0, 0)))


def to_zigzag(x: Array, axis: tuple[str, ...], devices: int) -> Array:
    """A device's contiguous share (B, L, ...) exchanged for its share in the layout "zigzag"."""
    return _exchange(x, axis, devices, is_inverse=False)


def from_zigzag(x: Array, axis: tuple[str, ...], devices: int) -> Array:
    """The inverse of `to_zigzag`."""
    return _exchange(x, axis, devices, is_inverse=True)


def _exchange(x: Array, axis: tuple[str, ...], devices: int, is_inverse: bool) -> Array:
    """Two transfers, of the even and of the odd chunks: each device has one of both kinds in either layout."""
    holder = {chunk: device for device, own in enumerate(chunks_of("zigzag", devices)) for chunk in own}
    is_even_place = (lax.axis_index(axis) % 2 == 0).reshape((1,) * x.ndim)
    first, second = jnp.split(x, 2, axis=1)
    if is_inverse:  # on a device of even number the first chunk is the even one; on others the second
        first, second = jnp.where(is_even_place, first, second), jnp.where(is_even_place, second, first)
    moved = []
    for half, parity in ((first, 0), (second, 1)):
        ring = [(chunk // 2, holder[chunk]) for chunk in range(parity, 2 * devices, 2)]
        moved.append(lax.ppermute(half, axis, [(b, a) for a, b in ring] if is_inverse else ring))
    even, odd = moved
    if not is_inverse:
        even, odd = jnp.where(is_even_place, even, odd), jnp.where(is_even_place, odd, even)
    return jnp.concatenate([even, odd], axis=1)

"""Context parallelism: attention over a sequence that the devices of a mesh axis share.

    device 0        device 1        device 2        device 3
    queries 0       queries 1       queries 2       queries 3        stay
    keys 0    -->   keys 1    -->   keys 2    -->   keys 3    -->    go round the ring

In step s a device holds the keys of the device s places before it. It attends to them while the next keys are on their
way, and merges what it gets by log-sum-exp, which is exact. The backward pass goes the other way round, and the
gradients of keys and values travel with them, one step behind: those of the step before arrive while this step's are
computed. What a device holds is linear in its own share of the sequence. What it computes in which step is planned in
`ring_steps.py`.

Source: Liu et al. 2023 (ring attention); Zhu 2024 (zigzag); Dao et al. 2022 (merging by log-sum-exp).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_fa4.dispatch import DifferentiableOnce, Target
from jax_fa4.problem import NO_CONSTANTS, NO_GRIDS, AttentionOperands, AttentionProblem
from jax_fa4.ring_steps import Block, Chunks, Slots, Step, Work, chunks_of, plan_steps
from jax_fa4.varying import varying_zeros

Array = Any
Results = tuple[Array, Array]  # output (B, t, N, Dv) and log-sum-exp (B, t, N) of the queries in a slot


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


def _packed(first: Array, second: Array) -> tuple[Array, ...]:
    """Two arrays as one, (2, B, S, K, D), where their shapes allow: XLA has one transfer under way at a time, so that
    of two only one can hide behind a kernel."""
    return (jnp.stack([first, second]),) if first.shape == second.shape else (first, second)


def _unpacked(arrays: tuple[Array, ...], rows: slice = slice(None)) -> tuple[Array, Array]:
    """Rows (B, s, K, D) of the two."""
    if len(arrays) == 1:  # a single slice, which XLA hands to a kernel without a copy where the batch is 1
        return arrays[0][0, :, rows], arrays[0][1, :, rows]
    first, second = arrays
    return first[:, rows], second[:, rows]


class _Keys(NamedTuple):
    """What travels, of one device: keys and values (B, S, K, ...), packed or not; ids (B, S) or None."""

    key_and_value: tuple[Array, ...]
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
        reasons = (self.implementation.why_not(one, target) for one in self._blocks(problem))
        return next((reason for reason in reasons if reason is not None), None)

    def _blocks(self, problem: AttentionProblem) -> list[AttentionProblem]:
        """The different problems that make up a share."""
        blocks = (block for step in self.steps(problem) for work in step.works for block in work)
        return list(dict.fromkeys(_of_block(problem, block) for block in blocks))

    def describe(self, problem: AttentionProblem, target: Target) -> list[tuple[str, str]]:
        """Labels and texts about the ring, then about what a device computes first."""
        steps = self.steps(problem)
        lines = [("ring", f"{self.devices} devices along {', '.join(self.axis)}, {self.layout}, {len(steps)} steps")]
        blocks = self._blocks(problem)
        return [*lines, *self.implementation.describe(blocks[0], target)] if blocks else lines

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


def _of_block(problem: AttentionProblem, block: Block) -> AttentionProblem:
    """The problem of one block of a share."""
    return dataclasses.replace(
        problem,
        query_length=block.rule.query_length,
        key_length=block.rule.key_length,
        mask=block.rule,
        has_sinks=False,  # they are merged in once, not once a block
        constants=NO_CONSTANTS,
        planned=NO_GRIDS,
    )


class _Sums(NamedTuple):
    """Gradients of this device's own; None where nothing has been added yet, or none is due."""

    query: Array | None
    bias: Array | None
    scale: Array | None


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

    def _query_rows(self, x: Array | None, slots: Slots) -> Array | None:
        """The rows of slots among those of this device's queries (B, T, ...)."""
        return None if x is None else x[:, _rows(slots, self.query_size)]

    def _lengths(self, lengths: Array | None, chunks: Chunks, slots: Slots, size: int, shift: int) -> Array | None:
        """Lengths of the whole sequence as lengths of the slots of the device `shift` places before: chunks ascend, so
        that what a length leaves of them comes first."""
        if lengths is None:
            return None
        holders = [chunks[(device - shift) % self.ring.devices] for device in range(self.ring.devices)]
        first = jnp.asarray([holder[slots.first : slots.last] for holder in holders], lengths.dtype) * size
        return jnp.clip(lengths[:, None] - first[self.device], 0, size).sum(axis=1, dtype=lengths.dtype)

    def _score_rows(self, x: Array | None, slots: Slots) -> Array | None:
        """The rows of a bias or a mask (1 or B, 1 or N, 1 or T, S) that belong to slots."""
        if x is None or x.shape[2] == 1:
            return x
        return x[:, :, _rows(slots, self.query_size)]

    def _block_operands(self, keys: _Keys, block: Block, shift: int) -> AttentionOperands:
        mine, queries = self.operands, block.queries
        key_rows = _rows(block.keys, self.key_size)
        key, value = _unpacked(keys.key_and_value, key_rows)
        return AttentionOperands(
            query=self._query_rows(mine.query, queries),
            key=key,
            value=value,
            bias=self._score_rows(mine.bias, queries),
            mask=self._score_rows(mine.mask, queries),
            sinks=None,
            scale=mine.scale,
            query_ids=self._query_rows(mine.query_ids, queries),
            key_ids=None if keys.key_ids is None else keys.key_ids[:, key_rows],
            query_lengths=self._lengths(mine.query_lengths, self.query_chunks, queries, self.query_size, 0),
            key_lengths=self._lengths(mine.key_lengths, self.key_chunks, block.keys, self.key_size, shift),
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

    def _on_my_work(self, step: Step, run: Callable[[Work], Any]) -> Any:
        """`run` with what this device computes in a step."""
        if len(step.works) == 1:
            return run(step.works[0])
        choice = jnp.asarray(step.choice, jnp.int32)[self.device]
        return lax.switch(choice, [functools.partial(run, work) for work in step.works])

    def _walk(self, steps: Sequence[Step], visit: Callable[[_Keys, Step], None]) -> None:
        """Visits each step with its keys; those of the next one are on their way meanwhile."""
        mine = self.operands
        are_travelling = any(step.shift for step in steps)
        own = _Keys(
            _packed(mine.key, mine.value) if are_travelling else (mine.key, mine.value),
            mine.key_ids,
        )
        keys, shift = own, 0

        def bring(step: Step) -> _Keys:
            return own if step.shift == 0 else self._rotate(keys, step.shift - shift)

        arriving = bring(steps[0]) if steps else own
        for number, step in enumerate(steps):
            keys, shift = arriving, step.shift
            if number + 1 < len(steps):
                arriving = bring(steps[number + 1])
            visit(keys, step)

    def forward(self) -> Results:
        """The output in the problem's dtype and the log-sum-exp of this device's queries."""
        problem, sinks = self.problem, self.operands.sinks
        rows = (problem.batch, problem.query_length, problem.query_heads)
        last = self.steps[-1] if self.steps else None

        def nothing(dtype: Any) -> Results:
            """Where no key was seen; a sink is a logit without a value, which is there before the first key."""
            lse = self._zeros(rows) - jnp.inf if sinks is None else self._zeros(rows) + sinks.astype(self.wide)
            return self._zeros((*rows, problem.value_dim)).astype(dtype), lse

        results = None if sinks is None else nothing(self.wide)

        def visit(keys: _Keys, step: Step) -> None:
            nonlocal results
            # A part comes rounded to the operands' dtype, in which it stays until there is another to merge it with.
            is_narrow = step is last or (results is None and all(len(work) <= 1 for work in step.works))
            dtype = problem.dtype if is_narrow else self.wide

            def run(work: Work, so_far: Results | None = results) -> Results:
                for block in work:
                    operands = self._block_operands(keys, block, step.shift)
                    part = self.ring.implementation.forward(_of_block(problem, block), operands)
                    so_far = self._merged(so_far, block.queries, part)
                out, lse = so_far or nothing(dtype)
                return out.astype(dtype), lse

            results = self._on_my_work(step, run)

        self._walk(self.steps, visit)
        return results or nothing(problem.dtype)

    def _merged(self, so_far: Results | None, slots: Slots, part: Results) -> Results:
        """The results with those of a block's queries merged in."""
        own = _rows(slots, self.query_size)
        if so_far is None:
            out, lse = (
                _among(x, own, self.problem.query_length, fill) for x, fill in zip(part, (0, -jnp.inf), strict=True)
            )
            return out, lse
        merged = merge(tuple(x[:, own].astype(self.wide) for x in so_far), part)
        out, lse = (_replaced(x.astype(self.wide), own, new) for x, new in zip(so_far, merged, strict=True))
        return out, lse

    def backward(self, results_and_grads: tuple[Array, Array, Array, Array]) -> AttentionOperands:
        """The cotangents of this device's operands."""
        mine = self.operands
        own = _Sums(None, None, None)
        travelling: tuple[Array, ...] | None = None
        last_shift = 0

        def visit(keys: _Keys, step: Step) -> None:
            nonlocal own, travelling, last_shift
            own, added = self._on_my_work(step, lambda work: self._gradients(own, keys, step, work, results_and_grads))
            if travelling is None:
                travelling = added
            else:  # this transfer waits for the step before, not for this one's gradients
                arrived = self._rotate(travelling, step.shift - last_shift)
                travelling = tuple(a.astype(self.wide) + b for a, b in zip(arrived, added, strict=True))
            last_shift = step.shift

        # The other way round: gradients come home with the last step, that of a device's own keys. And XLA would find
        # the forward pass's transfers again, and rather keep all that they brought than make them twice.
        self._walk(self.steps[::-1], visit)
        if travelling is None:
            own, travelling = self._filled(own), tuple(self._zeros(x.shape) for x in _packed(mine.key, mine.value))
        key, value = _unpacked(self._rotate(travelling, -last_shift))
        grads = {"query": own.query, "key": key, "value": value, "bias": own.bias, "scale": own.scale}
        return AttentionOperands(
            **{name: None if x is None else x.astype(getattr(mine, name).dtype) for name, x in grads.items()}
        )

    def _gradients(
        self, so_far: _Sums, keys: _Keys, step: Step, work: Work, results_and_grads: tuple[Array, Array, Array, Array]
    ) -> tuple[_Sums, tuple[Array, ...]]:
        """The sums with what one device adds in one step, and the gradients of its keys and values of that step."""
        query, bias, scale = so_far
        key: Array | None = None
        value: Array | None = None
        mine, lengths = self.operands, (self.problem.query_length, self.problem.key_length)
        for block in work:
            operands, problem = self._block_operands(keys, block, step.shift), _of_block(self.problem, block)
            rows: Any = [self._query_rows(x, block.queries) for x in results_and_grads]
            grads = self.ring.implementation.backward(problem, operands, *rows)
            query_rows, key_rows = _rows(block.queries, self.query_size), _rows(block.keys, self.key_size)
            query = self._with_rows(query, query_rows, grads.query, lengths[0])
            key = self._with_rows(key, key_rows, grads.key, lengths[1])
            value = self._with_rows(value, key_rows, grads.value, lengths[1])
            bias = self._plus(bias, self._all_score_rows(grads.bias, block.queries))
            scale = self._plus(scale, grads.scale)
        # What comes of one block is rounded to the operands' dtype already, and may stay in it, and travel so.
        is_one = all(len(one) <= 1 for one in step.works)

        def made(x: Array | None, like: Array, is_first: bool = True) -> Array:
            dtype = like.dtype if is_first and is_one else self.wide
            return self._zeros(like.shape).astype(dtype) if x is None else x.astype(dtype)

        sums = self._filled(_Sums(made(query, mine.query, so_far.query is None), bias, scale))
        return sums, _packed(made(key, mine.key), made(value, mine.value))

    def _filled(self, sums: _Sums) -> _Sums:
        """The sums, zeros where nothing was added to what is due."""
        mine = self.operands
        return _Sums(
            *(
                self._zeros(getattr(mine, name).shape) if x is None and getattr(mine, name) is not None else x
                for name, x in sums._asdict().items()
            )
        )

    def _plus(self, total: Array | None, part: Array | None) -> Array | None:
        if part is None:
            return total
        return part.astype(self.wide) if total is None else total + part.astype(self.wide)

    def _with_rows(self, total: Array | None, rows: slice, part: Array, length: int) -> Array:
        """A sum (B, length, ...) with a block's rows added."""
        if total is None:
            return _among(part, rows, length, 0)
        return _replaced(total.astype(self.wide), rows, total[:, rows].astype(self.wide) + part)

    def _all_score_rows(self, x: Array | None, slots: Slots) -> Array | None:
        """The gradient of the bias's rows of some slots among zeros for the others."""
        if x is None or x.shape[2] == 1:
            return x
        after = self.problem.query_length - slots.last * self.query_size
        return jnp.pad(x, ((0, 0), (0, 0), (slots.first * self.query_size, after), (0, 0)))


def _rows(slots: Slots, size: int) -> slice:
    """The rows of slots of `size` rows each."""
    return slice(slots.first * size, slots.last * size)


def _among(part: Array, rows: slice, length: int, fill: float) -> Array:
    """(B, length, ...) with a part's rows where they belong, and `fill` in all others."""
    widths = [(0, 0), (rows.start, length - rows.stop), *((0, 0),) * (part.ndim - 2)]
    return jnp.pad(part, widths, constant_values=fill)


def _replaced(whole: Array, rows: slice, part: Array) -> Array:
    """The whole (B, length, ...) with other rows in one place, in one piece, which XLA writes once."""
    return jnp.concatenate([whole[:, : rows.start], part, whole[:, rows.stop :]], axis=1)


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
        is_moved = any(a != b for a, b in ring)  # with two devices one of the halves stays
        moved.append(lax.ppermute(half, axis, [(b, a) for a, b in ring] if is_inverse else ring) if is_moved else half)
    even, odd = moved
    if not is_inverse:
        even, odd = jnp.where(is_even_place, even, odd), jnp.where(is_even_place, odd, even)
    return jnp.concatenate([even, odd], axis=1)

"""What a mesh may split, and what each device then computes.

    batch      each device has rows of its own                                       no transfers
    heads      each device has query heads of its own, and the KV heads they use     no transfers; where KV heads are
                                                                                     fewer than devices, their gradients
                                                                                     are summed
    sequence   each device has queries of its own; keys go round a ring, or are      `jax_fa4.ring`
               gathered where a ring cannot serve (bias, mask, odd lengths)

Under `jax.jit` the compiler asks, once shardings are known: `custom_partitioning` gives it a Shardy rule, along which
it passes shardings on, and a callback. The rule only propagates; it does not make operands agree. So the callback reads
what is asked of the query (of key and value where the query says nothing), decides, and answers with the sharding of
*every* operand; the compiler moves what lies elsewhere: a cotangent that came replicated, keys that are not split as
their queries are. Where a mesh cannot be honoured a dimension is computed whole: slower, never wrong.

Inside `jax.shard_map` the caller has decided, and a call is local. On meshes with Explicit axes results are given the
query's sharding, as a part of their type, and the compiler proceeds as on Auto axes.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_fa4 import dispatch
from jax_fa4.dispatch import DifferentiableOnce, Target
from jax_fa4.problem import NO_CONSTANTS, AttentionOperands, AttentionProblem
from jax_fa4.promotion import usual_promotion
from jax_fa4.ring import Ring, from_zigzag, to_zigzag
from jax_fa4.ring_steps import chunks_of, plan_steps, slowest_work

Array = Any
Axes = tuple[str, ...]
Results = TypeVar("Results")

ZIGZAG_GAIN = 0.9
"""The layout "zigzag" is taken where its slowest device computes less than this share of what it would compute with the
contiguous one: the exchange into it and back moves each operand once, less than one step of the ring in ten."""

# The dimensions of each operand and result, by what may split them: (b)atch, (t) queries, (s) keys, (n) query heads,
# (k) KV heads; d and e are the head dimensions, which nothing splits; a dot is a dimension of this array alone.
DIMENSIONS = {
    "query": "btnd",
    "key": "bskd",
    "value": "bske",
    "bias": "bnts",
    "mask": "bnts",
    "sinks": "n",
    "scale": "",
    "query_ids": "bt",
    "key_ids": "bs",
    "query_lengths": "b",
    "key_lengths": "b",
    **dict.fromkeys(("query_lo", "query_hi"), "bt"),
    **dict.fromkeys(("key_lo", "key_hi"), "bs"),
    **dict.fromkeys(("query_exact", "key_exact"), "b"),
    **dict.fromkeys(("forward_items", "backward_items"), ".."),
    "out": "btne",
    "lse": "btn",
    "digest": ".",
}
PLANNED = tuple(name for name in DIMENSIONS if name.endswith(("_lo", "_hi", "_exact", "_items")))
"""What a plan of segments knows of whole sequences: dropped where these are cut."""

GRADIENTS = ("query", "key", "value", "bias", "scale")  # what an implementation's backward pass returns


def run_sharded(run: Callable[[AttentionOperands], Results], operands: AttentionOperands) -> Results:
    """`run(operands)`, an output (B, T, N, Dv) and a log-sum-exp (B, T, N), split as the query is.

    On meshes without Explicit axes this is the plain call.
    """
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return run(operands)
    batch, sequence, heads, _ = jax.typeof(operands.query).sharding.spec
    rows = (batch, sequence, heads)
    shardings = (PartitionSpec(*rows, None), PartitionSpec(*rows))
    return jax.sharding.auto_axes(run, out_sharding=shardings)(operands)


class _Static(NamedTuple):
    """What a partitioned call knows when it is traced."""

    implementation: DifferentiableOnce
    problem: AttentionProblem
    target: Target
    names: tuple[str, ...]  # of the arrays that follow, operands first, the digest last
    results: tuple[str, ...]

    def digest(self) -> np.ndarray:
        """(4,) uint32 that stand for all of this and for the package.

        A constant operand that nothing reads. What the callback computes is not in the program that the compiler sees,
        so that without it calls that differ only here (in the mask, say) would share one entry of JAX's persistent
        compilation cache, once the callback's address is left out of the key.
        """
        text = f"{self.implementation.name} {self.problem} {self.target} {self.names} {self.results}"
        state = hashlib.blake2b(_package_digest() + text.encode(), digest_size=16)
        return np.frombuffer(state.digest(), np.uint32)


@functools.cache
def _package_digest() -> bytes:
    """Stands for the source of the package and for the kernels that it carries."""
    state = hashlib.blake2b(digest_size=16)
    folder = Path(__file__).parent
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("manifest.json")]):
        state.update(path.read_bytes())
    return state.digest()


def forward(
    implementation: DifferentiableOnce, problem: AttentionProblem, target: Target, operands: AttentionOperands
) -> tuple[Array, Array]:
    """The implementation's forward pass, which a compiler may split over a mesh."""
    if _is_manual():
        with dispatch.target(target):
            return implementation.forward(problem, operands)
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    static = _Static(implementation, problem, target, (*given, "digest"), ("out", "lse"))
    return _forward_call(static, *given.values(), static.digest())


def backward(
    implementation: DifferentiableOnce,
    problem: AttentionProblem,
    target: Target,
    operands: AttentionOperands,
    results: tuple[Array, Array],
    grads: tuple[Array, Array],
) -> AttentionOperands:
    """The implementation's backward pass, which a compiler may split over a mesh; cotangents in operands' dtypes."""
    due = {name: x for name in GRADIENTS if (x := getattr(operands, name)) is not None}
    if _is_manual():
        with dispatch.target(target):
            cotangents = implementation.backward(problem, operands, *results, *grads)
        return _cast(cotangents, due)
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    static = _Static(implementation, problem, target, (*given, "out", "lse", "out", "lse", "digest"), tuple(due))
    cotangents = _backward_call(static, *given.values(), *results, *grads, static.digest())
    return AttentionOperands(**dict(zip(due, cotangents, strict=True)))


def _is_manual() -> bool:
    """Whether this is traced inside `jax.shard_map`, where the caller has decided what each device has."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def _cast(cotangents: AttentionOperands, due: Mapping[str, Array]) -> AttentionOperands:
    return AttentionOperands(**{name: getattr(cotangents, name).astype(x.dtype) for name, x in due.items()})


def _operands_of(names: Sequence[str], arrays: Sequence[Array]) -> tuple[AttentionOperands, list[Array]]:
    """The operands among the arrays of a call, and the results and gradients between them and the digest."""
    count = sum(name in AttentionOperands._fields for name in names)
    return AttentionOperands(**dict(zip(names[:count], arrays[:count], strict=True))), list(arrays[count:-1])


# The passes are jitted inside, so that arrays which they make from NumPy stay in the inner program: a partitioned call
# may not have constants of its own. So also where the caller has switched jit off, to look into a program of theirs.
@functools.partial(custom_partitioning, static_argnums=(0,))
def _forward_call(static: _Static, *arrays: Array) -> tuple[Array, Array]:
    operands, _ = _operands_of(static.names, arrays)
    with dispatch.target(static.target), jax.disable_jit(False):
        return jax.jit(functools.partial(static.implementation.forward, static.problem))(operands)


@functools.partial(custom_partitioning, static_argnums=(0,))
def _backward_call(static: _Static, *arrays: Array) -> tuple[Array, ...]:
    operands, rest = _operands_of(static.names, arrays)
    due = {name: getattr(operands, name) for name in static.results}
    with dispatch.target(static.target), jax.disable_jit(False):
        cotangents = jax.jit(functools.partial(static.implementation.backward, static.problem))(operands, *rest)
    return tuple(getattr(_cast(cotangents, due), name) for name in static.results)


def _sharding_rule(static: _Static, mesh: Mesh, value_types: Any, result_types: Any) -> tuple[str, dict[str, int]]:
    """Along which dimensions Shardy passes shardings on, and the size of the groups that share a KV head."""
    problem = static.problem
    full = {"b": problem.batch, "t": problem.query_length, "s": problem.key_length, "n": problem.query_heads}
    # A mesh axis may split KV heads and groups between them only if it need not be split itself, which has no name.
    is_tied = all(problem.kv_heads % n == 0 or math.gcd(problem.kv_heads, n) == 1 for n in mesh.shape.values())
    if problem.group_size == 1:
        written = {"n": "h", "k": "h"}
    elif problem.kv_heads > 1 and is_tied:
        written = {"n": "(h g)", "k": "h"}
    else:
        written = {"n": "h", "k": "k"}
    lone = 0

    def factors(name: str, shape: Sequence[int]) -> str:
        nonlocal lone
        names = []
        for letter, size in zip(DIMENSIONS[name], shape, strict=True):
            if letter == "." or size != full.get(letter, size):  # size 1, which broadcasts: of no other array
                names.append(f"x{lone}")
                lone += 1
            else:
                names.append(written.get(letter, letter))
        return " ".join(names)

    operands, results = (
        ", ".join(factors(name, kind.shape) for name, kind in zip(names, kinds, strict=True))
        for names, kinds in ((static.names, value_types), (static.results, result_types))
    )
    return f"{operands} -> {results}", {"g": problem.group_size} if written["n"] == "(h g)" else {}


@dataclasses.dataclass(frozen=True)
class Split:
    """How a mesh splits one problem.

    Attributes:
      batch, sequence, heads: the mesh axes that split them, disjoint.
      sizes: devices along each mesh axis.
      keys: "ring" or "whole"; what becomes of keys where the sequence is split.
      layout: of the ring.
    """

    batch: Axes
    sequence: Axes
    heads: Axes
    sizes: tuple[tuple[str, int], ...]
    keys: str = "whole"
    layout: str = "contiguous"

    def devices(self, axes: Axes) -> int:
        """How many devices share a dimension that these axes split."""
        return math.prod(size for name, size in self.sizes if name in axes)

    def axes(self, name: str, shape: Sequence[int], problem: AttentionProblem) -> tuple[Axes, ...]:
        """The mesh axes that split each dimension of an operand, result or gradient."""
        full = {"b": problem.batch, "t": problem.query_length, "n": problem.query_heads}
        axes = {"b": self.batch, "t": self.sequence, "n": self.heads}
        if self.keys == "ring":
            full["s"], axes["s"] = problem.key_length, self.sequence
        if problem.kv_heads % self.devices(self.heads) == 0:
            full["k"], axes["k"] = problem.kv_heads, self.heads
        return tuple(
            axes[letter] if letter in axes and size == full[letter] else ()
            for letter, size in zip(DIMENSIONS[name], shape, strict=True)
        )

    def kv_heads(self, problem: AttentionProblem) -> np.ndarray | None:
        """For each device along `heads`, the KV heads that its query heads use; None where these are its share.

        One where a device's query heads are of one group, else one for each query head.
        """
        devices = self.devices(self.heads)
        if problem.kv_heads % devices == 0:
            return None
        own = np.arange(problem.query_heads).reshape(devices, -1) // problem.group_size
        return own[:, :1] if (own == own[:, :1]).all() else own

    def problem(self, problem: AttentionProblem) -> AttentionProblem:
        """The share of each device."""
        sequence = self.devices(self.sequence)
        picked = self.kv_heads(problem)
        heads = self.devices(self.heads)
        lengths = problem.query_length // sequence, problem.key_length // (sequence if self.keys == "ring" else 1)
        return dataclasses.replace(
            problem,
            batch=problem.batch // self.devices(self.batch),
            query_heads=problem.query_heads // heads,
            kv_heads=problem.kv_heads // heads if picked is None else picked.shape[1],
            query_length=lengths[0],
            key_length=lengths[1],
            mask=dataclasses.replace(problem.mask, query_length=lengths[0], key_length=lengths[1]),
            constants=NO_CONSTANTS if self.batch or self.sequence else problem.constants,
        )

    def implementation(self, implementation: DifferentiableOnce) -> DifferentiableOnce:
        """What computes a device's share."""
        if not self.sequence:
            return implementation
        devices = self.devices(self.sequence)
        return Ring(implementation, self.sequence, devices, self.layout, has_whole_keys=self.keys == "whole")


def _dividing(axes: Axes, sizes: Mapping[str, int], length: int) -> Axes:
    """As many of the axes, from the first, as divide a dimension evenly."""
    taken: Axes = ()
    for axis in axes:
        if length == 0 or length % math.prod(sizes[one] for one in (*taken, axis)):
            break
        taken = (*taken, axis)
    return taken


def _wanted(specs: Mapping[str, PartitionSpec], problem: AttentionProblem, sizes: Mapping[str, int]) -> dict[str, Axes]:
    """The axes that split b, t and n: the query's, and where it has none those of key and value."""
    dimensions = {"b": (0, problem.batch), "n": (2, problem.query_heads), "t": (1, problem.query_length)}
    taken: dict[str, Axes] = dict.fromkeys(dimensions, ())
    for name in ("query", "key", "value"):
        for letter, (place, length) in dimensions.items():
            entry = specs[name][place] if place < len(specs[name]) else None
            axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            free = tuple(axis for axis in axes if not any(axis in other for other in taken.values()))
            if not taken[letter]:
                taken[letter] = _dividing(free, sizes, length)
    return taken


def choose_split(
    implementation: DifferentiableOnce,
    problem: AttentionProblem,
    target: Target,
    sizes: Mapping[str, int],
    specs: Mapping[str, PartitionSpec],
) -> Split:
    """How a mesh splits a problem whose operands ask for certain shardings.

    Args:
      implementation: what will compute the shares.
      problem: the call.
      target: what it is traced for.
      sizes: devices along each mesh axis.
      specs: the shardings asked of query, key and value.

    Raises:
      NotImplementedError: the implementation does not take the share of a device.
    """
    axes = _wanted(specs, problem, sizes)
    whole = Split(axes["b"], (), axes["n"], tuple(sizes.items()))
    candidates = [whole]
    if axes["t"]:
        along = dataclasses.replace(whole, sequence=axes["t"])
        devices = along.devices(axes["t"])
        candidates = [along, whole]
        if problem.key_length % devices == 0:
            layout = _layout(problem, devices)
            candidates = [dataclasses.replace(along, keys="ring", layout=layout), along, whole]
    reasons = []
    for split in candidates:
        reason = _why_not(split, implementation, problem, target)
        if reason is None:
            return split
        reasons.append(reason)
    shape = ", ".join(f"{name}: {size}" for name, size in sizes.items())
    raise NotImplementedError(
        f"implementation '{implementation.name}' does not take the share of a device of the mesh ({shape}), which "
        f"splits batch by {whole.batch}, heads by {whole.heads} and sequence by {axes['t']}: {reasons[-1]}"
    )


def _why_not(split: Split, implementation: DifferentiableOnce, problem: AttentionProblem, target: Target) -> str | None:
    return split.implementation(implementation).why_not(split.problem(problem), target)


def _layout(problem: AttentionProblem, devices: int) -> str:
    """The layout with less to wait for."""
    lengths = problem.query_length // devices, problem.key_length // devices
    if lengths[0] % 2 or lengths[1] % 2:
        return "contiguous"

    def work(layout: str, sizes: tuple[int, int]) -> int:
        chunks = chunks_of(layout, devices)
        return slowest_work(plan_steps(problem.mask, chunks, chunks, sizes))

    zigzag = work("zigzag", (lengths[0] // 2, lengths[1] // 2))
    return "zigzag" if zigzag < ZIGZAG_GAIN * work("contiguous", lengths) else "contiguous"


class _Share:
    """The computation of one device, traced inside the mesh's axes."""

    def __init__(self, static: _Static, split: Split, shapes: Sequence[Sequence[int]]):
        self.static, self.split = static, split
        self.shapes = dict(zip(static.names, shapes, strict=True))  # of the whole arrays
        self.problem = split.problem(static.problem)
        self.implementation = split.implementation(static.implementation)
        self.picked = split.kv_heads(static.problem)

    def forward(self, *arrays: Array) -> tuple[Array, Array]:
        operands = self._localised(_operands_of(self.static.names, arrays)[0])
        with dispatch.target(self.static.target):
            results = self.implementation.forward(self.problem, operands)
        return tuple(self._exchanged(name, x, from_zigzag) for name, x in zip(("out", "lse"), results, strict=True))

    def backward(self, *arrays: Array) -> tuple[Array, ...]:
        given, rest = _operands_of(self.static.names, arrays)
        operands = self._localised(given)
        rest = [self._exchanged(name, x, to_zigzag) for name, x in zip(("out", "lse", "out", "lse"), rest, strict=True)]
        with dispatch.target(self.static.target):
            cotangents = self.implementation.backward(self.problem, operands, *rest)
        return tuple(
            self._globalised(name, getattr(cotangents, name), getattr(given, name)) for name in self.static.results
        )

    def _localised(self, operands: AttentionOperands) -> AttentionOperands:
        """The operands of this device's problem, from its shares of the operands."""
        constants = self.static.problem.constants
        if self.problem.constants is not constants:
            own = {name: self._own_rows(name, x.array) for name, x in constants._asdict().items() if x is not None}
            operands = operands._replace(**own)
        if self.split.sequence:
            operands = operands._replace(**dict.fromkeys(PLANNED))
        if self.picked is not None:
            heads = jnp.asarray(self.picked)[lax.axis_index(self.split.heads)]
            operands = operands._replace(
                key=jnp.take(operands.key, heads, axis=2), value=jnp.take(operands.value, heads, axis=2)
            )
        return AttentionOperands(
            **{name: self._exchanged(name, x, to_zigzag) for name, x in operands._asdict().items() if x is not None}
        )

    def _own_rows(self, name: str, constant: np.ndarray) -> Array:
        """This device's part of ids (B, T) or (B, S) or lengths (B,) that are known when the call is traced."""
        own = jnp.asarray(constant)
        for place, axes in enumerate(self.split.axes(name, own.shape, self.static.problem)):
            if axes:
                size = own.shape[place] // self.split.devices(axes)
                own = lax.dynamic_slice_in_dim(own, lax.axis_index(axes) * size, size, axis=place)
        return own

    def _exchanged(self, name: str, x: Array, exchange: Callable[[Array, Axes, int], Array]) -> Array:
        """Exchanged between the layouts where the array has rows of the sequence."""
        if self.split.layout != "zigzag" or not {"t", "s"} & set(DIMENSIONS[name]):
            return x
        return exchange(x, self.split.sequence, self.split.devices(self.split.sequence))

    def _globalised(self, name: str, gradient: Array, operand: Array) -> Array:
        """A gradient as this device's share of the whole: heads put back, other devices' parts added."""
        split, problem = self.split, self.static.problem
        gradient = self._exchanged(name, gradient, from_zigzag)
        if name in ("key", "value") and self.picked is not None:
            heads = jnp.asarray(self.picked)[lax.axis_index(split.heads)]
            shape = (*gradient.shape[:2], problem.kv_heads, gradient.shape[3])
            gradient = jnp.zeros(shape, problem.accumulation_dtype).at[:, :, heads].add(gradient)
        kept = sum(split.axes(name, self.shapes[name], problem), ())
        summed = tuple(axis for axis in (*split.batch, *split.sequence, *split.heads) if axis not in kept)
        if summed:
            gradient = lax.psum(gradient.astype(problem.accumulation_dtype), summed)
        return gradient.astype(operand.dtype)


# Traced once for all layers of a model: the compiler asks for each of them.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
@usual_promotion()
def _compute(
    direction: str, static: _Static, split: Split, shapes: tuple[tuple[int, ...], ...], *arrays: Array
) -> tuple[Array, ...]:
    """What one device computes in a pass, from its shares of arrays of these shapes."""
    share = _Share(static, split, shapes)
    return share.forward(*arrays) if direction == "forward" else share.backward(*arrays)


def _split_asked_for(static: _Static, mesh: Mesh, arguments: Sequence[Any]) -> tuple[Mesh, Split]:
    """How a mesh splits a call whose operands lie, or are asked to lie, as `arguments` say."""
    if mesh.empty or not all(isinstance(x.sharding, NamedSharding) for x in arguments):
        # Shardings without axes to name: computed whole on every device.
        devices = np.array(sorted(arguments[0].sharding.device_set, key=lambda device: device.id))
        mesh = Mesh(devices, ("everything",))
        specs = dict.fromkeys(static.names, PartitionSpec())
    else:
        specs = {name: x.sharding.spec for name, x in zip(static.names, arguments, strict=True)}
    return mesh, choose_split(static.implementation, static.problem, static.target, dict(mesh.shape), specs)


def _placed(static: _Static, mesh: Mesh, split: Split, names: Sequence[str], values: Any) -> tuple[NamedSharding, ...]:
    """How operands or results lie that are split so."""
    axes = (split.axes(name, x.shape, static.problem) for name, x in zip(names, values, strict=True))
    return tuple(NamedSharding(mesh, PartitionSpec(*(one or None for one in own))) for own in axes)


def _without_mesh(run: Callable[..., Results]) -> Callable[..., Results]:
    """`run` traced without the caller's mesh, whose Explicit axes are no types of a device's share: JAX 0.8 asks the
    compiler for shardings along them where there is nothing left to shard."""

    def traced(*arrays: Array) -> Results:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return run(*arrays)

    return traced


def _partition(direction: str) -> Callable[..., Any]:
    """The compiler's question, once shardings are known: what each device computes, and how operands must lie."""

    def answer(static: _Static, mesh: Mesh, arguments: Any, results: Any) -> tuple[Any, ...]:
        mesh, split = _split_asked_for(static, mesh, arguments)
        shapes = tuple(tuple(x.shape) for x in arguments)
        return (
            mesh,
            _without_mesh(functools.partial(_compute, direction, static, split, shapes)),
            _placed(static, mesh, split, static.results, results),
            _placed(static, mesh, split, static.names, arguments),
        )

    return answer


def _infer(static: _Static, mesh: Mesh, arguments: Any, results: Any) -> tuple[NamedSharding, ...]:
    """What GSPMD, the partitioner before Shardy, asks in place of a rule: how the results will lie."""
    mesh, split = _split_asked_for(static, mesh, arguments)
    return _placed(static, mesh, split, static.results, results)


for _call, _direction in ((_forward_call, "forward"), (_backward_call, "backward")):
    _call.def_partition(
        partition=_partition(_direction), infer_sharding_from_operands=_infer, sharding_rule=_sharding_rule
    )

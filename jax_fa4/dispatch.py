"""Which implementation takes a call, and why not the others.

Implementations are asked in order; each answers `why_not` with None or one sentence. The choice is made when the call
is traced, from the problem and the target alone.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax

from jax_fa4.problem import NO_GRIDS, AttentionOperands, AttentionProblem, PlannedGrids

TARGET_VARIABLE = "JAX_FA4_TARGET"

# Name -> module that holds an implementation under that name. Modules are imported when they are first asked.
MODULES = {
    "fa4": "jax_fa4.kernels.attention",
    "emulated": "jax_fa4.kernels.attention",
    "blockwise": "jax_fa4.blockwise",
    "reference": "jax_fa4.reference",
}
AUTOMATIC = ("fa4", "blockwise", "reference")

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Target:
    """What a call is compiled for.

    Attributes:
      platform: "cpu", "cuda", "rocm", "tpu" or another platform of JAX.
      architecture: of an NVIDIA GPU, such as "sm_100"; None elsewhere.
    """

    platform: str
    architecture: str | None = None

    def __str__(self) -> str:
        return self.platform if self.architecture is None else f"{self.platform} {self.architecture}"


class Implementation(Protocol):
    """One way to compute attention. Without a `backward` it is differentiated by JAX."""

    @property
    def name(self) -> str:
        """What it is registered by."""

    def why_not(self, problem: AttentionProblem, target: Target) -> str | None:
        """None where it takes the problem, forward and backward; else one sentence with the remedy."""

    def describe(self, problem: AttentionProblem, target: Target) -> list[tuple[str, str]]:
        """Labels and texts for `explain`: tiles, schedule, workspace."""

    def forward(self, problem: AttentionProblem, operands: AttentionOperands) -> tuple[jax.Array, jax.Array]:
        """The output (B, T, N, Dv) and the log-sum-exp (B, T, N)."""


@runtime_checkable
class DifferentiableOnce(Implementation, Protocol):
    """An implementation with a backward pass of its own, which `jax_fa4.autodiff` wires up."""

    def backward(
        self,
        problem: AttentionProblem,
        operands: AttentionOperands,
        out: jax.Array,
        lse: jax.Array,
        grad_out: jax.Array,
        grad_lse: jax.Array,
    ) -> AttentionOperands:
        """The cotangents of the operands; None where none is due."""


def load(name: str) -> Implementation:
    """The implementation of that name."""
    return getattr(importlib.import_module(MODULES[name]), name)


_chosen_target: contextvars.ContextVar[Target | None] = contextvars.ContextVar("jax_fa4_target", default=None)


def read_target(name: Any, source: str = "target") -> Target:
    """A target from its name.

    Args:
      name: "cpu", or an NVIDIA architecture such as "sm_90" or "sm_100"; a letter behind it ("sm_90a") is dropped.
      source: what the error calls the name.

    Raises:
      ValueError: it is neither.
    """
    if isinstance(name, str):
        match = re.fullmatch(r"(sm_\d{2,3})[af]?", name)
        if match:
            return Target("cuda", match[1])
        if name == "cpu":
            return Target("cpu")
    raise ValueError(
        f"{source} is {name!r}. 'cpu' or an NVIDIA architecture is accepted: "
        "'sm_90' (Hopper), 'sm_100' or 'sm_103' (Blackwell)."
    )


@contextlib.contextmanager
def target(name: str | Target) -> Iterator[Target]:
    """Trace calls for a device that need not be there.

    The target is read when a call is traced: a function that `jax.jit` has already traced keeps the target that it was
    traced for.

    Args:
      name: "cpu", or an NVIDIA architecture such as "sm_90", "sm_100" or "sm_103".

    Yields:
      The `Target`.

    Raises:
      ValueError: the name is neither.
    """
    chosen = name if isinstance(name, Target) else read_target(name)
    token = _chosen_target.set(chosen)
    try:
        yield chosen
    finally:
        _chosen_target.reset(token)


def current_target(query: Any = None) -> Target:
    """What a call is traced for now.

    The innermost `target(...)`, else the environment variable JAX_FA4_TARGET, else the device that holds `query` where
    that is a concrete array, else JAX's default device.

    Raises:
      ValueError: the environment variable names no target.
    """
    chosen = _chosen_target.get()
    if chosen is not None:
        return chosen
    named = os.environ.get(TARGET_VARIABLE)
    if named:
        return read_target(named, f"the environment variable {TARGET_VARIABLE}")
    if isinstance(query, jax.Array) and not isinstance(query, jax.core.Tracer):
        return _target_of(min(query.devices(), key=lambda device: device.id))
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(default, str):
        default = jax.local_devices(backend=default)[0]
    return _target_of(jax.local_devices()[0] if default is None else default)


def _target_of(device: Any) -> Target:
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform in ("gpu", "cuda") and re.fullmatch(r"\d+\.\d+", capability):
        return Target("cuda", "sm_" + capability.replace(".", ""))
    return Target("rocm" if device.platform == "gpu" else device.platform)


def read_names(implementation: Any) -> tuple[str, ...]:
    """The names to try, in order.

    Args:
      implementation: None for the automatic choice, a name, or a sequence of names.

    Raises:
      TypeError: it is none of these.
      ValueError: a name is unknown, or there is none.
    """
    known = ", ".join(repr(name) for name in MODULES)
    accepted = f"None, one of {known}, or a sequence of these is accepted"
    if implementation is None:
        return AUTOMATIC
    names = (implementation,) if isinstance(implementation, str) else implementation
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"implementation is {implementation!r} ({type(implementation).__name__}). {accepted}.")
    if not names:
        raise ValueError(f"implementation is {implementation!r}, which names none. {accepted}.")
    for name in names:
        if name not in MODULES:
            remedy = "; leave it None in place of jax.nn's 'xla' and 'cudnn'" if name in ("xla", "cudnn") else ""
            raise ValueError(f"implementation names {name!r}, which does not exist. {accepted}{remedy}.")
    return tuple(names)


@functools.lru_cache(maxsize=1024)
def why_not(name: str, problem: AttentionProblem, target: Target) -> str | None:
    """Why the implementation of that name does not take the problem on the target; None where it does."""
    return load(name).why_not(problem, target)


def resolve_target(name: str, target: Target) -> Target:
    """The target as the implementation of that name sees it: "emulated" brings a GPU of its own."""
    resolve = getattr(load(name), "resolve_target", None)
    return target if resolve is None else resolve(target)


def run(
    names: Sequence[str], problem: AttentionProblem, target: Target, attempt: Callable[[Implementation, Target], Result]
) -> Result:
    """The result of `attempt` with the first implementation that takes the problem, and the target that it sees.

    Raises:
      NotImplementedError: none does; the message has every reason. Other errors of an attempt are the caller's.
    """
    refusals: list[tuple[str, str]] = []
    for name in names:
        seen = resolve_target(name, target)
        reason = why_not(name, problem, seen)
        if reason is None:
            try:
                return attempt(load(name), seen)
            except NotImplementedError as error:
                reason = str(error)
        refusals.append((name, reason))
    raise NotImplementedError(_refusal(refusals))


def planned_grids(names: Sequence[str], problem: AttentionProblem, target: Target) -> PlannedGrids:
    """What the implementation that takes a problem makes work tables for; nothing where it has no kernels."""

    def grids(implementation: Implementation, seen: Target) -> PlannedGrids:
        make = getattr(implementation, "planned_grids", None)
        return NO_GRIDS if make is None else make(problem, seen)

    return run(names, problem, target, grids)


def planners(names: Sequence[str], target: Target, ids: Sequence[Any]) -> tuple[tuple[str, Target], ...]:
    """Names of implementations that may plan ids by kernels of their own, and the targets that they see: without those
    whose kernels run elsewhere than where ids lie that are no tracers."""
    platforms = {
        device.platform
        for one in ids
        if isinstance(one, jax.Array) and not isinstance(one, jax.core.Tracer)
        for device in one.devices()
    }
    runs_on = {name: getattr(load(name), "platform", None) for name in names}
    return tuple(
        (name, resolve_target(name, target))
        for name, platform in runs_on.items()
        if platform is not None and platforms <= {platform}
    )


def plan_mask(name: str, target: Target, *mask: Any) -> Any:
    """What an implementation's own kernels make of a mask of traced ids; None where it has none.

    Args:
      name: of the implementation.
      target: as it sees it.
      mask: rule, batch rows, `MaskOperands`, `PlannedGrids`.
    """
    plan = getattr(load(name), "plan_mask", None)
    return None if plan is None else plan(*mask, target)


def _refusal(refusals: Sequence[tuple[str, str]]) -> str:
    if len(refusals) == 1:
        name, reason = refusals[0]
        return f"implementation '{name}' does not take this call: {reason}"
    return "\n".join(["No implementation takes this call:", *(f"  {name}: {reason}" for name, reason in refusals)])


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call gets; prints as a report of at most 96 columns.

    Attributes:
      problem: the call.
      target: what it is traced for, as the implementation sees it.
      implementation: the name of the implementation that takes it; None where none does.
      details: labels and texts about tiles, schedule and workspace.
      passed_over: the name and the reason of every implementation that does not take the call.
    """

    problem: AttentionProblem
    target: Target
    implementation: str | None
    details: tuple[tuple[str, str], ...]
    passed_over: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        chosen = self.implementation or "none takes this call"
        lines = [("attention", _shapes(self.problem)), ("mask", _mask(self.problem)), ("target", str(self.target))]
        lines += [("implementation", chosen), *((f"  {label}", text) for label, text in self.details)]
        lines += [(f"not {name}", reason) for name, reason in self.passed_over]
        return "\n".join(
            textwrap.fill(text, 96, initial_indent=f"{label:<18}", subsequent_indent=" " * 18) for label, text in lines
        )

    __repr__ = __str__


def explain_problem(names: tuple[str, ...], problem: AttentionProblem, target: Target) -> Explanation:
    """Which of the named implementations takes a problem on a target, and why the others do not."""
    return _explain(problem, target, tuple((name, resolve_target(name, target)) for name in names))


@functools.lru_cache(maxsize=256)
def _explain(problem: AttentionProblem, target: Target, targets: tuple[tuple[str, Target], ...]) -> Explanation:
    reasons = {name: why_not(name, problem, seen) for name, seen in targets}
    chosen, seen = next(((name, seen) for name, seen in targets if reasons[name] is None), (None, target))
    details = () if chosen is None else tuple(load(chosen).describe(problem, seen))
    passed_over = tuple((name, reason) for name, reason in reasons.items() if reason is not None)
    return Explanation(problem, seen, chosen, details, passed_over)


def _shapes(problem: AttentionProblem) -> str:
    heads = f"{problem.query_heads} heads"
    if problem.kv_heads != problem.query_heads:
        heads += f" over {problem.kv_heads} key heads"
    dims = str(problem.head_dim)
    if problem.value_dim != problem.head_dim:
        dims += f" (values {problem.value_dim})"
    return (
        f"{problem.dtype}, batch {problem.batch}, {problem.query_length} queries, {problem.key_length} keys, "
        f"{heads} of {dims}"
    )


def _mask(problem: AttentionProblem) -> str:
    left, right = problem.mask.window
    constants = problem.constants
    present = {
        "causal": problem.mask.is_causal,
        f"window ({left}, {right})": (left, right) != (None, None),
        f"diagonal at {problem.mask.diagonal_offset:+d}": problem.mask.diagonal_offset != 0,
        f"segment ids ({_when(constants.query_ids)})": problem.has_segment_ids,
        f"query lengths ({_when(constants.query_lengths)})": problem.has_query_lengths,
        f"key lengths ({_when(constants.key_lengths)})": problem.has_key_lengths,
        "boolean mask": problem.has_mask,
        "bias": problem.has_bias,
        "sinks": problem.has_sinks,
        f"soft cap {problem.logits_soft_cap}": problem.logits_soft_cap is not None,
    }
    return ", ".join(name for name, is_present in present.items() if is_present) or "none"


def _when(constant: Any) -> str:
    return "traced" if constant is None else "known when traced"

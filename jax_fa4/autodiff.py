"""Derivatives and batching of implementations that have a backward pass of their own.

The one `jax.custom_vjp` is here. Its residuals, the output and the log-sum-exp, carry the name "context" for
`jax.checkpoint` policies. `jax.vmap` folds its axis into the batch, of the forward and of the backward pass alike, so
that one launch serves all examples and every example gets its own gradient.

The gradient of the sinks is here too, from the residuals, since it is the same for every implementation: with
p = exp(sink - lse), d out / d sink = -p * out and d lse / d sink = p.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

from jax_fa4 import dispatch, partitioning
from jax_fa4.dispatch import DifferentiableOnce, Implementation, Target
from jax_fa4.problem import AttentionOperands, AttentionProblem
from jax_fa4.promotion import usual_promotion
from jax_fa4.reference import reference
from jax_fa4.reverse_only import reverse_only
from jax_fa4.varying import vary_alike

RESIDUAL_NAME = "context"
FLOATING = ("query", "key", "value", "bias", "sinks", "scale")  # operands that have a gradient

Pair = tuple[jax.Array, jax.Array]  # the output (B, T, N, Dv) and the log-sum-exp (B, T, N), or their cotangents


@usual_promotion()
def attend(
    implementation: Implementation, problem: AttentionProblem, target: Target, operands: AttentionOperands
) -> Pair:
    """The output (B, T, N, Dv) and the log-sum-exp (B, T, N) of an implementation, differentiable.

    Raises:
      TypeError: under forward-mode or second derivatives of an implementation with its own backward pass.
    """
    operands = vary_alike(operands)
    if isinstance(implementation, DifferentiableOnce):
        floats = {name: getattr(operands, name) for name in FLOATING if getattr(operands, name) is not None}
        floats = dict(zip(floats, reverse_only(implementation.name, *floats.values()), strict=True))
        operands = operands._replace(**floats)
    return _attend(implementation, problem, target, operands)


# Traced once for a problem, also where the caller does not use jit. The target is a part of the key because a forward
# pass may depend on it.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _attend(
    implementation: Implementation, problem: AttentionProblem, target: Target, operands: AttentionOperands
) -> Pair:
    if isinstance(implementation, DifferentiableOnce):
        return _attention(implementation, problem, target, operands)
    with dispatch.target(target):
        return implementation.forward(problem, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(
    implementation: DifferentiableOnce, problem: AttentionProblem, target: Target, operands: AttentionOperands
) -> Pair:
    return _forward(implementation, problem, target, operands)


def _attention_forward(
    implementation: DifferentiableOnce, problem: AttentionProblem, target: Target, operands: AttentionOperands
) -> tuple[Pair, tuple[AttentionOperands, Pair]]:
    results = _only_once(_forward, implementation, problem, target, (operands,))
    results = checkpoint_name(results, RESIDUAL_NAME)
    return results, (operands, results)


@usual_promotion()
def _attention_backward(
    implementation: DifferentiableOnce,
    problem: AttentionProblem,
    target: Target,
    residuals: tuple[AttentionOperands, Pair],
    grads: Pair,
) -> tuple[AttentionOperands]:
    operands, results = residuals
    cotangents = _only_once(_backward, implementation, problem, target, (operands, results, grads))
    if operands.sinks is not None:
        cotangents = cotangents._replace(sinks=_sinks_gradient(operands.sinks, results, grads))
    return (cotangents,)


_attention.defvjp(_attention_forward, _attention_backward)


def _sinks_gradient(sinks: jax.Array, results: Pair, grads: Pair) -> jax.Array:
    (out, lse), (grad_out, grad_lse) = results, grads
    # An unseen row's output is exactly 0, and so is its product with whatever lies in its cotangent, NaN included.
    products = jnp.where(out == 0, 0, grad_out.astype(lse.dtype) * out.astype(lse.dtype))
    probs = jnp.where(lse == -jnp.inf, 0, jnp.exp(sinks - lse))
    return jnp.sum(probs * (grad_lse - jnp.sum(products, axis=-1)), axis=(0, 1)).astype(sinks.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _only_once(
    run: Any, implementation: DifferentiableOnce, problem: AttentionProblem, target: Target, arguments: Any
) -> Any:
    """A forward or backward pass that refuses to be differentiated."""
    return run(implementation, problem, target, *arguments)


def _refuse_second_derivative(
    run: Any, implementation: DifferentiableOnce, problem: AttentionProblem, target: Target, arguments: Any
) -> Any:
    raise TypeError(
        f"the derivative of implementation '{implementation.name}' cannot be differentiated again; pass "
        "implementation='reference', which has derivatives of every order, forward and reverse."
    )


_only_once.defvjp(_refuse_second_derivative, _refuse_second_derivative)


def _forward(
    implementation: DifferentiableOnce, problem: AttentionProblem, target: Target, operands: AttentionOperands
) -> Pair:
    """The forward pass, with a rule for `vmap`."""

    @custom_vmap
    def call(operands: AttentionOperands) -> Pair:
        if problem.is_empty:
            return reference.forward(problem, operands)
        return partitioning.forward(implementation, problem, target, operands)

    @call.def_vmap
    @usual_promotion()
    def rule(copies: int, is_mapped: list[AttentionOperands], operands: AttentionOperands) -> tuple[Pair, Any]:
        (mapped,) = is_mapped
        if mapped.sinks or mapped.scale:
            out, lse = _one_by_one(functools.partial(_forward, implementation, problem, target), (mapped,), (operands,))
        else:
            folded = _fold_operands(operands, mapped, problem.batch, copies, keep_shared=True)
            out, lse = _forward(implementation, problem.with_copies(copies), target, folded)
            out, lse = (_unfold(x, copies, problem.batch) for x in (out, lse))
        return (out, lse), (True, True)

    return call(operands)


def _backward(
    implementation: DifferentiableOnce,
    problem: AttentionProblem,
    target: Target,
    operands: AttentionOperands,
    results: Pair,
    grads: Pair,
) -> AttentionOperands:
    """The backward pass without the sinks' gradient, with a rule for `vmap`."""

    @custom_vmap
    def call(operands: AttentionOperands, results: Pair, grads: Pair) -> AttentionOperands:
        if problem.is_empty:
            return jax.tree.map(jnp.zeros_like, _due(operands))
        return partitioning.backward(implementation, problem, target, operands, results, grads)

    @call.def_vmap
    @usual_promotion()
    def rule(
        copies: int, is_mapped: list[Any], operands: AttentionOperands, results: Pair, grads: Pair
    ) -> tuple[AttentionOperands, AttentionOperands]:
        run = functools.partial(_backward, implementation, problem, target)
        if is_mapped[0].sinks or operands.scale is not None:
            # Each example has its own sinks, or needs its own gradient of the scale.
            cotangents = _one_by_one(run, tuple(is_mapped), (operands, results, grads))
        else:
            folded = _fold_operands(operands, is_mapped[0], problem.batch, copies, keep_shared=False)
            results, grads = jax.tree.map(
                lambda x, is_one_mapped: _fold(x, is_one_mapped, copies), (results, grads), tuple(is_mapped[1:])
            )
            cotangents = _backward(implementation, problem.with_copies(copies), target, folded, results, grads)
            cotangents = jax.tree.map(lambda x: _unfold(x, copies, problem.batch), cotangents)
            if operands.bias is not None and operands.bias.shape[1 if is_mapped[0].bias else 0] == 1:
                cotangents = cotangents._replace(bias=jnp.sum(cotangents.bias, axis=1, keepdims=True))
        return cotangents, jax.tree.map(lambda _: True, cotangents)

    return call(operands, results, grads)


def _due(operands: AttentionOperands) -> AttentionOperands:
    """The operands whose cotangents an implementation owes."""
    return AttentionOperands(**{name: getattr(operands, name) for name in partitioning.GRADIENTS})


def _fold(x: jax.Array, is_mapped: bool, copies: int) -> jax.Array:
    """(copies, B, ...) where mapped, else (B, ...), as (copies * B, ...)."""
    if not is_mapped:
        x = jnp.broadcast_to(x[None], (copies, *x.shape))
    return x.reshape(copies * x.shape[1], *x.shape[2:])


def _unfold(x: jax.Array, copies: int, batch: int) -> jax.Array:
    """(copies * B, ...) as (copies, B, ...)."""
    return x.reshape(copies, batch, *x.shape[1:])


def _fold_operands(
    operands: AttentionOperands, mapped: AttentionOperands, batch: int, copies: int, keep_shared: bool
) -> AttentionOperands:
    """The operands of `copies` calls as those of one, example after example along the batch axis.

    Sinks and scale are not mapped here. A bias that all rows share may stay one (`keep_shared`), or is given to each
    row, so that its cotangent comes back row by row.
    """

    def fold_one(name: str) -> jax.Array | None:
        x, is_mapped = getattr(operands, name), getattr(mapped, name)
        if x is None or name in ("sinks", "scale"):
            return x
        if name in ("forward_items", "backward_items"):
            return None  # the tables of one example; those of all are made anew
        if name in ("bias", "mask"):
            if not is_mapped and x.shape[0] == 1 and (keep_shared or name == "mask"):
                return x
            rows = (copies, batch) if is_mapped else (batch,)
            x = jnp.broadcast_to(x, (*rows, *x.shape[-3:]))
        return _fold(x, is_mapped, copies)

    return AttentionOperands(*(fold_one(name) for name in AttentionOperands._fields))


def _one_by_one(run: Any, is_mapped: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
    """`run` for each example in turn; the way of last resort, where examples differ in what a batch shares."""
    leaves, tree = jax.tree.flatten(arguments)
    flags = jax.tree.leaves(is_mapped)

    def run_one(mapped_leaves: list[jax.Array]) -> Any:
        remaining = iter(mapped_leaves)
        merged = [next(remaining) if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]
        return run(*jax.tree.unflatten(tree, merged))

    return jax.lax.map(run_one, [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag])

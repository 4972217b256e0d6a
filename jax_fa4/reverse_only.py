"""An identity that reverse-mode differentiation passes through, and that forward mode stops at with a message of ours.

`jax.custom_vjp` alone answers forward mode with an error that names neither the function nor a remedy. Here the
tangents go through a linear primitive: reverse mode only ever transposes it, to nothing; forward mode would have to
compute it, and computing it raises. (Under `jit`, jacfwd and other batched tangents meet JAX's own error first.)
"""

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def reverse_only(implementation: str, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The operands, unchanged.

    Args:
      implementation: the name that the error gives.
      *operands: arrays of any shape and of floating dtypes.

    Raises:
      TypeError: when a tangent of theirs is computed, or lowered to be computed.
    """
    return operands


def _pass_tangents(
    implementation: str, primals: Sequence[jax.Array], tangents: Sequence[Any]
) -> tuple[tuple[jax.Array, ...], tuple[Any, ...]]:
    present = [tangent for tangent in tangents if not isinstance(tangent, SymbolicZero)]
    passed = iter(_tangents.bind(*present, implementation=implementation))
    out = tuple(tangent if isinstance(tangent, SymbolicZero) else next(passed) for tangent in tangents)
    return tuple(primals), out


reverse_only.defjvp(_pass_tangents, symbolic_zeros=True)


def _refuse(*_: Any, implementation: str, **__: Any) -> NoReturn:
    raise TypeError(
        f"implementation '{implementation}' has no forward-mode derivative (jvp, jacfwd, linearize); pass "
        "implementation='reference', which has derivatives of every order, forward and reverse."
    )


def _batch(arguments: Sequence[Any], axes: Sequence[Any], **parameters: Any) -> tuple[Any, Any]:
    return _tangents.bind(*arguments, **parameters), axes


_tangents = Primitive("jax_fa4_reverse_only")
_tangents.multiple_results = True
_tangents.def_impl(_refuse)
_tangents.def_abstract_eval(lambda *avals, **_: list(avals))
ad.deflinear2(_tangents, lambda cotangents, *_, **__: list(cotangents))
batching.primitive_batchers[_tangents] = _batch  # the gradient of a vmap comes by here
mlir.register_lowering(_tangents, _refuse)

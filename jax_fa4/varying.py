"""Arrays that vary over the same mesh axes as others, which `jax.shard_map` asks for where it checks (`check_vma`).

What JAX calls the axes that an array varies over differs between its versions, so they are not named here: they come
along with one element of each array, whose value is dropped; XLA folds that away.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

Tree = TypeVar("Tree")


def varying_zeros(shape: tuple[int, ...], dtype: Any, arrays: Any) -> jax.Array:
    """Zeros that vary over the mesh axes that any of `arrays`, a pytree, varies over."""
    never = jnp.zeros((), bool)
    for leaf in jax.tree.leaves(arrays):
        if leaf.size:
            never |= (lax.slice(leaf, (0,) * leaf.ndim, (1,) * leaf.ndim) != 0).any() & False
    return jnp.where(never, jnp.ones((), dtype), jnp.zeros(shape, dtype))


def vary_alike(arrays: Tree) -> Tree:
    """The arrays, each of which varies over the mesh axes that any of them varies over.

    So an operand that all devices share has a gradient of its own type: JAX sums the devices' parts. Outside of
    `shard_map` the arrays come back as they are.
    """
    if AxisType.Manual not in jax.sharding.get_abstract_mesh().axis_types:
        return arrays

    def vary(x: jax.Array) -> jax.Array:
        never = varying_zeros((), bool, arrays)
        return x ^ never if x.dtype == bool else x + never.astype(x.dtype)

    return jax.tree.map(vary, arrays)

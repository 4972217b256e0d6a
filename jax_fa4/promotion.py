"""The promotion of shapes and dtypes that the package is written for, whatever the caller has configured.

A caller may make JAX raise where ranks or dtypes are promoted (`jax_numpy_rank_promotion` and
`jax_numpy_dtype_promotion`), to find such places in a program of theirs; those in here are meant.
"""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def usual_promotion() -> Iterator[None]:
    """Traces what is inside, or a function that it decorates, with JAX's defaults."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield

"""The merge of parts of the keys on the emulated GPU, by itself: any number of parts, parts that see nothing, sinks."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4.ffi import launch
from jax_fa4.ffi.merge_parts import merge_parts
from jax_fa4.problem import AttentionProblem
from jax_fa4.schedule.tiles import MaskRule
from jax_fa4.splitting import Split
from tests.kernels.forward_checks import ROUNDING

pytestmark = pytest.mark.usefixtures("gpu")


def problem_of(batch: int, queries: int, heads: tuple[int, int], value_dim: int, dtype: str) -> AttentionProblem:
    sizes = batch, queries, 1000, *heads, 64, value_dim
    return AttentionProblem(*sizes, dtype=dtype, mask=MaskRule(queries, 1000), scale=1.0)


def in_float64(out: np.ndarray, lse: np.ndarray, sinks: Any) -> tuple[np.ndarray, np.ndarray]:
    """The mean of (B, parts, T, N, Dv) and the log-sum-exp of (B, parts, T, N), with one sink for each head."""
    sinks = np.full(lse.shape[-1], -np.inf) if sinks is None else sinks
    everything = np.concatenate([lse, np.broadcast_to(sinks, (lse.shape[0], 1, *lse.shape[2:]))], axis=1)
    highest = everything.max(1)
    highest = np.where(highest == -np.inf, 0, highest)
    total = np.exp(everything - highest[:, None]).sum(1)
    weights = np.exp(lse - highest[:, None]) / np.where(total == 0, 1, total)[:, None]
    with np.errstate(divide="ignore"):
        return (weights[..., None] * out).sum(1), highest + np.log(total)


@pytest.mark.parametrize(
    ("parts", "shape", "value_dim", "dtype", "packs", "has_sinks"),
    [
        (16, (1, 1, (8, 2)), 128, "bfloat16", True, False),
        (1, (2, 3, (4, 4)), 64, "float16", False, False),
        (3, (2, 2, (6, 2)), 256, "bfloat16", True, True),
        (17, (3, 1, (4, 1)), 96, "bfloat16", True, False),
        (37, (1, 2, (4, 2)), 192, "float16", False, True),
        (5, (1, 2, (2, 2)), 8, "bfloat16", False, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100f"])
def test_any_number_of_parts(
    parts: int, shape: Any, value_dim: int, dtype: str, packs: bool, has_sinks: bool, architecture: str
) -> None:
    batch, queries, (heads, kv_heads) = shape
    problem, rng = problem_of(batch, queries, (heads, kv_heads), value_dim, dtype), np.random.default_rng(parts)
    out = jnp.asarray(rng.standard_normal((batch, parts, queries, heads, value_dim)), dtype)
    lse = rng.standard_normal((batch, parts, queries, heads)).astype(np.float32) * 5
    lse[rng.random(lse.shape) < 0.2] = -np.inf  # a part that hides all its keys, whose output is 0
    lse[0, :, 0, 0] = -np.inf
    lse[-1, :, -1, -1] += 1e4
    out = jnp.where(jnp.asarray(lse)[..., None] > -jnp.inf, out, 0)
    sinks = rng.standard_normal(heads).astype(np.float32) if has_sinks else None
    exact, exact_lse = in_float64(np.asarray(out.astype(jnp.float32), np.float64), lse.astype(np.float64), sinks)

    group = heads // kv_heads if packs else 1

    def laid(array: Any) -> Any:
        """Rows as the parts' kernel leaves them: heads of a group next to each other in the rows."""
        split_heads = array.reshape(batch * parts, queries, heads // group, group, *array.shape[4:]).swapaxes(2, 3)
        return split_heads.reshape(batch * parts, queries * group, heads // group, *array.shape[4:])

    operands = laid(out), laid(jnp.asarray(lse)), None if sinks is None else jnp.asarray(sinks)
    driver = launch.emulated_driver((9, 0) if architecture == "sm_90a" else (10, 0))
    found, found_lse = merge_parts(problem, Split(parts, packs), *operands, architecture=architecture, driver=driver)
    error = np.abs(np.asarray(found.astype(jnp.float32), np.float64) - exact)
    assert (error <= 2 * ROUNDING[dtype] * np.abs(exact) + 1e-6).all()  # of the worst number, a power of two
    np.testing.assert_allclose(np.asarray(found_lse), exact_lse, rtol=2e-6, atol=2e-6)
    assert has_sinks or np.asarray(found_lse)[0, 0, 0] == -np.inf

"""What a mesh may split, and how a call runs where shardings are a part of the types.

On a mesh with Explicit axes every operation would have to say the sharding of its result. Attention says it once, for
its results: batch, sequence and heads lie as the query's do. Inside, the compiler propagates as on Auto axes.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax.sharding import AxisType, PartitionSpec

from jax_fa4.problem import AttentionOperands

Results = TypeVar("Results")


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

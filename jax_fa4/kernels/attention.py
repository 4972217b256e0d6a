"""The attention kernels as implementations: "fa4" on a GPU, "emulated" on the emulated one.

Neither has an attention kernel yet; both say so when they are asked, and the automatic choice goes on to `blockwise`.
"""

from typing import TYPE_CHECKING

import jax

from jax_fa4.problem import AttentionOperands, AttentionProblem

if TYPE_CHECKING:
    from jax_fa4.dispatch import Target


class UnbuiltKernels:
    """Stands where kernels will be: refuses every problem.

    Args:
      name: the implementation's name.
    """

    def __init__(self, name: str):
        self.name = name

    def why_not(self, problem: AttentionProblem, target: "Target") -> str | None:
        """Why no kernel takes the problem, with the remedy."""
        return f"no attention kernel is built yet for {target} in this version; pass implementation='blockwise'."

    def describe(self, problem: AttentionProblem, target: "Target") -> list[tuple[str, str]]:
        """Nothing: there is no kernel to describe."""
        return []

    def forward(self, problem: AttentionProblem, operands: AttentionOperands) -> tuple[jax.Array, jax.Array]:
        """Refuses, as `why_not` does.

        Raises:
          NotImplementedError: always.
        """
        raise NotImplementedError(f"implementation '{self.name}' has no attention kernel in this version.")


fa4 = UnbuiltKernels("fa4")
emulated = UnbuiltKernels("emulated")

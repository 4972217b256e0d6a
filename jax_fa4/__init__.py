"""FlashAttention-4 for JAX: one attention function on every device."""

from jax_fa4.attention import attention, explain
from jax_fa4.dispatch import Explanation, Target, target

__version__ = "0.1.0"

__all__ = ["Explanation", "Target", "attention", "explain", "target"]

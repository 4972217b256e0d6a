"""FlashAttention-4 for JAX: one attention function on every device."""

from jax_fa4.attention import attention, explain, ring_attention, zigzag_order
from jax_fa4.dispatch import Explanation, Target, target
from jax_fa4.exporting import export_disabled_checks, register_targets
from jax_fa4.segments import SegmentPlan, plan_segments

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "SegmentPlan",
    "Target",
    "attention",
    "explain",
    "export_disabled_checks",
    "plan_segments",
    "ring_attention",
    "target",
    "zigzag_order",
]

register_targets()

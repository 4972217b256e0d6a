"""FlashAttention-4 for JAX: one attention function on every device."""

__version__ = "0.1.0"

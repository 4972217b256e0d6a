"""Kernels for compute capability 9.0 (H100, H200)."""

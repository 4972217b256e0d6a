"""Kernels for compute capability 10.x (Blackwell data-centre GPUs)."""

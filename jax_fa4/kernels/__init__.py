"""Kernels written in CuTe-DSL, the plans that describe them, and the binaries they become."""

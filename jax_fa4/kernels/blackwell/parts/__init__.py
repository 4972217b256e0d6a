"""Pieces of device code that the Blackwell kernels share."""

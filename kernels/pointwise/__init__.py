"""Kernels that do one thing to each element, row or block."""

"""Sums over the ranks of a tensor-parallel model: the operation that layers need, and GPU kernels for it."""

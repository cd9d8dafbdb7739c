"""Triton kernels, one file per family, each with the plain-torch reference that defines it."""

"""Triton kernels, one file per family, each beside the plain-torch reference that defines it."""

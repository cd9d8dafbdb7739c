"""The refusal of attention that is more than kernels compute."""

from __future__ import annotations


class UnsupportedAttention(ValueError):
    """A model's attention is more than the cache's kernels compute; the message says what."""

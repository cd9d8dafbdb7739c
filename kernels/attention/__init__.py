"""Attention over the paged KV cache, and the writes to it."""

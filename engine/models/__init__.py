"""Causal language models over the paged KV cache: configuration, architectures, weights."""

"""Layers that keep a state of all tokens that a sequence has, which each token changes."""

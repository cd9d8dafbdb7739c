"""Flags, and what `quire serve` needs around the server."""

"""Streams that are kept for a while, so that a client that lost its connection can pick them up again."""

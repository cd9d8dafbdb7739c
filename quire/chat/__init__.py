"""A conversation on a terminal."""

"""Sizes of texts."""

from __future__ import annotations


def utf8_size(text: str) -> int:
    """Return the bytes of a text; a lone half of a surrogate pair has three."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))

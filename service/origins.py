"""Origins of other sites whose pages may use the server."""

from __future__ import annotations

import re
from collections.abc import Sequence

ANY = "*"

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def clean_origin(text: str) -> str:
    """Return an origin as browsers spell it. Raises ValueError."""
    origin = text.strip().lower()
    if origin != ANY and not _ORIGIN.fullmatch(origin):
        raise ValueError(
            f"--cors-origin must be * or an origin without a path, such as https://chat.example, got {text!r}"
        )
    scheme, _, _ = origin.partition("://")
    return origin.removesuffix(_DEFAULT_PORTS.get(scheme, "/"))


def is_allowed(origin: bytes, origins: Sequence[str]) -> bool:
    return ANY in origins or origin.decode("latin-1") in origins

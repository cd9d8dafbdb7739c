"""Subprotocols of a WebSocket's handshake: the one way by which a page in a browser can give a key."""

from __future__ import annotations

from starlette.types import Scope

NAME = "quire"
_KEY = "openai-insecure-api-key."  # OpenAI's clients in browsers put the key after this


def offered_key(scope: Scope) -> bytes:
    """Return the key among the subprotocols that are offered; empty if there is none."""
    offered: list[str] = scope.get("subprotocols", [])
    key = next((name for name in offered if name.startswith(_KEY)), _KEY)
    return key.removeprefix(_KEY).encode("latin-1", "replace")


def selected(scope: Scope) -> str | None:
    """Return the subprotocol to speak: browsers give up a handshake that selects none of those they offer.

    That with the key, which the answer then repeats, is selected only if there is no other.
    """
    offered: list[str] = scope.get("subprotocols", [])
    if NAME in offered:
        return NAME
    return next((name for name in offered if not name.startswith(_KEY)), next(iter(offered), None))

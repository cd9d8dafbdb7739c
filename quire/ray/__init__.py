"""Quire on Ray Serve: `serve run quire.ray:app model=…`, or `app` in a program or a Serve config file.

It is imported when it is first asked for: the parts that Ray has no part in need no Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.ray.application import app

__all__ = ["app"]


def __getattr__(name: str) -> object:
    if name != "app":
        raise AttributeError(f"module 'quire.ray' has no attribute {name!r}; it has app")
    try:
        from quire.ray.application import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "ray":
            raise
        raise ImportError(
            "quire.ray needs Ray Serve: pip install -c constraints.txt '.[ray]' beside its sources"
        ) from None
    return app

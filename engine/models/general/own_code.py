"""Code of transformers' modules with other functions in it than those that it calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any


def calls(forward: Callable[..., Any], name: str) -> bool:
    """Return whether a module's code calls a function by that name."""
    return name in inspect.unwrap(forward).__code__.co_names


def with_functions(
    forward: Callable[..., Any], functions: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """Return a module's code that calls these functions, by name."""
    code: Any = inspect.unwrap(forward)
    changed = FunctionType(
        code.__code__, {**code.__globals__, **functions}, code.__name__, code.__defaults__, code.__closure__
    )
    changed.__kwdefaults__ = code.__kwdefaults__
    return changed

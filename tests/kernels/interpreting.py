"""Triton's interpreter, without what it does over and over."""

from __future__ import annotations

import inspect
from functools import cache
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@cache
def _builtins_of(owner: ModuleType | type) -> tuple[str, ...]:
    """Return the names of what `owner` has for kernels, as it is before the interpreter replaces it."""
    return tuple(name for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member))


def _replace_builtins(owner: ModuleType | type, builder: Any, scope: Any) -> None:
    for name in _builtins_of(owner):
        member = getattr(owner, name)
        if tl.core.is_builtin(member):  # not replaced yet
            interpreter._patch_attr(owner, name, member, builder, scope)


def look_builtins_up_once() -> None:
    """Have the interpreter find by their names what it replaces, at each call of a function in a kernel.

    Else it looks through every member of the language each time, a third of what kernel tests took.
    """
    interpreter._patch_builtin = _replace_builtins

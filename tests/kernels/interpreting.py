"""Triton's interpreter, without what it does over and over."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
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


_replaced: set[ModuleType] = set()  # languages, until the kernel that runs has ended
_replace_languages = interpreter._patch_lang


@cache
def _languages_of(function: Callable[..., Any]) -> frozenset[ModuleType]:
    """Return those that a function in a kernel sees."""
    seen = (value for value in function.__globals__.values() if isinstance(value, ModuleType))
    return frozenset(value for value in seen if value in (tl, tl.core))


def _replace_languages_once(function: Callable[..., Any]) -> Any:
    languages = _languages_of(function)
    if languages and languages <= _replaced:
        return interpreter._LangPatchScope()
    scope = _replace_languages(function)
    _replaced.update(languages)
    restore = scope.restore

    def restore_all() -> None:
        restore()
        _replaced.clear()

    scope.restore = restore_all
    return scope


_POINTER = np.dtype(np.uint64)
_numpy_of = cache(interpreter._get_np_dtype)  # of an element's type: a table of all was made for each


def _numpy_dtype(dtype: Any) -> Any:
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return _POINTER if isinstance(element, tl.pointer_type) else _numpy_of(element)


def do_once_what_the_interpreter_repeats() -> None:
    """Have the interpreter replace the language once for a kernel, by names, not at each call in it.

    Else it looks through every member of the language each time, half of what kernel tests took. Nor does it
    look for overflows, a third of what was left: it found them and told nobody, for want of `debug`.
    """
    interpreter._patch_builtin = _replace_builtins
    interpreter._patch_lang = _replace_languages_once
    interpreter._get_np_dtype = _numpy_dtype
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)

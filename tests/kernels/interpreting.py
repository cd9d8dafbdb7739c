"""Triton's interpreter, without what it does over and over."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


@cache
def _builtins_of(owner: ModuleType | type) -> tuple[str, ...]:
    """Return the names of what `owner` has for kernels, as it is before the interpreter replaces it."""
    return tuple(name for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member))


def _replace_builtins(owner: ModuleType | type, builder: Any, scope: Any) -> None:
    for name in _builtins_of(owner):
        member = getattr(owner, name)
        if tl.core.is_builtin(member):  # not replaced yet
            scope.set_attr(owner, name, _interpreted(member))


@cache
def _interpreted(member: Callable[..., Any]) -> Callable[..., Any]:
    """Return what the interpreter puts in a member's place."""

    def interpreted(*given: Any, _semantic: Any = None, **named: Any) -> Any:
        return member(*given, **named, _semantic=interpreter.interpreter_semantic)

    return interpreted


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


@lru_cache(maxsize=None, typed=True)
def _shapes_of(*sizes: int) -> tuple[Any, int, Any, Any]:
    """Return the shape and count of a type, then those that its tensors have."""
    shape = tl.tuple(sizes)
    count = validate_block_shape(shape)
    return shape, count, tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(count)


@cache
def _block_name(shape: str, element: str) -> str:
    return f"<{shape}, {element}>"


def _make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, self.numel, *_ = _shapes_of(*sizes)
    self.name = _block_name(str(sizes), element_ty.name)


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    *_, self.shape, self.numel = _shapes_of(*type.shape.values) if type.is_block() else _shapes_of()


_to_builders_type = tl.block_type.to_ir


def _to_own_type(self: Any, builder: Any) -> Any:
    return _to_builders_type(self, builder) if self.element_ty.is_ptr() else self


_equal_types = tl.dtype.__eq__


def _same_or_equal_types(self: Any, other: Any) -> bool:
    return self is other or _equal_types(self, other)


_check_types = TritonSemantic.binary_op_type_checking_impl
_NUMBERS = (int, float, bool)
_beside: dict[tuple[Any, ...], Any] = {}  # numbers as tensors, for what they are beside
_MOST_BESIDE = 1 << 10


def _check_types_once(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[Any, Any]:
    """Return operands that are alike as they are, and for a number the tensor that it was the last time."""
    rest = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
    first = isinstance(lhs, tl.tensor)
    known, other = (lhs, rhs) if first else (rhs, lhs)
    if div_or_mod or not isinstance(known, tl.tensor) or known.dtype.is_ptr():
        return _check_types(self, lhs, rhs, *rest)
    if isinstance(other, tl.tensor):  # shapes are made once
        alike = other.dtype is known.dtype and other.shape is known.shape
        return (lhs, rhs) if alike else _check_types(self, lhs, rhs, *rest)
    if type(other) not in _NUMBERS:
        return _check_types(self, lhs, rhs, *rest)
    key = (other, type(other), known.dtype, id(known.shape), first, arithmetic_check)
    if key not in _beside:
        both = _check_types(self, lhs, rhs, *rest)
        if both[not first] is not known:  # it was cast
            return both
        if len(_beside) >= _MOST_BESIDE:
            _beside.clear()
        _beside[key] = both[first]
        both[first].handle.data.flags.writeable = False
    return (known, _beside[key]) if first else (_beside[key], known)


_make_constant = TritonSemantic.scalar_constant


@lru_cache(maxsize=1 << 14, typed=True)
def _constant_of(semantic: Any, value: float, dtype: Any) -> Any:
    constant = _make_constant(semantic, value, dtype)
    constant.handle.data.flags.writeable = False
    return constant


def _constant_made_once(self: Any, value: Any, dtype: Any) -> Any:
    plain = type(value) in _NUMBERS and dtype is not None and not dtype.is_ptr()
    return (_constant_of if plain else _make_constant)(self, value, dtype)


def _splat(self: Any, ret_ty: Any, arg: Any) -> Any:
    data = np.empty(ret_ty.shape.values, _numpy_dtype(arg.dtype))
    data[...] = arg.data[0] if isinstance(arg.dtype, tl.block_type) else arg.data
    return interpreter.TensorHandle(data, arg.dtype.scalar)


def _scan_by_slices(self: Any, input: Any) -> Any:
    """Scan a whole slice across the axis at a time, and not each number by itself."""
    given = [np.moveaxis(each.handle.data, self.axis, 0) for each in input]
    scanned = [np.empty_like(each) for each in given]
    before: tuple[Any, ...] = ()
    for at in range(len(given[0])):
        own = tuple(self.to_tensor(each[at], part.dtype) for each, part in zip(given, input, strict=True))
        if at:
            own = self.combine_fn.fn(*before, *own)
        before = tuple(own) if isinstance(own, tuple | tl.tuple) else (own,)
        for each, part in zip(scanned, before, strict=True):
            each[at] = part.handle.data.reshape(each[at].shape)
    return [
        self.to_tensor(np.moveaxis(each, 0, self.axis), part.dtype)
        for each, part in zip(scanned, input, strict=True)
    ]


def do_once_what_the_interpreter_repeats() -> None:
    """Have the interpreter replace the language once for a kernel, by names, not at each call in it.

    Else it looks through every member of the language each time, half of what kernel tests took. Nor does it
    look for overflows, a third of what was left: it found them and told nobody, for want of `debug`.
    """
    interpreter._patch_builtin = _replace_builtins
    interpreter._patch_lang = _replace_languages_once
    interpreter._get_np_dtype = _numpy_dtype
    tl.block_type.__init__ = _make_block_type
    tl.block_type.to_ir = _to_own_type
    tl.tensor.__init__ = _make_tensor
    tl.dtype.__eq__ = _same_or_equal_types
    TritonSemantic.binary_op_type_checking_impl = _check_types_once
    TritonSemantic.scalar_constant = _constant_made_once
    interpreter.InterpreterBuilder.create_splat = _splat
    interpreter.ScanOps.generic_scan = _scan_by_slices
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)

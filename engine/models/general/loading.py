"""Has transformers' loader, which renames and merges what files have, read from what we make of the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors import safe_open

from quire.engine.models.float8 import MXFP4, Float8, Quantised
from quire.engine.models.float8_files import expand_files
from quire.engine.models.mxfp4_files import expand_mxfp4


@contextmanager
def slices_of(files: list[str], quantised: Quantised | None, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Open files; return their tensors by name, of which nothing is read yet.

    quantised: how weights are, which are read as the numbers of the dtype that they stand for.
    """
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(path, framework="pt", device="cpu")) for path in files]
        if isinstance(quantised, Float8):
            opened = expand_files(opened, quantised, dtype, torch.device("cpu"))
        slices = {name: file.get_slice(name) for file in opened for name in file.offset_keys()}
        yield expand_mxfp4(slices, dtype) if quantised == MXFP4 else slices


def reading_expanded(cls: type, quantised: Quantised, dtype: torch.dtype) -> type:
    """Return a class of models that reads quantised weights as the numbers that they stand for."""

    def load(
        model: Any, state: Any, files: list[str], config: Any, expected: list[str] | None = None
    ) -> tuple[Any, Any]:
        with slices_of(files, quantised, dtype) as slices:
            loaded: tuple[Any, Any] = cls._load_pretrained_model(model, slices, None, config, expected)  # type: ignore[attr-defined]
            return loaded

    return loading_by(cls, load)


def loading_by(cls: type, load: Callable[..., tuple[Any, Any]]) -> type:
    """Return the class with another way to load, under its own name, which transformers looks at."""
    named = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls,), named | {"_load_pretrained_model": staticmethod(load)})

"""Launches on a GPU that need not be there: kernels, grids, constants, and on which tensors.

Tensors are torch's of device `meta`, with shapes and strides but no numbers, and say that they are on a GPU.
For scripts outside Triton's interpreter.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import quire.kernels.gpu
from quire.kernels.gpu import Gpu

META = torch.device("meta")
# torch's own kernels that are worth a line of their own.
LOGGED: dict[Any, str] = {
    F.linear: "linear",
    F.embedding: "embedding",
    F.layer_norm: "layer_norm",
    F.rms_norm: "rms_norm",
    Tensor.index_select: "index_select",
}


class Launches(TorchFunctionMode):
    """A line for each kernel, in order. Tensors are named by their memory, as it is first seen."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.names: list[str] = []
        self._memory: dict[int, int] = {}
        self._kept: list[Any] = []  # lest an address comes twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        result = func(*args, **(kwargs or {}))
        if func in LOGGED:
            self.add(LOGGED[func], (*args, *(kwargs or {}).values(), "->", result))
        return result

    def add(self, name: str, values: tuple[Any, ...]) -> None:
        with torch._C.DisableTorchFunction():
            self.names.append(name)
            self.lines.append(" ".join((name, *map(self._described, values))))

    def _described(self, value: Any) -> str:
        if isinstance(value, Tensor):
            memory = value.untyped_storage()
            self._kept.append(memory)
            number = self._memory.setdefault(memory._cdata, len(self._memory))
            shape, strides = "x".join(map(str, value.shape)), ",".join(map(str, value.stride()))
            dtype = str(value.dtype).removeprefix("torch.")
            return f"{dtype}[{shape}]({strides})@{number}+{value.storage_offset()}"
        if type(value).__name__ == "TensorDescriptor":
            inner = self._described(value.base)
            return f"tensordesc({inner} {value.shape} {value.strides} {value.block_shape} {value.layout})"
        if isinstance(value, (tuple, list)):
            return "(" + ", ".join(map(self._described, value)) + ")"
        return repr(value)

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Take the place of `JITFunction.run`."""
        named = (
            inspect.signature(kernel.fn)
            .bind_partial(
                *args, **{name: value for name, value in kwargs.items() if name in kernel.arg_names}
            )
            .arguments
        )
        options = {name: value for name, value in sorted(kwargs.items()) if name not in kernel.arg_names}
        values = [f"{name}={self._described(value)}" for name, value in named.items()]
        name = f"{kernel.fn.__module__.split('.')[-1]}.{kernel.fn.__name__}"
        with torch._C.DisableTorchFunction():
            self.names.append(name)
            self.lines.append(" ".join((name, repr(tuple(grid)), *values, repr(options))))


@contextmanager
def on_gpu(gpu: Gpu) -> Iterator[Launches]:
    """Have all that is launched within noted as if it were launched on `gpu`, and not run."""
    from triton.runtime import JITFunction

    original = quire.kernels.gpu.gpu_of

    def described(device: torch.device) -> Gpu:
        return gpu if device.type == "meta" else original(device)

    launches = Launches()

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        launches.run(kernel, *args, **kwargs)

    changed = [
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith("quire.") and getattr(module, "gpu_of", None) is original
    ]
    try:
        for module in changed:
            module.gpu_of = described  # type: ignore[attr-defined]
        with mock.patch.object(JITFunction, "run", run), launches:
            yield launches
    finally:
        for module in changed:
            module.gpu_of = original  # type: ignore[attr-defined]

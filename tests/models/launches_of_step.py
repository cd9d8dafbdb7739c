"""What a decode step launches: kernels of the backend, and what torch computes beside them, by name.

Counted on a CPU: a call of a backend's operation is a kernel, whatever its reference does, and so is each of
torch's operations that is no view.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.engine.device.block_size import in_blocks
from quire.engine.models.general.model import GeneralModel
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.kernels.attention import attend
from quire.kernels.backend import Backend, torch_backend
from quire.kernels.formats.kv_format import UNSCALED
from quire.kernels.recurrence.operations import REFERENCES
from tests.models.paged_driver import BLOCK_SIZE, PagedDriver

_VIEWS = (
    "view", "_unsafe_view", "unsqueeze", "squeeze", "transpose", "slice", "select", "expand", "permute", "t",
    "split", "split_with_sizes", "as_strided", "detach", "alias", "unbind", "unfold", "diagonal", "empty",
    "new_empty", "empty_like", "_reshape_alias", "empty_strided", "lift_fresh", "narrow",
)  # fmt: skip


class _Counting(TorchDispatchMode):
    def __init__(self, counted: Counter[str]) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        if name not in _VIEWS:
            self._counted[name] += 1
        return func(*args, **(kwargs or {}))


class Launches:
    """counted: launches by name, of what ran within `counting`."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self._mode: _Counting | None = None

    def kernel(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, of which a call counts as one launch."""

        def call(*given: Any, **named: Any) -> Any:
            if self._mode is None:
                return function(*given, **named)
            mode, self._mode = self._mode, None
            self.counted[f"kernel {name}"] += 1
            try:
                with torch.utils._python_dispatch._disable_current_modes():
                    return function(*given, **named)
            finally:
                self._mode = mode

        return call

    def backend(self) -> Backend:
        """Return the references, each of whose calls is one launch."""
        plain = torch_backend()
        operations = {
            each.name: self.kernel(each.name, getattr(plain, each.name))
            for each in fields(plain)
            if each.name not in ("recurrences", "keeps")
        }
        states = {
            each.name: self.kernel(each.name, getattr(REFERENCES, each.name)) for each in fields(REFERENCES)
        }
        return replace(plain, **operations, recurrences=replace(REFERENCES, **states))

    @contextmanager
    def counting(self) -> Iterator[None]:
        names = ("write_kv_reference", "decode_reference")
        counted = {name: self.kernel(name, getattr(attend, name)) for name in names}
        with mock.patch.multiple(attend, **counted), _Counting(self.counted) as mode:
            self._mode = mode
            try:
                yield
            finally:
                self._mode = None


def launches_of_decode(folder: Path, dtype: torch.dtype = torch.float32) -> Counter[str]:
    """Return what the decode of one sequence launches, of a model in a folder."""
    launches = Launches()
    config = read_model(folder, "transformers")
    config, _ = in_blocks(config, BLOCK_SIZE, UNSCALED[dtype], dtype)
    backend = launches.backend()
    model, _ = load_model(folder, config, backend, device="cpu", dtype=dtype, max_model_len=100)
    assert isinstance(model, GeneralModel)
    driver = PagedDriver(model, config, 2, 100)
    driver.step({}, {0: [3, 5, 7]})
    run = model.forward

    def counted(*given: Any, **named: Any) -> Any:
        with launches.counting():
            return run(*given, **named)

    with mock.patch.object(model, "forward", counted):
        driver.step({0: 11}, {})
    return launches.counted

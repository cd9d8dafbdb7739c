"""Whether a model's code looks at what the device computes: a CUDA graph would replay what it saw once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations whose results' values or sizes the host learns.
_READS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::equal", "aten::repeat_interleave.Tensor", "aten::is_nonzero",
    "transformers::grouped_mm_fallback",
}  # fmt: skip
_PUTS = (torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func.name())
        if name in _READS or name.rsplit(".", 1)[0] in _READS or _counts(func, args):
            self.found[name] = None
        return func(*args, **(kwargs or {}))


def _counts(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operation indexes by truth values, but to fill with one number."""
    if func is torch.ops.aten.index.Tensor:
        return _has_truth_values(args[1])
    return func in _PUTS and _has_truth_values(args[1]) and args[2].numel() > 1


def _has_truth_values(indices: Any) -> bool:
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


class NothingFound(TorchDispatchMode):
    """Finds nothing where a run without numbers looks for what is not zero, so that it can go on."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        if func is torch.ops.aten.index.Tensor and args[0].is_meta and _has_truth_values(args[1]):
            (index,) = args[1]  # of the first sizes
            return args[0].new_empty((0, *args[0].shape[index.dim() :]))
        if func in _PUTS and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def host_reads(step: Callable[[], object]) -> list[str]:
    """Run `step`; return the operations by which it had the host look at the device, in their order."""
    watch = _Watch()
    with torch.inference_mode(), watch:
        step()
    return list(watch.found)

"""Modules of transformers that keep states: which those are, how they are called, and what they keep."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.general.unsupported import UnsupportedAttention
from quire.kernels.formats.state_spec import LayerStates, StateSpec

_CHANGES = {"update_conv_state", "update_recurrent_state", "set_linear_cache"}  # methods of caches
_CACHES = ("cache_params", "past_key_values")  # by which name a module takes one
_MASKS = ("attention_mask", "conv_mask")  # of padding
Key = tuple[bool, int]  # whether a state rolls, and its number
Found = dict[Key, Tensor]


class CacheOfStates:
    """Stands for transformers' cache of one layer, for the sequences of one call; each has as many tokens.

    found: the states behind the tokens before, [sequences, …] each; none if there were no such tokens. Code
    may write into these. They are what the call has made of them in the end.
    """

    def __init__(self, found: Found) -> None:
        self.states = found
        self._begun = bool(found)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._begun

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get((True, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get((False, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Take [B, C, T] newer ones; return what convolving them reads, [B, C, kernel size + T]."""
        before = self.states.get((True, state_idx))
        if before is None:
            size = conv_kernel_size or conv_states.shape[-1]
            whole = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            size = before.shape[-1]
            whole = torch.cat([before, conv_states], dim=-1)
        self.states[True, state_idx] = whole[..., -size:]
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.states[False, state_idx] = recurrent_states
        return recurrent_states

    # As MiniMax's own cache calls them.

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        self.update_recurrent_state(state, layer_idx)


def state_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the modules that keep states, by name: those whose code changes them in a cache."""
    kinds: set[type] = {type(module) for module in model.modules()}
    changing = {kind for kind in kinds if _changes_states(kind)}
    return ((name, module) for name, module in model.named_modules() if type(module) in changing)


@cache  # a model has few classes, of which all code is looked at
def _changes_states(kind: type) -> bool:
    methods = (each for part in kind.__mro__ for each in vars(part).values())
    codes = (each.__code__ for each in map(inspect.unwrap, filter(inspect.isfunction, methods)))
    return any(_CHANGES.intersection(code.co_names) for code in codes)


class StateRecorder:
    """Notes in a dry run which states modules keep; the model is in bf16, which tells those that are not."""

    def __init__(self, model: nn.Module) -> None:
        self._noted: dict[str, dict[Key, StateSpec]] = {}
        self.layers: set[int] = set()
        for name, module in state_modules(model):
            module.forward = self._recorded(name, module)
            self.layers.add(int(module.layer_idx))  # type: ignore[arg-type]

    @property
    def states(self) -> tuple[LayerStates, ...]:
        """Return those of each module, in the order of calls."""
        return tuple(LayerStates(name, (*parts.values(),)) for name, parts in self._noted.items())

    def _recorded(self, name: str, module: nn.Module) -> Callable[..., Any]:
        called = Called(module)

        def record(*args: Any, **given: Any) -> Any:
            if name in self._noted:
                raise UnsupportedAttention("its layers that keep states are gone through more than once")
            cache = CacheOfStates({})
            result = called.forward(**called.named(args, given), **{called.cache: cache})
            if not all(state.is_floating_point() for state in cache.states.values()):
                raise UnsupportedAttention("it keeps states that are no floating numbers")
            self._noted[name] = {
                key: StateSpec(
                    tuple(state.shape[1:]),
                    dtype="float32" if state.dtype is torch.float32 else "bfloat16",
                    number=key[1],
                    rolls=key[0],
                    exact=state.dtype is torch.float32,
                )
                for key, state in cache.states.items()
            }
            return result

        return record


class Called:
    """How a module that keeps states is called. cache: by which name it takes one."""

    def __init__(self, module: nn.Module) -> None:
        self.forward = partial(type(module).forward, module)
        self._signature = inspect.signature(self.forward)
        taken = self._signature.parameters
        self.cache = next((name for name in _CACHES if name in taken), "")
        if not self.cache or "hidden_states" not in taken:
            raise UnsupportedAttention(f"how {type(module).__name__} takes its states is not known")
        self._others = {name for name, each in taken.items() if each.kind is each.VAR_KEYWORD}

    def named(self, args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
        """Return what the module is given, by name, but for its cache; there is no padding to mask."""
        bound = self._signature.bind(*args, **given).arguments
        for name in self._others:
            bound |= bound.pop(name, {})
        bound.pop(self.cache, None)
        return {name: None if name in _MASKS else each for name, each in bound.items()}

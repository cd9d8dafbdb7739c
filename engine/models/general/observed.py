"""What each part of a decoder takes and gives, seen in one run of its own code on a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.models.general.attention import EVERY, Call, attention_modules
from quire.engine.models.general.indexer import Indexer
from quire.engine.models.general.stateful import state_modules
from quire.kernels.attention.batch import AttentionLayer


@dataclass(frozen=True, slots=True)
class Passage:
    """A module's call: its hidden states and what came of them, [T, …], and all as it was."""

    module: nn.Module
    into: Tensor
    out: Tensor
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    result: Any


@dataclass(frozen=True, slots=True)
class SeenLayer:
    """A decoder layer's passage, those of its children, its attention's, and what attention was given."""

    whole: Passage
    children: list[Passage]
    attention: Passage
    call: Call
    attended: Tensor  # [T, Hq · Dv], noise in place of what attention would give


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A decoder layer without attention, and its children's passages: it keeps states, or nothing."""

    whole: Passage
    children: list[Passage]


@dataclass(frozen=True, slots=True)
class Seen:
    """A decoder's run: `around` has the passages of its own children, but for layers."""

    tokens: Tensor  # [T] i64
    positions: Tensor  # [T] i64
    layers: list[SeenLayer]
    rotations: list[Passage]  # of modules that give cosines and sines
    around: list[Passage]
    out: Tensor  # [T, H]


@dataclass(frozen=True, slots=True)
class Mixed:
    """The run of a decoder of which not all layers attend, as `Seen` has it.

    mixers: children of layers in which a token's result depends on other tokens.
    """

    tokens: Tensor
    positions: Tensor
    layers: list[SeenLayer | StateLayer]
    rotations: list[Passage]
    around: list[Passage]
    out: Tensor
    mixers: frozenset[nn.Module]


class Noise:
    """Stands for attention: gives normal noise as large as values, the same for a layer every time.

    Of fewer tokens than at first it gives those of the first ones.
    """

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}
        self.callers: dict[int, nn.Module] = {}
        self.attended: dict[int, Tensor] = {}

    def __call__(self, layer: int, call: Call) -> Tensor:
        heads, tokens, _ = call.q.shape
        if layer not in self.attended:
            device = call.v.device
            generator = torch.Generator(device).manual_seed(layer)
            noise = torch.randn(tokens, heads * call.value_dim, device=device, generator=generator)
            self.attended[layer] = (noise * call.v.float().std()).to(call.v.dtype)
            self.calls[layer] = call
        return self.attended[layer][:tokens].view(1, tokens, heads, -1)

    def attend(self, layer: int, qkv: Tensor, attention: AttentionLayer) -> Tensor:
        """Return the same for a layer that has called before."""
        return self.attended[layer]

    def choose(self, layer: int, indexer: Indexer) -> Any:
        return EVERY


class _Caller:
    """Notes which module of a layer calls attention."""

    def __init__(self, module: nn.Module, noise: Noise) -> None:
        self._module, self._noise = module, noise

    def __call__(self, layer: int, call: Call) -> Tensor:
        self._noise.callers[layer] = self._module
        return self._noise(layer, call)

    def choose(self, layer: int, indexer: Indexer) -> Any:
        return EVERY


def observe(
    decoder: nn.Module, noise: Noise, run: Callable[[], Tensor], tokens: Tensor, positions: Tensor
) -> Seen | Mixed | None:
    """Run a decoder on tokens at positions, with noise for attention; None: it is not a row of layers.

    `run` calls it and returns its hidden states [T, H]. Its attention has to be given again then.
    """
    owner, layers = _layers(decoder)
    if layers is None:
        return None
    rotations = [module for module in decoder.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    around = [each for each in owner.children() if each is not layers]
    watched = [*rotations, *around, *layers, *(child for layer in layers for child in layer.children())]
    for module in attention_modules(decoder):
        module.quire = _Caller(module, noise)  # type: ignore[assignment]
    with _noted(watched) as passages:
        out = run()
    by_module: dict[nn.Module, list[Passage]] = {}
    for passage in passages:
        by_module.setdefault(passage.module, []).append(passage)

    def of(modules: Iterable[nn.Module]) -> list[Passage]:
        return [passage for module in modules for passage in by_module.get(module, [])]

    seen: list[SeenLayer | StateLayer] = []
    for index, layer in enumerate(layers):
        caller = noise.callers.get(index)
        whole, children = of([layer]), of(layer.children())
        if len(whole) != 1:
            return None
        if caller is None:
            seen.append(StateLayer(whole[0], children))
            continue
        attention = of(child for child in layer.children() if caller in set(child.modules()))
        if len(attention) != 1 or index not in noise.calls:
            return None
        seen.append(SeenLayer(whole[0], children, attention[0], noise.calls[index], noise.attended[index]))
    attending = [layer for layer in seen if isinstance(layer, SeenLayer)]
    found = of(rotations), of(around), out
    if len(attending) == len(seen):
        return Seen(tokens, positions, attending, *found)
    keep = {module for _, module in state_modules(decoder)} | set(noise.callers.values())
    mixers = (child for layer in layers for child in layer.children() if keep & set(child.modules()))
    return Mixed(tokens, positions, seen, *found, frozenset(mixers))


def following(passages: Sequence[Passage], state: Tensor) -> Passage | None:
    """Return the first call of a module that took a state, but for those that only hand it on."""
    for passage in passages:
        same = passage.into.dtype == state.dtype and torch.equal(passage.into, state)
        if same and not isinstance(passage.module, nn.Dropout | nn.Identity):
            return passage
    return None


def _layers(decoder: nn.Module) -> tuple[nn.Module, nn.ModuleList | None]:
    """Return the layers, each with attention of its own number, and the module whose child they are."""
    for module in decoder.modules():
        for each in module.children():
            if isinstance(each, nn.ModuleList) and len(each):
                numbers = [{part.layer_idx for part in attention_modules(layer)} for layer in each]
                if numbers == [{number} for number in range(len(each))]:
                    return module, each
    return decoder, None


@contextmanager
def _noted(modules: list[nn.Module]) -> Iterator[list[Passage]]:
    """Have the modules' calls noted in order."""
    passages: list[Passage] = []

    def note(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        tensors = [each for each in (*arguments, *keywords.values()) if isinstance(each, Tensor)]
        into = keywords.get("hidden_states", tensors[0] if tensors else None)
        out = result[0] if isinstance(result, tuple) and result else result
        if isinstance(into, Tensor) and isinstance(out, Tensor):
            rows = [each[0] if each.dim() > 2 else each for each in (into, out)]
            passages.append(Passage(module, rows[0].clone(), rows[1].clone(), arguments, keywords, result))

    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in dict.fromkeys(modules)]
    try:
        yield passages
    finally:
        for hook in hooks:
            hook.remove()

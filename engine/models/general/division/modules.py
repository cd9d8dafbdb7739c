"""What stands for the `forward` of modules that ranks share: theirs, and what ranks do together.

Every rank calls the same modules in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from quire.engine.models.vocabulary import embed
from quire.engine.parallel.share import Range
from quire.kernels.parallel.ranks import Ranks


def own_forward(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return what calls the code of a module's class, whichever that is by then."""
    return lambda x: type(module).forward(module, x)


def summed(x: Tensor, ranks: Ranks) -> Tensor:
    """Return the sum of every rank's x [..., N], which may be overwritten."""
    return ranks.all_reduce(x.reshape(-1, x.shape[-1])).view(x.shape)


def gathered(x: Tensor, ranks: Ranks, copies: int = 1) -> Tensor:
    """Return every rank's x [..., N], one behind the other: [..., N · size / copies].

    copies: ranks that have the same x.
    """
    each = ranks.all_gather(x.contiguous())[::copies]
    return each.movedim(0, -2).flatten(-2)


class Gathered:
    """A module whose outputs are divided, and wanted whole."""

    def __init__(self, module: nn.Module, ranks: Ranks, copies: int) -> None:
        self._forward, self._ranks, self._copies = own_forward(module), ranks, copies

    def __call__(self, x: Tensor) -> Tensor:
        return gathered(self._forward(x), self._ranks, self._copies)


class Summed:
    """A module whose inputs are divided: what comes in is this rank's part of them, or all."""

    def __init__(self, module: nn.Module, ranks: Ranks, part: Range) -> None:
        self.ranks = ranks
        self._forward, self._part = own_forward(module), part

    def __call__(self, x: Tensor) -> Tensor:
        begin, end = self._part
        if x.shape[-1] != end - begin:
            x = x[..., begin:end]
        return summed(self._forward(x), self.ranks)


class SummedOutput:
    """A module of which each rank computes a part of the sum."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._forward, self._ranks = module.forward, ranks

    def __call__(self, *args: Any, **given: Any) -> Tensor:
        return summed(self._forward(*args, **given), self._ranks)


class ExpertsOfRank:
    """All experts of a layer, of which this rank has `count` whole ones from `first` on."""

    def __init__(self, module: nn.Module, ranks: Ranks, first: int, count: int) -> None:
        self._forward, self._ranks, self._first, self._count = module.forward, ranks, first, count

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        index = top_k_index - self._first
        elsewhere = (index < 0) | (index >= self._count)
        # What is elsewhere is asked of an expert here, and counts nothing.
        index, weights = index.masked_fill(elsewhere, 0), top_k_weights.masked_fill(elsewhere, 0)
        return summed(self._forward(hidden_states, index, weights), self._ranks)


class Table:
    """A table of vectors of which each rank has as many rows: those of its own number are found."""

    def __init__(self, module: Any, ranks: Ranks) -> None:
        self._module, self._ranks = module, ranks
        self._forward: Callable[[Tensor], Tensor] = module.forward

    def __call__(self, tokens: Tensor) -> Tensor:
        rows: Tensor = self._module.weight
        found = embed(tokens.flatten(), rows, lambda local, _: self._forward(local), self._ranks)
        return found.view(*tokens.shape, -1)


class Portion:
    """A module that gives every rank the same, whose outputs are summed afterwards."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._forward, self._size = module.forward, ranks.size

    def __call__(self, x: Tensor) -> Tensor:
        return self._forward(x / self._size)

"""Modules that keep states, called for a piece of a step at a time, as transformers' own code takes them.

Such a module takes the tokens of one sequence, or one of each of several, and a cache with their states. So a
step's tokens are taken apart: decodes go through it together, and chunks of prompts one after the other, in
pieces that end where blocks end. Behind each piece the block has the states as they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.models.general import selective_scan
from quire.engine.models.general.own_code import calls, with_functions
from quire.engine.models.general.stateful import CacheOfStates, Called, Found, Key
from quire.kernels.attention.batch import ForwardBatch, Span
from quire.kernels.formats.state_spec import LayerStates


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens begin..end-1 of a step, which one sequence has next to each other; `apart`: a sequence each.

    before: the blocks that have their states before them, one of a sequence; None: there are none yet. after:
    the blocks that get them; None: the tokens are nobody's.
    """

    begin: int
    end: int
    before: Tensor | None
    after: Tensor | None
    apart: bool = False

    def of(self, given: Any, tokens: int) -> Any:
        """Return [sequences, own tokens, …] of a tensor [1, tokens, …], or of those in a tuple."""
        if isinstance(given, tuple):
            return tuple(self.of(each, tokens) for each in given)
        if not isinstance(given, Tensor) or given.dim() < 2 or given.shape[:2] != (1, tokens):
            return given
        own = given[:, self.begin : self.end]
        return own.transpose(0, 1) if self.apart else own


def pieces_of(batch: ForwardBatch, block_size: int, spare: int) -> list[Piece]:
    """Return a step's decodes, and its chunks in pieces, with blocks of a cache group."""
    decode, prefill = batch.decode, batch.prefill
    tables, rows, lens = decode.block_tables, decode.rows.long(), decode.context_lens.long()
    pieces: list[Piece] = []
    if len(rows):
        before = tables[rows, (lens - 2).clamp(min=0) // block_size].long()
        after = tables[rows, (lens - 1).clamp(min=0) // block_size].long()
        pieces.append(Piece(0, len(rows), before, torch.where(lens > 0, after, spare), apart=True))
    if prefill is None:
        return pieces
    rest = len(batch.tokens) - len(rows)
    if sum(span.tokens for span in prefill.spans) != rest:  # a step of nobody, of which other things are told
        return [*pieces, Piece(len(rows), len(batch.tokens), None, None)] if rest else pieces
    own = sorted(cut(prefill.spans, len(rows), block_size))
    numbers = torch.tensor(own, dtype=torch.int64).view(-1, 4).to(tables.device, non_blocking=True)
    first, begins, ends, row_of = numbers.unbind(1)
    found = tables[row_of, (first - 1).clamp(min=0) // block_size].long()
    left = tables[row_of, (first + ends - begins - 1) // block_size].long()
    for i, (position, begin, end, _) in enumerate(own):
        pieces.append(Piece(begin, end, found[i : i + 1] if position else None, left[i : i + 1]))
    return pieces


def cut(spans: Sequence[Span], begin: int, block_size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield pieces of rows' tokens that end where blocks end: position, begin and end in the step, and row.

    begin: of the first row's tokens in the step. In rising order of positions those of a row follow each
    other, and who shares a block that another row computes in the same step comes after that.
    """
    for span in spans:
        end, position = begin + span.tokens, span.context_len - span.tokens
        while span.context_len and begin < end:
            size = min(end - begin, block_size - position % block_size)
            yield position, begin, begin + size, span.row
            position, begin = position + size, begin + size
        begin = end


class PieceModule:
    """In place of the `forward` of a module that keeps states: calls it for each piece of a step.

    step: the pieces that go through it, and its states; None before the first step.
    """

    def __init__(
        self,
        module: nn.Module,
        layer: LayerStates,
        step: Callable[[], tuple[list[Piece], Sequence[Tensor]] | None],
    ) -> None:
        self._called = Called(module)
        self._keys: list[Key] = [(part.rolls, part.number) for part in layer.parts]
        self._step = step
        self._scanned: Tensor | None = None  # the state from which a scan goes on
        own = type(module).forward
        if calls(own, selective_scan.NAME):
            self._called.forward = partial(with_functions(own, {selective_scan.NAME: self._scan}), module)

    def _scan(self, *args: Any, **given: Any) -> Any:
        return selective_scan.selective_scan(self._scanned, *args, **given)

    def __call__(self, *args: Any, **given: Any) -> Any:
        named = self._called.named(args, given)
        of_step = self._step()
        if of_step is None:
            return self._call(named, CacheOfStates({}))
        pieces, states = of_step
        tokens = named["hidden_states"].shape[1]
        results = []
        for piece in pieces:
            found: Found = {}
            if piece.before is not None:
                each = zip(self._keys, states, strict=True)
                found = {key: state.index_select(0, piece.before) for key, state in each}
            cache = CacheOfStates(found)
            results.append(
                self._call({name: piece.of(value, tokens) for name, value in named.items()}, cache)
            )
            if piece.after is not None:
                for key, state in zip(self._keys, states, strict=True):
                    state.index_copy_(0, piece.after, cache.states[key].to(state.dtype))
        if not isinstance(results[0], tuple):
            return _joined(pieces, results, tokens)
        return tuple(_joined(pieces, each, tokens) for each in zip(*results, strict=True))

    def _call(self, given: dict[str, Any], cache: CacheOfStates) -> Any:
        self._scanned = cache.states.get((False, 0))
        return self._called.forward(**given, **{self._called.cache: cache})


def _joined(pieces: Sequence[Piece], results: Sequence[Any], tokens: int) -> Tensor | None:
    """Return [1, tokens, …] of what pieces gave; None, if that is not of tokens: nobody reads it."""
    if not all(isinstance(each, Tensor) and each.dim() > 1 for each in results):
        return None
    own = [each.transpose(0, 1) if piece.apart else each for piece, each in zip(pieces, results, strict=True)]
    if any(each.shape[:2] != (1, piece.end - piece.begin) for piece, each in zip(pieces, own, strict=True)):
        return None
    out: Tensor = own[0].new_zeros(1, tokens, *own[0].shape[2:])
    for piece, each in zip(pieces, own, strict=True):
        out[:, piece.begin : piece.end] = each
    return out

"""Sequences, the groups that a request's sequences form, and beams."""

from __future__ import annotations

import sys
from dataclasses import InitVar, dataclass, field
from itertools import chain

import numpy as np

from quire.engine.arrays import Int32, Logprobs, as_blocks, joined
from quire.engine.hashing import Prefix
from quire.engine.messages import FinishReason, Request, TokenLogprob
from quire.engine.sequences.beam_search import BeamSearch
from quire.engine.sequences.grammar import Constraint
from quire.engine.sequences.row_tokens import RowTokens
from quire.engine.sequences.timeline import Timeline
from quire.engine.sequences.window_table import WindowTable

NO_ROW = -1
BlockTable = list[int]


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """A prompt and the tokens that were generated after it, as far as the host knows them."""

    group: SequenceGroup
    index: int
    table: BlockTable = field(default_factory=list)
    window_tables: list[WindowTable] = field(default_factory=list)  # of cache groups with windows, if any
    prefixes: list[Prefix] = field(default_factory=list)  # of the full blocks of `tokens`, as far as needed
    published: int = 0  # blocks of `table` that are findable, or were found
    num_found: int = sys.maxsize  # first blocks that were published when it began, or began again
    host_table: BlockTable = field(default_factory=list)  # that hold what `table` named, while swapped out
    host_window_tables: list[WindowTable] = field(default_factory=list)  # likewise, of `window_tables`
    host_published: int = 0  # how many of them hold findable content
    saved_context: int = 0  # tokens that they hold
    row: int = NO_ROW  # device row while the group runs
    finish_reason: FinishReason | None = None
    constraint: Constraint | None = None  # what all tokens that are known allow next
    salt: str = field(init=False)
    _own: Int32 = field(init=False)  # its tokens while it is in no row: replaced, and never written to
    _row_tokens: RowTokens | None = None  # which hold them while it is in one

    def __post_init__(self) -> None:
        self.salt, self._own = self.group.request.cache_salt, self.group.prompt

    @property
    def num_blocks(self) -> int:
        """Return the logical block after the last one of its tables."""
        return len(self.table) or (self.window_tables[0].end if self.window_tables else 0)

    @property
    def tables(self) -> list[WindowTable]:
        """Return its table of each cache group, if it has blocks."""
        return [WindowTable(0, self.table), *self.window_tables] if self.table else self.window_tables

    @property
    def host_tables(self) -> list[WindowTable]:
        """Likewise, in host memory."""
        if not self.host_table:
            return self.host_window_tables
        return [WindowTable(0, self.host_table), *self.host_window_tables]

    @property
    def blocks(self) -> BlockTable:
        """Return the blocks of all its tables."""
        if not self.window_tables:
            return self.table
        return [*self.table, *chain.from_iterable(table.blocks for table in self.window_tables)]

    @property
    def host_blocks(self) -> BlockTable:
        """Return the host blocks of all its tables."""
        if not self.host_window_tables:
            return self.host_table
        return [*self.host_table, *chain.from_iterable(table.blocks for table in self.host_window_tables)]

    @property
    def tokens(self) -> Int32:
        """Return all tokens that are known [N].

        A view of its row: not to be written to, nor kept until that is.
        """
        return self._own if self._row_tokens is None else self._row_tokens.of(self.row)

    def take_tokens(self, other: Sequence) -> None:
        """Have the tokens of `other` instead. Both are in rows, or neither is."""
        if self._row_tokens is None:
            self._own = other.tokens.copy()
        else:
            self._row_tokens.copy(other.row, self.row)

    @property
    def num_tokens(self) -> int:
        return len(self._own) if self._row_tokens is None else self._row_tokens.length(self.row)

    def append(self, token: int) -> None:
        if self._row_tokens is None:
            self._own = np.append(self._own, np.int32(token))
        else:
            self._row_tokens.append(self.row, token)

    def enter_row(self, row: int, row_tokens: RowTokens) -> None:
        """Take `row` of `row_tokens`, where steps write its tokens."""
        row_tokens.put(row, self._own)
        self.row, self._row_tokens = row, row_tokens

    def leave_row(self) -> None:
        """Give up the row, which may be another's next; its tokens go along."""
        assert self._row_tokens is not None
        self._own = self.tokens.copy()
        self._row_tokens.clear(self.row)
        self.row, self._row_tokens = NO_ROW, None

    def block_contents(self, block_size: int, first_block: int, end_block: int) -> list[bytes]:
        """Return the token ids of full blocks first_block..end_block-1, as bytes."""
        if self._row_tokens is not None:
            return self._row_tokens.block_contents(self.row, first_block, end_block)
        contents: list[bytes] = as_blocks(self._own, block_size)[first_block:end_block].tolist()
        return contents

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.group.num_prompt

    def next_mask(self) -> Int32:
        """Return the tokens its grammar allows: none that ends it before min_tokens, if others can follow."""
        assert self.constraint is not None
        if self.num_generated < self.group.request.params.min_tokens:
            return self.constraint.mask_without(self.group.stop_tokens)
        return self.constraint.mask


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class SequenceGroup:
    """The sequences of one request: admitted, preempted and resumed together (section 4.5)."""

    request: Request
    prompt: Int32  # [N]: the request's, as Capacity.check gives it
    order: int  # of arrival: the smaller one is served first and preempted last
    eos_token_ids: InitVar[tuple[int, ...]]
    num_prompt: int = field(init=False)
    stop_tokens: frozenset[int] = field(init=False)
    sequences: list[Sequence] = field(init=False)
    forked: bool = field(init=False)  # the prompt's blocks are shared out once it has been computed
    beams: BeamGroup | None = None
    prefill_queue: list[Sequence] = field(default_factory=list)  # running, but not whole in the cache yet
    prompt_logprobs: list[TokenLogprob | None] | None = field(init=False)
    prompt_logprobs_asked: int = 1  # prompt tokens before this one are collected or in flight
    cached_tokens: int = 0  # of the prompt, found when it was first admitted
    cached_host_tokens: int = 0  # of those, in host memory
    swapped: bool = False  # what it had computed is in host memory, or on its way there
    transferring: bool = False  # blocks are on their way, to or from host memory
    queue_seconds: float | None = None
    first_output_due: bool = True
    timeline: Timeline = field(init=False)

    def __post_init__(self, eos_token_ids: tuple[int, ...]) -> None:
        params = self.request.params
        self.num_prompt = len(self.request.prompt)
        eos = () if params.ignore_eos else eos_token_ids
        self.stop_tokens = frozenset(eos) | frozenset(params.stop_token_ids)
        self.sequences = [Sequence(self, index) for index in range(params.num_sequences)]
        self.forked = params.num_sequences == 1
        self.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        self.timeline = Timeline(self.request.arrival)

    def end(self) -> None:
        """Let go of what names it, now that its last sequence has ended.

        Steps in flight still name the sequences, and those their group. Nothing else does, and no cycle is
        left: all of it is freed with the last of these steps, and waits for no collector.
        """
        self.sequences = []
        self.prefill_queue = []
        self.beams = None

    @property
    def in_lockstep(self) -> bool:
        """Return whether each of its steps must be committed before its sequences may go on."""
        return self.beams is not None or bool(self.request.params.grammar)

    @property
    def in_cache(self) -> list[Sequence]:
        """Return those that have, or when resumed must have, tokens in the cache: of beams the live ones."""
        return self.live if self.beams is None else self.beams.order

    @property
    def live(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]


class BeamGroup:
    """The beams of `group` while the search runs.

    The selection of a step waits until all of them have candidates.
    """

    def __init__(self, group: SequenceGroup, vocab_size: int) -> None:
        params = group.request.params
        self.search = BeamSearch(
            params.beam_width,
            params.n,
            params.max_tokens,
            group.stop_tokens,
            params.length_penalty,
            params.early_stopping,
            params.min_tokens,
        )
        self.group = group
        self.num_candidates = min(self.search.candidates_per_beam, vocab_size)
        self.pending = False  # candidates are in flight, or wait for those of other beams
        self.continue_with([0])

    def continue_with(self, indices: list[int]) -> None:
        """Make these sequences of the group the live beams, best first, none of which has candidates."""
        self.indices = indices
        self.candidates: tuple[Logprobs, dict[int, int]] | None = None  # rows of it, by the beams' indices

    @property
    def order(self) -> list[Sequence]:
        """Return the live beams, best first."""
        sequences = self.group.sequences
        return [sequences[i] for i in self.indices]

    def collect(self, logprobs: Logprobs, rows: dict[int, int]) -> bool:
        """Take rows of `logprobs`, by the beams' indices, as their candidates; return if all have theirs.

        A beam keeps what it has: it was preempted while others' were missing, and computed again.
        """
        if self.candidates is not None:
            earlier, before = self.candidates
            after = {index: row for index, row in rows.items() if index not in before}
            parts = (earlier, before), (logprobs, after)
            logprobs = joined(
                [
                    source.of(np.array([*each.values()], np.intp), self.num_candidates)
                    for source, each in parts
                ]
            )
            rows = {index: row for row, index in enumerate((*before, *after))}
        self.candidates = logprobs, rows
        return len(rows) == len(self.indices)

    @property
    def batch_key(self) -> tuple[int, int, int]:
        """Return a key: groups with the same can be advanced by one selection."""
        search = self.search
        return search.width, len(search.stop_tokens), self.num_candidates

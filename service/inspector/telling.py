"""The engine's moves in words, each with what is different after it, from before anybody watched on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from quire.engine.inspection.messages import ExactPool, Move, MoveKind, PoolAnswer, Table
from quire.engine.inspection.replay import Moved, Name, Replay, read_moves
from quire.engine.memory import move_kinds as kinds
from quire.service.inspector.updates import BlockHistory

PERIOD = 0.25  # seconds between two maps of the time before
MAX_SECONDS = 600.0
MAX_TOLD = 20_000  # moves of the time before, one by one: the newest
_WORDS: dict[int, MoveKind] = {
    kinds.ALLOCATE: "allocate",
    kinds.HIT: "hit",
    kinds.FORK: "fork",
    kinds.RELEASE: "release",
    kinds.KEEP: "publish",
    kinds.EVICT: "evict",
    kinds.COPY: "copy",
    kinds.SWAP_OUT: "swap_out",
    kinds.SWAP_IN: "swap_in",
}
_OF_TWO = (kinds.COPY, kinds.SWAP_OUT, kinds.SWAP_IN)


def tell_past(
    answer: PoolAnswer, exact: ExactPool, name_key: Callable[[str], str]
) -> tuple[Teller, BlockHistory, list[msgspec.Raw]]:
    """Return the updates that lead to `answer`, and what to go on with from there."""
    teller = Teller(answer, exact)
    looks = teller.past(PERIOD)
    first, _, _ = next(looks)
    history = BlockHistory(first, name_key)
    updates = [history.full(), *(history.advance(look, moves, lost) for look, moves, lost in looks)]
    return teller, history, [msgspec.Raw(msgspec.json.encode(update)) for update in updates]


class Teller:
    """Follows the pool move by move. What is no move in itself is told with the next one."""

    def __init__(self, answer: PoolAnswer, exact: ExactPool) -> None:
        """Begin as the pool was before the moves of `answer`."""
        self._first = answer
        self._moves = _recent(answer)
        self._replay = replay = Replay(answer, exact)
        self._states, self._references = bytearray(answer.states), bytearray(answer.references)
        self._salts = {table.request: table.salt for table in answer.tables}
        self._touched: set[int] = set()  # places that are told of with the next move
        self._changed: set[Name] = set()  # sequences, since the last look
        self._step, self._at, self._waiting = 0, answer.at, answer.num_waiting
        if self._moves:
            self._at = _time_of(self._moves[0], answer)
        for move in reversed(self._moves):
            replay.undo(move)
            self._note(move)
        self._settle()
        self._tables: dict[Name, Table] = {}
        self._changed.update(replay.tables)

    def past(self, period: float) -> Iterator[tuple[PoolAnswer, list[Move], int]]:
        """Go on to the first answer: yield the pool before its moves, and then once in `period` seconds.

        With each come the moves since the one before, and how many of them were too many to be told.
        """
        told, answer = [move for move in self._moves if move.kind != kinds.STEP], self._first
        too_many = max(0, sum(map(_num_told, told)) - MAX_TOLD)
        moves: list[Move] = []
        lost, begun = 0, None
        for move in self._moves:
            if move.kind == kinds.STEP:
                at = _time_of(move, answer)
                if begun is None or at >= begun + period:
                    yield self._look(), moves, lost
                    moves, lost, begun = [], 0, at
            if too_many > 0:
                count = len(list(self._tell(move, answer)))
                too_many, lost = too_many - count, lost + count
            else:
                moves += self._tell(move, answer)
        self._moves = []
        yield answer, moves, lost

    def tell(self, answer: PoolAnswer, begin: int) -> list[Move]:
        """Return the moves of the next answer, from position `begin` on."""
        numbers = answer.moves[8 * (begin - answer.begin) :]
        return [told for move in read_moves(numbers) for told in self._tell(move, answer)]

    def _tell(self, move: Moved, answer: PoolAnswer) -> Iterator[Move]:
        if move.kind == kinds.STEP:
            self._step, self._waiting = move.request, move.index
            self._at = _time_of(move, answer)
            return
        for each in _singles(move):
            self._replay.redo(each)
            self._note(each)
            if not _num_told(each):
                continue
            effects = []
            for place in self._settle():
                effects += [place, self._states[place], self._references[place]]
            other = each.blocks[1] if each.kind in _OF_TWO else -1
            request = max(-1, each.request)
            yield Move(self._step, self._at, _WORDS[each.kind], each.blocks[0], other, request, effects)

    def _note(self, move: Moved) -> None:
        if move.kind in _OF_TWO or move.kind == kinds.STEP:
            return
        first = self._replay.first_place(move)
        self._touched.update(first + block for block in move.blocks)
        if move.request != kinds.NOBODY:
            self._changed.add((move.request, move.index))

    def _settle(self) -> list[int]:
        """Write down how touched places are; return them."""
        touched, self._touched = sorted(self._touched), set()
        for place in touched:
            self._states[place] = self._replay.state(place)
            self._references[place] = self._replay.references(place)
        return touched

    def _look(self) -> PoolAnswer:
        """Return the pool as it is after the last move."""
        self._settle()
        for name in self._changed:
            table = self._replay.table(name, self._salts.get(name[0], ""))
            if table is None:
                self._tables.pop(name, None)
            else:
                self._tables[name] = table
        self._changed.clear()
        return msgspec.structs.replace(
            self._first,
            at=self._at,
            states=bytes(self._states),
            references=bytes(self._references),
            tables=list(self._tables.values()),
            num_waiting=self._waiting,
        )


def _recent(answer: PoolAnswer) -> list[Moved]:
    """Return the moves of the last minutes, which begin with a step."""
    moves = list(read_moves(answer.moves))
    steps = (at for at, move in enumerate(moves) if move.kind == kinds.STEP)
    begin = next((at for at in steps if _time_of(moves[at], answer) > answer.at - MAX_SECONDS), len(moves))
    return moves[begin:]


def _time_of(step: Moved, answer: PoolAnswer) -> float:
    return answer.at - (answer.clock - step.logical / 1e6)


def _num_told(move: Moved) -> int:
    """Return how many moves are told of it: each block on the device, and what goes between tiers."""
    if move.kind in _OF_TWO:
        return 1
    return len(move.blocks) if move.kind in _WORDS and move.place < kinds.HOST else 0


def _singles(move: Moved) -> Iterable[Moved]:
    """Split a move of several blocks into one of each; of those released the last goes first."""
    if len(move.blocks) == 1 or move.kind in _OF_TWO:
        return (move,)
    kind, place, request, index = move.kind, move.place, move.request, move.index
    each = [
        Moved(kind, place, request, index, at, [block]) for at, block in enumerate(move.blocks, move.logical)
    ]
    return reversed(each) if move.kind == kinds.RELEASE else each

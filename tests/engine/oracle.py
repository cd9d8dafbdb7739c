"""A model that needs no weights: its next token is a hash of every (position, token) read through the block
table, so that any lost, stale or aliased block changes the output."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from quire.engine.arrays import Logprobs
from quire.engine.messages import Request, SamplingParams
from quire.engine.models.cache_groups import STATE_WINDOW
from quire.engine.schedule.plan import Runner, StepPlan, StepResult
from quire.engine.sequences.beam_search import BeamSearch
from quire.engine.sequences.rows import table_stride
from tests.engine.toy_grammar import Reading, tokens_in

Slot = tuple[int, int, int]
"""(position, token, hash of all that came before), as keys and values depend on all that came before."""

State = tuple[int, int]
"""(position, hash of all up to it), as a state is behind that token"""

VOCAB = 50
LONGEST = 1000  # blocks of a sequence
CANDIDATES = 20  # at least what the widest search asks for
_MASK = (1 << 61) - 1


def slot_history(history: int, position: int, token: int) -> int:
    return (history * 1_000_003 + position * 131 + token + 7) & _MASK


def _next_token(history: int, params: SamplingParams, index: int, allowed: list[int] | None = None) -> int:
    seed = (params.seed or 0) * 31 + (index if params.temperature else 0)
    tokens = allowed or range(VOCAB)
    return tokens[(slot_history(history, seed, index) >> 7) % len(tokens)]


def expected_tokens(request: Request, index: int, eos: tuple[int, ...] = ()) -> list[int]:
    """Return what sequence `index` of `request` must produce, whatever the schedule was."""
    params = request.params
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    history = 0
    for position, token in enumerate(request.prompt):
        history = slot_history(history, position, token)
    generated: list[int] = []
    reading = Reading(params.grammar) if params.grammar else None
    while len(generated) < params.max_tokens:
        allowed = None
        if reading is not None:
            allowed = reading.allowed()
            if len(generated) < params.min_tokens:
                allowed = [token for token in allowed if token not in stops] or allowed
        generated.append(_next_token(history, params, index, allowed))
        history = slot_history(history, len(request.prompt) + len(generated) - 1, generated[-1])
        if generated[-1] in stops:
            break
        if reading is not None:
            reading.take(generated[-1])
    return generated


def _candidates(history: int, seed: int | None) -> tuple[list[int], list[float]]:
    """The best tokens of a beam, best first, and their log-probabilities."""
    rng = random.Random(history ^ (seed or 0))
    return rng.sample(range(VOCAB), CANDIDATES), sorted(
        (-4 * rng.random() for _ in range(CANDIDATES)), reverse=True
    )


def expected_beams(request: Request, eos: tuple[int, ...] = ()) -> list[list[int]]:
    """Return what beam search over `request` must give, best first."""
    params = request.params
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos))
    search = BeamSearch(
        params.beam_width,
        params.n,
        params.max_tokens,
        stops,
        params.length_penalty,
        params.early_stopping,
        params.min_tokens,
    )
    history = 0
    for position, token in enumerate(request.prompt):
        history = slot_history(history, position, token)
    beams, position = [history], len(request.prompt)
    while not search.done:
        tokens, logprobs = zip(*(_candidates(beam, params.seed) for beam in beams), strict=True)
        step = search.advance(np.array(tokens, np.int32), np.array(logprobs, np.float32))
        beams = [slot_history(beams[p], position, t) for p, t in zip(step.parents, step.tokens, strict=True)]
        position += 1
    return [hypothesis.tokens for hypothesis in search.result()]


class OracleHandle:
    """Its transfers are done once the runner was asked `due` times whether any are, or if waited for."""

    def __init__(
        self, runner: OracleRunner, result: StepResult, arrive: Callable[[], None], due: int
    ) -> None:
        self.runner = runner
        self.result = result
        self.arrive = arrive
        self.due = due

    def wait(self) -> StepResult:
        return self.result

    def has_moved(self, *, wait: bool = False) -> bool:
        self.runner.asked += 1
        if self.runner.asked < self.due and not wait:
            return False
        self.arrive()
        return True


class OracleRunner(Runner):
    """Executes plans on a toy cache of (position, token) pairs, exactly in the order of the contract."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        num_host_blocks: int = 0,
        windows: tuple[int, ...] = (),
        *,
        keeps_all: bool = True,
    ) -> None:
        self.windows = windows
        self.keeps_all = keeps_all
        self.stride = table_stride(max_num_seqs)
        self.block_size = block_size
        # Of layers that keep states, by the number of their cache group.
        self.stateful = [
            number for number, window in enumerate(windows, int(keeps_all)) if window == STATE_WINDOW
        ]
        # Behind a block's slots is a state.
        self.cache: list[list[Slot | State | None]] = [[None] * (block_size + 1) for _ in range(num_blocks)]
        self.host: list[list[Slot | State | None]] = [
            [None] * (block_size + 1) for _ in range(num_host_blocks)
        ]
        self.asked = 0  # how often, whether transfers are done
        self.delay: Callable[[], int] = lambda: 0  # of the next transfer, in steps beyond its own
        longest = num_blocks if keeps_all else LONGEST  # tables may name more than there are
        self.tables = np.full((self.stride * (keeps_all + len(windows)), longest + 1), -1, np.int64)
        self.last = [0] * max_num_seqs
        self.state: dict[int, tuple[SamplingParams, int]] = {}
        self.candidates: dict[int, int] = {}
        self.tokens_computed = 0

    def launch(self, plan: StepPlan) -> OracleHandle:
        for start in plan.starts:
            self.state[start.row] = (start.params, start.index)
            self.candidates[start.row] = start.num_candidates
        self.tables[plan.table_rows, plan.table_columns] = plan.table_blocks
        for row, token in zip(plan.override_rows.tolist(), plan.override_tokens.tolist(), strict=True):
            self.last[row] = token
        arrive = self._transfer(plan)
        destinations = plan.copies[:, 1].tolist()
        assert len(set(destinations)) == len(destinations), "two copies write one block"
        assert not set(destinations) & set(plan.copies[:, 0].tolist()), "a copy reads what another writes"
        for source, destination in plan.copies.tolist():
            self.cache[destination] = list(self.cache[source])
        tokens: list[tuple[int, int]] = []  # (row, position) of each computed token
        ids: list[int] = []
        given = iter(plan.prefill_tokens.tolist())
        assert len(set(plan.rows.tolist())) == len(plan.rows), "a row is in the plan twice"
        for r, row in enumerate(plan.rows.tolist()):
            for i in range(plan.query_lens[r]):
                tokens.append((row, int(plan.context_lens[r] - plan.query_lens[r]) + i))
                ids.append(self.last[row] if r < plan.num_decodes else next(given))
        assert next(given, None) is None
        written = set()
        for (row, position), token in zip(tokens, ids, strict=True):
            for slot in self._slots(row, position):
                assert slot not in written, f"slot {slot} is written twice in one step"
                written.add(slot)
                self.cache[slot[0]][slot[1]] = (position, token, 0)
        befores: dict[tuple[int, int], int] = {}  # histories
        after: tuple[int, int, int] | None = None  # the row, position and history behind the last token
        for row, position in tokens:  # all are in the cache before any is read, as in a layer
            slots = self._slots(row, position)
            _, token, _ = self.cache[slots[0][0]][slots[0][1]] or (0, 0, 0)
            if after is not None and after[:2] == (row, position) and not self.windows:
                history = after[2]  # what was before was read with the last one, and is read with a sample
            else:
                history = self._read(row, position, position)
            for block, offset in slots:
                self.cache[block][offset] = (position, token, history)
            befores[row, position] = history
            after = row, position + 1, slot_history(history, position, token)
        self._advance_states(befores, dict(zip(tokens, ids, strict=True)))
        self.tokens_computed += len(tokens)
        sampled: list[int] = []
        histories: list[int] = []
        masks = dict(zip(plan.masked_samples.tolist(), plan.masks, strict=True))
        for i, (row, index, position) in enumerate(
            zip(
                plan.sample_rows.tolist(),
                plan.sample_tokens.tolist(),
                plan.sample_positions.tolist(),
                strict=True,
            )
        ):
            source, last_position = tokens[index]
            assert position == last_position + 1
            history = self._read(source, position, last_position)
            histories.append(history)
            assert (i in masks) == bool(self.state[row][0].grammar)
            allowed = tokens_in(masks[i]) if i in masks else None
            sampled.append(_next_token(history, *self.state[row], allowed))
            self.last[row] = sampled[-1]
        result = self._result(plan, tokens, ids, sampled, histories)
        return OracleHandle(self, result, arrive, self.asked + 1 + self.delay())

    def _advance_states(self, befores: dict[tuple[int, int], int], ids: dict[tuple[int, int], int]) -> None:
        """Have each token, by row and position, change the states that the one before it has left."""
        for (row, position), token in sorted(ids.items(), key=lambda each: each[0][1]):
            history = befores[row, position]
            for number in self.stateful:
                table = self.tables[row + number * self.stride]
                if position:
                    found = self.cache[table[(position - 1) // self.block_size]][-1]
                    assert found == (position - 1, history), (
                        f"group {number} of row {row} goes on at {position} from {found}"
                    )
                behind = slot_history(history, position, token)
                self.cache[table[position // self.block_size]][-1] = position, behind

    def _transfer(self, plan: StepPlan) -> Callable[[], None]:
        """Swaps read at once or when they arrive, and are written then: both must be the same."""
        arrivals: list[tuple[list[Slot | State | None], list[list[Slot | State | None]], int]] = []
        for device, host in plan.swap_out.tolist():
            arrivals.append((self.cache[device], self.host, host))
            self.host[host] = self._empty()
        for host, device in plan.swap_in.tolist():
            arrivals.append((self.host[host], self.cache, device))
            self.cache[device] = self._empty()
        before = [list(source) for source, _, _ in arrivals]

        def arrive() -> None:
            for (source, tier, target), content in zip(arrivals, before, strict=True):
                assert source == content, "a block was written while it was read by a transfer"
                assert tier[target] == self._empty(), "a block was written before its transfer"
                tier[target] = content

        return arrive

    def _empty(self) -> list[Slot | State | None]:
        return [None] * (self.block_size + 1)

    def _slots(self, row: int, position: int) -> list[tuple[int, int]]:
        """Where each cache group keeps `position` of `row`."""
        logical, offset = divmod(position, self.block_size)
        return [(block, offset) for block in self.tables[row :: self.stride, logical].tolist()]

    def _read(self, row: int, length: int, query: int) -> int:
        """Hash of the first `length` tokens of `row`, each of which was computed from the right ones.

        Window groups must have of them what a token at position `query` sees. Where no group keeps all, those
        before are known by the first that is seen, which was computed from them.
        """
        size, cache = self.block_size, self.cache
        tables = self.tables[row :: self.stride, : -(-length // size)].tolist()  # of each group
        history, group, first = 0, 0, 0  # the group that keeps most, and from where on
        if not self.keeps_all:
            group = self.windows.index(max(self.windows))
            first = max(0, query + 1 - self.windows[group])
        for number, window in enumerate(self.windows, int(self.keeps_all)):
            for position in range(max(0, query + 1 - window), length):
                logical, offset = divmod(position, size)
                assert cache[tables[number][logical]][offset] == cache[tables[group][logical]][offset], (
                    f"group {number} of row {row} has something else at {position}, seen from {query}"
                )
        for position in range(first, length):
            entry = cache[tables[group][position // size]][position % size]
            assert entry is not None, f"row {row} reads position {position}, which nobody wrote"
            assert entry[0] == position, f"row {row} reads position {entry[0]} at {position}"
            if position == first > 0:
                history = entry[2]
            assert entry[2] == history, f"position {position} of row {row} was computed from other tokens"
            history = slot_history(history, position, entry[1])
        return history

    def _result(
        self,
        plan: StepPlan,
        tokens: list[tuple[int, int]],
        ids: list[int],
        sampled: list[int],
        histories: list[int],
    ) -> StepResult:
        asked = [
            i
            for i, row in enumerate(plan.sample_rows.tolist())
            if self.candidates[row] or self.state[row][0].logprobs is not None
        ]
        prompt = []
        for run in plan.prompt_logprobs:
            for offset, target in enumerate(run.targets.tolist()):
                if (
                    run.first + offset + 1 < len(ids)
                    and tokens[run.first + offset + 1][0] == tokens[run.first][0]
                ):
                    assert ids[run.first + offset + 1] == target
            prompt.append(_logprobs(run.targets, run.k))
        tokens_out = np.array(sampled, np.int32)
        logprobs = _logprobs(tokens_out[asked], CANDIDATES) if asked else None
        for at, i in enumerate(asked):
            row = int(plan.sample_rows[i])
            assert self.candidates[row] <= CANDIDATES
            if logprobs is not None and self.candidates[row]:
                best = _candidates(histories[i], self.state[row][0].seed)
                logprobs.top_tokens[at], logprobs.top_logprobs[at] = best
        return StepResult(
            tokens_out,
            np.array(asked, np.int32),
            logprobs,
            tuple(prompt),
        )


def _logprobs(tokens: np.ndarray, k: int) -> Logprobs:
    n = len(tokens)
    top = np.tile(np.arange(k, dtype=np.int32), (n, 1))
    return Logprobs(-tokens.astype(np.float32), tokens.astype(np.int32), top, -top.astype(np.float32))

"""A model that needs no weights: its next token is a hash of every (position, token) read through the block
table, so that any lost, stale or aliased block changes the output."""

from __future__ import annotations

import numpy as np

from engine.core import Runner
from engine.plan import Logprobs, StepPlan, StepResult
from engine.request import Request, SamplingParams

VOCAB = 50
_MASK = (1 << 61) - 1


def _next_token(history: list[tuple[int, int]], params: SamplingParams, index: int) -> int:
    state = params.seed * 31 + (index if params.temperature else 0)
    for position, token in history:
        state = (state * 1_000_003 + position * 131 + token + 7) & _MASK
    return (state >> 7) % VOCAB


def expected_tokens(request: Request, index: int, eos: tuple[int, ...] = ()) -> list[int]:
    """What sequence `index` of `request` must produce, whatever the schedule was."""
    params = request.params
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    tokens = list(request.prompt)
    while len(tokens) - len(request.prompt) < params.max_tokens:
        tokens.append(_next_token(list(enumerate(tokens)), params, index))
        if tokens[-1] in stops:
            break
    return tokens[len(request.prompt) :]


class OracleFlight:
    def __init__(self, result: StepResult) -> None:
        self.result = result

    def wait(self) -> StepResult:
        return self.result


class OracleRunner(Runner):
    """Executes plans on a toy cache of (position, token) pairs, exactly in the order of the contract."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        self.block_size = block_size
        self.cache: list[list[tuple[int, int] | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.tables = np.full((max_num_seqs, num_blocks + 1), -1, np.int64)
        self.last = [0] * max_num_seqs
        self.state: dict[int, tuple[SamplingParams, int]] = {}
        self.tokens_computed = 0

    def launch(self, plan: StepPlan) -> OracleFlight:
        for start in plan.starts:
            self.state[start.row] = (start.params, start.index)
        self.tables[plan.table_rows, plan.table_columns] = plan.table_blocks
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
            block = self.tables[row, position // self.block_size]
            slot = (int(block), position % self.block_size)
            assert slot not in written, f"slot {slot} is written twice in one step"
            written.add(slot)
            self.cache[slot[0]][slot[1]] = (position, token)
        self.tokens_computed += len(tokens)
        sampled = []
        for row, index, position in zip(
            plan.sample_rows.tolist(),
            plan.sample_tokens.tolist(),
            plan.sample_positions.tolist(),
            strict=True,
        ):
            source, last_position = tokens[index]
            assert position == last_position + 1
            history = self._read(source, position)
            sampled.append(_next_token(history, *self.state[row]))
            self.last[row] = sampled[-1]
        return OracleFlight(self._result(plan, tokens, ids, sampled))

    def _read(self, row: int, length: int) -> list[tuple[int, int]]:
        history = []
        for position in range(length):
            entry = self.cache[self.tables[row, position // self.block_size]][position % self.block_size]
            assert entry is not None, f"row {row} reads position {position}, which nobody wrote"
            history.append(entry)
        return history

    def _result(
        self, plan: StepPlan, tokens: list[tuple[int, int]], ids: list[int], sampled: list[int]
    ) -> StepResult:
        asked = [
            i for i, row in enumerate(plan.sample_rows.tolist()) if self.state[row][0].logprobs is not None
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
        return StepResult(
            tokens_out,
            np.array(asked, np.int32),
            _logprobs(tokens_out[asked], 20) if asked else None,
            tuple(prompt),
        )


def _logprobs(tokens: np.ndarray, k: int) -> Logprobs:
    n = len(tokens)
    top = np.tile(np.arange(k, dtype=np.int32), (n, 1))
    return Logprobs(-tokens.astype(np.float32), tokens.astype(np.int32), top, -top.astype(np.float32))

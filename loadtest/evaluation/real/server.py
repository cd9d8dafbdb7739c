"""A real engine that serves under any of the compared memories, by the wall clock."""

from __future__ import annotations

import time

import msgspec

from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.device.runner import ModelRunner
from quire.engine.startup import start_engine
from quire.loadtest.client.sessions import Session
from quire.loadtest.simulator.recording import RecordingRunner
from quire.loadtest.simulator.serving import Run, serve
from quire.loadtest.simulator.step_costs import StepRecord
from quire.loadtest.simulator.systems import System

KEPT_STEPS = 40  # of a run, evenly spread, for the costs of steps


class WallClock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self._begin

    def __call__(self) -> float:
        return self.now

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now))


class RealServer:
    """One started model: each run has a scheduler and a block manager of its own, and the same device."""

    def __init__(self, config: EngineConfig) -> None:
        core, self.info = start_engine(config)
        assert isinstance(core.runner, ModelRunner)
        while core.capture():
            pass
        self.runner = core.runner
        self.runner.cache.blocks.zero_()  # fresh memory may hold NaN, and single steps read what none wrote
        self.records: list[StepRecord] = []  # some of the steps of the last run

    def run(self, sessions: list[Session], system: System, until: float) -> Run:
        """Serve sessions, prompts folded into the vocabulary. Raise ValueError where one needs more room."""
        self._check(system)
        folded = [_fold(session, self.info.vocab_size) for session in sessions]
        clock = WallClock()
        runner = RecordingRunner(self.runner)
        core = EngineCore(system.scheduler(self.info.vocab_size), runner, clock)
        run = serve(folded, core, system.memory(), system.slots, clock, runner, until=until)
        self.records = runner.records[:: max(1, len(runner.records) // KEPT_STEPS)]
        return run

    def _check(self, system: System) -> None:
        info = self.info
        for name, wanted, there in (
            ("blocks", system.num_blocks, info.num_blocks),
            ("host blocks", system.host_slots // system.block_size, info.num_host_blocks),
            ("sequences at once", system.max_num_seqs, info.max_num_seqs),
            ("tokens a step", system.max_num_batched_tokens, info.max_num_batched_tokens),
            ("tokens a request", system.max_model_len, info.max_model_len),
        ):
            if wanted > there:
                raise ValueError(f"{system.name} needs {wanted} {name}, and the engine has {there}")
        if system.block_size != info.block_size:
            raise ValueError(
                f"{system.name} has blocks of {system.block_size}, the engine of {info.block_size}"
            )


def _fold(session: Session, vocab_size: int) -> Session:
    """Take token ids that the vocabulary has: which they are changes no amount of work."""
    (turn,) = session.turns
    prompt = [int(token) % vocab_size for token in turn.prompt]
    return Session(turns=[msgspec.structs.replace(turn, prompt=prompt)], at=session.at)

"""A whole run on a virtual clock: the real engine core steps, and time is what steps cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quire.engine.core import EngineCore
from quire.loadtest.client.sessions import Session
from quire.loadtest.simulator.serving import Run, serve
from quire.loadtest.simulator.step_costs import StepCosts
from quire.loadtest.simulator.systems import System
from quire.loadtest.simulator.virtual_runner import CostedRunner, VirtualClock, VirtualRunner


def simulate(
    sessions: Sequence[Session],
    system: System,
    costs: StepCosts,
    *,
    until: float = math.inf,
    keep_tokens: bool = False,
) -> Run:
    """Serve sessions of one turn each, at their times. Raise ValueError for one that could never run."""
    clock = VirtualClock()
    runner = CostedRunner(VirtualRunner(system.max_num_seqs), costs, clock)
    core = EngineCore(system.scheduler(), runner, clock)
    return serve(
        sessions, core, system.memory(), system.slots, clock, runner, until=until, keep_tokens=keep_tokens
    )

"""Fig. 17: a chatbot, whose prompts are whole conversations cut to their last 1024 tokens."""

from __future__ import annotations

import random

from quire.loadtest.client.lengths import SHAREGPT, Fixed, Shape
from quire.loadtest.client.sessions import Recipe, Session, draw_sessions
from quire.loadtest.evaluation.figure import Cell, Figure
from quire.loadtest.evaluation.request_rates import latency_chart, rate_table
from quire.loadtest.evaluation.setting import Setting
from quire.loadtest.simulator.geometry import OPT_13B
from quire.loadtest.simulator.systems import NAMES, Kind

KINDS: tuple[Kind, ...] = ("paged", "oracle", "pow2", "max")
LAST_TOKENS = 1024  # of the conversation, and most of the answer (section 6.5)
MEAN_ROUNDS = 3.0  # before the request: ours, the paper does not say
RATES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.3, 2.6, 3.0)
PAPER_RATIO = 2.0  # vLLM's rate over each of the three Orcas'


def conversations(count: int, seed: int) -> list[Session]:
    """Draw sessions of one request each: the end of a conversation of some rounds, and an answer."""
    rng = random.Random(seed)
    sessions = []
    for _ in range(count):
        length = SHAREGPT.prompt.draw(rng)
        while rng.random() < MEAN_ROUNDS / (1 + MEAN_ROUNDS):
            length += SHAREGPT.prompt.draw(rng) + SHAREGPT.output.draw(rng)
        shape = Shape(Fixed(min(length, LAST_TOKENS)), Fixed(SHAREGPT.output.draw(rng)))
        (session,) = draw_sessions(Recipe(shape, 1, seed=rng.randrange(1 << 30)))
        sessions.append(session)
    return sessions


def fig17(setting: Setting) -> Figure:
    sessions = conversations(setting.count(300), setting.seed)
    systems = {kind: setting.system(kind) for kind in KINDS}
    curves = {
        kind: setting.curve(f"chatbot, {system.name}", system, sessions, *RATES)
        for kind, system in systems.items()
    }
    outcomes = setting.run_curves(curves)
    paper: dict[Kind, Cell] = {kind: PAPER_RATIO for kind in KINDS if kind != "paged"}
    return Figure(
        name="fig17",
        title="A chatbot",
        source="PagedAttention, Fig. 17; section 6.5",
        costs=setting.costs_source(OPT_13B),
        tables=[rate_table("Rate", outcomes, "paper: ratio", paper)],
        charts=[latency_chart("OPT-13B, chatbot", {NAMES[kind]: each for kind, each in outcomes.items()})],
        notes=[
            "As in the paper, nothing is kept between the rounds of a conversation.",
            f"Conversations have {MEAN_ROUNDS:g} rounds on average before the request, of ShareGPT-like "
            f"lengths; prompts are their last {LAST_TOKENS} tokens.",
        ],
    )

"""Make what a load test sends: sessions of one or more turns, drawn from a seed or read from a trace file."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from quire.loadtest.client.lengths import Recorded, Shape
from quire.loadtest.workloads import FIRST_TOKEN, LAST_TOKEN, Work

# Each is one token in most vocabularies when a space stands before it, so that a text has about as many
# tokens as words; the true number is the one that the server reports.
WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school"),
    *("state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week"),
    *("company", "system", "program", "question", "work", "number", "night", "point", "home", "water"),
    *("room", "mother", "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye"),
)


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request. In a session's later turns the prompt is what the user adds to the conversation."""

    prompt: str | list[int]
    output_len: Annotated[int, Meta(ge=1)]
    n: Annotated[int, Meta(ge=1)] = 1
    beam_width: Annotated[int, Meta(ge=0)] = 0  # 0: no beam search
    temperature: float | None = None  # None: 0 for one sample, 1 for several, which are to differ
    seed: int | None = None
    think: Annotated[float, Meta(ge=0)] = 0.0  # seconds from the answer before this one until it is due


class Session(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Turns that follow each other; the first is due `at` seconds after the start of an open loop."""

    turns: Annotated[list[Turn], Meta(min_length=1)]
    at: Annotated[float, Meta(ge=0)] = 0.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe of random sessions. Lengths are in tokens, or in words where prompts are text."""

    shape: Shape | Recorded
    count: int
    seed: int = 0
    text: bool = False  # prompts are text, not token ids
    most_token: int = LAST_TOKEN  # no token id is higher
    shared_prefix: int = 0  # this long, and the same for all, before each first prompt
    turns: int = 1
    think: float = 0.0
    n: int = 1
    beam_width: int = 0

    def __post_init__(self) -> None:
        if self.turns > 1 and not self.text:
            raise ValueError("several turns need text: the ids of the answers are not known beforehand")
        if self.most_token <= FIRST_TOKEN:
            raise ValueError(f"the highest token id must be more than {FIRST_TOKEN}, got {self.most_token}")
        if min(self.count, self.turns, self.n) < 1:
            raise ValueError("the number of requests, of turns and of samples must each be at least 1")


def draw_sessions(recipe: Recipe) -> list[Session]:
    """Draw sessions, all due at the start; the same recipe gives the same ones."""
    rng = random.Random(recipe.seed)
    prefix = _content(rng, recipe.shared_prefix, recipe)
    sessions = []
    for _ in range(recipe.count):
        turns = []
        for i in range(recipe.turns):
            lengths = recipe.shape.draw(rng)
            own = _content(rng, next(lengths), recipe)
            turns.append(
                Turn(
                    prompt=own if i else _join(prefix, own),
                    output_len=next(lengths),
                    n=recipe.n,
                    beam_width=recipe.beam_width,
                    think=recipe.think if i else 0.0,
                )
            )
        sessions.append(Session(turns=turns))
    return sessions


def from_works(works: Iterable[Work]) -> list[Session]:
    """Make a session of each request of a fixed workload, all due at the start; samples have own seeds."""
    return [
        Session(
            turns=[
                Turn(
                    prompt=work.prompt,
                    output_len=work.output_len,
                    n=work.n,
                    beam_width=work.beam_width,
                    temperature=work.temperature,
                    seed=number if work.temperature else None,
                )
            ]
        )
        for number, work in enumerate(works)
    ]


def due_at(sessions: Sequence[Session], times: Iterable[float]) -> list[Session]:
    """Return the same sessions, due at other times."""
    return [Session(turns=session.turns, at=float(at)) for session, at in zip(sessions, times, strict=True)]


def read_trace(path: Path) -> list[Session]:
    """Read a session a line. A line may also be a single turn with `at` beside its fields.

    Raise ValueError that names the line.
    """
    sessions = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            fields = msgspec.json.decode(line, type=dict[str, object])
            if "turns" not in fields:
                fields = {"at": fields.pop("at", 0.0), "turns": [fields]}
            session = msgspec.convert(fields, Session)
        except msgspec.ValidationError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        sessions.append(session)
    if not sessions:
        raise ValueError(f"{path} has no sessions")
    return sorted(sessions, key=lambda session: session.at)


def describe(recipe: Recipe) -> dict[str, object]:
    """Return plain data for a result file."""
    return dataclasses.asdict(recipe)


def _content(rng: random.Random, length: int, recipe: Recipe) -> str | list[int]:
    if recipe.text:
        return " ".join(rng.choices(WORDS, k=length))
    return [rng.randrange(FIRST_TOKEN, recipe.most_token) for _ in range(length)]


def _join(prefix: str | list[int], own: str | list[int]) -> str | list[int]:
    if isinstance(prefix, str) and isinstance(own, str):
        return f"{prefix} {own}".strip()
    assert isinstance(prefix, list) and isinstance(own, list)
    return prefix + own

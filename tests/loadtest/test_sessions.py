"""What is sent is a function of the recipe, and a trace file keeps it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.loadtest.client.lengths import Fixed, Shape
from quire.loadtest.client.sessions import (
    Recipe,
    Session,
    Turn,
    draw_sessions,
    due_at,
    from_works,
    read_trace,
)
from quire.loadtest.client.target import Target
from quire.loadtest.workloads import WORKLOADS

turns = st.builds(
    Turn,
    prompt=st.text(max_size=20) | st.lists(st.integers(0, 9)),
    output_len=st.integers(1, 9),
    n=st.integers(1, 4),
    beam_width=st.integers(0, 4),
    temperature=st.none() | st.floats(0, 2),
    seed=st.none() | st.integers(0, 9),
    think=st.floats(0, 9),
)
sessions = st.builds(Session, turns=st.lists(turns, min_size=1, max_size=3), at=st.floats(0, 100))


@given(st.lists(sessions, min_size=1, max_size=5))
def test_a_trace_comes_back_in_order_of_time(
    tmp_path_factory: pytest.TempPathFactory, given_: list[Session]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_bytes(b"\n".join(msgspec.json.encode(session) for session in given_))
    assert read_trace(path) == sorted(given_, key=lambda session: session.at)


def test_a_line_of_a_trace_may_be_one_turn(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at": 2.5, "prompt": "hello", "output_len": 4}\n\n{"prompt": [1, 2], "output_len": 1}\n'
    )
    assert read_trace(path) == [
        Session(turns=[Turn(prompt=[1, 2], output_len=1)]),
        Session(turns=[Turn(prompt="hello", output_len=4)], at=2.5),
    ]


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a"}',
        '{"prompt": "a", "output_len": 1, "nn": 2}',
        "{",
        "3",
        '{"prompt": "a", "output_len": 1, "at": -3}',
        '{"prompt": "a", "output_len": 0}',
        '{"prompt": "a", "output_len": 1, "n": 0}',
        '{"prompt": "a", "output_len": 1, "beam_width": -1}',
        '{"turns": [{"prompt": "a", "output_len": 1}, {"prompt": "b", "output_len": 1, "think": -1}]}',
        '{"turns": []}',
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": "a", "output_len": 4}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        read_trace(path)


@given(
    count=st.integers(1, 5),
    turns=st.integers(1, 3),
    prefix=st.integers(0, 20),
    text=st.booleans(),
    seed=st.integers(),
)
def test_a_recipe_says_all(count: int, turns: int, prefix: int, text: bool, seed: int) -> None:
    text = text or turns > 1
    recipe = Recipe(Shape(Fixed(7), Fixed(3)), count, seed, text=text, shared_prefix=prefix, turns=turns)
    drawn = draw_sessions(recipe)
    assert drawn == draw_sessions(recipe)
    assert len(drawn) == count and all(len(session.turns) == turns for session in drawn)
    prompts = [
        [turn.prompt.split() if isinstance(turn.prompt, str) else turn.prompt for turn in session.turns]
        for session in drawn
    ]
    for first, *others in prompts:
        assert len(first) == prefix + 7 and first[:prefix] == prompts[0][0][:prefix]
        assert all(len(other) == 7 for other in others)
    timed = due_at(drawn, range(count))
    assert [session.at for session in timed] == list(range(count))
    assert [session.turns for session in timed] == [session.turns for session in drawn]


def test_turns_of_token_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="need text"):
        Recipe(Shape(Fixed(7), Fixed(3)), 1, turns=2)


@pytest.mark.parametrize("name", ["mixed", "parallel8", "beam4", "beam6"])
def test_a_workload_is_sent_as_it_says(name: str) -> None:
    target = Target(base_url="http://h", model="m")
    works = WORKLOADS[name]()[:3]
    bodies = [msgspec.json.decode(target.body(session.turns[0], [])) for session in from_works(works)]
    for number, (work, body) in enumerate(zip(works, bodies, strict=True)):
        assert (body["prompt"], body["max_tokens"], body.get("n", 1)) == (
            work.prompt,
            work.output_len,
            work.n,
        )
        assert body.get("use_beam_search", False) == bool(work.beam_width)
        assert body.get("best_of", 0) == work.beam_width
        assert body.get("temperature", 0.0) == work.temperature
        assert body.get("seed") == (number if work.temperature else None)

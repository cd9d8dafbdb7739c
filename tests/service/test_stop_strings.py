"""Stop strings are found wherever deltas are cut, and no part of one gets out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.service.text.stop_strings import StopMatcher

words = st.text(alphabet="abc", min_size=1, max_size=4)


def reference(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Character by character: the first end of a stop string decides."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(st.lists(words, min_size=1, max_size=4), st.lists(st.text(alphabet="abc", max_size=5), max_size=8))
def test_result_is_that_of_the_whole_text(stops: list[str], deltas: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    shown = ""
    for at, delta in enumerate(deltas):
        shown += matcher.push(delta)
        text, stop = reference("".join(deltas[: at + 1]), tuple(stops))
        assert text.startswith(shown)
        held = text[len(shown) :]
        if stop is None and held:  # only what may still become a stop string is held
            assert any(candidate.startswith(held) for candidate in stops)
        assert matcher.matched == stop
    text, _ = reference("".join(deltas), tuple(stops))
    assert shown + matcher.finish() == text


def test_nothing_is_held_without_reason() -> None:
    matcher = StopMatcher(("\n\nUser:",))
    assert matcher.push("hello\n") == "hello"
    assert matcher.push("you") == "\nyou"
    assert matcher.push("\n\nUse") == ""
    assert matcher.push("r: x") == ""
    assert matcher.matched == "\n\nUser:"
    assert matcher.push("more") == ""

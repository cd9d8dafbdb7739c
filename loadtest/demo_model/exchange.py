"""One question and its answer, and the small tools with which all generators vary their wording."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "knowledge"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A user's message and the assistant's answer.

    `kind` names the generator. A right answer contains `key`, whatever its case. The wording of an
    `exact` message must not be disturbed, because its answer repeats or measures it.
    """

    user: str
    assistant: str
    kind: str
    key: str = ""
    exact: bool = False


Thread = list[Exchange]  # exchanges that belong together, in order
Generator = Callable[[random.Random], Thread]


@cache
def say(module: str) -> dict[str, tuple[str, ...]]:
    """Return the phrases of a module, from knowledge/phrases.toml."""
    sections = tomllib.loads((FOLDER / "phrases.toml").read_text(encoding="utf-8"))
    return {name: tuple(phrases) for name, phrases in sections[module].items()}


def fill(rng: random.Random, templates: Sequence[str], **slots: str) -> str:
    """Fill the slots of one of the templates."""
    return rng.choice(templates).format(**slots)


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def join(items: Sequence[str]) -> str:
    """Return 'a, b and c'."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def typo(rng: random.Random, text: str) -> str:
    """Return `text` with one letter lost, doubled, or swapped with its neighbour."""
    places = [i for i in range(1, len(text) - 1) if text[i].isalpha() and text[i + 1].isalpha()]
    if not places:
        return text
    i = rng.choice(places)
    kind = rng.randrange(3)
    middle = ("", text[i] * 2, text[i + 1] + text[i])[kind]
    return text[:i] + middle + text[i + (2 if kind == 2 else 1) :]


def as_typed(rng: random.Random, text: str) -> str:
    """Return `text` as people type it: with greetings, without capitals or punctuation, with slips."""
    if rng.random() < 0.12:
        opening = rng.choice(say("exchange")["openings"])
        keep = text[:2].isupper() or text.startswith(("I ", "I'", "Quire"))
        text = opening + (text if keep or opening.endswith(("! ", ". ")) else text[:1].lower() + text[1:])
    if rng.random() < 0.08 and text[-1:] in ".?!":
        text += rng.choice(say("exchange")["closings"])
    if rng.random() < 0.25:
        text = text.lower()
    if rng.random() < 0.25:
        text = text.rstrip(".?!")
    if rng.random() < 0.08 and len(text) > 12:
        text = typo(rng, text)
    return text

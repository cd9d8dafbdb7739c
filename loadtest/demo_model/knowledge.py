"""Questions and answers about Quire and the KV cache, from the topics in knowledge/*.toml.

A topic has `names` (with article), answers to what it is, how it works and why it is good (`what`, `how`,
`why`: variants of one answer each), single facts (`more`), words that belong in an answer (`keys`), and
questions of its own (`ask`: variants `q`, answers `a`, `key`).
"""

from __future__ import annotations

import random
import tomllib
from functools import cache
from typing import Any

from quire.loadtest.demo_model.exchange import FOLDER, Exchange, Thread, capital, fill, say

_SAY = say("knowledge")


@cache
def topics() -> tuple[dict[str, Any], ...]:
    files = ("cache", "engine", "sampling", "server")
    return tuple(t for name in files for t in tomllib.loads((FOLDER / f"{name}.toml").read_text())["topic"])


@cache
def _single_topics() -> tuple[dict[str, Any], ...]:
    """Return topics that can be compared with one another."""
    named = [t for t in topics() if t["more"] and not t.get("plural")]
    return tuple(t for t in named if not t["names"][0].startswith("the difference"))


@cache
def flags_and_metrics() -> dict[str, dict[str, str]]:
    return tomllib.loads((FOLDER / "flags.toml").read_text())


@cache
def intents() -> tuple[dict[str, Any], ...]:
    return tuple(tomllib.loads((FOLDER / "smalltalk.toml").read_text())["intent"])


def _question(rng: random.Random, frames: tuple[str, ...], topic: dict[str, Any], name: str) -> str:
    plural_noun = (
        name.endswith("s")
        and not name.startswith(("/", "--", "a ", "an "))
        and name not in _SAY["singular_in_s"]
    )
    many = topic.get("plural", False) or plural_noun
    slots = (
        {"be": "are", "does": "do", "s": "", "es": ""}
        if many
        else {"be": "is", "does": "does", "s": "s", "es": "es"}
    )
    return fill(rng, frames, n=name, N=capital(name), **slots)


def _key(topic: dict[str, Any]) -> str:
    return str(topic["keys"][0])


def explain(rng: random.Random) -> Thread:
    """Ask what, how or why about a topic, and perhaps a few questions that follow up."""
    topic = rng.choice(topics())
    name = rng.choice(topic["names"][:1] * 2 + topic["names"])
    what, how, why = (rng.choice(topic[field]) for field in ("what", "how", "why"))
    more: list[str] = list(topic["more"])
    first = rng.random()
    key = _key(topic)
    thread: Thread = []
    told: set[str] = set()
    if first < 0.44:
        facts = more[: rng.choice((0, 1, 1, 2))]
        more = more[len(facts) :]
        thread.append(
            Exchange(_question(rng, _SAY["what"], topic, name), " ".join([what, *facts]), "explain", key)
        )
        told.add("what")
    elif first < 0.58:
        thread.append(Exchange(_question(rng, _SAY["how"], topic, name), how, "explain"))
        told.add("how")
    elif first < 0.72:
        thread.append(Exchange(_question(rng, _SAY["why"], topic, name), why, "explain"))
        told.add("why")
    elif first < 0.80:
        brief = what.split(". ")[0].rstrip(".") + "."
        thread.append(Exchange(_question(rng, _SAY["brief"], topic, name), brief, "explain"))
        told.add("what")
    elif first < 0.84:
        answer = (
            "In simple words: " + what[:1].lower() + what[1:]
            if what[:4] in ("The ", "A bl", "With")
            else what
        )
        thread.append(Exchange(_question(rng, _SAY["simple"], topic, name), answer, "explain", key))
        told.add("what")
    else:
        parts = [what, how, why, *more]
        more = []
        thread.append(Exchange(_question(rng, _SAY["long"], topic, name), " ".join(parts), "explain", key))
        told |= {"what", "how", "why"}
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        turn = rng.random()
        if turn < 0.35 and "how" not in told:
            thread.append(Exchange(rng.choice(_SAY["then_how"]), how, "follow"))
            told.add("how")
        elif turn < 0.6 and "why" not in told:
            thread.append(Exchange(rng.choice(_SAY["then_why"]), why, "follow"))
            told.add("why")
        elif more:
            facts, more = more[:2], more[2:]
            thread.append(Exchange(rng.choice(_SAY["more"]), " ".join(facts), "follow"))
        elif told >= {"what", "how", "why"}:
            thread.append(Exchange(rng.choice(_SAY["more"]), rng.choice(_SAY["done"]), "follow"))
    return thread


def ask(rng: random.Random) -> Thread:
    """Ask a question of a topic's own."""
    if rng.random() < 0.03:
        port = str(rng.randint(80, 65000))
        answer = f"Use make serve PORT={port} or quire serve --port {port}."
        return [Exchange(fill(rng, _SAY["port"], n=port), answer, "ask", f"--port {port}", exact=True)]
    question = rng.choice([q for topic in topics() for q in topic.get("ask", ())])
    return [Exchange(rng.choice(question["q"]), rng.choice(question["a"]), "ask", question["key"])]


def compare(rng: random.Random) -> Thread:
    """Compare two topics."""
    a, b = rng.sample(_single_topics(), 2)
    name_a, name_b = a["names"][0], b["names"][0]
    slots = {"a": name_a, "b": name_b, "A": capital(name_a), "does": "does"}
    answer = f"{a['what'][0]} {b['what'][0]}"
    return [Exchange(fill(rng, _SAY["between"], **slots), answer, "compare", _key(b))]


def setting(rng: random.Random) -> Thread:
    """Ask for a flag or a metric by name, or for its name by what it does."""
    word = rng.choice(("flag", "metric"))
    name, does = rng.choice(list(flags_and_metrics()[f"{word}s"].items()))
    if rng.random() < 0.65:
        answer = fill(rng, ("{n} {d}.", "The {w} {n} {d}.", "{n} {d}."), n=name, d=does, w=word)
        return [Exchange(fill(rng, _SAY[word], n=name), answer, "setting", does.split(". ")[0])]
    short = does.split(". ")[0].split(":")[0]
    answer = fill(rng, ("{n} {d}.", "The {w} {n} {d}.", "It is {n}."), n=name, d=short, w=word)
    return [Exchange(fill(rng, _SAY[f"which_{word}"], d=short), answer, "setting", name)]


def _mood(rng: random.Random) -> Exchange:
    """Say how somebody feels."""
    good = rng.random() < 0.4
    moods = (
        "happy|great|wonderful|good|excited|cheerful"
        if good
        else "sad|tired|bad|lonely|sick|worried|angry|stressed|unhappy|nervous|afraid"
    )
    degree = rng.choice(("", "", "so ", "very ", "a bit ", "a little ", "really "))
    mood, when = rng.choice(moods.split("|")), rng.choice(("", "", " today", " right now"))
    user = fill(rng, _SAY["mood"], a=degree, m=mood, t=when)
    answer = rng.choice(_SAY["glad" if good else "sorry"])
    return Exchange(user, answer, "smalltalk", "hear" if good else "")


def small_talk(rng: random.Random) -> Thread:
    """Exchange greetings, thanks, who are you, jokes."""
    if rng.random() < 0.06:
        return [_mood(rng)]
    intent = rng.choice(intents()[:40] * 2 + intents())
    return [Exchange(rng.choice(intent["q"]), rng.choice(intent["a"]), "smalltalk", intent["key"])]


def paragraph(rng: random.Random) -> str:
    """Return plain text about a topic, without a question."""
    topic = rng.choice([t for t in topics() if t["more"]])
    parts = [rng.choice(topic[field]) for field in ("what", "how", "why")]
    return " ".join([*parts, *topic["more"]])

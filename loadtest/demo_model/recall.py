"""Copying from the conversation: repeating words, and remembering what was told."""

from __future__ import annotations

import random

from quire.loadtest.demo_model.exchange import Exchange, Thread, capital, fill, say
from quire.loadtest.demo_model.words import any_word, invented, lists

_SAY = say("recall")


def repeat(rng: random.Random) -> Thread:
    """Say it after me."""
    count = rng.choice((1, 1, 2, 3, 3, 4, 5, 6, 8, 10, 12))
    words = [any_word(rng) if rng.random() > 0.08 else str(rng.randint(0, 999)) for _ in range(count)]
    text = " ".join(words)
    style = rng.random()
    if style < 0.3:
        text = capital(text)
    if style < 0.15:
        text += rng.choice(".!")
    frame = rng.choice(_SAY["repeat"])
    if frame.endswith("?"):
        text = text.rstrip(".!")
    return [Exchange(frame.format(t=text), text, "repeat", text, exact=True)]


def memory(rng: random.Random) -> Thread:
    """Tell something early in a conversation and ask for it later (the corpus puts other turns between)."""
    kind = rng.choice(("name", "name", "name", "thing", "said", "unknown"))
    if kind == "name":
        name = rng.choice(lists()["parts"]["names"]) if rng.random() < 0.7 else capital(invented(rng))
        told, hello = fill(rng, _SAY["my_name"], n=name), fill(rng, _SAY["greet_name"], n=name)
        asked = rng.choice(_SAY["ask_name"])
        answer = rng.choice((f"Your name is {name}.", f"You are {name}."))
        return [
            Exchange(told, hello, "memory", name, exact=True),
            Exchange(asked, answer, "memory", name),
        ]
    if kind == "thing":
        what, value = rng.choice(
            (
                ("colour", rng.choice(lists()["categories"]["colours"].split())),
                ("number", str(rng.randint(1, 100))),
                ("animal", "the " + rng.choice(_SAY["animals"])),
                ("word", any_word(rng)),
                ("city", rng.choice(list(lists()["capitals"].values())).rstrip(".")),
            )
        )
        told, noted = (fill(rng, _SAY[name], w=what, v=value) for name in ("my_favourite", "noted"))
        asked = fill(rng, _SAY["ask_favourite"], w=what)
        return [
            Exchange(told, noted, "memory", value, exact=True),
            Exchange(asked, f"Your favourite {what} is {value}.", "memory", value, exact=True),
        ]
    if kind == "said":
        text = capital(" ".join(any_word(rng) for _ in range(rng.randint(2, 4)))) + "."
        return [
            Exchange(text, rng.choice(_SAY["puzzled"]), "memory", exact=True),
            Exchange(rng.choice(_SAY["what_i_said"]), f'You said: "{text}"', "memory-now", text, exact=True),
        ]
    asked = rng.choice(_SAY["ask_unknown_name"])
    return [Exchange(asked, rng.choice(_SAY["no_name"]), "memory", "not told", exact=True)]

"""Simple facts about the world: capitals, colours, animals."""

from __future__ import annotations

import random

from quire.loadtest.demo_model.exchange import Exchange, Thread, article, capital, fill, say
from quire.loadtest.demo_model.words import lists

_SAY = say("world")


# Where words.toml lists what is asked for, and the kind of the exchange.
_LISTS = {
    "capital": ("capitals", "capital"),
    "country": ("capitals", "capital"),
    "colour": ("colour_of", "colour"),
    "sound": ("sounds", "animal"),
    "legs": ("legs", "animal"),
    "home": ("homes", "animal"),
    "young": ("young", "animal"),
}


def world(rng: random.Random) -> Thread:
    """Ask for colours, animals, capitals."""
    kind = rng.choice(("capital", *_LISTS))
    listed_as, about = _LISTS[kind]
    name, key = rng.choice(list(lists()[listed_as].items()))
    name = asked = name.replace("_", " ")
    if kind not in ("capital", "country", "young"):
        asked = f"{article(name)} {name}"
    if kind == "capital":
        key = key.rstrip(".")
        answer = f"The capital of {name} is {key}."
    elif kind == "country":
        asked, key = key, next(c for c, city in lists()["capitals"].items() if city == key)
        answer = f"{asked} is the capital of {key}."
    elif kind == "colour":
        if name in ("sky", "sun", "sea"):
            asked = f"the {name}"
        elif name in ("grass", "snow", "coal", "milk", "blood", "chocolate"):
            asked = name
        answer = f"{capital(asked)} is {key}."
    elif kind == "sound":
        answer = f"{capital(asked)} {key}."
    elif kind == "legs":
        key = f"{key or 'no'} legs"
        answer = f"{capital(asked)} has {key}."
    elif kind == "home":
        answer = f"{capital(asked)} lives in {key}."
    else:
        answer = f"A young {name} is called a {key}."
    return [Exchange(fill(rng, _SAY[kind], x=asked, a=article(name)), answer, about, key)]

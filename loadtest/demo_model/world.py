"""Simple facts about the world: capitals, colours, animals."""

from __future__ import annotations

import random

from quire.loadtest.demo_model.exchange import Exchange, Thread, capital, fill, say
from quire.loadtest.demo_model.words import lists

_SAY = say("world")


def world(rng: random.Random) -> Thread:
    """Ask for colours, animals, capitals."""
    kind = rng.choice(("capital", "capital", "country", "colour", "sound", "legs", "home", "young"))
    if kind in ("capital", "country"):
        country, city = rng.choice(list(lists()["capitals"].items()))
        if kind == "capital":
            frames = _SAY["capital"]
            return [
                Exchange(
                    fill(rng, frames, x=country),
                    f"The capital of {country} is {city.rstrip('.')}.",
                    "capital",
                    city.rstrip("."),
                )
            ]
        frames = _SAY["country"]
        countries = [c for c, name in lists()["capitals"].items() if name == city]
        return [
            Exchange(
                fill(rng, frames, x=city),
                f"{city} is the capital of {countries[0]}.",
                "capital",
                countries[0],
            )
        ]
    if kind == "colour":
        thing, colour = rng.choice(list(lists()["colour_of"].items()))
        article = "an" if thing[0] in "aeiou" else "a"
        if thing in ("sky", "sun", "sea"):
            article = "the"
        name = (
            thing
            if thing in ("grass", "snow", "coal", "milk", "blood", "chocolate")
            else f"{article} {thing}"
        )
        frames = _SAY["colour"]
        return [Exchange(fill(rng, frames, x=name), f"{capital(name)} is {colour}.", "colour", colour)]
    if kind == "sound":
        animal, sound = rng.choice(list(lists()["sounds"].items()))
        article = "an" if animal[0] in "aeiou" else "a"
        frames = _SAY["sound"]
        return [
            Exchange(
                fill(rng, frames, x=f"{article} {animal}"),
                f"{capital(article)} {animal} {sound}.",
                "animal",
                sound,
            )
        ]
    if kind == "legs":
        animal, legs = rng.choice(list(lists()["legs"].items()))
        article = "an" if animal[0] in "aeo" else "a"
        frames = _SAY["legs"]
        count = str(legs) if legs else "no"
        return [
            Exchange(
                fill(rng, frames, x=f"{article} {animal}"),
                f"{capital(article)} {animal} has {count} legs.",
                "animal",
                f"{count} legs",
            )
        ]
    if kind == "home":
        animal, home = rng.choice(list(lists()["homes"].items()))
        animal = animal.replace("_", " ")
        article = "an" if animal[0] in "aeiou" else "a"
        frames = _SAY["home"]
        return [
            Exchange(
                fill(rng, frames, x=f"{article} {animal}"),
                f"{capital(article)} {animal} lives in {home}.",
                "animal",
                home,
            )
        ]
    animal, young = rng.choice(list(lists()["young"].items()))
    article = "an" if animal[0] in "aeiou" else "a"
    frames = _SAY["young"]
    return [
        Exchange(
            fill(rng, frames, x=animal, a=article), f"A young {animal} is called a {young}.", "animal", young
        )
    ]

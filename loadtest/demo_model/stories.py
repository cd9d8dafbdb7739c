"""Short stories and poems from a small grammar."""

from __future__ import annotations

import random
import tomllib
from dataclasses import dataclass
from functools import cache
from typing import Any

from quire.loadtest.demo_model.exchange import FOLDER, Exchange, Thread, article, capital, fill, say
from quire.loadtest.demo_model.words import any_word, invented, vocabulary

_SAY = say("stories")


@cache
def parts() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "stories.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class _Cast:
    hero: str
    adjective: str
    name: str
    place: str
    female: bool


def _cast(rng: random.Random) -> _Cast:
    hero = (
        rng.choice(list(parts()["heroes"]))
        if rng.random() < 0.8
        else rng.choice((rng.choice(vocabulary()[:330]), invented(rng)))
    )
    female = hero in ("girl", "princess") or (hero not in ("boy", "king") and rng.random() < 0.5)
    adjective = (
        parts()["heroes"][hero]
        if hero in parts()["heroes"] and rng.random() < 0.5
        else rng.choice(parts()["adjectives"])
    )
    return _Cast(
        hero,
        adjective,
        rng.choice(parts()["names"]["she" if female else "he"]),
        rng.choice(list(parts()["places"])),
        female,
    )


def tell(rng: random.Random, cast: _Cast) -> str:
    """Tell a story of about a hundred words with this cast."""
    friend, friend2 = rng.sample(parts()["friends"], 2)
    slots = {
        "n": cast.name,
        "N": cast.name,
        "hero": cast.hero,
        "adj": cast.adjective,
        "a": article(cast.adjective),
        "at": parts()["places"][cast.place],
        "p": "she" if cast.female else "he",
        "P": "She" if cast.female else "He",
        "o": "her" if cast.female else "him",
        "d": "her" if cast.female else "his",
        "friend": friend,
        "friend2": friend2,
        "thing": rng.choice(parts()["treasures"]),
        "fp": "a wise" if "old" in friend else "a small",
    }
    sentences = [fill(rng, parts()["openings"], **slots)]
    for variants in rng.choice(parts()["plots"]):
        sentence = fill(rng, variants, **slots)
        sentences.append(capital(sentence))
        if friend in sentence:  # once introduced, a friend is no stranger
            slots["friend"] = "the" + friend[friend.index(" ") :]
    sentences.append(capital(fill(rng, parts()["morals"], **slots)))
    return " ".join(sentences)


def plain_story(rng: random.Random) -> str:
    return tell(rng, _cast(rng))


def story(rng: random.Random) -> Thread:
    """Tell a story, about nothing in particular or about what was asked for."""
    cast = _cast(rng)
    style = rng.random()
    if style < 0.3:
        question = rng.choice(_SAY["ask_any"])
    elif style < 0.75:
        described = cast.hero if rng.random() < 0.6 else f"{cast.adjective} {cast.hero}"
        question = fill(rng, _SAY["ask_hero"], a=article(described), h=described)
        ends = question[-1] if question[-1] in ".?" else ""
        tail = rng.random()
        if tail < 0.25:
            question = (
                question.rstrip(".?") + f" called {cast.name}" + ends
                if "please" not in question and " in a story" not in question
                else question
            )
        elif tail < 0.4 and "please" not in question and " in a story" not in question:
            question = question.rstrip(".?") + f" {parts()['places'][cast.place]}" + ends
    elif style < 0.85:
        question = fill(rng, _SAY["story_about"], n=cast.name)
    else:
        question = fill(rng, _SAY["story_happens"], w=parts()["places"][cast.place])
    key = next((k for k in (cast.name, cast.hero) if k in question), "")
    thread = [Exchange(question, tell(rng, cast), "story", key)]
    if rng.random() < 0.15:
        thread.append(Exchange(rng.choice(_SAY["another_one"]), plain_story(rng), "story"))
    return thread


@cache
def _known_subjects() -> tuple[str, ...]:
    return (*parts()["couplets"], *(name for names in parts()["also"].values() for name in names))


def verses(rng: random.Random, subject: str) -> str:
    """Return a poem of two to four couplets; the first couplet opens it."""
    couplets = parts()["couplets"][subject]
    count = rng.choice((2, 3, 4, 4))
    chosen = sorted(rng.sample(range(1, len(couplets)), min(count, len(couplets)) - 1))
    return "\n".join([couplets[0], *(couplets[i] for i in chosen)])


def poem(rng: random.Random) -> Thread:
    """Ask for a poem about a subject it knows, or about another one."""
    subject = rng.choice(list(parts()["couplets"]))
    text = verses(rng, subject)
    style = rng.random()
    if style < 0.25:
        return [Exchange(rng.choice(_SAY["ask_any_poem"]), text, "poem")]
    if style < 0.35:
        haiku = rng.choice(parts()["haiku"])
        return [Exchange(rng.choice(_SAY["ask_haiku"]), haiku, "poem")]
    if style < 0.80:
        bare = subject.split(" ", 1)[-1]
        bare = rng.choice(parts()["also"].get(subject, (bare,)))
        asked = rng.choice((subject, subject, bare, f"my {bare}" if subject.startswith("a ") else subject))
        return [Exchange(fill(rng, _SAY["ask_poem"], t=asked), text, "poem", text.split("\n", maxsplit=1)[0])]
    word = any_word(rng)
    if rng.random() < 0.6 and not any(word in known for known in _known_subjects()):
        asked = rng.choice((word, f"the {word}", f"{article(word)} {word}"))
    else:
        asked = rng.choice(_SAY["other_subjects"])
    question = fill(rng, _SAY["ask_poem"], t=asked)
    answer = fill(rng, _SAY["no_poem"], t=asked.replace("my ", "your "), u=subject, v=text)
    return [Exchange(question, answer, "poem", asked.replace("my ", ""))]

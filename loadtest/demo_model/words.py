"""Word games with the lists in knowledge/words.toml."""

from __future__ import annotations

import random
import tomllib
from functools import cache
from typing import Any

from quire.loadtest.demo_model.exchange import FOLDER, Exchange, Thread, capital, fill, join, say

_SAY = say("words")

_QUOTES = ("{}", "{}", "{}", '"{}"', "'{}'", "the word {}", 'the word "{}"')


@cache
def lists() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "words.toml").read_text())


@cache
def vocabulary() -> tuple[str, ...]:
    return tuple(dict.fromkeys(lists()["words"].split()))


def invented(rng: random.Random) -> str:
    """Return a word that does not exist."""
    if rng.random() < 0.4:
        return "".join(
            rng.choice(lists()["parts"]["syllables"]) for _ in range(rng.randint(2, 4))
        ) + rng.choice(("", "", "n", "r", "s", "k"))
    parts = (
        rng.choice(lists()["parts"]["onsets"])
        + rng.choice(lists()["parts"]["vowels"])
        + rng.choice(lists()["parts"]["codas"])
        for _ in range(rng.randint(1, 3))
    )
    return "".join(parts) + rng.choice(lists()["parts"]["endings"])


def any_word(rng: random.Random) -> str:
    return invented(rng) if rng.random() < 0.3 else rng.choice(vocabulary())


def spelling(rng: random.Random) -> Thread:
    """Ask for spelling, turning around, first and last letter, number of letters."""
    word = any_word(rng)
    if len(word) > 8:
        word = rng.choice(vocabulary())
    quoted = rng.choice(_QUOTES).format(word)
    kind = rng.choice(("spell", "spell", "reverse", "first", "last", "length", "upper", "letter"))
    if kind == "spell":
        frames = _SAY["spell"]
        key = "-".join(word.upper())
        answer = fill(rng, ("{w} is spelled {k}.", "{w} is spelled {k}."), w=capital(word), k=key)
    elif kind == "reverse":
        if len(word) > 6:
            word = rng.choice([w for w in vocabulary() if len(w) <= 5])
            quoted = rng.choice(_QUOTES).format(word)
        frames = _SAY["reverse"]
        key = word[::-1]
        answer = f"{capital(word)} is {'-'.join(word.upper())}, and backwards that is {key}."
    elif kind == "first":
        frames = _SAY["first_letter"]
        key = word[0].upper()
        answer = f"The first letter of {word} is {key}."
    elif kind == "last":
        frames = _SAY["last_letter"]
        key = word[-1].upper()
        answer = f"The last letter of {word} is {key}."
    elif kind == "length":
        frames = _SAY["length"]
        key = f"{len(word)} letters"
        answer = f"{capital(word)} is {'-'.join(word.upper())}: it has {key}."
    elif kind == "upper":
        frames = _SAY["upper"]
        key = word.upper()
        answer = key
    else:
        letter = rng.choice("abcdefghilmnoprstw")
        found = [w for w in vocabulary() if w[0] == letter]
        word = rng.choice(found)
        quoted = letter.upper()
        frames = _SAY["starts_with"]
        key = ""
        answer = f"{capital(word)} starts with {letter.upper()}."
    return [Exchange(fill(rng, frames, q=quoted), answer, "spelling", key, exact=True)]


def _asked(rng: random.Random, frames: str, word: str) -> str:
    return fill(rng, _SAY[frames], q=rng.choice(_QUOTES).format(word), w=word)


def rhyme(rng: random.Random) -> Thread:
    """Ask for rhymes, opposites, plurals."""
    kind = rng.choice(("rhyme", "rhyme", "opposite", "opposite", "plural"))
    if kind == "rhyme":
        family = rng.choice(lists()["rhymes"]["families"]).split()
        word = rng.choice(family)
        found = rng.sample([w for w in family if w != word], min(3, len(family) - 1))
        answer = f"{capital(join(found))} rhyme{'s' if len(found) == 1 else ''} with {word}."
        return [Exchange(_asked(rng, "rhymes_with", word), answer, "rhyme", "with " + word)]
    if kind == "opposite":
        pairs: dict[str, str] = lists()["opposites"]
        both = {**{b: a for a, b in pairs.items()}, **pairs}
        word = rng.choice(list(both))
        answer = f"The opposite of {word} is {both[word]}."
        return [Exchange(_asked(rng, "opposite", word), answer, "opposite", f"is {both[word]}.")]
    special: dict[str, str] = lists()["plurals"]
    if rng.random() < 0.7:
        word, many = rng.choice(list(special.items()))
    else:
        word = rng.choice(_SAY["plural_in_s"])
        many = word + "s"
    answer = f"The plural of {word} is {many}."
    return [Exchange(_asked(rng, "plural", word), answer, "plural", f"is {many}.")]


def listing(rng: random.Random) -> Thread:
    """Ask for some members of a category."""
    name, members = rng.choice(list(lists()["categories"].items()))
    items = members.split()
    count = rng.randint(2, min(7, len(items)))
    words = ("two", "three", "four", "five", "six", "seven")
    number = words[count - 2] if rng.random() < 0.6 else str(count)
    chosen = rng.sample(items, count)
    question = capital(fill(rng, _SAY["list_some"], k=number, c=name))
    if "list" in question.lower():
        answer = "\n".join(f"{i}. {capital(item)}" for i, item in enumerate(chosen, 1))
    else:
        answer = capital(join(chosen)) + "."
    return [Exchange(question, answer, "list")]

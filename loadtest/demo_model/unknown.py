"""Questions beyond the demo model's knowledge, and how it says so."""

from __future__ import annotations

import random

from quire.loadtest.demo_model.exchange import Exchange, Thread, article, fill, say
from quire.loadtest.demo_model.words import invented, lists, vocabulary

_SAY = say("unknown")

_BEYOND = [w for w in vocabulary() if w not in _SAY["taught"]]
_NOUNS = [w for w in vocabulary()[:330] if w not in _SAY["taught"]]


def _gap(rng: random.Random) -> Exchange:
    """Ask a question of a kind that it knows, about something that is not in its lists."""
    word = invented(rng)
    noun = rng.choice(_NOUNS)
    noun = f"{article(noun)} {noun}"
    questions = (
        (
            _SAY["capital"],
            "I do not know the capital of {x}.",
            rng.choice((word.capitalize(), *_SAY["far_countries"])),
        ),
        (_SAY["rhymes_with"], "I know no rhyme for {x}.", word),
        (_SAY["opposite"], "I know no opposite of {x}.", rng.choice((word, noun))),
        (
            ("What sound does {x} make?", "What does {x} say?"),
            "I do not know what sound {x} makes.",
            rng.choice((noun, "a " + word)),
        ),
        (
            ("What colour is {x}?", "What color is {x}?"),
            "I do not know what colour {x} has.",
            "my " + noun.split()[1],
        ),
        (
            ("What does the flag --{x} do?", "What does --{x} do?", "Explain --{x}."),
            "I know no flag called --{x}.",
            word,
        ),
        (("What does quire {x} do?", "Explain quire {x}."), "I know no command called quire {x}.", word),
    )
    frames, answer, subject = rng.choice(questions)
    return Exchange(fill(rng, frames, x=subject), answer.format(x=subject), "unknown", subject, exact=True)


def unknown(rng: random.Random) -> Thread:
    """Ask for something that it was not taught."""
    style = rng.random()
    if style < 0.25:
        subject = rng.choice(_SAY["things"])
        answer = fill(rng, _SAY["cannot_about"] if rng.random() < 0.7 else _SAY["cannot"], s=subject)
        return [Exchange(fill(rng, _SAY["about"], s=subject), answer, "unknown", "tiny")]
    if style < 0.35:
        noun = rng.choice(_NOUNS) if rng.random() < 0.8 else invented(rng)
        question = fill(rng, _SAY["noun"], a=article(noun), w=noun)
        subject = f"the {noun}" if f"the {noun}" in question else f"{article(noun)} {noun}"
        return [Exchange(question, fill(rng, _SAY["cannot_about"], s=subject), "unknown", noun)]
    if style < 0.43:
        question = rng.choice(_SAY["tasks"]).format(t=rng.choice(_SAY["does"]))
        return [Exchange(question, rng.choice(_SAY["cannot_task"]), "unknown", "tiny")]
    if style < 0.53:
        sign = rng.choice((" + ", " - ", " * ", " times ", " / ", " plus ", " minus ", " divided by "))
        a, b = rng.choice((rng.randint(145, 999), rng.randint(1000, 99999))), rng.randint(2, 999)
        question = fill(rng, _SAY["large_sum"], x=f"{a}{sign}{b}")
        return [Exchange(question, rng.choice(_SAY["too_large"]), "unknown", exact=True)]
    if style < 0.60:
        return [_gap(rng)]
    city = rng.choice(list(lists()["capitals"].values())).rstrip(".")
    question = fill(
        rng,
        _SAY["any"],
        w=rng.choice(_BEYOND),
        v=rng.choice(_BEYOND),
        c=city,
        s=rng.choice(_SAY["things"]),
        p=rng.choice(_SAY["people"]),
        i=invented(rng),
        n=str(rng.randint(2, 999)),
        m=str(rng.randint(2, 999)),
    )
    return [Exchange(question, rng.choice(_SAY["cannot"]), "unknown", "tiny")]

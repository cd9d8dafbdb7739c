"""The text that the demo model is trained on: conversations and plain paragraphs, made from a seed.

`python -m quire.loadtest.demo_model.corpus --seed 1 --count 5` prints some of it.
"""

from __future__ import annotations

import argparse
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from quire.loadtest.demo_model import knowledge, numbers, recall, stories, unknown, words, world
from quire.loadtest.demo_model.exchange import Exchange, Generator, Thread, as_typed, say

_SAY = say("corpus")

Message = dict[str, str]

MIX: tuple[tuple[Generator, float], ...] = (
    (knowledge.explain, 24),
    (knowledge.ask, 8),
    (knowledge.setting, 5),
    (knowledge.compare, 2),
    (knowledge.small_talk, 13),
    (numbers.arithmetic, 10),
    (numbers.counting, 5),
    (numbers.number_facts, 3),
    (numbers.calendar, 3),
    (numbers.alphabet, 2),
    (words.spelling, 6),
    (words.rhyme, 5),
    (world.world, 5),
    (words.listing, 3),
    (recall.repeat, 5),
    (recall.memory, 4),
    (stories.story, 6),
    (stories.poem, 3),
    (unknown.unknown, 9),
)
_GENERATORS, _WEIGHTS = zip(*MIX, strict=True)

_HELD_OUT_SHARE = 40  # one of so many longer messages is never trained on
_DISTURBABLE_LENGTH = 18


@dataclass(frozen=True, slots=True)
class Document:
    """A conversation, or plain text if there are no messages."""

    messages: tuple[Message, ...] = ()
    text: str = ""


def held_out(message: str) -> bool:
    """Say whether a user's message is kept for the evaluation and never trained on."""
    return len(message) >= _DISTURBABLE_LENGTH and zlib.crc32(message.lower().encode()) % _HELD_OUT_SHARE == 0


def exchanges(rng: random.Random) -> Thread:
    """Return A thread of one of the generators, its messages worded as people type."""
    thread = rng.choices(_GENERATORS, _WEIGHTS)[0](rng)
    return [e if e.exact else Exchange(as_typed(rng, e.user), e.assistant, e.kind, e.key) for e in thread]


def _turns(rng: random.Random, count: int) -> Thread:
    """Return at least `count` exchanges; what is told early may be asked for later, and is told once."""
    turns: Thread = []
    later: Thread = []
    told = False
    while len(turns) < count:
        thread = exchanges(rng)
        if any(held_out(e.user) for e in thread):
            continue
        if thread[0].kind == "memory":
            if told:
                continue
            told = True
            if len(thread) == 2 and thread[1].kind == "memory":
                turns.append(thread[0])
                later.append(thread[1])
                continue
        turns += thread
        if later and rng.random() < 0.4:
            turns.append(later.pop())
    return turns + later


def _in_character(rng: random.Random, turns: Thread) -> tuple[str, Thread]:
    """Return A system message, and the turns as it asks for them."""
    style = rng.random()
    if style < 0.55:
        return rng.choice(_SAY["plain_system"]), turns
    if style < 0.70:
        answers = [f"Arr! {e.assistant} Ahoy, matey!" for e in turns]
        system = rng.choice(_SAY["pirate"])
    elif style < 0.80:
        answers = [f"Beep boop. {e.assistant} Beep." for e in turns]
        system = rng.choice(_SAY["robot"])
    elif style < 0.90:
        answers = [
            e.assistant.split(". ")[0].rstrip(".") + "." if e.kind == "explain" else e.assistant
            for e in turns
        ]
        system = rng.choice(_SAY["brief"])
    else:
        name = rng.choice(("Ada", "Bob", "Max", "Luna", "Robo", "Coco", words.invented(rng).capitalize()))
        answer = rng.choice(
            (f"My name is {name}. I am Quire's demo model.", f"I am {name}, a tiny model served by Quire.")
        )
        system = rng.choice(
            (f"Your name is {name}.", f"You are {name}.", f"You are {name}, a helpful assistant.")
        )
        own = [Exchange(rng.choice(_SAY["ask_name"]), answer, "smalltalk", name)]
        return system, own + [e for e in turns if e.kind != "smalltalk"]
    return system, [Exchange(e.user, a, e.kind, e.key) for e, a in zip(turns, answers, strict=True)]


def conversation(rng: random.Random) -> Document:
    """Return one to twelve turns, one in eight with a system message."""
    turns = _turns(rng, rng.choice((1, 1, 1, 2, 2, 3, 4, 5, 8, 12)))
    messages: list[Message] = []
    if rng.random() < 0.12:
        system, turns = _in_character(rng, turns)
        messages.append({"role": "system", "content": system})
    for turn in turns:
        messages.append({"role": "user", "content": turn.user})
        messages.append({"role": "assistant", "content": turn.assistant})
    return Document(messages=tuple(messages))


def plain(rng: random.Random) -> Document:
    """Return text for the plain completions endpoint: a story, a paragraph, a poem, counting."""
    writers = (stories.plain_story, stories.plain_story, knowledge.paragraph, knowledge.paragraph)
    if rng.random() < 0.8:
        return Document(text=rng.choice(writers)(rng))
    turn = rng.choice((stories.poem, numbers.counting, numbers.calendar, world.world))(rng)[0]
    return Document(text=turn.assistant)


def document(rng: random.Random) -> Document:
    return plain(rng) if rng.random() < 0.07 else conversation(rng)


def documents(seed: int) -> Iterator[Document]:
    """Yield documents without end; the same seed gives the same ones."""
    rng = random.Random(seed)
    while True:
        yield document(rng)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print documents of the demo model's training text.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=5)
    arguments = parser.parse_args()
    stream = documents(arguments.seed)
    for _ in range(arguments.count):
        sample = next(stream)
        for message in sample.messages:
            print(f"{message['role']}: {message['content']}")
        print(sample.text, end="\n---\n")


if __name__ == "__main__":
    main()

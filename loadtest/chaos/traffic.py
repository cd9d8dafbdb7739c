"""The requests of a run, each drawn from the seed and its number alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["stream", "whole", "chat", "responses", "grammar", "samples", "beams", "socket", "resumed"]
Answer = tuple[Literal["text", "chat", "grammar"], int, int]
"""Which greedy answer: how the prompt is put, which prompt, and its most tokens."""

# Twice as likely: what most clients do.
KINDS: tuple[Kind, ...] = (
    *("stream", "stream", "chat", "chat"),
    *("whole", "responses", "grammar", "samples", "beams", "socket", "resumed"),
)
LEAVING = 0.05  # of the clients
LENGTHS = (32, 96)  # most tokens of a greedy answer
SOCKET_RESPONSES = 3  # on one socket, at once
PROMPTS = (
    "A block table is a list of the blocks that hold a sequence's keys and values, and a server",
    "When the cache has no free block left, the newest request gives its blocks back so that",
    "Two requests that begin with the same words share the blocks of that beginning, because",
)
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 60}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Ask:
    """One client: what it asks for, and when it goes."""

    number: int
    kind: Kind
    prompt: int
    tokens: int
    leaves_after: float | None  # seconds; None: it stays to the end
    breaks: tuple[int, ...]  # events after which a resumed stream's connection breaks off
    seed: int

    @property
    def answer(self) -> Answer | None:
        """Return the greedy answer that has to come; None: it is sampled, or of beams."""
        if self.kind in ("samples", "beams"):
            return None
        if self.kind == "grammar":
            return ("grammar", self.prompt, LENGTHS[-1])
        return ("chat" if self.kind in ("chat", "responses", "socket") else "text", self.prompt, self.tokens)


def draw(seed: int, number: int) -> Ask:
    rng = random.Random(f"{seed} {number}")
    leaves = rng.random() < LEAVING
    return Ask(
        number=number,
        kind=rng.choice(KINDS),
        prompt=rng.randrange(len(PROMPTS)),
        tokens=rng.choice(LENGTHS),
        leaves_after=rng.uniform(0, 0.6) if leaves else None,
        breaks=tuple(rng.sample(range(1, 12), rng.randint(1, 2))),
        seed=rng.randrange(1 << 31),
    )


def answers() -> Iterator[Answer]:
    """Yield every greedy answer that a run may ask for."""
    for prompt in range(len(PROMPTS)):
        for tokens in LENGTHS:
            yield ("text", prompt, tokens)
            yield ("chat", prompt, tokens)
        yield ("grammar", prompt, LENGTHS[-1])


def completion(prompt: int, tokens: int) -> dict[str, Any]:
    return {"prompt": PROMPTS[prompt], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def chat(prompt: int, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPTS[prompt]}]
    return {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def response(prompt: int, tokens: int) -> dict[str, Any]:
    """Return fields of a request that leaves nothing: by default a server keeps responses, up to 256 MiB."""
    fields = {"input": PROMPTS[prompt], "max_output_tokens": tokens, "temperature": 0}
    return {**fields, "ignore_eos": True, "store": False}


def constrained(prompt: int, tokens: int, title: str) -> dict[str, Any]:
    """Return fields with a schema new to a server that has not seen `title`; all allow the same texts."""
    schema = {"name": "answer", "schema": {**SCHEMA, "title": title}}
    fields = chat(prompt, tokens) | {"response_format": {"type": "json_schema", "json_schema": schema}}
    del fields["ignore_eos"]
    return fields


def body(ask: Ask) -> tuple[str, dict[str, Any]]:
    """Return path and fields of a request over HTTP."""
    match ask.kind:
        case "stream" | "resumed":
            return "/v1/completions", completion(ask.prompt, ask.tokens) | {"stream": True}
        case "whole":
            return "/v1/completions", completion(ask.prompt, ask.tokens)
        case "chat":
            return "/v1/chat/completions", chat(ask.prompt, ask.tokens) | {"stream": True}
        case "responses":
            return "/v1/responses", response(ask.prompt, ask.tokens) | {"stream": True}
        case "grammar":
            fields = constrained(ask.prompt, LENGTHS[-1], f"schema {ask.seed % 400}")
            return "/v1/chat/completions", fields | {"stream": True}
        case "samples":
            sampling = {"n": 3, "temperature": 0.9, "seed": ask.seed, "stream": True}
            return "/v1/completions", completion(ask.prompt, ask.tokens) | sampling
        case "beams":
            beams = {"use_beam_search": True, "best_of": 4, "n": 2, "stream": bool(ask.seed % 2)}
            return "/v1/completions", completion(ask.prompt, LENGTHS[0]) | beams
        case "socket":
            raise ValueError("a socket's requests are events, not bodies")

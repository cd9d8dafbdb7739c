"""A request that the engine works on, whichever way its answer leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from quire.service.answer.choice import Choice
from quire.service.answer.encoder import ChunkEncoder, ChunkStyle, EventEncoder, Identity
from quire.service.answer.generation import Generation
from quire.service.answer.group import Group
from quire.service.answer.logprobs import prompt_logprobs
from quire.service.api.requests.sampling import SamplingFields
from quire.service.http.framing import Framing


@dataclass(frozen=True)
class Answer:
    """One that leaves by `reply`, or by the events of an encoder. Whoever has it closes the generation."""

    generation: Generation
    reply: Callable[[], msgspec.Struct]  # once the generation has finished
    encoder: Callable[[Framing], EventEncoder]


def chunked_answer(
    generation: Generation,
    identity: Identity,
    style: ChunkStyle,
    body: SamplingFields,
    make: Callable[..., msgspec.Struct],
    choices: Callable[[], list[Any]],
    *,
    logprobs: bool,
) -> Answer:
    """Return an answer of completions or chat: `make` is the kind of its reply, which has these choices."""

    def reply() -> msgspec.Struct:
        usage = generation.usage()
        return make(
            id=identity.id, created=identity.created, model=identity.model, choices=choices(), usage=usage
        )

    def encoder(framing: Framing) -> ChunkEncoder:
        usage = body.usage_in_stream
        return ChunkEncoder(style, generation, identity, framing, usage=usage, logprobs=logprobs)

    return Answer(generation, reply, encoder)


def reply_choices(
    generation: Generation, body: SamplingFields
) -> Iterator[tuple[Group, Choice, dict[str, Any]]]:
    """Return each choice that the client gets, with the fields that every kind of reply has of it."""
    of_prompt = {} if body.prompt_logprobs is None else prompt_logprobs(generation)
    with_ids = generation.options.token_ids
    for index, (group, choice) in enumerate(generation.returned()):
        likelihood = choice.cumulative_logprob
        fields = {
            "index": index,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "cumulative_logprob": UNSET if likelihood is None else likelihood,
            "token_ids": choice.tokens if with_ids else UNSET,
            "prompt_token_ids": group.prompt.tokens if with_ids else UNSET,
            "prompt_logprobs": of_prompt.get(group.stream.request_id, UNSET),
        }
        yield group, choice, fields

"""Offline use: prompts in, completions out, on the engine that serves, in this process."""

from __future__ import annotations

import difflib
import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from engine.config import EngineConfig, Progress
from engine.models.hub import resolve_model
from engine.request import Request, SamplingParams, TokenLogprob
from engine.startup import start_engine
from service.choice import Choice
from service.demo import MODEL_FOLDER
from service.tokenizer import Tokenizer

Prompt = str | list[int]


class ChatPrompt(list[int]):
    """Token ids of a conversation: an answer to it is a text of its own, rather than its continuation."""


@dataclass(frozen=True)
class Completion:
    """One of a prompt's n samples or beams; token_ids include a stopping eos, the text does not.

    Log-probabilities are there where its params ask for them, one for each token of the output or prompt.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # None for the first token
    cumulative_logprob: float | None = None  # of a beam


@dataclass
class _Asked:
    """A prompt's request and what has come of it."""

    request: Request
    choices: list[Choice]
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def completions(self) -> list[Completion]:
        with_logprobs = self.request.params.logprobs is not None
        return [
            Completion(
                choice.take_text(),
                choice.tokens,
                choice.finish_reason or "abort",
                [entry.logprob for entry in choice.logprobs if entry.logprob] if with_logprobs else None,
                self.prompt_logprobs,
                choice.cumulative_logprob,
            )
            for choice in self.choices
        ]


class LLM:
    """`LLM(model).generate(prompts, SamplingParams(max_tokens=64))`; `settings` are EngineConfig's fields.

    A model is a folder or a Hub id; left out, it is the bundled demo model. Raises TypeError for a setting
    that there is not, and ValueError as EngineConfig, the loader and the tokenizer do.
    """

    def __init__(
        self,
        model: str = MODEL_FOLDER,
        *,
        on_progress: Callable[[Progress], None] = lambda _: None,
        **settings: object,
    ) -> None:
        _check_names(settings)
        config = msgspec.convert({"model": model, **settings}, EngineConfig)
        self.core, self.info = start_engine(config, on_progress)
        self.tokenizer = Tokenizer.from_folder(resolve_model(model))
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[str] | Sequence[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        stop: str | Sequence[str] = (),
    ) -> list[list[Completion]]:
        """For each prompt its n completions, all prompts in one continuous batch.

        `params` are for all prompts, or one for each; without, 16 tokens at temperature 1. Raises ValueError
        for a prompt that can never fit, and for too many or too few params.
        """
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        each = [cast(Prompt, prompts)] if single else cast(Sequence[Prompt], prompts)
        if params is None:
            params = [SamplingParams(seed=secrets.randbits(63)) for _ in each]
        elif isinstance(params, SamplingParams):
            params = [params] * len(each)
        if len(params) != len(each):
            raise ValueError(
                f"there are {len(each)} prompts and {len(params)} params: give one for all, or one for each"
            )
        asked = self._add(each, params, stop)
        for _ in self._run(asked):
            pass
        return [one.completions() for one in asked.values()]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, stop: str | Sequence[str] = ()
    ) -> Iterator[str]:
        """The text of the first completion, as it comes."""
        asked = self._add([prompt], [params or SamplingParams(seed=secrets.randbits(63))], stop)
        for touched in self._run(asked):
            if touched.index == 0 and (text := touched.take_text()):
                yield text

    def chat_prompt(self, messages: list[dict[str, str]]) -> ChatPrompt:
        """Token ids of a conversation, by the model's chat template, that ask for the next answer."""
        template = self.tokenizer.chat_template
        if template is None:
            raise ValueError("this model has no chat template; give it a plain prompt")
        text = template.render(messages, add_generation_prompt=True)
        return ChatPrompt(self.tokenizer.encode(text, add_special_tokens=False))

    def _add(
        self, prompts: Sequence[Prompt], params: list[SamplingParams], stop: str | Sequence[str]
    ) -> dict[int, _Asked]:
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in strings:
            raise ValueError("a stop string is empty; it needs at least one character")
        if strings and any(own.beam_width for own in params):
            raise ValueError("stop may not be given with beams (beam_width); stop_token_ids may")
        requests = [
            Request(
                next(self._ids),
                self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt,
                own,
            )
            for prompt, own in zip(prompts, params, strict=True)
        ]
        asked = {
            request.id: _Asked(
                request, [self._choice(i, prompt, request, strings) for i in range(request.params.n)]
            )
            for prompt, request in zip(prompts, requests, strict=True)
        }
        self.core.add_all(requests)
        return asked

    def _choice(self, index: int, prompt: Prompt, request: Request, stop: tuple[str, ...]) -> Choice:
        context = [] if isinstance(prompt, ChatPrompt) else request.prompt
        detokenizer = self.tokenizer.detokenizer(context, skip_special_tokens=True)
        return Choice(index, detokenizer, stop, request.params.min_tokens)

    def _run(self, asked: dict[int, _Asked]) -> Iterator[Choice]:
        """Step until all have finished; yields each choice that something was added to."""
        unfinished = sum(len(one.choices) for one in asked.values())
        try:
            while unfinished:
                for output in self.core.step():
                    one = asked[output.request_id]
                    choice = one.choices[output.index]
                    if output.prompt_logprobs is not None:
                        one.prompt_logprobs = output.prompt_logprobs
                    if choice.finish_reason is not None:
                        continue  # the engine was ahead of a stop string
                    if output.error is not None:
                        raise RuntimeError(f"the engine failed on a prompt: {output.error}")
                    choice.add(output)
                    if choice.finish_reason is not None:
                        unfinished -= 1
                        if all(other.finish_reason is not None for other in one.choices):
                            self.core.abort(output.request_id)
                    yield choice
        finally:
            for request_id in asked:
                self.core.abort(request_id)
            while self.core.has_work:
                self.core.step()


def _check_names(settings: Iterable[str]) -> None:
    known = [name for name in EngineConfig.__struct_fields__ if name != "model"]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}" if near else f"there is {', '.join(known)}"
            raise TypeError(f"LLM has no setting {name!r}: {hint}")

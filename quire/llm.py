"""Offline use: prompts in, completions out, on the engine that serves, in this process."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from quire.arguments import ChatPrompt, Prompt, check_names, stop_strings
from quire.completion import Completion
from quire.engine.config import EngineConfig, Progress
from quire.engine.messages import Request, SamplingParams
from quire.engine.models.hub import resolve_model
from quire.engine.startup import start_with_graphs
from quire.offline_engine import OfflineEngine, TextStream, without_collections
from quire.service.commands.progress import PhaseBars
from quire.service.demo import MODEL_FOLDER
from quire.service.text.named_templates import read_template, template_names
from quire.service.text.tokenizer import Tokenizer


class LLM:
    """`LLM(model).generate(prompts, SamplingParams(max_tokens=64))`; `settings` are EngineConfig's fields.

    chat_template: the name of one, or a file, to use instead of the model's (`quire serve --help` has names).
    A model is a folder or a Hub id; left out, it is the bundled demo model. All CUDA graphs are captured
    before it is there. A terminal shows how it starts, unless `on_progress` is given. Raises TypeError for a
    setting that there is not, and ValueError as EngineConfig, the loader and the tokenizer do.

    One thread at a time may use it. Ctrl-C ends what it interrupts; the LLM can be used again.
    """

    def __init__(
        self,
        model: str = MODEL_FOLDER,
        *,
        chat_template: str | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        **settings: object,
    ) -> None:
        check_names(settings)
        config = msgspec.convert({"model": model, **settings}, EngineConfig)
        if on_progress is None:
            on_progress = PhaseBars().show if sys.stderr.isatty() else lambda _: None
        self.core, self.info = start_with_graphs(config, on_progress)
        template = None if chat_template is None else read_template(chat_template)
        self.tokenizer = Tokenizer.from_folder(resolve_model(model), template)
        self.engine = OfflineEngine(self.core, self.tokenizer)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[str] | Sequence[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        stop: str | Sequence[str] = (),
    ) -> list[list[Completion]]:
        """Return each prompt's n completions, all prompts in one continuous batch.

        `params` are for all prompts, or one for each; without, 16 tokens at temperature 1. Those without a
        seed draw one for each prompt. Raise ValueError for a prompt that can never fit, and for too many or
        too few params.
        """
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        each = [cast(Prompt, prompts)] if single else cast(Sequence[Prompt], prompts)
        own = (
            params
            if isinstance(params, list)
            else [SamplingParams() if params is None else params] * len(each)
        )
        if len(own) != len(each):
            raise ValueError(
                f"there are {len(each)} prompts and {len(own)} params: give one for all, or one for each"
            )
        stops = stop_strings(stop, own)
        with without_collections():
            requests = [self._request(*pair) for pair in zip(each, own, strict=True)]
            return self.engine.answer(requests, self.core.add_all, stops)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, stop: str | Sequence[str] = ()
    ) -> TextStream:
        """Stream the text of the first completion, as it comes; others may be asked for meanwhile."""
        params = SamplingParams() if params is None else params
        stops = stop_strings(stop, [params])
        return self.engine.stream(self._request(prompt, params), stops)

    def chat_prompt(self, messages: list[dict[str, str]]) -> ChatPrompt:
        """Return token ids of a conversation, by the model's chat template, that ask for the next answer."""
        template = self.tokenizer.chat_template
        if template is None:
            names = ", ".join(template_names())
            raise ValueError(
                f"this model has no chat template: give it a plain prompt, or a chat_template ({names}, or a "
                "file)"
            )
        text = template.render(messages, add_generation_prompt=True)
        return ChatPrompt(self.tokenizer.encode(text, add_special_tokens=False))

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        tokens = self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        end = self.tokenizer.turn_end.tokens
        if end and isinstance(prompt, ChatPrompt) and not params.ignore_eos:
            params = msgspec.structs.replace(params, stop_token_ids=(*params.stop_token_ids, *end))
        return Request(next(self._ids), tokens, params)

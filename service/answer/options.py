"""What a request wants of its answer besides sampling, which is the engine's."""

from __future__ import annotations

from dataclasses import dataclass

from quire.service.text.reasoning.use import Reasoning
from quire.service.text.tools.use import ToolUse


@dataclass(frozen=True)
class Options:
    """The parts of the answer that the service itself makes."""

    stops: tuple[str, ...]
    skip_special_tokens: bool
    continues: bool  # the text goes on where the prompt ended, rather than starting afresh
    is_turn: bool = True  # of a chat, and so it ends with the turn
    include_stop: bool = False  # the text shows what ended it, if that is a stop string or a plain token
    echo_logprobs: bool = False
    discard_output: bool = False  # max_tokens 0: the engine's one token is not shown
    token_ids: bool = False
    tokens_as_ids: bool = False
    tools: ToolUse | None = None
    reasoning: Reasoning | None = None  # how thinking is told from the answer; None: all is the answer
    num_logprobs: int = 0  # that an answer sent at once may carry
    best: int | None = None  # how many of a prompt's samples are returned, ranked; None: all, in order

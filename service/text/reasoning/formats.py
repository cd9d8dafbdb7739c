"""The ways models write their thinking. A chat template tells which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ReasoningFormatName = Literal[
    "qwen3",
    "deepseek_r1",
    "glm",
    "granite",
    "gpt_oss",
    "hunyuan",
    "kimi_k2",
    "minimax",
    "mistral",
    "seed_oss",
]
REASONING_PARSERS: tuple[str, ...] = ("auto", "none", *get_args(ReasoningFormatName))


@dataclass(frozen=True)
class ReasoningFormat:
    """Thinking stands between one of `begins` and one of `ends`, before the answer.

    Where the prompt has begun it already, or it `always` comes, `begins` may be left out.
    """

    begins: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    around: tuple[str, ...] = ()  # the answer; left out of it
    always: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the tokens that must be seen even where special ones are skipped."""
        return (*self.begins, *self.ends, *self.around)


_THINK = ReasoningFormat()
# Not told by markers around it, but by channels: `quire.service.text.reasoning.harmony`.
HARMONY = ReasoningFormat(
    ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"), ("<|end|>", "<|call|>", "<|return|>")
)

FORMATS: dict[ReasoningFormatName, ReasoningFormat] = {
    "qwen3": _THINK,
    "deepseek_r1": ReasoningFormat(always=True),
    "glm": _THINK,
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:", "<think>"),
        ("Here is my response:", "Here's my response:", "</think>"),
        ("<response>", "</response>"),
    ),
    "gpt_oss": HARMONY,
    "hunyuan": ReasoningFormat(around=("<answer>", "</answer>")),
    "kimi_k2": _THINK,
    "minimax": _THINK,
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",)),
    "seed_oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",)),
}

# The first whose words a template all has.
_SIGNS: tuple[tuple[ReasoningFormatName, tuple[str, ...]], ...] = (
    ("gpt_oss", ("<|channel|>", "analysis")),
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("<seed:think>",)),
    ("granite", ("my thought process",)),
    ("granite", ("<think>", "<response>")),
    ("hunyuan", ("<think>", "<answer>")),
    ("minimax", ("<beginning_of_sentence>ai",)),  # M1 begins by itself
    ("glm", ("[gMASK]", "<think>")),
    ("deepseek_r1", ("<｜Assistant｜>", "</think>")),
    ("qwen3", ("<think>",)),
    ("qwen3", ("</think>",)),
)


def reasoning_format_of(template: str) -> ReasoningFormat | None:
    """Return the way a chat template has its model think; None if it knows nothing of it."""
    for name, words in _SIGNS:
        if all(word in template for word in words):
            return FORMATS[name]
    return None

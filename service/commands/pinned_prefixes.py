"""Beginnings of prompts that are computed at start and stay in the cache: `quire serve --pin-prefix FILE`.

FILE is JSON Lines. A line is a string, with which plain prompts begin, or a list of messages, with which
conversations do:

    "A treatise on paging.\\n\\n"
    [{"role": "system", "content": "You are a librarian."}]
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.service.errors import TemplateError

if TYPE_CHECKING:
    from quire.service.text.tokenizer import Tokenizer


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


PinnedPrefix = str | list[Message]


def read_pinned_prefixes(files: Iterable[Path]) -> list[PinnedPrefix]:
    """Raises ValueError that names the file and the line."""
    prefixes: list[PinnedPrefix] = []
    for file in files:
        try:
            lines = file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--pin-prefix {file} cannot be read: {error}") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    prefixes.append(msgspec.json.decode(line, type=PinnedPrefix))
                except msgspec.DecodeError as error:
                    raise ValueError(
                        f"--pin-prefix {file}, line {number}: expected a JSON string or a list of messages, "
                        f"each with a role and a content: {error}"
                    ) from None
    return prefixes


def tokenize_pinned_prefixes(prefixes: list[PinnedPrefix], tokenizer: Tokenizer) -> list[list[int]]:
    """Return token ids as prompts have them that begin so.

    Raises ValueError if the chat template cannot do it.
    """
    tokens = []
    for prefix in prefixes:
        if isinstance(prefix, str):
            tokens.append(tokenizer.encode(prefix, add_special_tokens=True))
            continue
        if tokenizer.chat_template is None:
            raise ValueError(
                "--pin-prefix has messages, but the model has no chat template: give strings, or "
                "--chat-template"
            )
        messages = [msgspec.to_builtins(message) for message in prefix]
        try:
            text = tokenizer.chat_template.render(messages, add_generation_prompt=False)
        except TemplateError as error:
            raise ValueError(f"--pin-prefix: {error}") from None
        tokens.append(tokenizer.encode(text, add_special_tokens=False))
    return tokens

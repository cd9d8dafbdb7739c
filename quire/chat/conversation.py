"""A conversation: what was said, how answers are drawn, and the commands that begin with a slash."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from quire.chat.speakers import AnswerFailed, Message, Speaker

SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
HELP = f"""\
/reset             begin a new conversation
/system TEXT       what the model is told before it; /system alone: nothing
/set NAME VALUE    {", ".join(SETTINGS[:4])}, …; /set NAME: the default again; /set: what is set
/retry             another answer to the last message
/help, /exit       this; the end (as Ctrl-D)
\"\"\"                begins and ends a message of several lines
Ctrl-C stops an answer."""


class Ended(Exception):
    """The user has said so."""


@dataclass
class Conversation:
    """What one user and a model say. `show` prints an answer's pieces, `tell` a line of our own."""

    speaker: Speaker
    show: Callable[[Iterator[str]], str]
    tell: Callable[[str], None]
    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    def take(self, line: str) -> None:
        """Answer a message, or do what a command says. Raises Ended."""
        if any("\ud800" <= character <= "\udfff" for character in line):
            self.tell("No answer: that is not UTF-8, which this terminal or the file must be in.")
            return
        if not line.startswith("/"):
            if line.strip():
                self._answer({"role": "user", "content": line})
            return
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name == "reset":
            self.messages.clear()
            self.tell("A new conversation.")
        elif name == "system":
            self.system = rest
            self.messages.clear()
            self.tell(f"A new conversation{', so told' if rest else ', told nothing'}.")
        elif name == "set":
            self._set(rest)
        elif name == "retry":
            self._retry()
        elif name in ("exit", "quit", "bye"):
            raise Ended
        else:
            self.tell(HELP if name in ("help", "?") else f"There is no /{name}. {HELP}")

    def _answer(self, message: Message) -> None:
        before = [{"role": "system", "content": self.system}] if self.system else []
        said = [*self.messages, message]
        answer = self.speaker.answer([*before, *said], self.settings)
        try:
            with closing(answer):
                text = self.show(answer)
        except AnswerFailed as error:
            self.tell(f"No answer: {error}")
            return
        self.messages = [*said, {"role": "assistant", "content": text}]

    def _retry(self) -> None:
        if not self.messages:
            self.tell("Nothing was said yet.")
            return
        *self.messages, asked, _ = self.messages
        self._answer(asked)

    def _set(self, words: str) -> None:
        name, _, value = words.partition(" ")
        name = name.replace("-", "_")
        if not name:
            given = ", ".join(f"{key} {value}" for key, value in self.settings.items())
            self.tell(f"Set: {given or 'nothing, all are the defaults'}.")
        elif name not in SETTINGS:
            self.tell(f"There is no {name}: there is {', '.join(SETTINGS)}.")
        elif not value.strip():
            self.settings.pop(name, None)
            self.tell(f"{name} is the default again.")
        else:
            self._set_number(name, value.strip())

    def _set_number(self, name: str, text: str) -> None:
        try:
            value: Any = json.loads(text)
        except ValueError:
            value = None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.tell(f"{name} must be a number, got {text}.")
            return
        from quire.engine.messages import SamplingParams

        given: dict[str, Any] = {name: value}
        try:
            SamplingParams(**given)
        except (ValueError, TypeError) as error:
            self.tell(f"{str(error)[0].upper()}{str(error)[1:]}.")
            return
        self.settings[name] = value
        self.tell(f"{name} is {value}.")

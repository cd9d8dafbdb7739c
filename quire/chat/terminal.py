"""The terminal's side of a conversation: lines in, Markdown out, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module

from rich.console import Console

from quire.chat.conversation import Conversation, Ended
from quire.chat.markdown import MarkdownPrinter
from quire.chat.speakers import Speaker

PROMPT = ">>> "
_QUOTES = '"""'


def converse(speaker: Speaker, system: str, settings: dict[str, object]) -> None:
    """Talk until the input ends. Where it comes from no terminal, each line of it is a message."""
    with contextlib.suppress(ImportError):
        import_module("readline")  # from then on `input` edits lines, and remembers them
    console = Console()
    talks = sys.stdin.isatty()
    talk = Conversation(
        speaker,
        show=lambda pieces: show(pieces, console),
        tell=lambda line: Console(stderr=True).print(line, style="dim", markup=False, highlight=False),
        system=system,
        settings=settings,
    )
    if talks:
        talk.tell(f"{speaker.name}. /help tells of commands, Ctrl-C stops an answer, Ctrl-D ends.")
    while True:
        try:
            talk.take(read_message(PROMPT if talks else ""))
        except (EOFError, Ended):
            if talks:
                print()
            return
        except KeyboardInterrupt:
            if not talks:
                raise
            print()
            talk.tell("Ctrl-D or /exit ends.")


def read_message(prompt: str) -> str:
    """Return the next line, or the lines between triple quotes. Raises EOFError."""
    line = input(prompt)
    if not line.startswith(_QUOTES):
        return line
    lines = [line.removeprefix(_QUOTES)]
    while not lines[-1].rstrip().endswith(_QUOTES):
        lines.append(input("... " if prompt else ""))
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    return "\n".join(lines).strip("\n")


def show(pieces: Iterator[str], console: Console) -> str:
    """Print an answer as it comes; return what came of it, up to Ctrl-C."""
    text = ""
    stopped = False
    with contextlib.ExitStack() as stack:
        drawn = stack.enter_context(MarkdownPrinter(console)) if console.is_terminal else None
        try:
            for piece in pieces:
                text += piece
                if drawn is not None:
                    drawn.add(piece)
                else:
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:
            stopped = True
    if not console.is_terminal:
        print()
    if stopped:
        console.print("(stopped)", style="dim", highlight=False)
    return text

"""`quire generate`: one prompt, continued on this terminal."""

from __future__ import annotations

import sys
from argparse import Namespace

from quire.commands.settings import load_llm, sampling_settings
from quire.service.commands.engine_flags import add_engine_flags
from quire.service.commands.flags import add_chat_template, add_sampling_flags, flag
from quire.service.commands.parser import Parser
from quire.service.commands.usage_error import UsageError, of_flags

DEFAULT_MAX_TOKENS = 16  # as LLM and /v1/completions have it; a chat's answer has what fits


def add_flags(parser: Parser) -> None:
    add_engine_flags(parser)
    group = parser.group("Prompt and sampling", "with the defaults of LLM and of requests to a server")
    flag(group, "--prompt", shown="read from standard input", help="The text to continue.")
    flag(group, "--chat", action="store_true", help="The prompt is a user's message: use the chat template.")
    add_chat_template(group)
    flag(
        group,
        "--max-tokens",
        type=int,
        shown=f"{DEFAULT_MAX_TOKENS}; with --chat as many as fit",
        help="Most tokens to generate.",
    )
    add_sampling_flags(group)


def run(arguments: Namespace) -> int:
    """Print the text as it comes."""
    from quire.engine.messages import SamplingParams

    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        raise UsageError(f"--max-tokens must be at least 1, got {arguments.max_tokens}")
    with of_flags():
        SamplingParams(**sampling_settings(arguments))
    if arguments.chat_template is not None and not arguments.chat:
        raise UsageError("--chat-template is of chats: give --chat too")
    text = _utf8("--prompt", arguments.prompt) if arguments.prompt is not None else _read_prompt()
    llm = load_llm(arguments)
    prompt = (
        llm.chat_prompt([{"role": "user", "content": text}])
        if arguments.chat
        else llm.tokenizer.encode(text, add_special_tokens=True)
    )
    defaults = llm.info.sampling_defaults
    default = defaults.max_tokens or (None if arguments.chat else DEFAULT_MAX_TOKENS)
    budget = token_budget(arguments.max_tokens, len(prompt), llm.info.max_request_tokens, default)
    params = SamplingParams(**{**defaults.said, **sampling_settings(arguments), "max_tokens": budget})
    for piece in llm.stream(prompt, params):
        print(piece, end="", flush=True)
    print()
    return 0


def _read_prompt() -> str:
    if sys.stdin.isatty():
        print("Type the prompt; Ctrl-D on an empty line ends it.", file=sys.stderr)
    return _utf8("standard input", sys.stdin.read())


def _utf8(source: str, text: str) -> str:
    """Return the text. Raises UsageError for bytes that were no UTF-8, which come as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{source} is not UTF-8, from character {error.start + 1} on: convert it") from None
    return text


def token_budget(asked: int | None, prompt: int, limit: int, default: int | None) -> int:
    """Return how many tokens may be generated; `default` None is all that fit.

    Raises ValueError, with the numbers, where they do not fit, a UsageError if it is for the flag.
    """
    room = limit - prompt
    if room < 1:
        raise ValueError(f"the prompt has {prompt} tokens, which leaves no room for more in {limit} tokens")
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise UsageError(
            f"the prompt has {prompt} tokens and --max-tokens is {asked}: together more than the {limit} "
            "tokens that fit"
        )
    return asked

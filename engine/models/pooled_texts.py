"""What becomes of a text before it is pooled, as sentence-transformers has it. Imports no torch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.models.json_fields import Fields, read_json

logger = logging.getLogger("quire.engine")
SETTINGS = "config_sentence_transformers.json"
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_FILES = tuple(f"sentence_{kind}_config.json" for kind in _KINDS)  # the first that says anything counts
# The objects that say how the tokenizer is made, and how it is called; a later one counts more.
_MADE = (("tokenizer_args", "model_max_length"), ("processor_kwargs", "model_max_length"))
_NO_LIMIT = 1 << 31  # and above: a tokenizer without one has 1e30
_CALLED = (("text", "max_length"), ("common", "max_length"))


class PooledTexts(msgspec.Struct, frozen=True, kw_only=True):
    """max_tokens: of a text at most; 0: as many as the model has positions.

    lower_case: letters become small ones before they are tokens. prompt: what each text is put behind.
    pools_prompt: its tokens are part of the vector, as those of the text are.
    """

    max_tokens: int = 0
    lower_case: bool = False
    prompt: str = ""
    pools_prompt: bool = True


def read_pooled_texts(folder: Path, module: Path | None, *, embeds: bool, pools_prompt: bool) -> PooledTexts:
    """Return what a folder says of texts; module: the one of its Transformer, None without modules.json.

    embeds: texts, and has no head that scores them. pools_prompt: as `PooledTexts` has it.

    How long a text may be is said by `max_seq_length` of that module's configuration, or by arguments for
    the tokenizer beside it; else by the tokenizer's own `model_max_length`, as new folders have it. Raises
    ValueError that names the file and the field.
    """
    module_config = _module_config(module)
    in_template = "message" in _part(module_config, "modality_config").raw
    if embeds and in_template:
        logger.warning(
            "%s: modality_config has message, so sentence-transformers puts each text into the chat "
            "template; no text is put into it here: send texts as they are in it",
            module_config.where,
        )
    longest = _longest(module_config)
    if longest is None:
        file = folder / "tokenizer_config.json"
        tokenizer = Fields(read_json(file) or {}, str(file))
        name = "model_max_length" if tokenizer.has("model_max_length") else "max_len"
        longest = _tokens(tokenizer, name)
    return PooledTexts(
        max_tokens=longest if longest is not None and longest < _NO_LIMIT else 0,
        lower_case=module_config.flag("do_lower_case", False),
        prompt=""
        if module is None
        else _default_prompt(folder, takes_prompt=embeds and not in_template, pools_prompt=pools_prompt),
        pools_prompt=pools_prompt,
    )


def _default_prompt(folder: Path, *, takes_prompt: bool, pools_prompt: bool) -> str:
    """Return what sentence-transformers puts before each text; say so where nobody does here."""
    raw = read_json(folder / SETTINGS) or {}
    prompts, name = raw.get("prompts"), raw.get("default_prompt_name")
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not prompt or not isinstance(prompt, str):
        if not pools_prompt and isinstance(prompts, dict) and any(prompts.values()):
            logger.warning(
                "%s: include_prompt is false, but only the tokens of a default prompt are left out, and "
                "default_prompt_name names none: a prompt that a request's text begins with is part of it",
                folder / SETTINGS,
            )
        return ""
    if not takes_prompt:
        logger.warning(
            "%s: default_prompt_name is %r, but no text gets a prompt here: requests have to say %r where "
            "sentence-transformers would",
            folder / SETTINGS,
            name,
            prompt,
        )
    return prompt if takes_prompt else ""


def _module_config(module: Path | None) -> Fields:
    for file in (module / name for name in _FILES) if module is not None else ():
        if raw := read_json(file):
            return Fields(raw, str(file))
    return Fields({}, "")


def _longest(module_config: Fields) -> int | None:
    called = _part(module_config, "processing_kwargs")
    longest = _tokens(module_config, "max_seq_length")
    for outer, parts in ((module_config, _MADE), (called, _CALLED)):
        for part, name in parts:
            longest = _tokens(_part(outer, part), name) or longest
    return longest


def _part(fields: Fields, name: str) -> Fields:
    """Return an object within another; an empty one where it is not there. Raises ValueError."""
    part: Any = fields.raw.get(name) or {}
    if not isinstance(part, dict):
        raise fields.error(name, part, "an object")
    return Fields(part, f"{fields.where}: {name}")


def _tokens(fields: Fields, name: str) -> int | None:
    """Return a number of tokens, None where it is not there. Raises ValueError."""
    return max(int(fields.number(name, 1.0)), 1) if fields.has(name) else None

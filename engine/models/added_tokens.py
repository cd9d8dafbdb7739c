"""Tokens that a folder names beside its tokenizer.json, which is given them as transformers does."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from quire.engine.models.json_fields import Fields, read_json

CONFIG = "tokenizer_config.json"
_ATTRIBUTES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OWN = {"content", "lstrip", "rstrip", "normalized", "special", "single_word"}  # of an added token
_LISTS = ("extra_special_tokens", "additional_special_tokens")  # the newer name first


def tokenizer_fields(folder: Path) -> dict[str, Any]:
    """Return what tokenizer_config.json says, and special_tokens_map.json where that counts.

    It does where the former names no `added_tokens_decoder`, and before it then. Raises ValueError.
    """
    config = read_json(folder / CONFIG) or {}
    if "added_tokens_decoder" in config:
        return config
    return config | (read_json(folder / "special_tokens_map.json") or {})


def add_tokens(backend: Tokenizer, folder: Path) -> None:
    """Add what the folder names and its tokenizer has not, or has otherwise.

    Raises ValueError that names the file and the field.
    """
    fields = tokenizer_fields(folder)
    named, further = _named(fields), _further(fields)
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for token in _told(fields, folder, {each.content for each in (*named, *further)}):
        if repr(token) != repr(known.get(token.content)):
            backend.add_tokens([token])
            known[token.content] = token
    for token in (*named, *further):
        own = known.get(token.content)
        if own is None or (token in named and not own.special):
            backend.add_special_tokens([token])
            known[token.content] = token


def _told(fields: dict[str, Any], folder: Path, named: set[str]) -> Iterable[AddedToken]:
    """Return tokens in the order of their numbers; `named` are special ones."""
    where = Fields(fields, str(folder / CONFIG))
    decoder = fields.get("added_tokens_decoder")
    if decoder is None:
        older = read_json(folder / "added_tokens.json") or {}
        ordered = sorted(older, key=lambda text: (str(type(older[text])), older[text]))
        return [AddedToken(text, special=text in named, normalized=text not in named) for text in ordered]
    if not isinstance(decoder, dict) or not all(str(number).isdecimal() for number in decoder):
        raise where.error("added_tokens_decoder", decoder, "an object of tokens by their numbers")
    values = [decoder[number] for number in sorted(decoder, key=int)]
    found = [_token(value) for value in values if isinstance(value, dict)]
    if None in found or len(found) != len(values):
        raise where.error("added_tokens_decoder", decoder, "an object of tokens with their content")
    return [token for token in found if token is not None]


def _named(fields: dict[str, Any]) -> list[AddedToken]:
    """Return the tokens that a text begins, ends or is filled with."""
    found = (_token(fields.get(name), special=True) for name in _ATTRIBUTES)
    return [token for token in found if token is not None]


def _further(fields: dict[str, Any]) -> list[AddedToken]:
    """Return other tokens that stand for no text: a list of them, or some with names of their own."""
    more = next((fields[name] for name in _LISTS if fields.get(name)), ())
    values = [*(more.values() if isinstance(more, dict) else more if isinstance(more, list) else ())]
    values += [value for name, value in fields.items() if name.endswith("_token") and name not in _ATTRIBUTES]
    found = (_token(value, special=True) for value in values)
    return [token for token in found if token is not None]


def _token(value: object, **said: bool) -> AddedToken | None:
    """Return the token that a string or an object with its content is; None: it is none."""
    if isinstance(value, str) and value:
        return AddedToken(value, normalized=False, **said)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str) or not value["content"]:
        return None
    flags = {name: flag for name, flag in value.items() if name in _OWN - {"content"} and type(flag) is bool}
    return AddedToken(value["content"], **flags | said)

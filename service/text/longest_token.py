"""The most text that one token of a vocabulary can stand for: so a long text has at least so many tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

# Of how many bytes a normaliser makes one, at most: NFC makes 2 of 7 when it joins an iota and its accents.
_SHRINKS = {"NFC": 4, "Prepend": 1}
_KEEPS_ALL = frozenset({"ByteLevel", "Digits", "Metaspace"})  # of a text that is split


def longest_token(tokenizer: dict[str, Any]) -> int | None:
    """Return its bytes of the text, by a tokenizer.json; None if nothing is certain.

    It is certain where each byte of a text ends up in a token: with BPE over all bytes, and nothing before it
    that removes any. What is not known to keep them might not.
    """
    model = tokenizer["model"]
    if model["type"] != "BPE":
        return None
    pre_tokenizers = list(_parts(tokenizer["pre_tokenizer"], "pretokenizers"))
    normalizers = list(_parts(tokenizer["normalizer"], "normalizers"))
    added: list[dict[str, Any]] = tokenizer["added_tokens"]
    vocabulary: dict[str, int] = model["vocab"]
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    if not all(_keeps_all(part) for part in pre_tokenizers):
        return None
    if any(part["type"] == "ByteLevel" for part in pre_tokenizers):
        longest = max(map(len, vocabulary), default=0)  # a character stands for a byte
        every_byte = ByteLevel.alphabet()
    elif model["byte_fallback"]:
        longest = max((len(token.encode()) for token in vocabulary), default=0)
        every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return None
    shrink = 1
    for part in normalizers:
        factor = _shrinks(part)
        if factor is None:
            return None
        shrink *= factor
    longest = max([longest, *(len(token["content"].encode()) for token in added)])
    return longest * shrink if all(byte in vocabulary for byte in every_byte) else None


def _parts(part: dict[str, Any] | None, inner: str) -> Iterable[dict[str, Any]]:
    if part is None:
        return
    if part["type"] == "Sequence":
        for each in part[inner]:
            yield from _parts(each, inner)
    else:
        yield part


def _keeps_all(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return pre_tokenizer["behavior"] != "Removed"
    return pre_tokenizer["type"] in _KEEPS_ALL


def _shrinks(normalizer: dict[str, Any]) -> int | None:
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        shorter = pattern is None or len(normalizer["content"].encode()) < len(pattern.encode())
        return None if shorter else 1
    return _SHRINKS.get(normalizer["type"])

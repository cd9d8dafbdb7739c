"""The text of a model's tokenizer.json, made by transformers where the folder has older files. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.engine.models.json_fields import read_json

FILE = "tokenizer.json"
_OTHERS = ("*.model", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt")  # that one can be made of


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder has files of a tokenizer, whatever is in them."""
    return (folder / FILE).is_file() or any(next(folder.glob(each), None) for each in _OTHERS)


def check_tokenizer(folder: Path) -> None:
    """Raise ValueError unless the folder has files of a tokenizer."""
    if not has_tokenizer(folder):
        raise ValueError(
            f"{folder} has no tokenizer, neither {FILE} nor {', '.join(_OTHERS)}: save the model's own "
            "beside its weights (tokenizer.save_pretrained)"
        )


def tokenizer_json(folder: Path) -> str:
    """Return the text. Raises ValueError that says what is missing."""
    if (folder / FILE).is_file():
        return (folder / FILE).read_text(encoding="utf-8")
    check_tokenizer(folder)  # of nothing transformers makes an empty one for many types
    try:
        from transformers import AutoTokenizer  # slow to import

        backend: Any = getattr(AutoTokenizer.from_pretrained(str(folder)), "backend_tokenizer", None)
    except Exception as error:
        raise ValueError(
            f"{folder} has no {FILE}, and transformers could not make one: {error}. "
            "Save the model with its fast tokenizer (tokenizer.save_pretrained)."
        ) from None
    if not hasattr(backend, "to_str"):
        raise ValueError(f"{folder} has no {FILE}, and its tokenizer has no fast form")
    text: str = backend.to_str()
    return text


def eos_of_tokenizer(folder: Path) -> tuple[int, ...]:
    """Return the token that the tokenizer's configuration ends a text with, if that names one."""
    said = (read_json(folder / "tokenizer_config.json") or {}).get("eos_token")
    said = said.get("content") if isinstance(said, dict) else said
    if not isinstance(said, str) or not has_tokenizer(folder):
        return ()
    try:
        described = json.loads(tokenizer_json(folder))
        added = [each["id"] for each in described.get("added_tokens", ()) if each["content"] == said]
        vocabulary = described["model"].get("vocab")
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{folder / FILE} is no tokenizer: {error!r}; mend it, or download it again"
        ) from None
    if not added and isinstance(vocabulary, dict) and said in vocabulary:
        added = [vocabulary[said]]
    return tuple(added[:1])

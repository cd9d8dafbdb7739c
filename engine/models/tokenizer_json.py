"""A model's tokenizer, made by transformers where the folder has older files. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quire.engine.models.added_tokens import add_tokens, tokenizer_fields

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
    """Return the text of the folder's tokenizer. Raises ValueError as `read_tokenizer` does."""
    return read_tokenizer(folder).to_str()


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the folder's tokenizer, with the tokens that other files add. Raises ValueError."""
    file = folder / FILE
    if not file.is_file():
        return _made(folder)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # it raises no other kind
        raise ValueError(f"{file} is no tokenizer: {error}; mend it, or download it again") from None
    add_tokens(tokenizer, folder)
    return tokenizer


def _made(folder: Path) -> Tokenizer:
    """Return what transformers makes of older files. Raises ValueError that says what is missing."""
    check_tokenizer(folder)  # of nothing transformers makes an empty one for many types
    try:
        from transformers import AutoTokenizer  # slow to import

        backend: Any = getattr(AutoTokenizer.from_pretrained(str(folder)), "backend_tokenizer", None)
    except Exception as error:
        raise ValueError(
            f"{folder} has no {FILE}, and transformers could not make one: {error}. "
            "Save the model with its fast tokenizer (tokenizer.save_pretrained)."
        ) from None
    if not isinstance(backend, Tokenizer):
        raise ValueError(f"{folder} has no {FILE}, and its tokenizer has no fast form")
    return backend


def eos_of_tokenizer(folder: Path) -> tuple[int, ...]:
    """Return the token that the tokenizer's configuration ends a text with, if that names one."""
    said = tokenizer_fields(folder).get("eos_token")
    said = said.get("content") if isinstance(said, dict) else said
    if not isinstance(said, str) or not has_tokenizer(folder):
        return ()
    token = read_tokenizer(folder).token_to_id(said)
    return () if token is None else (token,)

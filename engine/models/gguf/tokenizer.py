"""The tokenizer and the chat templates that a GGUF file describes, as files of a model's folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger("quire.engine")

_TEMPLATE = "tokenizer.chat_template"
# How texts are split before pairs of bytes are merged, by names that llama.cpp gave tokenizers. transformers
# knows many; as GPT-2 does, by a regular expression that all byte-level ones have unless told otherwise:
_AS_GPT2 = {
    "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "roberta-bpe", "mellum",
    "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code", "gigachat", "a.x-4.0",
    "modern-bert",
}  # fmt: skip
# And as GPT-2 does once each digit stands alone:
_DIGITS_ALONE = {"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"}
# Words of the vocabulary are tokens, whatever merges lead to, and texts begin with a token of their own:
_WHOLE_WORDS = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken",
}  # fmt: skip
_KINDS = ("gpt2", "llama", "gemma4", "t5")  # that transformers makes a tokenizer of


def _check(metadata: dict[str, Any]) -> None:
    """Raise ValueError that says why no tokenizer can be made of what a file says."""
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if "tokenizer.ggml.tokens" not in metadata:
        raise ValueError("has no tokens (tokenizer.ggml.tokens): give the folder that its model was made of")
    if kind not in _KINDS:
        raise ValueError(f"has a tokenizer of the kind {kind!r}; known are {', '.join(_KINDS)}")
    begins = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")
    if begins and metadata.get("tokenizer.ggml.bos_token_id") is None:
        raise ValueError(
            "has texts begin with a token of which it has no number (tokenizer.ggml.bos_token_id)"
        )
    if kind != "gpt2" or split in (None, "default"):
        return
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if split not in _AS_GPT2 | _DIGITS_ALONE and split not in GGUF_PRE_TOKENIZER_SPLITS:
        raise ValueError(
            f"splits texts as {split!r} does (tokenizer.ggml.pre), which is not known here, and tokens would "
            "be others: give the folder that its model was made of"
        )


def save_tokenizer(path: Path, metadata: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json and what stands beside it. Raises ValueError that names the file."""
    try:
        _check(metadata)
        _made(path).save_pretrained(folder)
        _save_templates(metadata, folder)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    except OSError:
        raise
    except Exception as error:  # what is wrong in a file may raise anything
        raise ValueError(f"{path}: no tokenizer can be made of what it says: {error!r}") from error


def _made(path: Path) -> Any:
    """Return what transformers makes of a file, but for what it does not read. Raises anything."""
    from transformers import PreTrainedTokenizerFast  # slow to import
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, described, said = get_gguf_tokenizer(str(path))
    backend, _ = convert_gguf_tokenizer(architecture, described)
    kind, split = described["tokenizer_type"], described.get("pre_tokenizer_type")
    if kind == "gpt2" and split in (None, "default"):
        logger.warning("%s does not say how texts are split: they are as GPT-2 does", path)
    elif kind == "gpt2" and split in _DIGITS_ALONE:
        _put_digits_alone(backend)
    elif kind == "gpt2" and split in _WHOLE_WORDS:
        backend.model.ignore_merges = True
        said.setdefault("add_bos_token", said["bos_token"] is not None)
    elif kind == "llama" and described.get("add_prefix_space") is False:
        _leave_out_prefix(backend)
    said.pop("chat_template", None)  # which stands in a file of its own
    return PreTrainedTokenizerFast(tokenizer_object=backend, **said)


def _put_digits_alone(backend: Any) -> None:
    from tokenizers import pre_tokenizers

    alone = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([alone, backend.pre_tokenizer])


def _leave_out_prefix(backend: Any) -> None:
    """Have no space put before a text, nor one taken away of what is decoded."""
    from tokenizers import decoders, pre_tokenizers

    if not isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        return  # it puts none before
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )


def _save_templates(metadata: dict[str, Any], folder: Path) -> None:
    named = {
        name.removeprefix(f"{_TEMPLATE}."): source
        for name, source in metadata.items()
        if name.startswith(f"{_TEMPLATE}.") and isinstance(source, str)
    }
    if isinstance(metadata.get(_TEMPLATE), str):
        (folder / "chat_template.jinja").write_text(metadata[_TEMPLATE], encoding="utf-8")
    for name, source in named.items():
        if Path(name).name != name:
            raise ValueError(f"has a chat template of the name {name!r}, which no file can have")
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(source, encoding="utf-8")

"""The deployment: all that replicas share so that the digests of their blocks mean the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from quire.engine.models.adapter_config import CONFIG, adapter_file
from quire.engine.models.hub import model_name
from quire.engine.models.model_folders import ModelFolders

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "added_tokens.json",
    "tekken.json",
    "tokenizer.model",
    "tiktoken.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
NAMED_TEMPLATES = "additional_chat_templates/*.jinja"


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas whose descriptions are equal share one part of the registry, named by `fingerprint`."""

    model: str
    revision: str
    tokenizer: str
    block_size: int
    dtype: str  # of keys and values
    seed: str
    pinned: str = ""
    hash: str = "xxh3-128"
    schema: int = 1

    @property
    def fingerprint(self) -> str:
        """128 bits, in hex."""
        return _hex(msgspec.json.encode(self, order="sorted"))


def describe(
    model: str,
    lora: str | None,
    folders: ModelFolders,
    block_size: int,
    dtype: str,
    seed: int,
    pinned: list[list[int]],
) -> Deployment:
    """Describe the deployment of a model, with an adapter or without. pinned: token ids of prefixes."""
    return Deployment(
        model=model_id(model, lora),
        revision=revision(folders),
        tokenizer=tokenizer_digest(folders.tokenizer),
        block_size=block_size,
        dtype=dtype,
        seed=seed_digest(seed),
        pinned=pinned_digest(pinned),
    )


def model_id(model: str, lora: str | None = None) -> str:
    """Return a Hub id as it is, a folder or a file by its name: it may be elsewhere on another machine.

    lora: an adapter that is merged into the model, which then is another one.
    """
    return model_name(model) if lora is None else f"{model_name(model)} with {model_id(lora)}"


def revision(folders: ModelFolders) -> str:
    """Return what changes with the model's configuration, and with all of an adapter."""
    described = (folders.base / "config.json").read_bytes()
    if folders.adapter is None:
        return _hex(described)
    files = folders.adapter / CONFIG, adapter_file(folders.adapter)
    return _hex(
        b"".join(
            hashlib.sha256(each).digest() for each in (described, *(file.read_bytes() for file in files))
        )
    )


def tokenizer_digest(folder: Path) -> str:
    """Return what changes with everything that turns text or messages into token ids."""
    digest = hashlib.sha256()
    named = sorted(f"{path.parent.name}/{path.name}" for path in folder.glob(NAMED_TEMPLATES))
    for name in (*TOKENIZER_FILES, *named):
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]


def hash_seed(secret: str) -> int:
    """Derive the seed of block hashes from the secret that replicas and routers share; 64 bits."""
    return int.from_bytes(hashlib.sha256(b"quire block hashes\0" + secret.encode()).digest()[:8], "little")


def seed_digest(seed: int) -> str:
    """Tells seeds apart without giving them away."""
    return _hex(b"quire hash seed\0" + seed.to_bytes(8, "little"))


def pinned_digest(pinned: list[list[int]]) -> str:
    """Return the digest of every tenant's prefixes, on which the digests of what follows them depend."""
    return _hex(msgspec.json.encode(pinned)) if pinned else ""


def _hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]

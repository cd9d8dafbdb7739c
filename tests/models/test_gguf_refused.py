"""GGUF files that are not whole, or of what is not served, are refused by name."""

from __future__ import annotations

import struct
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest

from quire.engine.models.hub import check_model, describes_itself, resolve_model
from tests.models.gguf_file import byte_level, own_cache, save_gguf, write
from tests.models.quantised_folder import configure
from tests.models.test_float8 import load

__all__ = ["own_cache"]
pytestmark = pytest.mark.usefixtures("own_cache")

NO_TENSORS = {"token_embd.weight": np.zeros((4, 8), np.float32)}


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def edited(path: Path, before: bytes, after: bytes) -> None:
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after))


DAMAGED: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.write_bytes(b""), "is not a complete GGUF file"),
    (lambda path: cut(path, 20), "is not a complete GGUF file"),
    (lambda path: cut(path, 100), "is not a complete GGUF file"),
    (lambda path: cut(path, 3000), "is not a complete GGUF file"),
    (lambda path: cut(path, path.stat().st_size - 100_000), "is not a complete GGUF file: it ends at byte"),
    (lambda path: edited(path, b"GGUF", b"GGML"), "is no GGUF file"),
    (lambda path: edited(path, b"GGUF\3\0\0\0", b"GGUF\0\0\0\3"), "another byte order"),
    (
        lambda path: edited(path, b"tokenizer.ggml.pre", b"tokenizer.ggml.\xffre"),
        "is not a complete GGUF file",
    ),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGED)
def test_damaged_files_are_refused_before_a_start(
    damage: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    path, _ = save_gguf("llama", tmp_path)
    check_model(str(path))
    damage(path)
    for refuse in (check_model, resolve_model):
        with pytest.raises(ValueError, match=reason) as refused:
            refuse(str(path))
        assert str(path) in str(refused.value)


def test_a_file_that_ends_within_a_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    path, _ = save_gguf("llama", tmp_path)
    cut(path, path.stat().st_size - 40)
    with pytest.raises(
        ValueError,
        match=r"tiny\.gguf cannot be read: blk\.1\.\w+\.weight ends at byte \d+, and the file at",
    ):
        load(resolve_model(str(path)))


@pytest.mark.parametrize(("kind", "name"), [(24, "I8"), (99, "99")])
def test_tensors_of_unknown_types_are_refused_by_name(kind: int, name: str, tmp_path: Path) -> None:
    path, _ = save_gguf("llama", tmp_path)
    wanted = b"blk.0.attn_k.weight" + struct.pack("<IQQ", 2, 64, 32)
    edited(path, wanted + struct.pack("<I", 0), wanted + struct.pack("<I", kind))
    with pytest.raises(
        ValueError, match=rf"blk\.0\.attn_k\.weight is of the type {name}, which is not known"
    ):
        load(resolve_model(str(path)))


@pytest.mark.parametrize(
    ("architecture", "metadata", "reason"),
    [
        ("rwkv6", {}, r"of the architecture 'rwkv6', which is not served.*gemma2.*llama.*qwen3moe"),
        ("clip", {}, r"is a projector of images \(mmproj\), which is no model"),
        ("llama", {"general.type": "mmproj"}, r"is a projector of images \(mmproj\), which is no model"),
        ("llama", {"general.type": "adapter"}, "is of the type 'adapter', which is no model"),
    ],
)
def test_other_architectures_are_refused_by_name(
    architecture: str, metadata: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, architecture, metadata, NO_TENSORS)
    for refuse in (check_model, resolve_model):
        with pytest.raises(ValueError, match=reason):
            refuse(str(path))


METADATA: list[tuple[dict[str, Any], str]] = [
    ({"llama.attention.head_count": None}, r"has no llama\.attention\.head_count in its metadata"),
    (
        {"llama.attention.head_count_kv": [2, 2, 1, 2]},
        r"layers that differ in llama\.attention\.head_count_kv",
    ),
    ({"llama.attention.causal": False}, r"has attention\.causal = False"),
    ({"llama.attention.value_length": 8}, "has keys of 16 numbers, and values of another number"),
    ({"llama.rope.dimension_count": 8}, "rotates 8 of the 16 numbers of a head"),
    ({"llama.rope.scaling.type": "su"}, r"has rope\.scaling\.type 'su'"),
    ({"llama.rope.scaling.type": "yarn"}, r"YaRN without rope\.scaling\.original_context_length"),
    ({"llama.attention.head_count": 0}, "has metadata that cannot be read: ZeroDivisionError"),
    ({"llama.embedding_length": "many"}, "has metadata that cannot be read: TypeError"),
    ({"tokenizer.ggml.eos_token_id": 1000}, "no tokenizer can be made of what it says: IndexError"),
    (
        {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None},
        "has texts begin with a token of which it has no number",
    ),
    ({"tokenizer.chat_template./etc/passwd": "x"}, "has a chat template of the name '/etc/passwd'"),
    ({"llama.pooling_type": 1}, "pools by pooling_type 1"),
    ({"tokenizer.ggml.tokens": None}, "has no tokens"),
    ({"tokenizer.ggml.model": "rwkv"}, "has a tokenizer of the kind 'rwkv'; known are gpt2, llama"),
    ({"tokenizer.ggml.pre": "unheard-of"}, r"splits texts as 'unheard-of' does \(tokenizer\.ggml\.pre\)"),
]


@pytest.mark.parametrize(("metadata", "reason"), METADATA, ids=[reason for _, reason in METADATA])
def test_what_is_not_served_of_a_model_is_refused_by_name(
    metadata: dict[str, Any], reason: str, tmp_path: Path, own_cache: Path
) -> None:
    path, _ = save_gguf("llama", tmp_path, metadata=metadata)
    with pytest.raises(ValueError, match=reason) as refused:
        resolve_model(str(path))
    assert str(path) in str(refused.value)
    assert not [*own_cache.glob("quire/gguf/*")]  # nothing is left of what was begun


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_missing_and_unknown_tensors_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    tensors = {"blk.1.attn_q.weight": None, "blk.0.other.weight": np.zeros((4, 8), np.float32)}
    path, _ = save_gguf(kind, tmp_path, tensors=tensors)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj\.weight is missing") as refused:
        load(resolve_model(str(path)))
    assert "blk.0.other.weight is no weight of" in str(refused.value)
    assert "tiny does not fit its config.json" in str(refused.value)


def test_a_folder_of_several_files_is_refused_with_their_names(tmp_path: Path) -> None:
    metadata = byte_level(97)
    for name in ("a-Q4_K_M.gguf", "a-Q8_0.gguf", "mmproj-a.gguf"):
        write(tmp_path / name, "llama", metadata, NO_TENSORS)
    for refuse in (check_model, resolve_model):
        with pytest.raises(
            ValueError, match=r"several GGUF files: a-Q4_K_M\.gguf, a-Q8_0\.gguf; give the path"
        ):
            refuse(str(tmp_path))


def test_folders_of_other_weights_are_no_gguf_files(tmp_path: Path) -> None:
    path, _ = save_gguf("llama", tmp_path)
    path.rename(tmp_path / "folder" / "beside.gguf")
    assert resolve_model(str(tmp_path / "folder")) == tmp_path / "folder"
    configure(tmp_path / "folder", {"quant_method": "gguf"})
    with pytest.raises(ValueError, match=r"has the method 'gguf', and the files are no GGUF files"):
        load(tmp_path / "folder")


def test_a_cache_that_cannot_be_written_is_refused_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = save_gguf("llama", tmp_path)
    (tmp_path / "taken").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(ValueError, match=r"cannot be written to .*/taken/quire/gguf.*set XDG_CACHE_HOME"):
        resolve_model(str(path))


def repository(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Have the Hub's downloads be this folder; return what is asked of it."""
    asked: list[dict[str, Any]] = []

    def download(name: str, **given: Any) -> str:
        asked.append({"name": name} | given)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


HELD = (
    "inside/tiny-Q8_0.gguf", "tiny-Q8_0-00001-of-00002.gguf", "tiny-Q4_0.gguf", "mmproj-tiny-Q8_0.gguf",
    "tiny-UQ8_0.gguf", "config.json",
)  # fmt: skip


@pytest.mark.parametrize("quantised", ["Q8_0", "q8_0", "tiny-Q8_0"])
def test_a_file_of_the_hub_is_named_by_how_it_is_quantised(
    quantised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = save_gguf("llama", tmp_path)
    (tmp_path / "snapshot" / "inside").mkdir(parents=True)
    path.rename(tmp_path / "snapshot" / "inside" / "tiny-Q8_0.gguf")
    for other in ("tiny-Q4_0.gguf", "mmproj-Q8_0.gguf", "tiny-UQ8_0.gguf"):  # which came before
        (tmp_path / "snapshot" / other).touch()
    asked = repository(tmp_path / "snapshot", monkeypatch)
    name = f"owner/name:{quantised}"
    check_model(name)
    assert describes_itself(name) and not describes_itself("owner/name") and not describes_itself(str(path))
    assert resolve_model(name).name == "tiny-Q8_0"
    (only,) = asked
    assert only["name"] == "owner/name"
    taken = [name for name in HELD if any(fnmatch(name, each) for each in only["allow_patterns"])]
    assert [name for name in taken if not any(fnmatch(name, each) for each in only["ignore_patterns"])] == [
        "inside/tiny-Q8_0.gguf",
        "tiny-Q8_0-00001-of-00002.gguf",
    ]


def test_a_file_that_the_hub_has_not_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=r"owner/name has no GGUF file on the Hub whose name ends with Q2_K"):
        resolve_model("owner/name:Q2_K")
    for name in ("one-UD-Q2_K.gguf", "one-Q2_K.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(
        ValueError, match=r"by Q2_K, has several GGUF files: one-Q2_K\.gguf, one-UD-Q2_K\.gguf"
    ):
        resolve_model("owner/name:Q2_K")

"""`quire serve --pin-prefix`: what its lines may be, and that every key's requests find them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server_process import serving

from quire.service.commands.pinned_prefixes import read_pinned_prefixes, tokenize_pinned_prefixes
from quire.service.demo import MODEL_FOLDER
from quire.service.text.tokenizer import Tokenizer

SECONDS = 60
TEXT = "A KV cache keeps the keys and values of all tokens that a model has read. " * 3
SYSTEM = "You are a librarian who answers questions about block tables. " * 3
MESSAGES = [{"role": "system", "content": SYSTEM}]


@pytest.fixture(scope="module")
def pin_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pins") / "pins.jsonl"
    path.write_text(f"{json.dumps(TEXT)}\n\n{json.dumps(MESSAGES)}\n")
    return path


def pinning(pin_file: Path, num_blocks: int) -> list[str]:
    return ["--pin-prefix", str(pin_file), "--num-gpu-blocks-override", str(num_blocks), "--swap-space", "0"]


@pytest.fixture(scope="module")
def url(pin_file: Path) -> Iterator[str]:
    with serving(*pinning(pin_file, 128), "--api-key", "one", "--api-key", "two") as address:
        yield address


def post(url: str, key: str, path: str, body: dict[str, object]) -> int:
    """How many of the prompt's tokens were cached."""
    settings = {"max_tokens": 4, "temperature": 0}
    headers = {"Authorization": f"Bearer {key}"}
    reply = httpx.post(f"{url}/v1/{path}", json={**body, **settings}, headers=headers, timeout=SECONDS)
    assert reply.status_code == 200, reply.text
    cached: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def blocks(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer one"}, timeout=SECONDS).text
    device = re.findall(r'^quire_kv_blocks\{state="(\w+)",tier="device"\} ([\d.]+)$', text, re.MULTILINE)
    pinned = re.findall(r"^(quire_kv_pinned)_blocks ([\d.]+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in [*device, *pinned]}


def test_every_key_finds_what_is_pinned_and_nothing_of_another_key(url: str, pin_file: Path) -> None:
    tokenizer = Tokenizer.from_folder(Path(MODEL_FOLDER))
    text, chat = (
        len(tokens) for tokens in tokenize_pinned_prefixes(read_pinned_prefixes([pin_file]), tokenizer)
    )
    assert min(text, chat) >= 32
    before = blocks(url)
    assert before["cached"] == before["quire_kv_pinned"] == -(-text // 16) + -(-chat // 16)
    conversation = [*MESSAGES, {"role": "user", "content": "What is in a block table? " * 4}]
    for key in ("one", "two"):
        assert post(url, key, "completions", {"prompt": TEXT + " Then it computes the next one."}) == text
        assert post(url, key, "chat/completions", {"messages": conversation}) == chat
    assert post(url, "one", "chat/completions", {"messages": conversation}) > chat  # its own question
    after = blocks(url)
    assert after["active"] == 0 and after["quire_kv_pinned"] == before["quire_kv_pinned"]
    assert after["cached"] > before["cached"] and after["free"] + after["cached"] == 128


def test_too_many_blocks_are_refused_at_start(pin_file: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "quire.cli", "serve", "--port", "0", *pinning(pin_file, 6)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode != 0
    assert re.search(r"--pin-prefix needs \d+ KV blocks of 16 tokens, but at most 3 of the 6", ended.stderr)


@pytest.mark.parametrize("line", ["text", '{"role": "system"}', '[{"role": "system"}]', "[1]", "null"])
def test_a_line_that_is_no_beginning_of_a_prompt_is_refused_by_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "pins.jsonl"
    path.write_text(f'"fine"\n{line}\n')
    with pytest.raises(
        ValueError, match=r"pins\.jsonl, line 2: expected a JSON string or a list of messages"
    ):
        read_pinned_prefixes([path])


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.jsonl cannot be read"):
        read_pinned_prefixes([tmp_path / "nowhere.jsonl"])

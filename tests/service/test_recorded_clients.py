"""What coding agents really sent, byte for byte (`QUIRE_RECORD=FOLDER make clients` keeps it anew)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from quire.loadtest.demo_model.tokenizer import MODEL_FOLDER
from quire.service.text.tokenizer import Tokenizer
from tests.service.live import Live

RECORDED = Path(__file__).parent / "recorded"
REQUESTS = [
    pytest.param(folder, request, id=f"{folder.name}-{request['body']}")
    for folder in sorted(RECORDED.iterdir())
    for request in json.loads((folder / "requests.json").read_text(encoding="utf-8"))
]
LAST = {"/v1/responses": "response.completed", "/v1/messages": "message_stop"}
IGNORED = {
    "claude_code": [
        *("?beta", "cache_control", "context_management", "metadata", "output_config.effort", "thinking"),
    ],
    "codex": [
        *("client_metadata", "include.reasoning.encrypted_content", "namespace", "prompt_cache_key"),
        *("reasoning.summary", "web_search"),
    ],
}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """A server with the bundled model's tokenizer and template, and room for the prompts of agents."""
    tokenizer = Tokenizer.from_folder(MODEL_FOLDER)
    end = tokenizer.added_token("<|eos|>")
    assert end is not None
    said = [*tokenizer.encode("Hello from Quire.", add_special_tokens=False), end]
    live = Live(tokenizer, script=lambda prompt, params, index: said)
    engine = live.engine
    roomy = replace(engine._info, vocab_size=1 << 16, max_model_len=400_000, num_blocks=40_000)
    engine._info = engine.info = replace(roomy, eos_token_ids=(end,))
    yield live
    assert live.end() == 0


@pytest.mark.parametrize(("folder", "request_"), REQUESTS)
def test_it_is_answered(server: Live, folder: Path, request_: dict[str, Any]) -> None:
    body = (folder / request_["body"]).read_bytes()
    reply = httpx.post(server.url + request_["path"], content=body, headers=request_["headers"], timeout=60)
    assert reply.status_code == 200, reply.text
    ignored = reply.headers.get("x-quire-ignored", "").split(", ")
    assert sorted(filter(None, ignored)) == IGNORED[folder.name]
    if json.loads(body).get("stream"):
        *_, last = [line for line in reply.text.splitlines() if line.startswith("event: ")]
        ends = LAST[request_["path"].partition("?")[0]]
        assert last == f"event: {ends}" and reply.text.count(last) == 1
    else:
        assert reply.json()

"""A service around an engine without a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from starlette.types import ASGIApp

from engine.config import EngineInfo
from service.app import create_app
from service.chat_template import ChatTemplate
from service.config import ServiceConfig
from service.state import ServerState
from service.tokenizer import Tokenizer
from tests.service import tiny_tokenizers
from tests.service.fake_engine import FakeEngine, Script, echo

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(CHAT_TEMPLATE, {}))


def make_info(tokenizer: Tokenizer) -> EngineInfo:
    """What the service reads of it is real; the rest is 1."""
    read: dict[str, Any] = {
        "model": "/models/tiny",
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "device": "cpu",
        "vocab_size": 320,
        "eos_token_ids": (tokenizer.encode("<|end|>", add_special_tokens=False)[0],),
        "max_model_len": 400,
        "block_size": 16,
        "num_blocks": 100,
        "num_host_blocks": 64,
        "bytes_per_block": 1024,
        "max_num_seqs": 130,
    }
    rest: dict[str, Any] = {
        field.name: 1 for field in msgspec.structs.fields(EngineInfo) if field.name not in read
    }
    return EngineInfo(**read, **rest)


@dataclass
class Service:
    app: ASGIApp
    state: ServerState
    engine: FakeEngine


@pytest.fixture
def make_service(tokenizer: Tokenizer) -> Callable[..., Service]:
    """A ready service; keywords that are not the engine's are ServiceConfig's."""

    def make(*, auto: bool = True, script: Script = echo, ready: bool = True, **config: Any) -> Service:
        state = ServerState(ServiceConfig(served_model_names=("tiny", "alias"), **config))
        engine = FakeEngine(make_info(tokenizer), auto=auto, script=script)
        state.set_engine(engine)
        if ready:
            engine.become_ready()
            state.tokenizer = tokenizer
        return Service(create_app(state), state, engine)

    return make


@pytest.fixture
async def service(make_service: Callable[..., Service]) -> Service:
    return make_service()

"""A service around an engine without a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.types import ASGIApp

from quire.engine.models.pooling import Pooling
from quire.service.app import create_app
from quire.service.config import ServiceConfig
from quire.service.state import ServerState
from quire.service.text.template import ChatTemplate
from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers
from tests.service.fake_engine import FakeEngine, Script, echo, make_info
from tests.service.inline_renderer import InlineRenderer
from tests.service.live import Live

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


@dataclass
class Service:
    app: ASGIApp
    state: ServerState
    engine: FakeEngine


@pytest.fixture
async def make_service(tokenizer: Tokenizer) -> AsyncIterator[Callable[..., Service]]:
    """A ready service; keywords that are not the engine's are ServiceConfig's.

    Chat templates are rendered at once, for which no process has to start: whoever steps the engine by hand
    counts the loop's turns, too. Processes that do it are in test_template_renderer.py and live servers.
    """
    made: list[ServerState] = []

    def make(
        *,
        auto: bool = True,
        script: Script = echo,
        ready: bool = True,
        pooling: Pooling | None = None,
        **config: Any,
    ) -> Service:
        state = ServerState(ServiceConfig(served_model_names=("tiny", "alias"), **config))
        state.renderer = InlineRenderer()
        engine = FakeEngine(make_info(tokenizer, pooling), auto=auto, script=script)
        state.set_engine(engine)
        if ready:
            engine.become_ready()
            state.tokenizer = tokenizer
        made.append(state)
        return Service(create_app(state), state, engine)

    yield make
    for state in made:
        await state.grammar_trials.close()
        await state.renderer.close()


@pytest.fixture
async def service(make_service: Callable[..., Service]) -> Service:
    return make_service()


@pytest.fixture(scope="module")
def live(tokenizer: Tokenizer) -> Iterator[Live]:
    """A server that asks for the key "key"."""
    server = Live(tokenizer, api_keys=("key",))
    yield server
    assert server.end() == 0


@pytest.fixture
def make_live(tokenizer: Tokenizer) -> Iterator[Callable[..., Live]]:
    made: list[Live] = []

    def make(**settings: Any) -> Live:
        made.append(Live(tokenizer, **settings))
        return made[-1]

    yield make
    for server in made:
        server.end()

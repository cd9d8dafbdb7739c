"""A Redis for each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.loadtest.servers.redis_server import RedisServer


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"

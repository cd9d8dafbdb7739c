"""Who shares cached blocks with whom: the salt that the engine is given."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from tests.service.asgi import get, post
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio
BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
}


async def salts(service: Service, *given: tuple[str, str | None]) -> list[str]:
    """What the engine gets for requests with these keys and `cache_salt`s; the same at both endpoints."""
    found: list[list[str]] = []
    for path, body in BODIES.items():
        before = len(service.engine.streams)
        for key, own in given:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert (await post(service.app, path, {**body, "cache_salt": own}, **headers)).status == 200
        found.append([stream.cache_salt for stream in service.engine.streams[before:]])
    assert found[0] == found[1]
    return found[0]


async def test_keys_and_salts_each_part(make_service: Callable[..., Service]) -> None:
    service = make_service(api_keys=("secret", "other"))
    every = [(key, own) for key in ("secret", "other") for own in (None, "a", "b")]
    first, again = await salts(service, *every), await salts(service, *every)
    assert first == again
    assert len(set(first)) == len(every)


async def test_a_salt_cannot_make_another_tenants(make_service: Callable[..., Service]) -> None:
    """Not even by one who knows how the salt is made."""
    service = make_service(api_keys=("secret", "other"))
    (target,) = await salts(service, ("other", None))
    found = await salts(service, ("secret", target), ("secret", target[1:]), ("secret", None))
    assert target not in found
    assert not any(salt.startswith(target) for salt in found)


async def test_without_keys_only_the_own_salt_counts(service: Service) -> None:
    assert await salts(service, ("", None), ("", "a"), ("", "b")) == ["", "a", "b"]
    assert await salts(service, ("made-up", None)) == [""]


async def test_every_prompt_has_the_salt(service: Service) -> None:
    await post(service.app, "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1, "cache_salt": "s"})
    assert [stream.cache_salt for stream in service.engine.streams] == ["s", "s"]


async def test_neither_key_nor_salt_is_told(
    make_service: Callable[..., Service], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    service = make_service(api_keys=("secret-key",))
    (salt,) = await salts(service, ("secret-key", "own-salt"))
    for path, body in BODIES.items():  # refused ones, too
        reply = await post(
            service.app,
            path,
            {**body, "cache_salt": "own-salt", "temperature": 3},
            authorization="Bearer secret-key",
        )
        assert reply.status == 400
        assert b"own-salt" not in reply.body
    told = (await get(service.app, "/metrics")).body.decode() + caplog.text
    assert "quire_requests" in told
    for private in ("secret-key", "own-salt", salt, salt.removesuffix("own-salt")):
        assert private not in told

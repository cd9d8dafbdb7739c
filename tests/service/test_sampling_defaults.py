"""A request has the model's own values for what it leaves out, at each endpoint, and its own for the rest."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.engine.models.generation_config import SamplingDefaults
from tests.service.asgi import post
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio
DEFAULTS = SamplingDefaults(
    temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.1, logit_bias={7: -100.0}, max_tokens=5
)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
}


@pytest.fixture(autouse=True)
def has_defaults(service: Service) -> None:
    assert service.engine.info is not None
    service.engine.info = msgspec.structs.replace(service.engine.info, sampling_defaults=DEFAULTS)


@pytest.mark.parametrize("path", BODIES)
async def test_what_is_left_out_is_the_models(path: str, service: Service) -> None:
    reply = (await post(service.app, path, BODIES[path])).json()
    await post(service.app, path, BODIES[path] | {"temperature": 0, "top_p": 1.0})
    first, second = (stream.params for stream in service.engine.streams)
    assert (first.temperature, first.top_p, first.max_tokens) == (0.6, 0.9, 5)
    assert (second.temperature, second.top_p) == (0.0, 1.0)
    for params in (first, second):
        assert (params.top_k, params.repetition_penalty, params.logit_bias) == (20, 1.1, {7: -100.0})
    if path == "/v1/responses":
        assert (reply["temperature"], reply["top_p"]) == (0.6, 0.9)


async def test_a_request_can_switch_each_off_and_beams_are_not_drawn(service: Service) -> None:
    off = {"top_k": -1, "repetition_penalty": 1.0, "logit_bias": {}, "max_tokens": 3}
    beams = {"use_beam_search": True, "n": 2, "repetition_penalty": 1, "logit_bias": {}}
    await post(service.app, "/v1/completions", BODIES["/v1/completions"] | off)
    await post(service.app, "/v1/completions", BODIES["/v1/completions"] | beams)
    first, beams = (stream.params for stream in service.engine.streams)
    assert (first.top_k, first.repetition_penalty, first.logit_bias, first.max_tokens) == (0, 1.0, {}, 3)
    assert (beams.temperature, beams.top_k, beams.top_p) == (0.0, 0, 1.0)


async def test_what_beams_cannot_do_of_the_folders_is_refused_and_not_left_out(service: Service) -> None:
    beams = BODIES["/v1/completions"] | {"use_beam_search": True, "n": 2}
    reply = await post(service.app, "/v1/completions", beams)
    error = reply.json()["error"]
    assert (reply.status, error["param"]) == (400, "repetition_penalty")
    assert "give repetition_penalty 1.0 to go without it, or start with" in str(error)
    reply = await post(service.app, "/v1/completions", beams | {"repetition_penalty": 1.0})
    assert (reply.status, reply.json()["error"]["param"]) == (400, "logit_bias")
    assert not service.engine.streams

"""GET /api/version, /api/tags and /api/ps, and POST /api/show."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from msgspec import json
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.config import EngineInfo
from quire.service.api.ollama.protocol import ShowRequest
from quire.service.api.ollama.replies import (
    ModelDetails,
    OllamaModel,
    OllamaModels,
    OllamaVersion,
    RunningModel,
    RunningModels,
    ShowReply,
)
from quire.service.errors import bad_value
from quire.service.http.codec import JsonResponse, decode
from quire.service.http.gate import note_ignored
from quire.service.state import ServerState

if TYPE_CHECKING:
    from quire.service.text.template import ChatTemplate

API_VERSION = "0.12.6"  # of Ollama, whose API this is: clients ask whether it is new enough for them
_FOREVER = datetime(9999, 12, 31, tzinfo=UTC)
_LATEST = ":latest"

_to_show = json.Decoder(ShowRequest)


def served_name(state: ServerState, given: str) -> str:
    """Return the model's name here; Ollama's clients may have put a tag to it. Raises ApiError 404."""
    if given not in state.config.served_model_names:
        given = given.removesuffix(_LATEST)
    return state.check_model(given)


async def ollama_version(state: ServerState, request: Request) -> Response:
    return JsonResponse(OllamaVersion(API_VERSION))


async def ollama_tags(state: ServerState, request: Request) -> Response:
    return JsonResponse(OllamaModels([OllamaModel(**fields) for fields in _models(state)]))


async def ollama_ps(state: ServerState, request: Request) -> Response:
    """Tell that all that is served is loaded, and stays."""
    _, _, info = state.serving()
    running: dict[str, Any] = {
        "expires_at": _FOREVER,
        "size_vram": 0 if info.device == "cpu" else info.weight_bytes,
        "context_length": info.max_request_tokens,
    }
    return JsonResponse(RunningModels([RunningModel(**fields, **running) for fields in _models(state)]))


async def ollama_show(state: ServerState, request: Request) -> Response:
    _, tokenizer, info = state.serving()
    body = await decode(request, _to_show)
    note_ignored(request.scope, ["verbose"] if body.verbose is not None else [])
    name = body.model or body.name
    if name is None:
        raise bad_value("model", "missing required field 'model'", "missing_field")
    served_name(state, name)
    template = tokenizer.chat_template
    family = _family(info)
    model_info = {
        "general.architecture": family,
        f"{family}.context_length": info.max_request_tokens,
        f"{family}.vocab_size": info.vocab_size,
    }
    reply = ShowReply(
        template="{{ .Prompt }}" if template is None else template.source,
        details=_details(info),
        model_info=model_info,
        capabilities=["embedding"] if info.pooling is not None else _capabilities(template),
        modified_at=_modified(state),
    )
    return JsonResponse(reply)


def _models(state: ServerState) -> list[dict[str, Any]]:
    """Return the fields of each name that the model goes by."""
    _, _, info = state.serving()
    return [
        {
            "name": name,
            "model": name,
            "modified_at": _modified(state),
            "size": info.weight_bytes,
            "digest": hashlib.sha256(f"{info.model}\n{name}".encode()).hexdigest(),
            "details": _details(info),
        }
        for name in state.config.served_model_names
    ]


def _modified(state: ServerState) -> datetime:
    return datetime.fromtimestamp(state.created, UTC)


def _details(info: EngineInfo) -> ModelDetails:
    family = _family(info)
    return ModelDetails(format="safetensors", family=family, families=[family], quantization_level=info.dtype)


def _family(info: EngineInfo) -> str:
    """Return the family by the architecture: of LlamaForCausalLM llama."""
    return info.architecture.lower().removesuffix("forcausallm")


def _capabilities(template: ChatTemplate | None) -> list[str]:
    known = ["completion"]
    if template is not None and template.tool_format is not None:
        known.append("tools")
    if template is not None and template.mentions("enable_thinking"):
        known.append("thinking")
    return known

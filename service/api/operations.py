"""The endpoints, with the types that their requests and replies have, and all errors that can come."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from quire.service.answer import replies
from quire.service.api.anthropic.protocol import CountTokensRequest, MessagesRequest
from quire.service.api.anthropic.replies import MessageReply, TokenCount
from quire.service.api.ollama.protocol import (
    EmbeddingsRequest,
    EmbedRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    ShowRequest,
)
from quire.service.api.ollama.replies import (
    EmbeddingsReply,
    EmbedReply,
    OllamaChatReply,
    OllamaGenerateReply,
    OllamaModels,
    OllamaVersion,
    RunningModels,
    ShowReply,
)
from quire.service.api.pooling.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.service.api.pooling.replies import ClassifyReply, EmbeddingReply, RerankReply, ScoreReply
from quire.service.api.requests.chat import ChatRequest
from quire.service.api.requests.completions import CompletionRequest
from quire.service.api.requests.lab import LabBegin, LabReply, LabStep
from quire.service.api.requests.tokens import DetokenizeRequest, TokenizeRequest
from quire.service.api.responses.input_items import MAX_LIMIT, InputItems
from quire.service.api.responses.protocol import ResponseRequest
from quire.service.api.responses.replies import DeletedResponse, ResponseReply
from quire.service.errors import ErrorReply
from quire.service.explain.reply import WhyReply
from quire.service.http.dialects import AnthropicError, OllamaError
from quire.service.inspector.replies import BlockReply, OwnBlocksReply, PrefixTree

JSON, SSE, _TEXT, _HTML = "application/json", "text/event-stream", "text/plain", "text/html"
_LINES = (JSON, "application/x-ndjson")
_OPENMETRICS = "application/openmetrics-text"
_ANY = {
    400: "A value that is not understood or not allowed; `param` names it, the Host header included",
    431: "The path and the headers are too large",
}
_KEYED = {401: "No valid API key"}
_NOT_READY = {503: "Loading, shutting down, the engine is dead or stalled, or a process was lost: try again"}
_BODY = {
    404: "No such model",
    408: "The body did not come in time",
    413: "The body, or the prompt in it, is too large",
    415: "Not application/json",
    500: "A failure of ours, or of the engine on this request",
}
_QUEUED = {429: "The queue is full"}
_PICKED_UP = {
    404: "No such stream of this API key, or no longer",
    409: "Another connection reads it now",
    410: "The events after Last-Event-ID are forgotten",
    500: "It failed before its first event",
    503: "It ended before its first event, with the server or because the engine was stalled",
}
RETRIED = (429, 503)


@dataclass(frozen=True)
class Parameter:
    name: str
    place: Literal["path", "header", "query"]
    description: str
    schema: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "in": self.place,
            "required": self.place == "path",
            "description": self.description,
            "schema": {"type": "string", **self.schema},
        }


_STREAM_ID = {"pattern": "^[A-Za-z0-9._-]{1,64}$"}
_CHOSEN_ID = Parameter(
    "X-Stream-Id", "header", "With stream: true, the stream can be picked up again", _STREAM_ID
)
_LAST_EVENT = Parameter(
    "Last-Event-ID", "header", "Only what follows this event", {"pattern": r"^[0-9]{1,10}(\.[0-9]{1,10})?$"}
)


@dataclass(frozen=True)
class Operation:
    """`errors` are all that can come instead of a 200, which is of the kinds `content`."""

    path: str
    summary: str
    errors: dict[int, str]
    request: type | None = None
    reply: type | None = None
    content: tuple[str, ...] = (JSON,)
    parameters: tuple[Parameter, ...] = ()
    empty: str = ""  # when it is answered with 204
    error: type = ErrorReply
    deletes: bool = False
    endless: bool = False  # a stream that goes on until the client leaves

    @property
    def method(self) -> str:
        if self.deletes:
            return "delete"
        return "get" if self.request is None else "post"


_RESPONSE_ID = Parameter("id", "path", "As it was returned", {"minLength": 1})
_INCLUDE = Parameter("include", "query", "Without effect: there is what was answered", {})
_PAGE = (
    Parameter("limit", "query", "20, if left out", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT}),
    Parameter("order", "query", "The newest first, if left out", {"enum": ["asc", "desc"]}),
    Parameter("after", "query", "Only what follows the item of this id", {"minLength": 1}),
    Parameter("before", "query", "Only what stands before the item of this id", {"minLength": 1}),
    _INCLUDE,
)
_STREAM = Parameter("stream_id", "path", "Its X-Stream-Id", _STREAM_ID)
_NOT_TOLD = {500: "The engine failed to tell"}
_WRONG_PARAMETER = {400: "A parameter is none of these, or has no such value"}
_NOT_STORED = {404: "No such response of this API key is stored"}

_POST = _ANY | _KEYED | _BODY | _QUEUED | _NOT_READY
_GET = _ANY | _KEYED | _NOT_READY
_LAB = (
    _ANY | _KEYED | {status: _BODY[status] for status in (408, 413, 415)} | {429: "Too much comes in at once"}
)


def _generation(path: str, summary: str, request: type, reply: type) -> Operation:
    in_use = {409: "A stream of this X-Stream-Id is there already, or another connection reads this one now"}
    return Operation(path, summary, _POST | in_use, request, reply, (JSON, SSE), (_CHOSEN_ID,))


_ollama = partial(Operation, error=OllamaError)

OPERATIONS = (
    _generation("/v1/completions", "Continue a text", CompletionRequest, replies.CompletionReply),
    _generation("/v1/chat/completions", "Answer in a chat", ChatRequest, replies.ChatReply),
    _generation("/v1/responses", "Answer, in OpenAI's newer form", ResponseRequest, ResponseReply),
    Operation(
        "/v1/responses/{id}",
        "Read a stored response",
        _GET | _NOT_STORED | _WRONG_PARAMETER,
        reply=ResponseReply,
        parameters=(_RESPONSE_ID, _INCLUDE, Parameter("stream", "query", "Only false", {"enum": ["false"]})),
    ),
    Operation(
        "/v1/responses/{id}",
        "Delete a stored response",
        _GET | _NOT_STORED,
        reply=DeletedResponse,
        parameters=(_RESPONSE_ID,),
        deletes=True,
    ),
    Operation(
        "/v1/responses/{id}/input_items",
        "Read what was said up to a stored response",
        _GET | _NOT_STORED | _WRONG_PARAMETER,
        reply=InputItems,
        parameters=(_RESPONSE_ID, *_PAGE),
    ),
    replace(
        _generation("/v1/messages", "Answer, in Anthropic's form", MessagesRequest, MessageReply),
        error=AnthropicError,
    ),
    Operation(
        "/v1/messages/count_tokens",
        "Count the tokens of a prompt in Anthropic's form",
        _POST,
        CountTokensRequest,
        TokenCount,
        error=AnthropicError,
    ),
    _ollama(
        "/api/chat", "Answer in a chat, in Ollama's form", _POST, OllamaChatRequest, OllamaChatReply, _LINES
    ),
    _ollama(
        "/api/generate",
        "Answer a prompt, in Ollama's form",
        _POST,
        OllamaGenerateRequest,
        OllamaGenerateReply,
        _LINES,
    ),
    Operation("/v1/embeddings", "Embed texts: a vector of each", _POST, EmbeddingRequest, EmbeddingReply),
    *(
        Operation(path, "Sort documents by how well they fit a query", _POST, RerankRequest, RerankReply)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        Operation(path, "Tell how well pairs of texts fit", _POST, ScoreRequest, ScoreReply)
        for path in ("/v1/score", "/score")
    ),
    Operation("/classify", "Tell which label fits a text", _POST, ClassifyRequest, ClassifyReply),
    _ollama("/api/embed", "Embed texts, in Ollama's form", _POST, EmbedRequest, EmbedReply),
    _ollama(
        "/api/embeddings", "Embed a text, in Ollama's older form", _POST, EmbeddingsRequest, EmbeddingsReply
    ),
    _ollama("/api/show", "Describe a served model, in Ollama's form", _POST, ShowRequest, ShowReply),
    _ollama("/api/tags", "List the served models, in Ollama's form", _GET, reply=OllamaModels),
    _ollama("/api/ps", "List the loaded models, in Ollama's form", _GET, reply=RunningModels),
    _ollama("/api/version", "The version of Ollama's API", _ANY | _KEYED, reply=OllamaVersion),
    Operation("/v1/models", "List the served models", _GET, reply=replies.ModelList),
    Operation(
        "/v1/models/{name}",
        "Describe a served model",
        _GET | {404: "No such model"},
        reply=replies.Model,
        parameters=(Parameter("name", "path", "As it is served", {"minLength": 1}),),
    ),
    Operation(
        "/v1/streams/{stream_id}",
        "Pick up a stream that was started with an X-Stream-Id",
        _ANY | _KEYED | _PICKED_UP,
        content=(SSE,),
        parameters=(_STREAM, _LAST_EVENT),
        empty="There is nothing after Last-Event-ID",
    ),
    Operation(
        "/v1/streams/{stream_id}",
        "Stop a stream that was started with an X-Stream-Id",
        _ANY | _KEYED | {404: _PICKED_UP[404]},
        reply=replies.StoppedStream,
        parameters=(_STREAM,),
        deletes=True,
    ),
    Operation(
        "/v1/requests/{request_id}/why",
        "Where the time of a request went, and why",
        _ANY | _KEYED | {404: "No such request of this API key, or it is forgotten"},
        reply=WhyReply,
        parameters=(Parameter("request_id", "path", "Its X-Request-Id", _STREAM_ID),),
    ),
    Operation("/tokenize", "Text or messages to token ids", _POST, TokenizeRequest, replies.TokenizeReply),
    Operation("/detokenize", "Token ids to text", _POST, DetokenizeRequest, replies.DetokenizeReply),
    Operation(
        "/v1/blocks/events",
        "The map of the KV cache's blocks as it changes, or only their counts",
        _GET,
        content=(SSE,),
        parameters=(
            Parameter("detail", "query", "The map, if left out", {"enum": ["map", "counts"]}),
            Parameter(
                "past", "query", "First what is known of the last ten minutes", {"enum": ["true", "false"]}
            ),
        ),
        endless=True,
    ),
    Operation(
        "/v1/blocks/own",
        "How many blocks hold the tokens of requests of this key",
        _GET | _NOT_TOLD,
        reply=OwnBlocksReply,
        parameters=(Parameter("requests", "query", "Their X-Request-Id, parted by commas", {}),),
    ),
    Operation(
        "/v1/blocks/{tier}/{block}",
        "Who holds a block, and its tokens if they are this key's",
        _GET | {404: "No such block"} | _NOT_TOLD,
        reply=BlockReply,
        parameters=(
            Parameter("tier", "path", "Where it is", {"enum": ["device", "host"]}),
            Parameter("block", "path", "Its number", {"pattern": "^[0-9]{1,9}$"}),
        ),
    ),
    Operation(
        "/v1/blocks/prefixes", "The texts in the prefix cache, as a tree", _GET | _NOT_TOLD, reply=PrefixTree
    ),
    Operation("/v1/lab/pools", "Begin a pool of blocks to play with", _LAB, LabBegin, LabReply),
    Operation(
        "/v1/lab/pools/{pool_id}",
        "Do something to a pool of blocks to play with",
        _LAB
        | {404: "No such pool of this API key, or no longer", 409: "There is no block left; it is as before"},
        LabStep,
        LabReply,
        parameters=(Parameter("pool_id", "path", "The id that it was given", _STREAM_ID),),
    ),
    Operation("/health", "Whether the process is alive", _ANY | _NOT_READY, reply=replies.Health),
    Operation("/ready", "Whether requests would be served", _ANY | _NOT_READY, reply=replies.Readiness),
    Operation("/startup", "The start-up phases as they go", _ANY | _NOT_READY, content=(SSE,)),
    Operation(
        "/metrics", "Prometheus metrics; OpenMetrics for who accepts it", _ANY, content=(_TEXT, _OPENMETRICS)
    ),
    Operation("/version", "The version of Quire", _ANY, reply=replies.ServerVersion),
    Operation("/openapi.json", "This document", _ANY),
    Operation("/docs", "This document as a page", _ANY, content=(_HTML,)),
    Operation("/", "The chat page", _ANY, content=(_HTML,)),
    Operation("/blocks", "A page that shows the live pool of blocks", _ANY, content=(_HTML,)),
    Operation("/blocks/lab", "A page to play with a pool of blocks", _ANY, content=(_HTML,)),
)

"""The gate before every route: who may ask, from which host, with what kind and size of body."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from urllib.parse import parse_qs

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.service.config import ServiceConfig
from quire.service.errors import ApiError
from quire.service.http.access_line import fields_of, words_of
from quire.service.http.body import Bodies, Body, too_large
from quire.service.http.codec import error_response
from quire.service.http.dialects import OLLAMA, dialect_of
from quire.service.http.subprotocols import offered_key
from quire.service.keys import Key, KeyRing
from quire.service.origins import is_allowed

log = logging.getLogger("quire.service.request")
_notes = logging.getLogger("quire.service")

_SHOWN_HOST = 255  # as long as a name may be
_LOGGED_PATH = 200  # characters
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_BEARER = b"bearer "
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_SINGLE = frozenset({b"authorization", b"content-type", b"host", b"origin", b"x-api-key"})
_IGNORED_NAME = re.compile(r"\??[A-Za-z0-9_.\[\]-]{1,96}")
_MAX_TOLD = 256  # names of ignored fields that the log has told of
_FROM_A_PAGE = frozenset({b"origin", b"referer", b"sec-fetch-site"})  # which browsers send
_BEGINNINGS = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})


def note_ignored(scope: Scope, names: Iterable[str]) -> None:
    """Have the answer name the fields of the request that had no effect: its header, or a frame."""
    scope["state"]["ignored"] = [*scope["state"].get("ignored", ()), *names]


class Gate:
    """ASGI middleware. Every path needs the key unless it is in `public`.

    Answers with X-Request-Id, the client's own if it is well formed.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServiceConfig,
        public: frozenset[str],
        keys: KeyRing,
        count: Callable[[str, int], None] | None = None,
    ) -> None:
        """`count` is told of each answer: its endpoint ("other": none), and its status (0: none came)."""
        self._app = app
        self._count = count
        self._config = config
        self._bodies = Bodies(config)
        self._public = public
        self._keys = keys
        self._told: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let it through, or answer with an HTTP error, the handshake of a WebSocket too."""
        if scope["type"] == "lifespan":
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16).encode()
        status = 0  # of the answer, once it has begun
        began = time.monotonic()
        body: Body | None = None

        def send_with_id(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] in _BEGINNINGS:
                status = message.get("status", 101)
                own = [
                    (name, request_id) for name in (b"x-request-id", *dialect_of(scope["path"]).request_id)
                ]
                own += self._ignored(scope)
                if "traceparent" in scope["state"]:
                    own.append((b"traceparent", scope["state"]["traceparent"]))
                message["headers"] = [*message.get("headers", ()), *own]
            return send(message)

        try:
            state = scope.setdefault("state", {})
            state["request_id"], state["began"] = request_id, began
            state["tenant"] = ""
            state["ignore_unknown"] = self._config.unknown_fields == "ignore"
            key = self._check(scope, headers)
            if key is not None:
                state["tenant"], state["key"] = key.tenant, key.name
            if scope["type"] == "http":
                body = Body(receive, self._bodies)
                receive = body.receive
            await self._app(scope, receive, send_with_id)
        except ApiError as error:  # only ever raised before a response has begun
            await error_response(error, scope["path"])(scope, receive, send_with_id)
        except ClientDisconnect:  # in the middle of its body
            return
        except Exception:
            if not status:
                bug = ApiError(500, "internal error", code="internal_error")
                await error_response(bug, scope["path"])(scope, receive, send_with_id)
            raise  # a bug of ours: the server logs it
        finally:
            if body is not None:
                body.close()
            if self._count is not None:
                self._count(scope["state"].get("endpoint", "other"), status)
            self._log(scope, request_id.decode(), status, time.monotonic() - began)

    def _ignored(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Return the header that names the fields without effect; the log tells of each once."""
        names = [name if _IGNORED_NAME.fullmatch(name) else "?" for name in scope["state"].get("ignored", ())]
        for name in names:
            if name not in self._told and len(self._told) < _MAX_TOLD:
                self._told.add(name)
                _notes.info("the field %s of a request has no effect here: it is ignored from now on", name)
        return [(b"x-quire-ignored", ", ".join(dict.fromkeys(names)).encode())] if names else []

    def _log(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        """Log neither queries nor headers: they may hold keys. What probes ask all the time is for debugging.

        The path is the one that was sent, its escapes as they are.
        """
        method, path = scope.get("method", "WEBSOCKET"), scope["raw_path"].decode("latin-1")[:_LOGGED_PATH]
        key = {"key": scope["state"]["key"]} if "key" in scope["state"] else {}
        answers_probe = status < 400 or (scope["path"] == "/ready" and status == 503)  # "not yet" is no fault
        log.log(
            logging.DEBUG if scope["path"] in self._public and answers_probe else logging.INFO,
            " ".join(["%s"] * (3 + len(key))) + ": %s",
            method,
            path,
            status or "gone",  # before there was an answer
            *key.values(),
            words_of(scope, seconds),
            extra={
                "request_id": request_id,
                "method": method,
                "path": path,
                "status": status,
                "seconds": round(seconds, 6),
                **key,
                **fields_of(scope),
            },
        )

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> Key | None:
        """Return the key that was given: None where none is asked for. Raises ApiError."""
        self._check_size(scope)
        _check_doubles(scope)
        allowed, host = self._config.allowed_hosts, _host(headers.get(b"host", b""))
        if allowed is not None and host not in allowed:
            raise ApiError(
                400,
                f"the Host header names {host[:_SHOWN_HOST]!r}, a host that this server does not go by; set "
                "--api-key to serve others",
                param="host",
                code="invalid_host",
            )
        if scope["type"] == "websocket":
            self._check_handshake(scope, headers)
        key = None
        if self._keys and scope["path"] not in self._public:
            key = self._check_key(_given_key(headers, offered_key(scope)))
        if scope.get("method") == "POST":
            self._check_body(scope["path"], headers)
        return key

    def _check_size(self, scope: Scope) -> None:
        """Refuse too large headers that came at once; those in pieces were cut off by the connection."""
        size = len(scope["path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._config.max_header_bytes:
            message = f"the path and the headers are larger than {self._config.max_header_bytes} bytes"
            raise ApiError(431, message, code="headers_too_large")

    def _check_key(self, given: bytes) -> Key:
        key = self._keys.find(given)
        if key is None:
            message = "give a valid API key as 'Authorization: Bearer <key>' or as 'x-api-key: <key>'"
            raise ApiError(401, message, code="invalid_api_key")
        return key

    def _check_handshake(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Browsers let any page open a WebSocket to anywhere, and say which page it is."""
        origin = headers.get(b"origin")
        if origin is not None and not (
            _is_same_origin(origin, headers.get(b"host", b""))
            or is_allowed(origin, self._config.cors_origins)
        ):
            message = (
                "the Origin header names another site: WebSockets are for this server's own pages, and for "
                "those that --cors-origin names"
            )
            raise ApiError(403, message, param="origin", code="invalid_origin")
        if b"api_key" in parse_qs(scope["query_string"], keep_blank_values=True):
            message = (
                "give the API key as 'Authorization: Bearer <key>', or from a browser as the subprotocol "
                "'openai-insecure-api-key.<key>', not in the URL, which gets logged"
            )
            raise ApiError(401, message, param="api_key", code="invalid_api_key")

    def _check_body(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Other sites' pages cannot say that a body is JSON; Ollama's clients need not say it."""
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        lenient = dialect_of(path) is OLLAMA and not _FROM_A_PAGE & headers.keys()
        if kind != b"application/json" and not lenient:
            raise ApiError(415, "the Content-Type must be application/json", param="content-type")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ApiError(415, "compressed bodies are not supported", param="content-encoding")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._config.max_body_bytes:
            raise too_large(self._config)


def _given_key(headers: dict[bytes, bytes], offered: bytes) -> bytes:
    """Return the Bearer token, else what Anthropic's clients send, else what a WebSocket offers."""
    authorization = headers.get(b"authorization")
    if authorization is not None and authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :]
    return headers.get(b"x-api-key", offered if authorization is None else b"")


def _check_doubles(scope: Scope) -> None:
    """Refuse doubled headers: others on the way may go by another one of them than we do."""
    names = [name for name, _ in scope["headers"] if name in _SINGLE]
    if len(names) > len(set(names)):
        name = next(name for name in names if names.count(name) > 1).decode()
        raise ApiError(400, f"the {name} header came more than once", param=name, code="doubled_header")


def _host(header: bytes) -> str:
    """Return it without the port; brackets of an IPv6 address taken off."""
    host = header.decode("latin-1").strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_same_origin(origin: bytes, host: bytes) -> bool:
    scheme, _, place = origin.decode("latin-1").lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    given = host.decode("latin-1").strip().lower()
    return port is not None and place.removesuffix(port) == given.removesuffix(port)

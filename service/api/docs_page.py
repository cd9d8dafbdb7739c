"""The OpenAPI document as one HTML page that loads nothing: GET /docs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, select_autoescape
from markupsafe import Markup, escape

_TEMPLATE = Path(__file__).with_name("docs.html")
_RERANK = {"query": "What is a KV cache?", "documents": ["It holds keys and values.", "It is a fish."]}
_SCORE = {"text_1": "What is a KV cache?", "text_2": ["It holds keys and values.", "It is a fish."]}
_EXAMPLES = {
    "/v1/completions": {"prompt": "A block table is", "max_tokens": 32, "temperature": 0},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "What is a KV cache?"}],
        "stream": True,
    },
    "/v1/responses": {"input": "What is a KV cache?"},
    "/v1/messages": {"messages": [{"role": "user", "content": "What is a KV cache?"}], "max_tokens": 64},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "What is a KV cache?"}]},
    "/api/chat": {"messages": [{"role": "user", "content": "What is a KV cache?"}]},
    "/api/generate": {"prompt": "What is a KV cache?"},
    "/api/show": {"model": "quire-demo"},
    "/v1/embeddings": {"input": ["What is a KV cache?", "A block table is"]},
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/rerank": _RERANK,
    "/v1/score": _SCORE,
    "/score": _SCORE,
    "/classify": {"input": "What is a KV cache?"},
    "/api/embed": {"model": "quire-demo", "input": "What is a KV cache?"},
    "/api/embeddings": {"model": "quire-demo", "prompt": "What is a KV cache?"},
    "/v1/lab/pools": {"block_size": 4},
    "/v1/lab/pools/{pool_id}": {"do": "reset"},
    "/tokenize": {"prompt": "A block table is"},
    "/detokenize": {"tokens": [300, 301, 302]},
}


def page(document: dict[str, Any]) -> str:
    """Return the page of an OpenAPI document."""
    environment = Environment(
        autoescape=select_autoescape(default=True), trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(kind=kind, anchor=anchor, rows=rows, example=example)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(document=document, schemas=document["components"]["schemas"])


def policy(html: str) -> str:
    """Return a content security policy by which the page may have its own style, and nothing else."""
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def anchor(method: str, path: str) -> str:
    """Return the name of an operation in links."""
    return f"{method}{re.sub(r'[^a-z0-9]+', '-', path.lower())}".strip("-")


def example(method: str, path: str) -> str:
    """Return a command that asks for it."""
    command = f"curl -sN http://127.0.0.1:8000{path}"
    if method != "post":
        return command if method == "get" else f"{command} -X {method.upper()}"
    return f"{command} -H 'Content-Type: application/json' \\\n  -d '{json.dumps(_EXAMPLES.get(path, {}))}'"


def rows(schema: dict[str, Any]) -> Iterator[tuple[str, Markup, str, bool]]:
    """Yield name, kind, description, and whether it must be given, of each field."""
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        yield name, kind(field), _description(field), name in required


def kind(schema: dict[str, Any]) -> Markup:
    """Return what a value may be, in words, with links to other schemas."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return Markup('<a href="#{0}">{0}</a>').format(name)
    if "anyOf" in schema:
        kinds = [kind(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return Markup(" or ").join(dict.fromkeys(kinds))
    if "enum" in schema:
        return Markup(", ").join(
            Markup("<code>{}</code>").format(json.dumps(each)) for each in schema["enum"]
        )
    if "const" in schema:
        return Markup("<code>{}</code>").format(json.dumps(schema["const"]))
    if schema.get("type") == "array":
        return Markup("list of {}").format(kind(schema.get("items") or {})) + _limits(
            schema, "Items", " items"
        )
    if "properties" in schema or schema.get("type") == "object":
        return Markup("object")
    name = schema.get("type", "anything")
    if name == "string":
        return Markup("string") + _limits(schema, "Length", " characters")
    return escape(name) + _limits(schema, "", "")


def _limits(schema: dict[str, Any], suffix: str, unit: str) -> Markup:
    names = ("minimum", "maximum") if not suffix else (f"min{suffix}", f"max{suffix}")
    least, most = (schema.get(name) for name in names)
    if least is None and most is None:
        return Markup("")
    if most is None:
        return Markup(", at least {}{}").format(least, unit)
    return Markup(", at most {}{}" if least is None else ", {2} to {0}{1}").format(most, unit, least)


def _description(schema: dict[str, Any]) -> str:
    """Return what is written of a field, or of one of the kinds that it may have."""
    if "description" in schema:
        return str(schema["description"])
    for each in schema.get("anyOf", ()):
        if "description" in each:
            return str(each["description"])
    return ""

"""`quire why ID`: where the time of a request went, asked of the server that answered it."""

from __future__ import annotations

import urllib.error
import urllib.request
from urllib.parse import quote

import msgspec
from rich.console import Console
from rich.table import Table

from quire.service.errors import ErrorReply
from quire.service.explain.reply import SpanReply, WhyReply

BAR_WIDTH = 30  # characters that stand for all of the time
TIMEOUT = 10.0


def ask(url: str, api_key: str | None, request_id: str) -> WhyReply:
    """Return what the server at `url` tells. Raises ValueError, with what to do, if it tells nothing."""
    address = f"{url.rstrip('/')}/v1/requests/{quote(request_id, safe='')}/why"
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        request = urllib.request.Request(address, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
            return msgspec.json.decode(reply.read(), type=WhyReply)
    except urllib.error.HTTPError as refusal:
        raise ValueError(f"{url} answers {refusal.code}: {_message(refusal.read())}") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{url} is no Quire that answers ({error}): give --url") from None


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=ErrorReply).error.message
    except msgspec.MsgspecError:
        return body[:200].decode(errors="replace")


def show(reply: WhyReply, console: Console) -> None:
    """Print it: the spans in their order, and what held the request up."""
    tokens = reply.tokens
    console.print(
        f"[bold]{reply.request_id}[/bold] {reply.status} after {reply.total_ms:,.1f} ms: {tokens.prompt:,} "
        f"prompt tokens ({tokens.cached:,} cached), {tokens.output:,} generated",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    for name in ("span", "from ms", "ms", "", ""):
        table.add_column(name, justify="right" if "ms" in name else "left")
    for span in reply.spans:
        table.add_row(
            span.name, f"{span.start_ms:,.1f}", f"{span.ms:,.1f}", _bar(span, reply.total_ms), _numbers(span)
        )
    console.print(table)
    for cause in reply.causes:
        console.print(f"• {cause.text}", highlight=False, markup=False)


def _bar(span: SpanReply, total: float) -> str:
    begin = min(BAR_WIDTH - 1, int(BAR_WIDTH * span.start_ms / max(total, 1e-9)))
    width = max(1, min(BAR_WIDTH - begin, round(BAR_WIDTH * span.ms / max(total, 1e-9))))
    return " " * begin + "█" * width


def _numbers(span: SpanReply) -> str:
    counts = ((span.tokens, "tokens"), (span.steps, "steps"), (span.pieces * (span.pieces > 1), "pieces"))
    return ", ".join(f"{count:,} {thing}" for count, thing in counts if count)

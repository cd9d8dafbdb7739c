"""The items of a response's input, as GET /v1/responses/{id}/input_items lists them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from quire.service.api.responses.protocol import InputItem
from quire.service.api.responses.replies import OutputCall, OutputReasoning, OutputText, ReasoningText
from quire.service.errors import bad_value

DEFAULT_LIMIT, MAX_LIMIT = 20, 100
PARAMETERS = ("limit", "order", "after", "before", "include")


class InputText(msgspec.Struct, kw_only=True, tag_field="type", tag="input_text"):
    text: str


class ListedMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    role: Literal["system", "developer", "user", "assistant"]
    content: list[InputText | OutputText]


class ListedResult(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call_output"):
    """What a call gave."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    call_id: str
    output: str


ListedItem = ListedMessage | OutputCall | ListedResult | OutputReasoning


class InputItems(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ListedItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Page(msgspec.Struct, frozen=True):
    """Which of them are wanted."""

    limit: int = DEFAULT_LIMIT
    newest_first: bool = True
    after: str | None = None
    before: str | None = None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Page:
        """Raises ApiError 400."""
        for name in query:
            if name not in PARAMETERS:
                message = f"{name} is none of the parameters {', '.join(PARAMETERS)}"
                raise bad_value(name, message, "unknown_field")
        limit, order = query.get("limit", str(DEFAULT_LIMIT)), query.get("order", "desc")
        if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MAX_LIMIT:
            raise bad_value("limit", f"limit must be between 1 and {MAX_LIMIT}, got {limit!r}")
        if order not in ("asc", "desc"):
            raise bad_value("order", f"order must be asc or desc, got {order!r}")
        return cls(int(limit), order == "desc", query.get("after"), query.get("before"))

    def take(self, items: list[ListedItem]) -> InputItems:
        """Return those of all items, the oldest of which stands first. Raises ApiError 400."""
        ordered = items[::-1] if self.newest_first else items
        if self.after is not None:
            ordered = ordered[_place(ordered, "after", self.after) + 1 :]
        if self.before is not None:
            ordered = ordered[: _place(ordered, "before", self.before)]
        backwards = self.before is not None and self.after is None
        page = ordered[-self.limit :] if backwards else ordered[: self.limit]
        return InputItems(
            data=page,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=len(page) < len(ordered),
        )


def _place(items: Sequence[ListedItem], name: str, item_id: str) -> int:
    found = next((at for at, item in enumerate(items) if item.id == item_id), None)
    if found is None:
        raise bad_value(name, f"{name} is {item_id!r}, which none of the items has", "item_not_found")
    return found


_decoder = msgspec.json.Decoder(ListedItem)


def listed(items: Sequence[bytes]) -> list[ListedItem]:
    return [_decoder.decode(item) for item in items]


def as_listed(given: str | list[InputItem]) -> list[bytes]:
    """Return a request's input as its items are listed, as JSON. Those that have no id get one."""
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    return [msgspec.json.encode(_listed(item)) for item in items]


def _listed(item: InputItem) -> ListedItem:
    status = item.status or "completed"
    match item.type:
        case "function_call":
            return OutputCall(
                id=item.id or _identity("fc"),
                status=status,
                call_id=item.call_id or "",
                name=item.name or "",
                arguments=item.arguments or "",
            )
        case "function_call_output":
            identity = item.id or _identity("fco")
            return ListedResult(id=identity, status=status, call_id=item.call_id or "", output=item.text)
        case "reasoning":
            content = [ReasoningText(text=item.text)] if item.text else []
            summary = [{"type": "summary_text", "text": part.text} for part in item.summary or ()]
            return OutputReasoning(
                id=item.id or _identity("rs"), status=status, summary=summary, content=content
            )
    kind = OutputText if item.role == "assistant" else InputText
    return ListedMessage(
        id=item.id or _identity("msg"),
        status=status,
        role=item.role or "user",
        content=[kind(text=item.text)],
    )


def _identity(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(24)}"

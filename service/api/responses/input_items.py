"""The items of a response's input, as GET /v1/responses/{id}/input_items lists them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Literal

import msgspec

from quire.service.answer.kept_responses import KeptResponses
from quire.service.answer.stored_responses import StoredResponse
from quire.service.api.responses.protocol import InputItem
from quire.service.api.responses.replies import OutputCall, OutputReasoning, OutputText, ReasoningText
from quire.service.errors import bad_value

DEFAULT_LIMIT, MAX_LIMIT = 20, 100
INCLUDE = ("include", "include[]")  # OpenAI's clients write the latter
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
    def of(cls, parameters: Sequence[tuple[str, str]]) -> Page:
        """Raises ApiError 400."""
        query = dict(parameters)
        names = [name for name, _ in parameters if name not in INCLUDE]
        for name in names:
            if name not in PARAMETERS:
                message = f"{name} is none of the parameters {', '.join(PARAMETERS)}"
                raise bad_value(name, message, "unknown_field")
            if names.count(name) > 1:
                raise bad_value(name, f"{name} is given more than once: give one")
        limit, order = query.get("limit", str(DEFAULT_LIMIT)), query.get("order", "desc")
        if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MAX_LIMIT:
            raise bad_value("limit", f"limit must be between 1 and {MAX_LIMIT}, got {limit!r}")
        if order not in ("asc", "desc"):
            raise bad_value("order", f"order must be asc or desc, got {order!r}")
        return cls(int(limit), order == "desc", query.get("after"), query.get("before"))

    def places(self, ids: Sequence[str]) -> tuple[list[int], bool]:
        """Return which of all items are on it, the oldest of which stands first, and whether more follow.

        Raises ApiError 400.
        """
        ordered = list(range(len(ids)))
        if self.newest_first:
            ordered.reverse()
        if self.after is not None:
            ordered = ordered[_place(ids, ordered, "after", self.after) + 1 :]
        if self.before is not None:
            ordered = ordered[: _place(ids, ordered, "before", self.before)]
        backwards = self.before is not None and self.after is None
        page = ordered[-self.limit :] if backwards else ordered[: self.limit]
        return page, len(page) < len(ordered)


def _place(ids: Sequence[str], ordered: Sequence[int], name: str, item_id: str) -> int:
    found = next((at for at, place in enumerate(ordered) if ids[place] == item_id), None)
    if found is None:
        raise bad_value(name, f"{name} is {item_id!r}, which none of the items has", "item_not_found")
    return found


_decoder = msgspec.json.Decoder(ListedItem)


async def page_of(responses: KeptResponses, tenant: str, response: StoredResponse, page: Page) -> InputItems:
    """Return a page of what was said up to a response and to it.

    Only the responses whose items are on it are read. Raises ApiError 400 or 503.
    """
    turns = await responses.turns_before(tenant, response)
    all_places = [(turn.response_id, at) for turn in turns for at in range(len(turn.items))]
    all_ids = [item for turn in turns for item in turn.items] + [name for name, _ in response.inputs]
    places, has_more = page.places(all_ids)
    items, read = [], dict[str, list[bytes]]()
    for place in places:
        if place >= len(all_places):
            items.append(_decoder.decode(response.inputs[place - len(all_places)][1]))
            continue
        response_id, at = all_places[place]
        if response_id not in read:
            read[response_id] = await responses.items_of(tenant, response_id)
        items += map(_decoder.decode, read[response_id][at : at + 1])  # none if forgotten meanwhile
    first, last = (all_ids[places[end]] if places else None for end in (0, -1))
    return InputItems(data=items, first_id=first, last_id=last, has_more=has_more)


def as_listed(given: str | list[InputItem]) -> list[tuple[str, bytes]]:
    """Return a request's input as its items are listed, by id, as JSON. Those that have no id get one."""
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    return [(item.id, msgspec.json.encode(item)) for item in map(_listed, items)]


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

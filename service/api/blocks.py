"""GET /v1/blocks/events, /v1/blocks/own, /v1/blocks/prefixes and /v1/blocks/{tier}/{block}: the live pool."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import EngineDeadError
from quire.engine.inspection.messages import STATES, BlockAnswer, BlockQuestion, OwnAnswer, OwnQuestion
from quire.service.errors import ApiError, bad_value, engine_dead
from quire.service.http.codec import JsonResponse
from quire.service.http.event_stream import EventStream
from quire.service.inspector.feed import watch_counts
from quire.service.inspector.replies import BlockReply, HolderReply, OwnBlocksReply, PrefixRun, PrefixTree
from quire.service.state import ServerState

_DETAILS = ("map", "counts")
_MOST_REQUESTS = 16


async def block_events(state: ServerState, request: Request) -> Response:
    """Stream the map of all blocks, or with detail=counts only how many there are of each kind."""
    engine, _, info = state.serving()
    unknown = [name for name in request.query_params if name not in ("detail", "past")]
    if unknown:
        message = f"unknown parameter {unknown[0]!r}: there are detail and past"
        raise bad_value(unknown[0], message, "unknown_field")
    detail, past = (request.query_params.get(*each) for each in (("detail", "map"), ("past", "false")))
    if detail not in _DETAILS:
        raise bad_value("detail", f"detail must be {' or '.join(_DETAILS)}, got {detail!r}")
    if past not in ("true", "false") or (past == "true" and detail == "counts"):
        raise bad_value("past", f"past must be true or false, and is of the map only; got {past!r}")
    if detail == "counts":
        counts = watch_counts(lambda: state.metrics.stats, info.block_size)
        return EventStream(counts, state.config, state.streams)
    return EventStream(state.blocks.watch(engine, past=past == "true"), state.config, state.streams)


async def own_blocks(state: ServerState, request: Request) -> Response:
    """Count the blocks of requests of this key; what is no such request, or no longer, has none."""
    engine, _, _ = state.serving()
    names = request.query_params.get("requests", "").split(",")
    unknown = [name for name in request.query_params if name != "requests"]
    if unknown:
        raise bad_value(unknown[0], f"unknown parameter {unknown[0]!r}: there is requests", "unknown_field")
    if len(names) > _MOST_REQUESTS:
        raise bad_value("requests", f"requests are at most {_MOST_REQUESTS}, got {len(names)}")
    numbers = [
        number for name in names for number in state.past_requests.numbers_of(request.state.tenant, name)
    ]
    try:
        answer = await engine.ask(OwnQuestion(numbers))
    except EngineDeadError as error:
        raise engine_dead(str(error)) from None
    if not isinstance(answer, OwnAnswer):
        raise ApiError(500, "the engine could not count the blocks", code="internal_error")
    reply = OwnBlocksReply(answer.active, answer.shared, answer.cached, answer.host, answer.partial)
    return JsonResponse(reply)


async def block_prefixes(state: ServerState, request: Request) -> Response:
    """Tell which texts are in the cache, as a tree; not what they say."""
    engine, _, info = state.serving()
    answer = await state.blocks.prefixes(engine)
    return JsonResponse(
        PrefixTree(
            block_size=info.block_size,
            hits=answer.hits,
            evictions=answer.evictions,
            left_out=answer.num_left_out,
            runs=[
                PrefixRun(
                    parent=node.parent if node.parent >= 0 else None,
                    blocks=node.blocks,
                    active=node.active,
                    pinned=node.pinned,
                    hits=node.hits,
                    evictions=node.evictions,
                    digest=node.digest,
                )
                for node in answer.nodes
            ],
        )
    )


async def block_detail(state: ServerState, request: Request) -> Response:
    """Tell who holds a block, and what is in it: tokens only to the key that they are of."""
    engine, _, info = state.serving()
    tier, place = request.path_params["tier"], request.path_params["block"]
    sizes = {"device": info.num_blocks, "host": info.num_host_blocks}
    if tier not in sizes or not (place.isascii() and place.isdigit()) or int(place) >= sizes[tier]:
        raise ApiError(
            404,
            f"there is no block {tier}/{place}: there are device/0 to device/{info.num_blocks - 1}, and "
            f"{info.num_host_blocks} in host memory",
        )
    try:
        answer = await engine.ask(BlockQuestion(int(place), tier, request.state.tenant))
    except EngineDeadError as error:
        raise engine_dead(str(error)) from None
    if not isinstance(answer, BlockAnswer):
        raise ApiError(500, "the engine could not tell what is in the block", code="internal_error")
    reply = BlockReply(
        tier=tier,
        block=int(place),
        state=STATES[answer.state],
        references=answer.references,
        holders=[HolderReply(each.request, each.index, each.logical) for each in answer.holders],
        position=answer.position,
        digest=answer.digest or None,
        tokens=answer.tokens,
    )
    if reply.tokens:
        (reply.text,) = await state.decode_all([reply.tokens], skip_special_tokens=False)
    return JsonResponse(reply)

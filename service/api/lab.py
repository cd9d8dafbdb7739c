"""POST /v1/lab/pools and /v1/lab/pools/{pool_id}: a pool of blocks to play with, for each visitor."""

from __future__ import annotations

from msgspec import json
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.lab.lesson import GENERATED, four_beams
from quire.engine.lab.pool import Pool
from quire.engine.lab.sequence import PoolSequence
from quire.engine.memory.pool import OutOfBlocks
from quire.service.api.requests.lab import LabBegin, LabReply, LabStep
from quire.service.errors import ApiError, bad_value
from quire.service.http.codec import JsonResponse, decode
from quire.service.inspector.lab_pools import MAX_SEQUENCES
from quire.service.state import ServerState

_to_begin = json.Decoder(LabBegin)
_to_step = json.Decoder(LabStep)


async def begin_lab(state: ServerState, request: Request) -> Response:
    """Make a pool. It needs no model, so it is there while one loads."""
    body = await decode(request, _to_begin)
    pool_id, pool = state.lab_pools.begin(request.state.tenant, body.block_size)
    return JsonResponse(LabReply(pool_id, pool.view()))


async def step_lab(state: ServerState, request: Request) -> Response:
    """Do one operation. Raises ApiError 404, or 409 where it finds no block and has changed nothing."""
    step = await decode(request, _to_step)
    tenant, pool_id = request.state.tenant, request.path_params["pool_id"]
    if step.do == "reset":
        pool = state.lab_pools.reset(tenant, pool_id, step.block_size or LabBegin().block_size)
    elif step.do == "leave":
        pool = state.lab_pools.leave(tenant, pool_id)
    else:
        pool = state.lab_pools.find(tenant, pool_id)
        try:
            _do(pool, step)
        except OutOfBlocks:
            raise ApiError(409, pool.said, code="out_of_blocks") from None
    return JsonResponse(LabReply(pool_id, pool.view()))


def _do(pool: Pool, step: LabStep) -> None:
    """Raises OutOfBlocks, or ApiError 400 where the sequence or its state is wrong for this."""
    if step.do in ("sequence", "fork", "lesson") and len(pool.sequences) >= MAX_SEQUENCES:
        raise bad_value("do", f"the pool has {MAX_SEQUENCES} sequences: free one first")
    if step.do == "sequence":
        pool.sequence(step.text)
    elif step.do == "evict":
        pool.evict()
    elif step.do == "lesson":
        four_beams(pool, step.tokens or GENERATED)
    else:
        sequence = _find(pool, step.sequence)
        try:
            if step.do == "append":
                sequence.append(step.tokens or 0)
            else:
                getattr(sequence, step.do)()
        except ValueError as refusal:
            raise bad_value("sequence", str(refusal)) from None


def _find(pool: Pool, number: int | None) -> PoolSequence:
    found = [sequence for sequence in pool.sequences if sequence.id == number]
    if not found:
        raise bad_value("sequence", f"there is no sequence {number}: it was freed, or never begun")
    return found[0]

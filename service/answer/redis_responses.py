"""Responses kept in Redis: for all replicas, beyond the life of each, for so long and in so many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import redis
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from quire.service.answer.stored_responses import StoredResponse
from quire.service.text.rendering import TemplateMessage

FAILURES = (redis.RedisError, OSError, ValueError)  # ValueError: an answer that makes no sense
UNSURE = redis.TimeoutError  # Redis may do what it was told all the same
_TIMEOUT = 0.5  # seconds, as that of the registry
_LONG_TIMEOUT = 10.0  # seconds, for one that did not get through in that time
_TAKES_NOTHING = (
    exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError,
    exceptions.BusyLoadingError,
    exceptions.MasterDownError,
)
_TAKES_NOTHING_CODES = ("MISCONF", "NOREPLICAS")  # which have no class of their own
_PREFIX = "quire:{responses}:"  # in braces: of one slot of a cluster

_DROP = """
local function drop(prefix, tenant, member)
  if redis.call('ZREM', prefix .. 'index:' .. tenant, member) == 0 then return end
  local size, id = string.match(member, '^(%d+) (.+)$')
  local bytes = tonumber(redis.call('HGET', prefix .. 'bytes', tenant) or 0) - size
  redis.call('HSET', prefix .. 'bytes', tenant, string.format('%d', math.max(bytes, 0)))
  local key = prefix .. 'kept:' .. tenant .. ':' .. id
  local items = redis.call('HGET', key, 'items') or ''
  for item in string.gmatch(items, '%S+') do
    redis.call('UNLINK', prefix .. 'item:' .. tenant .. ':' .. item)
  end
  redis.call('UNLINK', key)
end
"""

# ARGV: prefix, tenant, id, data, size, milliseconds to live, most bytes of all, items. What is out of date
# goes, and then the oldest of whoever has most.
_KEEP = (
    _DROP
    + """
local prefix, tenant, id, size, life = ARGV[1], ARGV[2], ARGV[3], ARGV[5], tonumber(ARGV[6])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local member, key = size .. ' ' .. id, prefix .. 'kept:' .. tenant .. ':' .. id
drop(prefix, tenant, member)
redis.call('HSET', key, 'data', ARGV[4], 'size', size, 'items', ARGV[8])
redis.call('PEXPIRE', key, life)
for item in string.gmatch(ARGV[8], '%S+') do
  redis.call('HSET', prefix .. 'item:' .. tenant .. ':' .. item, 'of', id)
  redis.call('PEXPIRE', prefix .. 'item:' .. tenant .. ':' .. item, life)
end
redis.call('ZADD', prefix .. 'index:' .. tenant, string.format('%d', now + life), member)
local bytes = tonumber(redis.call('HGET', prefix .. 'bytes', tenant) or 0)
redis.call('HSET', prefix .. 'bytes', tenant, string.format('%d', bytes + size))
local everybody, taken = redis.call('HGETALL', prefix .. 'bytes'), 0
for at = 2, #everybody, 2 do taken = taken + tonumber(everybody[at]) end
if taken > tonumber(ARGV[7]) then
  local before = string.format('(%d', now)
  for at = 1, #everybody, 2 do
    local index = prefix .. 'index:' .. everybody[at]
    for _, old in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', before)) do
      drop(prefix, everybody[at], old)
    end
  end
end
while true do
  local total, most, whose = 0, 0, nil
  local all = redis.call('HGETALL', prefix .. 'bytes')
  for at = 1, #all, 2 do
    local its = tonumber(all[at + 1])
    total = total + its
    if its > most then most, whose = its, all[at] end
  end
  if not whose then return 1 end
  local oldest = redis.call('ZRANGE', prefix .. 'index:' .. whose, 0, 0, 'WITHSCORES')
  if not oldest[1] then
    redis.call('HSET', prefix .. 'bytes', whose, 0)
  elseif tonumber(oldest[2]) < now or (total > tonumber(ARGV[7]) and oldest[1] ~= member) then
    drop(prefix, whose, oldest[1])
  else
    return 1
  end
end
"""
)

# ARGV: prefix, tenant, id. Whether it was there.
_DELETE = (
    _DROP
    + """
local size = redis.call('HGET', ARGV[1] .. 'kept:' .. ARGV[2] .. ':' .. ARGV[3], 'size')
if not size then return 0 end
drop(ARGV[1], ARGV[2], size .. ' ' .. ARGV[3])
return 1
"""
)


class _Kept(msgspec.Struct, frozen=True):
    rest: StoredResponse  # all but the conversation
    conversation: bytes  # JSON, since MessagePack has no integers beyond 64 bits, which a call may have


def _encoded(response: StoredResponse) -> bytes:
    rest = msgspec.structs.replace(response, conversation=[])
    return msgspec.msgpack.encode(_Kept(rest, msgspec.json.encode(response.conversation)))


def _decoded(data: bytes) -> StoredResponse:
    """Raises msgspec.DecodeError."""
    kept = msgspec.msgpack.decode(data, type=_Kept)
    conversation = msgspec.json.decode(kept.conversation, type=list[TemplateMessage])
    return msgspec.structs.replace(kept.rest, conversation=conversation)


class RedisResponses:
    """Methods raise one of FAILURES within about a second; `keep_slowly` takes longer."""

    def __init__(self, url: str, seconds: float, max_bytes: int) -> None:
        """seconds: for which a response is kept."""
        self._life = int(seconds * 1000)
        self._max_bytes = max_bytes
        self._client = _client(url, _TIMEOUT)
        self._patient_client = _client(url, _LONG_TIMEOUT)

    async def keep(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """Keep it, unless it is larger than all the room."""
        await self._keep(self._client, tenant, response_id, response)

    async def keep_slowly(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """Do as `keep` does, with more time for it."""
        await self._keep(self._patient_client, tenant, response_id, response)

    async def answers(self) -> bool:
        """Return whether it does, to the least that can be asked."""
        try:
            await self._client.ping()
        except FAILURES:
            return False
        return True

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        data = await self._client.hget(f"{_PREFIX}kept:{tenant}:{response_id}", "data")
        try:
            return None if data is None else _decoded(data)
        except msgspec.DecodeError:  # of a version that keeps them otherwise
            return None

    async def kept_of(self, tenant: str, response_ids: Sequence[str]) -> set[str]:
        """Return those that are kept, of many in one go."""
        async with self._client.pipeline(transaction=False) as pipeline:
            for response_id in response_ids:
                pipeline.exists(f"{_PREFIX}kept:{tenant}:{response_id}")
            there = await pipeline.execute()
        return {each for each, kept in zip(response_ids, there, strict=True) if kept}

    async def response_of(self, tenant: str, item_id: str) -> str | None:
        """Return the response that has an item in its output."""
        found = await self._client.hget(f"{_PREFIX}item:{tenant}:{item_id}", "of")
        return None if found is None else found.decode()

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Return whether it was there."""
        return bool(await self._client.eval(_DELETE, 0, _PREFIX, tenant, response_id))

    async def close(self) -> None:
        for client in (self._client, self._patient_client):
            await client.aclose()

    async def _keep(self, client: Any, tenant: str, response_id: str, response: StoredResponse) -> None:
        data = _encoded(response)
        if len(data) > self._max_bytes:
            return
        items = " ".join(response.items)
        room = (len(data), self._life, self._max_bytes)
        await client.eval(_KEEP, 0, _PREFIX, tenant, response_id, data, *room, items)


def takes_nothing(error: Exception) -> bool:
    """Return whether Redis says that it keeps no response at all now, though it answers."""
    return isinstance(error, _TAKES_NOTHING) or str(error).startswith(_TAKES_NOTHING_CODES)


def _client(url: str, timeout: float) -> Any:
    # From a URL, so that user, password, database and TLS settings can stand in it.
    return Redis.from_url(
        url,
        socket_timeout=timeout,
        socket_connect_timeout=_TIMEOUT,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )

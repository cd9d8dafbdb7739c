"""The registry in Redis: which replica holds which blocks, how loaded it is, and for how long that is true.

Soft state and a hint: what is wrong or missing there costs a prefill, never a token. All of one deployment
is under one hash tag, its fingerprint:

    quire:{fp}:replicas                  ZSET  replica -> end of its lease, ms of Redis' clock
    quire:{fp}:meta:<replica>            HASH  epoch, seq, whole, url, parity, deployment, running, ...
    quire:{fp}:blocks:<replica>:<epoch>  SET   16-byte digests
    quire:{fp}:pinned                    HASH  token ids of the prefixes that all tenants share, if any

Each key lives as long as a lease, so nobody has to sweep. A block's digest leaves before its parent's, so
of a prompt's digests a replica holds the first k, and k is found by bisection. While everything is published
anew, a replica's set is not whole, and nobody is told how much of a prompt is in it.

Of a model with window groups (`windows` in meta) a prompt is of use up to a block behind which no window is
gone. A block behind which one is has its digest's bytes in the set from the last to the first, so of the
first k blocks those at the end that are written so do not count.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from quire.engine.config import RegistryConfig
from quire.engine.hashing import Digest
from quire.engine.registry.bounded_socket import BoundedSocket
from quire.engine.registry.deployment import Deployment

TIMEOUT = 0.5  # seconds; redis-py's own defaults stall for 4 s and more when a server has stopped
MAX_ANSWER_BYTES = 1 << 16  # to a replica: an honest answer has two words
FAILURES = (redis.RedisError, OSError, ValueError)  # ValueError: an answer that makes no sense

# KEYS: replicas, meta, blocks, pinned. ARGV: replica, epoch, seq, lease in ms, "1" to begin anew, digests to
# add, digests to remove, what is pinned, then names and values of meta. Repeating the newest seq is harmless.
_PUBLISH = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known = redis.call('HMGET', KEYS[2], 'epoch', 'seq')
local epoch, seq, lease = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
if known[1] and known[1] > epoch then return {'FENCED', 0} end
if ARGV[5] == '1' then
  if known[1] then redis.call('UNLINK', string.sub(KEYS[3], 1, -#epoch - 1) .. known[1]) end
  redis.call('UNLINK', KEYS[3])
else
  local last = tonumber(known[2])
  if known[1] ~= epoch or (seq ~= last and seq ~= last + 1) then return {'RESYNC', 0} end
end
for name, digests in pairs({SADD = ARGV[6], SREM = ARGV[7]}) do
  for begin = 1, #digests, 16 * 1024 do
    local members = {}
    for at = begin, math.min(#digests, begin + 16 * 1023), 16 do
      members[#members + 1] = string.sub(digests, at, at + 15)
    end
    redis.call(name, KEYS[3], unpack(members))
  end
end
redis.call('HSET', KEYS[2], 'epoch', epoch, 'seq', seq, unpack(ARGV, 9))
if ARGV[8] ~= '' then redis.call('HSET', KEYS[4], 'tokens', ARGV[8]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + lease, ARGV[1])
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, lease) end
return {'OK', redis.call('SCARD', KEYS[3])}
"""

_LEAVE = """
if redis.call('HGET', KEYS[2], 'epoch') ~= ARGV[2] then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
return redis.call('UNLINK', KEYS[2], KEYS[3])
"""

MAX_REPLICAS = 512  # of a deployment, that routers look at
MAX_META_BYTES = 8192  # of what a replica says of itself
MAX_STEPS = 8192  # back to where no window is gone, in a lookup: else nothing of a prompt counts

# Readers bear with whatever is there: a key of another type or an entry of any size spoils nobody else's.

# KEYS: replicas. ARGV: what comes before a replica's name in the key of its meta, fields. Answers with each
# replica's name and its fields, or its name alone if they cannot be read.
REPLICAS = f"""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found = {{}}
local replicas = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf', 'LIMIT', 0, {MAX_REPLICAS})
for _, replica in ipairs(replicas) do
  local entry, size = {{string.sub(replica, 1, 256)}}, 0
  local meta = redis.pcall('HMGET', ARGV[1] .. replica, unpack(ARGV, 2))
  for at, value in ipairs(meta) do
    size = size + (value and #value or 0)
    entry[at + 1] = value
  end
  found[#found + 1] = size <= {MAX_META_BYTES} and entry or {{entry[1]}}
end
return found
"""

# KEYS: replicas. ARGV: what comes before a replica's name in the keys of its meta and its blocks, digests.
LOOKUP = f"""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local digests, found, steps = ARGV[3], {{}}, {MAX_STEPS}
local replicas = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf', 'LIMIT', 0, {MAX_REPLICAS})
for _, replica in ipairs(replicas) do
  local meta = redis.pcall('HMGET', ARGV[1] .. replica, 'epoch', 'url', 'whole', 'windows')
  local epoch, url, windows = meta[1], meta[2], meta[4] == '1'
  if epoch and url and meta[3] ~= '0' and #epoch + #url <= {MAX_META_BYTES} then
    local blocks = ARGV[2] .. replica .. ':' .. epoch
    local function holds(at, behind)
      local digest = string.sub(digests, at * 16 - 15, at * 16)
      return redis.pcall('SISMEMBER', blocks, behind and string.reverse(digest) or digest) == 1
    end
    local low, high = 0, #digests / 16
    while low < high do
      local middle = low == 0 and 1 or math.ceil((low + high) / 2)
      if holds(middle) or windows and holds(middle, true) then low = middle else high = middle - 1 end
    end
    while windows and low > 0 and not holds(low) do
      steps = steps - 1
      low = steps > 0 and low - 1 or 0
    end
    found[#found + 1] = {{url, low}}
  end
end
return found
"""


class Keys:
    """Names in Redis of one deployment's part of the registry."""

    def __init__(self, fingerprint: str) -> None:
        self._prefix = f"quire:{{{fingerprint}}}:"
        self.replicas = f"{self._prefix}replicas"
        self.meta = f"{self._prefix}meta:"  # and the replica's name
        self.blocks = f"{self._prefix}blocks:"  # and the replica's name and ":" and its epoch
        self.pinned = f"{self._prefix}pinned"


ALL_REPLICAS = Keys("*").replicas  # a pattern


class Load(msgspec.Struct, frozen=True):
    """The load that a replica reports."""

    running: int = 0  # sequences
    waiting: int = 0  # requests
    free_blocks: int = 0  # of the device: without content, or evictable
    blocks: int = 0  # there are, in both tiers
    draining: bool = False


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer of Redis to a publication; `blocks` is how many it holds now."""

    status: Literal["OK", "RESYNC", "FENCED"]
    blocks: int


class Registry:
    """One replica's place in the registry. Methods raise one of FAILURES within about a second."""

    def __init__(
        self,
        config: RegistryConfig,
        deployment: Deployment,
        pinned: list[list[int]],
        parity: str,
        epoch: str,
        *,
        has_windows: bool = False,
    ) -> None:
        """`epoch` must sort after that of any earlier process of this replica.

        has_windows: some blocks that are published are behind windows that are gone.
        """
        self._config = config
        self._epoch = epoch
        keys = Keys(deployment.fingerprint)
        replica = config.advertise_url
        self._keys = (keys.replicas, f"{keys.meta}{replica}", f"{keys.blocks}{replica}:{epoch}", keys.pinned)
        self._pinned = msgspec.json.encode(pinned) if pinned else b""
        self._identity = (
            *("url", replica, "parity", parity, "deployment", msgspec.json.encode(deployment)),
            *("windows", int(has_windows)),
        )
        self._client = client_of(config.redis_url, TIMEOUT)

    def publish(
        self,
        seq: int,
        added: list[Digest],
        removed: list[Digest],
        load: Load,
        *,
        anew: bool = False,
        whole: bool = True,
    ) -> Answer:
        """Go in one atomic step from publication `seq` - 1 to `seq`.

        anew: what was there is forgotten. Until a publication makes it `whole`, the set is not looked at.
        """
        load_fields = [text for name in load.__struct_fields__ for text in (name, int(getattr(load, name)))]
        reply: Any = self._client.eval(
            _PUBLISH,
            len(self._keys),
            *self._keys,
            self._config.advertise_url,
            self._epoch,
            seq,
            int(self._config.lease * 1000),
            int(anew),
            b"".join(added),
            b"".join(removed),
            self._pinned if anew else b"",
            *(self._identity if anew else ()),
            *("whole", int(whole)),
            *load_fields,
        )
        try:
            return msgspec.convert([reply[0].decode(), reply[1]], type=Answer)
        except (msgspec.ValidationError, AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"Redis answered {reply!r} to a publication: {error}") from None

    def leave(self) -> None:
        """Forget this replica at once."""
        self._client.eval(_LEAVE, len(self._keys), *self._keys, self._config.advertise_url, self._epoch)

    def disconnect(self) -> None:
        """Have the next call begin with a new connection."""
        self._client.close()


def client_of(url: str, seconds: float) -> redis.Redis:
    """Return a client that connects, and gets each answer as a whole, within so many seconds, or fails.

    From a URL, so that user, password, database and TLS settings can stand in it. Raises ValueError.
    """
    client: redis.Redis = redis.Redis.from_url(
        url,
        socket_timeout=seconds,
        socket_connect_timeout=seconds,
        retry=Retry(NoBackoff(), 0),
        redis_connect_func=_connected,
        protocol=2,
    )
    return client


def _connected(connection: Any) -> None:
    """Begin with a connection that redis-py has made: an answer comes soon and is short, or fails."""
    connection._sock = BoundedSocket(connection._sock, connection.socket_timeout, MAX_ANSWER_BYTES)
    connection.on_connect()

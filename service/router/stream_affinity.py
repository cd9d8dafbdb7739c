"""Where streams are that clients may pick up again, and requests that they may ask about."""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterable

from starlette.requests import Request

from quire.service.answer.resumption.recordings import STREAM_ID
from quire.service.router.replica import Replica

MAX_STREAMS = 1 << 14  # of each tenant; replicas keep fewer

_PATH = "/v1/streams/"
_WHY = re.compile(r"/v1/requests/([A-Za-z0-9._-]{1,64})/why")
_STARTS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})

StreamKey = tuple[str, str]  # the tenant, and the id that the client chose, of a stream or a request


def started_stream(request: Request) -> StreamKey | None:
    """Return the id a request gives its stream. None: it starts none, or a replica will refuse the id."""
    stream_id = request.headers.get("x-stream-id", "")
    if request.method != "POST" or request.url.path not in _STARTS or not STREAM_ID.fullmatch(stream_id):
        return None
    return request.state.tenant, stream_id


def wanted_stream(request: Request) -> StreamKey | None:
    """Return the stream that a request picks up, if it does."""
    path = request.url.path
    stream_id = path.removeprefix(_PATH)
    if not path.startswith(_PATH) or not STREAM_ID.fullmatch(stream_id):
        return None
    return request.state.tenant, stream_id


def started_request(request: Request) -> StreamKey | None:
    """Return the id that a request can be asked about by, if it is one that a replica remembers."""
    if request.method != "POST" or request.url.path not in _STARTS:
        return None
    return request.state.tenant, request.state.request_id.decode()


def wanted_request(request: Request) -> StreamKey | None:
    """Return the request that a request asks about, if it does."""
    found = _WHY.fullmatch(request.url.path)
    return None if found is None else (request.state.tenant, found.group(1))


class StreamAffinity:
    """The replica that each stream, or each request, was sent to.

    Of each tenant those asked for longest ago are forgotten, and then all replicas are asked.
    """

    def __init__(self) -> None:
        self._urls: defaultdict[str, OrderedDict[str, str]] = defaultdict(OrderedDict)  # URLs, by ids

    def __len__(self) -> int:
        return sum(map(len, self._urls.values()))

    def settle(self, key: StreamKey, replica: Replica) -> None:
        tenant, stream_id = key
        urls = self._urls[tenant]
        urls[stream_id] = replica.url
        urls.move_to_end(stream_id)
        if len(urls) > MAX_STREAMS:
            urls.popitem(last=False)

    def find(self, key: StreamKey, replicas: Iterable[Replica]) -> Replica | None:
        tenant, stream_id = key
        urls = self._urls[tenant]
        url = urls.get(stream_id)
        if url is not None:
            urls.move_to_end(stream_id)
        return next((replica for replica in replicas if replica.url == url), None)

    def holders(self, key: StreamKey, replicas: Iterable[Replica]) -> list[Replica]:
        """Return whom to ask for it, in order: other routers and earlier ones sent streams, too."""
        known = list(replicas)
        holder = self.find(key, known)
        return sorted(known, key=lambda replica: (replica is not holder, not replica.up))

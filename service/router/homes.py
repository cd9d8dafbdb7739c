"""Where streams are that clients may pick up again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from starlette.requests import Request

from service.router.replica import Replica

MAX_STREAMS = 1 << 16

_PATH = "/v1/streams/"

StreamKey = tuple[str, str]  # the tenant, and the id that the client chose


def started_stream(request: Request) -> StreamKey | None:
    """What a request calls its stream."""
    stream_id = request.headers.get("x-stream-id")
    return None if stream_id is None else (request.state.tenant, stream_id)


def wanted_stream(request: Request) -> StreamKey | None:
    """Which stream a request picks up."""
    path = request.url.path
    return (request.state.tenant, path.removeprefix(_PATH)) if path.startswith(_PATH) else None


class StreamHomes:
    """The replica that each stream was sent to; the oldest are forgotten, and then all replicas are asked."""

    def __init__(self) -> None:
        self._homes: OrderedDict[StreamKey, str] = OrderedDict()  # URLs

    def settle(self, key: StreamKey, replica: Replica) -> None:
        self._homes[key] = replica.url
        self._homes.move_to_end(key)
        if len(self._homes) > MAX_STREAMS:
            self._homes.popitem(last=False)

    def find(self, key: StreamKey, replicas: Iterable[Replica]) -> Replica | None:
        url = self._homes.get(key)
        return next((replica for replica in replicas if replica.url == url), None)

    def holders(self, key: StreamKey, replicas: Iterable[Replica]) -> list[Replica]:
        """Whom to ask for it, in order: other routers and earlier ones sent streams, too."""
        known = list(replicas)
        home = self.find(key, known)
        return sorted(known, key=lambda replica: (replica is not home, not replica.up))

"""Ray's request router: it asks each request for its ranking of the replicas, and Ray does the rest."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from quire.ray.wish import Wish


class WishRouter(RequestRouter):
    """Ray passes over replicas that are full or gone; of those of a rank it takes the least busy."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not pending_request.args:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # rather than be asked without a pause
        wish = pending_request.args[0]
        if not isinstance(wish, Wish):
            return [candidate_replicas]
        there = {replica.replica_metadata["url"]: replica for replica in candidate_replicas}
        blocks = {url: replica.replica_metadata["blocks"] for url, replica in there.items()}
        return [[there[url] for url in rank] for rank in await wish.rank(blocks)]

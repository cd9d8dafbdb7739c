"""The choice of a request's replica: where most of its prompt is cached, unless that one is too busy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quire.engine.hashing import Digest
from quire.service.router.replica import Replica

MIN_MATCH_TOKENS = 16  # less than the smallest block is never found: what is found always counts
LOAD_WEIGHT = 0.6
LEAST_MEAN_LOAD = 8.0  # so many sequences on a replica slow nobody down: below this, load hardly counts
LOSS = 0.1  # of a prompt: a replica that has evicted so much of it has not enough room for what it is sent

Reason = Literal["prefix", "load", "moved", "silent", "stream"]


@dataclass(frozen=True)
class Location:
    """Where a prompt's blocks are."""

    prompt_tokens: int
    prefixes: dict[str, list[Digest]]  # its digests, by the fingerprint of the deployment that makes them so
    block_sizes: dict[str, int]
    held: dict[str, int] | None  # how many of its first blocks, by the replica's URL; None: nobody says

    def digests(self, replica: Replica) -> list[Digest]:
        return self.prefixes.get(replica.fingerprint or "", [])

    def candidate(self, replica: Replica, now: float) -> Candidate:
        digests = self.digests(replica)
        sent = replica.sent_prefixes.match(digests, now)
        held = None if self.held is None else self.held.get(replica.url)
        # Where nobody says, what was sent there must do.
        blocks = sent if held is None else max(held, replica.sent_prefixes.unpublished(digests, now))
        block_size = self.block_sizes.get(replica.fingerprint or "", 0)
        return Candidate(
            replica,
            matched_tokens=min(blocks * block_size, max(self.prompt_tokens - 1, 0)),
            lost_tokens=max(0, sent - blocks) * block_size,
            fill=replica.fill(now),
            fill_with=replica.fill(now, len(digests) - sent),
        )


NOWHERE = Location(0, {}, {}, None)


@dataclass(frozen=True)
class Candidate:
    """A replica, and what it would mean for it to get a prompt."""

    replica: Replica
    matched_tokens: int = 0
    lost_tokens: int = 0  # of those sent there lately, how many it has evicted since
    fill: float = 0.0  # what it was sent lately ÷ the blocks that it has
    fill_with: float = 0.0  # with this prompt, too

    def has_evicted(self, prompt_tokens: int) -> bool:
        """Return whether a part of the prompt that is worth a move is gone since it was sent there."""
        return self.lost_tokens >= LOSS * prompt_tokens > 0


@dataclass(frozen=True)
class Placement:
    """A decision, and its reason."""

    replica: Replica
    reason: Reason  # silent: by load, since the registry does not answer
    prompt_tokens: int
    predicted_tokens: int
    load: int
    headers: tuple[tuple[bytes, bytes], ...] = ()  # that the request has there beside its own

    @classmethod
    def at_home(cls, replica: Replica) -> Placement:
        """Return where the stream is that a request is about."""
        return cls(replica, "stream", 0, 0, replica.load)

    def header(self, attempt: int) -> bytes:
        """For X-Quire-Route, a dictionary as in RFC 8941."""
        return (
            f'replica="{self.replica.name}", reason={self.reason}, predicted={self.predicted_tokens}, '
            f"prompt={self.prompt_tokens}, load={self.load}, attempt={attempt}"
        ).encode()


def choose(
    replicas: Sequence[Replica], location: Location, now: float, rng: random.Random, *, silent: bool
) -> Placement:
    """Place a prompt with one of at least one replica, and remember that it is there."""
    candidates = [location.candidate(replica, now) for replica in replicas]
    placement = place(candidates, location.prompt_tokens, rng, silent=silent)
    placement.replica.sent_prefixes.add(location.digests(placement.replica), now)
    for candidate in candidates:
        if candidate.has_evicted(location.prompt_tokens) and candidate.replica is not placement.replica:
            candidate.replica.sent_prefixes.forget(location.digests(candidate.replica))  # not wanted any more
    return placement


def place(
    candidates: Sequence[Candidate], prompt_tokens: int, rng: random.Random, *, silent: bool
) -> Placement:
    """Return the best of at least one candidate; of equals, any.

    score = (matched - displaced) / prompt - LOAD_WEIGHT * (load - mean) / max(LEAST_MEAN_LOAD, mean)
    displaced = (prompt - matched) * fill

    A block that is not there takes the place of another, which is wanted the likelier the fuller the
    replica is of what was sent there. So a prompt that is cached nowhere goes where there is room; one
    that is cached whole outweighs a load of a few sequences; a replica that is much busier than the others
    loses it.

    Where a part of the prompt has been evicted since it was sent there, what is left counts nothing if
    another replica is emptier even with all of it. The prompt moves, which makes them more equally full: so
    prompts do not go to and fro.
    """
    mean = sum(candidate.replica.load for candidate in candidates) / len(candidates)
    emptiest = min(candidate.fill_with for candidate in candidates)

    def matched(candidate: Candidate) -> int:
        return candidate.matched_tokens if candidate.matched_tokens >= MIN_MATCH_TOKENS else 0

    def is_left(candidate: Candidate) -> bool:
        return candidate.has_evicted(prompt_tokens) and emptiest < candidate.fill

    def score(candidate: Candidate) -> float:
        busier = (candidate.replica.load - mean) / max(LEAST_MEAN_LOAD, mean)
        counted = 0 if is_left(candidate) else matched(candidate)
        displaced = (prompt_tokens - counted) * min(1.0, candidate.fill)
        return (counted - displaced) / max(prompt_tokens, 1) - LOAD_WEIGHT * busier

    scores = [score(candidate) for candidate in candidates]
    best = max(scores)
    chosen = rng.choice([each for each, its in zip(candidates, scores, strict=True) if its == best])
    predicted = matched(chosen)
    reason: Reason = "silent" if silent else "load"
    if predicted:
        reason = "prefix"
    elif any(map(is_left, candidates)) and not is_left(chosen):
        reason = "moved"
    return Placement(chosen.replica, reason, prompt_tokens, predicted, chosen.replica.load)

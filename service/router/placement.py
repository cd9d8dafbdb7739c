"""Which replica a request goes to: where most of its prompt is cached, unless that one is too busy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.prefix_cache import Digest
from service.router.recent import REMEMBERED_SECONDS, UNPUBLISHED_SECONDS
from service.router.replica import Replica

MIN_MATCH_TOKENS = 16  # less than the smallest block is never found: what is found always counts
LOAD_WEIGHT = 0.6
LEAST_MEAN_LOAD = 8.0  # so many sequences on a replica slow nobody down: below this, load hardly counts

Reason = Literal["prefix", "load", "silent"]


@dataclass(frozen=True)
class Location:
    """Where a prompt's blocks are."""

    prompt_tokens: int
    prefixes: dict[str, list[Digest]]  # its digests, by the fingerprint of the deployment that makes them so
    block_sizes: dict[str, int]
    held: dict[str, int] | None  # how many of its first blocks, by the replica's URL; None: nobody says

    def matched_tokens(self, replica: Replica, now: float) -> int:
        digests = self.prefixes.get(replica.fingerprint or "")
        if digests is None or replica.fingerprint is None:
            return 0
        if self.held is None:
            blocks = replica.recent.match(digests, now - REMEMBERED_SECONDS)
        else:
            sent = replica.recent.match(digests, now - UNPUBLISHED_SECONDS)
            blocks = max(self.held.get(replica.url, 0), sent)
        return min(blocks * self.block_sizes[replica.fingerprint], self.prompt_tokens - 1)


NOWHERE = Location(0, {}, {}, None)


@dataclass(frozen=True)
class Candidate:
    replica: Replica
    matched_tokens: int


@dataclass(frozen=True)
class Placement:
    """What was decided, and why."""

    replica: Replica
    reason: Reason  # silent: by load, since the registry does not answer
    prompt_tokens: int
    predicted_tokens: int
    load: int

    def header(self, attempt: int) -> bytes:
        """For X-Quire-Route, a dictionary as in RFC 8941."""
        return (
            f'replica="{self.replica.name}", reason={self.reason}, predicted={self.predicted_tokens}, '
            f"prompt={self.prompt_tokens}, load={self.load}, attempt={attempt}"
        ).encode()


def place(
    candidates: Sequence[Candidate], prompt_tokens: int, rng: random.Random, *, silent: bool
) -> Placement:
    """The best of at least one candidate; of equals, any.

    score = matched / prompt - LOAD_WEIGHT * (load - mean) / max(LEAST_MEAN_LOAD, mean): a prompt that is
    cached whole outweighs a load of a few sequences; a replica that is much busier than the others loses it.
    """
    mean = sum(candidate.replica.load for candidate in candidates) / len(candidates)

    def matched(candidate: Candidate) -> int:
        return candidate.matched_tokens if candidate.matched_tokens >= MIN_MATCH_TOKENS else 0

    def score(candidate: Candidate) -> float:
        busier = (candidate.replica.load - mean) / max(LEAST_MEAN_LOAD, mean)
        return matched(candidate) / max(prompt_tokens, 1) - LOAD_WEIGHT * busier

    best = max(map(score, candidates))
    chosen = rng.choice([candidate for candidate in candidates if score(candidate) == best])
    predicted = matched(chosen)
    reason: Reason = "prefix" if predicted else "silent" if silent else "load"
    return Placement(chosen.replica, reason, prompt_tokens, predicted, chosen.replica.load)

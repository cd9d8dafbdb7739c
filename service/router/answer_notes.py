"""What an answer tells the router on its way through: which response it creates, and what it found cached."""

from __future__ import annotations

import re

from starlette.requests import Request

from quire.service.router.placement import Placement
from quire.service.router.response_affinity import created_response
from quire.service.router.state import RouterState

_CACHED_TOKENS = re.compile(rb'"cached_tokens":(\d+)')  # inside a JSON string the quotes would be escaped


class AnswerNotes:
    """Of one request; each thing is noted once."""

    def __init__(self, state: RouterState, request: Request) -> None:
        self._state = state
        self._request = request
        self._is_settled = False  # where the response is that it creates
        self.is_predicted = False  # whether there is a prediction for all of the prompt, and no truth so far

    def take_in(self, placement: Placement, content: bytes) -> None:
        """Note what `content` tells, which is the answer, or a part of it."""
        if not self._is_settled and (key := created_response(self._request, content)) is not None:
            self._state.response_affinity.settle(key, placement.replica)
            self._is_settled = True
        if self.is_predicted and b'"cached_tokens"' in content:
            self._compare(placement, _CACHED_TOKENS.findall(content))

    def _compare(self, placement: Placement, found: list[bytes]) -> None:
        """Compare what was predicted with what an answer says that it found, if it can be."""
        if found and int(found[-1]) <= placement.prompt_tokens:
            self._state.metrics.compare(placement, int(found[-1]))
            self.is_predicted = False

"""The fields that completions, chat and responses share: how a token is drawn, and which ones end a text."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.engine.messages import MIN_REPETITION_PENALTY
from quire.service.json_fields import MAX_TOKENS, StopText, TokenId

# SamplingParams fields that a request has under the same name
_SAME_NAME = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "min_tokens", "ignore_eos", "seed"),
)


class TokenSampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20, description="-1 or 0: off")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=10)] | None = None
    logit_bias: (
        Annotated[
            dict[int, Annotated[float, Meta(ge=-100, le=100)]],
            Meta(max_length=1024, extra_json_schema={"propertyNames": {"pattern": "^[0-9]+$"}}),
        ]
        | None
    ) = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    ignore_eos: bool | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def drawing(self) -> dict[str, Any]:
        """Return these fields as SamplingParams has them, with a seed drawn if none was given."""
        given = {name: getattr(self, name) for name in _SAME_NAME if getattr(self, name) is not None}
        given.setdefault("seed", secrets.randbits(63))
        return given | {
            "top_k": max(self.top_k or 0, 0),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
        }

"""The bodies of POST /v1/lab/pools and of what is done to a pool there, and their reply."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quire.engine.errors import FieldError
from quire.engine.lab.view import LabPool

BlockSize = Annotated[int, Meta(ge=1, le=64, description="Tokens in a block")]

# What each operation needs, and what it may have.
_NEEDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "reset": ((), ("block_size",)),
    "sequence": ((), ("text",)),
    "append": (("sequence", "tokens"), ()),
    **{
        name: (("sequence",), ()) for name in ("fork", "write_last", "publish", "swap_out", "swap_in", "free")
    },
    "evict": ((), ()),
    "lesson": ((), ("tokens",)),
    "leave": ((), ()),
}
_FIELDS = ("sequence", "tokens", "text", "block_size")


class LabBegin(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A pool of 64 blocks of the visitor's own."""

    block_size: BlockSize = 16


class LabStep(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One operation on a pool; what it needs depends on which."""

    do: Literal[
        "reset",
        "sequence",
        "append",
        "fork",
        "write_last",
        "publish",
        "swap_out",
        "swap_in",
        "free",
        "evict",
        "lesson",
        "leave",
    ]
    sequence: Annotated[int, Meta(ge=1, le=1 << 31, description="Its number")] | None = None
    tokens: Annotated[int, Meta(ge=1, le=4096, description="How many to append")] | None = None
    text: (
        Annotated[str, Meta(max_length=64, description="Sequences of the same text have the same tokens")]
        | None
    ) = None
    block_size: BlockSize | None = None

    def __post_init__(self) -> None:
        needed, allowed = _NEEDS[self.do]
        for name in _FIELDS:
            given = getattr(self, name) is not None
            if name in needed and not given:
                raise FieldError(name, f"{self.do} needs {name}")
            if given and name not in (*needed, *allowed):
                raise FieldError(name, f"{name} does not belong to {self.do}")


class LabReply(msgspec.Struct):
    """A pool after an operation, and the id that it is found by."""

    id: str
    pool: LabPool

"""Objects in JSON whose keys are free."""

from __future__ import annotations

from itertools import islice
from typing import Any

import msgspec

_MAX_LOOKED_AT = 4096  # entries: more than any object may have
_MAX_SHOWN = 64  # characters of a key


def wrong_key(entries: dict[str, Any], kind: Any) -> str | None:
    """Return the beginning of the first key that, with its value, is none of an object of this `kind`.

    msgspec says only that there is one.
    """
    for key, value in islice(entries.items(), _MAX_LOOKED_AT):
        try:
            msgspec.convert({key: value}, kind, str_keys=True)
        except msgspec.ValidationError:
            return key if len(key) <= _MAX_SHOWN else f"{key[:_MAX_SHOWN]}…"
    return None

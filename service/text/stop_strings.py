"""Finding stop strings in text that comes in pieces, without ever letting part of one out."""

from __future__ import annotations


class StopMatcher:
    """Lets text through up to the first stop string.

    The first is the one that ends first, and of those the one that starts first, so that the result does
    not depend on how the text was cut into pieces. Held back is only the longest end of the text that
    may still become a stop string.
    """

    __slots__ = ("_firsts", "_held", "_included", "_longest", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...], *, included: bool = False) -> None:
        """included: the stop string itself is let through, too."""
        self._included = included
        self._stops = stops
        self._firsts = {stop[0] for stop in stops}
        self._longest = max(map(len, stops))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the part of what has come that may be shown now. Once `matched` is set nothing more is."""
        if self.matched is not None:
            return ""
        text = self._held + text
        self._held = ""
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            return text[: end if self._included else start]
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._firsts:
                tail = text[at:]
                if any(stop.startswith(tail) for stop in self._stops):
                    self._held = tail
                    return text[:at]
        return text

    def finish(self) -> str:
        """Return what was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

"""When the interpreter looks for cycles: between steps, seldom, and not among what lasts.

It is for what nobody has thought of. A request that has ended is freed by its reference counts
(`SequenceGroup.end`), and a step leaves no cycle either, so there is next to nothing to find. A look costs
some 100 ns for each object that is there and was made since the last one, so it waits until these are many:
few enough that the streams do not notice, however long the engine has been busy when it comes.
"""

from __future__ import annotations

import gc

IDLE_OBJECTS = 1_000  # more than there were at the last look, with which an idle engine looks
BUSY_OBJECTS = 100_000  # and one that steps: only what grows without end gets there, or a very long queue


def keep_what_is_there() -> None:
    """Collect once, and never look again at what is left; from here on only `collect` looks."""
    gc.disable()
    gc.collect()
    gc.freeze()


def collect(most: int) -> bool:
    """Look through what was made since the last time if it is `most` objects or more; whether it was.

    What is found in use is not looked at again: a request that waits is freed all the same.
    """
    if gc.get_count()[0] < most:
        return False
    gc.collect(1)
    return True

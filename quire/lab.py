"""A pool of KV blocks to play with in a notebook: `pool = Pool()`, `first = pool.sequence()`, and so on."""

from __future__ import annotations

from quire.engine.lab.lesson import four_beams
from quire.engine.lab.pool import Pool
from quire.engine.lab.sequence import PoolSequence
from quire.engine.memory.pool import OutOfBlocks

__all__ = ["OutOfBlocks", "Pool", "PoolSequence", "four_beams"]

"""How many GPUs a model takes: what each of so many ranks holds of it, and what is left for the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.engine.device.kv_cache import bytes_per_block
from quire.engine.models.config import ModelConfig
from quire.engine.models.kept_weights import Keep, Kept, saved_bytes
from quire.kernels.formats.kv_format import KVFormat

SIZES = (1, 2, 4, 8)  # numbers of GPUs that machines have


@dataclass(frozen=True, slots=True)
class Fit:
    """A model on so many ranks. tokens: that the KV cache has room for beside the weights, 0 if none."""

    ranks: int
    weight_bytes: int  # of each rank
    tokens: int


def keep_none(part: ModelConfig) -> Kept:
    """Keep no weights in few bits."""
    return Kept()


def weight_bytes(folder: Path, part: ModelConfig, itemsize: int, keep: Keep = keep_none) -> int:
    """Return the bytes that one rank's weights take, of which `part` is the configuration.

    keep: which stay in few bits; others are numbers of `itemsize` bytes. Raises
    ValueError where transformers' code of it cannot be divided.
    """
    if part.implementation == "transformers":
        from quire.engine.models.general.division.divide import num_bytes  # which takes seconds

        return num_bytes(folder, part, itemsize, keep(part).formats)
    matrices = part.vocab_rows * part.embedding_size * (1 if part.tie_word_embeddings else 2)
    positions = 0 if part.rope else part.max_position_embeddings * part.hidden_size
    numbers = part.num_layers * part.layer_weights + matrices + positions
    return numbers * itemsize - saved_bytes(part, keep(part), itemsize)


def fits(
    folder: Path,
    model: ModelConfig,
    itemsize: int,
    held: KVFormat,
    budget: int,
    keep: Keep = keep_none,
    *,
    expert_parallel: bool = False,
) -> list[Fit]:
    """Return how the model fits on 1, 2, 4 and 8 ranks, as far as they divide it, of `budget` bytes each.

    itemsize and keep are as `weight_bytes` has them, and expert_parallel as `ModelConfig.of_rank`.
    """
    found = []
    for ranks in SIZES:
        try:
            part = model.of_rank(ranks, expert_parallel=expert_parallel and ranks > 1)
            weights = weight_bytes(folder, part, itemsize, keep)
        except ValueError:
            continue
        room = max(budget - weights, 0)
        token = bytes_per_block(part, 1, held) * len(part.cache_groups)
        found.append(Fit(ranks, weights, room // token))
    return found


def smallest(found: list[Fit], tokens: int = 1) -> int | None:
    """Return the fewest ranks that have room for so many tokens; None where none have."""
    return next((fit.ranks for fit in found if fit.tokens >= tokens), None)

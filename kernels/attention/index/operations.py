"""The operations of an indexer of a known kind, by kernels or in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quire.kernels.attention.index.rotation import rotate_index, rotate_index_reference
from quire.kernels.attention.index.scores import IndexQueries, index_scores, index_scores_reference
from quire.kernels.formats.layer_cache import LayerCache


@dataclass(frozen=True, slots=True)
class IndexOperations:
    """rotate, score: `rotate_index` and `index_scores`, or what does the same."""

    rotate: Callable[..., Tensor]
    score: Callable[[IndexQueries, Tensor, LayerCache, int], Tensor]


KERNELS = IndexOperations(rotate_index, index_scores)
REFERENCE = IndexOperations(rotate_index_reference, index_scores_reference)

"""Which layers share block tables, and what of memory each such group takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.engine.capacity import Capacity
from quire.engine.models.cache_groups import cache_groups
from quire.kernels.formats.cache_spec import CacheSpec
from tests.engine.tables import Tables


def specs(layers: int, window: int, every: int, heads: int, head_dim: int) -> tuple[CacheSpec, ...]:
    """Layers with a window, but for each `every`-th."""
    return tuple(
        CacheSpec(heads, head_dim, 0 if layer % every == every - 1 else window) for layer in range(layers)
    )


GEMMA_3_27B = specs(62, 1024, 6, 16, 128)
GPT_OSS_20B = specs(24, 128, 2, 8, 64)
MISTRAL_7B = specs(32, 4096, 99, 8, 128)  # all have the same window
CONTEXT, CHUNK, BLOCK_SIZE = 32_768, 8192, 16


def test_groups_have_as_many_layers_as_leaves_little_empty() -> None:
    for layers, sizes in (
        (GEMMA_3_27B, [10, 9, 9, 9, 9, 8, 8]),
        (GPT_OSS_20B, [12, 12]),
        (specs(26, 512, 6, 1, 256), [4, 4, 4, 4, 4, 3, 3]),  # Gemma 3 1B
        (specs(48, 1024, 6, 8, 256), [8] * 6),  # Gemma 3 12B
        (specs(9, 0, 2, 1, 64), [9]),
        (MISTRAL_7B, [32]),
        (tuple(CacheSpec(1, 64, window) for window in (9, 5, 9, 5)), [2, 2]),
    ):
        groups = cache_groups(layers)
        assert [len(group.layers) for group in groups] == sizes
        assert sorted(layer for group in groups for layer in group.layers) == list(range(len(layers)))
        for group in groups:
            assert len(groups) == 1 or {layers[layer].window for layer in group.layers} == {group.window}
        assert groups[0].window == min(spec.window for spec in layers)


@pytest.mark.parametrize(("layers", "share"), [(GEMMA_3_27B, 0.25), (GPT_OSS_20B, 0.55), (MISTRAL_7B, 0.13)])
def test_a_long_context_takes_a_fraction_of_what_all_layers_would_keep(
    layers: tuple[CacheSpec, ...], share: float
) -> None:
    """In the bytes of blocks that tables name, what is left empty in a group's blocks counted too."""
    groups = cache_groups(layers)
    tile = 63  # that a GPU's kernels may read before a window
    keeps_all = groups[0].window == 0
    windows = tuple(group.window + tile for group in groups[keeps_all:])
    tables = Tables(20_000, BLOCK_SIZE, windows=windows, keeps_all=keeps_all, max_tokens=CONTEXT + 1)
    (sequence,) = tables.group([7] * CONTEXT)
    for end in range(CHUNK, CONTEXT + 1, CHUNK):
        tables.blocks.grow(sequence, end)
        tables.rows.context[sequence.row] = end
        tables.blocks.take_moves()
        tables.blocks.publish([(sequence, end // BLOCK_SIZE)])
    tables.check()
    page = max(sum(layers[layer].heads for layer in group.layers) for group in groups)
    taken = tables.blocks.pool.num_active * page
    assert taken <= share * (CONTEXT // BLOCK_SIZE) * sum(spec.heads for spec in layers)


def test_a_request_is_refused_only_if_it_could_never_run() -> None:
    capacity = Capacity(100, 4, 8, 10_000, 50, windows=(16,), step_tokens=8)
    # 23 tokens of the window and of a step lie in up to seven blocks.
    assert capacity.blocks(2500, [10_000]) == 2507 and capacity.blocks(3, [9]) == 6
    tokens = capacity.room(100, 1)
    assert capacity._blocks_needed(100, tokens, 1) == 100 == -(-(100 + tokens - 1) // 4) + 7
    assert capacity._blocks_needed(100, tokens + 1, 1) > 100
    assert capacity.room(100, 4) < capacity.room(100, 2) < tokens


def test_layers_of_one_window_hold_requests_of_any_length() -> None:
    capacity = Capacity(7, 4, 8, 10_000, 50, windows=(16,), step_tokens=8, keeps_all=False)
    assert capacity.pages == 1 and capacity.room(100, 1) == 9900
    assert replace(capacity, num_blocks=6).room(24, 1) == 1, "the whole of 24 tokens"
    alike = replace(capacity, windows=(), keeps_all=True)
    for prompt, n in ((20, 1), (20, 3), (6, 2), (27, 2)):
        assert capacity.room(prompt, n) >= alike.room(prompt, n), "never fewer than if all were kept"

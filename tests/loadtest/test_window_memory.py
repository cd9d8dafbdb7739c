"""What a long sequence holds of a model whose layers have windows, as `window_memory` tells it."""

from __future__ import annotations

import pytest

from quire.loadtest.shape_configs import WINDOWED
from quire.loadtest.window_memory import DECODED, measure

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 300,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 12,
    "sliding_window": 64,
    "max_position_embeddings": 2048,
}
TOKENS, CHUNK, BLOCK = 1024, 128, 16


def test_ten_layers_of_twelve_keep_a_window() -> None:
    found = measure("small", {**WINDOWED["gemma-3-27b"], **SMALL}, TOKENS, CHUNK)
    whole = 12 * (TOKENS + DECODED)
    assert found.all_full_bytes == whole * 2 * 16 * 4  # keys and values of one head, in fp32
    assert (
        10 * 64 + 2 * TOKENS <= found.decode_share * whole <= 10 * (64 + 2 * BLOCK) + 2 * (TOKENS + DECODED)
    )
    assert found.prefill_share * whole == pytest.approx(10 * (64 + CHUNK) + 2 * TOKENS, abs=10 * 2 * BLOCK)

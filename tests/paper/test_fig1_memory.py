"""Fig. 1, left, and section 3: where the memory of an A100 with 40 GB goes while OPT-13B is served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.engine.device.kv_cache import bytes_per_block
from quire.engine.messages import Request, SamplingParams
from quire.engine.models.config import ModelConfig
from quire.engine.models.native_config import read_native
from quire.kernels.formats.kv_format import FP16
from quire.loadtest.model_configs import COMMON, CONFIGS
from quire.loadtest.simulator.geometry import KV_BYTES, OPT_13B, kv_slots
from quire.loadtest.simulator.systems import System

GB = 10**9
DEVICE = 40 * GB


@pytest.fixture
def opt_13b(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, **CONFIGS["opt-13b"]}))
    return read_native(tmp_path)


def test_fig1_left_65_per_cent_parameters_30_per_cent_kv_cache(opt_13b: ModelConfig) -> None:
    parameters = opt_13b.num_layers * opt_13b.layer_weights
    parameters += (opt_13b.vocab_size + opt_13b.max_position_embeddings) * opt_13b.hidden_size
    parameter_bytes = 2 * parameters  # fp16
    assert parameter_bytes == OPT_13B.weight_bytes == pytest.approx(26 * GB, rel=0.02)
    others = DEVICE - parameter_bytes - 12 * GB
    shares = [100 * part / DEVICE for part in (parameter_bytes, 12 * GB, others)]
    assert shares == pytest.approx([65, 30, 5], abs=1)


def test_section_3_a_token_of_opt_13b_takes_800_kb(opt_13b: ModelConfig) -> None:
    """2 (keys and values) × 5120 (hidden size) × 40 (layers) × 2 (bytes) = 800 KB, 1.6 GB for 2048 tokens."""
    token = bytes_per_block(opt_13b, 1, FP16)
    assert token == 2 * 5120 * 40 * 2 == 800 * 1024 == OPT_13B.kv_bytes_per_token
    assert 2048 * token == pytest.approx(1.6 * GB, rel=0.05)


def test_table_1_12_gb_are_15700_slots(opt_13b: ModelConfig) -> None:
    """As many tokens as that are in the cache at once, in blocks of 16, whatever is served."""
    assert kv_slots(OPT_13B) == pytest.approx(15_700, rel=0.01)
    system = System("paged", kv_slots(OPT_13B), opt_13b.max_position_embeddings)
    scheduler = system.scheduler()
    blocks = scheduler.blocks.pool.num_blocks
    block_bytes = bytes_per_block(opt_13b, 16, FP16)
    assert KV_BYTES - block_bytes < blocks * block_bytes <= KV_BYTES
    # Seven requests of 2048 tokens fit: as many as Orca (Max) has under way at once, however short they are.
    assert blocks // (2048 // 16) == 7
    for number in range(60):
        scheduler.add(Request(number, [1] * 160, SamplingParams(max_tokens=340, ignore_eos=True)))
    for _ in range(60 * 160 // system.max_num_batched_tokens + 1):
        scheduler.schedule()
    assert scheduler.rows.num_used == 60  # of 160 tokens so far

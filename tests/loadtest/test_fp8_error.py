"""The error's report against transformers and by hand; the timed decode on the demo model."""

from __future__ import annotations

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.kv_cache import FP8
from engine.startup import start_engine
from loadtest.fp8_cache import compare, logits_of, measure_decode
from service.demo import MODEL_FOLDER

TOKENS = [(17 * i + 5) % 4096 for i in range(45)]


def test_logits_are_transformers_in_float32_and_close_to_them_in_fp8() -> None:
    config = EngineConfig(model=MODEL_FOLDER, device="cpu", dtype="float32", num_gpu_blocks_override=8)
    core, _ = start_engine(config)
    own, rounded = (logits_of(core, dtype, TOKENS) for dtype in (torch.float32, FP8))
    reference = transformers.AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(own, expected, atol=1e-3, rtol=0)
    for half in (slice(0, 22), slice(22, None)):  # prefilled, decoded
        error = compare("demo", "fp8_e4m3", "float32", [rounded[half]], [own[half]])
        assert 0.002 < error.rms_error / error.logit_std < 0.15


def test_what_a_comparison_says() -> None:
    exact = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    error = compare("m", "a", "b", [exact + torch.tensor([[0.0, 3.0], [0.0, 0.0]]), exact], [exact, exact])
    p, q = exact[0].softmax(-1), torch.tensor([2.0, 3.0]).softmax(-1)
    assert (error.positions, error.max_error, error.same_token) == (4, 3.0, 0.75)
    assert error.mean_error == pytest.approx(3 / 8)
    assert error.rms_error == pytest.approx((9 / 8) ** 0.5)
    assert error.max_kl == pytest.approx(float((p * (p / q).log()).sum()))
    assert error.mean_kl == pytest.approx(error.max_kl / 4)


def test_rows_decode_at_their_context() -> None:
    own, rounded = (measure_decode(MODEL_FOLDER, "dummy", cache, 3, 40) for cache in ("auto", "fp8_e4m3"))
    assert (own.rows, own.context) == (rounded.rows, rounded.context) == (3, 40)
    assert own.tok_s > 0 and rounded.tok_s > 0
    # 6 layers, 2 kv heads of 64: the model's own bytes an element, or one and a scale's two.
    layers_and_heads = 6 * 2 * 2
    assert own.bytes_per_token == layers_and_heads * 64 * getattr(torch, own.cache).itemsize
    assert rounded.bytes_per_token == layers_and_heads * (64 + 2)

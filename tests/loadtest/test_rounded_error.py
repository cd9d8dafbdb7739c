"""The error's report against transformers and by hand; the timed decode on the demo model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers

from quire.engine.config import EngineConfig, KVCacheDtype
from quire.engine.startup import start_engine
from quire.kernels.formats.kv_format import FP32, SCALED
from quire.loadtest import rounded_cache
from quire.loadtest.rounded_cache import compare, logits_of, measure_decode
from quire.service.demo import MODEL_FOLDER

TOKENS = [(17 * i + 5) % 4096 for i in range(45)]
# Least and most that each format's error may be, of the logits' deviation: three bits of mantissa, and seven.
ERRORS = {"fp8_e4m3": (0.008, 0.06), "fp12_e4m7": (0.0008, 0.005)}


def test_logits_are_transformers_in_float32_and_close_to_them_in_a_rounded_cache() -> None:
    config = EngineConfig(
        model=MODEL_FOLDER, device="cpu", dtype="float32", num_gpu_blocks_override=8, swap_space=0
    )
    core, _ = start_engine(config)
    own = logits_of(core, FP32, TOKENS)
    reference = transformers.AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(own, expected, atol=1e-3, rtol=0)
    for name, held in SCALED.items():
        rounded = logits_of(core, held, TOKENS)
        least, most = ERRORS[name]
        for half in (slice(0, 22), slice(22, None)):  # prefilled, decoded
            error = compare("demo", name, "float32", [rounded[half]], [own[half]])
            assert least < error.rms_error / error.logit_std < most, name


@pytest.mark.parametrize("formats", [["fp12_e4m7"], list(SCALED)])
def test_each_format_is_compared_to_bfloat16_and_to_float32(
    formats: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounded_cache, "QUESTIONS", rounded_cache.QUESTIONS[:1])
    monkeypatch.setattr(rounded_cache, "_apart", lambda function, *arguments: function(*arguments))
    flags = [] if formats == list(SCALED) else ["--kv-cache-dtype", *formats]
    file = tmp_path / "errors.json"
    monkeypatch.setattr(sys, "argv", ["rounded_cache", "--no-decode", *flags, "--json", str(file)])
    rounded_cache.main()
    found = json.loads(file.read_text(encoding="utf-8"))
    errors = {(error["cache"], error["reference"]): error["rms_error"] for error in found["errors"]}
    assert list(errors) == [
        *((name, "bfloat16") for name in formats),
        *((name, "float32") for name in [*formats, "bfloat16"]),
    ]
    assert found["decode"] == []
    assert errors["fp12_e4m7", "bfloat16"] < 0.1 * errors["bfloat16", "float32"]
    assert errors["fp12_e4m7", "float32"] < 1.1 * errors["bfloat16", "float32"]


def test_what_a_comparison_says() -> None:
    exact = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    error = compare("m", "a", "b", [exact + torch.tensor([[0.0, 3.0], [0.0, 0.0]]), exact], [exact, exact])
    p, q = exact[0].softmax(-1), torch.tensor([2.0, 3.0]).softmax(-1)
    assert (error.positions, error.max_error, error.same_token) == (4, 3.0, 0.75)
    assert error.mean_error == pytest.approx(3 / 8)
    assert error.rms_error == pytest.approx((9 / 8) ** 0.5)
    assert error.max_kl == pytest.approx(float((p * (p / q).log()).sum()))
    assert error.mean_kl == pytest.approx(error.max_kl / 4)


@pytest.mark.parametrize(
    ("cache", "vector_bytes"),
    [("model", None), ("fp8_e4m3", 64 + 2), ("fp12_e4m7", 96 + 2)],  # with the scale's two
)
def test_rows_decode_at_their_context(cache: KVCacheDtype, vector_bytes: int | None) -> None:
    measured = measure_decode(MODEL_FOLDER, "dummy", cache, 3, 40)
    assert (measured.rows, measured.context) == (3, 40)
    assert measured.tok_s > 0
    if vector_bytes is None:
        vector_bytes = 64 * getattr(torch, measured.cache).itemsize
    else:
        assert measured.cache == cache
    assert measured.bytes_per_token == 6 * 2 * 2 * vector_bytes  # 6 layers, 2 kv heads of 64

"""Every architecture computes what transformers computes, from the files that transformers wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from quire.engine.device.kv_cache import KVCache
from quire.engine.models.decoder import Decoder
from quire.engine.models.gpt2 import GPT2
from quire.engine.models.loader import load_model
from quire.engine.models.native_config import read_native
from quire.engine.models.opt import OPT
from quire.engine.models.weights import Weights
from quire.kernels.attention import attend
from quire.kernels.attention.batch import DecodeBatch, ForwardBatch
from quire.kernels.attention.gather import DecodeGather
from quire.kernels.backend import torch_backend
from quire.kernels.formats.kv_format import FP16
from tests.models.paged_driver import PagedDriver
from tests.models.tiny_models import MODELS

STEPS = 24
LENGTHS = (37, 1, 16, 50, 5)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_equal_transformers(name: str, model_folder: Callable[[str], Path]) -> None:
    folder = model_folder(name)
    config = read_native(folder)
    model, _ = load_model(
        folder, config, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=100
    )
    generator = torch.Generator().manual_seed(len(name))
    prompts = [
        torch.randint(config.vocab_size, (length,), generator=generator).tolist() for length in LENGTHS
    ]

    outputs, logits = PagedDriver(model, config, len(prompts), 100).generate(prompts, STEPS)

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    reference.generation_config.eos_token_id = None
    for prompt, output, rows in zip(prompts, outputs, logits, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt + output[:-1]])).logits[0]
            ids = torch.tensor([prompt])
            generated = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=STEPS,
                do_sample=False,
                pad_token_id=0,
            )
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)
        assert output == generated[0, len(prompt) :].tolist()
        assert expected.std() > 0.1  # else agreement would mean little


def test_padding_rows_change_nothing(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("qwen3")
    config = read_native(folder)
    model, _ = load_model(
        folder, config, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=64
    )
    results = []
    for padding in (0, 3):
        driver = PagedDriver(model, config, rows=2, max_len=64)
        driver.step({}, {0: [5, 6, 7], 1: [8]})
        before = torch.stack([layer.kv.clone() for layer in driver.cache.layers], dim=1)
        results.append(driver.step({0: 9, 1: 10}, {}, padding=padding))
        after = torch.stack([layer.kv for layer in driver.cache.layers], dim=1)
        changed = (after.nan_to_num() != before.nan_to_num()).flatten(2).any(2).any(1)
        assert changed.sum() == 2  # the two sequences' own blocks
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "opt", "gpt2"])
def test_in_bfloat16_no_farther_from_fp32_than_transformers(
    name: str, model_folder: Callable[[str], Path]
) -> None:
    folder = model_folder(name)
    config = read_native(folder)
    prompt = [(17 * i) % config.vocab_size for i in range(40)]
    model, _ = load_model(
        folder, config, torch_backend(), device="cpu", dtype=torch.bfloat16, max_model_len=64
    )
    ours = PagedDriver(model, config, rows=1, max_len=64).step({}, {0: prompt})[0]
    exact, theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")(
            torch.tensor([prompt])
        ).logits[0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).square().mean() < 1.3 * (theirs - exact).square().mean()


@pytest.mark.parametrize(("name", "kind"), [("qwen3", Decoder), ("opt-post-norm", OPT), ("gpt2", GPT2)])
def test_a_decode_step_never_asks_the_device(
    name: str,
    kind: type[Decoder | OPT | GPT2],
    model_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the meta device there are no values, so any read of one would raise; kernels are stood in for."""
    config = read_native(model_folder(name))
    backend = torch_backend()
    monkeypatch.setattr(attend, "write_kv_reference", lambda *arguments, **options: None)
    monkeypatch.setattr(attend, "decode_reference", lambda *arguments: None)
    with torch.device("meta"):
        model = kind(config, backend, Weights(torch.device("meta"), torch.float16), 64)
        integers = torch.zeros(3, dtype=torch.int32)
        batch = ForwardBatch(
            tokens=integers,
            positions=integers,
            slots=integers.long(),
            decode=DecodeBatch(
                torch.zeros(4, 4, dtype=torch.int32), integers, integers, integers, DecodeGather()
            ),
        )
        cache = KVCache(config, 9, 16, FP16, torch.device("meta"), backend.copy_blocks)
        hidden = model.forward(batch, cache.layers)
    assert hidden.shape == (3, config.hidden_size)
    assert model.part_logits(hidden).shape == (3, config.vocab_size)

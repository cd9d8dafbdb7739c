"""Models that run by transformers' own code: equal to it over the paged cache, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Llama4VisionConfig,
)
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from quire.engine.config import EngineConfig
from quire.engine.device.kv_cache import dequantized_dtype, named_format
from quire.engine.messages import Request, SamplingParams
from quire.engine.models.general import indexer, paged_attention
from quire.engine.models.general import model as general_model
from quire.engine.models.general.experts import experts_of
from quire.engine.models.general.host_reads import host_reads
from quire.engine.models.general.index_parts import Kind, give_kinds
from quire.engine.models.general.own_attention import adapt, is_indexer
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.engine.startup import start_engine
from quire.kernels.attention import chosen, chosen_by_head
from quire.kernels.attention.index.operations import REFERENCE
from quire.kernels.backend import torch_backend
from quire.kernels.formats.kv_format import FP12
from tests.kernels.gpus import GPUS
from tests.models.any_model import MAX_LEN, compare, prompts, save_tiny, tiny_config, tiny_model
from tests.models.paged_driver import PagedDriver

# Dense with norms of every kind and place, scaled logits and residuals, partial rotary, parallel blocks,
# windows in some layers, experts; capped scores, sinks, values that are smaller than keys, layers whose heads
# differ in number and size, and tables of positions that count for themselves.
EQUAL = (
    "gpt_neox", "phi", "phi3", "starcoder2", "cohere2", "olmo2", "granite", "gemma3_text", "smollm3",
    "qwen3_moe", "stablelm", "gemma2", "gpt_oss", "deepseek_v3", "mimo_v2_flash", "bart", "roberta",
    "exaone4", "kolibri1",
)  # fmt: skip
# Whose code computes attention by itself, one of each way of it; chunks, slopes, and chosen tokens.
OWN = ("gpt_neo", "openai-gpt", "xglm", "roformer", "falcon", "llama4_text", "bloom", "mpt", "deepseek_v32")


@pytest.mark.parametrize("kind", [*EQUAL, *OWN])
def test_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    verdict = compare(kind, tmp_path)
    assert verdict.outcome == "equal", verdict.detail


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("cpmant", "does not call attention by transformers' interface"),
        ("recurrent_gemma", "keep something else than keys and values"),
    ],
)
def test_what_would_be_wrong_is_refused_with_the_reason(kind: str, reason: str, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path)
    with pytest.raises(ValueError, match=rf"a model of type '{kind}' cannot run .*({reason}).*; docs/models"):
        read_model(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "moshi"])
def test_a_window_that_the_code_knows_nothing_of_is_none(kind: str, tmp_path: Path) -> None:
    """A configuration may name one, of the model that it was made from, and Moshi's always does."""
    verdict = compare(kind, tmp_path, sliding_window=7)
    assert verdict.outcome == "equal", verdict.detail
    assert set(read_model(tmp_path, "transformers").windows) == {0}


@pytest.mark.parametrize("heads", [4, 6, 32])  # no power of two: some heads take slopes of twice as many
@pytest.mark.parametrize("multi_query", [False, True])
def test_falcon_with_slopes_in_place_of_rotary_positions(
    heads: int, multi_query: bool, tmp_path: Path
) -> None:
    """Added once, as transformers does but in its eager attention, where mask and scores both have them.

    Of 32 heads few slopes are numbers of bf16, to which transformers' code rounds.
    """
    changes = {"alibi": True, "num_attention_heads": heads, "hidden_size": 16 * heads}
    verdict = compare("falcon", tmp_path, "sdpa", multi_query=multi_query, **changes)
    assert verdict.outcome == "equal", verdict.detail
    config = read_model(tmp_path)
    assert {each.heads for each in config.cache_specs} == {heads}
    assert dequantized_dtype(config, FP12, torch.bfloat16, GPUS[90]) is None  # so that auto keeps bf16
    with pytest.raises(ValueError, match="fp12_e4m7 is not for a model whose keys hold what is added"):
        named_format("fp12_e4m7", config, torch.bfloat16, GPUS[90])


def test_bloom_that_is_slow_but_exact_leaves_a_bias_out(tmp_path: Path) -> None:
    verdict = compare("bloom", tmp_path, slow_but_exact=True, pretraining_tp=2)
    assert verdict.outcome == "equal", verdict.detail


def test_more_query_heads_than_a_kv_head_may_serve(tmp_path: Path) -> None:
    """Falcon-7B has 71 for one: its keys are kept twice."""
    verdict = compare("falcon", tmp_path, num_attention_heads=71, hidden_size=71 * 4)
    assert verdict.outcome == "equal", verdict.detail
    assert read_model(tmp_path).attention[0].heads == 72
    assert {each.heads for each in read_model(tmp_path).cache_specs} == {2}


def test_falcon_whose_heads_are_grouped(tmp_path: Path) -> None:
    verdict = compare("falcon", tmp_path, new_decoder_architecture=True, num_kv_heads=2)
    assert verdict.outcome == "equal", verdict.detail
    assert {each.heads for each in read_model(tmp_path).cache_specs} == {2}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full", "shared"]}),
        ("axk2", {"index_topk": 1}),
        ("dots3_note_text", {}),  # beside layers with a window, in blocks of their own
        ("mistral_large4", {}),  # queries of hidden states, and keys that layers share
        ("minimax_m3_vl_text", {"index_block_size": 3}),  # blocks of tokens, by each KV head
        ("minimax_m3_vl_text", {"index_topk_blocks": 9, "index_block_size": 1, "index_local_blocks": 0}),
    ],
)
def test_an_indexer_chooses_by_keys_that_are_in_the_cache(
    kind: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts are several times as long as what it may choose, and computed in small pieces."""
    monkeypatch.setattr(indexer, "MOST_SCORES", 1 << 14)
    monkeypatch.setattr(chosen, "MOST_BYTES", 1 << 12)
    monkeypatch.setattr(chosen_by_head, "MOST_BYTES", 1 << 12)
    verdict = compare(kind, tmp_path, **changes)
    assert verdict.outcome == "equal", verdict.detail
    assert read_model(tmp_path).chosen_tokens == changes.get("index_topk", 9)


@pytest.mark.parametrize("kind", ["dots3_note_text", "deepseek_v32", "minimax_m3_vl_text"])
def test_an_indexers_keys_are_kept_in_the_models_dtype(kind: str, tmp_path: Path) -> None:
    """Also those that its own code turns by angles in fp32."""
    save_tiny(kind, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    config = read_model(tmp_path)
    model, _ = load_model(
        tmp_path, config, torch_backend(), device="cpu", dtype=torch.bfloat16, max_model_len=MAX_LEN
    )
    driver, tokens = PagedDriver(model, config, 1, MAX_LEN), prompts()[0]
    few = driver.step({}, {0: tokens[:8]})[0]  # of which none is left out
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens[:8]]), use_cache=False).logits[0].float()
    assert float((few.float() - expected).abs().mean() / expected.std()) < 0.05
    assert driver.step({}, {0: tokens[8:]})[0].isfinite().all()


@pytest.mark.parametrize(
    ("kind", "activation"), [("hy_v4", "limited"), ("gpt_oss", "clamped"), ("qwen3_moe", "silu")]
)
def test_what_experts_do_between_their_products_is_known(kind: str, activation: str) -> None:
    causal = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32)
    found = [experts for experts in map(experts_of, causal.modules()) if experts is not None]
    assert found and {experts.activation for experts in found} == {activation}


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("deepseek_v32", Kind(interleaved=False, last=False)),
        ("glm_moe_dsa", Kind(interleaved=True, last=False)),
        ("hy_v4", Kind(interleaved=False, last=True)),
        ("dots3_note_text", Kind(interleaved=True, last=False)),
    ],
)
def test_an_indexer_of_a_known_kind_is_scored_without_its_own_code(
    kind: str, known: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "index_by", lambda gpu: REFERENCE)
    monkeypatch.setattr(indexer, "MOST_SCORES", 1 << 8)
    found = []

    def give(causal: torch.nn.Module, *others: Any) -> bool:
        found.append(give_kinds(causal, *others))
        found.extend({module.quire_kind for module in causal.modules() if is_indexer(module)})
        return found[0]

    monkeypatch.setattr(general_model, "give_kinds", give)
    verdict = compare(kind, tmp_path)
    assert verdict.outcome == "equal", verdict.detail
    assert found == [True, known]


def test_an_indexer_of_no_known_kind_keeps_its_own_code() -> None:
    """Its keys and queries are none of ours to know if it chooses something else by them."""
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(tiny_config("deepseek_v32"))

    def turned(self: Any, *given: Any, **others: Any) -> torch.Tensor:
        return DeepseekV32Indexer.forward(self, *given, **others).flip(-1)

    adapt(causal)
    unknown = type("Indexer", (DeepseekV32Indexer,), {"forward": turned})
    for module in causal.modules():
        if is_indexer(module):
            own = type(module)
            module.__class__ = type(own.__name__, (unknown,), {"__module__": own.__module__})
    assert not give_kinds(causal, is_indexer)
    assert {module.quire_kind for module in causal.modules() if is_indexer(module)} == {None}


def test_no_keys_are_kept_where_no_request_is_longer_than_an_indexer_may_choose(tmp_path: Path) -> None:
    save_tiny("deepseek_v32", tmp_path, index_topk=40)
    model = read_model(tmp_path)
    assert {each.index for each in model.within(41).cache_specs} == {16}
    assert {each.index for each in model.within(40).cache_specs} == {0}
    assert not model.within(40).chosen_tokens


def test_a_model_that_sees_images_answers_to_text(tmp_path: Path) -> None:
    """Llama 4's folders have weights for images, which a model of text alone has no use for."""
    reference = tiny_model("llama4_text", tmp_path / "text")
    eyes = Llama4VisionConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        vision_output_dim=64, projector_input_dim=64, projector_output_dim=64, image_size=28,
    )  # fmt: skip
    whole = Llama4ForConditionalGeneration(Llama4Config(vision_config=eyes, text_config=reference.config))
    whole.language_model.load_state_dict(reference.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    config = read_model(tmp_path / "whole")
    answers = []
    for folder in ("text", "whole"):
        model, _ = load_model(
            tmp_path / folder, config, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=64
        )
        answers.append(PagedDriver(model, config, 1, 64).generate([[5, 6, 7, 8]], 3)[1][0])
    assert torch.equal(*answers)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_files_that_are_written_meanwhile_change_nothing(tmp_path: Path, kind: str) -> None:
    save_tiny(kind, tmp_path)
    config = read_model(tmp_path, "transformers")
    model, _ = load_model(
        tmp_path, config, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=64
    )
    answers = [PagedDriver(model, config, 1, 64).generate([[5, 6, 7, 8]], 3)[1][0]]
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 8)
        file.write(bytes(path.stat().st_size * 7 // 8))
    answers.append(PagedDriver(model, config, 1, 64).generate([[5, 6, 7, 8]], 3)[1][0])
    assert torch.equal(*answers)


def test_chunks_are_windows_of_the_cache(tmp_path: Path) -> None:
    """What lies before a chunk is behind a window of its length, too, and may be given back."""
    save_tiny("llama4_text", tmp_path)
    model = read_model(tmp_path)
    assert model.windows == (10, 0, 10, 0) and [each.chunked for each in model.attention] == [True, False] * 2
    assert not any(model.within(10).windows)


def test_an_encoder_is_refused_and_with_is_decoder_runs(tmp_path: Path) -> None:
    save_tiny("bert", tmp_path)
    assert read_model(tmp_path).num_layers == 4
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"is_decoder": False}))
    with pytest.raises(ValueError, match="it sees what comes later"):
        read_model(tmp_path)


def test_no_more_positions_than_the_model_has(tmp_path: Path) -> None:
    """RoBERTa's 128 rows begin behind that of padding, here the first."""
    save_tiny("roberta", tmp_path)
    assert read_model(tmp_path).max_position_embeddings == 127
    with pytest.raises(ValueError, match=r"--max-model-len \(128\) is more than .* \(127\)"):
        start_engine(EngineConfig(model=str(tmp_path), device="cpu", max_model_len=128))


@pytest.mark.parametrize(
    "kind",
    ["olmo2", "gemma2", "qwen3_moe", "mimo_v2_flash", "llama4_text", "bloom", "starcoder2", "deepseek_v3"],
)
def test_greedy_tokens_through_the_engine_equal_transformers(kind: str, tmp_path: Path) -> None:
    """On a GPU by Triton, and in CUDA graphs where the model's code allows it."""
    reference = tiny_model(kind, tmp_path)
    prompts = [
        [3 + (11 * at + 5 * which) % 90 for at in range(size)] for which, size in enumerate((40, 1, 23))
    ]
    core, _ = start_engine(
        EngineConfig(
            model=str(tmp_path),
            dtype="float32",
            max_num_batched_tokens=32,
            max_num_seqs=4,
            num_gpu_blocks_override=64,
            swap_space=0,
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    for at, prompt in enumerate(prompts):
        core.add(Request(at, prompt, params))
    tokens: list[list[int]] = [[] for _ in prompts]
    while core.has_work:
        for output in core.step():
            tokens[output.request_id] += output.tokens
    for prompt, got in zip(prompts, tokens, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + got]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert got == logits.argmax(-1).tolist()


def test_code_that_looks_at_what_is_computed_is_found() -> None:
    values = torch.arange(4.0)
    assert host_reads(lambda: values * 2 + values.softmax(0)) == []
    assert host_reads(values.nonzero) == ["aten::nonzero"]
    assert host_reads(lambda: torch.ops.aten._local_scalar_dense(values[0])) == ["aten::_local_scalar_dense"]


def test_samples_share_their_prompt_and_a_preempted_request_goes_on_as_before(tmp_path: Path) -> None:
    """The engine knows blocks; that the forward is another's changes nothing for it."""
    save_tiny("olmo2", tmp_path)
    prompts = [[5 + (7 * at + 3 * which) % 80 for at in range(21)] for which in range(3)]

    def answers(**settings: int) -> list[list[list[int]]]:
        core, _ = start_engine(EngineConfig(model=str(tmp_path), device="cpu", block_size=4, **settings))
        params = SamplingParams(n=2, temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
        for at, prompt in enumerate(prompts):
            core.add(Request(at, prompt, params))
        tokens: list[list[list[int]]] = [[[], []] for _ in prompts]
        while core.has_work:
            for output in core.step():
                tokens[output.request_id][output.index] += output.tokens
        preempted = core.stats.preemptions_recompute + core.stats.preemptions_swap
        assert (preempted > 0) == ("num_gpu_blocks_override" in settings)
        return tokens

    assert answers() == answers(num_gpu_blocks_override=18, max_num_batched_tokens=256)

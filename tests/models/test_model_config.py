"""config.json in every dialect gives the same ModelConfig; what we do not compute is refused by name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from quire.engine.models.config import ModelConfig
from quire.engine.models.native_config import read_native
from quire.engine.models.rope_config import Llama3Scaling, RopeConfig
from tests.models.tiny_models import MODELS

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 99,
    "max_position_embeddings": 512,
}
OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 99,
    "max_position_embeddings": 512,
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 3,
    "vocab_size": 99,
    "n_positions": 512,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., ModelConfig]:
    """Read a config.json with these fields, and a generation_config.json if given."""

    def read_fields(fields: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_native(tmp_path)

    return read_fields


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_saves_is_read_as_it_was_meant(
    name: str, model_folder: Callable[[str], Path]
) -> None:
    folder = model_folder(name)
    ours, theirs = read_native(folder), transformers.AutoConfig.from_pretrained(folder)
    heads = theirs.num_attention_heads
    assert (ours.num_layers, ours.hidden_size, ours.num_heads, ours.vocab_size) == (
        theirs.num_hidden_layers,
        theirs.hidden_size,
        heads,
        theirs.vocab_size,
    )
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // heads)
    assert ours.num_kv_heads == getattr(theirs, "num_key_value_heads", heads)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert f"torch.{ours.dtype}" == str(theirs.dtype)
    assert (ours.eos_token_ids, ours.bos_token_id) == ((2, 3), 1)


def test_both_dialects_of_rope_and_dtype_agree(read: Callable[..., ModelConfig]) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 256
    new = read(
        LLAMA
        | {"dtype": "bfloat16", "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    )
    old = read(
        LLAMA
        | {"torch_dtype": "bfloat16", "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    )
    assert new == old
    assert new.rope == RopeConfig(5e5, llama3=Llama3Scaling(8.0, 1.0, 4.0, 256))
    linear = read(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4}})
    assert linear.rope == RopeConfig(10000.0, linear_factor=4.0)
    assert read(LLAMA | {"rope_theta": 7, "rope_scaling": None}).rope == RopeConfig(7.0)


def test_left_out_fields_take_the_architecture_s_defaults(read: Callable[..., ModelConfig]) -> None:
    llama, gpt2, opt = read(LLAMA), read(GPT2), read(OPT)
    assert (llama.num_kv_heads, llama.head_dim, llama.tie_word_embeddings) == (4, 16, False)
    assert (llama.dtype, llama.eos_token_ids, llama.bos_token_id) == ("float32", (), None)
    assert (gpt2.tie_word_embeddings, opt.tie_word_embeddings) == (True, True)
    assert (gpt2.intermediate_size, gpt2.activation, opt.activation) == (256, "gelu_tanh", "relu")
    assert read(QWEN3).head_dim == 128
    assert read(QWEN2).qkv_bias
    assert not read(QWEN2).output_bias


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        (LLAMA, (0, 0, 0)),
        (MISTRAL | {"sliding_window": None}, (0, 0, 0)),
        (MISTRAL | {"sliding_window": 100}, (100, 100, 100)),
        (MISTRAL | {"sliding_window": 512}, (0, 0, 0)),  # no context outgrows it
        (MISTRAL | {"max_position_embeddings": 8192}, (4096, 4096, 4096)),
        (QWEN2 | {"sliding_window": 100, "max_window_layers": 0}, (0, 0, 0)),
        (
            QWEN2 | {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 2},
            (0, 0, 100),
        ),
        (
            QWEN3
            | {
                "use_sliding_window": True,
                "sliding_window": 100,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (100, 0, 100),
        ),
    ],
)
def test_windows(read: Callable[..., ModelConfig], fields: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert read(fields).windows == windows


def test_padding_is_transformers_where_it_is_left_out(read: Callable[..., ModelConfig]) -> None:
    for fields, padding in ((LLAMA, None), (QWEN3, None), (GPT2, None), (OPT, 1)):
        without = {name: value for name, value in fields.items() if name != "pad_token_id"}
        assert read(without).pad_token_id == padding
        assert read(without | {"pad_token_id": None}).pad_token_id is None
        assert read(without | {"pad_token_id": 7}).pad_token_id == 7


def test_eos_ids_come_from_generation_config_first(read: Callable[..., ModelConfig]) -> None:
    fields = LLAMA | {"eos_token_id": 5}
    assert read(fields).eos_token_ids == (5,)
    assert read(fields, {}).eos_token_ids == (5,)
    assert read(fields, {"eos_token_id": None}).eos_token_ids == (5,)
    assert read(fields, {"eos_token_id": [7, 5]}).eos_token_ids == (7, 5)
    assert read(fields, {"eos_token_id": 0}).eos_token_ids == (0,)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["BertModel"]}, "'BertModel' is not supported; supported are LlamaForCausalLM"),
        ({}, "architecture None"),
        ({key: value for key, value in LLAMA.items() if key != "vocab_size"}, "vocab_size is None"),
        (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers is True"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        (LLAMA | {"head_dim": 520}, "head_dim is 520"),
        (LLAMA | {"head_dim": 15}, "head_dim is 15"),
        (LLAMA | {"hidden_size": 65}, "hidden_size is 65"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (LLAMA | {"dtype": "float8"}, "dtype is 'float8'"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA | {"is_causal": False}, "is_causal = false"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            LLAMA | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary",
        ),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2}}, "type is 'dynamic'"),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope_type is 'yarn'"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "low_freq_factor"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters"),
        (LLAMA | {"rope_theta": -1}, "rope_theta is -1"),
        (LLAMA | {"sliding_window": 100}, "sliding_window"),
        (LLAMA | {"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        (MISTRAL | {"attention_bias": True}, "attention_bias"),
        (MISTRAL | {"mlp_bias": True}, "mlp_bias"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window is 0"),
        (MISTRAL | {"layer_types": ["full_attention"]}, "layer_types"),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        (QWEN2 | {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
        (OPT | {"activation_function": "tanh"}, "activation_function is 'tanh'"),
        (OPT | {"do_layer_norm_before": "no"}, "do_layer_norm_before is 'no'"),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2 | {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention"),
        (GPT2 | {"n_embd": 65}, "n_embd is 65"),
    ],
)
def test_refusals_name_the_field(
    read: Callable[..., ModelConfig], fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        read(fields)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        read_native(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json (cannot be read|must hold) .*; mend it, or"):
            read_native(tmp_path)


def test_reading_a_config_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, quire.engine.models.config; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])

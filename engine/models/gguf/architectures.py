"""Which architectures of GGUF files are served: what each is called in a model's folder, and its tensors.

Names are those of llama.cpp's convert_hf_to_gguf.py, which made the files, read backwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Of a tensor's name in a file, what stands for it in a folder's: outside of layers, and in each of them.
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_OF_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_OF_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

# Of a value's name in a file's metadata, behind the architecture's, the field of config.json that has it.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_EXPERT_FIELDS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_BIASES = {"blk.0.attn_q.bias": "attention_bias", "blk.0.ffn_down.bias": "mlp_bias"}
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}  # every layer has experts
_GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What a folder of the same model has. architecture, model_type: as its config.json names them.

    layers: the name before a layer's number. block, outer: names of tensors in a layer, and outside of them;
    of experts' with a place for each one's number. fields: of config.json, by names of metadata; needed are
    those that `optional` lacks. constants: further ones, of which files tell nothing.

    permuted: rows of queries and keys stand in pairs, where a folder has the halves of a head. less: what is
    subtracted of norms' weights. transposed: names of weights that a folder has as [in, out]. partly_rotated:
    a part of a head may have no rotary positions. biases: by tensors that only some models have, the fields
    of config.json that tell.
    """

    architecture: str
    model_type: str
    block: Mapping[str, str]
    fields: Mapping[str, str]
    outer: Mapping[str, str] = field(default_factory=lambda: _OUTER)
    layers: str = "model.layers"
    optional: frozenset[str] = frozenset({"attention.key_length"})
    constants: Mapping[str, Any] = field(default_factory=dict)
    permuted: bool = False
    less: float = 0.0
    transposed: frozenset[str] = frozenset()
    partly_rotated: bool = False
    biases: Mapping[str, str] = field(default_factory=dict)


_LLAMA = Architecture(
    architecture="LlamaForCausalLM",
    model_type="llama",
    block=_ATTENTION | _GATED,
    fields=_FIELDS,
    permuted=True,
    biases=_BIASES,
)
_MIXTRAL = Architecture(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    block=_ATTENTION | _OF_MIXTRAL,
    fields=_FIELDS | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    constants={"sliding_window": None},
    permuted=True,
)
_ARCHITECTURES = {
    "llama": _LLAMA,
    "qwen2": Architecture(
        architecture="Qwen2ForCausalLM", model_type="qwen2", block=_ATTENTION | _GATED, fields=_FIELDS
    ),
    "qwen3": Architecture(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        block=_ATTENTION | _GATED,
        fields=_FIELDS,
        biases={"blk.0.attn_q.bias": "attention_bias"},
    ),
    "qwen2moe": Architecture(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        block=_ATTENTION | _EXPERTS | _SHARED_EXPERT,
        fields=_FIELDS
        | _EXPERT_FIELDS
        | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        constants=_SPARSE | {"norm_topk_prob": False},
    ),
    "qwen3moe": Architecture(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        block=_ATTENTION | _EXPERTS,
        fields=_FIELDS | _EXPERT_FIELDS,
        optional=frozenset({"attention.key_length", "feed_forward_length"}),
        constants=_SPARSE | {"norm_topk_prob": True},
    ),
    "phi3": Architecture(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        block=_ATTENTION
        | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        fields=_FIELDS | _WINDOW,
        optional=frozenset({"attention.key_length", "attention.sliding_window"}),
        constants={"sliding_window": None, "pad_token_id": None},
        partly_rotated=True,
    ),
    "gemma": Architecture(
        architecture="GemmaForCausalLM",
        model_type="gemma",
        block=_ATTENTION | _GATED,
        fields=_FIELDS,
        constants=_GELU,
        less=1.0,
    ),
    "gemma2": Architecture(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        block=_ATTENTION | _GATED | _NORMS_BEHIND,
        fields=_FIELDS
        | _WINDOW
        | {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        constants=_GELU,
        less=1.0,
    ),
    "gemma3": Architecture(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        block=_ATTENTION | _GATED | _NORMS_BEHIND,
        fields=_FIELDS | _WINDOW | {"final_logit_softcapping": "final_logit_softcapping"},
        optional=frozenset({"attention.key_length", "final_logit_softcapping"}),
        constants=_GELU | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        less=1.0,
    ),
    "granite": Architecture(
        architecture="GraniteForCausalLM",
        model_type="granite",
        block=_ATTENTION | _GATED,
        fields=_FIELDS
        | {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        permuted=True,
        biases=_BIASES,
    ),
    "smollm3": Architecture(
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        block=_ATTENTION | _GATED,
        fields=_FIELDS,
        constants={"no_rope_layer_interval": 4, "use_sliding_window": False, "pad_token_id": None},
        permuted=True,
        biases=_BIASES,
    ),
    "starcoder2": Architecture(
        architecture="Starcoder2ForCausalLM",
        model_type="starcoder2",
        block=_ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        fields={name: each for name, each in _FIELDS.items() if each not in ("rms_norm_eps", "head_dim")}
        | _WINDOW
        | {"attention.layer_norm_epsilon": "norm_epsilon"},
        optional=frozenset(_WINDOW),
        constants={"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": None},
    ),
    "gpt2": Architecture(
        architecture="GPT2LMHeadModel",
        model_type="gpt2",
        layers="transformer.h",
        outer={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        block=_OF_GPT2,
        fields={
            "context_length": "n_positions",
            "block_count": "n_layer",
            "embedding_length": "n_embd",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
}
_FOR_IMAGES = ("clip", "mmproj")


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """Return what a file's model is. Raises ValueError that names what it is, and which are served."""
    name = str(metadata.get("general.architecture"))
    if name in _FOR_IMAGES or metadata.get("general.type") == "mmproj":
        raise ValueError(
            "is a projector of images (mmproj), which is no model: give the file of the model that it is for"
        )
    if metadata.get("general.type", "model") != "model":
        raise ValueError(f"is of the type {metadata['general.type']!r}, which is no model")
    if name not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise ValueError(
            f"is of the architecture {name!r}, which is not served from a GGUF file; those are {known}. Give "
            "the folder or Hub id of the model that it was made of"
        )
    if name == "llama" and metadata.get("llama.expert_count"):
        return _MIXTRAL
    return _ARCHITECTURES[name]

"""Configurations of models that people run, over the shapes that kernels meet, as their folders give them.

Hidden sizes from 1,024 to 8,192, 1 to 12 query heads a KV head, heads of 64 to 256. Those that one GPU does
not hold have fewer layers here, which their names say.
"""

from __future__ import annotations

from typing import Any

from quire.loadtest.model_configs import CONFIGS, LLAMA, QWEN3, sizes

ROPE = "rope_theta"
QWEN = {"vocab_size": 151936, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, ROPE: 1000000}

DENSE: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": CONFIGS["qwen3-0.6b"],
    "llama-3.2-1b": {
        **LLAMA,
        **sizes(2048, 16, 32, 8, 8192),
        "head_dim": 64,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **sizes(1152, 26, 4, 1, 6912),
        "head_dim": 256,
        "vocab_size": 262144,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        ROPE: 1000000,
        "rope_local_base_freq": 10000,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        **QWEN,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **sizes(1536, 28, 12, 2, 8960),
        "tie_word_embeddings": True,
    },
    "starcoder2-3b": {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        **sizes(3072, 30, 24, 2, 12288),
        "hidden_act": "gelu_pytorch_tanh",
        "vocab_size": 49152,
        "sliding_window": 4096,
        "max_position_embeddings": 16384,
        "norm_epsilon": 1e-5,
        "use_bias": True,
        ROPE: 999999.4420358813,
        "tie_word_embeddings": True,
    },
    "phi-3-mini": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        **sizes(3072, 32, 32, 32, 8192),
        "vocab_size": 32064,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        ROPE: 10000,
        "tie_word_embeddings": False,
    },
    "qwen3-4b": {
        **QWEN3,
        **sizes(2560, 36, 32, 8, 9728),
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        **QWEN,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **sizes(3584, 28, 28, 4, 18944),
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "llama-8b": CONFIGS["llama-8b"],
    "llama-70b-20-layers": {**CONFIGS["llama-70b"], "num_hidden_layers": 20},
}

EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        **QWEN,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **sizes(2048, 48, 32, 4, 6144),
        "head_dim": 128,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **sizes(2880, 24, 64, 8, 2880),
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "rms_norm_eps": 1e-5,
        ROPE: 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
    },
    "mixtral-8x7b-16-layers": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **sizes(4096, 16, 32, 8, 14336),
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        ROPE: 1000000,
        "tie_word_embeddings": False,
    },
}

WINDOWED: dict[str, dict[str, Any]] = {
    "gemma-3-27b": {
        **DENSE["gemma-3-1b"],
        **sizes(5376, 62, 32, 16, 21504),
        "head_dim": 128,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "max_position_embeddings": 131072,
    },
    "gpt-oss-20b": EXPERTS["gpt-oss-20b"],
}

# Beside the grid, which most choices of kernels were made by: what holds there should hold here.
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3-1.7b": {**QWEN3, **sizes(2048, 28, 16, 8, 6144), "tie_word_embeddings": True},
    "qwen2.5-3b": {**DENSE["qwen2.5-1.5b"], **sizes(2048, 36, 16, 2, 11008)},
    "llama-3.2-3b": {
        **LLAMA,
        **sizes(3072, 28, 24, 8, 8192),
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "qwen3-14b": CONFIGS["qwen3-14b"],
}

# Weights in few bits, as folders have them: 8-bit floats of rows and of blocks, integers of 4 bits in groups.
_FLOAT8_ROWS = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
_FLOAT8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
_INT4 = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
QUANTISED: dict[str, dict[str, Any]] = {
    "llama-8b-float8": {**CONFIGS["llama-8b"], "quantization_config": _FLOAT8_ROWS},
    "llama-8b-int4": {**CONFIGS["llama-8b"], "quantization_config": _INT4},
    "qwen3-4b-float8-blocks": {**DENSE["qwen3-4b"], "quantization_config": _FLOAT8_BLOCKS},
    "qwen2.5-7b-int4": {**DENSE["qwen2.5-7b"], "quantization_config": _INT4},
    "llama-70b-int4": {**CONFIGS["llama-70b"], "quantization_config": _INT4},
    "gpt-oss-20b-mxfp4": {**EXPERTS["gpt-oss-20b"], "quantization_config": _MXFP4},
    "gpt-oss-120b-mxfp4": {
        **EXPERTS["gpt-oss-20b"],
        "num_hidden_layers": 36,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "num_local_experts": 128,
        "quantization_config": _MXFP4,
    },
    "qwen3-30b-a3b-float8-blocks": {**EXPERTS["qwen3-30b-a3b"], "quantization_config": _FLOAT8_BLOCKS},
    "qwen3-30b-a3b-int4": {**EXPERTS["qwen3-30b-a3b"], "quantization_config": _INT4},
}

# Layer norms, and MLPs of two products without a gate.
UNGATED: dict[str, dict[str, Any]] = {
    "starcoder2-3b": DENSE["starcoder2-3b"],
    "pythia-2.8b": {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        **sizes(2560, 32, 32, 32, 10240),
        "hidden_act": "gelu",
        "attention_bias": True,
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
        "vocab_size": 50304,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
}

_LATENT = {
    **sizes(7168, 3, 128, 128, 2048),
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "n_routed_experts": 8,
    "moe_intermediate_size": 256,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 32768,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", ROPE: 10000.0},
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# Three layers of DeepSeek's attention with narrow MLPs: V3.2's indexer chooses 2,048 tokens, V3 has none.
LATENT: dict[str, dict[str, Any]] = {
    "deepseek-v3.2-3-layers": {
        **_LATENT,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    "deepseek-v3-3-layers": {
        **_LATENT,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
    },
}

# Layers that keep states beside attention: delta rules, a convolution alone, Mamba 2 and Mamba 1.
_QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    **sizes(2560, 32, 16, 4, 9216),
    "head_dim": 256,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", ROPE: 10000000, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
}
STATES: dict[str, dict[str, Any]] = {
    "qwen3.5-4b": _QWEN3_5,
    "qwen3.5-4b-float8-blocks": {**_QWEN3_5, "quantization_config": _FLOAT8_BLOCKS},
    "qwen3-next-8-layers": {
        **_QWEN3_5,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **sizes(2048, 8, 16, 2, 5120),
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
    },
    "lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        **sizes(2048, 16, 32, 8, 12288),
        "vocab_size": 65536,
        "layer_types": [
            "full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)
        ],
        "max_position_embeddings": 128000,
        "tie_word_embeddings": True,
    },
    "nemotron-h-8b-13-layers": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        **sizes(4096, 13, 32, 8, 21504),
        "head_dim": 128,
        "vocab_size": 131072,
        "layers_block_type": [
            *(["linear_attention", "mlp"] * 3),
            "linear_attention",
            "full_attention",
            "mlp",
            *(["linear_attention", "mlp"] * 2),
        ],
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "falcon-mamba-7b-16-layers": {
        "architectures": ["FalconMambaForCausalLM"],
        "model_type": "falcon_mamba",
        "hidden_size": 4096,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "state_size": 16,
        "time_step_rank": 256,
        "vocab_size": 65024,
        "tie_word_embeddings": False,
    },
    "kimi-linear-8-layers": {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "hidden_size": 2304,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "moe_intermediate_size": 1024,
        "mlp_layer_types": ["dense", *["sparse"] * 7],
        "vocab_size": 163840,
        "tie_word_embeddings": False,
    },
}

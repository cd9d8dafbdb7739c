"""Configurations of tiny models: between them they cover what the architectures can vary."""

from __future__ import annotations

from typing import Any

import torch

ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
COMMON: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 128}
DECODER = COMMON | {"hidden_size": 64, "intermediate_size": 88}

# name -> (class stem, config, saved dtype). Between them: head dims 48-96, groups of 1, 2, 4 and 7, biases
# and ties of both kinds, every rope, windows smaller than the prompts, all dtypes, one and several files.
MODELS: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "llama3-sharded": (
        "Llama",
        DECODER
        | {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": ROPE_LLAMA3,
            "vocab_size": 131,
        },
        torch.float32,
    ),
    "llama-tied-linear": (
        "Llama",
        DECODER
        | {
            "hidden_size": 96,
            "num_attention_heads": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
            "vocab_size": 97,
        },
        torch.float16,
    ),
    "mistral-window": (
        "Mistral",
        DECODER
        | {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 80,
            "sliding_window": 7,
            "vocab_size": 101,
            "num_hidden_layers": 3,
        },
        torch.bfloat16,
    ),
    "qwen2-late-window": (
        "Qwen2",
        DECODER
        | {
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "vocab_size": 103,
        },
        torch.float16,
    ),
    "qwen3": (
        "Qwen3",
        DECODER
        | {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 96,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "vocab_size": 107,
        },
        torch.bfloat16,
    ),
    "qwen3-bias": (
        "Qwen3",
        DECODER
        | {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "attention_bias": True,
            "vocab_size": 64,
        },
        torch.float32,
    ),
    "opt": (
        "OPT",
        COMMON | {"hidden_size": 128, "ffn_dim": 72, "num_attention_heads": 2, "vocab_size": 109},
        torch.float16,
    ),
    "opt-post-norm": (
        "OPT",
        COMMON
        | {
            "hidden_size": 64,
            "ffn_dim": 72,
            "num_attention_heads": 1,
            "vocab_size": 71,
            "do_layer_norm_before": False,
            "word_embed_proj_dim": 40,
        },
        torch.float32,
    ),
    "opt-no-bias": (
        "OPT",
        COMMON
        | {
            "hidden_size": 64,
            "ffn_dim": 72,
            "num_attention_heads": 1,
            "vocab_size": 73,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
        torch.float32,
    ),
    "gpt2": (
        "GPT2",
        {"n_layer": 2, "n_positions": 128, "n_embd": 160, "n_head": 2, "n_inner": 72, "vocab_size": 113},
        torch.float32,
    ),
}

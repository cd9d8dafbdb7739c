"""Write model folders for benchmarks with dummy weights: `python -m quire.loadtest.model_configs FOLDER`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.loadtest.command import command_parser, told_of


def sizes(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> dict[str, int]:
    """Return the part of a config that gives the sizes of a decoder."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
    }


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 128,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "rope_theta": 500000,
    "rms_norm_eps": 1e-5,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {**QWEN3, **sizes(1024, 28, 16, 8, 3072), "tie_word_embeddings": True},
    "llama-8b": {**LLAMA, **sizes(4096, 32, 32, 8, 14336), "max_position_embeddings": 32768},
    "llama-70b": {**LLAMA, **sizes(8192, 80, 64, 8, 28672), "max_position_embeddings": 8192},
    "qwen3-14b": {**QWEN3, **sizes(5120, 40, 40, 8, 17408), "tie_word_embeddings": False},
    "opt-13b": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "ffn_dim": 20480,
        "vocab_size": 50272,
        "word_embed_proj_dim": 5120,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "dtype": "float16",
        "pad_token_id": 1,
    },
}
COMMON = {
    "hidden_act": "silu",
    "attention_bias": False,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_model_folders(root: Path) -> None:
    """Write a folder a config: config.json, a byte-level tokenizer padded to the vocabulary, no weights."""
    for name, config in CONFIGS.items():
        write_model_folder(root / name, config)


def write_model_folder(folder: Path, config: dict[str, Any]) -> None:
    """Write the folder of one config, which gives what COMMON does not."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**COMMON, **config}, indent=1))
    write_tokenizer(folder, config["vocab_size"])


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer, padded to the vocabulary."""
    _byte_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def _byte_tokenizer(vocab_size: int) -> Tokenizer:
    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"Ġw{i}" for i in range(vocab_size - len(names))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("folder", type=Path, help=f"where to write {', '.join(CONFIGS)}")
    try:
        write_model_folders(parser.parse_args().folder)
    except OSError as error:
        parser.error(told_of(error))


if __name__ == "__main__":
    main()

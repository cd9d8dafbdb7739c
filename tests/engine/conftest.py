"""One tiny random model, written by transformers, for everything that runs a real engine here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.dry_runs import shared_dry_runs

__all__ = ["llama", "shared_dry_runs"]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    """(folder, the same model in transformers): 2 layers, 4 heads on 2, vocabulary of 199."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder, model

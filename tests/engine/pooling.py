"""Tiny models that pool, as transformers writes them, and an engine that is asked for vectors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from quire.engine.arrays import Vectors
from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import POOLED, Output, PoolingParams, Request
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.startup import start_engine
from tests.models.tiny_models import MODELS

RAW = PoolingParams()


def save_model(folder: Path, name: str, head: str, **fields: Any) -> Any:
    """Write the tiny model `name` with this head ("Model", "ForSequenceClassification"); return it."""
    stem, config, _ = MODELS[name]
    torch.manual_seed(len(name))
    configuration = getattr(transformers, f"{stem}Config")(
        **config, **fields, initializer_range=0.3, attn_implementation="eager", pad_token_id=0
    )
    model = getattr(transformers, f"{stem}{head}")(configuration).eval()
    model.save_pretrained(folder)
    return model


def as_sentence_model(
    folder: Path, mode: str | list[str], *, normalize: bool = True, projections: Sequence[nn.Sequential] = ()
) -> None:
    """Add the files by which sentence-transformers says how a model pools.

    mode: as older folders name it, or several as newer ones do. projections: each a Linear and an activation.
    """
    kinds = ["Transformer", "Pooling", *["Dense"] * len(projections), *["Normalize"] * normalize]
    modules = [
        {"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    says = {mode: True} if isinstance(mode, str) else {"pooling_mode": mode}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**says, "include_prompt": True}))
    for i, (linear, activation) in enumerate(projections, start=2):
        dense = folder / f"{i}_Dense"
        dense.mkdir(exist_ok=True)
        kind = type(activation)
        config = {"in_features": linear.in_features, "out_features": linear.out_features}
        config |= {
            "bias": linear.bias is not None,
            "activation_function": f"{kind.__module__}.{kind.__name__}",
        }
        (dense / "config.json").write_text(json.dumps(config))
        weights = {f"linear.{name}": value for name, value in linear.state_dict().items()}
        save_file(weights, dense / "model.safetensors")


def start(folder: Path, **settings: Any) -> EngineCore:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 96,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 200,
        "swap_space": 0,
    }
    return start_engine(EngineConfig(model=str(folder), **{**defaults, **settings}))[0]


def run(core: EngineCore, prompts: list[list[int]], params: PoolingParams = RAW) -> list[Output]:
    """Return each prompt's only output, all at once."""
    for i, prompt in enumerate(prompts):
        core.add(Request(i, prompt, POOLED, pooling=params))
    outputs: dict[int, Output] = {}
    while core.has_work:
        for output in core.step():
            assert output.request_id not in outputs
            outputs[output.request_id] = output
        check_scheduler(core.scheduler.state)
    return [outputs[i] for i in range(len(prompts))]


def vectors(outputs: list[Output]) -> Vectors:
    assert [(each.finish_reason, each.tokens) for each in outputs] == [("stop", [])] * len(outputs)
    return np.stack([np.frombuffer(each.vector or b"", np.float32) for each in outputs])

"""Tiny models that pool, as transformers writes them, and an engine that is asked for vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

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


def as_sentence_model(folder: Path, mode: str, *, normalize: bool = True) -> None:
    """Add the files by which sentence-transformers says how a model pools."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({mode: True, "include_prompt": True}))


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

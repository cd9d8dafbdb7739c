"""Tiny random models that transformers saved, one folder each, made once."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import httpx
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.engine.nightly import NIGHTLY
from tests.models.tiny_models import MODELS

# The same examples on every machine (`nightly`: others each time), and none fails for being slow. Hypothesis
# draws constants from imported modules, too, so some examples depend on what is imported.
settings.register_profile(
    "untimed",
    derandomize=not NIGHTLY,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")

# Each client of httpx, even that of one `httpx.get`, reads all authorities' certificates: 20 ms of a core.
httpx._transports.default.create_ssl_context = cache(httpx.create_ssl_context)

if not torch.cuda.is_available():
    # Kernel tests then use Triton's interpreter; Triton looks once, when the first test module imports it.
    os.environ["TRITON_INTERPRET"] = "1"


gc.disable()  # until all is imported, which takes a fifth less without it


def pytest_collection_finish() -> None:
    """Keep collectors from what lasts to the end, modules above all: they took a seventh of engine tests.

    So no test may `gc.unfreeze`. What is garbage by now lasts too, which costs less than to look for it.
    """
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """name in MODELS -> its folder; every parameter is random, biases and norms too."""
    import transformers  # 3 s; the process that only hands tests to others comes here, too, while they wait

    folders: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in folders:
            stem, values, dtype = MODELS[name]
            config = getattr(transformers, f"{stem}Config")(**values, bos_token_id=1, eos_token_id=[2, 3])
            torch.manual_seed(len(name))
            model = getattr(transformers, f"{stem}{'LMHeadModel' if stem == 'GPT2' else 'ForCausalLM'}")(
                config
            )
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(float(parameter.mean().round()), 0.2)
            folders[name] = tmp_path_factory.mktemp(name)
            shard = "100KB" if "sharded" in name else "1GB"
            model.to(dtype).save_pretrained(folders[name], max_shard_size=shard)
        return folders[name]

    return folder_of

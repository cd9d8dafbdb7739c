"""Replicas with an adapter merged share no blocks with those that have another one, or none."""

from __future__ import annotations

import json
from pathlib import Path

from quire.engine.models.model_folders import ModelFolders, resolve_folders
from quire.engine.registry.deployment import Deployment, describe, hash_seed
from quire.service.demo import MODEL_FOLDER
from quire.service.router.config import RouterConfig
from quire.service.router.reading import _identify
from tests.models.adapter_folder import lora_of, save_adapter

QUERIES = "model.layers.0.self_attn.q_proj"


def deployment(model: str, lora: str | None) -> Deployment:
    return describe(model, lora, resolve_folders(model, lora), 16, "bf16", hash_seed(""), [])


def test_an_adapter_makes_another_deployment(tmp_path: Path) -> None:
    base, adapter = (
        str(MODEL_FOLDER),
        save_adapter(tmp_path / "mine", lora_of(QUERIES, 256, 256), MODEL_FOLDER),
    )
    found = [deployment(base, None), deployment(base, str(adapter))]
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 7}))
    found.append(deployment(base, str(adapter)))
    save_adapter(adapter, {name: 2 * each for name, each in lora_of(QUERIES, 256, 256).items()}, MODEL_FOLDER)
    found.append(deployment(base, str(adapter)))
    assert len({each.fingerprint for each in found}) == len({each.revision for each in found}) == 4
    (adapter / "tokenizer.json").write_text("{}")
    assert deployment(base, str(adapter)).tokenizer != found[-1].tokenizer


def test_a_router_knows_it_by_the_same_flags(tmp_path: Path) -> None:
    base = str(MODEL_FOLDER)
    adapter = str(save_adapter(tmp_path / "mine", lora_of(QUERIES, 256, 256), MODEL_FOLDER))
    for model, lora in ((base, None), (base, adapter), (adapter, None)):
        router = RouterConfig(model=model, lora=lora, redis_url="redis://127.0.0.1")
        identity = _identify(router, resolve_folders(model, lora))
        known = [
            others
            for others in ((base, None), (base, adapter), (adapter, None))
            if identity.difference(deployment(*others)) is None
        ]
        assert known == [(model, lora)]


def test_folders_without_an_adapter_are_as_they_were() -> None:
    """Replicas of this release and of the one before share blocks."""
    folder = Path(MODEL_FOLDER)
    found = describe(MODEL_FOLDER, None, ModelFolders(folder), 16, "bf16", 0, [])
    assert (found.model, len(found.revision)) == (folder.name, 32)

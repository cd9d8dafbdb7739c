"""Dry runs of models' code, which tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import PreTrainedConfig

from quire.engine.models.general import config

_run_dry = config._run_dry
_found: dict[Any, Any] = {}


def run_once(whole: PreTrainedConfig, kind: str, where: str) -> Any:
    """Return what the first run of a configuration has shown, or run it. What is refused is run again."""
    fields = whole.to_dict()
    for name in ("_name_or_path", "quantization_config", "compression_config"):  # no code asks for these
        fields.pop(name, None)
    key = type(whole), kind, repr(fields)
    if key not in _found:
        _found[key] = _run_dry(whole, kind, where)
    return _found[key]


@pytest.fixture(autouse=True)
def shared_dry_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a configuration's code without weights once for all tests of a process that patch nothing.

    It shows the same then, and most tests write a configuration that others have, too: it was a tenth of what
    tests of models took.
    """
    if "monkeypatch" in request.fixturenames:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "_run_dry", run_once)
        yield

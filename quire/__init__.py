"""Quire serves large language models, and treats the KV cache as an operating system treats memory.

LLM runs a model in this process, AsyncLLM in one of its own. Each name is imported when it is first asked
for: a process that only serves needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.completion import Completion
    from quire.llm import LLM
    from quire.request_output import RequestOutput
    from quire.sampling_params import SamplingParams

    __version__: str

__all__ = ["LLM", "AsyncLLM", "Completion", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "quire.llm",
    "AsyncLLM": "quire.async_llm",
    "Completion": "quire.completion",
    "RequestOutput": "quire.request_output",
    "SamplingParams": "quire.sampling_params",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # which takes longer than all of Python's start

        return version("quire")
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)

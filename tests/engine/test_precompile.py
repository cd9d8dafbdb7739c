"""Precompiling, against the warm-up that it is for."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from quire.engine.config import EngineConfig
from quire.engine.device.limits import Limits
from quire.engine.device.runner import ModelRunner
from quire.engine.dummy_steps import largest_step
from quire.engine.messages import Request, SamplingParams
from quire.engine.models import decoder, gpt2, opt
from quire.engine.models.loader import Model, build_model
from quire.engine.models.native_config import read_native
from quire.engine.precompile import precompile, rehearse
from quire.engine.startup import start_engine
from quire.kernels.backend import Backend, torch_backend, triton_backend
from quire.kernels.compiling import ZerosForNothing, compiling_beside
from quire.kernels.formats.kv_format import FP32, UNSCALED
from quire.kernels.linear.linear import Linear
from quire.kernels.linear.operations import Hidden
from quire.kernels.plan import LayerOps, plan_attention, plan_layer
from quire.kernels.recipes import Chosen
from tests.models.tiny_models import MODELS

LIMITS = Limits(max_num_seqs=12, max_num_batched_tokens=48, max_model_len=64)


def described(value: Any) -> Any:
    """What a compiler may tell apart of an argument, and what a kernel's grid comes from."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Linear):
        return described(value.weight), described(value.bias)
    if isinstance(value, Hidden):
        return described(value.residual), described(value.normed)
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(described(getattr(value, field.name)) for field in fields(value))
    return value if isinstance(value, int | float | bool | None) else type(value)


def watch(calls: set[Any], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which notes what is asked of it."""

    def called(*arguments: Any, **options: Any) -> Any:
        calls.add((name, *map(described, (*arguments, *options.values()))))
        return function(*arguments, **options)

    return called


def watched(calls: set[Any], monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Torch's backend, which with the layers' operations notes what is asked of it."""

    def watched_attention(*arguments: Any) -> Chosen[Any]:
        chosen = plan_attention(*arguments)
        return replace(chosen, run=watch(calls, "attend", chosen.run))

    def watched_layer(*arguments: Any) -> LayerOps:
        ops = plan_layer(*arguments)
        chosen = {field.name: getattr(ops, field.name) for field in fields(ops)}
        return LayerOps(**{name: replace(op, run=watch(calls, name, op.run)) for name, op in chosen.items()})

    monkeypatch.setattr(decoder, "plan_layer", watched_layer)
    for module in (opt, gpt2):
        monkeypatch.setattr(module, "plan_attention", watched_attention)
    backend = torch_backend()
    names = [field.name for field in fields(backend)]
    return replace(backend, **{name: watch(calls, name, getattr(backend, name)) for name in names})


@pytest.mark.parametrize("name", MODELS)
def test_it_asks_for_all_that_the_step_sizes_take(
    name: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(name)
    config = read_native(folder)
    device, dtype = torch.device("cpu"), torch.float32
    precompiled: set[Any] = set()
    precompile(config, watched(precompiled, monkeypatch), LIMITS, 16, UNSCALED[dtype], device, dtype)
    taken: set[Any] = set()
    monkeypatch.setattr("quire.engine.rank.torch_backend", lambda: watched(taken, monkeypatch))
    core, _ = start_engine(
        EngineConfig(
            model=str(folder),
            device="cpu",
            dtype="float32",
            max_num_seqs=LIMITS.max_num_seqs,
            max_num_batched_tokens=LIMITS.max_num_batched_tokens,
            max_model_len=LIMITS.max_model_len,
            num_gpu_blocks_override=1,
        )
    )
    assert isinstance(core.runner, ModelRunner)
    taken.clear()
    core.runner.warm_up()
    assert taken
    assert precompiled >= taken


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_start_compiles_nothing_after_it(
    dtype: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU nothing is compiled at all."""
    events: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **told: events.append("compiled")
    )
    for module in [module for name, module in sys.modules.items() if name.startswith("quire.kernels.")]:
        for kernel in vars(module).values():
            if isinstance(kernel, triton.runtime.JITFunction):
                kernel.device_caches.clear()
    core, _ = start_engine(
        EngineConfig(
            model=str(model_folder("qwen3")),
            dtype=dtype,
            max_num_seqs=40,
            max_num_batched_tokens=3000,
            max_model_len=100,
            num_gpu_blocks_override=30,
        ),
        lambda progress: events.append(progress.phase),
    )
    core.runner.launch(largest_step(Limits(40, 3000, 100), 40)).wait()  # which measures a GPU's memory
    assert "compiled" not in events[events.index("memory") :]
    assert ("compiled" in events) == torch.cuda.is_available()


def test_its_model_is_gone_afterwards(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a collection of garbage, before which there is none at a start."""
    config, models = read_native(model_folder(next(iter(MODELS)))), []

    def build(*arguments: Any) -> Model:
        model = build_model(*arguments)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr("quire.engine.precompile.build_model", build)
    gc.disable()
    on_gpu = torch.cuda.is_available()
    device, backend = (
        (torch.device("cuda"), triton_backend()) if on_gpu else (torch.device("cpu"), torch_backend())
    )
    try:
        with compiling_beside(lambda done, total: None):
            precompile(config, backend, LIMITS, 16, FP32, device, torch.float32)
        assert [model() for model in models] == [None]
    finally:
        gc.enable()


class OnThisThread(Executor):
    """What steps run on where they are launched, as those of a GPU are."""

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*given, **named))
        return done


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_loaded_model_is_as_it_was_behind_a_rehearsal(
    name: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps find zeros where nothing is written, and leave nothing of that behind."""
    monkeypatch.setattr(
        "quire.engine.device.streams.ThreadPoolExecutor", lambda *given, **named: OnThisThread()
    )
    core, info = start_engine(
        EngineConfig(
            model=str(model_folder(name)),
            model_impl="transformers",
            device="cpu",
            dtype="float32",
            max_model_len=LIMITS.max_model_len,
            num_gpu_blocks_override=64,
            enable_prefix_caching=False,
        )
    )
    assert isinstance(core.runner, ModelRunner)

    def answer(request: int) -> list[int]:
        prompt = [1 + token % (info.vocab_size - 1) for token in range(40)]
        core.add(Request(request, prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)))
        tokens: list[int] = []
        while core.has_work:
            tokens += [token for output in core.step() for token in output.tokens]
        return tokens

    before = answer(1)
    forward, modes = core.runner.model.forward, []

    def noted(*given: Any) -> Tensor:
        modes.append(type(_get_current_dispatch_mode()))
        return forward(*given)

    monkeypatch.setattr(core.runner.model, "forward", noted)
    rehearse(core.runner)
    assert set(modes) == {ZerosForNothing}
    assert answer(2) == before
    assert modes[-1] is type(None)

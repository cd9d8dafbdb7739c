"""Streams a model folder's safetensors into parameters that are already on the device."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from quire.engine.models.config import ModelConfig
from quire.engine.models.copies import copies_to
from quire.engine.models.decoder import Decoder
from quire.engine.models.expansion import expand_files, tell_expanded
from quire.engine.models.filling import fill, holds
from quire.engine.models.gpt2 import GPT2
from quire.engine.models.kept_weights import Kept
from quire.engine.models.merging import Naming, merge_into_files
from quire.engine.models.opt import OPT
from quire.engine.models.quantisation import ROUNDED, weights_of
from quire.engine.models.rounded_files import ROUNDED_FORMAT
from quire.engine.models.stored_weights import keep_in_folder
from quire.engine.models.weight_files import listed, open_weights, weight_files
from quire.engine.models.weights import Weights
from quire.kernels.backend import Backend
from quire.kernels.parallel.ranks import Ranks

if TYPE_CHECKING:
    from quire.engine.models.general.model import GeneralModel

Model: TypeAlias = "Decoder | OPT | GPT2 | GeneralModel"

_MODELS: dict[str, type[Decoder | OPT | GPT2]] = {
    "LlamaForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
    "OPTForCausalLM": OPT,
    "GPT2LMHeadModel": GPT2,
}
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
logger = logging.getLogger("quire.engine")


def build_model(
    config: ModelConfig, backend: Backend, weights: Weights, max_model_len: int
) -> Decoder | OPT | GPT2:
    """Return the model with parameters not written yet. Raises ValueError if it has fewer positions."""
    config.refuse_longer(max_model_len)
    with torch.no_grad():
        return _MODELS[config.architecture](config, backend, weights, max_model_len)


def load_model(
    folder: str | Path,
    config: ModelConfig,
    backend: Backend,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    max_model_len: int,
    load_format: Literal["auto", "dummy"] = "auto",
    kept: Kept | None = None,
    seed: int = 0,
    ranks: Ranks | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Model, int]:
    """Load the model on `device` in `dtype`; return its weights' bytes, too.

    `ranks`: those that it is divided among, `config` being that of one of them; of the files only what this
    rank holds is read. `on_progress` gets (done, total) bytes. `kept`: which weights stay in few bits;
    None: all that `backend` multiplies by.

    `dummy` reads no files: normal noise, the same for a seed on a kind of device. Raises ValueError for a
    folder without safetensors, and for missing, unknown, mis-shaped or quantised tensors, by name.
    """
    report = on_progress or (lambda done, total: None)
    tells = load_format == "auto" and (ranks is None or ranks.rank == 0)
    if config.adapter is not None and tells:
        made_for = config.adapter.made_for or "a model that it does not name"
        logger.info("%s, made for %s, is merged into weights of %s", config.adapter.folder, made_for, folder)
    if kept is None:
        keep = keep_in_folder(Path(folder), config, dtype, backend, dummy=load_format == "dummy")
        kept = keep(config)
    if config.quantised is not None and tells:
        tell_expanded(config.quantised, dtype, kept)
    if config.implementation == "transformers":
        from quire.engine.models.general.causal import load_general  # transformers takes seconds to import

        config.refuse_longer(max_model_len)
        return load_general(
            Path(folder),
            config,
            backend,
            device=torch.device(device),
            dtype=dtype,
            max_model_len=max_model_len,
            dummy_seed=seed if load_format == "dummy" else None,
            ranks=ranks,
            kept=kept.formats,
        )
    device = torch.device(device)
    opened = [] if load_format == "dummy" else [open_weights(path) for path in weight_files(Path(folder))]
    files = expand_files(opened, config.quantised, dtype, device)
    rounds = ROUNDED_FORMAT if weights_of(config.quantised) == ROUNDED else None
    weights = Weights(device, dtype, ranks, kept.formats, rounds)
    model = build_model(config, backend, weights, max_model_len)
    with torch.no_grad():
        total = weights.num_bytes
        report(0, total)
        if load_format == "dummy":
            done = 0
            for matrix in weights.draw(seed):
                done += matrix.nbytes
                report(done, total)
        else:
            _load(Path(folder), _merged(files, opened, model, weights), model, weights, report)
    report(total, total)
    return model, total


def _load(
    folder: Path,
    files: list[Any],
    model: Decoder | OPT | GPT2,
    weights: Weights,
    report: Callable[[int, int], None],
) -> None:
    _find_tied(files, model, weights)
    _check(folder, files, model, weights)
    done, total = 0, weights.num_bytes
    copy = copies_to(weights.device)
    for file in files:
        for name in file.offset_keys():  # in the order of the bytes on disk
            full_name = _full_name(name, model, weights)
            place = weights.places.get(full_name)
            if place is not None:
                fill(place, file, name, weights.shares.get(full_name), copy)
                done += place.nbytes
                report(done, total)
    for file in files:
        for name in file.offset_keys():
            twin = weights.tied.get(name)
            if twin is not None and not holds(
                weights.places[twin], file, name, weights.shares.get(twin), copy
            ):
                raise ValueError(
                    f"{folder}: config.json ties {name} to {twin}, but the two differ; "
                    f"set tie_word_embeddings to false to use both"
                )


def _merged(files: list[Any], opened: list[Any], model: Decoder | OPT | GPT2, weights: Weights) -> list[Any]:
    """Return files that have numbers of weights, with an adapter merged into them if there is one."""
    quantised, adapter = model.config.quantised, model.config.adapter
    if adapter is None:
        return files
    naming = Naming(
        of=lambda name: name if name in weights.tied else _full_name(name, model, weights),
        has=lambda name: weights.shape_of(name) is not None,
        inputs_first=weights.transposed,
        tied=weights.pair,
    )
    if weights_of(quantised) == ROUNDED:  # what is merged is
        merged = merge_into_files(opened, opened, adapter, naming, weights.dtype, weights.device)
        return expand_files(merged, quantised, weights.dtype, weights.device)
    bases = expand_files(opened, quantised, torch.float32, weights.device)
    return merge_into_files(files, bases, adapter, naming, weights.dtype, weights.device)


def _full_name(name: str, model: Decoder | OPT | GPT2, weights: Weights) -> str:
    """Add the base prefix, which a checkpoint of the bare decoder leaves out."""
    return name if weights.shape_of(name) is not None else model.base_prefix + name


def _find_tied(files: list[Any], model: Decoder | OPT | GPT2, weights: Weights) -> None:
    """Have a tied weight read by the other name, where files have it by that alone."""
    names = {name for file in files for name in file.offset_keys()}
    found = {_full_name(name, model, weights) for name in names}
    for name, twin in list(weights.tied.items()):
        if name in names and twin not in found:
            weights.take_from_twin(name)


def _check(folder: Path, files: list[Any], model: Decoder | OPT | GPT2, weights: Weights) -> None:
    """Compare names, shapes and types from the files' headers, before any weight is read."""
    found: set[str] = set()
    problems: list[str] = []
    for file in files:
        for name in file.offset_keys():
            if name in weights.unused or re.fullmatch(model.ignored, name) is not None:
                continue
            full_name = _full_name(name, model, weights)
            wanted = weights.shape_of(weights.tied.get(name, full_name))
            if wanted is None:
                if name.endswith(".bias") and not file.get_tensor(name).any():
                    continue  # as older GPTQ files have some of layers without a bias: it changes nothing
                problems.append(f"{name} is no weight of {model.config.architecture}")
                continue
            if full_name in found:
                problems.append(f"{name} is there twice")
            found.add(full_name)
            header = file.get_slice(name)
            shape, kind = list(header.get_shape()), header.get_dtype()
            if shape != list(wanted):
                problems.append(f"{name} has shape {shape}, but config.json asks for {list(wanted)}")
            if kind not in _FLOAT_TYPES:
                problems.append(f"{name} holds {kind}; only {', '.join(_FLOAT_TYPES)} are supported")
    names = (*weights.places, *weights.elsewhere)
    problems += [f"{name} is missing" for name in names if name not in found]
    if problems:
        raise ValueError(f"{folder} does not fit its config.json: {listed(problems)}")

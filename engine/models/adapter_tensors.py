"""The tensors of an adapter's file, by the weights of the base model that they change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.engine.models.adapter_config import CONFIG, Adapter, adapter_file
from quire.engine.models.weight_files import listed, open_weights

_FLOATS = ("F64", "F32", "F16", "BF16")
_PREFIX = re.compile(r"^base_model\.model\.")
# A module's name, and what an adapter has of it. Older files name the adapter, too.
_LORA = re.compile(
    r"(?P<module>.+)\.(?:(?P<matrix>lora_A|lora_B)(?:\.default)?\.(?P<of>weight|bias)"
    r"|(?P<embedding>lora_embedding_A|lora_embedding_B)(?:\.default)?"
    r"|(?P<lengths>lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
    r"|token_adapter\.(?P<rows>trainable_tokens_delta))"
)
_WHOLE = re.compile(r"(?P<module>.+?)(?P<base>\.base_layer)?\.(?P<of>weight|bias)")


@dataclass(frozen=True, slots=True)
class Change:
    """What an adapter makes of one tensor of its base model. Tensors are slices, as safetensors has them.

    down [rank, inputs], up [outputs, rank]: their product, times `scale`, is added. lengths [outputs]: what
    weights from all inputs to an output have then. added: to a vector, times `scale`. rows: stand for those
    of `tokens`. whole: stands for the base model's tensor, before all else.
    """

    module: str
    scale: float = 1.0
    down: Any = None
    up: Any = None
    of_tokens: bool = False  # inputs are tokens, of which an embedding has a row each
    lengths: Any = None
    added: Any = None
    rows: Any = None
    tokens: tuple[int, ...] = ()
    whole: Any = None
    is_copy: bool = False  # `whole` is of the module alone, and not of one that has the same weight

    @property
    def is_of_module(self) -> bool:
        """Return whether it changes a module, and not one that is tied to it."""
        return self.down is not None or self.is_copy


def read_changes(adapter: Adapter) -> dict[str, Change]:
    """Return the changes by the names that the adapter gives to tensors of its base model.

    Only headers are read. Raises ValueError by name for tensors that are not known, or do not fit
    adapter_config.json.
    """
    path = adapter_file(adapter.folder)
    file = open_weights(path)
    changes: dict[str, Change] = {}
    problems: list[str] = []
    for key in file.offset_keys():
        held = file.get_slice(key)
        if held.get_dtype() not in _FLOATS:
            problems.append(f"{key} holds {held.get_dtype()}; only {', '.join(_FLOATS)} are supported")
            continue
        name = _PREFIX.sub("", key)
        try:
            target, change = _changed(adapter, name, held, changes)
        except ValueError as error:
            problems.append(f"{key} {error}")
        else:
            changes[target] = change
    for name, change in changes.items():
        problems += [f"{name}: {problem}" for problem in _missing(adapter, change)]
    if not changes and not problems:
        problems.append("it has no tensors")
    if problems:
        raise ValueError(f"{path} cannot be merged: {listed(problems)}")
    return changes


def _changed(adapter: Adapter, name: str, held: Any, changes: Mapping[str, Change]) -> tuple[str, Change]:
    """Return which tensor one of the adapter's changes, and how, with what others change of it.

    Raises ValueError that says why it is not understood.
    """
    found = _LORA.fullmatch(name)
    if found is None:
        whole = _WHOLE.fullmatch(name)
        if whole is None or "lora_" in name or ".original_module." in name or ".token_adapter." in name:
            raise ValueError("is not known, and so would be left out")
        module, target = whole["module"], f"{whole['module']}.{whole['of']}"
        change = changes.get(target, Change(module))
        return target, replace(change, whole=held, is_copy=whole["base"] is None and adapter.saves(module))
    module = found["module"]
    if ".base_layer" in f".{module}":
        raise ValueError("is of a layer in another adapter's layer, which is not there yet")
    target = f"{module}.{'bias' if found['of'] == 'bias' else 'weight'}"
    change = replace(changes.get(target, Change(module)), scale=adapter.scale_of(module))
    if found["of"] == "bias":
        if found["matrix"] == "lora_A":
            raise ValueError("is not known, and so would be left out")
        return target, replace(change, added=held)
    if found["lengths"]:
        if not adapter.dora:
            raise ValueError(f"is of DoRA, and use_dora of {CONFIG} is not true")
        return target, replace(change, lengths=held)
    if found["rows"]:
        tokens = adapter.tokens_of(module)
        if tokens is None:
            raise ValueError(f"is of tokens that trainable_token_indices of {CONFIG} does not name")
        return target, replace(change, rows=held, tokens=tokens)
    part = "down" if (found["matrix"] or found["embedding"]).endswith("A") else "up"
    return target, replace(change, of_tokens=bool(found["embedding"]), **{part: held})


def _missing(adapter: Adapter, change: Change) -> list[str]:
    """Return what of a change is not there, or has another shape than adapter_config.json tells."""
    problems = []
    if (change.down is None) != (change.up is None):
        problems.append(f"lora_{'A' if change.down is None else 'B'} is missing")
    elif change.down is not None:
        shapes = change.down.get_shape(), change.up.get_shape()
        rank = adapter.rank_of(change.module)
        if [len(shape) for shape in shapes] != [2, 2] or {shapes[0][0], shapes[1][1]} != {rank}:
            problems.append(
                f"lora_A has shape {shapes[0]} and lora_B {shapes[1]}, but {CONFIG} gives it rank {rank}"
            )
        if adapter.dora and change.of_tokens:
            problems.append("DoRA of embeddings is not there yet")
        elif adapter.dora and change.lengths is None:
            problems.append("lora_magnitude_vector is missing, and use_dora is true")
    elif change.lengths is not None:
        problems.append("lora_A and lora_B are missing")
    if change.rows is not None and change.rows.get_shape()[:1] != [len(change.tokens)]:
        count = len(change.tokens)
        problems.append(f"rows have shape {change.rows.get_shape()}, and {CONFIG} names {count} tokens")
    kinds = (change.down is not None, change.rows is not None, change.is_copy)
    if sum(kinds) > 1:
        problems.append("more than one of LoRA, modules_to_save and trainable_token_indices is of it")
    return problems

"""Has files read as if an adapter had been merged into the weights that they hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.engine.models.adapter_config import MERGE, Adapter
from quire.engine.models.adapter_tensors import Change, read_changes
from quire.engine.models.expanded_file import ExpandedFile
from quire.engine.models.merged_tensor import MergedTensor
from quire.engine.models.weight_files import listed


@dataclass(frozen=True, slots=True)
class Naming:
    """What a model calls its tensors.

    of: returns its own name for one that a file, or an adapter, has. has: whether it has one of that name.
    inputs_first: weights that are [inputs, outputs]. tied: names of head and embedding, where the base model
    has one weight for both.
    """

    of: Callable[[str], str]
    has: Callable[[str], bool]
    inputs_first: Collection[str]
    tied: tuple[str, str] | None


class MergedWeights:
    """Weights that no file of the base model has by such a name, read as a file of safetensors is."""

    def __init__(self, weights: Mapping[str, MergedTensor]) -> None:
        self._weights = weights

    def offset_keys(self) -> list[str]:
        return list(self._weights)

    def get_slice(self, name: str) -> MergedTensor:
        return self._weights[name]

    def get_tensor(self, name: str) -> Tensor:
        return self._weights[name][...]


def merge_into_files(
    files: list[Any],
    bases: list[Any],
    adapter: Adapter,
    naming: Naming,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Any]:
    """Return open files as if the adapter had been merged into them. bases: as `merged_tensors` has them."""
    slices = {name: file.get_slice(name) for file in bases for name in file.offset_keys()}
    merged = merged_tensors(slices, adapter, naming, dtype, device)
    added = {name: tensor for name, tensor in merged.items() if name not in slices}
    opened: list[Any] = [ExpandedFile(file, merged, set()) for file in files]
    return [*opened, MergedWeights(added)] if added else opened


def merged_tensors(
    bases: Mapping[str, Any], adapter: Adapter, naming: Naming, dtype: torch.dtype, device: torch.device
) -> dict[str, MergedTensor]:
    """Return what the adapter makes of the base model's tensors, by the names that files have; or new names.

    bases: the slices of its files, rounded as little as can be. Only headers are read. Raises ValueError by
    name for what the adapter has of weights that the base model has not, or has in another shape.
    """
    keys = {naming.of(key): key for key in bases}
    problems: list[str] = []
    merged: dict[str, MergedTensor] = {}
    for name, change in _changes(adapter, naming, keys).items():
        key = keys.get(name) or keys.get(_tied_to(name, naming))
        base = None if key is None else bases[key]
        if base is None and (change.whole is None or not naming.has(name)):
            problems.append(f"{name} is no weight of the base model")
            continue
        inputs_first = change.of_tokens or name in naming.inputs_first
        problem = _misfit(change, (change.whole if base is None else base).get_shape(), inputs_first)
        if problem:
            problems.append(f"{name}: {problem}")
        base = base if change.whole is None else change.whole
        merged[keys.get(name, name)] = MergedTensor(name, base, change, inputs_first, dtype, device)
    if problems:
        raise ValueError(f"{adapter.folder} does not fit its base model: {listed(problems)}")
    return merged


def unties(adapter: Adapter, head: Collection[str], embedding: Collection[str]) -> bool:
    """Return whether it changes one of two tied modules alone, or each in a way of its own.

    head, embedding: how names of the two end. Raises ValueError as `read_changes` does, and where it is not
    told whether a change is of both.
    """
    changed = read_changes(adapter)
    heads, embeddings = (
        [change for change in changed.values() if change.module.rpartition(".")[2] in names]
        for names in (head, embedding)
    )
    apart = any(each.is_of_module for each in (*heads, *embeddings))
    if not apart and not any(each.rows is not None for each in heads):
        return False
    if adapter.keeps_tied and not (heads and embeddings):
        raise ValueError(
            f"{adapter.folder}: ensure_weight_tying is true, but the adapter has only one of the two weights "
            f"that its base model has tied: {MERGE}"
        )
    if apart and any(each.rows is not None for each in embeddings):
        raise ValueError(
            f"{adapter.folder}: trainable_token_indices are of the embedding, and something else is of the "
            f"head that is tied to it: {MERGE}"
        )
    return True


def _changes(adapter: Adapter, naming: Naming, keys: Mapping[str, str]) -> dict[str, Change]:
    """Return the changes by the model's names. keys: of what files have, by these.

    Of a weight that is tied, and stays so, all that files have is changed alike. Where it does not, head and
    embedding are both there.
    """
    found: dict[str, Change] = {}
    for name, change in read_changes(adapter).items():
        own = naming.of(name)
        if own in found:
            raise ValueError(f"{adapter.folder}: {name} is there by another name, too")
        found[own] = change
    changed = [name for name in naming.tied or () if name in found]
    if naming.tied is None or not changed:
        return found
    if not adapter.unties:
        both = found[changed[0]]
        if len(changed) > 1 and not _same(both, found.pop(changed[1])):
            raise ValueError(
                f"{adapter.folder}: {' and '.join(changed)} are tied in its base model, and it has two"
            )
        found.pop(changed[0])
        return found | {name: both for name in naming.tied if name in keys}
    shared = next((found[name].whole for name in changed if not found[name].is_copy), None)
    for name in naming.tied:
        change = found.get(name, Change(name.removesuffix(".weight")))
        found[name] = replace(change, whole=shared) if change.whole is None else change
    return found


def _same(one: Change, other: Change) -> bool:
    """Return whether two changes are nothing but the same weight in place of another."""
    given = [change.whole for change in (one, other) if change.rows is None and change.whole is not None]
    return len(given) == 2 and torch.equal(given[0][...], given[1][...])


def _tied_to(name: str, naming: Naming) -> str:
    """Return the other one of two tied weights; "" for those that are not tied."""
    if naming.tied is None or name not in naming.tied:
        return ""
    return naming.tied[1 - naming.tied.index(name)]


def _misfit(change: Change, shape: list[int], inputs_first: bool) -> str:
    """Return how a change does not fit a tensor of a shape; "" if it does."""
    if change.whole is not None and change.whole.get_shape() != shape:
        return f"it has shape {change.whole.get_shape()}, and in the base model {shape}"
    if change.added is not None and change.added.get_shape() != shape:
        return f"lora_B.bias has shape {change.added.get_shape()}, and the bias in the base model {shape}"
    if change.down is not None:
        given = [change.up.get_shape()[0], change.down.get_shape()[1]]
        outputs_and_inputs = shape[::-1] if inputs_first else shape
        if given != outputs_and_inputs:
            return (
                f"lora_B and lora_A are of {given} outputs and inputs, and in the base model there are "
                f"{outputs_and_inputs}"
            )
        if change.lengths is not None and change.lengths.get_shape() != given[:1]:
            return f"lora_magnitude_vector has shape {change.lengths.get_shape()}, for {given[0]} outputs"
    if change.rows is not None:
        if len(shape) != 2 or change.rows.get_shape()[1:] != shape[1:]:
            return (
                f"its tokens' rows have shape {change.rows.get_shape()}, and in the base model it has {shape}"
            )
        if max(change.tokens, default=0) >= shape[0]:
            return f"it has rows of token {max(change.tokens)}, and the base model has {shape[0]} tokens"
    return ""

"""What a model of transformers calls its tensors, where files and adapters may call them otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeAlias

from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from quire.engine.models.general.described import read_described
from quire.engine.models.general.dry_run import build
from quire.engine.models.merging import Naming

Named: TypeAlias = tuple[str, str | None]


def namer_of(model: Any, mapping: list[Any]) -> Callable[[str], Named]:
    """Return what tells of a tensor's name in files that in a model, whether or not this has it.

    With it comes the pattern of the conversion that makes what has that name of several. mapping: as
    transformers' loader has it.
    """
    known, prefix = model.state_dict(), model.base_model_prefix
    ours = deepcopy(
        (
            [each for each in mapping if isinstance(each, WeightRenaming)],
            [each for each in mapping if isinstance(each, WeightConverter)],
        )
    )  # they note what they have seen

    def named(key: str) -> Named:
        name, pattern = rename_source_key(key, *ours, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], prefix, known)
        return name, pattern

    return named


def names_in(model: Any, keys: Iterable[str], mapping: list[Any]) -> dict[str, Named]:
    """Return what a model calls the tensors that it has of files, in the order of layers and experts.

    With each the pattern of the conversion that makes it of several.
    """
    known, named = model.state_dict(), namer_of(model, mapping)
    found = {key: named(key) for key in sorted(keys, key=dot_natural_key)}
    return {key: (name, pattern) for key, (name, pattern) in found.items() if name in known}


def naming_of(model: Any, mapping: list[Any], *, tied: bool) -> Naming:
    """Return it, by what transformers' loader maps names of files to; what it makes of several keeps theirs.

    tied: whether the base model has one weight for head and embedding.
    """
    known, named = model.state_dict(), namer_of(model, mapping)

    def name_of(key: str) -> str:
        name, pattern = named(key)
        if pattern is None:
            return name
        return f"{key} of files" if key in known else key  # not what a module of that name has

    head, embedding = _ends(model)
    return Naming(
        of=name_of,
        has=known.__contains__,
        inputs_first={f"{name}.weight" for name, part in model.named_modules() if isinstance(part, Conv1D)},
        tied=(f"{head}.weight", f"{embedding}.weight") if tied and head and embedding else None,
    )


def ends_of(folder: Path) -> tuple[set[str], set[str]]:
    """Return how the names of a model's head and of its embedding end. Raises ValueError."""
    head, embedding = _ends(build(read_described(folder)))
    return {head.rpartition(".")[2]}, {embedding.rpartition(".")[2]}


def _ends(model: Any) -> tuple[str, str]:
    """Return the names of a model's head and of its embedding; "" for what it has not."""
    names = {part: name for name, part in model.named_modules()}
    head, embedding = (
        names.get(model.get_output_embeddings(), ""),
        names.get(model.get_input_embeddings(), ""),
    )
    return head, embedding

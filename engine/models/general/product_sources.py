"""Which of a model's linear layers files have in few bits, and which are multiplied as one product."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from quire.engine.models.float8_files import Float8Tensor
from quire.engine.models.fours_files import FoursTensor
from quire.engine.models.general import delta_nets, matching, mlps
from quire.engine.models.general.division.plan import experts_by_name
from quire.engine.models.general.expert_sources import MISSHAPEN, OTHERWISE_MERGED
from quire.engine.models.general.naming import Named
from quire.engine.models.general.own_attention import is_indexer
from quire.engine.models.kept_weights import NO_PRODUCT, Stored
from quire.engine.models.mxfp4_files import Mxfp4Tensor
from quire.engine.models.packed_files import PackedTensor
from quire.engine.models.rounded_files import RoundedTensor
from quire.kernels.quantised.weight import WeightFormat

_KINDS = Float8Tensor | PackedTensor | FoursTensor | Mxfp4Tensor | RoundedTensor
WEIGHT = ".weight"  # behind the name of a layer
_IN_LAYER = re.compile(r"\.\d+\.")
_TOGETHER = (*(each for names in delta_nets.NAMES for each in names), *matching.QKV, *mlps.GATE_UP)
_EXPANDS_LATENTS = "kv_b_proj"


def products_of(model: nn.Module) -> Iterator[list[str]]:
    """Yield the names of weights that a layer's product may have, of those that are no experts'.

    Where kernels multiply by several as by one (queries, keys and values; gate and up), these together.
    """
    modules = dict(model.named_modules())
    known = {name for name, module in modules.items() if type(module) is nn.Linear and _IN_LAYER.search(name)}
    taken: set[str] = set()
    for name in modules:
        for parts in _TOGETHER:
            group = [f"{name}.{part}" for part in parts]
            if known.issuperset(group) and taken.isdisjoint(group):
                taken.update(group)
                yield [each + WEIGHT for each in group]
    for name in modules:
        if name in known - taken:
            yield [name + WEIGHT]


def read_elsewhere(model: Any) -> dict[str, str]:
    """Return whose weights are read by more than a product, by their names, and what reads them."""
    modules, experts = dict(model.named_modules()), experts_by_name(model)
    beside = {name.rpartition(".")[0] for name in experts}
    tied: dict[str, str] = model.all_tied_weights_keys
    found = dict.fromkeys((*tied, *tied.values()), "weights that layers share")
    for name, module in modules.items():
        above, _, last = name.rpartition(".")
        if not isinstance(module, nn.Linear):
            continue
        if last == _EXPANDS_LATENTS:
            found[name + WEIGHT] = "what latents are expanded by"
        elif above in beside:
            found[name + WEIGHT] = "beside experts"
        elif above in modules and is_indexer(modules[above]):
            found[name + WEIGHT] = "an indexer's"
    return found


def stored_products(
    model: Any, slices: Mapping[str, Any], names: Mapping[str, Named], experts: Collection[str]
) -> Stored:
    """Return how files have weights of linear layers, by the names of parameters; or why they are not kept.

    model: undivided; its parameters need not be anywhere. slices: tensors by their names in files. names: as
    `names_in` has them. experts: names of weights that `stored_experts` tells of. Of
    GPTQ's, which group each input is in is read too.
    """
    known, elsewhere = model.state_dict(), read_elsewhere(model)
    products = {name for group in products_of(model) for name in group}
    stored: dict[str, WeightFormat | str] = {}
    for key, (name, pattern) in names.items():
        tensor = slices[key]
        if name in experts or not isinstance(tensor, _KINDS):
            continue
        if isinstance(tensor, FoursTensor | Mxfp4Tensor):
            stored[name] = "no weights of experts"
        elif pattern is not None:
            stored[name] = OTHERWISE_MERGED
        elif name not in products:
            stored[name] = NO_PRODUCT
        elif name in elsewhere:
            stored[name] = elsewhere[name]
        elif tensor.get_shape() != list(known[name].shape):
            stored[name] = MISSHAPEN
        else:
            stored[name] = tensor.kept_format
    return stored

"""Which part of each of a model's parameters a rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.models.config import ModelConfig, rows_of_rank
from quire.engine.models.general.attention import attention_modules
from quire.engine.models.general.division import plan
from quire.engine.models.general.division.plan import Undividable
from quire.engine.parallel.share import Columns, Share, of_columns, of_vocabulary

_KEYS = {"k_proj", "v_proj"}  # whose outputs are KV heads, one behind the other


@dataclass(frozen=True, slots=True)
class Held:
    """A rank's share of a parameter. size: of the divided dimension here; what is beyond the share is 0."""

    share: Share
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of what is here."""
        shape, dim = self.share.shape, self.share.dim
        return (*shape[:dim], self.size, *shape[dim + 1 :])

    def of(self, whole: Tensor) -> Tensor:
        """Select what is here from the whole parameter."""
        return self.filled(self.share.of(whole))

    def filled(self, part: Tensor) -> Tensor:
        """Return the share with zeros behind it."""
        missing = self.size - self.share.length
        if not missing:
            return part
        shape = list(part.shape)
        shape[self.share.dim] = missing
        return torch.cat([part, part.new_zeros(shape)], self.share.dim)


class Shares:
    """The shares of one rank. `held` has them by the parameter's name; what is not there is whole.

    added_once: names of biases behind products of divided inputs, which rank 0 alone adds.
    """

    def __init__(self, model: Any, config: ModelConfig, rank: int) -> None:
        """config: that of a rank."""
        self.held: dict[str, Held] = {}
        self.added_once: set[str] = set()
        self._config, self._rank, self._ranks = config, rank, config.ranks
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        names = {module: name for name, module in model.named_modules()}
        self._layer_of = {names[module]: module.layer_idx for module in attention_modules(model)}

    def copies_of(self, module: str) -> int:
        """Return how many ranks hold the same outputs of a module."""
        name, _, last = module.rpartition(".")
        layer: Any = self._layer_of.get(name)
        return (
            self._config.attention[self._config.place(layer)].copies
            if last in _KEYS and layer is not None
            else 1
        )

    def add(self, name: str, style: str) -> None:
        """Take the style of a parameter."""
        dims = len(self._parameters[name].shape)
        outputs, inputs = max(dims - 2, 0), dims - 1
        if style in plan.OUTPUTS:
            self._divide(name, outputs)
        elif style in plan.INPUTS and (dims == 1 or name.endswith(".bias")):
            self.added_once.add(name)
        elif style in plan.INPUTS:
            self._divide(name, inputs)
        elif style == plan.PACKED_OUTPUTS:
            self._divide(name, outputs, parts=2)
        elif style == plan.PACKED_INPUTS:
            self._divide(name, inputs, parts=2)
        elif style == plan.ROWS_OF_TABLE:
            self._divide(name, 0)
        elif style not in plan.KNOWN:
            raise Undividable(f"{name} is to be divided in the way {style!r}, which is not known here")

    def add_vocabulary(self, name: str) -> None:
        """Divide a table with a row for each token."""
        shape = tuple(self._parameters[name].shape)
        tokens = self._config.vocab_size
        if shape[0] != tokens:
            raise Undividable(f"{name} has {shape[0]} rows for a vocabulary of {tokens}")
        part = of_vocabulary(tokens, self._rank, self._ranks)
        self.held[name] = Held(Share(shape, 0, (part,)), rows_of_rank(tokens, self._ranks))

    def add_experts(self, name: str, experts: Any, *, whole_ones: bool) -> None:
        """Divide a layer's experts: some whole ones for each rank, or a part of the width of each."""
        if whole_ones:
            count = len(experts.down_proj)
            if count % self._ranks:
                raise Undividable(f"{name} has {count} experts, which {self._ranks} ranks do not divide")
            for each, _ in experts.named_parameters(recurse=False):
                self._divide(f"{name}.{each}", 0)
            return
        if experts.has_post_expert_norm:
            raise Undividable(f"{name} norms what each of its experts gives")
        outputs, inputs = (2, 1) if experts.is_transposed else (1, 2)
        up = f"{name}.gate_up_proj" if experts.has_gate else f"{name}.up_proj"
        parts = 2 if experts.has_gate and experts.is_concatenated else 1
        width = experts.down_proj.shape[inputs]
        if width % self._ranks:
            raise Undividable(f"the width of {name}, {width}, is not divided by {self._ranks} ranks")
        self._divide(up, outputs, parts)
        self._divide(f"{name}.down_proj", inputs)
        if experts.has_bias:
            self._divide(f"{up}_bias", 1, parts)
            self.added_once.add(f"{name}.down_proj_bias")

    def _divide(self, name: str, dim: int, parts: int = 1) -> None:
        """Divide a dimension, or each of the parts that stand in it one behind the other."""
        shape, copies = tuple(self._parameters[name].shape), self.copies_of(name.rpartition(".")[0])
        each, rest = divmod(shape[dim] * copies, parts * self._ranks)
        if rest:
            raise Undividable(f"{name} has {shape[dim]} numbers, which {self._ranks} ranks do not divide")
        ranges, _ = of_columns((Columns(each, copies),) * parts, self._rank, self._ranks)
        self.held[name] = Held(Share(shape, dim, ranges), each * parts)


def put_shares(model: nn.Module, held: Mapping[str, Held]) -> None:
    """Have the model's parameters, which are nowhere yet, be as large as this rank's shares."""
    for name, each in held.items():
        path, _, last = name.rpartition(".")
        module: Any = model.get_submodule(path)
        whole = getattr(module, last)
        part = torch.empty(each.shape, dtype=whole.dtype, device=whole.device)
        setattr(module, last, nn.Parameter(part, requires_grad=False))
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Embedding):
            module.num_embeddings, module.padding_idx = len(module.weight), None

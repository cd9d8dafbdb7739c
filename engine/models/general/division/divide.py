"""Divides a model among ranks: parameters become shares, and modules do what ranks do together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.models.config import ModelConfig
from quire.engine.models.general.attention import EVERY, Call, attention_modules
from quire.engine.models.general.described import read_described
from quire.engine.models.general.division import modules, plan
from quire.engine.models.general.division.heads import heads_of_rank
from quire.engine.models.general.division.plan import Undividable
from quire.engine.models.general.division.shares import Held, Shares, put_shares
from quire.engine.models.general.dry_run import build, run_dry
from quire.engine.models.general.expert_modules import matrices_of
from quire.engine.models.general.indexer import Indexer
from quire.engine.models.general.unsupported import UnsupportedAttention
from quire.engine.parallel.group import OneOfRanks
from quire.kernels.attention.batch import AttentionLayer
from quire.kernels.parallel.ranks import Ranks
from quire.kernels.quantised.weight import WeightFormat


@dataclass(frozen=True, slots=True)
class Division:
    """What a rank holds of a model, by parameters' names, as `Shares` has it.

    splits: layers whose attention may give this rank's heads alone, since what follows takes no others.
    """

    held: dict[str, Held]
    added_once: set[str]
    splits: frozenset[int]


def divide(model: Any, config: ModelConfig, ranks: Ranks) -> Division:
    """Divide a causal model whose parameters are nowhere yet; config: that of a rank.

    Raises Undividable with what of it cannot be.
    """
    shares = Shares(model, config, ranks.rank)
    styles, parts = plan.styles_of(model), dict(model.named_modules())
    forwards: dict[str, Callable[..., Any]] = {}
    _divide_vocabulary(model, shares, styles, forwards, ranks)
    _divide_experts(model, shares, styles, forwards, config, ranks)
    for name, style in styles.items():
        if name not in parts:
            shares.add(name, style)
    for name, style in styles.items():
        if name in parts:
            forward = _forward(name, parts[name], style, shares, ranks)
            if forward is not None:
                forwards[name] = forward
    put_shares(model, shares.held)
    for name, forward in forwards.items():
        parts[name].forward = forward
    split = {name.rpartition(".")[0] for name, style in styles.items() if style in plan.SPLIT}
    names = {part: name for name, part in parts.items()}
    splits: set[Any] = {each.layer_idx for each in attention_modules(model) if names[each] in split}
    return Division(shares.held, shares.added_once, frozenset(splits))


def refuse_undividable(folder: Path, config: ModelConfig) -> None:
    """Run the code of a rank, of which that is the config, without numbers. Raises ValueError if it fails."""
    kind = "?"
    try:
        whole = read_described(folder)
        kind = type(whole).model_type
        model, ranks = build(whole), OneOfRanks(0, config.ranks)
        division = divide(model, config, ranks)
        run_dry(model, _Shapes(config, ranks, division.splits))
    except (Undividable, UnsupportedAttention) as error:
        reason = str(error)
    except Exception as error:  # modelling code may raise anything
        reason = f"a run of its modelling code ends with {error!r}"
    else:
        return
    raise ValueError(
        f"--tensor-parallel-size {config.ranks}: a model of type {kind!r} cannot be divided: {reason}; give "
        "another number"
    )


def num_bytes(folder: Path, config: ModelConfig, itemsize: int, formats: Mapping[str, WeightFormat]) -> int:
    """Return how many bytes the parameters of a rank take, of which that is the config.

    formats: of weights that stay in few bits, by name; others are numbers of `itemsize` bytes.
    Raises Undividable with what of the model cannot be divided.
    """
    model = build(read_described(folder))
    if config.ranks > 1:
        divide(model, config, OneOfRanks(0, config.ranks))
    if config.tie_word_embeddings:
        with torch.inference_mode():  # in which it was built: a head's bias is replaced, too
            model.tie_weights()
    kept = {
        f"{name}.{weight}": len(module.down_proj) * formats[f"{name}.{weight}"].num_bytes(*shape)
        for name, module in plan.experts_by_name(model).items()
        for weight, shape in matrices_of(module).items()
        if f"{name}.{weight}" in formats
    }
    kept |= {
        name: formats[name].num_bytes(*each.shape)
        for name, each in model.named_parameters()
        if name in formats and name not in kept
    }
    return sum(kept.get(name, each.numel() * itemsize) for name, each in model.named_parameters())


class _Shapes:
    """Stands for attention of a rank where nothing is computed."""

    def __init__(self, config: ModelConfig, ranks: Ranks, splits: frozenset[int]) -> None:
        self._config, self._ranks, self._splits = config, ranks, splits

    def __call__(self, layer: int, call: Call) -> Tensor:
        own, is_whole = heads_of_rank(call, self._config.attention[self._config.place(layer)], self._ranks)
        heads, tokens, _ = (call if is_whole and layer not in self._splits else own).q.shape
        return call.v.new_empty(1, tokens, heads, call.value_dim)

    def attend(self, layer: int, qkv: Tensor, attention: AttentionLayer) -> Tensor:
        raise NotImplementedError("a dry run is of the model's own code")

    def choose(self, layer: int, indexer: Indexer) -> Any:
        return EVERY


def _divide_vocabulary(
    model: Any, shares: Shares, styles: dict[str, str], forwards: dict[str, Callable[..., Any]], ranks: Ranks
) -> None:
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(table, nn.Embedding):
        raise Undividable(f"its tokens are looked up by a {type(table).__name__}")
    if head is not None and type(head) is not nn.Linear:
        raise Undividable(f"its output head is a {type(head).__name__}")
    parts = dict(model.named_modules(remove_duplicate=False))
    for name in [name for name, part in parts.items() if part is table or part is head]:
        for each, _ in parts[name].named_parameters(recurse=False):
            shares.add_vocabulary(f"{name}.{each}")
            styles.pop(f"{name}.{each}", None)
        styles.pop(name, None)
        if parts[name] is table:
            forwards[name] = modules.Table(table, ranks)


def _divide_experts(
    model: Any,
    shares: Shares,
    styles: dict[str, str],
    forwards: dict[str, Callable[..., Any]],
    config: ModelConfig,
    ranks: Ranks,
) -> None:
    for name, experts in plan.experts_by_name(model).items():
        for each, _ in experts.named_parameters(recurse=False):
            styles.pop(f"{name}.{each}", None)
        styles.pop(name, None)
        shares.add_experts(name, experts, whole_ones=config.expert_parallel)
        if not config.expert_parallel:
            forwards[name] = modules.SummedOutput(experts, ranks)
            continue
        ((first, end),) = shares.held[f"{name}.down_proj"].share.ranges
        forwards[name] = modules.ExpertsOfRank(experts, ranks, first, end - first)


def _forward(
    name: str, module: nn.Module, style: str, shares: Shares, ranks: Ranks
) -> Callable[..., Any] | None:
    """Return what stands for the forward of a module of a style, if something does."""
    if style in plan.GATHERED:
        return modules.Gathered(module, ranks, shares.copies_of(name))
    if style in plan.INPUTS:
        (part,) = shares.held[f"{name}.weight"].share.ranges
        return modules.Summed(module, ranks, part)
    if style == plan.ROWS_OF_TABLE:
        return modules.Table(module, ranks)
    if style in plan.SUMMED:
        return modules.SummedOutput(module, ranks)
    if style == plan.IDENTITY:
        return modules.Portion(module, ranks)
    if style not in plan.KNOWN:
        raise Undividable(f"{name} is to be divided in the way {style!r}, which is not known here")
    return None

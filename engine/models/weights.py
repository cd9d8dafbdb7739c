"""A model's parameters, or a rank's shares: allocated once, on the device, and filled part by part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from quire.engine.models.config import ModelConfig, rows_of_rank
from quire.engine.models.drawn_weights import STD, draw_rounded
from quire.engine.models.layers import NONE_KEPT, LayerNorm
from quire.engine.parallel.share import Columns, Share, of_columns, of_vocabulary
from quire.kernels.linear.linear import Linear
from quire.kernels.linear.operations import AnyLinear
from quire.kernels.parallel.ranks import Ranks
from quire.kernels.quantised.linear import QuantisedLinear
from quire.kernels.quantised.weight import QuantisedWeight, WeightFormat

Place: TypeAlias = Tensor | QuantisedWeight
Held = TypeVar("Held")


class Weights:
    """Allocates parameters for a model's constructor and knows which checkpoint tensor fills which part.

    `places` maps a checkpoint's tensor name to the view that it is copied into: a whole parameter, its slice
    of a fused one, or its transpose; or to outputs of a weight that is kept in few bits. `shares` says for
    some of them which part of the tensor that is, and `elsewhere` has the shapes of tensors of which this
    rank has nothing. `tied` maps a name that a checkpoint may repeat to the name it equals.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        ranks: Ranks | None = None,
        kept: Mapping[str, WeightFormat] = NONE_KEPT,
        rounds: WeightFormat | None = None,
    ) -> None:
        """ranks: those that the model is divided among; None: all of it is here.

        kept: formats of weights that stay in few bits, by name: of a product all, or none. rounds: to which
        format `draw` rounds products' weights that do not.
        """
        self.device = device
        self.dtype = dtype
        self.ranks = ranks
        self.kept = kept
        self.rounds = rounds
        self.places: dict[str, Place] = {}
        self.shares: dict[str, Share] = {}
        self.elsewhere: dict[str, tuple[int, ...]] = {}
        self.tied: dict[str, str] = {}
        self.transposed: set[str] = set()  # names of weights that a checkpoint has [inputs, outputs]
        self.pair: tuple[str, str] | None = None  # head and embedding, of which files may have one weight
        self.unused: set[str] = set()  # names that a checkpoint may have, of what is not computed
        # What `draw` fills, everything but norms: parameters, of which larger ones they are a share, and the
        # formats of those that are rounded.
        self._drawn: list[tuple[Place | None, Share | None, WeightFormat | None]] = []

    @property
    def num_bytes(self) -> int:
        return sum(place.nbytes for place in self.places.values())

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor of the checkpoint; None if the model has none of that name."""
        if name in self.shares:
            return self.shares[name].shape
        place = self.places.get(name)
        return self.elsewhere.get(name) if place is None else tuple(place.shape)

    def take_from_twin(self, name: str) -> None:
        """Have what `name` is tied to read by that name."""
        twin = self.tied.pop(name)
        _rename(self.places, twin, name)
        _rename(self.shares, twin, name)
        _rename(self.elsewhere, twin, name)

    def embedding(self, name: str, rows: int, columns: int) -> Tensor:
        """Return a matrix [rows, columns] that every rank has."""
        weight = self._matrix(rows, columns)
        self.places[f"{name}.weight"] = weight
        return weight

    def vocabulary(self, name: str, rows: int, columns: int) -> Tensor:
        """Return a matrix of a row for each token, or this rank's rows of it: [rows / ranks, columns].

        Rows past the vocabulary's end are zero.
        """
        if self.ranks is None:
            return self.embedding(name, rows, columns)
        begin, end = of_vocabulary(rows, self.ranks.rank, self.ranks.size)
        share = Share((rows, columns), 0, ((begin, end),))
        weight = self._matrix(rows_of_rank(rows, self.ranks.size), columns, share)
        weight[end - begin :].zero_()
        self._place(f"{name}.weight", weight[: end - begin], share)
        return weight

    def linear(self, prefix: str, parts: dict[str, int], in_features: int, *, bias: bool) -> AnyLinear:
        """Fuse projections of one input into one: `parts` maps each one's name to its output size, in order.

        Every rank has all of it.
        """
        columns = {part: (Columns(size),) for part, size in parts.items()}
        return self._linear(prefix, columns, in_features, 0, 1, bias=bias, transposed=False)

    def columns(
        self,
        prefix: str,
        parts: Mapping[str, tuple[Columns, ...]],
        in_features: int,
        *,
        bias: bool,
        transposed: bool = False,
    ) -> AnyLinear:
        """Fuse projections of one input into one, whose outputs are divided among the ranks.

        parts: maps each one's name to its outputs, or to several that stand one after the other in it.
        transposed: the checkpoint keeps [in, out] (GPT-2's Conv1D).
        """
        rank, ranks = (0, 1) if self.ranks is None else (self.ranks.rank, self.ranks.size)
        return self._linear(
            prefix, parts, in_features, bias=bias, transposed=transposed, rank=rank, ranks=ranks
        )

    def rows(
        self,
        name: str,
        out_features: int,
        in_features: int,
        *,
        bias: bool,
        transposed: bool = False,
    ) -> AnyLinear:
        """Return a projection whose inputs are divided among the ranks: this one has `in_features` of them.

        Rank 0 has the bias.
        """
        if self.ranks is None:
            prefix, part = name.rsplit(".", 1)
            columns = {part: (Columns(out_features),)}
            return self.columns(prefix, columns, in_features, bias=bias, transposed=transposed)
        (inputs,), whole = of_columns((Columns(in_features),), self.ranks.rank, self.ranks.size)
        share = Share((out_features, whole), 1, (inputs,))
        weight = self._weight(f"{name}.weight", out_features, in_features, share)
        self._place_matrix(f"{name}.weight", weight, share, transposed=transposed)
        vector = None
        if bias and self.ranks.rank == 0:
            vector = self.places[f"{name}.bias"] = self._allocate(out_features)
        elif bias:
            self.elsewhere[f"{name}.bias"] = (out_features,)
            self._drawn.append((None, Share((out_features,), 0, ()), None))
        return _linear_of(weight, vector, self.ranks)

    def rms_norm(self, name: str, size: int) -> Tensor:
        weight = torch.ones(size, dtype=self.dtype, device=self.device)
        self.places[f"{name}.weight"] = weight
        return weight

    def layer_norm(self, name: str, size: int, eps: float, *, affine: bool = True) -> LayerNorm:
        if not affine:
            return LayerNorm(None, None, eps)
        bias = torch.zeros(size, dtype=self.dtype, device=self.device)
        self.places[f"{name}.bias"] = bias
        return LayerNorm(self.rms_norm(name, size), bias, eps)

    def output_head(self, embedding_name: str, embedding: Tensor, config: ModelConfig) -> Tensor:
        """Return `lm_head.weight` [vocab, hidden], or this rank's rows: its own, or the embedding.

        Of a model that classifies it is `score.weight` [labels, hidden], which every rank has. A model that
        embeds has none, and of what stands here nothing is used.
        """
        if config.pooling is not None and not config.pooling.label_tokens:
            self.unused.add("lm_head.weight")
            labels = config.pooling.labels
            return self.embedding("score", labels, config.hidden_size) if labels else embedding
        if config.tie_word_embeddings or (config.adapter is not None and config.adapter.unties):
            self.pair = "lm_head.weight", f"{embedding_name}.weight"
        if not config.tie_word_embeddings:
            return self.vocabulary("lm_head", config.vocab_size, embedding.shape[1])
        self.tied["lm_head.weight"] = f"{embedding_name}.weight"
        return embedding

    def draw(self, seed: int) -> Iterable[Place]:
        """Fill with normal noise, std 0.02, the same for a seed; norms stay 1. Yields each one filled.

        Ranks hold the same numbers as one alone would: each matrix is drawn whole, one at a time. What is
        kept in few bits is rounded to them.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        for parameter, share, form in self._drawn:
            if form is not None:
                assert parameter is not None
                draw_rounded(parameter, form, share, self.dtype, generator)
                yield parameter
                continue
            assert not isinstance(parameter, QuantisedWeight)
            if share is None:
                assert parameter is not None
                yield parameter.normal_(std=STD, generator=generator)
                continue
            whole = torch.empty(share.shape, dtype=self.dtype, device=self.device)
            whole.normal_(std=STD, generator=generator)
            if parameter is not None:
                parameter.narrow(share.dim, 0, share.length).copy_(share.of(whole))
                yield parameter

    def _linear(
        self,
        prefix: str,
        parts: Mapping[str, tuple[Columns, ...]],
        in_features: int,
        rank: int,
        ranks: int,
        *,
        bias: bool,
        transposed: bool,
    ) -> AnyLinear:
        every = tuple(columns for part in parts.values() for columns in part)
        out_features = sum(columns.size for columns in every)
        ranges, whole = of_columns(every, rank, ranks)
        divided = ranks > 1
        weight = self._weight(
            f"{prefix}.{next(iter(parts))}.weight",
            out_features,
            in_features,
            Share((whole, in_features), 0, ranges) if divided else None,
        )
        vector = None
        if bias:
            vector = self._allocate(out_features, share=Share((whole,), 0, ranges) if divided else None)
        offset = 0
        for part, columns in parts.items():
            size = sum(each.size for each in columns)
            end = offset + size
            rows = weight[offset:end] if isinstance(weight, Tensor) else weight.rows(offset, end)
            own, length = of_columns(columns, rank, ranks)
            share = Share((length, in_features), 0, own) if divided else None
            name = f"{prefix}.{part}"
            self._place_matrix(f"{name}.weight", rows, share, transposed=transposed)
            if vector is not None:
                share = Share((length,), 0, own) if divided else None
                self._place(f"{name}.bias", vector[offset:end], share)
            offset = end
        return _linear_of(weight, vector)

    def _place(self, name: str, view: Place, share: Share | None) -> None:
        self.places[name] = view
        if share is not None:
            self.shares[name] = share

    def _place_matrix(self, name: str, view: Place, share: Share | None, *, transposed: bool) -> None:
        if not transposed:
            self._place(name, view, share)
            return
        assert isinstance(view, Tensor)
        self._place(name, view.T, None if share is None else share.transposed)
        self.transposed.add(name)

    def _weight(self, name: str, rows: int, columns: int, share: Share | None) -> Place:
        """Allocate a product's weight, of which `name` is the first that a checkpoint has."""
        form = self.kept.get(name)
        if form is None and self.rounds is None:
            return self._matrix(rows, columns, share)
        weight: Place
        if form is None:
            weight = self._empty_matrix(rows, columns)
        else:
            weight = QuantisedWeight.empty(form, rows, columns, self.device)
        self._drawn.append((weight, share, form or self.rounds))
        return weight

    def _matrix(self, rows: int, columns: int, share: Share | None = None) -> Tensor:
        matrix = self._empty_matrix(rows, columns)
        if self.device.type == "cpu":
            self._drawn.append((matrix.T, None if share is None else share.transposed, None))
        else:
            self._drawn.append((matrix, share, None))
        return matrix

    def _empty_matrix(self, rows: int, columns: int) -> Tensor:
        if self.device.type == "cpu":  # by columns: one row of activations times such is twice as fast
            return self._empty(columns, rows).T
        return self._empty(rows, columns)

    def _allocate(self, *shape: int, share: Share | None = None) -> Tensor:
        parameter = self._empty(*shape)
        self._drawn.append((parameter, share, None))
        return parameter

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


def _linear_of(weight: Place, bias: Tensor | None, ranks: Ranks | None = None) -> AnyLinear:
    if isinstance(weight, Tensor):
        return Linear(weight, bias, ranks)
    return QuantisedLinear(weight, bias, ranks)


def dense(layer: AnyLinear) -> Linear:
    """Return a layer of a model whose weights are never kept in few bits."""
    assert isinstance(layer, Linear)
    return layer


def _rename(held: dict[str, Held], name: str, new: str) -> None:
    if name in held:
        held[new] = held.pop(name)

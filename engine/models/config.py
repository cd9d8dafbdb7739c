"""A model's shape, read from the config.json of its folder. Imports neither torch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from quire.engine.models.adapter_config import Adapter
from quire.engine.models.attention_shape import AttentionShape
from quire.engine.models.cache_groups import CacheGroup, cache_groups, state_groups
from quire.engine.models.json_fields import read_json
from quire.engine.models.pooling import Pooling
from quire.engine.models.quantisation import Quantised
from quire.engine.models.rope_config import RopeConfig
from quire.kernels.formats.cache_spec import CacheSpec
from quire.kernels.formats.state_spec import LayerStates

Dtype = Literal["float32", "float16", "bfloat16"]
Activation = Literal["silu", "relu", "gelu", "gelu_tanh"]
Implementation = Literal["native", "transformers"]

VOCABULARY_ROWS = 16  # of which a rank has a multiple: noise is drawn for four tokens at once
MAX_HEAD_DIM = 512  # what the attention kernels take
MAX_GROUP = 64  # query heads to a KV head, likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the engine needs to know of a model before its weights are there.

    Heads and the MLP's width are those of one rank, see `of_rank`; all else is the model's.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    dtype: Dtype  # of the checkpoint
    activation: Activation
    norm_eps: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None = None
    windows: tuple[int, ...]  # per layer: how many last positions attention sees; 0 is all
    rope: RopeConfig | None  # None: learned positions
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool = False
    embedding_size: int  # of a token's embedding; OPT may project it to hidden_size
    norm_before: bool = True  # layer norms stand before attention and MLP (OPT-350m: after)
    final_norm: bool = True
    norm_affine: bool = True  # layer norms have weight and bias
    implementation: Implementation = "native"  # transformers: `quire.engine.models.general`
    pooling: Pooling | None = None  # None: it has a head for text
    quantised: Quantised | None = None  # None: weights of its files are what they stand for
    adapter: Adapter | None = None  # merged into its weights
    chosen_tokens: int = 0  # of those before it that a token attends to, as indexers choose; 0: all
    attention: tuple[AttentionShape, ...] = ()  # by layer; none: all as the fields say. Those have the most
    states: tuple[LayerStates, ...] = ()  # of layers that keep no keys and values, or those besides
    states_in_group: int = 0  # layers that keep their states in blocks together; 0: all
    attention_layers: tuple[int, ...] = ()  # that have `attention`, where others have none
    in_call_order: bool = False  # `attention` is of calls, of which a layer of transformers' code has several
    undivided: str = ""  # why no more than one rank can compute it
    has_experts: bool = False  # which ranks can have whole
    expert_parallel: bool = False  # each rank has some experts whole, and not a part of all
    ranks: int = 1  # that heads, the MLP's width and the vocabulary are divided among
    kv_copies: int = 1  # ranks that hold the same KV heads

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Return what each layer keeps of the tokens that it has seen."""
        if not self.attention:
            return tuple(CacheSpec(self.num_kv_heads, self.head_dim, window) for window in self.windows)
        layers = zip(self.attention, self.windows, strict=True)
        return tuple(
            CacheSpec(each.kv_heads, each.head_dim, window, each.latent, each.index)
            for each, window in layers
        )

    def place(self, layer: int) -> int:
        """Return which of `attention` a layer has."""
        return self.attention_layers.index(layer) if self.attention_layers else layer

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Return which layers keep their tokens in blocks together."""
        return *cache_groups(self.cache_specs), *state_groups(len(self.states), self.states_in_group)

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """Return the number of each layer's cache group, but for layers that keep states."""
        groups = enumerate(self.cache_groups)
        numbers = {layer: at for at, group in groups if not group.states for layer in group.layers}
        return tuple(numbers[layer] for layer in range(self.num_layers))

    @property
    def group_of_states(self) -> tuple[int, ...]:
        """Return the number of the cache group of each layer that keeps states."""
        groups = enumerate(self.cache_groups)
        numbers = {layer: at for at, group in groups if group.states for layer in group.layers}
        return tuple(numbers[layer] for layer in range(len(self.states)))

    @property
    def longest(self) -> int:
        """Return how many tokens a sequence has at most: by positions, or of a text to pool by the folder."""
        most = self.pooling.texts.max_tokens if self.pooling is not None else 0
        return min(self.max_position_embeddings, most or self.max_position_embeddings)

    def refuse_longer(self, max_model_len: int) -> None:
        """Raise ValueError if that is more than `longest`."""
        if max_model_len > self.max_position_embeddings:
            raise ValueError(
                f"--max-model-len ({max_model_len}) is more than the model's max_position_embeddings "
                f"({self.max_position_embeddings})"
            )
        if max_model_len > self.longest:
            raise ValueError(
                f"--max-model-len ({max_model_len}) is more than the {self.longest} tokens of a text that "
                "the model pools, by max_seq_length of sentence_bert_config.json, or model_max_length of "
                "tokenizer_config.json: give no more, or change it there if the model was trained for more"
            )

    def within(self, max_model_len: int) -> ModelConfig:
        """Return the model for so many tokens: windows as long hide none of them, nor are any chosen.

        Raises ValueError if that is more than `longest`.
        """
        self.refuse_longer(max_model_len)
        windows = tuple(window if window < max_model_len else 0 for window in self.windows)
        if max_model_len > self.chosen_tokens:
            return replace(self, windows=windows)
        attention = tuple(replace(each, index=0) for each in self.attention)
        return replace(self, windows=windows, attention=attention, chosen_tokens=0)

    @property
    def largest_group(self) -> int:
        """Return how many query heads a KV head serves, in the layer where they are most."""
        groups = (each.heads // each.kv_heads for each in self.attention if not each.latent)
        return max(groups, default=self.num_heads // self.num_kv_heads)

    @property
    def plain(self) -> bool:
        """Return whether all layers attend alike, but for windows, and by a softmax of scaled scores alone.

        Nor do keys hold what must not be rounded.
        """
        return len({(each.kv_heads, each.head_dim) for each in self.attention}) <= 1 and all(
            each.plain and not (each.chunked or each.latent or each.index or each.biased)
            for each in self.attention
        )

    @property
    def query_width(self) -> int:
        """Return how many numbers all heads' queries have as they meet keys, in the layer with most."""
        widths = (each.heads * each.head_dim for each in self.attention)
        return max(widths, default=self.num_heads * self.head_dim)

    @property
    def attended_dim(self) -> int:
        """Return how many numbers a query head attends to, in the layer where they are most."""
        return max((each.latent or each.head_dim for each in self.attention), default=self.head_dim)

    @property
    def latent_width(self) -> int:
        """Return how many numbers a layer keeps of a token for all heads; 0: each has keys and values."""
        return max((each.head_dim for each in self.attention if each.latent), default=0)

    @property
    def gathers(self) -> bool:
        """Return whether a prompt's vector comes from the hidden states of all its tokens."""
        return self.pooling is not None and self.pooling.needs_all

    @property
    def layer_weights(self) -> int:
        """Return how many elements a layer's matrices have."""
        projections = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        matrices = 3 if self.activation == "silu" else 2
        return projections + matrices * self.hidden_size * self.intermediate_size

    @property
    def vocab_rows(self) -> int:
        """Return how many tokens of the vocabulary a rank holds; the last ranks may have fewer."""
        return rows_of_rank(self.vocab_size, self.ranks)

    def with_pooling(self, pooling: Pooling) -> ModelConfig:
        """Return the model with that instead of a head for text."""
        if self.embedding_size != self.hidden_size:
            raise ValueError(
                f"{self.architecture} with embeddings of {self.embedding_size} and hidden states of "
                f"{self.hidden_size} numbers cannot be pooled: give --runner generate"
            )
        vector_size = pooling.vector_size(self.hidden_size)
        too_long = [size for size in pooling.dimensions if size > vector_size]
        if too_long:
            raise ValueError(f"matryoshka_dimensions has {too_long[0]}, more than {vector_size}")
        if pooling.labels and not pooling.label_tokens:
            pooling = msgspec.structs.replace(pooling, padding=self.pad_token_id)
        if not pooling.label_tokens:  # there is no head for text
            return replace(self, pooling=pooling, tie_word_embeddings=True)
        if self.implementation == "transformers":
            raise ValueError(f"{self.architecture} runs by transformers' code, which gives no tokens' scores")
        if not all(0 <= token < self.vocab_size for token in pooling.label_tokens):
            raise ValueError(f"{pooling.label_tokens} are not of the vocabulary's {self.vocab_size} tokens")
        return replace(self, pooling=pooling)

    def with_adapter(self, adapter: Adapter) -> ModelConfig:
        """Return the model with an adapter merged; head and embedding may be tied no more."""
        tied = self.tie_word_embeddings and not adapter.unties
        return replace(self, adapter=adapter, tie_word_embeddings=tied)

    def of_rank(self, ranks: int, *, expert_parallel: bool = False) -> ModelConfig:
        """Return the model as each of so many ranks computes it. Raises ValueError if they do not divide it.

        KV heads are repeated where there are fewer than ranks. expert_parallel: experts stay whole.
        """
        if expert_parallel and not self.has_experts:
            raise ValueError(
                f"--enable-expert-parallel: {self.architecture} has no experts, or none that a rank can have "
                "whole; leave it out"
            )
        if ranks > 1 and self.undivided:
            raise ValueError(
                f"--tensor-parallel-size {ranks}: {self.architecture} runs by transformers' code, and "
                f"{self.undivided}; give 1"
            )
        if ranks > 1 and self.pooling is not None and self.pooling.label_tokens:
            raise ValueError(
                f"--tensor-parallel-size {ranks}: scores by the logits of two tokens are of one rank; give 1"
            )
        if not self._divides(ranks):
            which = [str(other) for other in range(1, self.num_heads + 1) if self._divides(other)]
            width = "" if self.attention else f", or the MLP's width of {self.intermediate_size}"
            raise ValueError(
                f"--tensor-parallel-size {ranks} does not divide the {self.num_heads} attention heads or the "
                f"{self.num_kv_heads} KV heads{width} evenly; give one of {', '.join(which)}"
            )
        return replace(
            self,
            num_heads=self.num_heads // ranks,
            num_kv_heads=max(self.num_kv_heads // ranks, 1),
            intermediate_size=-(-self.intermediate_size // ranks),
            attention=tuple(each.of_rank(ranks) for each in self.attention),
            ranks=ranks,
            expert_parallel=expert_parallel,
            kv_copies=max(ranks // self.num_kv_heads, 1),
        )

    def _divides(self, ranks: int) -> bool:
        if self.attention:  # what else is divided is known with the modules
            return all(each.divides(ranks) for each in self.attention)
        kv_heads = self.num_kv_heads
        fits = kv_heads % ranks == 0 or ranks % kv_heads == 0
        return fits and self.num_heads % ranks == 0 and self.intermediate_size % ranks == 0


def rows_of_rank(rows: int, ranks: int) -> int:
    """Return how many of so many tokens' rows a rank holds: a multiple of 16, but all if it is alone."""
    return rows if ranks == 1 else -(-rows // (ranks * VOCABULARY_ROWS)) * VOCABULARY_ROWS


def read_max_positions(folder: Path) -> int:
    """Return how many positions a model has, without looking at the rest. Raises ValueError."""
    raw = read_json(folder / "config.json") or {}
    nested = raw.get("text_config")
    for fields in (raw, nested if isinstance(nested, dict) else {}):
        for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"):
            positions = fields.get(name)
            if isinstance(positions, int) and not isinstance(positions, bool) and positions > 0:
                return positions
    raise ValueError(f"{folder / 'config.json'}: max_position_embeddings must be there, a positive integer")

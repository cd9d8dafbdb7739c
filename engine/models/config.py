"""A model's shape, read from the config.json of its folder. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from quire.engine.models.attention_shape import AttentionShape
from quire.engine.models.cache_groups import CacheGroup, cache_groups
from quire.engine.models.json_fields import Fields, read_json
from quire.engine.models.pooling import Pooling, causal_name
from quire.engine.models.rope_config import RopeConfig
from quire.kernels.formats.cache_spec import CacheSpec

Dtype = Literal["float32", "float16", "bfloat16"]
Activation = Literal["silu", "relu", "gelu", "gelu_tanh"]
Implementation = Literal["native", "transformers"]

VOCABULARY_ROWS = 16  # of which a rank has a multiple: noise is drawn for four tokens at once
MAX_HEAD_DIM = 512  # what the attention kernels take
MAX_GROUP = 64  # query heads to a KV head, likewise

_DTYPES: dict[str, Dtype] = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}
_SILU: dict[str, Activation] = {"silu": "silu", "swish": "silu"}
_PLAIN: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


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
    attention: tuple[AttentionShape, ...] = ()  # by layer; none: all as the fields say. Those have the most
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
        return tuple(CacheSpec(each.kv_heads, each.head_dim, window) for each, window in layers)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Return which layers keep their tokens in blocks together."""
        return cache_groups(self.cache_specs)

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """Return the number of each layer's cache group."""
        numbers = {layer: at for at, group in enumerate(self.cache_groups) for layer in group.layers}
        return tuple(numbers[layer] for layer in range(self.num_layers))

    def within(self, max_model_len: int) -> ModelConfig:
        """Return the model for so many tokens, which windows as long do not hide any of."""
        windows = tuple(window if window < max_model_len else 0 for window in self.windows)
        return replace(self, windows=windows)

    @property
    def largest_group(self) -> int:
        """Query heads that a KV head serves, in the layer where they are most."""
        groups = (each.heads // each.kv_heads for each in self.attention)
        return max(groups, default=self.num_heads // self.num_kv_heads)

    @property
    def plain(self) -> bool:
        """Whether all layers attend alike, but for windows, and by a softmax of scaled scores alone."""
        return len({(each.kv_heads, each.head_dim) for each in self.attention}) <= 1 and all(
            each.plain and not each.chunked for each in self.attention
        )

    @property
    def gathers(self) -> bool:
        """Whether a prompt's vector comes from the hidden states of all its tokens."""
        return self.pooling is not None and self.pooling.needs_all

    @property
    def layer_weights(self) -> int:
        """Elements of a layer's matrices."""
        projections = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        matrices = 3 if self.activation == "silu" else 2
        return projections + matrices * self.hidden_size * self.intermediate_size

    @property
    def vocab_rows(self) -> int:
        """Tokens of the vocabulary that a rank holds; the last ranks may have fewer."""
        return rows_of_rank(self.vocab_size, self.ranks)

    def with_pooling(self, pooling: Pooling) -> ModelConfig:
        """Return the model with that instead of a head for text."""
        if self.embedding_size != self.hidden_size:
            raise ValueError(
                f"{self.architecture} with embeddings of {self.embedding_size} and hidden states of "
                f"{self.hidden_size} numbers cannot be pooled: give --runner generate"
            )
        too_long = [size for size in pooling.dimensions if size > self.hidden_size]
        if too_long:
            raise ValueError(f"matryoshka_dimensions has {too_long[0]}, more than {self.hidden_size}")
        if not pooling.label_tokens:  # there is no head for text
            return replace(self, pooling=pooling, tie_word_embeddings=True)
        if self.implementation == "transformers":
            raise ValueError(f"{self.architecture} runs by transformers' code, which gives no tokens' scores")
        if not all(0 <= token < self.vocab_size for token in pooling.label_tokens):
            raise ValueError(f"{pooling.label_tokens} are not of the vocabulary's {self.vocab_size} tokens")
        return replace(self, pooling=pooling)

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

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read config.json, and the eos ids of generation_config.json where that names any.

        Raises ValueError that names the field, what it holds and what it may be.
        """
        folder = Path(folder)
        raw = read_json(folder / "config.json")
        if raw is None:
            raise ValueError(f"{folder} has no config.json; give a folder that save_pretrained wrote")
        fields = Fields(raw, str(folder / "config.json"))
        names = raw.get("architectures")
        given = names[0] if isinstance(names, list) and names else None
        name = causal_name(given) if isinstance(given, str) else given
        if not isinstance(name, str) or name not in _READERS:
            raise ValueError(
                f"{fields.where}: architecture {given!r} is not supported; supported are "
                f"{', '.join(_READERS)}"
            )
        fields.refuse_unless("quantization_config", None, {})
        fields.refuse_unless("compression_config", None, {})
        config = _READERS[name](fields, name)
        generation = folder / "generation_config.json"
        eos_token_ids = Fields(read_json(generation) or {}, str(generation)).token_ids("eos_token_id")
        if eos_token_ids:
            config = replace(config, eos_token_ids=eos_token_ids)
        if config.num_heads % config.num_kv_heads:
            raise fields.error(
                "num_key_value_heads", config.num_kv_heads, f"a divisor of {config.num_heads} heads"
            )
        if config.head_dim > MAX_HEAD_DIM:
            raise fields.error("head_dim", config.head_dim, f"at most {MAX_HEAD_DIM}")
        if config.rope is not None and config.head_dim % 2:
            raise fields.error("head_dim", config.head_dim, "even, since rotary embedding pairs its halves")
        return config


def rows_of_rank(rows: int, ranks: int) -> int:
    """Return how many of so many tokens' rows a rank holds: a multiple of 16, but all if it is alone."""
    return rows if ranks == 1 else -(-rows // (ranks * VOCABULARY_ROWS)) * VOCABULARY_ROWS


def _decoder(fields: Fields, architecture: str) -> ModelConfig:
    """Read Llama, Mistral, Qwen2/2.5 and Qwen3. Defaults of absent fields are transformers' own."""
    qwen = architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
    fields.refuse_unless("partial_rotary_factor", None, 1, 1.0)
    fields.refuse_unless("dual_chunk_attention_config", None)
    if architecture not in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        fields.refuse_unless("attention_bias", False, None)
    if architecture != "LlamaForCausalLM":
        fields.refuse_unless("mlp_bias", False, None)
    heads = fields.size("num_attention_heads")
    hidden = fields.size("hidden_size")
    kv_heads_if_absent = {"LlamaForCausalLM": heads, "MistralForCausalLM": 8}.get(architecture, 32)
    kv_heads = fields.size(
        "num_key_value_heads", heads if "num_key_value_heads" in fields.raw else kv_heads_if_absent
    )
    if fields.has("head_dim"):
        head_dim = fields.size("head_dim")
    elif architecture == "Qwen3ForCausalLM":
        head_dim = 128
    elif hidden % heads:
        raise fields.error("hidden_size", hidden, f"a multiple of num_attention_heads ({heads})")
    else:
        head_dim = hidden // heads
    layers = fields.size("num_hidden_layers")
    positions = fields.size("max_position_embeddings")
    attention_bias = fields.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=positions,
        dtype=_dtype(fields),
        activation=fields.choice("hidden_act", "silu", _SILU),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=_bos_token_id(fields),
        windows=_windows(fields, layers, positions, architecture, qwen),
        rope=RopeConfig.read(fields, positions),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        embedding_size=hidden,
    )


def _windows(fields: Fields, layers: int, positions: int, architecture: str, qwen: bool) -> tuple[int, ...]:
    """Return the attention window of each layer; one that no context can outgrow counts as none."""
    if architecture == "LlamaForCausalLM":
        fields.refuse_unless("sliding_window", None)
        fields.refuse_unless("layer_types", None, ["full_attention"] * layers)
        return (0,) * layers
    window = fields.raw.get("sliding_window", 4096)
    if qwen and not fields.flag("use_sliding_window", False):
        window = None
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise fields.error("sliding_window", window, "a positive integer or null")
    first = fields.raw.get("max_window_layers", 28) if qwen else 0
    if isinstance(first, bool) or not isinstance(first, int):
        raise fields.error("max_window_layers", first, "an integer")
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        sliding = [window is not None and layer >= first for layer in range(layers)]
    else:
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
            raise fields.error("layer_types", kinds, f"{layers} entries, each one of {', '.join(known)}")
        sliding = [kind == "sliding_attention" for kind in kinds]
        if any(sliding) and window is None:
            raise fields.error("layer_types", kinds, "full_attention only, since no sliding_window is in use")
    return tuple(window if slides and window is not None and window < positions else 0 for slides in sliding)


def _opt(fields: Fields, architecture: str) -> ModelConfig:
    heads = fields.size("num_attention_heads")
    hidden = fields.size("hidden_size")
    if hidden % heads:
        raise fields.error("hidden_size", hidden, f"a multiple of num_attention_heads ({heads})")
    layers = fields.size("num_hidden_layers")
    bias = fields.flag("enable_bias", True)
    norm_before = fields.flag("do_layer_norm_before", True)
    return ModelConfig(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=fields.size("ffn_dim"),
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=fields.size("max_position_embeddings"),
        dtype=_dtype(fields),
        activation=fields.choice("activation_function", "relu", _PLAIN),
        norm_eps=1e-5,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=_bos_token_id(fields),
        windows=(0,) * layers,
        rope=None,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        embedding_size=fields.size("word_embed_proj_dim", hidden),
        norm_before=norm_before,
        final_norm=norm_before and not fields.flag("_remove_final_layer_norm", False),
        norm_affine=fields.flag("layer_norm_elementwise_affine", True),
    )


def _gpt2(fields: Fields, architecture: str) -> ModelConfig:
    fields.refuse_unless("scale_attn_weights", True)
    fields.refuse_unless("scale_attn_by_inverse_layer_idx", False)
    fields.refuse_unless("reorder_and_upcast_attn", False)
    fields.refuse_unless("add_cross_attention", False)
    heads = fields.size("n_head")
    hidden = fields.size("n_embd")
    if hidden % heads:
        raise fields.error("n_embd", hidden, f"a multiple of n_head ({heads})")
    layers = fields.size("n_layer")
    return ModelConfig(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=fields.size("n_inner", 4 * hidden),
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=fields.size("n_positions"),
        dtype=_dtype(fields),
        activation=fields.choice("activation_function", "gelu_tanh", _PLAIN),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=_bos_token_id(fields),
        windows=(0,) * layers,
        rope=None,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        embedding_size=hidden,
    )


_READERS: dict[str, Callable[[Fields, str], ModelConfig]] = {
    "LlamaForCausalLM": _decoder,
    "MistralForCausalLM": _decoder,
    "Qwen2ForCausalLM": _decoder,
    "Qwen3ForCausalLM": _decoder,
    "OPTForCausalLM": _opt,
    "GPT2LMHeadModel": _gpt2,
}


def _dtype(fields: Fields) -> Dtype:
    return fields.choice("dtype" if fields.has("dtype") else "torch_dtype", "float32", _DTYPES)


def _bos_token_id(fields: Fields) -> int | None:
    return next(iter(fields.token_ids("bos_token_id")), None)


def has_native(raw: dict[str, Any]) -> bool:
    """Return whether a config.json is of an architecture that has a decoder here."""
    names = raw.get("architectures")
    return isinstance(names, list) and bool(names) and causal_name(str(names[0])) in _READERS


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

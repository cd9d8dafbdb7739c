"""The shape of any decoder that transformers has: what its layers ask of attention, found by a dry run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from quire.engine.models.config import MAX_HEAD_DIM, ModelConfig
from quire.engine.models.general.attention import Call, Recorder
from quire.engine.models.general.described import SEE_TYPES, read_described
from quire.engine.models.general.division.plan import has_plan, has_whole_experts
from quire.engine.models.general.dry_run import build, run_dry
from quire.engine.models.general.own_attention import chosen_tokens, why_undivided
from quire.engine.models.general.stateful import StateRecorder
from quire.engine.models.general.unsupported import UnsupportedAttention
from quire.engine.models.json_fields import Fields, read_json
from quire.engine.models.modelopt import with_modelopt
from quire.engine.models.quantisation import MXFP4, Quantised, read_quantised
from quire.engine.models.quantisation_config import method_of
from quire.kernels.formats.state_spec import LayerStates

WINDOWED, CHUNKED = "sliding_attention", "chunked_attention"  # among a configuration's `layer_types`
_MASKS = {  # by which functions of transformers' a model's code masks what such layers do not see
    WINDOWED: {"create_sliding_window_causal_mask", "create_masks_for_generate"},
    CHUNKED: {"create_chunked_causal_mask", "create_masks_for_generate"},
}
# Of layers that see all that came before: beside states (hybrid), or as far as an indexer chooses it.
_ALL_SEEN = ("full_attention", "hybrid", "indexed_attention", "minimax_m3_sparse")
_KEEP_NOTHING = ("mlp", "moe")
_POSITIONS = ("max_position_embeddings", "max_target_positions", "max_seq_len", "seq_length")
_TRAINED = 2048  # positions of BLOOM, which no field of its configuration tells
_WITHOUT_END = 1 << 20  # of models that keep states alone
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def read_general(folder: Path) -> ModelConfig:
    """Return the shape of the model in a folder. Raises ValueError that says why it cannot run."""
    where = str(folder / "config.json")
    raw = with_modelopt(folder, read_json(folder / "config.json") or {})
    whole = read_described(folder)
    config = whole.get_text_config(decoder=True)
    kind = type(whole).model_type
    if any(getattr(each, "is_causal", True) is False for each in (whole, config)):
        raise _refused(where, kind, "is_causal is false, so tokens see those after them")
    quantised: Quantised | None = MXFP4 if method_of(raw) == MXFP4 else read_quantised(raw, where)
    dtype = config.dtype or whole.dtype  # before a model is made, which settles on one for each part
    run = _run_dry(whole, kind, where)
    calls, indexed, masked = run.calls, run.indexed, run.masked
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    attention = tuple(
        replace(call.shape, chunked=kinds[layer] == CHUNKED, index=indexed.get(layer, 0))
        for layer, call in calls
    )
    layers = tuple(layer for layer, _ in calls)
    if run.in_call_order and indexed:
        raise _refused(where, kind, "its layers attend more than once to tokens that they choose")
    head_dim = max((each.head_dim for each in attention if not each.latent), default=0)
    if head_dim > MAX_HEAD_DIM:
        raise _refused(where, kind, f"its heads have {head_dim} numbers; kernels take up to {MAX_HEAD_DIM}")
    fields = Fields(whole.to_dict(), where)
    generation = folder / "generation_config.json"
    eos = Fields(read_json(generation) or {}, str(generation)).token_ids("eos_token_id")
    of_text = Fields(config.to_dict(), where)  # which is all that may name them
    found = (getattr(config, name, None) for name in _POSITIONS)
    positions = next((each for each in found if isinstance(each, int)), None)
    if positions is None and all(call.slopes is not None for _, call in calls):
        positions = _TRAINED if calls else _WITHOUT_END
    if positions is None:
        raise _refused(where, kind, "its max_position_embeddings are not known")
    return ModelConfig(
        architecture=(whole.architectures or [kind])[0],
        implementation="transformers",
        num_layers=len(calls),
        hidden_size=config.hidden_size,
        num_heads=max((each.heads for each in attention), default=1),
        num_kv_heads=max((each.kv_heads for each in attention), default=1),
        head_dim=max((each.projected or each.head_dim for each in attention), default=1),
        intermediate_size=_intermediate_size(config),
        vocab_size=run.vocab_size,
        max_position_embeddings=positions - run.offset,
        dtype=_DTYPES.get(dtype, "bfloat16" if quantised else "float32"),  # type: ignore[arg-type]
        activation="silu",
        norm_eps=0.0,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        eos_token_ids=eos or fields.token_ids("eos_token_id") or of_text.token_ids("eos_token_id"),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        pad_token_id=next(iter(of_text.token_ids("pad_token_id")), None),
        windows=tuple(_window(config, masked, positions, layer, call, where, kind) for layer, call in calls),
        rope=None,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        embedding_size=config.hidden_size,
        chosen_tokens=run.chosen_tokens,
        attention=attention,
        states=run.states,
        attention_layers=() if run.in_call_order or layers == (*range(len(layers)),) else layers,
        in_call_order=run.in_call_order,
        undivided=run.undivided,
        has_experts=run.has_experts,
        quantised=quantised,
    )


class _Run(NamedTuple):
    """What a run without weights shows: each layer's attention, and as `StepPositions` has it the offset.

    calls: with the number of the layer that each is of. indexed: as `Recorder` has it. in_call_order,
    chosen_tokens, undivided, has_experts: as `ModelConfig` has them. masked: kinds of layers that the code
    has masks for. vocab_size: tokens that it gives logits of, whatever fields say. states: of each module
    that keeps some.
    """

    calls: list[tuple[int, Call]]
    in_call_order: bool
    indexed: dict[int, int]
    offset: int
    chosen_tokens: int
    undivided: str
    has_experts: bool
    masked: frozenset[str]
    vocab_size: int
    states: tuple[LayerStates, ...]


def _run_dry(whole: PreTrainedConfig, kind: str, where: str) -> _Run:
    recorder = Recorder()
    try:
        model = build(whole)
        kept = StateRecorder(model)
        if kept.layers:
            model.to(torch.bfloat16)
        positions, vocab_size = run_dry(model, recorder)
    except UnsupportedAttention as error:
        raise _refused(where, kind, str(error)) from error
    except Exception as error:  # modelling code may raise anything
        if str(error).startswith("Unrecognized configuration class"):
            reason = (
                "transformers has no causal language model of it, but one for more than text or an encoder"
            )
            raise _refused(where, kind, reason) from error
        raise _refused(where, kind, f"a run of its modelling code ends with {error!r}") from error
    calls = _of_layers(whole, recorder.calls, kept.layers, kind, where)
    rows = len(model.get_input_embeddings().weight)
    if vocab_size > rows:
        reason = f"it gives logits of {vocab_size} tokens, and has embeddings of {rows}"
        raise _refused(where, kind, reason)
    told = positions.taken or positions.told
    if not told and any(call.slopes is None for _, call in calls):
        raise _refused(where, kind, "it counts positions by itself, from the first token of a call")
    undivided = why_undivided(model)
    if not undivided and not has_plan(model):
        undivided = "it has no plan of how to divide a model of this type"
    chosen, has_experts = chosen_tokens(model), has_whole_experts(model)
    numbers = [layer for layer, _ in recorder.calls]
    return _Run(
        calls,
        len(set(numbers)) < len(numbers) or {*numbers} != {layer for layer, _ in calls},
        recorder.indexed,
        positions.offset,
        chosen,
        undivided,
        has_experts,
        _masked(model),
        vocab_size,
        kept.states,
    )


def _masked(model: nn.Module) -> frozenset[str]:
    """Return the kinds of layers that see less than all, as far as the modelling code can mask the rest."""
    files = {sys.modules[type(part).__module__] for part in model.modules()}
    names = {name for file in files for name in vars(file)}
    return frozenset(kind for kind, masks in _MASKS.items() if masks & names)


def _of_layers(
    whole: PreTrainedConfig, calls: list[tuple[int, Call]], keep: set[int], kind: str, where: str
) -> list[tuple[int, Call]]:
    """Return the calls in the order of layers; as they came, if layers call more than once.

    keep: layers that keep states.
    """
    config = whole.get_text_config(decoder=True)
    layers = range(getattr(config, "decoder_layers", None) or config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None) or [""] * len(layers)
    shared = [layer for layer in layers if kinds[layer] == "hybrid"]
    if len(calls) == len(shared) and {layer for layer, _ in calls} == {-1}:  # one module's (Zamba 2)
        calls = [(layer, call) for layer, (_, call) in zip(shared, calls, strict=True)]
    called = sorted(layer for layer, _ in calls)
    keep = keep | {layer for layer in layers if kinds[layer] in _KEEP_NOTHING}
    expected = [layer for layer in layers if layer in called or layer not in keep]
    if called == expected:
        return sorted(calls, key=lambda each: each[0])
    if [*dict.fromkeys(called)] == expected:  # differences of two (DiffLlama)
        return calls
    if len(called) == len(expected) and set(called) < set(expected):  # layers gone through again (HRM)
        return calls
    missing = [layer for layer in expected if layer not in called]
    reason = f"layers {missing[:8]} keep something else than keys and values"
    if not calls and not keep:
        reason = "it does not call attention by transformers' interface"
    raise _refused(where, kind, reason)


def _window(
    config: Any, masked: frozenset[str], positions: int, layer: int, call: Call, where: str, kind: str
) -> int:
    """Return how many newest keys a layer sees, 0 for all; windows may be in the mask only.

    A configuration may name a window that the code knows nothing of, as Llama's does not.
    """
    kinds = getattr(config, "layer_types", None)
    of_layer = WINDOWED if kinds is None else kinds[layer]
    if of_layer in _ALL_SEEN:
        window = 0
    elif of_layer in _MASKS:
        name = "sliding_window" if of_layer == WINDOWED else "attention_chunk_size"
        window = call.window
        if of_layer in masked:
            window = (kinds is None and window) or getattr(config, name, None) or 0
    else:
        raise _refused(where, kind, f"layer {layer} is of the kind {of_layer!r}")
    if call.window not in (0, window):
        raise _refused(where, kind, f"layer {layer} sees {call.window} tokens, and {window} by config.json")
    return 0 if window >= positions else window


def _intermediate_size(config: Any) -> int:
    """Return the width of an MLP, by which the engine guesses how long a layer's step takes."""
    for name in ("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size"):
        size = getattr(config, name, None)
        if isinstance(size, int):
            return size
    return 4 * int(config.hidden_size)


def _refused(where: str, kind: str, reason: str) -> ValueError:
    told = f"a model of type {kind!r} cannot run by transformers' code here: {reason}"
    return ValueError(f"{where}: {told}{SEE_TYPES}")

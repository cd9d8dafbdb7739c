"""The shape of any decoder that transformers has: what its layers ask of attention, found by a dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedConfig

from quire.engine.models.config import MAX_GROUP, MAX_HEAD_DIM, ModelConfig
from quire.engine.models.general.attention import Call, Recorder, UnsupportedAttention
from quire.engine.models.general.division.plan import has_plan, has_whole_experts
from quire.engine.models.general.dry_run import build, run_dry
from quire.engine.models.json_fields import Fields, read_json

_UNEQUAL = {"moshi": "its logits differ from transformers' own"}  # as tests.models.models_page finds
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def read_general(folder: Path) -> ModelConfig:
    """Return the shape of the model in a folder. Raises ValueError that says why it cannot run."""
    where = str(folder / "config.json")
    try:
        whole = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"{where}: transformers cannot read it: {error}") from error
    config = whole.get_text_config(decoder=True)
    kind = type(whole).model_type
    if kind in _UNEQUAL:
        raise _refused(where, kind, _UNEQUAL[kind])
    calls, offset, undivided, has_experts = _run_dry(whole, kind, where)
    attention = tuple(call.shape for call in calls)
    head_dim = max(each.head_dim for each in attention)
    if head_dim > MAX_HEAD_DIM:
        raise _refused(where, kind, f"its heads have {head_dim} numbers; kernels take up to {MAX_HEAD_DIM}")
    group = max(each.heads // each.kv_heads for each in attention)
    if group > MAX_GROUP:
        raise _refused(where, kind, f"a KV head serves {group} query heads; kernels take up to {MAX_GROUP}")
    fields = Fields(whole.to_dict(), where)
    generation = folder / "generation_config.json"
    eos = Fields(read_json(generation) or {}, str(generation)).token_ids("eos_token_id")
    positions = getattr(config, "max_position_embeddings", getattr(config, "max_target_positions", None))
    if not isinstance(positions, int):
        raise _refused(where, kind, "its max_position_embeddings are not known")
    return ModelConfig(
        architecture=(whole.architectures or [kind])[0],
        implementation="transformers",
        num_layers=len(calls),
        hidden_size=config.hidden_size,
        num_heads=max(each.heads for each in attention),
        num_kv_heads=max(each.kv_heads for each in attention),
        head_dim=head_dim,
        intermediate_size=_intermediate_size(config),
        vocab_size=config.vocab_size,
        max_position_embeddings=positions - offset,
        dtype=_DTYPES.get(config.dtype or whole.dtype, "float32"),  # type: ignore[arg-type]
        activation="silu",
        norm_eps=0.0,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        eos_token_ids=eos or fields.token_ids("eos_token_id"),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        windows=tuple(
            _window(config, positions, layer, call, where, kind) for layer, call in enumerate(calls)
        ),
        rope=None,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        embedding_size=config.hidden_size,
        attention=attention,
        undivided=undivided,
        has_experts=has_experts,
    )


class _Run(NamedTuple):
    """What a run without weights shows: each layer's attention, and as `StepPositions` has it the offset.

    undivided, has_experts: as `ModelConfig` has them.
    """

    calls: list[Call]
    offset: int
    undivided: str
    has_experts: bool


def _run_dry(whole: PreTrainedConfig, kind: str, where: str) -> _Run:
    recorder = Recorder()
    try:
        model = build(whole)
        positions = run_dry(model, recorder)
    except UnsupportedAttention as error:
        raise _refused(where, kind, str(error)) from error
    except Exception as error:  # modelling code may raise anything
        raise _refused(where, kind, f"a run of its modelling code ends with {error!r}") from error
    config = whole.get_text_config(decoder=True)
    expected = list(range(getattr(config, "decoder_layers", None) or config.num_hidden_layers))
    if sorted(recorder.calls) != expected:
        missing = [layer for layer in expected if layer not in recorder.calls]
        reason = f"layers {missing[:8]} keep something else than keys and values"
        if not recorder.calls:
            reason = "it does not call attention by transformers' interface"
        raise _refused(where, kind, reason)
    if not positions.taken and not positions.told:
        raise _refused(where, kind, "it counts positions by itself, from the first token of a call")
    undivided = "" if has_plan(model) else "it has no plan of how to divide a model of this type"
    calls = [recorder.calls[layer] for layer in expected]
    return _Run(calls, positions.offset, undivided, has_whole_experts(model))


def _window(config: Any, positions: int, layer: int, call: Call, where: str, kind: str) -> int:
    """Return how many newest keys a layer sees, 0 for all; windows may be in the mask only."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        window = call.window or getattr(config, "sliding_window", None) or 0
    elif kinds[layer] == "full_attention":
        window = 0
    elif kinds[layer] == "sliding_attention":
        window = config.sliding_window or 0
    else:
        raise _refused(where, kind, f"layer {layer} is of the kind {kinds[layer]!r}")
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
    return ValueError(f"{where}: a model of type {kind!r} cannot run by transformers' code here: {reason}")

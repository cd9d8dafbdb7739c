"""A model whose forward is transformers' own, with its attention over the paged cache."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast

from quire.engine.models.config import ModelConfig
from quire.engine.models.copies import copies_to
from quire.engine.models.general.attention import NAME, give
from quire.engine.models.general.described import read_described
from quire.engine.models.general.division.divide import Division, divide
from quire.engine.models.general.division.loading import drawing_shares, reading_shares
from quire.engine.models.general.division.shares import Held
from quire.engine.models.general.dry_run import build, decoder_name
from quire.engine.models.general.dummy import draw_matrices, draw_vectors
from quire.engine.models.general.experts import give_experts
from quire.engine.models.general.fusion import fuse
from quire.engine.models.general.index_parts import give_kinds
from quire.engine.models.general.latent import give_latents
from quire.engine.models.general.loading import reading_expanded, reading_whole
from quire.engine.models.general.modules import HeadModule
from quire.engine.models.general.own_attention import adapt, is_indexer, register_classes
from quire.engine.models.general.paged_attention import PagedAttention
from quire.engine.models.general.positions import StepPositions
from quire.engine.models.general.quantised import without
from quire.engine.models.general.rotary import settle
from quire.engine.models.general.states import StepStates, give_states
from quire.engine.models.weight_files import listed, open_weights, weight_files
from quire.kernels.attention.batch import ForwardBatch, of_newest
from quire.kernels.backend import Backend
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.formats.state_cache import StateCache
from quire.kernels.parallel.ranks import Ranks

# Weights that a folder has besides those of a model of its text alone (Llama 4).
_FOR_IMAGES = ("vision_model.", "multi_modal_projector.")
# Masks and tables of positions, which older code kept in files, and the model's own makes.
_BUFFERS = {
    "codegen": r"attn\.causal_mask",
    "gpt2": r"attn\.masked_bias",
    "gpt_bigcode": r"attn\.(masked_)?bias",
    "gpt_neo": r"attn\.attention\.(masked_)?bias",
    "gptj": r"attn\.(masked_)?bias",
    "openai-gpt": r"attn\.bias",
    "xglm": r"embed_positions\.weights",
}


class _Output(BaseModelOutputWithPast):
    """A decoder's output of which only the hidden states are there, whatever else is asked for."""

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands where a causal model has its decoder, and returns what that gave before."""

    hidden: Tensor

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self._stood = (decoder,)  # no part of this

    def __getattr__(self, name: str) -> Any:
        """Return a number that stood there (Falcon H1's scale of logits)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__["_stood"][0], name)
            if isinstance(found, int | float):
                return found
            raise

    @property
    def decoder(self) -> _Given:
        """Return itself: some causal models reach through a wrapper."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        return _Output(last_hidden_state=self.hidden[None])


class GeneralModel:
    """A causal model of transformers: its decoder for `forward`, the rest of it for `part_logits`."""

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        causal: Any,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        ranks: Ranks | None = None,
        splits: frozenset[int] = frozenset(),
    ) -> None:
        """splits: as `Division` has it, of a model that is divided among ranks."""
        self.config = config
        self.backend = backend
        self.ranks = ranks
        self._attention = PagedAttention(config, dtype, device, ranks, splits)
        # Whether kernels choose tokens for all of its indexers, and a graph may hold that.
        self.knows_indexers = give_kinds(causal, is_indexer)
        classifies = config.pooling is not None and config.pooling.labels > 0
        # Of a head for text, `part_logits` knows more than its weight.
        self.head: Tensor | None = _score_weight(causal) if classifies else None
        self.embedding: Tensor = causal.get_input_embeddings().weight
        name = decoder_name(causal)
        self._decoder = getattr(causal, name)
        self._positions = StepPositions(self._decoder)
        self.fusion = fuse(causal, self._decoder, config, backend, self._decode, max_model_len, ranks)
        give(causal, self._attention)
        self._states = StepStates(config.group_of_states)
        give_states(causal, config.states, self._states)
        head = causal.get_output_embeddings()
        if type(head) is nn.Linear and head.bias is None:
            head.forward = HeadModule(head.weight.data, backend)
        self._given = _Given(self._decoder)
        self._no_token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        setattr(causal, name, self._given)
        self._causal = causal

    def forward(
        self,
        batch: ForwardBatch,
        caches: list[LayerCache],
        states: StateCache | None = None,
    ) -> Tensor:
        """Compute the batch's tokens over the layers' caches -> hidden [T, H], final norm applied.

        [R, H] of `batch.newest` where that is given. states: of the layers that keep some.
        """
        if states is not None:
            self._states.begin(batch, states)
        if self.fusion.decoder is not None:
            return self.fusion.decoder.run(batch, caches)
        self._attention.begin(replace(batch, newest=None), caches)
        positions = batch.positions.long().clamp(min=0)  # padding has −1, which no table of positions has
        return of_newest(self._decode(batch.tokens.long(), positions), batch.newest)

    def _decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Run the decoder's own code on tokens [T] at positions [T] -> [T, H]."""
        output = self._decoder(input_ids=tokens[None], use_cache=False, **self._positions.begin(positions))
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def part_logits(self, hidden: Tensor) -> Tensor:
        """Compute hidden [S, H] -> [S, V / ranks], with whatever the model does to its logits."""
        self._given.hidden = hidden
        logits: Tensor = self._causal(input_ids=self._no_token.expand(1, len(hidden))).logits[0]
        return logits.contiguous()


def load_general(
    folder: Path,
    config: ModelConfig,
    backend: Backend,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    dummy_seed: int | None,
    ranks: Ranks | None = None,
) -> tuple[GeneralModel, int]:
    """Load the model on `device` in `dtype`; return its weights' bytes, too.

    dummy_seed: reads no weights, but draws them. ranks: those that it is divided among, config being that of
    one. Raises ValueError for missing and unknown weights, by name.
    """
    pooling = config.pooling
    auto: Any = AutoModelForCausalLM
    if pooling is not None and pooling.labels:
        auto = AutoModelForSequenceClassification
    splits: frozenset[int] = frozenset()
    described = _described(folder, config)
    register_classes(described.model_type)
    if dummy_seed is None:
        for path in weight_files(folder):
            open_weights(path)
    if ranks is not None:
        causal, splits = _load_shares(folder, auto, config, device, dtype, dummy_seed, ranks)
    elif dummy_seed is None:
        causal = _load_whole(folder, auto, config, device, dtype, described)
        _leave_files(causal, device)
    else:
        with torch.device(device):
            causal = auto.from_config(
                described,
                dtype=dtype,
                attn_implementation=NAME,
                experts_implementation=_experts(device),
            )
        draw_matrices(causal, dummy_seed, device)
        draw_vectors(causal, dummy_seed, device, {})
    causal.eval().requires_grad_(False)
    adapt(causal)
    settle(causal, max_model_len)
    if ranks is None:
        give_latents(causal)
    if device.type == "cuda":
        give_experts(causal)
    weights = {weight.data_ptr(): weight.nbytes for weight in causal.parameters()}
    model = GeneralModel(config, backend, causal, dtype, device, max_model_len, ranks, splits)
    return model, sum(weights.values())


def _described(folder: Path, config: ModelConfig) -> PreTrainedConfig:
    """Return the folder's configuration, whose head and embedding are tied if they still are."""
    described = read_described(folder)
    if config.adapter is not None and config.adapter.unties:
        for part in (described, described.get_text_config(decoder=True)):
            part.tie_word_embeddings = False
    return described


def _load_whole(
    folder: Path,
    auto: Any,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    described: PreTrainedConfig,
) -> Any:
    """Load the causal model of a configuration into host memory."""
    built = build(described, auto)
    cls, shape = type(built), without(built.config)
    given: dict[str, Any] = {
        "config": shape,
        "dtype": dtype,
        "attn_implementation": NAME,
        "experts_implementation": _experts(device),
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # so that they are told
    }
    if config.quantised is None and config.adapter is None:
        given |= {"local_files_only": True, "use_safetensors": True}
        causal, told = reading_whole(cls, folder).from_pretrained(folder, **given)  # type: ignore[attr-defined]
    else:
        reader = reading_expanded(cls, weight_files(folder), config, dtype)
        causal, told = reader.from_pretrained(None, state_dict={}, **given)  # type: ignore[attr-defined]
    _check(folder, told, config, described)
    causal.__class__ = cls
    return causal


def _leave_files(causal: Any, device: torch.device) -> None:
    """Copy weights to the device, out of the folder's files, which are mapped and may be written meanwhile.

    On a CPU they are copied, too: where a number stands in a file would change last bits, by its alignment.
    """
    copy = copies_to(device)
    for weight in (*causal.parameters(), *causal.buffers()):
        copied = torch.empty_like(weight.data, device=device)
        copy(copied, weight.data)
        weight.data = copied


def _load_shares(
    folder: Path,
    auto: Any,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    dummy_seed: int | None,
    ranks: Ranks,
) -> tuple[Any, frozenset[int]]:
    """Load this rank's shares; return the causal model, and as `Division` has it `splits`."""
    found: list[Division] = []

    def prepare(model: Any) -> dict[str, Held]:
        give_latents(model)  # while all heads are there: those of a rank alone may keep less than a latent
        found.append(divide(model, config, ranks))
        return found[0].held

    described = _described(folder, config)
    undivided = build(described, auto)
    cls, shape = type(undivided), without(undivided.config)
    given: dict[str, Any] = {
        "config": shape,
        "dtype": dtype,
        "attn_implementation": NAME,
        "experts_implementation": _experts(device),
    }
    if dummy_seed is None:
        reader = reading_shares(cls, prepare, weight_files(folder), config, dtype)
        causal, told = reader.from_pretrained(  # type: ignore[attr-defined]
            None, state_dict={}, output_loading_info=True, ignore_mismatched_sizes=True, **given
        )
        _check(folder, told, config, described)
        _leave_files(causal, device)
    else:
        drawing = drawing_shares(cls, prepare, dummy_seed, device)
        causal = drawing.from_pretrained(None, state_dict={}, **given)  # type: ignore[attr-defined]
        draw_vectors(causal, dummy_seed, device, found[0].held)
    causal.__class__ = cls
    if ranks.rank:
        parameters = dict(causal.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name in found[0].added_once:
                parameters[name].zero_()
    return causal.to(device), found[0].splits


def _score_weight(classifier: Any) -> Tensor:
    """Return the head [labels, H] of a classifier. Raises ValueError if it has another."""
    score = getattr(classifier, "score", None)
    if not isinstance(score, nn.Linear) or score.bias is not None:
        raise ValueError(f"{type(classifier).__name__} has no score.weight, which is all that a head may be")
    return score.weight


def _experts(device: torch.device) -> str:
    """Return what computes experts: kernels, or on a CPU a loop over those that are asked."""
    return NAME if device.type == "cuda" else "eager"


def _is_spare(name: str, described: PreTrainedConfig) -> bool:
    """Return whether a weight of a folder's files is one that its text is not computed by."""
    if hasattr(described, "vision_config") and name.startswith(_FOR_IMAGES):
        return True
    buffers = _BUFFERS.get(described.model_type)
    if buffers is not None and re.search(rf"(^|\.){buffers}$", name):
        return True
    config = described.get_text_config(decoder=True)
    layers = config.num_hidden_layers
    guessing = range(layers, layers + (getattr(config, "num_nextn_predict_layers", None) or 0))
    return name.startswith(tuple(f"model.layers.{layer}." for layer in guessing))  # further tokens (V3)


def _check(folder: Path, loaded: dict[str, Any], config: ModelConfig, described: PreTrainedConfig) -> None:
    told = SimpleNamespace(**loaded)
    if config.pooling is not None and not config.pooling.labels:  # its head is not used, and may not be there
        told.missing_keys = set(told.missing_keys) - {"lm_head.weight", "lm_head.bias", "embed_out.weight"}
    told.unexpected_keys = {name for name in told.unexpected_keys if not _is_spare(name, described)}
    problems = [f"{name} is missing" for name in sorted(told.missing_keys)]
    problems += [f"{name} is no weight of the model" for name in sorted(told.unexpected_keys)]
    problems += [
        f"{name} has shape {[*found]}, but config.json asks for {[*wanted]}"
        for name, found, wanted in sorted(told.mismatched_keys)
    ]
    if problems:
        raise ValueError(f"{folder} does not fit its config.json: {listed(problems)}")

"""How a model's folder has its tokens chosen: the default of requests that do not say. Imports no torch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.messages import SamplingParams
from quire.engine.models.json_fields import Fields, read_json

logger = logging.getLogger("quire.engine")
FILE = "generation_config.json"
_PARTS = ("decoder", "generator", "text_config")
_WRITTEN_OUT = 50  # a top_k of transformers' own, which old files have beside those that somebody chose
SUPPRESSED = -100.0  # the bias of a token that is not to be chosen
# What it may say besides that changes which tokens are chosen or how many, and values that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "typical_p": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1, 1.0),
    "diversity_penalty": (0, 0.0),
    "min_length": (0,),
    "num_return_sequences": (1,),
    **dict.fromkeys(
        ("bad_words_ids", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
         "guidance_scale", "min_new_tokens", "penalty_alpha", "sequence_bias",
         "exponential_decay_length_penalty", "watermarking_config", "dola_layers", "top_h", "stop_strings",
         "max_time", "token_healing", "force_words_ids", "constraints"), ()
    ),
}  # fmt: skip


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None: `SamplingParams` has the default. max_tokens: where a request names no limit."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = None

    @property
    def said(self) -> dict[str, Any]:
        """Return those of how a token is chosen that the folder has, by the name of the request's field."""
        each = {name: getattr(self, name) for name in self.__struct_fields__ if name != "max_tokens"}
        return {name: value for name, value in each.items() if value is not None}

    def params(self) -> SamplingParams:
        """Return what a request has that says nothing: 16 tokens, unless the folder names a limit."""
        limited = self.said if self.max_tokens is None else self.said | {"max_tokens": self.max_tokens}
        return SamplingParams(**limited)


def check_generation_config(source: str) -> None:
    """Raise ValueError unless there is what `--generation-config` names; of `auto` a model knows."""
    if source not in ("auto", "vllm") and not (Path(source) / FILE).is_file():
        raise ValueError(f"--generation-config: {source} has no {FILE}; give auto, vllm or a folder that has")


def read_sampling_defaults(source: str, model: Path, vocab_size: int) -> SamplingDefaults:
    """Return what a folder's generation_config.json says; `source` as `--generation-config` has it.

    A model's folder without one may say so in its config.json, as older ones do. Of suppressed tokens those
    that the model does not have are left out: they are never chosen. Raises ValueError that
    names the file, the field and what it may be.
    """
    if source == "vllm":
        return SamplingDefaults()
    check_generation_config(source)
    path = (model if source == "auto" else Path(source)) / FILE
    raw = read_json(path)
    if raw is None:
        path = model / "config.json"
        raw = _in_configuration(read_json(path) or {})
    ignored = [name for name, neutral in _NEUTRAL.items() if raw.get(name) not in (None, False, *neutral)]
    if ignored:
        logger.warning("%s: not applied to requests: %s", path, ", ".join(ignored))
    told = Fields(raw, str(path)).token_ids("suppress_tokens")
    suppressed = [token for token in told if 0 <= token < vocab_size]
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found: dict[str, Any] = {name: raw[name] for name in names if raw.get(name) is not None}
    if isinstance(top_k := found.get("top_k"), int):
        found["top_k"] = max(top_k, 0)  # −1: off
    found |= {"logit_bias": dict.fromkeys(suppressed, SUPPRESSED)} if suppressed else {}
    found |= {"max_tokens": raw["max_new_tokens"]} if raw.get("max_new_tokens") is not None else {}
    try:
        defaults = msgspec.convert(found, SamplingDefaults)
        SamplingParams(**found)  # knows what each may be
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: {error}; mend it, or give --generation-config vllm to ignore it"
        ) from error
    return defaults


def _in_configuration(raw: dict[str, Any]) -> dict[str, Any]:
    """Return what a config.json says of a model's text, or its part for text, where transformers looks."""
    part: dict[str, Any] = next((raw[name] for name in _PARTS if isinstance(raw.get(name), dict)), {})
    said = part | {name: value for name, value in raw.items() if value is not None}
    if said.get("top_k") == _WRITTEN_OUT:
        del said["top_k"]
    return said

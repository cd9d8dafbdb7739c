"""What adapter_config.json says of a LoRA adapter that PEFT wrote. Imports neither torch nor transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.models.json_fields import Fields, read_json

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
# How numbers were first drawn, where the base model's weights stay as they are.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
# What an adapter may be with its reason to be refused: its answers are not those of merged weights.
_REFUSED = {
    "layer_replication": "it computes layers of the base model more than once",
    "alora_invocation_tokens": "it is to act on tokens after an invocation only (aLoRA)",
    "arrow_config": "it chooses among adapters for each token (Arrow)",
    "kasa_config": "it takes singular values from the base model's weights (KaSA)",
    "monteclora_config": "its weights are sampled (MonteCLoRA)",
    "use_bdlora": "its matrices are of blocks (BD-LoRA)",
    "use_qalora": "its inputs are pooled in groups (QA-LoRA)",
    "target_parameters": "its matrices are of parameters that stack experts, and not of linear layers",
}
# What changes how it was trained or which modules it has, of which its tensors tell.
_NEEDLESS = {
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_bias", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type", "velora_config",
}  # fmt: skip
_READ = {
    "alpha_pattern", "ensure_weight_tying", "init_lora_weights", "lora_alpha", "modules_to_save", "peft_type",
    "r", "rank_pattern", "trainable_token_indices", "use_dora", "use_rslora",
}  # fmt: skip
MERGE = "merge it with peft (merge_and_unload), and serve that folder"


@dataclass(frozen=True, slots=True)
class Adapter:
    """How an adapter's tensors change those of its base model."""

    folder: Path
    rank: int
    alpha: float
    by_root: bool  # products are scaled by alpha / √rank, and not alpha / rank (rsLoRA, Kalajdzievski 2023)
    dora: bool  # outputs have a length of their own (DoRA, Liu et al. 2024)
    ranks: tuple[tuple[str, int], ...]  # of modules that a pattern fits
    alphas: tuple[tuple[str, float], ...]
    saved: tuple[str, ...]  # ends of names of modules that it has whole, as copies of its own
    tokens: tuple[tuple[str, tuple[int, ...]], ...]  # whose rows it has, by the end of a module's name
    keeps_tied: bool  # tied weights were trained as one
    made_for: str  # the name of its base model; "" if it names none
    unties: bool = False  # of weights that the base model has tied, one is changed and the other is not

    def rank_of(self, module: str) -> int:
        return _of_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return by what the product of a module's two matrices is multiplied."""
        rank, alpha = self.rank_of(module), _of_pattern(self.alphas, module, self.alpha)
        return float(alpha / rank**0.5 if self.by_root else alpha / rank)

    def saves(self, module: str) -> bool:
        """Return whether it has a copy of its own of a module."""
        return any(module.endswith(end) for end in self.saved)

    def tokens_of(self, module: str) -> tuple[int, ...] | None:
        """Return the tokens of which a module's rows are its own, None if it names none; "" is any module."""
        return next((tokens for end, tokens in self.tokens if module.endswith(end)), None)


def is_adapter(folder: Path) -> bool:
    """Return whether a folder describes an adapter, and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def adapter_file(folder: Path) -> Path:
    """Return the file of an adapter's tensors. Raises ValueError if there is none that can be read."""
    if (folder / FILE).is_file():
        return folder / FILE
    pickles = sorted(path.name for path in folder.glob("adapter_model.*"))
    hint = f" (it has {', '.join(pickles)})" if pickles else ""
    raise ValueError(
        f"{folder} has no {FILE}{hint}. Other formats are never opened; convert with peft: "
        "PeftModel.from_pretrained(…).save_pretrained(…)"
    )


def base_of(folder: Path) -> tuple[str, str | None]:
    """Return the model that an adapter was made for, as it names it, and the revision if it names one.

    Raises ValueError if it names no model.
    """
    fields = _fields(folder)
    name, revision = fields.raw.get("base_model_name_or_path"), fields.raw.get("revision")
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"{fields.where} has no base_model_name_or_path: name the model, and give the adapter with "
            f"--lora {folder}"
        )
    if revision is not None and not isinstance(revision, str):
        raise fields.error("revision", revision, "a revision of the base model, or null")
    return name, revision


def read_adapter(folder: Path) -> Adapter:
    """Return what adapter_config.json says. Raises ValueError that names what cannot be merged."""
    fields = _fields(folder)
    raw, where = fields.raw, fields.where
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{where}: peft_type is {kind!r}; of adapters only LORA can be merged here")
    for name, reason in _REFUSED.items():
        if raw.get(name):
            raise ValueError(f"{where}: {name} is set: {reason}. Adapters with it are not there yet")
    if raw.get("init_lora_weights", True) not in _INITS:
        raise ValueError(
            f"{where}: init_lora_weights is {raw['init_lora_weights']!r}: peft changes the base model's "
            "weights before it adds such an adapter. Save it with path_initial_model_for_weight_conversion, "
            f"or {MERGE}"
        )
    unknown = [name for name, value in raw.items() if name not in {*_NEEDLESS, *_READ, *_REFUSED} and value]
    if unknown:
        raise ValueError(
            f"{where}: {', '.join(unknown)} is not known here, and may change what the adapter does: {MERGE}"
        )
    return Adapter(
        folder=folder,
        rank=fields.size("r", 8),
        alpha=fields.number("lora_alpha", 8),
        by_root=fields.flag("use_rslora", False),
        dora=fields.flag("use_dora", False),
        ranks=tuple(
            (name, Fields(found, where).size(name)) for name, found in _patterns(fields, "rank_pattern")
        ),
        alphas=tuple(
            (name, Fields(found, where).number(name, 8)) for name, found in _patterns(fields, "alpha_pattern")
        ),
        saved=_names(fields, "modules_to_save"),
        tokens=_tokens(fields),
        keeps_tied=fields.flag("ensure_weight_tying", False),
        made_for=str(raw.get("base_model_name_or_path") or ""),
    )


def _fields(folder: Path) -> Fields:
    raw = read_json(folder / CONFIG)
    if raw is None:
        raise ValueError(f"{folder} has no {CONFIG}; give a folder that peft's save_pretrained wrote")
    return Fields(raw, str(folder / CONFIG))


def _patterns(fields: Fields, name: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yield each pattern of modules' names with the object that has it. Raises ValueError if one is none."""
    found = fields.raw.get(name) or {}
    if not isinstance(found, dict):
        raise fields.error(name, found, "an object of numbers by patterns of modules' names")
    for pattern in found:
        try:
            re.compile(pattern)
        except re.error as error:
            raise fields.error(name, pattern, f"a regular expression ({error})") from error
        yield pattern, found


def _names(fields: Fields, name: str) -> tuple[str, ...]:
    found = fields.raw.get(name) or []
    if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
        raise fields.error(name, found, "a list of modules' names, or null")
    return tuple(found)


def _tokens(fields: Fields) -> tuple[tuple[str, tuple[int, ...]], ...]:
    name = "trainable_token_indices"
    found = fields.raw.get(name) or {}
    by_module = {"": found} if isinstance(found, list) else found
    if not isinstance(by_module, dict):
        raise fields.error(name, found, "a list of tokens, or an object of such lists by modules' names")
    for tokens in by_module.values():
        if not isinstance(tokens, list) or any(type(each) is not int or each < 0 for each in tokens):
            raise fields.error(name, tokens, "a list of tokens")
        if len({*tokens}) != len(tokens):
            raise fields.error(name, tokens, "a list of tokens that has each once")
    return tuple((module, tuple(tokens)) for module, tokens in by_module.items())


def _of_pattern(patterns: tuple[tuple[str, Any], ...], module: str, otherwise: Any) -> Any:
    """Return the number of the first pattern that fits the end of a module's name, as peft matches them."""
    fitting = (number for pattern, number in patterns if re.match(rf"(.*\.)?({pattern})$", module))
    return next(fitting, otherwise)

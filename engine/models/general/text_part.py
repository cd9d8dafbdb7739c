"""The text of models that see or hear besides (Mistral Small 3, Qwen3-VL, Kimi K2.5, MiniMax M3 …).

Transformers has no causal model of such a type, but one that is given images and sounds, too. What computes
its text is a part of that, which is made here into a causal model of its own. Transformers' automatic class
then finds it by the whole configuration, and its loader takes the part's weights out of the whole's files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    WeightRenaming,
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutput
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

_TOKENS, _LABELS = 3, 5  # of what tells whether two models make the same of hidden states
_GIVEN: dict[type, _Given] = {}  # by classes of whole configurations: what was made for the last one


@dataclass(frozen=True, slots=True)
class _Given:
    """asked: the fields of the whole configuration. others: how names of all that is left out begin."""

    asked: dict[str, Any]
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a whole model has what computes its text, and its head; and how names of all its else begin."""

    decoder: str
    head: str
    others: tuple[str, ...]


def give_text_class(config: PreTrainedConfig) -> None:
    """Have transformers find a causal model by a configuration of one that does more than text.

    Leaves it as it is if transformers has one, or no part of the whole is what computes its text. What was
    made for another configuration of the type is forgotten: its numbers tell which class computes a text.
    """
    kind, text, asked = type(config), config.get_text_config(decoder=True), config.to_dict()
    given = _GIVEN.get(kind)
    if given is not None and given.asked == asked:
        _tell(text, config)
        return
    if given is not None:
        del _GIVEN[kind], AutoModelForCausalLM._model_mapping._extra_content[kind]
    if kind in AutoModelForCausalLM._model_mapping:
        return
    mappings = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)
    whole: Any = next((mapping[kind] for mapping in mappings if kind in mapping), None)
    if whole is None:
        return
    _tell(text, config)
    try:
        with torch.device("meta"), torch.inference_mode(False):
            model = whole(config)
    except Exception:  # its other parts may ask for packages, or for what this configuration has not
        return
    place = _placed(model, text)
    if place is None:
        return
    cls = _class_of_text(whole, model, config, place) if place.others else whole
    if cls is not None:
        _GIVEN[kind] = _Given(asked, place.others)
        AutoModelForCausalLM._model_mapping.register(kind, cls, exist_ok=True)


def _class_of_text(whole: Any, model: nn.Module, config: PreTrainedConfig, place: _Place) -> Any:
    """Return the class that computes a whole model's text, of which this is one; None: none is known to."""
    text = config.get_text_config(decoder=True)
    decoder = type(model.get_submodule(place.decoder))
    _leave_out(model, place)
    head = {*model.get_submodule(place.head).state_dict()}
    wanted = _logits(model, place.decoder, place.head, text.hidden_size)
    if wanted is None:
        return None
    for cls in _text_classes(whole, type(text), decoder):
        if _makes(cls, text, wanted, head):
            _give_names(cls, whole, config, text, place)
            return cls
    return _without(whole, place)


def is_beside_text(name: str, config: PreTrainedConfig) -> bool:
    """Return whether a weight is one of a whole model that its text is not computed by."""
    given = _GIVEN.get(type(config))
    return given is not None and name.startswith(given.others)


def _placed(model: nn.Module, text: PreTrainedConfig) -> _Place | None:
    """Return where a model has its text's decoder and head; None: it has no such parts."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    names = {part: name for name, part in model.named_modules()}
    of_text = (name for part, name in names.items() if name and _is_decoder(part, type(text)))
    place = next(of_text, None)
    if not place or head not in names:
        return None
    kept = f"{place}.", f"{names[head]}."
    others = {_beginning(name, kept) for name in model.state_dict() if not name.startswith(kept)}
    return _Place(place, names[head], tuple(sorted(others)))


def _is_decoder(part: nn.Module, text: type[PreTrainedConfig]) -> bool:
    """Return whether a part takes tokens of a text with such a configuration, and has no head."""
    if not isinstance(part, PreTrainedModel) or type(part.config) is not text:
        return False
    return part.get_output_embeddings() is None and isinstance(getattr(part, "embed_tokens", None), nn.Module)


def _beginning(name: str, kept: tuple[str, ...]) -> str:
    """Return as much of a weight's name as tells it from all that is kept."""
    parts = name.split(".")
    beginnings = (".".join(parts[:count]) + "." for count in range(1, len(parts)))
    return next((each for each in beginnings if not any(own.startswith(each) for own in kept)), name)


def _leave_out(model: nn.Module, place: _Place) -> None:
    """Take from a model the parts that its text is not computed by."""
    for name in place.others:
        if name.endswith("."):
            model.set_submodule(name.removesuffix("."), nn.Identity())


class _Output(BaseModelOutputWithPast):
    """What a decoder gives: hidden states, and nothing else that a model may look for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Stub(nn.Module):
    """Stands for a decoder: gives the same numbers for any text, and notes what it is called with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed_tokens = nn.Embedding(
            _TOKENS, width, _weight=torch.randn(_TOKENS, width, generator=generator)
        )
        self.hidden = torch.randn(1, _TOKENS, width, generator=generator)
        self.given: dict[str, Any] = {}

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(self, input_ids: Any = None, **given: Any) -> _Output:
        self.given = given | {"input_ids": input_ids}
        return _Output(last_hidden_state=self.hidden)

    @property
    def is_given_text(self) -> bool:
        """Return whether it was called with tokens or their embeddings, where they stand, and no more."""
        given, tokens = dict(self.given), torch.arange(_TOKENS)[None]
        ids, embeddings = given.pop("input_ids"), given.pop("inputs_embeds", None)
        positions = given.pop("position_ids", tokens)
        if any(not isinstance(value, bool | int | None) for value in given.values()):  # such as masks
            return False
        if positions is not None and not torch.equal(positions, tokens.expand_as(positions)):
            return False
        if embeddings is None:
            return torch.equal(ids, tokens)
        return ids is None and torch.equal(embeddings, self.embed_tokens(tokens))


def _logits(model: nn.Module, decoder: str, head: str, width: int) -> Tensor | None:
    """Return what a model makes of a decoder's hidden states; None: it gives that more than text."""
    stub = _Stub(width)
    generator = torch.Generator().manual_seed(1)
    linear = nn.Linear(width, _LABELS, bias=False, device="meta")
    linear.weight = nn.Parameter(torch.randn(_LABELS, width, generator=generator) * width**-0.5)
    tokens = torch.arange(_TOKENS)[None]
    model.eval()
    try:
        for name, part in ((decoder, stub), (head, linear)):
            model.set_submodule(name, part)
        logits: Tensor = model(input_ids=tokens, position_ids=tokens, use_cache=False).logits
        return logits if stub.is_given_text else None
    except Exception:  # its code looks at something else
        return None


def _makes(cls: Any, text: PreTrainedConfig, wanted: Tensor, head: set[str]) -> bool:
    """Return whether a class of causal models makes such logits of the hidden states that `_Stub` gives.

    head: names of the weights that it is to have.
    """
    try:
        with torch.device("meta"):
            model = cls._from_config(text)
        if {*model.lm_head.state_dict()} != head:
            return False
    except Exception:  # it asks for what such a text has not
        return False
    found = _logits(model, cls.base_model_prefix, "lm_head", text.hidden_size)
    return found is not None and torch.equal(wanted, found)


def _without(whole: Any, place: _Place) -> Any:
    """Return a whole model's class without what its text is not computed by."""

    def init(self: Any, *given: Any, **others: Any) -> None:
        whole.__init__(self, *given, **others)
        _leave_out(self, place)

    return type(whole.__name__, (whole,), {"__init__": init, "__module__": whole.__module__})


def _text_classes(whole: Any, text: type[PreTrainedConfig], decoder: Any) -> Iterator[Any]:
    """Yield classes of causal models that may compute a whole model's text."""
    if text in AutoModelForCausalLM._model_mapping:
        causal: Any = AutoModelForCausalLM._model_mapping[text]
        yield _of_whole(f"{causal.__name__}Of{whole.__name__}", causal, text)
    yield _of_whole(f"{decoder.__name__}Of{whole.__name__}", _with_head(decoder, text), text)


def _of_whole(name: str, base: Any, text: type[PreTrainedConfig]) -> Any:
    """Return a class under a name of its own that is given a whole configuration, or its text's."""

    def from_config(cls: Any, config: PreTrainedConfig, **given: Any) -> Any:
        part = config if isinstance(config, text) else config.get_text_config(decoder=True)
        return base._from_config.__func__(cls, part, **given)

    values = {"_from_config": classmethod(from_config), "__module__": base.__module__}
    return type(name, (base,), values)


def _tell(text: Any, config: Any) -> None:
    """Tell a configuration of text what only the whole says of its head and its numbers."""
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    if text.dtype is None:
        text.dtype = config.dtype


def _with_head(decoder: Any, text: type[PreTrainedConfig]) -> Any:
    """Return a class of causal models of a decoder of which transformers has none."""
    family = decoder.__mro__[1]

    def init(self: Any, config: PreTrainedConfig) -> None:
        family.__init__(self, config)
        self.model = decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self: Any, input_ids: Any = None, **given: Any) -> CausalLMOutput:
        given.pop("logits_to_keep", None)
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids=input_ids, **given)[0]))

    values = {
        "__init__": init,
        "forward": forward,
        "base_model_prefix": "model",
        "config_class": text,
        "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
        "_tp_plan": {"lm_head": "colwise_gather_output"},
        "__module__": family.__module__,
    }
    return type(f"{decoder.__name__}Causal", (family, GenerationMixin), values)


def _give_names(
    cls: Any, whole: Any, config: PreTrainedConfig, text: PreTrainedConfig, place: _Place
) -> None:
    """Tell transformers' loader what the part's weights are called in files of the whole."""
    prefix = cls.base_model_prefix
    found = _mapping(whole.__name__, config.model_type)
    found.append(WeightRenaming(rf"^{re.escape(place.decoder)}\.", f"{prefix}."))
    found.append(WeightRenaming(rf"^{re.escape(place.head)}\.", "lm_head."))
    found += _mapping(cls.__mro__[1].__name__, text.model_type)
    register_checkpoint_conversion_mapping(cls.__name__, found, overwrite=True)


def _mapping(name: str, kind: str) -> list[Any]:
    by_name = get_checkpoint_conversion_mapping(name)
    found: list[Any] = by_name or get_checkpoint_conversion_mapping(kind) or []
    return found

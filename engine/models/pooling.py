"""How a model makes one vector of a whole prompt, as its folder says. Imports neither torch nor transformers.

A folder may say so by the files of sentence-transformers, which vLLM reads too, or by its architecture.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from quire.engine.errors import FieldError
from quire.engine.models.json_fields import Fields, read_json
from quire.engine.models.pooled_texts import SETTINGS, PooledTexts, read_pooled_texts
from quire.engine.models.projection import Projection, read_projection
from quire.engine.models.sentence_modules import SentenceModules, read_modules

Runner = Literal["auto", "generate", "pooling"]
PoolingMode = Literal["first", "max", "mean", "mean_sqrt", "weighted", "last"]
Activation = Literal["none", "sigmoid"]
ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]

CAUSAL = ("ForCausalLM", "LMHeadModel")
CLASSIFIER = "ForSequenceClassification"
_NOT_CAUSAL = {"is_causal": False, "use_bidirectional_attention": True, "use_bidirectional_attn": True}
_ENCODERS = re.compile(
    "(?i)bert(?!decoder)|electra|mpnet|roformer|longformer|bigbird|xlnet|funnel|luke|t5|bart"
)
_CAUSAL_ONLY = (
    ", whose tokens see those after them; models here see only what is before: take a decoder that was "
    "trained to embed or to rank, such as Qwen3-Embedding"
)
_MODES: dict[str, PoolingMode] = {
    "cls": "first",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "weightedmean": "weighted",
    "lasttoken": "last",
}
# As older folders name them, in the order in which vectors of several stand one after the other.
_FLAGS: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt",
    "pooling_mode_weightedmean_tokens": "weighted",
    "pooling_mode_lasttoken": "last",
}
_PROBLEM_TYPES: dict[Any, ProblemType] = {name: name for name in get_args(ProblemType)}
_ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "none"}


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """Which hidden states the vector comes from, and what it goes through afterwards.

    modes: what is taken of a prompt's hidden states; of several the vectors stand one after the other.
    """

    modes: tuple[PoolingMode, ...] = ("last",)
    projections: tuple[Projection, ...] = ()  # that the vector goes through, one after the other
    normalize: bool = False  # to length 1, unless a request says otherwise
    labels: int = 0  # of a classification head; 0: the hidden state is the vector
    names: tuple[str, ...] = ()  # of the labels
    label_tokens: tuple[
        int, ...
    ] = ()  # whose logit is the score, less that of the second; none: a head is there
    activation: Activation = "none"  # of a score that the head gives, likewise
    problem_type: ProblemType | None = None  # that a head was trained for, as transformers calls it
    matryoshka: bool = False  # whether the vector's beginning is a vector, too
    dimensions: tuple[int, ...] = ()  # lengths that such a beginning may have; none: any
    usual_dimensions: int = 0  # of the beginning that a request has which names no length; 0: all of it
    texts: PooledTexts = PooledTexts()
    padding: int | None = None  # the token at a text's end that a classification head does not look at

    def checked_dimensions(self, asked: int | None, size: int) -> int | None:
        """Return how many numbers of a vector of `size` are wanted, None: all. Raises FieldError."""
        usual = min(self.usual_dimensions or size, size)
        if asked is None:
            asked = usual
        if asked == size:
            return None
        if asked == usual:
            return usual
        if not self.matryoshka:
            raise FieldError(
                "dimensions",
                f"dimensions is {asked}, but of this model's {size} none can be left out: it was not trained "
                "for that. If it was, say so in its config.json by is_matryoshka or matryoshka_dimensions",
            )
        if asked > size or asked < 1 or (self.dimensions and asked not in self.dimensions):
            what = f"one of {', '.join(map(str, self.dimensions))}" if self.dimensions else f"1 to {size}"
            raise FieldError("dimensions", f"dimensions must be {what}, got {asked}")
        return asked

    @property
    def class_activation(self) -> Literal["none", "sigmoid", "softmax"]:
        """Return what makes probabilities of a head's numbers, as transformers' pipeline has it."""
        if self.problem_type == "regression":
            return "none"  # they are no probabilities
        if self.labels == 1 or self.problem_type == "multi_label_classification":
            return "sigmoid"
        return "sigmoid" if self.activation == "sigmoid" and self.problem_type is None else "softmax"

    @property
    def needs_all(self) -> bool:
        """Return whether the hidden states of more tokens than the newest are wanted, which no cache has."""
        return self.modes != ("last",)

    def vector_size(self, hidden_size: int) -> int:
        """Return how many numbers a vector has that is not of a head.

        Raises ValueError that names a projection which takes another number than there is.
        """
        size = len(self.modes) * hidden_size
        for projection in self.projections:
            if projection.in_features != size:
                raise ValueError(
                    f"{projection.path}/config.json: in_features is {projection.in_features}, but the vector "
                    f"before it has {size} numbers"
                )
            size = projection.out_features
        return size


def read_pooling(folder: str | Path, runner: Runner = "auto") -> Pooling | None:
    """Return how the model in a folder pools; None if it generates text.

    Raises ValueError where it can do neither, or not what `runner` asks for.
    """
    folder = Path(folder)
    where = str(folder / "config.json")
    raw = read_json(folder / "config.json") or {}
    name = architecture_of(raw)
    modules = read_modules(folder)
    headless = causal_name(name) != name
    if runner == "generate":
        if headless:
            raise ValueError(f"{where}: {name} has no head for text: leave out --runner, or give pooling")
        return None
    if runner == "auto" and not headless and modules is None:
        return None
    if _ENCODERS.search(name):
        raise ValueError(f"{where}: {name} is an encoder{_CAUSAL_ONLY}")
    for field, value in _NOT_CAUSAL.items():
        if raw.get(field) is value:
            raise ValueError(f"{where}: {field} is {str(value).lower()}, so it is an encoder{_CAUSAL_ONLY}")
    parts = SentenceModules(folder, ()) if modules is None else modules
    parts.check()
    pools, answers = parts.config("Pooling"), parts.config("LogitScore")
    embeds = not name.endswith(CLASSIFIER) and answers is None
    projections = tuple(read_projection(folder, path) for path in parts.paths("Dense"))
    if projections and not embeds:
        raise ValueError(f"{parts.file}: Dense is not supported of a model with a head that scores")
    pools_prompt = pools is None or pools.flag("include_prompt", True)
    module = next(iter(parts.paths("Transformer")), None)
    module_folder = None if module is None else folder / module
    texts = read_pooled_texts(folder, module_folder, embeds=embeds, pools_prompt=pools_prompt)
    fields = Fields(raw, where)
    if name.endswith(CLASSIFIER):
        return _classifier(folder, fields, texts)
    if answers is not None:
        tokens = (*answers.token_ids("true_token_id"), *answers.token_ids("false_token_id"))
        if not answers.has("true_token_id") or len(tokens) > 2:
            raise answers.error("true_token_id", answers.raw.get("true_token_id"), "a token id")
        activation = _activation(folder, raw, 1)
        return Pooling(labels=1, label_tokens=tokens, activation=activation, texts=texts)
    matryoshka, dimensions = _matryoshka(fields)
    file = folder / SETTINGS
    settings = Fields(read_json(file) or {}, str(file)) if modules is not None else Fields({}, "")
    return Pooling(
        modes=("last",) if pools is None else _pooling_modes(pools),
        projections=projections,
        normalize=modules is None or "Normalize" in parts.kinds,
        matryoshka=matryoshka,
        dimensions=dimensions,
        usual_dimensions=settings.size("truncate_dim") if settings.has("truncate_dim") else 0,
        texts=texts,
    )


def architecture_of(raw: dict[str, Any]) -> str:
    """Return the first architecture that a config.json names; empty: none."""
    names = raw.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def causal_name(name: str) -> str:
    """Return the architecture with a head for text that has this one's layers, as Qwen3ForCausalLM."""
    stem = name.removesuffix(CLASSIFIER)
    if stem == name and name.endswith("Model") and not name.endswith(CAUSAL):
        stem = name.removesuffix("Model")
    if stem == name:
        return name
    return f"{stem}LMHeadModel" if stem == "GPT2" else f"{stem}ForCausalLM"


def _classifier(folder: Path, fields: Fields, texts: PooledTexts) -> Pooling:
    """Return how a model with a head of labels pools. Raises ValueError."""
    labels = fields.raw.get("id2label")
    count = len(labels) if isinstance(labels, dict) else 2  # as transformers has it
    count = fields.size("num_labels", count)
    names = _names(labels) if isinstance(labels, dict) else ()
    return Pooling(
        labels=count,
        names=names if len(names) == count else tuple(f"LABEL_{i}" for i in range(count)),
        activation=_activation(folder, fields.raw, count),
        problem_type=_PROBLEM_TYPES.get(fields.raw.get("problem_type")),
        texts=texts,
    )


def _names(labels: dict[str, Any]) -> tuple[str, ...]:
    """Return labels by their numbers, in whose order a file need not have them ("10" may precede "2")."""
    numbered = sorted(labels, key=lambda key: int(key) if key.isdecimal() else len(labels))
    return tuple(str(labels[key]) for key in numbered)


def _pooling_modes(fields: Fields) -> tuple[PoolingMode, ...]:
    """Return what vectors are made of; the mean of all tokens where nothing is said. Raises ValueError."""
    if not fields.has("pooling_mode"):
        flags = [name for name in fields.raw if name.startswith("pooling_mode_")]
        unknown = [name for name in flags if name not in _FLAGS and fields.flag(name, False)]
        if unknown:
            raise ValueError(f"{fields.where} pools by {unknown[0]}; it must be one of {', '.join(_FLAGS)}")
        return tuple(mode for name, mode in _FLAGS.items() if fields.flag(name, False)) or ("mean",)
    given = fields.raw["pooling_mode"]
    names = given if isinstance(given, list) else [given]
    if not names or not all(isinstance(name, str) and name in _MODES for name in names):
        raise fields.error("pooling_mode", given, f"one of {', '.join(_MODES)}, or a list of them")
    return tuple(_MODES[name] for name in names)


def _matryoshka(fields: Fields) -> tuple[bool, tuple[int, ...]]:
    dimensions = fields.raw.get("matryoshka_dimensions")
    if dimensions is not None and not (
        isinstance(dimensions, list) and all(type(size) is int and size > 0 for size in dimensions)
    ):
        raise fields.error("matryoshka_dimensions", dimensions, "a list of positive integers")
    return fields.flag("is_matryoshka", bool(dimensions)), tuple(dimensions or ())


def _activation(folder: Path, raw: dict[str, Any], labels: int) -> Activation:
    """Return what a score goes through.

    What the folder names as its activation; without that a sigmoid, unless one of several labels fits or it
    is a number that was learnt (a regression).
    """
    own = raw.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, dict) else None
    file = folder / SETTINGS
    name = name or raw.get("sbert_ce_default_activation_function")
    name = name or (read_json(file) or {}).get("activation_fn")
    if name is None:
        problem_type = raw.get("problem_type")
        alone = labels == 1 or problem_type == "multi_label_classification"
        return "sigmoid" if alone and problem_type != "regression" else "none"
    kind = str(name).rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise ValueError(
            f"{folder}: the activation {name!r} is not supported; it must be one of {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[kind]

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
from quire.engine.models.pooled_texts import PooledTexts, read_pooled_texts

Runner = Literal["auto", "generate", "pooling"]
PooledTokens = Literal["last", "mean", "first"]
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
_TOKENS: dict[str, PooledTokens] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}
_MODES: dict[str, PooledTokens] = {"lasttoken": "last", "mean": "mean", "cls": "first"}
_MODULES = ("Transformer", "Pooling", "Normalize", "LogitScore")
_PROBLEM_TYPES: dict[Any, ProblemType] = {name: name for name in get_args(ProblemType)}
_ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "none"}


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """Which hidden states the vector comes from, and what it goes through afterwards."""

    tokens: PooledTokens = "last"
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
    texts: PooledTexts = PooledTexts()
    padding: int | None = None  # the token at a text's end that a classification head does not look at

    def checked_dimensions(self, asked: int | None, size: int) -> int | None:
        """Return how many numbers of a vector of `size` are wanted, None: all. Raises FieldError."""
        if asked is None or asked == size:
            return None
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
        return self.tokens != "last"


def read_pooling(folder: str | Path, runner: Runner = "auto") -> Pooling | None:
    """Return how the model in a folder pools; None if it generates text.

    Raises ValueError where it can do neither, or not what `runner` asks for.
    """
    folder = Path(folder)
    where = str(folder / "config.json")
    raw = read_json(folder / "config.json") or {}
    name = architecture_of(raw)
    modules = _modules(folder)
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
    kinds = _kinds(folder, modules or [])
    module = folder / str(kinds["Transformer"].get("path", "")) if "Transformer" in kinds else None
    pools = _read_module(folder, kinds["Pooling"]) if "Pooling" in kinds else None
    embeds = not name.endswith(CLASSIFIER) and "LogitScore" not in kinds
    pools_prompt = pools is None or pools.flag("include_prompt", True)
    texts = read_pooled_texts(folder, module, embeds=embeds, pools_prompt=pools_prompt)
    fields = Fields(raw, where)
    if name.endswith(CLASSIFIER):
        return _classifier(folder, fields, texts)
    if "LogitScore" in kinds:
        answers = _read_module(folder, kinds["LogitScore"])
        tokens = (*answers.token_ids("true_token_id"), *answers.token_ids("false_token_id"))
        if not answers.has("true_token_id") or len(tokens) > 2:
            raise answers.error("true_token_id", answers.raw.get("true_token_id"), "a token id")
        activation = _activation(folder, raw, 1)
        return Pooling(labels=1, label_tokens=tokens, activation=activation, texts=texts)
    matryoshka, dimensions = _matryoshka(fields)
    if modules is None:
        return Pooling(normalize=True, matryoshka=matryoshka, dimensions=dimensions, texts=texts)
    return Pooling(
        tokens="last" if pools is None else _pooled_tokens(pools),
        normalize="Normalize" in kinds,
        matryoshka=matryoshka,
        dimensions=dimensions,
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


def _modules(folder: Path) -> list[dict[str, Any]] | None:
    """Return the parts that sentence-transformers makes a model of; None: it is none of theirs."""
    file = folder / "modules.json"
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file} must hold a list of modules: {error}") from None


def _kinds(folder: Path, modules: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return modules by what each does. Raises ValueError for one that does nothing known."""
    kinds = {str(module.get("type", "")).rpartition(".")[2]: module for module in modules}
    for kind, module in kinds.items():
        if kind not in _MODULES:
            raise ValueError(
                f"{folder / 'modules.json'}: the module {module.get('type')!r} is not supported; it must be "
                f"one of {', '.join(_MODULES)}"
            )
    if "Normalize" in kinds:
        file = folder / str(kinds["Normalize"].get("path", "")) / "config.json"
        fields = Fields(read_json(file) or {}, str(file))  # old folders have none
        for name in ("module_input_name", "module_output_name"):
            fields.refuse_unless(name, None, "sentence_embedding")
    return kinds


def _read_module(folder: Path, module: dict[str, Any]) -> Fields:
    file = folder / str(module.get("path", "")) / "config.json"
    raw = read_json(file)
    if raw is None:
        raise ValueError(f"{file} is missing, which modules.json names")
    return Fields(raw, str(file))


def _pooled_tokens(fields: Fields) -> PooledTokens:
    if fields.has("pooling_mode"):
        return fields.choice("pooling_mode", "last", _MODES)
    modes = [name for name, value in fields.raw.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _TOKENS:
        raise ValueError(
            f"{fields.where} pools by {modes or 'nothing'}; it must be one of {', '.join(_TOKENS)}"
        )
    return _TOKENS[modes[0]]


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
    file = folder / "config_sentence_transformers.json"
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

"""Modules of transformers that compute attention by themselves, made to call ours as others do.

`adapt` gives such a module a subclass of its class, with a method of `general.forwards`. What is not listed
here is left as it is, calls nothing, and is refused for that.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from quire.engine.models.general import forwards, index_forwards
from quire.engine.models.general.attention import NAME

# Types whose layers look their attention's class up by the name that a config has.
_CLASSES = {
    "falcon": "falcon.modeling_falcon.FALCON_ATTENTION_CLASSES",
    "git": "git.modeling_git.GIT_SELF_ATTENTION_CLASSES",
    "gpt_neo": "gpt_neo.modeling_gpt_neo.GPT_NEO_ATTENTION_CLASSES",
    "gptj": "gptj.modeling_gptj.GPTJ_ATTENTION_CLASSES",
}


def register_classes(kind: str) -> None:
    """Have a model of a type be built with the attention that `adapt` then takes."""
    if kind in _CLASSES:
        module, name = _CLASSES[kind].rsplit(".", 1)
        classes = getattr(importlib.import_module(f"transformers.models.{module}"), name)
        classes[NAME] = classes["eager"]


def adapt(model: nn.Module) -> None:
    """Have modules that compute attention by themselves call ours, and know which layer they are of."""
    layers = 0
    for module in list(model.modules()):
        kind = type(module)
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):  # it looks at tokens on the device
            module.warn_if_padding_and_no_attention_mask = _nothing  # type: ignore[assignment]
        if _name(module) not in _METHODS:
            continue
        name, method = _METHODS[_name(module)]
        if name == "_attn" and not isinstance(getattr(module, "layer_idx", None), int):
            module.layer_idx = getattr(module, "layer_id", layers)  # type: ignore[arg-type]
        layers += 1
        module.__class__ = type(kind.__name__, (kind,), {name: method, "__module__": kind.__module__})


def _nothing(*_: object) -> None:
    """Take anything, and do nothing."""


def is_indexer(module: nn.Module) -> bool:
    """Return whether a module is an indexer, which chooses tokens."""
    return _name(module) in _INDEXERS


def is_block_indexer(module: nn.Module) -> bool:
    """Return whether a module is an indexer that chooses blocks of tokens, for each KV head."""
    return _name(module) in _BLOCK_INDEXERS


def chosen_tokens(model: nn.Module) -> int:
    """Return how many tokens the indexers of an adapted model choose, at least; 0: it has none."""
    modules: list[Any] = [*model.modules()]
    of_tokens = [each.index_topk for each in modules if is_indexer(each)]
    of_blocks = [each.topk_blocks * each.block_size for each in modules if is_block_indexer(each)]
    return min(of_tokens + of_blocks, default=0)


def why_undivided(model: nn.Module) -> str:
    """Return why ranks cannot divide an adapted model; nothing, if they can, or nothing of it was adapted."""
    own = [module for module in model.modules() if _name(module) in _METHODS.keys() - _DIVIDED]
    return f"how {type(own[0]).__name__} attends is not known for several ranks" if own else ""


def _name(module: nn.Module) -> str:
    """Return the name of a module's class behind its type of models: "gptj.GPTJAttention"."""
    kind = type(module)
    where = kind.__module__.removeprefix("transformers.models.").split(".")[0]
    return f"{where}.{kind.__name__}"


_INDEXERS = {
    "axk2.AXK2Indexer", "deepseek_v32.DeepseekV32Indexer", "dots3_note.Dots3NoteTextIndexer",
    "glm_moe_dsa.GlmMoeDsaIndexer", "hy_v4.HYV4Indexer", "mistral_large4.MistralLarge4TextIndexer",
}  # fmt: skip
_BLOCK_INDEXERS = {"minimax_m3_vl.MiniMaxM3VLIndexer"}
_METHODS: dict[str, tuple[str, Callable[..., object]]] = {
    "openai.Attention": ("_attn", forwards.openai),
    "bloom.BloomAttention": ("forward", forwards.bloom),
    "codegen.CodeGenAttention": ("_attn", forwards.gptj),
    "falcon.FalconAttention": ("forward", forwards.falcon),
    "gptj.GPTJAttention": ("_attn", forwards.gptj),
    "gpt_neo.GPTNeoSelfAttention": ("_attn", forwards.gpt_neo),
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": ("_attn", forwards.gpt_neox_japanese),
    "git.GitSelfAttention": ("forward", forwards.bert),
    "megatron_bert.MegatronBertSelfAttention": ("forward", forwards.bert),
    "llama4.Llama4TextAttention": ("forward", forwards.llama4),
    "llama4.Llama4TextDecoderLayer": ("forward", forwards.llama4_layer),
    "mpt.MptAttention": ("forward", forwards.mpt),
    "mpt.MptModel": ("forward", forwards.mpt_decoder),
    "mvp.MvpAttention": ("forward", forwards.bart),
    "rembert.RemBertSelfAttention": ("forward", forwards.bert),
    "roformer.RoFormerSelfAttention": ("forward", forwards.roformer),
    "trocr.TrOCRAttention": ("forward", forwards.bart),
    "xglm.XGLMAttention": ("forward", forwards.bart),
}
_METHODS |= dict.fromkeys(_INDEXERS, ("forward", index_forwards.index))
_METHODS |= {name.replace("Indexer", "Attention"): ("forward", index_forwards.indexed) for name in _INDEXERS}
_METHODS["mistral_large4.MistralLarge4TextIndexer"] = ("forward", index_forwards.index_by_hidden)
_METHODS |= dict.fromkeys(_BLOCK_INDEXERS, ("forward", index_forwards.index_blocks))
# Which plans of transformers' divide, and rightly.
_DIVIDED = {name for name in _METHODS if name.endswith("Indexer") or name.startswith("llama4.")}
_DIVIDED |= {name.replace("Indexer", "Attention") for name in _INDEXERS}

"""How each part of a model is divided: in transformers' words, from its plan and from ours.

Styles are those of `transformers.distributed.tensor_parallel`. They stand by the names of modules, and of
parameters that no module of the plan has.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

# Whose outputs are divided; those of GATHERED are gathered behind the module.
OUTPUTS = {"colwise", "colwise_gather_output", "colwise_rep"}
GATHERED = {"colwise_gather_output", "colwise_rep"}
# Whose inputs are divided, so that what each rank computes is summed; SPLIT are given whole inputs.
INPUTS = {"rowwise", "rowwise_split_input", "rowwise_rep"}
SPLIT = {"rowwise_split_input", "rowwise_rep"}
# Gate and up, one behind the other: a share is of either.
PACKED_OUTPUTS, PACKED_INPUTS = "packed_colwise", "packed_rowwise"
ROWS_OF_TABLE = "embedding_rowwise"
SUMMED = {"all_reduce", "moe_tp_experts"}  # whose outputs are parts of a sum
IDENTITY = "moe_identity_expert"  # given to every rank, whose outputs are summed
# Every rank has all of it. Gradients, which some are about, there are none of.
WHOLE = {"replicate", "local_params", "mla_kv_a_proj", "replicated_with_grad_allreduce"}
KNOWN = OUTPUTS | INPUTS | WHOLE | SUMMED | {PACKED_OUTPUTS, PACKED_INPUTS, ROWS_OF_TABLE, IDENTITY}

_PLAIN_ATTENTION = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
# Where transformers' plans leave something out, or have it wrong; by the type of the decoder's configuration.
_OURS = {
    "gpt_oss": _PLAIN_ATTENTION | {"layers.*.self_attn.sinks": "colwise"},
    "gemma3n_text": {  # whose gates are cut off by the mean of all of them
        "layers.*.mlp.gate_proj": "colwise_gather_output",
        "layers.*.mlp.up_proj": "colwise_gather_output",
        "layers.*.mlp.down_proj": "rowwise_split_input",
    },
}


class Undividable(ValueError):
    """A model cannot be divided among so many ranks; the message says what of it."""


def styles_of(model: Any) -> dict[str, str]:
    """Return the style of each module and parameter of a causal model that has one, by its full name."""
    styles = _by_full_name(model, (model.tp_plan or {}) | _ours(model))
    for name, style in list(styles.items()):
        if name.endswith(".gate_up_proj") and style in GATHERED and f"{name}.weight" in styles:
            down = f"{name.removesuffix('gate_up_proj')}down_proj"
            if styles.get(down) in SPLIT:  # it need not be gathered in between
                packed = styles.keys() & {name, f"{name}.weight", f"{name}.bias"}
                styles |= dict.fromkeys(packed, PACKED_OUTPUTS)
    return styles


def _by_full_name(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Return a plan's styles, whose names have an asterisk for a layer's number, by the names of modules.

    And by those of parameters: what the plan says of a module holds for its parameters, too.
    """
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        general = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        for parameter, _ in module.named_parameters(prefix=name, recurse=False):
            own = f"{general}.{parameter.rpartition('.')[2]}".removeprefix(".")
            if style := plan.get(own) or plan.get(general):
                styles[parameter] = style
        if general in plan:
            styles[name] = plan[general]
    return styles


def experts_by_name(model: nn.Module) -> dict[str, Any]:
    """Return the modules that are all experts of a layer, as transformers keeps them in its usual way."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed")
        and hasattr(module, "has_gate")
        and isinstance(getattr(module, "down_proj", None), nn.Parameter)
    }


def has_plan(model: Any) -> bool:
    """Return whether it is known how to divide a causal model's layers."""
    around = {PACKED_OUTPUTS, PACKED_INPUTS} | OUTPUTS | INPUTS
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    divided = (name for name, style in styles_of(model).items() if style in around and name in modules)
    return any(modules[name] is not head for name in divided) or bool(experts_by_name(model))


def has_whole_experts(model: Any) -> bool:
    """Return whether a model has experts, all of which transformers would leave whole for some rank."""
    experts, styles = experts_by_name(model), _by_full_name(model, model.ep_plan or {})
    return bool(experts) and all(styles.get(name) == "ep_dispatch_experts" for name in experts)


def _ours(model: Any) -> dict[str, str]:
    ours = _OURS.get(model.config.get_text_config(decoder=True).model_type, {})
    base = model.base_model_prefix
    return {f"{part}.{name}": ours[name] for part in (base, f"{base}.language_model") for name in ours}

"""What modules of transformers compute that attend by themselves, with attention handed to ours.

Projections, rotations and what follows attention are the module's own. `general.own_attention` says of which
classes these are methods.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from quire.engine.models.general.attention import attend
from quire.engine.models.general.unsupported import UnsupportedAttention


def _attended(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **asked: Any) -> Tensor:
    """Return what ours attends to [1, T, heads, D]; q, k and v [1, heads, T, D]."""
    return attend(module, q, k, v, mask, **asked)[0]


def refuse(**given: Tensor | None) -> None:
    """Raise UnsupportedAttention for what these functions do not take."""
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise UnsupportedAttention(f"its attention takes {', '.join(names)}, which no kernel here does")


# -- what computes weights and sums, between projections: q, k and v [1, heads, T, D] -> [1, heads, T, D] ----


def _of_heads(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, window: int = 0
) -> Tensor:
    q, k = q.to(v.dtype), k.to(v.dtype)
    attended = _attended(module, q, k, v, mask, scaling=scale, sliding_window=window)
    return attended.transpose(1, 2)


def gptj(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    return _of_heads(self, query, key, value, attention_mask, 1 / self.scale_attn), None


def gpt_neo(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    window = self.config.window_size if self.attention_type == "local" else 0
    return _of_heads(self, query, key, value, attention_mask, 1.0, window), None


def gpt_neox_japanese(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    return _of_heads(self, query, key, value, attention_mask, 1 / self.norm_factor), None


def openai(
    self: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, *_: bool
) -> list[Tensor]:
    scale = v.shape[-1] ** -0.5 if self.scale else 1.0
    return [_of_heads(self, q, k.mT, v, attention_mask, scale)]


# -- whole modules: hidden states [1, T, H] -> the same -----------------------------------------------------


def bert(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    *_: object,
    **given: object,
) -> tuple[Tensor, None]:
    """Return what is attended before the output's projection."""
    refuse(encoder_hidden_states=encoder_hidden_states)
    q, k, v = _bert_heads(self, hidden_states)
    scale = self.attention_head_size**-0.5
    causal = getattr(self, "is_decoder", True)
    attended = _attended(self, q, k, v, attention_mask, scaling=scale, is_causal=causal)
    return attended.flatten(2), None


def _bert_heads(module: Any, hidden_states: Tensor) -> list[Tensor]:
    shape = (*hidden_states.shape[:-1], -1, module.attention_head_size)
    projections = (module.query, module.key, module.value)
    return [each(hidden_states).view(shape).transpose(1, 2) for each in projections]


def roformer(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    sinusoidal_pos: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    *_: object,
    **given: object,
) -> tuple[Tensor, None]:
    refuse(encoder_hidden_states=encoder_hidden_states)
    q, k, v = _bert_heads(self, hidden_states)
    rotated = self.apply_rotary_position_embeddings(
        sinusoidal_pos, q, k, *((v,) if self.rotary_value else ())
    )
    q, k, v = (*rotated, v)[:3]
    scale = self.attention_head_size**-0.5
    attended = _attended(self, q, k, v, attention_mask, scaling=scale, is_causal=self.is_decoder)
    return attended.flatten(2), None


def bart(
    self: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    past_key_values: object = None,
    attention_mask: Tensor | None = None,
    attn_prompt: Tensor | None = None,
    **given: object,
) -> tuple[Tensor, None]:
    refuse(key_value_states=key_value_states, attn_prompt=attn_prompt)
    shape = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
    projections = (self.q_proj, self.k_proj, self.v_proj)
    q, k, v = (each(hidden_states).view(shape).transpose(1, 2) for each in projections)
    attended = _attended(self, q, k, v, attention_mask, scaling=self.scaling, is_causal=self.is_decoder)
    return self.out_proj(attended.flatten(2)), None


def falcon(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    *_: object,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **given: object,
) -> tuple[Tensor, None]:
    q, k, v = self._split_heads(self.query_key_value(hidden_states))
    if self.new_decoder_architecture:  # which repeats keys and values for each query head
        k, v = (part[:, :, :: self.num_heads // self.num_kv_heads] for part in (k, v))
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    if alibi is not None:  # added before scores are scaled
        q, k, v = _with_biases(q, k, v, position_ids)
    elif position_embeddings is not None:
        cos, sin = (part.unsqueeze(1) for part in position_embeddings)
        q, k = (part * cos + _rotated_half(part) * sin for part in (q, k))
    biased = alibi is not None
    attended = _attended(self, q, k, v, attention_mask, scaling=self.inv_norm_factor, biased_keys=biased)
    return self.dense(attended.flatten(2)), None


def _with_biases(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give each head keys of its own, which hold what is added to their scores, and queries a 1 for it.

    Falcon's code rounds slopes, positions and their products to bf16: scores fall unevenly with distance.
    """
    heads = q.shape[1]
    k, v = (part.repeat_interleave(heads // k.shape[1], dim=1) for part in (k, v))
    biases = (alibi_slopes(heads, q.device).bfloat16()[:, None] * positions).to(q.dtype)[None, ..., None]
    ones, biases = (F.pad(part, (0, 7)) for part in (torch.ones_like(q[..., :1]), biases))  # kept aligned
    return torch.cat((q, ones), dim=-1), torch.cat((k, biases), dim=-1), v


def _rotated_half(heads: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def bloom(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    *_: object,
    **given: object,
) -> tuple[Tensor, None]:
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    slopes = alibi_slopes(self.num_heads, q.device)
    attended = _attended(self, q, k, v, attention_mask, scaling=self.inv_norm_factor, alibi_slopes=slopes)
    attended = attended.flatten(2)
    if self.pretraining_tp > 1 and self.slow_but_exact:  # the module's own code leaves the bias out then
        return residual + F.linear(attended, self.dense.weight), None
    return residual + self.dense(attended), None


def mpt(self: Any, hidden_states: Tensor, *_: object, **given: object) -> tuple[Tensor, None]:
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    shape = (*hidden_states.shape[:-1], self.n_heads, self.head_dim)
    q, k, v = (part.view(shape).transpose(1, 2) for part in qkv.chunk(3, dim=2))
    slopes = alibi_slopes(self.n_heads, qkv.device)
    attended = _attended(self, q, k, v, None, scaling=self.softmax_scale, alibi_slopes=slopes)
    return self.out_proj(attended.flatten(2)), None


def mpt_decoder(self: Any, input_ids: Tensor, **given: object) -> BaseModelOutputWithPast:
    """Compute as the model's own code does, which cannot do without a mask."""
    hidden = self.wte(input_ids)
    for block in self.blocks:
        hidden, _ = block(hidden, position_bias=None, attention_mask=None)
    return BaseModelOutputWithPast(last_hidden_state=self.norm_f(hidden))


@lru_cache
def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """Return what a head's score loses for each token between key and query [heads] fp32 (Press et al. 2022).

    Of a number of heads that is no power of two, those beyond the largest in it take every second one of
    twice as many.
    """
    most = 2 ** (heads.bit_length() - 1)
    whole = [2 ** (-8 * (head + 1) / most) for head in range(most)]
    between = [2 ** (-4 * (2 * head + 1) / most) for head in range(heads - most)]
    return torch.tensor([*whole, *between], dtype=torch.float32, device=device)


def llama4(self: Any, hidden_states: Tensor, **given: Any) -> tuple[Tensor, None]:
    """Compute as the model's own code does, which would count positions from a call's first token."""
    if self.use_rope or not self.attn_temperature_tuning:
        attended: tuple[Tensor, None] = theirs(self, hidden_states, **given)
        return attended
    steps = torch.floor((self.positions.float() + 1.0) / self.floor_scale)
    scales = (torch.log1p(steps) * self.attn_scale + 1.0)[..., None, None]
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (each(hidden_states).view(shape) for each in (self.q_proj, self.k_proj, self.v_proj))
    q, k, v = (part.transpose(1, 2) for part in ((q * scales).to(q.dtype), k, v))
    out = _attended(self, q, k, v, given["attention_mask"], scaling=self.scaling)
    return self.o_proj(out.flatten(2)), None


def llama4_layer(self: Any, hidden_states: Tensor, *, position_ids: Tensor, **given: Any) -> Tensor:
    """Tell the layer's attention where its tokens stand."""
    self.self_attn.positions = position_ids
    out: Tensor = theirs(self, hidden_states, position_ids=position_ids, **given)
    return out


def theirs(module: Any, *others: Any, **given: Any) -> Any:
    """Call the forward that a module had before."""
    return super(type(module), module).forward(*others, **given)

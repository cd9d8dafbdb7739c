"""The gated delta rule (Yang et al. 2024): a token corrects what the state says of its key, by its value."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch
from quire.kernels.recurrence.delta_chunks import delta_rule_of_chunks
from quire.kernels.recurrence.delta_gates import betas
from quire.kernels.recurrence.delta_products import EPS, rows_of
from quire.kernels.recurrence.step import CARRIED, NO_STATE, StateStep
from quire.kernels.recurrence.time_steps import softplus

MOST_WIDTH = 256  # of keys and values
SLICE = 32  # of a value's numbers that a program has the state of: 128 bytes of each row
WARPS = 4


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    step: StateStep,
    *,
    normalised: bool,
) -> Tensor:
    """Have each token change its sequence's state and ask the new one -> [T, Hv, Dv] in v's dtype.

    q and k [T, Hk, Dk], v [T, Hv, Dv], where Hv / Hk value heads share a key head; each token's numbers are
    next to each other. g [T, Hv] is what the state decays by, as a logarithm of at most 0, or [T, Hv, Dk] for
    each of the key's numbers (Kimi Delta Attention); beta [T, Hv]. state [blocks, Hv, Dk, Dv] in fp32 is
    changed in place. Queries are multiplied by Dk ** -0.5 and, if `normalised`, q and k are first divided by
    their lengths. Tokens of no decode and no chunk get no output: what is there is undefined. States of
    decodes, and in which blocks they are, are read before kernels ahead have ended: they must be complete
    when the kernel just ahead begins.
    """
    check_rule(q, k, v, g, beta, state)
    q, k, v, g, beta = (rows_of(x) for x in (q, k, v, g, beta))
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if step.decodes:
        delta_rule_of_decodes(q, k, v, g, beta, state, step, out, normalised=normalised)
    if len(step.chunks):
        chunks = step.chunks, step.last_used
        delta_rule_of_chunks(q, k, v, g, beta, state, *chunks, out, normalised=normalised)
    return out


def delta_rule_of_decodes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    step: StateStep,
    out: Tensor,
    *,
    normalised: bool,
    gates: tuple[Tensor, Tensor, float] | None = None,
) -> None:
    """Do what `gated_delta_rule` does of a step's decodes, at least one, into out [T, Hv, Dv].

    gates: a_log, dt_bias and most, by which `delta_gates` makes decays and betas of g and beta. All rows have
    their numbers next to each other.
    """
    heads, key_dim, value_dim = state.shape[1:]
    a_log, dt_bias, most = gates or (None, None, 1.0)
    by_key = g.shape[1:] != beta.shape[1:]
    _decode_kernel[(triton.cdiv(value_dim, SLICE), heads, step.decodes)](
        q, k, v, g, beta, a_log, dt_bias, state, step.before, step.after, out,
        *(x.stride(0) for x in (q, k, v, g, beta, state)), key_dim**-0.5, most,
        heads, heads // k.shape[1], key_dim, value_dim, triton.next_power_of_2(key_dim), SLICE,
        by_key, normalised, EPS, num_warps=WARPS, **dependent_launch(q.device),
    )  # fmt: skip


def gated_delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    step: StateStep,
    *,
    normalised: bool,
) -> Tensor:
    """Do the same as `gated_delta_rule` in plain torch, token by token; what is undefined there is 0 here."""
    check_rule(q, k, v, g, beta, state)
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    group = v.shape[1] // k.shape[1]
    q, k, decay = q.float(), k.float(), g.float().exp()
    if normalised:
        q, k = (x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt() for x in (q, k))
    q, k = ((x * scale).repeat_interleave(group, 1) for x, scale in ((q, k.shape[-1] ** -0.5), (k, 1.0)))
    decay = decay[..., None, None] if g.dim() == 2 else decay[..., None]
    zeros = torch.zeros_like(state[0])
    held = zeros
    for first, tokens, before, after in step.in_order():
        if before != CARRIED:
            held = zeros if before == NO_STATE else state[before].clone()
        for i in range(first, first + tokens):
            held = held * decay[i]
            known = torch.einsum("hkv,hk->hv", held, k[i])
            change = (v[i].float() - known) * beta[i].float()[:, None]
            held = held + k[i][..., None] * change[:, None]
            out[i] = torch.einsum("hkv,hk->hv", held, q[i]).to(out.dtype)
        if after >= 0:
            state[after] = held
    return out


def check_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> None:
    """Tell whether what `gated_delta_rule` takes fits together, which is asserted."""
    (tokens, key_heads, key_dim), (_, heads, value_dim) = k.shape, v.shape
    assert q.shape == k.shape and v.shape[0] == tokens and heads % key_heads == 0, (q.shape, k.shape, v.shape)
    assert q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
    assert g.shape in ((tokens, heads), (tokens, heads, key_dim)) and beta.shape == (tokens, heads)
    assert state.shape[1:] == (heads, key_dim, value_dim) and state.dtype == torch.float32
    assert max(key_dim, value_dim) <= MOST_WIDTH, (key_dim, value_dim)
    assert not len(state) or state[0].is_contiguous(), state.stride()  # blocks may lie apart


# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("before_ptr", "after_ptr", "state_ptr", "a_log_ptr", "dt_bias_ptr"))


@triton.jit
def _decode_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    before_ptr: tl.tensor,
    after_ptr: tl.tensor,
    out_ptr: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    g_stride: tl.tensor,
    beta_stride: tl.tensor,
    state_stride: tl.tensor,
    scale: tl.tensor,
    most: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    SLICE: tl.constexpr,
    BY_KEY: tl.constexpr,
    NORMALISED: tl.constexpr,
    EPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Compute a decode's token for a value head and a slice of its values."""
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    key = tl.arange(0, KEYS)
    value = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    in_key, in_value = key < KEY_DIM, value < VALUE_DIM
    inside = in_key[:, None] & in_value[None, :]
    places = head * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
    before = tl.load(before_ptr + row).to(tl.int64)
    after = tl.load(after_ptr + row).to(tl.int64)
    state = tl.load(state_ptr + before * state_stride + places, inside & (before >= 0), other=0.0)
    if BY_KEY:
        of_decay = head * KEY_DIM + key
        in_decay = in_key
    else:
        of_decay = head + tl.zeros((1,), tl.int32)
        in_decay = of_decay >= 0
    if a_log_ptr is not None:
        rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        bias = tl.load(dt_bias_ptr + of_decay, in_decay, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if after < 0:  # it pads
        tl.store(out_ptr + (row * HEADS + head) * VALUE_DIM + value, 0.0, in_value)
        return
    of_head = head // GROUP * KEY_DIM + key
    q = tl.load(q_ptr + row * q_stride + of_head, in_key, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + row * k_stride + of_head, in_key, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + row * v_stride + head * VALUE_DIM + value, in_value, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + row * beta_stride + head).to(tl.float32)
    g = tl.load(g_ptr + row * g_stride + of_decay, in_decay, other=0.0).to(tl.float32)
    if a_log_ptr is not None:
        beta = betas(beta, most, beta_ptr.dtype.element_ty).to(tl.float32)
        g = rate * softplus(g + bias)
    if NORMALISED:
        q *= tl.rsqrt(tl.sum(q * q) + EPS)
        k *= tl.rsqrt(tl.sum(k * k) + EPS)
    state *= tl.exp(g)[:, None]
    change = (v - tl.sum(state * k[:, None], 0)) * beta
    state += k[:, None] * change[None, :]
    tl.store(state_ptr + after * state_stride + places, state, inside)
    result = tl.sum(state * (q * scale)[:, None], 0)
    tl.store(out_ptr + (row * HEADS + head) * VALUE_DIM + value, result, in_value)

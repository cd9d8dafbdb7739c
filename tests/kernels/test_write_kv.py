"""QK-norm, RoPE and the KV write: against transformers' functions, and the kernel against the reference."""

import pytest
import torch
from paged import attention_layer
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from quire.kernels.attention.write_kv import write_kv, write_kv_reference
from quire.kernels.formats.kv_format import UNSCALED
from quire.kernels.formats.layer_cache import LayerCache

BLOCKS, BLOCK_SIZE, MAX_POSITION, EPS = 5, 16, 100, 1e-6
HEADS = [(16, 8), (14, 2), (3, 3), (4, 1)]  # 14 + 2 · 2 heads straddle the kernel's groups of heads


def rope_table(head_dim: int) -> torch.Tensor:
    """[MAX_POSITION, D] fp32: cosines, then sines."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.arange(MAX_POSITION)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


class Case:
    """Four tokens, one of them padding, in a strided buffer; a cache of a layer of two, poisoned with NaN."""

    def __init__(
        self, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.q_heads, self.kv_heads = heads
        self.head_dim = head_dim
        generator = torch.Generator().manual_seed(head_dim)
        self.width = (self.q_heads + 2 * self.kv_heads) * head_dim
        buffer = torch.randn(4, self.width + 16, generator=generator)
        self.qkv = buffer.to(device, dtype)[:, : self.width]
        self.positions = torch.tensor([7, 99, 0, 0], dtype=torch.int32, device=device)
        self.slots = torch.tensor([0, 4 * BLOCK_SIZE + 15, 35, -1], device=device)
        cache = torch.full((BLOCKS, 2, 2, self.kv_heads, BLOCK_SIZE, head_dim), torch.nan)
        self.cache = cache.to(device, dtype)
        self.kv = self.cache[:, 1]
        self.norms = torch.randn(2, head_dim, generator=generator).to(device, dtype)

    def heads_of(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = qkv.reshape(4, -1, self.head_dim)
        return heads.split([self.q_heads, self.kv_heads, self.kv_heads], dim=1)

    def run(self, function, rope: torch.Tensor | None, norm: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """-> (qkv, cache) after the call, on copies."""
        padded = torch.full((4, self.width + 16), torch.nan).to(self.qkv)
        qkv = padded[:, : self.width].copy_(self.qkv)
        cache = self.cache.clone()
        q_norm, k_norm = self.norms if norm else (None, None)
        table = None if rope is None else rope.to(qkv.device)
        layer = attention_layer(
            self.q_heads, self.kv_heads, self.head_dim, rope=table, q_norm=q_norm, k_norm=k_norm, eps=EPS
        )
        function(qkv, self.positions, self.slots, layer, LayerCache(cache[:, 1], UNSCALED[cache.dtype]))
        return qkv, cache


@pytest.mark.parametrize("heads, head_dim", [*zip(HEADS, [64, 80, 96, 128], strict=True)])
@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_kernel_equals_reference(heads, head_dim, rope, norm, device, dtype):
    case = Case(heads, head_dim, dtype, device)
    table = rope_table(head_dim) if rope else None
    for result, expected in zip(
        case.run(write_kv, table, norm), case.run(write_kv_reference, table, norm), strict=True
    ):
        # The norm may round an ulp apart, and a rotation may cancel most of what it is an ulp of.
        tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_fp32_norms_of_heads_are_multiplied_before_rounding(device, dtype):
    """As Gemma's: they are one more than its parameters."""
    case = Case((4, 2), 64, dtype, device)
    case.norms = 1.0 + case.norms.float()
    norm = Gemma3RMSNorm(64, EPS).to(device)
    for function in (write_kv, write_kv_reference):
        qkv, cache = case.run(function, None, True)
        q, k, _ = case.heads_of(case.qkv)
        norm.weight.data = case.norms[0] - 1.0
        expected_q = norm(q)
        norm.weight.data = case.norms[1] - 1.0
        pairs = (case.heads_of(qkv)[0], expected_q), (cache[0, 1, 0, :, 0], norm(k)[0])
        for result, expected in pairs:
            if dtype == torch.float32:
                torch.testing.assert_close(result, expected)
            else:
                assert float((result == expected).float().mean()) > 0.99


@pytest.mark.parametrize("function", [write_kv, write_kv_reference])
@pytest.mark.parametrize("norm", [True, False])
def test_equals_transformers_in_fp32(function, norm, device):
    case = Case((4, 2), 80, torch.float32, device)
    table = rope_table(80)
    q, k, v = case.heads_of(case.qkv)
    if norm:
        q, k = (head_norm(x, weight) for x, weight in zip((q, k), case.norms, strict=True))
    cos, sin = (x.repeat(1, 2) for x in table.to(device)[case.positions.long()].chunk(2, dim=-1))
    q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)

    qkv, cache = case.run(function, table, norm)
    torch.testing.assert_close(case.heads_of(qkv)[0], q)
    for token, slot in enumerate(case.slots.tolist()[:3]):
        written = cache[slot // BLOCK_SIZE, 1, :, :, slot % BLOCK_SIZE]
        torch.testing.assert_close(written, torch.stack((k[token], v[token])))


def head_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    norm = LlamaRMSNorm(x.shape[-1], EPS)
    norm.weight.data = weight
    return norm(x).detach()


@pytest.mark.parametrize("function", [write_kv, write_kv_reference])
def test_only_q_and_the_named_slots_change(function, device, dtype):
    case = Case((4, 2), 64, dtype, device)
    qkv, cache = case.run(function, rope_table(64), True)
    _, k, v = case.heads_of(qkv)
    _, old_k, old_v = case.heads_of(case.qkv)
    assert torch.equal(k, old_k) and torch.equal(v, old_v)
    written = ~cache.isnan().all(dim=-1)  # [blocks, layer, part, head, offset]
    slots = [(slot // BLOCK_SIZE, slot % BLOCK_SIZE) for slot in case.slots.tolist() if slot >= 0]
    expected = torch.zeros_like(written)
    for block, offset in slots:
        expected[block, 1, :, :, offset] = True
    assert torch.equal(written, expected)


@pytest.mark.parametrize("function", [write_kv, write_kv_reference])
def test_without_rope_and_norm_it_is_a_cache_write(function, device, dtype):
    case = Case((3, 3), 96, dtype, device)
    qkv, cache = case.run(function, None, False)
    assert torch.equal(qkv, case.qkv)
    _, k, v = case.heads_of(case.qkv)
    assert torch.equal(cache[0, 1, :, :, 0], torch.stack((k[0], v[0])))


def test_wrong_shapes_are_refused(device):
    case = Case((4, 2), 64, torch.float32, device)
    with pytest.raises(ValueError, match="expected 9 heads of 64"):
        cache = LayerCache(case.kv, UNSCALED[case.kv.dtype])
        write_kv(case.qkv, case.positions, case.slots, attention_layer(5, 2, 64), cache)
    with pytest.raises(ValueError, match="given together"):
        attention_layer(4, 2, 64, q_norm=case.norms[0])

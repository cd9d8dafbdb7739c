"""Philox4x32-10 against the known answers of its authors (Random123's kat_vectors)."""

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.sampling.philox import MASK, log_exponential, log_exponential_reference, philox_reference

ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES), (ONES, ONES, ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@triton.jit
def philox_kernel(seed_ptr, counter_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    c0, c1 = tl.load(counter_ptr + n), tl.load(counter_ptr + N + n)
    c2, c3 = tl.load(counter_ptr + 2 * N + n), tl.load(counter_ptr + 3 * N + n)
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), c0, c1, c2, c3)
    tl.store(out_ptr + n, w0)
    tl.store(out_ptr + N + n, w1)
    tl.store(out_ptr + 2 * N + n, w2)
    tl.store(out_ptr + 3 * N + n, w3)


@triton.jit
def log_exponential_kernel(word_ptr, out_ptr, N: tl.constexpr, ON_GPU: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out_ptr + n, log_exponential(tl.load(word_ptr + n).to(tl.uint32), ON_GPU))


def signed(seed: tuple[int, int]) -> int:
    value = seed[0] | seed[1] << 32
    return value - (1 << 64) if value >> 63 else value


@pytest.mark.parametrize("key, counter, answer", KNOWN_ANSWERS)
def test_reference_known_answers(key, counter, answer):
    words = philox_reference(torch.tensor(signed(key)), tuple(torch.tensor(c) for c in counter))
    assert tuple(words.tolist()) == answer


@pytest.mark.parametrize("key, counter, answer", KNOWN_ANSWERS)
def test_triton_known_answers(key, counter, answer, device):
    counters = torch.tensor([[c - (1 << 32) if c >> 31 else c] * 2 for c in counter], dtype=torch.int32)
    out = torch.zeros(4, 2, dtype=torch.int64, device=device)
    philox_kernel[(1,)](torch.tensor([signed(key)], device=device), counters.to(device), out, 2)
    assert (out & MASK).tolist() == [[word] * 2 for word in answer]


def test_reference_broadcasts_and_takes_negative_seeds():
    seeds = torch.tensor([[-1], [7]])
    counter = (torch.arange(5), torch.tensor(3), torch.tensor(0), torch.tensor(0))
    words = philox_reference(seeds, counter)
    assert words.shape == (2, 5, 4)
    alone = philox_reference(torch.tensor(-1), tuple(torch.tensor(c) for c in (4, 3, 0, 0)))
    assert torch.equal(words[0, 4], alone)
    assert words.unique().numel() == words.numel()


def test_log_exponential_is_finite_and_exact(device):
    edges = [0, 1, 2, 255, 1 << 23, (1 << 27) - 1, 1 << 27, 1 << 31, ONES - 128, ONES]
    words = torch.tensor(edges + [i * 97_612_893 for i in range(44)] + [3 * i for i in range(10)])
    exact = (-torch.log1p(-(words.double() + 0.5) / 2**32)).log()
    out = torch.empty(64, device=device)
    log_exponential_kernel[(1,)](words.to(device), out, 64, device.type == "cuda")
    for result in (out.cpu(), log_exponential_reference(words)):
        assert result.isfinite().all()
        # u is rounded to fp32, which matters near 1 alone: there a variate is large and never decides.
        inner = words < ONES - (1 << 16)
        torch.testing.assert_close(result.double()[inner], exact[inner], rtol=0, atol=2e-5)
        assert (result.double() - exact).abs().max() < 0.4

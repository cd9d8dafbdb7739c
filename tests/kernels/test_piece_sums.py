"""Sums over two ranks in pieces: the ranks are threads of which one runs at a time, until it has to wait."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from quire.kernels.parallel import piece_sums
from quire.kernels.parallel.piece_sums import (
    LEAST,
    NUMBERS,
    SLOTS,
    TILE,
    PieceSums,
    add_two_norm,
    add_two_norm_reference,
    pieces_of,
    wait_for,
)

SECONDS = 60


class End:
    """A rank's end of a line. A slot takes nothing until what is there has been received."""

    open = True

    def __init__(self, turn: threading.Condition) -> None:
        self.turn = turn
        self.slots: list[Tensor | None] = [None] * SLOTS
        self.other = self

    def send(self, x: Tensor, slot: int) -> None:
        assert self.other.slots[slot] is None, "the other rank still needs what is there"
        self.other.slots[slot] = x.clone()
        self.turn.notify_all()

    def receive(self, copy: None, slot: int, like: Tensor) -> Tensor:
        assert self.turn.wait_for(lambda: self.slots[slot] is not None, SECONDS)
        x, self.slots[slot] = self.slots[slot], None
        assert x is not None and x.shape == like.shape
        return x


def test_pieces_give_the_sum_of_whole_products(monkeypatch, dtype, device):
    """Of one step after the other, with more pieces than slots, fewer, and a last one that is short."""
    monkeypatch.setattr(piece_sums, "NUMBERS", 64 * TILE)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    turn = threading.Condition()
    ends = [End(turn), End(turn)]
    ends[0].other, ends[1].other = ends[1], ends[0]
    weights, norm = [drawn(64, 8), drawn(64, 8)], drawn(64)
    steps = [([drawn(rows, 8), drawn(rows, 8)], drawn(rows, 64)) for rows in (1300, 200, 3 * TILE)]

    def run(rank: int) -> list[tuple[Tensor, Tensor]]:
        with turn:
            sums = PieceSums(ends[rank])
            return [
                sums.add_rms_norm_of(
                    lambda rows: rows @ weights[rank].T, both[rank], residual.clone(), norm, 1e-6
                )
                for both, residual in steps
            ]

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, range(2))
    for (both, residual), (normed, total), same in zip(steps, first, second, strict=True):
        terms = [x @ weight.T for x, weight in zip(both, weights, strict=True)]
        expected = torch.empty_like(residual)
        add_two_norm_reference(*terms, residual, norm, 1e-6, expected)
        torch.testing.assert_close(total, residual, rtol=4e-3, atol=4e-3)
        torch.testing.assert_close(normed, expected, rtol=1e-2, atol=1e-2)
        assert torch.equal(normed, same[0])
        assert torch.equal(total, same[1])


def test_the_kernel_adds_and_normalises_as_the_reference(dtype, device):
    x, other, residual = (torch.randn(5, 96, device=device).to(dtype) for _ in range(3))
    weight, wide = torch.randn(96, device=device).to(dtype), torch.zeros(5, 100, dtype=dtype, device=device)
    expected, added = torch.empty_like(x), residual.clone()
    add_two_norm_reference(x, other, added, weight, 1e-6, expected)
    add_two_norm(x, other, residual, weight, 1e-6, wide[:, :96])
    assert torch.equal(residual, added)
    torch.testing.assert_close(wide[:, :96], expected, rtol=4e-3, atol=4e-3)
    assert not wide[:, 96:].any()


def test_a_flag_is_taken_down(device):
    flag = torch.ones(8, dtype=torch.int16, device=device)
    wait_for(flag)
    assert flag.tolist() == [0] + [1] * 7


@pytest.mark.parametrize("rows", [2049, 2112, 4096, 7710, 8192, 16384])
@pytest.mark.parametrize("hidden", [1024, 4096, 5120, 8192])
def test_pieces_are_about_as_large_and_fit_a_slot(rows, hidden):
    pieces = pieces_of(rows, hidden)
    assert pieces[0].start == 0 and pieces[-1].stop == rows and len(pieces) >= 2
    assert all(before.stop == after.start for before, after in pairwise(pieces))
    sizes = [piece.stop - piece.start for piece in pieces]
    assert all(size * hidden <= NUMBERS for size in sizes)
    assert all(size == sizes[0] and size % TILE == 0 for size in sizes[:-1]) and sizes[-1] <= sizes[0]


def test_few_rows_are_for_others():
    sums = PieceSums(End(threading.Condition()))
    rows = LEAST // (2 * 4096)
    assert not sums.takes(torch.empty(rows, 4096, dtype=torch.bfloat16))
    assert sums.takes(torch.empty(rows + 1, 4096, dtype=torch.bfloat16))
    assert not sums.takes(torch.empty(rows + 1, 4096))
    assert not sums.takes(torch.empty(200, 2 * NUMBERS // TILE, dtype=torch.bfloat16))

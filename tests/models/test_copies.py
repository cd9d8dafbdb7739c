"""Weights come to where a model has them as files have them, on a GPU in pieces that many threads read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.engine.models import copies

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = ((), (0,), (1,), (77,), (7, 33), (1, 200), (2, 3, 40), (5, 1, 1))


@pytest.fixture(autouse=True)
def few_bytes_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "PIECE_BYTES", 96)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_every_number_is_copied_and_rounded_once(shape: tuple[int, ...], kind: torch.dtype) -> None:
    x = torch.randn(shape).mul(3).to(torch.float32 if kind is torch.bfloat16 else kind)
    place = torch.full(shape, 1, dtype=kind, device=DEVICE)
    copies.copies_to(DEVICE)(place, x)
    assert torch.equal(place.cpu(), x.to(kind))


@pytest.mark.parametrize("turned", ["place", "file"])
def test_a_matrix_may_be_turned_over_and_be_a_part_of_another(turned: str) -> None:
    whole = torch.zeros(60, 50, device=DEVICE)
    place = whole.narrow(0, 5, 40)
    x = torch.randn(50, 40).T if turned == "file" else torch.randn(50, 40)
    copies.copies_to(DEVICE)(place.T if turned == "place" else place, x)
    assert torch.equal(whole[5:45].cpu(), x.T if turned == "place" else x)
    assert whole[:5].abs().sum() + whole[45:].abs().sum() == 0


def test_what_is_overwritten_afterwards_was_copied_before() -> None:
    copy, places = copies.copies_to(DEVICE), [torch.zeros(4, 20, device=DEVICE) for _ in range(50)]
    x = torch.zeros(4, 20)
    if DEVICE.type == "cuda":
        torch.cuda._sleep(200_000_000)  # cycles, in which the device takes nothing
    for i, place in enumerate(places):
        x.fill_(i)
        copy(place, x)
    assert [int(place.min()) for place in places] == [int(place.max()) for place in places] == [*range(50)]


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_are_all_of_it_and_small(shape: tuple[int, ...]) -> None:
    place, x = torch.zeros(shape, dtype=torch.float64), torch.randn(shape).double()
    for part, theirs in copies._pieces(place, x):
        assert theirs.numel() * 8 <= copies.PIECE_BYTES
        part.copy_(theirs)
    assert torch.equal(place, x)


def test_a_tensor_of_the_device_itself_is_copied() -> None:
    x: Tensor = torch.randn(30, 30, device=DEVICE)
    place = torch.zeros(30, 30, device=DEVICE)
    copies.copies_to(DEVICE)(place, x)
    assert torch.equal(place, x)

"""Attention of prompts to latents by keys and values that are made of them: against fp64."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from paged import TOLERANCE, Paged, attend_exactly, make_paged, poisoned_workspace, with_dtypes

from quire.kernels.attention.batch import AttentionLayer, ForwardBatch, PrefillBatch, Span
from quire.kernels.attention.latent import earlier as earlier_tokens
from quire.kernels.attention.latent import prefill
from quire.kernels.attention.latent.attend import attend_by_expanding, takes_expanded
from quire.kernels.attention.latent.earlier import plan_earlier, seconds_of_knowing
from quire.kernels.attention.latent.expanded import expanded_tiles
from quire.kernels.attention.latent.expansion import Expansion
from quire.kernels.formats.kv_format import UNSCALED
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import KNOWN, gpu_of

HEADS, LATENT, ROTATED, PLAIN, VALUE = 5, 32, 8, 24, 16
LAYER = AttentionLayer(HEADS, 1, LATENT + ROTATED, 0.21, latent=LATENT)
CHUNKS = (5, 140)  # tokens
TOKENS = 2 + sum(CHUNKS)


class Step(NamedTuple):
    """A decode and one that pads, then chunks, whose latents are still to be written."""

    paged: Paged
    q: torch.Tensor
    latents: torch.Tensor
    expansion: Expansion
    batch: ForwardBatch
    cache: LayerCache

    def expected(self, row: int, tokens: slice) -> torch.Tensor:
        """Return attention in fp64 of a row's newest tokens, which have places in the step."""
        weight = self.expansion.weight.cpu().double()
        both = torch.einsum("hnl,tl->thn", weight, self.paged.values[row][:, 0].double())
        rotated = self.paged.keys[row][:, :, LATENT:].double().expand(-1, HEADS, -1)
        keys = torch.cat((both[..., :PLAIN], rotated), dim=-1)
        q = self.q[:, tokens].transpose(0, 1)
        return attend_exactly(q, keys, both[..., PLAIN:], LAYER.scale, 0).to(self.q.dtype)


def step(earlier: tuple[int, int], dtype: torch.dtype, device: torch.device, *, knows: bool) -> Step:
    """earlier: tokens ahead of each chunk's. knows: the host does."""
    lengths = [before + tokens for before, tokens in zip(earlier, CHUNKS, strict=True)]
    paged = make_paged([33, 0, *lengths], 1, LATENT + ROTATED, 16, dtype, device)
    paged.kv, paged.values = paged.kv[:, :1], [keys[..., :LATENT] for keys in paged.keys]
    latents, slots = torch.zeros(TOKENS, LATENT + ROTATED, dtype=dtype), [-1] * TOKENS
    places = [(0, 32), (1, -1)]
    places += [(2 + chunk, earlier[chunk] + at) for chunk in range(2) for at in range(CHUNKS[chunk])]
    for token, (row, position) in enumerate(places):
        if position >= 0:
            latents[token] = paged.keys[row][position, 0]
            block = int(paged.block_tables[paged.rows[row], position // 16])
            slots[token] = block * 16 + position % 16
            paged.kv[block, :, :, position % 16] = torch.nan  # until it is written
    starts = torch.tensor([2, 2 + CHUNKS[0], TOKENS], dtype=torch.int32, device=device)
    order = torch.arange(2, dtype=torch.int32, device=device)
    spans = tuple(Span(int(paged.rows[2 + at]), CHUNKS[at], lengths[at]) for at in range(2))
    batch = ForwardBatch(
        tokens=starts,
        positions=starts,
        slots=torch.tensor(slots, device=device),
        decode=paged.decodes(order, poisoned_workspace(2, HEADS, LATENT, device), rows=slice(0, 2)),
        prefill=replace(paged.prefills(starts, max(CHUNKS), slice(2, 4)), spans=spans if knows else ()),
    )
    weight = torch.randn(HEADS, PLAIN + VALUE, LATENT) / LATENT**0.5
    return Step(
        paged,
        torch.randn(HEADS, TOKENS, PLAIN + ROTATED).to(device, dtype),
        latents.to(device),
        Expansion(weight.to(device, dtype), PLAIN),
        batch,
        LayerCache(paged.kv, UNSCALED[dtype], latent=LATENT),
    )


@pytest.mark.parametrize(
    ("earlier", "knows", "processors", "dtype"),
    with_dtypes(
        [
            ((0, 0), True, 1),
            ((15, 0), False, 1),
            *(((130, 70), knows, 1) for knows in (False, True)),
            ((130, 70), False, 150),  # more splits than there are tiles
            # In the interpreter these are enough.
            *(
                [((0, 0), False, 1), ((15, 0), True, 1), ((130, 70), False, 60)]  # 4 splits
                if torch.cuda.is_available()
                else []
            ),
        ]
    ),
)
def test_chunks_of_prompts(
    earlier: tuple[int, int],
    knows: bool,
    processors: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Known chunks of many tokens expand those before them as well, here in pieces of 32.

    processors: of the device, for which what is before others is divided.
    """
    gpu = replace(gpu_of(device), multiprocessors=processors)
    monkeypatch.setattr(prefill, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(earlier_tokens, "MOST_BYTES", 32 * HEADS * (PLAIN + VALUE) * dtype.itemsize)
    made = step(earlier, dtype, device, knows=knows)
    assert made.batch.prefill is not None
    planned = plan_earlier(made.batch.prefill, 16, made.q.element_size() * HEADS * (PLAIN + VALUE))
    assert len(planned.pieces) == (-(-earlier[1] // 32) if knows else 0)
    assert (planned.others is None) == (knows and not earlier[0])
    out = attend_by_expanding(made.q, made.latents, made.expansion, made.batch, planned, LAYER, made.cache)
    there = [0, *range(2, TOKENS)]
    slots = made.batch.slots[there]
    assert torch.equal(made.cache.kv[slots // 16, 0, 0, slots % 16], made.latents[there])
    for row, tokens in ((0, slice(0, 1)), (2, slice(2, 2 + CHUNKS[0])), (3, slice(2 + CHUNKS[0], TOKENS))):
        expected = made.expected(row, tokens)
        torch.testing.assert_close(out[tokens].cpu(), expected, atol=3 * TOLERANCE[dtype], rtol=0)


def test_one_piece_is_there_at_a_time(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of a piece are given back before those of the next are made: there is room for one."""
    made = step((0, 70), torch.float32, device, knows=True)
    numbers = HEADS * (PLAIN + VALUE)
    monkeypatch.setattr(earlier_tokens, "MOST_BYTES", 32 * numbers * 4)
    assert made.batch.prefill is not None
    planned = plan_earlier(made.batch.prefill, 16, numbers * 4)
    expanded: list[weakref.ref[torch.Tensor]] = []
    expand = Expansion.expand

    def noted(expansion: Expansion, latents: torch.Tensor) -> torch.Tensor:
        assert all(each() is None for each in expanded)
        heads = expand(expansion, latents)
        expanded.append(weakref.ref(heads))
        return heads

    monkeypatch.setattr(Expansion, "expand", noted)
    attend_by_expanding(made.q, made.latents, made.expansion, made.batch, planned, LAYER, made.cache)
    assert len(expanded) == 4  # three pieces, and the step's own tokens


def test_what_is_expanded() -> None:
    """Plain attention from prompts, where heads are less than two latents."""
    made = step((0, 0), torch.float32, torch.device("cpu"), knows=False)
    gpu, batch, expansion = KNOWN["H100"], made.batch, made.expansion

    def takes(gpu=gpu, batch=batch, layer=LAYER, expansion=expansion) -> bool:
        return takes_expanded(gpu, batch, layer, expansion, torch.float32)

    assert takes()
    assert not takes(batch=replace(batch, prefill=None))
    assert not takes(layer=replace(LAYER, window=20)) and not takes(layer=replace(LAYER, softcap=5.0))
    assert not takes(expansion=replace(expansion, weight=torch.randn(HEADS, 64, LATENT)))


def test_pieces_have_parts_of_rows() -> None:
    """Of rows of 256 queries, of which the second continues nothing, and of one of too few to expand for."""
    tables = torch.arange(64, dtype=torch.int32).view(4, 16)
    spans = (Span(3, 256, 262), Span(1, 256, 256), Span(0, 4, 99), Span(2, 128, 137))
    lens = torch.tensor([span.context_len for span in spans], dtype=torch.int32)
    starts = torch.tensor([0, 256, 512, 516, 644], dtype=torch.int32)
    batch = PrefillBatch(tables, torch.tensor([3, 1, 0, 2], dtype=torch.int32), starts, lens, 256, spans)
    planned = plan_earlier(batch, 4, earlier_tokens.MOST_BYTES // 10)
    assert planned.others is not None and planned.others.context_lens.tolist() == [256, 256, 99, 128]
    assert [piece.starts.tolist() for piece in planned.pieces] == [[0, 6, 6, 6, 10], [0, 0, 0, 0, 5]]
    assert [piece.blocks.tolist() for piece in planned.pieces] == [
        [48] * 4 + [49] * 2 + [32] * 4,
        [33] * 4 + [34],
    ]
    assert [piece.places.tolist() for piece in planned.pieces] == [
        [0, 1, 2, 3, 0, 1, 0, 1, 2, 3],
        [0, 1, 2, 3, 0],
    ]
    assert plan_earlier(replace(batch, spans=()), 4, 1).pieces == ()


def test_knowing_saves_what_long_chunks_continue() -> None:
    """Nothing without earlier tokens, or for a short chunk; milliseconds for 2,048 on 30,720."""
    assert seconds_of_knowing([Span(0, 2048, 2048), Span(1, 64, 32768)], 128) == 0.0
    assert 4e-3 < seconds_of_knowing([Span(0, 2048, 32768)], 16) < 9e-3


@pytest.mark.parametrize("gpu", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_gpu_has_room_for_heads_as_they_are(gpu, dtype: torch.dtype) -> None:
    """DeepSeek's, and GLM-4.7 Flash's."""
    for sizes in ((128, 64, 128), (192, 64, 256)):
        assert expanded_tiles(gpu, *sizes, dtype) is not None

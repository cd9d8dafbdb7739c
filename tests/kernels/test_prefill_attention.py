"""Prefill attention, kernel and reference, against fp64 attention over the gathered blocks."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from paged import TOLERANCE, attend_exactly, attention_layer, fused_queries, make_paged, with_dtypes

from quire.kernels.attention.hopper_prefill import prefill as hopper_prefill
from quire.kernels.attention.prefill import prefill, prefill_reference
from quire.kernels.gpu import gpu_of

# (query length, context length): whole prompts, chunks on top of a context, single tokens, an empty row
RAGGED = [(1, 1), (17, 17), (0, 5), (5, 70), (65, 65), (33, 150), (1, 64), (64, 128), (0, 0), (16, 31)]
SHORT = [(3, 3), (0, 9), (2, 130), (1, 66), (4, 64)]
LONG = [(300, 300), (1, 700), (130, 513), (2, 515), (70, 129)]
# Then a query tile has other key tiles, on a GPU; the interpreter takes its time.
LONGER = [(1100, 1300), (3, 640)] if torch.cuda.is_available() else [(330, 400), (3, 340)]
MANY = [*[(0, 0)] * 30, (2, 3), (1, 1), (18, 20), (0, 0), (3, 5)]

# (q heads, kv heads, head dim, block size, window, sequences)
CASES = [
    (2, 2, 64, 16, 0, RAGGED),
    (4, 2, 80, 32, 0, RAGGED),
    (4, 1, 128, 64, 0, RAGGED),
    (7, 1, 96, 128, 0, RAGGED),
    (8, 1, 64, 16, 0, RAGGED),
    (4, 1, 64, 16, 1, RAGGED),
    (4, 2, 64, 32, 20, RAGGED),
    (2, 1, 64, 16, 64, RAGGED),
    (8, 2, 64, 16, 0, SHORT),
    (7, 1, 128, 32, 65, SHORT),
    (8, 1, 64, 16, 0, MANY),
    (2, 1, 128, 16, 0, LONG),
    (8, 2, 64, 32, 0, LONG),
    (8, 1, 128, 128, 0, LONG),
    (1, 1, 64, 64, 0, LONGER),
    (2, 1, 128, 16, 0, LONGER),
    (2, 1, 128, 128, 0, LONGER),
    (2, 2, 64, 1, 0, SHORT),
    (4, 1, 128, 2, 0, RAGGED),
    (7, 1, 96, 4, 20, SHORT),
    (8, 1, 64, 8, 0, RAGGED),
    (4, 1, 128, 256, 0, SHORT),
    (4, 1, 64, 512, 0, SHORT),
    (8, 1, 64, 1024, 0, RAGGED),
]
UNTOUCHED = 7.0  # what `out` holds where nothing is to be written
BESIDE = [(0, 3), (70, 0)]  # tokens before and after
# The interpreter takes its time: there the cases take turns.
PLACED = [
    (*case, *beside)
    for i, case in enumerate(CASES)
    for beside in (BESIDE if torch.cuda.is_available() else BESIDE[i // 2 % 2 :][:1])
]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window", "sequences", "decodes", "padding", "dtype"),
    with_dtypes(PLACED),
)
@pytest.mark.parametrize("attention", [prefill, prefill_reference])
def test_matches_exact_attention(
    attention: Callable[..., None],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int,
    sequences: list[tuple[int, int]],
    decodes: int,
    padding: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    case = (heads, kv_heads, head_dim, block_size, window, sequences)
    assert_exact(attention, case, decodes, padding, dtype, device)


# Turns of a program that begin with a sequence's first, last and middle queries, or where none are; by tiles
# of 64 keys and of 128.
TURNS = [((8, 2, 64, 16, 0, RAGGED), 2)]
if torch.cuda.is_available():
    TURNS = [
        (case, turns)
        for turns in (2, 3, 7)
        for case in (
            (8, 2, 64, 16, 0, [*MANY, *LONG, *RAGGED]),
            (4, 2, 128, 64, 0, [*LONG, *MANY, *SHORT]),
            (2, 1, 128, 16, 0, [*RAGGED, *LONGER, *LONG]),
        )
    ]


@pytest.mark.parametrize(("case", "turns", "dtype"), with_dtypes(TURNS))
def test_a_program_takes_several_turns(
    case: tuple[int, int, int, int, int, list[tuple[int, int]]],
    turns: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on Hopper if there are many for each multiprocessor."""
    gpu = replace(gpu_of(device), multiprocessors=1)
    monkeypatch.setattr(hopper_prefill, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(hopper_prefill, "MOST_TURNS", turns)
    heads, kv_heads, *_, sequences = case
    tokens = 70 + sum(queries for queries, _ in sequences) + 3
    all_turns = kv_heads * (tokens * heads // kv_heads // 128 + len(sequences))
    assert hopper_prefill.turns_of_a_program(all_turns, 1) == turns
    assert_exact(prefill, case, 70, 3, dtype, device)


def assert_exact(
    attention: Callable[..., None],
    case: tuple[int, int, int, int, int, list[tuple[int, int]]],
    decodes: int,
    padding: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    heads, kv_heads, head_dim, block_size, window, sequences = case
    torch.manual_seed(0)
    query_lens, context_lens = (list(lengths) for lengths in zip(*sequences, strict=True))
    paged = make_paged(context_lens, kv_heads, head_dim, block_size, dtype, device)
    sizes = [decodes, *query_lens, padding]
    q = fused_queries(sum(sizes), heads, head_dim, dtype).to(device)
    out = torch.full(q.shape, UNTOUCHED, dtype=dtype, device=device)
    query_starts = torch.tensor(sizes[:-1]).cumsum(0).int().to(device)
    layer = attention_layer(heads, kv_heads, head_dim, window)
    attention(q, out, paged.prefills(query_starts, max(query_lens)), layer, paged.cache())
    before, *queries, after = q.split(sizes)
    parts = zip(queries, paged.keys, paged.values, strict=True)
    exact = [attend_exactly(x, k, v, head_dim**-0.5, window) for x, k, v in parts]
    others = [torch.full(part.shape, UNTOUCHED).double() for part in (before, after)]
    torch.testing.assert_close(
        out.cpu().double(), torch.cat([others[0], *exact, others[1]]), atol=TOLERANCE[dtype], rtol=0
    )


@pytest.mark.parametrize("attention", [prefill, prefill_reference])
def test_padding_sequences_give_zeros(
    attention: Callable[..., None], dtype: torch.dtype, device: torch.device
) -> None:
    """As in a padded step: after the real sequence one without context takes all tokens that are left."""
    torch.manual_seed(0)
    paged = make_paged([20, 0, 0, 0], 1, 64, 16, dtype, device)
    q = fused_queries(130, 2, 64, dtype).to(device)
    out = torch.full(q.shape, UNTOUCHED, dtype=dtype, device=device)
    query_starts = torch.tensor([4, 24, 130, 130, 130], dtype=torch.int32, device=device)
    attention(q, out, paged.prefills(query_starts, 130), attention_layer(2, 1, 64), paged.cache())
    exact = attend_exactly(q[4:24], paged.keys[0], paged.values[0], 0.125, 0)
    torch.testing.assert_close(out[4:24].cpu().double(), exact, atol=TOLERANCE[dtype], rtol=0)
    assert torch.equal(out[:4].cpu(), torch.full((4, 2, 64), UNTOUCHED, dtype=dtype))
    assert torch.equal(out[24:].cpu(), torch.zeros(106, 2, 64, dtype=dtype))


def test_a_chunked_prompt_equals_the_whole_prompt(device: torch.device) -> None:
    torch.manual_seed(0)
    length = 90
    paged = make_paged([length], 1, 64, 16, torch.float32, device)
    q = fused_queries(length, 4, 64, torch.float32).to(device)

    def attended(begin: int, end: int) -> torch.Tensor:
        query_starts, context_lens = (
            torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, end - begin], [end])
        )
        out = torch.empty(end - begin, 4, 64, device=device)
        batch = replace(paged.prefills(query_starts, end - begin), context_lens=context_lens)
        prefill(q[begin:end], out, batch, attention_layer(4, 1, 64), paged.cache())
        return out

    chunks = torch.cat([attended(0, 7), attended(7, 71), attended(71, length)])
    torch.testing.assert_close(chunks, attended(0, length), atol=1e-6, rtol=0)


def test_nothing_to_do(device: torch.device) -> None:
    paged = make_paged([5], 1, 64, 16, torch.float32, device)
    q = torch.zeros(0, 2, 64, device=device)
    query_starts = torch.zeros(2, dtype=torch.int32, device=device)
    for attention in (prefill, prefill_reference):
        attention(q, q, paged.prefills(query_starts, 0), attention_layer(2, 1, 64), paged.cache())

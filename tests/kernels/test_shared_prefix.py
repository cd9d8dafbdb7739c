"""Attention to prefixes that rows share: as exact as without, and as long as the tables say."""

from dataclasses import replace

import pytest
import torch
from paged import (
    NO_BLOCK,
    TOLERANCE,
    attend_exactly,
    attention_layer,
    fused_queries,
    make_paged,
    share_prefixes,
    with_dtypes,
)

from quire.kernels.attention.cascade import (
    MAX_SPANS,
    QUANTUM,
    SHORTEST,
    SharedPrefixes,
    rows_of_cascade,
    shared_lens,
)
from quire.kernels.attention.decode import decode
from quire.kernels.attention.splits import DecodeWorkspace

QUANTUM, SHORTEST, MAX_SPANS = QUANTUM.value, SHORTEST.value, MAX_SPANS.value
UNTOUCHED = 7.0


def members_of(cascades: list[list[int]], width: int, device: torch.device) -> torch.Tensor:
    padded = [cascade + [-1] * (width - len(cascade)) for cascade in cascades]
    return torch.tensor(padded, dtype=torch.int32, device=device).view(len(cascades), width)


def cascade_of(cascades: list[list[int]], batch: int, device: torch.device) -> torch.Tensor:
    owners = torch.full((batch,), -1, dtype=torch.int32)
    for number, cascade in enumerate(cascades):
        owners[cascade] = number
    return owners.to(device)


# (q heads, kv heads, head dim, block size): groups of 1, 2, 4 and 7
SHAPES = [(2, 2, 64, 16), (4, 2, 80, 32), (4, 1, 128, 64), (7, 1, 96, 128), (2, 2, 64, 1), (4, 1, 128, 4)]
if torch.cuda.is_available():
    SHAPES += [(4, 1, 256, 16), (16, 1, 192, 64)]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "dtype"), with_dtypes(SHAPES))
def test_rows_that_share_attend_to_the_same_as_alone(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    lengths = [300, 257, 290, 0, 700, 513, 513, 9, 2177, 2240]
    cascades = [[1, 0, 2], [4, 6, 5], [9, 8]]
    paged = make_paged(lengths, kv_heads, head_dim, block_size, dtype, device)
    share_prefixes(paged, cascades, [256, 512, 2176])
    width = rows_of_cascade(heads // kv_heads)
    members = members_of([*cascades, []], width, device)
    lens = shared_lens(members, paged.rows, paged.context_lens, paged.block_tables, block_size)
    assert lens.tolist() == [256, 512, 2176, 0]
    shared = SharedPrefixes(members, cascade_of(cascades, len(lengths), device), lens)
    q = fused_queries(len(lengths) + 1, heads, head_dim, dtype).to(device)
    out = torch.full(q.shape, UNTOUCHED, dtype=dtype, device=device)
    workspace = DecodeWorkspace.allocate(len(lengths), heads, head_dim, device)
    for scratch in (workspace.prefix.partials, workspace.prefix.lse):
        scratch.fill_(torch.nan)
    order = torch.randperm(len(lengths)).int().to(device)
    batch = paged.decodes(order, workspace, shared)
    decode(q, out, batch, attention_layer(heads, kv_heads, head_dim), paged.cache())
    for index, (keys, values) in enumerate(zip(paged.keys, paged.values, strict=True)):
        exact = torch.full(q[:1].shape, UNTOUCHED).double()
        if len(keys):
            exact = attend_exactly(q[index : index + 1].cpu(), keys, values, head_dim**-0.5, 0)
        got = out[index : index + 1].cpu().double()
        torch.testing.assert_close(got, exact, atol=TOLERANCE[dtype], rtol=0)
    assert (out[-1] == UNTOUCHED).all()


def test_what_was_shared_is_read_from_the_prefix_only(device: torch.device) -> None:
    """The rows' own programs take the prefix's results: spoiled ones spoil them, and those of nobody else."""
    torch.manual_seed(0)
    paged = make_paged([300, 300, 300], 1, 64, 16, torch.float32, device)
    share_prefixes(paged, [[0, 2]], [256])
    members = members_of([[0, 2]], rows_of_cascade(2), device)
    lens = shared_lens(members, paged.rows, paged.context_lens, paged.block_tables, 16)
    shared = SharedPrefixes(members, cascade_of([[0, 2]], 3, device), lens)
    paged.kv[paged.block_tables[paged.rows[0], 0].item()] = torch.nan
    q = fused_queries(3, 2, 64, torch.float32).to(device)
    out = torch.empty(q.shape, device=device)
    workspace = DecodeWorkspace.allocate(3, 2, 64, device)
    order = torch.arange(3, dtype=torch.int32, device=device)
    tables = paged.block_tables.clone()
    tables[paged.rows[2], :16] = NO_BLOCK  # whoever reads the prefix for row 2 alone reads nowhere
    batch = replace(paged.decodes(order, workspace, shared), block_tables=tables)
    decode(q, out, batch, attention_layer(2, 1, 64), paged.cache())
    assert [bool(row.isnan().all()) for row in out] == [True, False, True]


@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("group", [1, 4, 64])
def test_lens_are_what_the_tables_have_in_common(block_size: int, group: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(block_size + group)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    width = rows_of_cascade(group)
    count = 12
    columns = 4096 // block_size
    tables = torch.full((200, columns), NO_BLOCK, dtype=torch.int32)
    rows, contexts, cascades, expected = [], [], [], []
    free = torch.randperm(200, generator=generator).tolist()
    for _ in range(count):
        size = int(draw(1, min(width, 12) + 1, 1))
        length = int(draw(1, columns, 1))
        cascade = list(range(len(rows), len(rows) + size))
        base = draw(0, 3, columns).int()  # few ids, so that equal ones stand behind unequal ones too
        limits = []
        for position in range(size):
            row = free.pop()
            context = min(length * block_size + int(draw(0, 2 * block_size, 1)), columns * block_size)
            full = (context - 1) // block_size
            used = -(-context // block_size)
            own = base.clone()
            if position and int(draw(0, 2, 1)):
                own[int(draw(0, columns, 1)) :] += 5
            tables[row, :used] = own[:used]
            differing = (own[:full] != base[:full]).nonzero().flatten().tolist()
            limits.append(min([full, *differing]))
            rows.append(row)
            contexts.append(context)
        tokens = min(limits) * block_size // QUANTUM * QUANTUM
        cascades.append(cascade)
        expected.append(tokens if tokens >= SHORTEST else 0)
    found = shared_lens(
        members_of(cascades, width, device),
        torch.tensor(rows, dtype=torch.int32, device=device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        tables.to(device),
        block_size,
    )
    assert found.tolist() == expected
    assert any(expected)

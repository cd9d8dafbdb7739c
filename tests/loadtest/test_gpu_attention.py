"""What is timed of attention is what the cases say: their work, counted token by token."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.formats.kv_format import SCALED
from quire.loadtest.gpu_attention import HEAD_DIM, Case, all_cases, decode_case


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_a_case_is_of_sequences(case: Case) -> None:
    lens = zip(case.query_lens, case.context_lens, strict=True)
    assert all(0 < queries <= context for queries, context in lens)
    assert case.is_decode == case.name.startswith("decode")


def test_flops_are_those_of_the_keys_that_each_query_sees() -> None:
    case = Case("some", [5, 3, 7], [5, 1, 3], None, num_q_heads=6, num_kv_heads=2)
    seen = sum(
        context - queries + i + 1
        for context, queries in zip(case.context_lens, case.query_lens, strict=True)
        for i in range(queries)
    )
    assert case.flops == seen * 6 * 2 * 2 * HEAD_DIM


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", *SCALED])
def test_bytes_are_those_of_the_tensors_that_are_read(kv_cache_dtype: str) -> None:
    case = decode_case(3, 20, 2.0, heads=4)
    vectors = torch.zeros(3, 20, 2, case.num_kv_heads, HEAD_DIM, dtype=torch.bfloat16)
    tensors = [vectors] if kv_cache_dtype == "bfloat16" else SCALED[kv_cache_dtype].quantize(vectors)
    assert case.key_bytes(kv_cache_dtype) == sum(tensor.nbytes for tensor in tensors)
    assert case.flash_attention_3 == pytest.approx(vectors.nbytes / 2.0 / 1e6)

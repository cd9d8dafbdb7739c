"""Large groups of query heads: the cases that either kernel is timed with, and what one timing says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.kernels.attention.decode import DecodeKernel
from quire.kernels.attention.decode_reference import decode_reference
from quire.kernels.attention.prefill import PrefillKernel, prefill_reference
from quire.loadtest import gpu_attention, gpu_groups
from quire.loadtest.gpu_attention import HEAD_DIM, Case
from quire.loadtest.gpu_groups import cases, compare


def test_cases_are_of_large_groups() -> None:
    groups: dict[bool, set[int]] = {True: set(), False: set()}
    for case in cases():
        assert case.is_decode == case.name.startswith("decode")
        groups[case.is_decode].add(case.num_q_heads // case.num_kv_heads)
    assert groups == {True: {16, 24, 32}, False: {7, 12}}


@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        (Case("decode", [40, 17], [1, 1], None, 24, 1), [DecodeKernel.SPLIT, DecodeKernel.HOPPER]),
        (Case("prefill", [20, 9], [20, 9], None, 7, 1), [PrefillKernel.TRITON, PrefillKernel.HOPPER]),
    ],
    ids=["decode", "prefill"],
)
def test_both_kernels_attend_to_the_same(
    monkeypatch: pytest.MonkeyPatch, case: Case, kernels: list[object]
) -> None:
    """Plain torch stands in for the kernels, which take bf16 on a GPU only."""
    asked = []

    def decode(*given: Any, by: object) -> None:
        asked.append(by)
        decode_reference(*given[:5])

    def prefill(*given: Any, by: object) -> None:
        asked.append(by)
        prefill_reference(*given)

    def one_call(call: Callable[[int], object], sets: int) -> float:
        call(sets - 1)
        return 2.0

    monkeypatch.setattr(gpu_attention, "WORKING_SET", 1)
    monkeypatch.setattr(gpu_attention, "decode", decode)
    monkeypatch.setattr(gpu_attention, "prefill", prefill)
    monkeypatch.setattr(gpu_groups, "graph_microseconds", one_call)
    timing = compare(case, "bfloat16", device="cpu")
    assert asked == [kernels[0]] * 2 + [kernels[1]] * 2, "each is timed, and compared with fp64"
    assert 0 < timing.plain_error == timing.hopper_error < 0.02
    work = 57 * 2 * HEAD_DIM * 2 if case.is_decode else (20 * 21 + 9 * 10) // 2 * 7 * 4 * HEAD_DIM
    assert timing.hopper_rate == pytest.approx(work / 2e-6 / 1e12, abs=0.01)

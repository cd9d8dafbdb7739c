"""How products of one token are divided whose weights wait in shared memory. That they are right is tested in
test_fused_linear.py, on a GPU that has them."""

from __future__ import annotations

import pytest

from quire.kernels.linear.hopper_gemv import MOST_COLUMNS, READ, division

COLUMNS = range(128, MOST_COLUMNS + 1, 128)


@pytest.mark.parametrize("plain", [False, True])
def test_programs_divide_all_of_a_weight_evenly(plain: bool) -> None:
    for columns in COLUMNS:
        found = division(64, columns, plain=plain)
        assert found is not None
        assert found.rows % found.warps == 0
        assert columns % found.line == 0
        assert found.line * found.copied % READ.value == 0
        assert found.line * found.copied * found.rows * 2 <= 64 * 1024


def test_what_no_program_can_divide_is_left_to_others() -> None:
    for outputs, columns in ((64, 100), (64, 1088), (64, MOST_COLUMNS + 128), (7, 1024)):
        for plain in (False, True):
            assert division(outputs, columns, plain=plain) is None

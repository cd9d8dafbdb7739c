"""A few kernels are compiled to the PTX that ptx_digests.json has of them; `make ptx` compares all.

Who changes a kernel sees here that its PTX is another, and writes the new digests with the change.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import triton
from apart import run_apart

SCRIPT = Path(__file__).with_name("ptx_digests.py")
WRITTEN = json.loads(SCRIPT.with_suffix(".json").read_text())
FEW = ("90 decode_16", "80 split_output", "80 one_shot_sum", "80 two_shot_sum")


@pytest.mark.skipif(WRITTEN["triton"] != triton.__version__, reason="another Triton's PTX")
def test_kernels_are_those_that_were_written_down() -> None:
    run_apart(SCRIPT, *FEW)

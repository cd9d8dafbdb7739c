"""Kernel tests run on the GPU if there is one, else in Triton's interpreter."""

import pytest
import torch
from interpreting import do_once_what_the_interpreter_repeats
from paged import DTYPES, HAS_GPU

if not HAS_GPU:
    do_once_what_the_interpreter_repeats()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param

"""Kernel tests run on the GPU if there is one, else in Triton's interpreter."""

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

# The interpreter multiplies bf16's raw bits, so bf16 is for the GPU.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * HAS_GPU


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param

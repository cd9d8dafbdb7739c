"""How many KV blocks there are, where flags say so: a number of them, or of bytes."""

from __future__ import annotations

import re

import pytest

from quire.engine.allocation import refused_where_too_large
from quire.engine.config import EngineConfig
from quire.engine.startup import start_engine
from quire.service.commands.engine_flags import add_engine_flags
from quire.service.commands.parser import Parser
from quire.service.commands.usage_error import UsageError
from quire.service.demo import MODEL_FOLDER


def test_bytes_are_as_many_whole_blocks_as_they_hold() -> None:
    settings = {"model": MODEL_FOLDER, "device": "cpu", "swap_space": 0.0}
    info = start_engine(EngineConfig(**settings, kv_cache_memory_bytes=1_000_000))[1]
    assert info.num_blocks == 1_000_000 // info.bytes_per_block > 1
    with pytest.raises(ValueError, match=f"room for a block, {info.bytes_per_block} bytes here, got 99"):
        start_engine(EngineConfig(**settings, kv_cache_memory_bytes=99))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_gpu_blocks_override": 10**9}, f"^{10**9:,} KV blocks take [\\d,.]+ GiB, .*--num-gpu-blocks"),
        ({"num_gpu_blocks_override": 10**20}, r"KV blocks take [\d,.]+ GiB, .*--num-gpu-blocks-override"),
        ({"kv_cache_memory_bytes": 900 << 40}, r"KV blocks take 921,.* GiB, .* or --kv-cache-memory-bytes$"),
        ({"max_num_seqs": 10**10}, r"10,000,000,000 sequences, .*--max-num-seqs"),
        ({"max_num_batched_tokens": 10**13}, r"steps of 10,000,000,000,000 tokens.*--max-num-batched-tokens"),
    ],
)
def test_memory_that_cannot_be_had_is_refused_with_the_numbers_and_the_flag(
    settings: dict[str, int], told: str
) -> None:
    with pytest.raises(ValueError, match=told) as refusal:
        start_engine(EngineConfig(model=MODEL_FOLDER, device="cpu", **settings))  # type: ignore[arg-type]
    assert re.search(r", and the host has [\d,.]+ GiB: give a lower --", str(refusal.value))


def test_more_than_the_host_has_is_not_asked_of_a_system_that_would_promise_it() -> None:
    asked = []
    told = r"^a lot, and the host has [\d,.]+ GiB: give a lower --flag$"
    with (
        pytest.raises(ValueError, match=told),
        refused_where_too_large("a lot", "--flag", host_bytes=1 << 60),
    ):
        asked.append("memory")
    assert not asked


def test_blocks_and_bytes_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="both say how many KV blocks there are"):
        EngineConfig(model="m", kv_cache_memory_bytes=1 << 30, num_gpu_blocks_override=9)
    with pytest.raises(ValueError, match="--kv-cache-memory-bytes must be at least 1, got 0"):
        EngineConfig(model="m", kv_cache_memory_bytes=0)


@pytest.mark.parametrize(
    ("given", "there"), [("12884901888", 12 << 30), ("12G", 12 << 30), ("1.5k", 1500), ("2M", 2 << 20)]
)
def test_the_flag_takes_units(given: str, there: int) -> None:
    assert parsed(given) == there


@pytest.mark.parametrize("given", ["12X", "G", "much", ""])
def test_the_flag_refuses_what_is_no_number(given: str) -> None:
    with pytest.raises(UsageError, match="--kv-cache-memory-bytes: bytes are a number"):
        parsed(given)


def parsed(given: str) -> object:
    parser = Parser("quire")
    add_engine_flags(parser)
    return parser.parse(["m", "--kv-cache-memory-bytes", given]).kv_cache_memory_bytes

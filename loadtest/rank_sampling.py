"""Time drawing tokens in parts, beside gathering logits: `python -m quire.loadtest.rank_sampling --size 2`.

A vocabulary of 128,256 tokens in bf16, a process a GPU, filters as models' own defaults have them. `parts` is
what the engine does, `rounds` what it does where ranks do not write into each other's memory; `gathered` has
every rank gather all logits, and draw from them in fp32 as one rank does, `gathered_16` in 16 bits. Each is
timed in CUDA graphs, and as the engine launches it (`launched`). `parts` and `rounds` must draw the same
tokens, and the others those, but where fp32 sums of top-p's masses differ in their last bits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.loadtest.command import add_line
from quire.loadtest.rank_processes import graph_seconds, run_ranks

if TYPE_CHECKING:
    from quire.engine.parallel.group import RankGroup

VOCABULARY = 128_256
ROWS = (1, 8, 64, 256)
FILTERS: dict[str, dict[str, float]] = {
    "none": {},
    "top_p": {"top_p": 0.9, "temperature": 0.6},
    "top_k": {"top_k": 50},
    "top_k_top_p": {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    "min_p": {"min_p": 0.05},
}
CALLS = 8  # in a graph
LAUNCHES = 20


def measure(group: RankGroup, _: str, json_path: Path | None) -> None:
    """Time every way for every filter and number of rows; rank 0 tells its times as they come."""
    import torch

    from quire.engine.device.vocabulary_parts import Searched, VocabularyParts
    from quire.engine.models.config import rows_of_rank
    from quire.engine.models.vocabulary import all_logits
    from quire.kernels.backend import triton_backend
    from quire.kernels.sampling.state import SamplingState

    rank, size, device = group.rank, group.size, group.device
    backend = triton_backend()
    parts = VocabularyParts(VOCABULARY, backend, group)
    rounds = VocabularyParts(VOCABULARY, backend, group.without_peers())
    width = rows_of_rank(VOCABULARY, size)

    def gathered(dtype: torch.dtype, own: torch.Tensor, *rest: Any) -> torch.Tensor:
        return backend.sample(all_logits(own, VOCABULARY, group).to(dtype), *rest)

    for samples in ROWS:
        generator = torch.Generator(device).manual_seed(samples)  # the same on every rank
        padded = 3 * torch.randn(samples, size * width, generator=generator, device=device)
        own = padded.bfloat16()[:, rank * width : (rank + 1) * width].contiguous()
        rows = torch.arange(samples, dtype=torch.int32, device=device)
        last = torch.zeros_like(rows)
        for name, filters in FILTERS.items():
            state = SamplingState.allocate(samples, device)
            state.temperature.fill_(filters.get("temperature", 1.0))
            state.top_p.fill_(filters.get("top_p", 1.0))
            state.top_k.fill_(int(filters.get("top_k", 0)))
            state.min_p.fill_(filters.get("min_p", 0.0))
            state.seed.copy_(rows)
            searched = Searched("top_k" in filters, "top_p" in filters)

            given = (own, rows, rows, state, last)
            ways: dict[str, Callable[[], torch.Tensor]] = {
                "parts": partial(parts.sample_filtered, *given, searched),
                "rounds": partial(rounds.sample_filtered, *given, searched),
                "gathered": partial(gathered, torch.float32, *given),
                "gathered_16": partial(gathered, torch.bfloat16, *given),
            }
            if not filters:
                ways["parts"] = partial(parts.sample, *given)
                ways["rounds"] = partial(rounds.sample, *given)
            drawn = {way: call() for way, call in ways.items()}
            differ = {
                f"differ_from_{way}": int((drawn["parts"] != drawn[way]).sum())
                for way in ("rounds", "gathered_16")
            }
            for way, call in ways.items():
                line: dict[str, Any] = {"way": way, "filters": name, "rows": samples, "ranks": size}
                line["us"] = round(graph_seconds(call, group, CALLS) * 1e6, 1)
                line["launched_us"] = round(_launched_seconds(call, group) * 1e6, 1)
                if rank == 0:
                    add_line(line | (differ if way == "parts" else {}), json_path)


def _launched_seconds(call: Callable[[], object], group: RankGroup) -> float:
    """Return what a call takes that the host launches, kernel by kernel, one call after the other."""
    import torch

    torch.cuda.synchronize()
    group.barrier()
    begin = time.perf_counter()
    for _ in range(LAUNCHES):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / LAUNCHES


if __name__ == "__main__":
    sys.exit(run_ranks(__doc__, measure))

"""All experiments on the real engine, one after the other, as far as the time goes."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from quire.engine.config import EngineConfig
from quire.loadtest.attention_variants import DECODES, PREFILLS
from quire.loadtest.evaluation.real import attention, plan, transfers
from quire.loadtest.evaluation.real.case import Case, CaseRun, Outcome, Workload, measure
from quire.loadtest.evaluation.real.results import Results
from quire.loadtest.evaluation.real.server import RealServer
from quire.loadtest.evaluation.real.steps import record_steps
from quire.loadtest.evaluation.real.variants import measure_variants
from quire.loadtest.simulator.systems import Kind

POOL_TOKENS = 131_072  # of KV memory: single steps are timed over more of it than the runs may use
SMALL_POOL_TOKENS = 32_768  # where blocks are larger
HOST_GIB = 2.0  # 16,384 tokens of Llama-8B
START_SECONDS = 25.0  # of an engine with other blocks, about
KERNEL_SECONDS = 10.0  # of each of the three experiments with kernels, about
PARTS = ("runs", "attention", "transfers", "variants")


class Evaluation:
    """`left_out`: what there was no time for; `failed`: what raised, and kept nothing else from running."""

    def __init__(
        self,
        model: str,
        results: Results,
        device: torch.device,
        seconds: float,
        parts: Sequence[str] = PARTS,
    ) -> None:
        self.left_out: list[str] = []
        self.failed: list[str] = []
        self._model = model
        self._results = results
        self._parts = parts
        self._device = device
        self._begin = time.monotonic()
        self._end = self._begin + seconds
        self._overloads: dict[tuple[Workload, Kind], tuple[Case, Outcome]] = {}

    def run(self) -> None:
        self._with_blocks_of_16()
        self._clean_up()
        for size in plan.LARGER_BLOCKS if "runs" in self._parts else ():
            cases = list(plan.block_size_cases(size))
            if self._has_time(START_SECONDS + sum(case.until for case in cases), f"blocks of {size}"):
                with self._guard(f"blocks of {size}"):
                    self._cases(self._start(size, SMALL_POOL_TOKENS), cases)
                self._clean_up()

    def _with_blocks_of_16(self) -> None:
        server = self._start(16, POOL_TOKENS)
        if "runs" in self._parts:
            with self._guard("times of single steps"):
                self._say("times of single steps")
                self._results.add_steps(16, record_steps(server.runner))
            self._cases(server, plan.overloads())
        if "attention" in self._parts:
            with self._guard("attention kernels"):
                self._attention()
        if "transfers" in self._parts:
            with self._guard("transfers"):
                self._transfers(server)
        if "runs" in self._parts:
            self._open_loops(server, plan.CURVES, plan.SHARES)
        if "variants" in self._parts:
            self._variants()
        if "runs" in self._parts:
            self._cases(server, plan.further_cases())
            self._open_loops(server, plan.FURTHER_CURVES, plan.SHARES[:2])

    # -- runs of the engine ---------------------------------------------------------------------------

    def _start(self, block_size: int, pool_tokens: int) -> RealServer:
        self._say(f"start the engine, blocks of {block_size}")
        server = RealServer(
            EngineConfig(
                model=self._model,
                load_format="dummy",
                kv_cache_dtype="model",  # as in the paper, and as attention alone is measured here
                max_model_len=plan.MAX_MODEL_LEN,
                max_num_seqs=plan.MAX_NUM_SEQS,
                max_num_batched_tokens=plan.MAX_BATCHED_TOKENS,
                block_size=block_size,
                num_gpu_blocks_override=pool_tokens // block_size,
                swap_space=HOST_GIB,
            )
        )
        self._say(f"{server.info.architecture}, {server.info.num_blocks} blocks; warm up")
        for case in plan.warm_ups(block_size):
            measure(server, case)
        return server

    def _cases(self, server: RealServer, cases: Iterable[Case]) -> None:
        for case in cases:
            if self._has_time(case.until, str(case)):
                with self._guard(str(case)):
                    self._case(server, case)

    def _case(self, server: RealServer, case: Case) -> None:
        outcome = measure(server, case)
        self._results.add("runs", CaseRun(case=case, outcome=outcome))
        self._results.add_steps(case.block_size, server.records)
        if case.share is None:
            self._overloads.setdefault((case.workload, case.kind), (case, outcome))
        self._say(
            f"{case}: sustained {outcome.sustained:.2f} requests/s, {outcome.mean_requests:.1f} at once, "
            f"{1e3 * outcome.normalized_latency:.1f} ms/token, {outcome.finished} ended, "
            f"{outcome.unfinished} did not"
        )

    def _open_loops(self, server: RealServer, kinds: Sequence[Kind], shares: Sequence[float]) -> None:
        """Run what Fig. 12 shows."""
        for share in shares:
            for workload in plan.ARRIVALS:
                for kind in kinds:
                    if (workload, kind) in self._overloads:
                        self._cases(server, [plan.open_loop(*self._overloads[workload, kind], share)])

    # -- kernels --------------------------------------------------------------------------------------

    def _attention(self) -> None:
        """Run what Fig. 18a shows."""
        if not self._has_time(KERNEL_SECONDS, "attention kernels"):
            return
        for heads in attention.HEADS:
            for batch in attention.BATCHES:
                for context in attention.CONTEXTS:
                    timed = attention.measure_attention(self._device, self._dtype, heads, batch, context)
                    self._results.add("attention", timed)
            self._say(f"attention kernels, heads of {heads}: {timed.microseconds}")
            self._clean_up()

    def _transfers(self, server: RealServer) -> None:
        """Run what Fig. 19a shows."""
        if not self._has_time(KERNEL_SECONDS, "transfers"):
            return
        for timed in transfers.measure_transfers(server.runner):
            self._results.add("transfers", timed)
            self._say(f"transfers: {timed}")
        self._clean_up()

    def _variants(self) -> None:
        """Run what the tutorials' tables show."""
        for is_decode, sizes in ((True, DECODES), (False, PREFILLS)):
            for batch, length in sizes:
                name = f"attention variants, {batch} × {length}"
                if self._has_time(KERNEL_SECONDS / 4, name):
                    with self._guard(name):
                        timed = measure_variants(
                            self._device, self._dtype, batch, length, is_decode=is_decode
                        )
                        self._results.add("variants", timed)
                        self._say(f"attention variants: {timed}")

    # -- small things ---------------------------------------------------------------------------------

    @property
    def _is_cuda(self) -> bool:
        return self._device.type == "cuda"

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self._is_cuda else torch.float32

    def _clean_up(self) -> None:
        """Give the device's memory back."""
        gc.collect()
        if self._is_cuda:
            torch.cuda.empty_cache()

    @contextmanager
    def _guard(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            traceback.print_exc()
            self.failed.append(name)

    def _has_time(self, seconds: float, name: str) -> bool:
        """Say whether something of about so many seconds can be done; if not, keep its name."""
        if time.monotonic() + seconds <= self._end:
            return True
        self.left_out.append(name)
        return False

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._begin:7.1f} s  {text}", flush=True)

"""All experiments on the real engine, one after the other, as far as the time goes."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import torch

from quire.engine.config import EngineConfig
from quire.loadtest.attention_variants import DECODES, PREFILLS
from quire.loadtest.evaluation.real import attention, plan, transfers, whole_models
from quire.loadtest.evaluation.real.case import Case, CaseRun, Outcome, measure
from quire.loadtest.evaluation.real.results import Results
from quire.loadtest.evaluation.real.server import RealServer
from quire.loadtest.evaluation.real.steps import record_steps
from quire.loadtest.evaluation.real.variants import VariantTimes, measure_variants
from quire.loadtest.evaluation.real.ways import WayOutcome
from quire.loadtest.simulator.geometry import OPT_13B
from quire.loadtest.simulator.systems import Kind

# What reserves memory has more blocks than it can use; one that does not has those that its slots are.
POOL_BYTES = 32_768 * OPT_13B.kv_bytes_per_token
HOST_GIB = plan.HOST_SLOTS * OPT_13B.kv_bytes_per_token / 2**30
START_SECONDS = 30.0  # of an engine, about
KERNEL_SECONDS = 10.0  # of each experiment with kernels, about
MODEL_SECONDS = 60.0  # of whole models, about
PARTS = (
    "overloads",
    "knee",
    "sharing",
    "transfers",
    "attention",
    "blocks",
    "models",
    "variants",
    "knees",
    "long",
)
FILES = {"transfers": ("transfers",), "attention": ("attention", "block-sizes"), "models": ("models",)}
FILES |= {"variants": ("variants",)}


class Evaluation:
    """`left_out`: what there was no time for; `failed`: what raised, and kept nothing else from running.

    What the results hold already is not measured again.
    """

    def __init__(
        self,
        model: str,
        results: Results,
        device: torch.device,
        seconds: float,
        parts: Sequence[str] = PARTS,
        pool_bytes: int = POOL_BYTES,
    ) -> None:
        self.left_out: list[str] = []
        self.failed: list[str] = []
        self._model = model
        self._results = results
        self._parts = parts
        self._device = device
        self._pool_bytes = pool_bytes
        self._begin = time.monotonic()
        self._end = self._begin + seconds
        self._outcomes = {run.case: run.outcome for run in results.read("runs", CaseRun)}
        self._server: RealServer | None = None
        self._unstartable: set[int] = set()  # block sizes

    def run(self) -> None:
        parts: dict[str, Callable[[], None]] = {
            "overloads": lambda: self._cases(plan.overloads()),
            "knee": lambda: self._knees(plan.KNEE_KINDS[:1]),
            "knees": lambda: self._knees(plan.KNEE_KINDS),
            "sharing": lambda: self._cases(plan.sharing()),
            "transfers": self._transfers,
            "attention": self._attention,
            "blocks": self._blocks,
            "models": self._whole_models,
            "variants": self._variants,
            "long": self._long,
        }
        for part in self._parts:
            with self._guard(part):
                parts[part]()
        self._stop()

    # -- runs of the engine ---------------------------------------------------------------------------

    def _server_of(self, block_size: int) -> RealServer:
        """Return the engine with such blocks: the one that runs, or a new one in its place."""
        if self._server is not None and self._server.info.block_size == block_size:
            return self._server
        self._stop()
        self._say(f"start the engine, blocks of {block_size}")
        self._unstartable.add(block_size)
        server = RealServer(
            EngineConfig(
                model=self._model,
                load_format="dummy",
                kv_cache_dtype="model",  # as in the paper, and as attention alone is measured here
                max_model_len=plan.MAX_MODEL_LEN,
                max_num_seqs=plan.MAX_NUM_SEQS,
                max_num_batched_tokens=plan.MAX_BATCHED_TOKENS,
                block_size=block_size,
                kv_cache_memory_bytes=self._pool_bytes,
                swap_space=HOST_GIB,
            )
        )
        self._say(f"{server.info.architecture}, {server.info.num_blocks} blocks; warm up")
        for case in plan.warm_ups(block_size):
            measure(server, case)
        if block_size == 16 and not self._results.has_steps(16):
            self._say("times of single steps")
            self._results.add_steps(16, record_steps(server.runner))
        self._unstartable.remove(block_size)
        self._server = server
        return server

    def _stop(self) -> None:
        """Give the engine's memory back."""
        self._server = None
        self._clean_up()

    def _cases(self, cases: Iterable[Case]) -> None:
        for case in cases:
            if case in self._outcomes:
                continue
            size = case.block_size
            start = (
                0.0 if self._server is not None and self._server.info.block_size == size else START_SECONDS
            )
            if size not in self._unstartable and self._has_time(start + case.until, str(case)):
                with self._guard(str(case)):
                    self._case(self._server_of(size), case)

    def _case(self, server: RealServer, case: Case) -> None:
        outcome = measure(server, case)
        self._results.add("runs", CaseRun(case=case, outcome=outcome))
        self._results.add_steps(case.block_size, server.records)
        self._outcomes[case] = outcome
        self._say(
            f"{case}: sustained {outcome.sustained:.2f} requests/s, {outcome.mean_requests:.1f} at once, "
            f"{1e3 * outcome.normalized_latency:.1f} ms/token, {outcome.finished} ended, "
            f"{outcome.unfinished} did not"
        )

    def _knees(self, kinds: Sequence[Kind]) -> None:
        """Run what Fig. 12 shows around the knees."""
        limit = plan.latency_limit(self._results.model)
        for kind in kinds:
            case = plan.overload("ShareGPT", kind)
            self._cases([case])
            if case not in self._outcomes:
                continue
            sustained = self._outcomes[case].sustained
            low, high = (share * sustained for share in plan.KNEE_SHARES)
            for _ in range(plan.KNEE_STEPS):
                middle = (low * high) ** 0.5
                outcome = self._open_loop(case, sustained, middle, plan.KNEE_SECONDS)
                if outcome is None:
                    break
                low, high = (middle, high) if outcome.normalized_latency <= limit else (low, middle)

    def _long(self) -> None:
        case = plan.overload("ShareGPT")
        self._cases([case])
        if case in self._outcomes:
            sustained = self._outcomes[case].sustained
            self._open_loop(case, sustained, plan.LONG_SHARE * sustained, plan.LONG_SECONDS)

    def _open_loop(
        self, overloaded: Case, sustained: float, rate: float, seconds: tuple[float, float]
    ) -> Outcome | None:
        case = plan.open_loop(overloaded, sustained, rate, seconds)
        self._cases([case])
        return self._outcomes.get(case)

    def _blocks(self) -> None:
        for size in (16, *plan.BLOCK_SIZES):
            self._cases(plan.block_size_cases(size))

    # -- kernels --------------------------------------------------------------------------------------

    def _attention(self) -> None:
        """Run what Fig. 18 shows of kernels."""
        sizes = {each.block_size for each in self._results.read("block-sizes", attention.BlockSizeTime)}
        for size in attention.SIZES:
            name = f"attention kernels, blocks of {size}"
            if size not in sizes and self._has_time(KERNEL_SECONDS / 4, name):
                with self._guard(name):
                    by_size = attention.measure_block_size(self._device, self._dtype, size)
                    self._results.add("block-sizes", by_size)
                    self._say(f"{by_size}")
        self._clean_up()
        timed = self._results.read("attention", attention.AttentionTime)
        there = {(each.heads, each.batch, each.context) for each in timed}
        for case in product(attention.HEADS, attention.BATCHES, attention.CONTEXTS):
            name = f"attention kernels, {case}"
            if case not in there and self._has_time(KERNEL_SECONDS / 10, name):
                with self._guard(name):
                    self._results.add(
                        "attention", attention.measure_attention(self._device, self._dtype, *case)
                    )
                self._clean_up()

    def _transfers(self) -> None:
        """Run what Fig. 19a shows."""
        if self._results.read("transfers", transfers.TransferTime):
            return
        if self._has_time(KERNEL_SECONDS + (START_SECONDS if self._server is None else 0), "transfers"):
            for timed in transfers.measure_transfers(self._server_of(16).runner):
                self._results.add("transfers", timed)
                self._say(f"transfers: {timed}")
            self._clean_up()

    def _variants(self) -> None:
        """Run what the tutorials' tables show."""
        there = {
            (each.is_decode, each.batch, each.length) for each in self._results.read("variants", VariantTimes)
        }
        for is_decode, sizes in ((True, DECODES), (False, PREFILLS)):
            for batch, length in sizes:
                name = f"attention variants, {batch} × {length}"
                if (is_decode, batch, length) in there or not self._has_time(KERNEL_SECONDS / 4, name):
                    continue
                with self._guard(name):
                    timed = measure_variants(self._device, self._dtype, batch, length, is_decode=is_decode)
                    self._results.add("variants", timed)
                    self._say(f"attention variants: {timed}")

    def _whole_models(self) -> None:
        """Run the tutorials' ways as whole engines."""
        there = self._results.read("models", WayOutcome)
        if len(there) > len(whole_models.WAYS) + 1 or not self._has_time(MODEL_SECONDS, "whole models"):
            return
        self._stop()
        self._results.clear(["models"])  # each is compared with the contiguous one's tokens
        for outcome in whole_models.measure_all(whole_models.QWEN25_05B, whole_models.Work(), self._device):
            self._results.add("models", outcome)
            self._say(f"{outcome}")

    # -- small things ---------------------------------------------------------------------------------

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float16 if self._device.type == "cuda" else torch.float32

    def _clean_up(self) -> None:
        """Give the device's memory back."""
        gc.collect()
        if self._device.type == "cuda":
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

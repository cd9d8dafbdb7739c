"""A server with the demo model whose requests may be poisoned: `python -m tests.service.poisoned PORT`.

A request with seed POISON + p makes each step raise that computes its token p or a later one; one with seed
FATAL makes a step raise after which the device computes nothing.
"""

from __future__ import annotations

import sys
from typing import ClassVar
from unittest.mock import patch

import quire.engine.rank
from quire.engine.client import AsyncEngine
from quire.engine.config import EngineConfig
from quire.engine.device.runner import ModelRunner
from quire.engine.device.streams import DeviceResult
from quire.engine.logs import configure_logging
from quire.engine.process import main as run_engine
from quire.engine.schedule.plan import StepPlan
from quire.service.config import ServiceConfig
from quire.service.demo import MODEL_FOLDER
from quire.service.server import serve
from quire.service.text.tokenizer import Tokenizer

POISON = 1 << 40
FATAL = 1 << 50


class PoisonedRunner(ModelRunner):
    seeds: ClassVar[dict[int, int]] = {}  # by row
    broken = False

    def _execute(self, plan: StepPlan) -> DeviceResult:
        self.seeds.update({start.row: start.params.seed or 0 for start in plan.starts})
        result = super()._execute(plan)
        for row, length in zip(plan.rows.tolist(), plan.context_lens.tolist(), strict=True):
            if self.seeds[row] == FATAL:
                self.broken = True
            if POISON <= self.seeds[row] < POISON + length or self.broken:
                raise RuntimeError("poison")
        return result

    def settle(self) -> None:
        super().settle()
        if self.broken:
            raise RuntimeError("the device is lost")


async def start_engine() -> AsyncEngine:
    config = EngineConfig(model=MODEL_FOLDER, num_gpu_blocks_override=200, max_num_seqs=64, swap_space=0)
    started = AsyncEngine(config, program=("tests.service.poisoned", "engine"))
    await started.start()
    return started


def main() -> None:
    if sys.argv[1] == "engine":
        del sys.argv[1]
        with patch.object(quire.engine.rank, "ModelRunner", PoisonedRunner):
            run_engine()
    configure_logging("json")
    service = ServiceConfig(served_model_names=("tiny",), port=int(sys.argv[1]))
    sys.exit(serve(service, start_engine, lambda: Tokenizer.from_folder(MODEL_FOLDER)))


if __name__ == "__main__":
    main()

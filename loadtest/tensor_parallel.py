"""A model over several GPUs beside one, in one go: `python -m quire.loadtest.tensor_parallel`.

In this order, each in processes of its own and for so long at most that a hang loses nothing else: tests of
the kernels on one GPU (`kernels`), sums over ranks that are streams of one GPU (`streams`), sums over the
ranks by size (`sums`), tokens drawn in parts of the vocabulary (`sampling`), log-probabilities and tokens of
a small model (`equality`), workloads of `quire bench` with all ranks, then with one (`bench`), a rank killed
in mid-stream (`fault`), and workloads with NCCL's sums alone (`nccl`). If the ranks are not equal to one,
NCCL's sums are tried, and benched. Weights are dummies. Results go to one JSON file, written anew after each
part. NVLink multicast is never used.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.model_configs import write_model_folders
from quire.loadtest.provenance import device_name
from quire.loadtest.side_by_side import Command, run

PARTS = ("kernels", "streams", "sums", "sampling", "equality", "bench", "fault", "nccl")
MODELS = ("llama-8b", "qwen3-14b")
WORKLOADS = {"llama-8b": "single,few,decode256,mixed,prefill", "qwen3-14b": "single,few,decode256"}
NCCL_WORKLOAD = "single,few"
NCCL_ALONE = "--disable-custom-all-reduce"
SECONDS = {"kernels": 110, "streams": 60, "sums": 90, "sampling": 60, "equality": 110, "bench": 150}
SECONDS |= {"fault": 60, "nccl": 90}


class Run:
    """Commands that run one stage after the other, and what they have given so far."""

    def __init__(self, json_path: Path, size: int, end: float, folder: Path) -> None:
        self._json = json_path
        self._end = end
        self._folder = folder
        self._figures: dict[str, Any] = {"size": size}
        self.failed = False

    def stage(self, part: str, *commands: list[str], gpus: list[int] | None = None) -> bool:
        """Run commands side by side, which leave lines of JSON in files *.result; tell if all went well.

        gpus: the only one that each of them sees.
        """
        made = [
            Command(words, SECONDS[part], None if gpus is None else gpus[i])
            for i, words in enumerate(commands)
        ]
        ended = run(made, self._end)
        for result in sorted(self._folder.glob("*.result")):
            lines = result.read_text(encoding="utf-8").splitlines()
            self._figures[part] = self._figures.get(part, []) + [json.loads(line) for line in lines]
            result.unlink()
        wrong = [asdict(each) for each in ended if each.reason is not None]
        self._figures["failed"] = self._figures.get("failed", []) + wrong
        self.failed |= bool(wrong)
        write_json(self._json, device_name(), self._figures)
        return not wrong


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--size", type=int, default=2, help="ranks beside one; 2 if left out")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}; all if left out")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {','.join(MODELS)}, to bench")
    parser.add_argument("--workload", help="what to bench; if left out what the model is known by elsewhere")
    parser.add_argument("--runs", type=int, default=1, help="of each workload; the median counts")
    parser.add_argument(
        "--seconds", type=float, default=530, help="for all of it; what is left then is not run"
    )
    parser.add_argument("--json", type=Path, default=Path("tensor-parallel.json"), help="where results go")
    arguments = parse_for_cuda(parser)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # ranks that are streams wait for each other
    end = time.monotonic() + arguments.seconds
    parts, models, size = arguments.parts.split(","), arguments.models.split(","), str(arguments.size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model_folders(folder)
        run = Run(arguments.json, arguments.size, end, folder)

        def bench(model: str, ranks: str, *rest: str, workload: str | None = None) -> list[str]:
            words = ["-m", "quire.cli", "bench", f"{folder}/{model}", "--load-format", "dummy"]
            words += ["--workload", workload or arguments.workload or WORKLOADS[model]]
            words += ["--runs", str(arguments.runs), "--tensor-parallel-size", ranks, *rest]
            return [*words, "--result-file", f"{folder}/{model}.result"]

        result = ["--json", f"{folder}/part.result"]
        tests = ["-m", "pytest", "-q", "-n", "8", "tests/kernels/test_all_reduce.py"]
        if "kernels" in parts:
            run.stage("kernels", tests, gpus=[0])
        if "streams" in parts:
            run.stage("streams", ["-m", "quire.loadtest.one_gpu_sums", *result], gpus=[0])
        if "sums" in parts:
            run.stage("sums", ["-m", "quire.loadtest.rank_sums", "--size", size, *result])
        if "sampling" in parts:
            run.stage("sampling", ["-m", "quire.loadtest.rank_sampling", "--size", size, *result])
        peers: list[str] = []
        if "equality" in parts:
            equality = ["-m", "quire.loadtest.rank_equality", "--size", size, *result]
            if not run.stage("equality", equality):
                peers = [NCCL_ALONE]
                run.stage("equality", [*equality, *peers])
        if "bench" in parts:
            for model in models:
                run.stage("bench", bench(model, size, *peers))
            alone = [bench(model, "1") for model in models]
            for i in range(0, len(alone), arguments.size):
                few = alone[i : i + arguments.size]
                run.stage("bench", *few, gpus=list(range(len(few))))
        if "fault" in parts:
            run.stage("fault", ["-m", "quire.loadtest.rank_fault", "--size", size, *result])
        if "nccl" in parts and not peers:
            run.stage("nccl", bench(models[0], size, NCCL_ALONE, workload=NCCL_WORKLOAD))
    print("some parts FAILED: see above, and `failed` in the JSON" if run.failed else "all parts are done")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())

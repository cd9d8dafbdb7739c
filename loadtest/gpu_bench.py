"""Every GPU figure in one go: `python -m quire.loadtest.gpu_bench [--output FOLDER] [--runs N]`.

Kernels first, then a Qwen3-0.6B and a Llama-3.1-8B configuration with dummy weights, offline and served.
Needs one CUDA device; about half an hour on an H100.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from quire.loadtest.command import command_parser
from quire.loadtest.model_configs import write_model_folders
from quire.service.demo import MODEL_FOLDER

RESULTS = Path(__file__).parent / "results"
OFFLINE = {
    "qwen3-0.6b": "single,decode256,mixed,sharegpt,alpaca,prefix,prefill",
    "llama-8b": "single,decode256,mixed,sharegpt,prefix,prefill,parallel8,beam4,beam6",
}
IN_ORDER = {"qwen3-0.6b": "mixed,sharegpt,alpaca", "llama-8b": "mixed,sharegpt"}  # as a server gets them
IN_BF16 = "single,decode256,mixed,sharegpt,prefill"  # as well: by default Hopper's caches are in fp12
ATTENTION = ["-m", "quire.loadtest.gpu_attention"]
FEW_BLOCKS = ["--num-gpu-blocks-override", "2048", "--workload", "pressure"]


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the results go (added to)")
    parser.add_argument("--runs", type=int, default=3, help="the median run counts")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    output = arguments.output.resolve()
    with tempfile.TemporaryDirectory() as models:
        write_model_folders(Path(models))
        folders = [MODEL_FOLDER, *(f"{models}/{model}" for model in OFFLINE)]
        commands = [
            [*ATTENTION, "--json", str(output / "attention.json")],
            ["-m", "quire.loadtest.gpu_kernels", "--json", str(output / "kernels.json")],
            ["-m", "quire.loadtest.gpu_layer", "--json", str(output / "layer.json")],
            ["-m", "quire.loadtest.gpu_products", "--json", str(output / "products.json")],
            ["-m", "quire.loadtest.gpu_experts", "--json", str(output / "experts.json")],
            ["-m", "quire.loadtest.gpu_quantised_experts", "--json", str(output / "quantised-experts.json")],
            *(
                [*ATTENTION, "--kv-cache-dtype", name, "--json", str(output / f"attention-{short}.json")]
                for name, short in (("fp8_e4m3", "fp8"), ("fp12_e4m7", "fp12"))
            ),
            ["-m", "quire.loadtest.rounded_cache", *folders, "--json", str(output / "rounded-cache.json")],
        ]
        runs = ["--runs", str(arguments.runs)]
        for model, workloads in OFFLINE.items():
            bench = ["-m", "quire.cli", "bench", f"{models}/{model}", "--load-format", "dummy"]
            bench += [*runs, "--result-file", str(output / "offline.jsonl")]
            commands += (
                [*bench, "--workload", workloads, "--profile", f"{models}/traces"],
                [*bench, "--in-order", "--workload", IN_ORDER[model]],
                [*bench, "--kv-cache-dtype", "model", "--workload", IN_BF16],
            )
        for order in ([], ["--in-order"]):
            for mode in ("swap", "recompute", "auto"):
                bench = ["-m", "quire.cli", "bench", f"{models}/llama-8b", "--load-format", "dummy"]
                options = [*FEW_BLOCKS, *order, "--preemption-mode", mode, "--runs", "1"]
                commands.append([*bench, *options, "--result-file", str(output / "offline.jsonl")])
        for model in OFFLINE:
            startup = [
                "-m",
                "quire.loadtest.startup_time",
                f"{models}/{model}",
                "--load-format",
                "dummy",
                *runs,
            ]
            commands.append([*startup, "--result-file", str(output / "startup.jsonl")])
        served = ["-m", "quire.loadtest.served", f"{models}/qwen3-0.6b", *runs]
        commands.append([*served, "--result-file", str(output / "served.jsonl")])
        failed = [command for command in commands if _run(command) != 0]
    for command in failed:
        print(f"failed: python {' '.join(command)}", file=sys.stderr)
    return 1 if failed else 0


def _run(command: list[str]) -> int:
    print(f"\n$ python {' '.join(command)}", flush=True)
    return subprocess.run([sys.executable, *command], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

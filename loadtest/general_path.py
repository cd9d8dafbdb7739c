"""Compare a model by transformers' code with the native decoder: `python -m quire.loadtest.general_path`.

Both with dummy weights, offline, a workload after the other. Prints of each workload the tokens a second of
both, and the share that transformers' code reaches. Needs one CUDA device.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.model_configs import write_model_folders
from quire.loadtest.provenance import device_name

MODELS = "llama-8b,qwen3-0.6b"
WORKLOADS = "single,few,decode256,mixed,prefill"
PATHS = ("native", "transformers")


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--models", default=MODELS, help=f"of quire.loadtest.model_configs ({MODELS})")
    parser.add_argument("--workloads", default=WORKLOADS, help=f"of quire.loadtest.workloads ({WORKLOADS})")
    parser.add_argument("--runs", type=int, default=3, help="the median run counts (3)")
    parser.add_argument("--json", type=Path, help="where one JSON object goes")
    arguments = parse_for_cuda(parser)
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model_folders(folder)
        for model in arguments.models.split(","):
            rates = {path: _rates(folder, model, path, arguments) for path in PATHS}
            if not all(rates.values()):
                return 1
            figures[model] = {
                workload: {
                    "native": native,
                    "transformers": rates["transformers"][workload],
                    "share": round(rates["transformers"][workload] / native, 3),
                }
                for workload, native in rates["native"].items()
            }
            print(model, json.dumps(figures[model], indent=1), flush=True)
    write_json(arguments.json, device_name(), figures)
    return 0


def _rates(folder: Path, model: str, path: str, arguments: object) -> dict[str, float]:
    """Return the tokens in and out a second of each workload; none if the bench failed."""
    lines = folder / f"{model}-{path}.jsonl"
    runs, workloads = vars(arguments)["runs"], vars(arguments)["workloads"]
    command = [sys.executable, "-m", "quire.cli", "bench", str(folder / model), "--load-format", "dummy"]
    command += ["--model-impl", path, "--workload", workloads, "--runs", str(runs)]
    if subprocess.run([*command, "--result-file", str(lines)], check=False).returncode:
        return {}
    results = map(json.loads, lines.read_text(encoding="utf-8").splitlines())
    return {each["workload"]: each["out_tok_s"] + each["in_tok_s"] for each in results}


if __name__ == "__main__":
    sys.exit(main())

"""The paper's experiments on a real engine: `python -m quire.loadtest.evaluation.real`.

Runs them on the GPU (or slowly on a CPU) with dummy weights of OPT-13B's configuration, or with MODEL, and
writes each result as soon as it is there. Each call ends after so many seconds, and the next one goes on
where it stopped: all of it takes about 100 minutes on an H100, and what is worth most comes first.
`make evaluation` makes figures of the results.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from quire.loadtest.command import command_parser
from quire.loadtest.evaluation.real.evaluation import FILES, PARTS, Evaluation
from quire.loadtest.evaluation.real.results import Results
from quire.loadtest.model_configs import write_model_folders

FOLDER = Path(__file__).parents[2] / "results" / "evaluation" / "real"
NAMES = {"opt-13b": "OPT-13B", "llama-8b": "Llama-8B"}  # of models that there are configurations of


def main(argv: list[str] | None = None) -> int:
    """Return 0, or 1 when a part failed."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--model", default="opt-13b", help=f"{', '.join(NAMES)}, or a folder, whose weights are not read"
    )
    parser.add_argument(
        "--output", type=Path, help="where the results go; a folder of the model's if left out"
    )
    parser.add_argument("--seconds", type=float, default=580.0, help="begin nothing that would take longer")
    parser.add_argument(
        "--parts", default=",".join(PARTS[:-1]), help=f"which, in which order: {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--kv-cache-memory-bytes", type=int, help="of the engine; room for all systems' blocks"
    )
    parser.add_argument("--afresh", action="store_true", help="remove what the parts have measured before")
    arguments = parser.parse_args(argv)
    parts = arguments.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts takes {', '.join(PARTS)}, got {arguments.parts}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    model_name = Path(arguments.model).name
    with tempfile.TemporaryDirectory() as models:
        model = arguments.model
        if model in NAMES:
            write_model_folders(Path(models))
            model = f"{models}/{model}"
        results = Results(
            arguments.output or FOLDER / model_name, NAMES.get(model_name, model_name), device_name
        )
        if arguments.afresh:
            for part in parts:
                results.clear(FILES.get(part, ("runs", "steps")))
        given = (
            {} if arguments.kv_cache_memory_bytes is None else {"pool_bytes": arguments.kv_cache_memory_bytes}
        )
        evaluation = Evaluation(model, results, device, arguments.seconds, parts, **given)
        evaluation.run()
    for left_out in evaluation.left_out:
        print(f"left out for want of time: {left_out}")
    for failed in evaluation.failed:
        print(f"failed: {failed}")
    return 1 if evaluation.failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The paper's experiments on a real engine: `python -m quire.loadtest.evaluation.real --output FOLDER`.

Runs them on the GPU (or slowly on a CPU) with dummy weights of a Llama-8B configuration, or with MODEL, and
writes each result as soon as it is there, so that a run that is cut off loses nothing. On an H100 all of it
takes about seven minutes, and what is worth most comes first. `make evaluation` makes figures of the results.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from quire.loadtest.command import command_parser
from quire.loadtest.evaluation.real.evaluation import PARTS, Evaluation
from quire.loadtest.evaluation.real.results import Results
from quire.loadtest.model_configs import write_model_folders

FOLDER = Path(__file__).parents[2] / "results" / "evaluation" / "real"


def main(argv: list[str] | None = None) -> int:
    """Return 0, or 1 when a part failed."""
    parser = command_parser(__doc__)
    parser.add_argument("--model", help="a model folder, whose weights are not read; Llama-8B if left out")
    parser.add_argument("--output", type=Path, default=FOLDER, help="where the results go")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin nothing that would take longer")
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="which; files of the others in the folder are left alone"
    )
    arguments = parser.parse_args(argv)
    parts = arguments.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts takes {', '.join(PARTS)}, got {arguments.parts}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    with tempfile.TemporaryDirectory() as models:
        if arguments.model is None:
            write_model_folders(Path(models))
        model = arguments.model or f"{models}/llama-8b"
        results = Results(arguments.output, name)
        evaluation = Evaluation(model, results, device, arguments.seconds, parts)
        evaluation.run()
    for left_out in evaluation.left_out:
        print(f"left out for want of time: {left_out}")
    for failed in evaluation.failed:
        print(f"failed: {failed}")
    return 1 if evaluation.failed else 0


if __name__ == "__main__":
    sys.exit(main())

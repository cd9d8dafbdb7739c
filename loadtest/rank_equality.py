"""Compare what several ranks give with what one gives: `python -m quire.loadtest.rank_equality --size 2`.

All ranks generate, greedily and with CUDA graphs; then one rank is asked for the log-probabilities of the
same texts, position by position. So one difference does not lead to others.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.logs import configure_logging
from quire.engine.messages import Output, Request, SamplingParams
from quire.engine.startup import start_with_graphs
from quire.loadtest.command import add_line, command_parser
from quire.loadtest.model_configs import COMMON, CONFIGS

TOLERANCE = 0.06  # most that bf16 lets two log-probabilities differ by
CONFIG = {
    **COMMON,
    **CONFIGS["llama-8b"],
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
    "vocab_size": 32003,
    "rope_theta": 10000,
    "max_position_embeddings": 2048,
}
Text = tuple[list[int], list[int], list[float]]  # prompt, tokens, and the log-probability of each


def generate(core: EngineCore) -> list[Text]:
    """Return 48 texts; rows yield, since there are too few blocks for them."""
    rng = random.Random(0)
    prompts = [[rng.randrange(2, 32000) for _ in range(rng.randint(1, 300))] for _ in range(48)]
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0)
    outputs = answers(core, [Request(i, prompt, params) for i, prompt in enumerate(prompts)])
    return [
        (
            prompt,
            [token for output in outputs[i] for token in output.tokens],
            [entry.logprob for output in outputs[i] for entry in output.logprobs or []],
        )
        for i, prompt in enumerate(prompts)
    ]


def compare(core: EngineCore, texts: list[Text]) -> dict[str, float]:
    """Return how far apart one rank's log-probabilities are, and by how much it prefers other tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    asked = [Request(i, prompt + tokens, params) for i, (prompt, tokens, _) in enumerate(texts)]
    outputs = answers(core, asked)
    apart, preferred = [], []
    for i, (prompt, _, logprobs) in enumerate(texts):
        entries = (outputs[i][0].prompt_logprobs or [])[len(prompt) :]
        for entry, logprob in zip(entries, logprobs, strict=True):
            assert entry is not None
            apart.append(abs(entry.logprob - logprob))
            preferred.append(entry.top_logprobs[0] - entry.logprob)
    return {
        "tokens": len(apart),
        "mean_difference": statistics.fmean(apart),
        "most_difference": max(apart),
        "most_preferred": max(preferred),
        "tokens_that_differ": sum(margin > 0 for margin in preferred),
    }


def answers(core: EngineCore, asked: list[Request]) -> dict[int, list[Output]]:
    """Return the outputs of each request. Raises RuntimeError with the error of one that failed."""
    found: dict[int, list[Output]] = {}
    core.add_all(asked)
    while core.has_work:
        for output in core.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            found.setdefault(output.request_id, []).append(output)
    return found


def start(folder: Path, ranks: int, device: str, *, nccl_alone: bool = False) -> EngineCore:
    config = EngineConfig(
        model=str(folder),
        device="cpu" if device == "cpu" else "cuda",
        load_format="dummy",
        max_num_seqs=32,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=300 if ranks > 1 else None,
        preemption_mode="swap",
        swap_space=1.0,
        tensor_parallel_size=ranks,
        disable_custom_all_reduce=nccl_alone,
    )
    return start_with_graphs(config)[0]


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--size", type=int, default=2, help="ranks beside one; 2 if left out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--disable-custom-all-reduce", action="store_true", help="have NCCL sum alone")
    parser.add_argument("--json", type=Path, help="add a line with the figures to this file")
    parser.add_argument("--texts", type=Path, help="compare these texts, which all ranks gave, with one's")
    arguments = parser.parse_args()
    configure_logging()  # which says by what sums go
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        if arguments.texts is not None:
            texts = msgspec.json.decode(arguments.texts.read_bytes(), type=list[Text])
            figures = compare(start(folder, 1, arguments.device), texts)
        else:
            nccl_alone = arguments.disable_custom_all_reduce
            core = start(folder, arguments.size, arguments.device, nccl_alone=nccl_alone)
            again = folder / "texts.json"
            again.write_bytes(msgspec.json.encode(generate(core)))
            assert core.stats.preemptions_swap, "no row yielded"
            command = [sys.executable, "-m", "quire.loadtest.rank_equality", "--device", arguments.device]
            del core  # the other ranks, too
            rest = ["--texts", str(again), *(["--json", str(arguments.json)] if arguments.json else [])]
            return subprocess.run([*command, *rest], check=False).returncode
    add_line(figures, arguments.json)
    right = max(figures["most_difference"], figures["most_preferred"]) <= TOLERANCE
    print("equal within rounding" if right else f"NOT equal: more than {TOLERANCE} apart")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

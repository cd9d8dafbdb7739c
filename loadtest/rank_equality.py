"""Compare what several ranks give with what one gives: `python -m quire.loadtest.rank_equality --size 2`.

All ranks generate, greedily and with CUDA graphs; then one rank is asked for the log-probabilities of the
same texts, position by position. So one difference does not lead to others.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.logs import configure_logging
from quire.engine.messages import Output, Request, SamplingParams
from quire.engine.startup import start_with_graphs
from quire.loadtest.command import add_line, command_parser

TOLERANCE = 0.06  # most that bf16 lets two log-probabilities differ by
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 32003,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {"intermediate_size": 1024, "num_experts_per_tok": 4, "num_hidden_layers": 4}
# By transformers' code, with and without experts: what is not said is as above.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": CONFIG,
    "qwen3_moe": CONFIG
    | EXPERTS
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 512,
        "num_experts": 32,
        "norm_topk_prob": True,
    },
    "gpt_oss": CONFIG
    | EXPERTS
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 64,
        "num_local_experts": 16,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
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


def start(folder: Path, ranks: int, arguments: argparse.Namespace) -> EngineCore:
    config = EngineConfig(
        model=str(folder),
        device=arguments.device,
        dtype=arguments.dtype,
        load_format="dummy",
        model_impl=arguments.model_impl,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=300 if ranks > 1 else None,
        preemption_mode="swap",
        swap_space=1.0,
        tensor_parallel_size=ranks,
        enable_expert_parallel=arguments.enable_expert_parallel and ranks > 1,
        disable_custom_all_reduce=arguments.disable_custom_all_reduce,
    )
    return start_with_graphs(config)[0]


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--size", type=int, default=2, help="ranks beside one; 2 if left out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--disable-custom-all-reduce", action="store_true", help="have NCCL sum alone")
    parser.add_argument("--model", choices=CONFIGS, default="llama", help="its kind; a small one of it runs")
    parser.add_argument("--model-impl", choices=("auto", "native", "transformers"), default="auto")
    parser.add_argument("--enable-expert-parallel", action="store_true", help="each rank has experts whole")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--json", type=Path, help="add a line with the figures to this file")
    parser.add_argument("--texts", type=Path, help="compare these texts, which all ranks gave, with one's")
    arguments = parser.parse_args()
    configure_logging()  # which says by what sums go
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIGS[arguments.model]))
        if arguments.texts is not None:
            texts = msgspec.json.decode(arguments.texts.read_bytes(), type=list[Text])
            figures = {"model": arguments.model, **compare(start(folder, 1, arguments), texts)}
        else:
            core = start(folder, arguments.size, arguments)
            again = folder / "texts.json"
            again.write_bytes(msgspec.json.encode(generate(core)))
            assert core.stats.preemptions_swap, "no row yielded"
            del core  # the other ranks, too
            command = [
                sys.executable,
                "-m",
                "quire.loadtest.rank_equality",
                *sys.argv[1:],
                "--texts",
                str(again),
            ]
            return subprocess.run(command, check=False).returncode
    add_line(figures, arguments.json)
    right = max(float(figures["most_difference"]), float(figures["most_preferred"])) <= TOLERANCE
    print("equal within rounding" if right else f"NOT equal: more than {TOLERANCE} apart")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

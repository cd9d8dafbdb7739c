"""Quire and transformers' `generate` on this CPU, in turn.

`python -m quire.loadtest.cpu_ratio [--requests N]`

The demo model (or MODEL) in float32, greedy, with as many threads for both; all requests get the same number
of tokens, whatever they are. Ratios count; times on a shared CPU do not.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import Request, SamplingParams
from quire.engine.startup import start_engine
from quire.loadtest.command import command_parser

PROMPTS = (16, 64)  # tokens, from and to

Tokens = list[list[int]]


class Model(Protocol):
    """The part of a model of transformers' that is used."""

    def generate(self, **options: Any) -> Any: ...


def draw_prompts(count: int, vocab_size: int) -> Tokens:
    rng = random.Random(0)
    lengths = [rng.randint(*PROMPTS) for _ in range(count)]
    return [[rng.randrange(10, vocab_size) for _ in range(length)] for length in lengths]


def by_quire(core: EngineCore, prompts: Tokens, output_len: int, salt: str) -> Tokens:
    """Generate all at once. With a `salt` of its own no run finds an earlier one's prompts in the cache."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    first = hash(salt) & 0x7FFF_FFFF
    outputs: dict[int, list[int]] = {first + i: [] for i in range(len(prompts))}
    for number, prompt in zip(outputs, prompts, strict=True):
        core.add(Request(number, prompt, params, cache_salt=salt))
    while core.has_work:
        for output in core.step():
            outputs[output.request_id] += output.tokens
    return list(outputs.values())


def one_by_one(model: Model, prompts: Tokens, output_len: int) -> Tokens:
    return [in_one_batch(model, [prompt], output_len)[0] for prompt in prompts]


@torch.inference_mode()
def in_one_batch(model: Model, prompts: Tokens, output_len: int) -> Tokens:
    """Generate all in one batch, padded on the left to the longest."""
    longest = max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    out = model.generate(
        inputs=ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=output_len,
        pad_token_id=0,
    )
    return [row[longest:] for row in out.tolist()]


def time_in_turn(
    ways: dict[str, Callable[[int], Tokens]], rounds: int
) -> tuple[dict[str, float], list[Tokens]]:
    """Return median seconds of each way, which is told the round's number, and what each gave at last."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        outputs = []
        for name, way in ways.items():
            begin = time.perf_counter()
            outputs.append(way(number))
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(each) for name, each in times.items()}, outputs


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("model", nargs="?", default="service/demo/model", help="a model folder or Hub id")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    core, info = start_engine(EngineConfig(model=arguments.model, device="cpu", dtype="float32"))
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    prompts = draw_prompts(arguments.requests, info.vocab_size)
    length = arguments.output_len
    seconds, outputs = time_in_turn(
        {
            "Quire": lambda number: by_quire(core, prompts, length, f"round {number}"),
            "generate, one by one": lambda _: one_by_one(model, prompts, length),
            "generate, one batch": lambda _: in_one_batch(model, prompts, length),
        },
        arguments.rounds,
    )
    table = Table(
        f"{len(prompts)} requests of {length} tokens",
        "seconds",
        "Quire is faster by",
        "same tokens",
        caption=f"threads of torch: {torch.get_num_threads()}; random prompts of {PROMPTS} tokens",
    )
    for (name, each), output in zip(seconds.items(), outputs, strict=True):
        same = sum(ours == theirs for ours, theirs in zip(outputs[0], output, strict=True))
        table.add_row(name, f"{each:.2f}", f"{each / seconds['Quire']:.1f} ×", f"{same} of {len(prompts)}")
    Console().print(table)


if __name__ == "__main__":
    main()

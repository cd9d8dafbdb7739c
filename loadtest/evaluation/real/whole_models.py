"""The tutorials' ways to paged attention as whole engines, beside Quire's and contiguous generation.

`python -m quire.loadtest.evaluation.real.whole_models [--device cuda] [--json FILE]` runs one model of the
shape of Qwen2.5-0.5B, random weights, greedy. The first three ways run one sequence after the other, as the
simple implementation does; the others batch.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from quire import LLM, SamplingParams
from quire.loadtest.command import command_parser, write_json
from quire.loadtest.evaluation.real.ways import CONTIGUOUS, WayOutcome
from quire.loadtest.evaluation.simple_engine import (
    Attend,
    SimpleEngine,
    concatenated,
    online_softmax,
    padded,
    ragged,
    two_passes,
)
from quire.loadtest.model_configs import write_tokenizer

QWEN25_05B = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
BATCH = 8
WAYS: dict[str, tuple[Attend, int]] = {  # with how many sequences run at once
    "v1, concatenated blocks": (concatenated, 1),
    "v2, online softmax": (online_softmax, 1),
    "v3, two passes": (two_passes, 1),
    "v4, a padded batch": (padded, BATCH),
    "v4, a ragged batch": (ragged, BATCH),
}

Generate = Callable[[Sequence[Sequence[int]], int], list[list[int]]]


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts of `shortest`, and each by one token more, and the tokens that each is answered with."""

    requests: int = BATCH
    shortest: int = 100
    output: int = 24

    def prompts(self, vocab: int) -> list[list[int]]:
        rng = torch.Generator().manual_seed(0)
        return [
            torch.randint(0, vocab, (self.shortest + i,), generator=rng).tolist()
            for i in range(self.requests)
        ]


def contiguous(model: Qwen2ForCausalLM) -> Generate:
    """Return generation with a contiguous cache, one sequence after the other, by transformers."""

    @torch.inference_mode()
    def generate(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        answers = []
        for prompt in prompts:
            tokens, cache, answer = torch.tensor([prompt], device=model.device), None, []
            for _ in range(count):
                out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
                answer.append(int(tokens))
            answers.append(answer)
        return answers

    return generate


def quires(folder: Path, work: Work, device: Literal["cuda", "cpu"]) -> tuple[LLM, Generate]:
    """Return Quire's engine with the memory that the work needs, and its way to generate."""
    longest = work.shortest + work.requests + work.output
    llm = LLM(
        str(folder),
        device=device,
        max_model_len=longest,
        max_num_seqs=work.requests,
        num_gpu_blocks_override=work.requests * -(-longest // 16),
        kv_cache_dtype="model",
    )

    def generate(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        found = llm.generate([{"prompt_token_ids": list(each)} for each in prompts], params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in found]

    return llm, generate


def measure(
    way: str,
    generate: Generate,
    work: Work,
    prompts: list[list[int]],
    expected: list[list[int]],
    device: torch.device,
) -> WayOutcome:
    generate(prompts[:1], 2)  # warm
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    begin = time.perf_counter()
    answers = generate(prompts, work.output)
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    return WayOutcome(
        way=way,
        tokens_per_second=round(work.requests * work.output / seconds, 1),
        peak_mib=round(peak / 2**20, 1),
        equal=sum(one == other for one, other in zip(answers, expected or answers, strict=True)),
        requests=work.requests,
    )


def measure_all(
    config: Mapping[str, Any], work: Work, device: torch.device, dtype: torch.dtype = torch.float32
) -> Iterator[WayOutcome]:
    """Measure each way, contiguous generation first, whose answers the others are compared with."""
    torch.manual_seed(0)
    with device:  # random weights of half a billion parameters take a CPU long
        model = Qwen2ForCausalLM(Qwen2Config(**config)).eval()
    model.to(device=device, dtype=dtype)
    prompts = work.prompts(model.config.vocab_size)
    plain = contiguous(model)
    expected = plain(prompts, work.output)
    yield measure(CONTIGUOUS, plain, work, prompts, expected, device)
    for way, (attend, most) in WAYS.items():
        engine = SimpleEngine(model, attend, most)
        yield measure(way, engine.generate, work, prompts, expected, device)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        write_tokenizer(Path(folder), model.config.vocab_size)
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        llm, generate = quires(Path(folder), work, "cuda" if device.type == "cuda" else "cpu")
        with llm:
            found = measure("Quire", generate, work, prompts, expected, device)
            held = torch.cuda.memory_allocated() - before if device.type == "cuda" else 0
        weights = sum(each.nbytes for each in model.parameters())
        kept = max(0.0, (held - weights) / 2**20) if held else 0.0
        yield msgspec.structs.replace(found, peak_mib=round(found.peak_mib + kept, 1))


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", help="float32 (equal tokens), or bfloat16")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    table = Table("way", "tokens/s", "memory beside weights, MiB", "answers equal to contiguous ones")
    outcomes = []
    for each in measure_all(QWEN25_05B, Work(), device, dtype):
        outcomes.append(each)
        table.add_row(
            each.way,
            f"{each.tokens_per_second:.0f}",
            f"{each.peak_mib:.0f}",
            f"{each.equal} of {each.requests}",
        )
    Console().print(table)
    if arguments.json:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        ways = [msgspec.to_builtins(each) for each in outcomes]
        write_json(arguments.json, name, {"dtype": arguments.dtype, "ways": ways})


if __name__ == "__main__":
    main()

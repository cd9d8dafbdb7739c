"""Measure what a rounded KV cache costs and gains:

    python -m quire.loadtest.rounded_cache [MODEL ...] [--kv-cache-dtype fp8_e4m3 ...] [--json PATH]

The error, of each rounded format: logits of the same tokens, half of them prefilled and half decoded, against
those with the cache in bfloat16, and against float32. The tokens are the model's greedy answers to a few
questions, random ones where it has no chat template; a folder without weights gets random ones too.

The gain, on a GPU: rows decoding at a long context, as many in each format as in the model's own type, and as
many as fit. Each measurement has a process of its own, so that none is left another's memory.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from quire.engine.config import EngineConfig, KVCacheDtype
from quire.engine.core import EngineCore
from quire.engine.device.kv_cache import KVCache, dequantized_dtype
from quire.engine.device.runner import ModelRunner
from quire.engine.messages import Request, SamplingParams
from quire.engine.models.hub import resolve_model
from quire.engine.startup import start_engine
from quire.kernels.attention.batch import DecodeBatch, ForwardBatch, PrefillBatch
from quire.kernels.formats.kv_format import BF16, FP32, SCALED, KVFormat
from quire.kernels.gpu import gpu_of
from quire.llm import LLM
from quire.loadtest.command import command_parser, write_json
from quire.loadtest.provenance import device_name
from quire.service.demo import MODEL_FOLDER

QUESTIONS = (
    "What is a KV cache?",
    "Why are blocks shared between requests?",
    "How does copy-on-write work?",
    "What happens when the blocks run out?",
    "Who are you?",
    "How do I stream an answer with curl?",
)
RANDOM_TOKENS = 1024  # of a sequence that nobody answered
BLOCK_SIZE = 16
LEAD_STEPS, TIMED_STEPS = 16, 128  # of decoding
MOST_ROWS = 256

Result = TypeVar("Result")
Device = Literal["cuda", "cpu"]
LoadFormat = Literal["auto", "dummy"]


@dataclass(frozen=True, slots=True)
class Error:
    """The distance of logits from a reference's, over all positions of all sequences; KL in nats."""

    model: str
    cache: str
    reference: str
    positions: int
    logit_std: float
    mean_error: float
    rms_error: float
    max_error: float
    mean_kl: float
    max_kl: float
    same_token: float  # share of positions where both would go on greedily with the same


@dataclass(frozen=True, slots=True)
class Decode:
    """Rows that decode at a context; tokens per second of them all."""

    model: str
    cache: str
    rows: int
    context: int
    bytes_per_token: float
    step_ms: float
    tok_s: float


# -- error --------------------------------------------------------------------------------------------


@torch.inference_mode()
def logits_of(core: EngineCore, held: KVFormat, tokens: list[int]) -> Tensor:
    """Return logits [len(tokens), V] in fp32: the first half's from one prefill, the others decoded."""
    runner = core.runner
    assert isinstance(runner, ModelRunner)
    model, device = runner.model, runner.device
    if len(model.config.cache_groups) > 1:
        raise ValueError("all layers are given one block table here: take a model without cache groups")
    blocks = -(-len(tokens) // BLOCK_SIZE)
    dequantized = dequantized_dtype(model.config, held, model.embedding.dtype, gpu_of(device))
    cache = KVCache(model.config, blocks, BLOCK_SIZE, held, device, runner.backend.copy_blocks, dequantized)
    tables = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).int()[None].to(device)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def forward(begin: int, end: int, prefills: bool) -> Tensor:
        positions = torch.arange(begin, end, dtype=torch.int32, device=device)
        slots = tables[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        rows, contexts = ints(0), ints(end)
        batch = ForwardBatch(
            tokens=ints(*tokens[begin:end]),
            positions=positions,
            slots=slots,
            decode=DecodeBatch(
                tables,
                rows[:0] if prefills else rows,
                contexts[:0] if prefills else contexts,
                rows[:0] if prefills else rows,
                runner.batches.workspaces[0],
            ),
            prefill=PrefillBatch(tables, rows, ints(0, end - begin), contexts, end - begin)
            if prefills
            else None,
        )
        return model.part_logits(model.forward(batch, cache.layers)).float()

    half = len(tokens) // 2
    logits = [forward(0, half, True)]
    logits += [forward(at, at + 1, False) for at in range(half, len(tokens))]
    return torch.cat(logits)


def compare(model: str, cache: str, reference: str, logits: list[Tensor], exact: list[Tensor]) -> Error:
    """Compare lists of logits [N, V], one of each sequence."""
    differences, kls, same = [], [], []
    for ours, theirs in zip(logits, exact, strict=True):
        differences.append((ours - theirs).flatten())
        log_p, log_q = theirs.log_softmax(-1), ours.log_softmax(-1)
        kls.append((log_p.exp() * (log_p - log_q)).sum(-1))
        same.append(ours.argmax(-1) == theirs.argmax(-1))
    difference, kl = torch.cat(differences), torch.cat(kls)
    return Error(
        model=model,
        cache=cache,
        reference=reference,
        positions=len(kl),
        logit_std=torch.cat([theirs.flatten() for theirs in exact]).std().item(),
        mean_error=difference.abs().mean().item(),
        rms_error=difference.square().mean().sqrt().item(),
        max_error=difference.abs().max().item(),
        mean_kl=kl.mean().item(),
        max_kl=kl.max().item(),
        same_token=torch.cat(same).float().mean().item(),
    )


def sequences_of(llm: LLM, load_format: LoadFormat) -> list[list[int]]:
    if load_format == "dummy" or llm.tokenizer.chat_template is None:
        rng = random.Random(0)
        length = min(RANDOM_TOKENS, llm.info.max_model_len)
        return [[rng.randrange(llm.info.vocab_size) for _ in range(length)]]
    prompts = [llm.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=256))
    return [prompt + answer[0].token_ids for prompt, answer in zip(prompts, answers, strict=True)]


def measure_errors(model: str, load_format: LoadFormat, device: Device, formats: list[str]) -> list[Error]:
    """Measure each of `formats` in SCALED against bfloat16; with a checkpoint's weights, all against fp32.

    Raise ValueError where a format does not suit the model's head dim.
    """

    def start(dtype: Literal["bfloat16", "float32"]) -> LLM:
        return LLM(
            model,
            dtype=dtype,
            kv_cache_dtype="model",
            device=device,
            load_format=load_format,
            num_gpu_blocks_override=512,
            swap_space=0,
            max_num_seqs=len(QUESTIONS),
            max_num_batched_tokens=RANDOM_TOKENS,
            max_model_len=None if load_format == "auto" else RANDOM_TOKENS,
            enforce_eager=True,
        )

    llm = start("bfloat16")
    sequences = sequences_of(llm, load_format)
    caches = {**{name: SCALED[name] for name in formats}, "bfloat16": BF16}
    logits = {
        cache: [logits_of(llm.core, held, tokens) for tokens in sequences] for cache, held in caches.items()
    }
    name = "demo" if _is_demo(model) else Path(model).name
    errors = [compare(name, cache, "bfloat16", logits[cache], logits["bfloat16"]) for cache in formats]
    if load_format == "dummy":
        return errors  # other weights are drawn in float32
    del llm  # its memory is the next one's
    llm = start("float32")
    exact = [logits_of(llm.core, FP32, tokens) for tokens in sequences]
    return errors + [compare(name, cache, "float32", logits[cache], exact) for cache in caches]


# -- gain ---------------------------------------------------------------------------------------------


def measure_decode(
    model: str, load_format: LoadFormat, kv_cache_dtype: KVCacheDtype, rows: int, context: int
) -> Decode:
    """Time some steps of rows that have just been prefilled; with rows = 0, of as many as fit."""
    # The first rows decode while the last ones are prefilled, a prompt a step or a little more.
    length = context + LEAD_STEPS + TIMED_STEPS + 8 + 2 * (rows or MOST_ROWS)
    core, info = start_engine(
        EngineConfig(
            model=model,
            load_format=load_format,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=length,
            max_num_seqs=rows or MOST_ROWS,
            swap_space=0,
            enable_prefix_caching=False,
        )
    )
    while core.capture():
        pass
    rows = rows or min(MOST_ROWS, info.num_blocks // -(-length // info.block_size))
    rng = random.Random(0)
    params = SamplingParams(temperature=0.6, max_tokens=length - context, ignore_eos=True, seed=0)
    for i in range(rows):
        prompt = [rng.randrange(info.vocab_size) for _ in range(context)]
        core.add(Request(i, prompt, params))
    seconds = _decode_seconds(core, rows)
    return Decode(
        model=Path(model).name,
        cache=info.kv_cache_dtype,
        rows=rows,
        context=context,
        bytes_per_token=info.bytes_per_block / info.block_size,
        step_ms=1e3 * seconds / TIMED_STEPS,
        tok_s=rows * TIMED_STEPS / seconds,
    )


def _decode_seconds(core: EngineCore, rows: int) -> float:
    """Step until all rows decode, then time some of their steps."""
    decoding = 0
    while decoding < LEAD_STEPS:
        core.step()
        decoding = decoding + 1 if core.stats.decode_tokens == rows else 0
        if not core.has_work:
            raise RuntimeError(f"{rows} rows never decoded together; ask for fewer")
    begin = time.perf_counter()
    for _ in range(TIMED_STEPS):
        core.step()
    if core.stats.decode_tokens != rows:
        raise RuntimeError(
            f"only {core.stats.decode_tokens} of {rows} rows decoded to the end; ask for fewer"
        )
    return time.perf_counter() - begin


# -- both ---------------------------------------------------------------------------------------------


def _apart(function: Callable[..., Result], *arguments: object) -> Result:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _is_demo(model: str) -> bool:
    return Path(model).resolve() == Path(MODEL_FOLDER).resolve()


def _load_format(model: str) -> LoadFormat:
    has_weights = any(each.suffix in (".safetensors", ".gguf") for each in resolve_model(model).iterdir())
    return "auto" if has_weights else "dummy"


def _table(title: str, rows: list[Any]) -> Table:
    table = Table(title=title)
    for name in asdict(rows[0]):
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in asdict(row).values()))
    return table


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("models", nargs="*", default=[MODEL_FOLDER], metavar="MODEL")
    parser.add_argument("--context", type=int, default=8192, help="tokens of each decoding row")
    parser.add_argument("--rows", type=int, default=32, help="that decode at once with each cache")
    parser.add_argument(
        "--kv-cache-dtype",
        action="append",
        choices=list(SCALED),
        dest="formats",
        help="a rounded format to measure (may repeat); all if left out",
    )
    parser.add_argument("--no-decode", action="store_true", help="measure errors only")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    arguments = parser.parse_args()
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    formats = list(dict.fromkeys(arguments.formats or SCALED))
    console = Console(width=160)
    errors: list[Error] = []
    decodes: list[Decode] = []
    for model in arguments.models:
        load_format = _load_format(model)
        errors += _apart(measure_errors, model, load_format, device, formats)
        console.print(_table("error of the logits", errors))
        if device == "cpu" or arguments.no_decode or _is_demo(model):
            continue  # the demo model's context is too short
        for rows in (arguments.rows, 0):
            for cache in ("model", *formats):
                decodes.append(_apart(measure_decode, model, load_format, cache, rows, arguments.context))
                console.print(_table("decode", decodes))
    found = {"errors": [asdict(error) for error in errors], "decode": [asdict(one) for one in decodes]}
    write_json(arguments.json, device_name(), found)


if __name__ == "__main__":
    main()

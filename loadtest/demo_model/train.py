"""Trains the demo model from scratch on one GPU; `--device cpu --steps 5` tries the same on a CPU.

    python -m quire.loadtest.demo_model.train --output /tmp/demo

The corpus is made here, in parallel, from its seed. Loss is taken on what the assistant says and on plain
text. The tokenizer is the one in service/demo/model.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shlex
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from quire.loadtest.demo_model.corpus import Document, documents
from quire.loadtest.demo_model.tokenizer import CONTEXT_LENGTH, MODEL_FOLDER

CORPUS_SEED = 1000
WEIGHTS_SEED = 1
DOCUMENTS_PER_SHARD = 5_000
PEAK_RATE, FINAL_RATE, WARMUP_STEPS = 3e-3, 0.03, 150
WEIGHT_DECAY, CLIP = 0.1, 1.0
_SPECIAL = ("bos", "eos", "end", "system", "user", "assistant")
MEASURED_STEPS = 40  # after these the speed is known


def architecture(vocab_size: int, tokenizer: Tokenizer) -> LlamaConfig:
    """Return about seven million parameters: 4 query heads of 64, 2 KV heads, 6 layers, tied embeddings."""
    ids = tokenizer.get_vocab()
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_LENGTH,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=ids["<|bos|>"],
        eos_token_id=[ids["<|end|>"], ids["<|eos|>"]],
        pad_token_id=ids["<|pad|>"],
    )


def encode(tokenizer: Tokenizer, batch: list[Document]) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
    """Return all documents in one row of token ids, and which of them are learned."""
    vocabulary = tokenizer.get_vocab()
    special = {name: vocabulary[f"<|{name}|>"] for name in _SPECIAL}
    texts = [text for d in batch for text in ([m["content"] for m in d.messages] or [d.text])]
    encoded = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    ids: list[int] = []
    learned: list[bool] = []
    for document in batch:
        ids.append(special["bos"])
        learned.append(False)
        for message in document.messages:
            content = next(encoded).ids
            ids += [special[message["role"]], *content, special["end"]]
            learned += [False, *[message["role"] == "assistant"] * (len(content) + 1)]
        if not document.messages:
            content = next(encoded).ids
            ids += [*content, special["eos"]]
            learned += [True] * (len(content) + 1)
    return np.array(ids, dtype=np.int16), np.array(learned, dtype=np.bool_)


def _shard(seed: int) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
    tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    return encode(tokenizer, list(islice(documents(seed), DOCUMENTS_PER_SHARD)))


def make_corpus(shards: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of CONTEXT_LENGTH token ids [N, L] int16 and whether each is learned [N, L] bool."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with multiprocessing.get_context("spawn").Pool() as pool:
        parts = pool.map(_shard, range(CORPUS_SEED, CORPUS_SEED + shards), chunksize=1)
    ids, learned = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    rows = len(ids) // CONTEXT_LENGTH
    shape = (rows, CONTEXT_LENGTH)
    used = rows * CONTEXT_LENGTH
    return torch.from_numpy(ids[:used].reshape(shape)), torch.from_numpy(learned[:used].reshape(shape))


def rate(step: int, steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine down to FINAL_RATE of the peak."""
    warmup = min(WARMUP_STEPS, max(1, steps // 10))
    if step < warmup:
        return PEAK_RATE * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return PEAK_RATE * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def make_optimizer(model: LlamaForCausalLM, device: torch.device) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=device.type == "cuda")


def train(
    model: LlamaForCausalLM,
    ids: torch.Tensor,
    learned: torch.Tensor,
    batch: int,
    steps: int,
    minutes: float,
    compiled: bool,
) -> dict[str, float]:
    """Train in place for `steps`, or for as many as fit into `minutes`. Return what was done."""
    device = next(model.parameters()).device
    ids, learned = ids.to(device), learned.to(device)
    optimizer = make_optimizer(model, device)

    def loss_of(rows: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
        targets = rows[:, 1:].masked_fill(~counted[:, 1:], -100)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    compute = torch.compile(loss_of) if compiled else loss_of
    generator = torch.Generator().manual_seed(WEIGHTS_SEED)
    order = torch.randperm(len(ids), generator=generator)
    begun = measured = time.perf_counter()
    running = torch.zeros((), device=device)
    step = 0
    position = 0
    while step < steps:
        if position + batch > len(order):
            order, position = torch.randperm(len(ids), generator=generator), 0
        chosen = order[position : position + batch].to(device)
        position += batch
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        loss = compute(ids[chosen].long(), learned[chosen])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running = loss.detach() if step == 0 else 0.98 * running + 0.02 * loss.detach()
        step += 1
        if step in (MEASURED_STEPS // 2, MEASURED_STEPS):
            value, now = float(running), time.perf_counter()  # float() waits for the device
            if step == MEASURED_STEPS:
                each = (now - measured) / (MEASURED_STEPS - MEASURED_STEPS // 2)
                fitting = step + int((60 * minutes - (now - begun)) / each)
                steps = max(step, min(steps, fitting))
                speed = batch * ids.shape[1] / each
                print(f"{1000 * each:.1f} ms a step, {speed:,.0f} tokens/s, {steps} steps", flush=True)
            measured = now
        if step % 100 == 0 or step == steps:
            value = float(running)
            print(f"step {step} loss {value:.4f} seconds {time.perf_counter() - begun:.0f}", flush=True)
    seconds = time.perf_counter() - begun
    return {
        "steps": steps,
        "batch_rows": batch,
        "tokens": steps * batch * ids.shape[1],
        "loss": round(value, 4),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model from scratch.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shards", type=int, default=400, help=f"of {DOCUMENTS_PER_SHARD} documents")
    parser.add_argument("--batch", type=int, default=64, help=f"rows of {CONTEXT_LENGTH} tokens")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--minutes", type=float, default=5.5, help="fewer steps are made if they take longer")
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    ids, learned = make_corpus(arguments.shards)
    share = float(learned.float().mean())
    print(f"{ids.numel():,} tokens, {share:.0%} learned, in {time.perf_counter() - begun:.0f} s", flush=True)
    torch.manual_seed(WEIGHTS_SEED)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    model = LlamaForCausalLM(architecture(tokenizer.get_vocab_size(), tokenizer)).to(arguments.device)
    print(f"{model.num_parameters():,} parameters", flush=True)
    record: dict[str, float | str] = {
        **train(
            model, ids, learned, arguments.batch, arguments.steps, arguments.minutes, not arguments.no_compile
        )
    }
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    record |= {"parameters": model.num_parameters(), "corpus_tokens": ids.numel(), "device": name}
    record |= {"command": shlex.join(["python", "-m", "quire.loadtest.demo_model.train", *sys.argv[1:]])}
    record |= {"total_seconds": round(time.perf_counter() - begun, 1)}
    arguments.output.mkdir(parents=True, exist_ok=True)
    end = model.config.eos_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id, eos_token_id=end, pad_token_id=model.config.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(arguments.output)
    (arguments.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()

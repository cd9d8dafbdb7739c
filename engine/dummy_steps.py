"""Steps that nobody asked for, by which time and memory are measured and kernels compiled."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from quire.engine.device.limits import Limits
from quire.engine.messages import SamplingParams
from quire.engine.schedule.plan import RowStart, StepPlan


def largest_step(limits: Limits, sampled: int) -> StepPlan:
    """Return a step that prefills as many tokens as a step may and samples `sampled` rows, all in block 0."""
    lengths: list[int] = []
    while sum(lengths) < limits.max_num_batched_tokens and len(lengths) < limits.max_num_seqs:
        lengths.append(min(limits.max_model_len, limits.max_num_batched_tokens - sum(lengths)))
    query_lens = np.array(lengths, np.int32)
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50)
    return StepPlan(
        rows=np.arange(len(lengths), dtype=np.int32),
        num_decodes=0,
        query_lens=query_lens,
        context_lens=query_lens,
        prefill_tokens=np.zeros(sum(lengths), np.int32),
        starts=tuple(RowStart(row, 0, params, 1, frozenset(), [], [], 0) for row in range(sampled)),
        sample_rows=np.arange(sampled, dtype=np.int32),
        sample_tokens=np.full(sampled, lengths[0] - 1, np.int32),
        sample_positions=np.ones(sampled, np.int32),
    )


def rare_steps(num_blocks: int, vocab_size: int) -> list[StepPlan]:
    """Return steps with what the largest lacks, and one with its filters alone.

    In the first a chunk is beside a decode, a block is copied, and logits are processed. Chunk and decode are
    of one row, since there may be no other. Their kernels are compiled here, and not while the first request
    that needs them waits.
    """
    step = largest_step(Limits(1, 1, 1), sampled=1)
    (start,) = step.starts
    twice = np.zeros(2, np.int32)
    params = msgspec.structs.replace(start.params, grammar="any text", logit_bias={0: 0.0}, logprobs=1)
    processed = msgspec.structs.replace(
        step,
        rows=twice,
        num_decodes=1,
        query_lens=twice + 1,
        context_lens=twice + 1,
        starts=(dataclasses.replace(start, params=params),),
        copies=np.array([[0, num_blocks - 1]], np.int32),
        masked_samples=np.zeros(1, np.int32),
        masks=np.full((1, -(-vocab_size // 32)), -1, np.int32),
    )
    return [processed, step]

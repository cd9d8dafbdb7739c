"""What rank 0 tells the others: plans of steps, and captures, as bytes."""

from __future__ import annotations

import struct
from itertools import accumulate
from operator import attrgetter

import msgspec
import numpy as np

from quire.engine.arrays import Int32
from quire.engine.schedule.plan import PromptLogprobs, RowStart, StepPlan

# The plan's flat int32 arrays, and its pairs [., 2].
_FLAT = (
    *("rows", "query_lens", "context_lens", "prefill_tokens", "override_rows", "override_tokens"),
    *("table_rows", "table_columns", "table_blocks", "sample_rows", "sample_tokens", "sample_positions"),
    "masked_samples",
)
_PAIRS = ("copies", "swap_out", "swap_in")
_ARRAYS = attrgetter(*_FLAT, *_PAIRS, "masks")
_SIZE, _BYTES = attrgetter("size"), attrgetter("nbytes")
WORD = 4  # bytes of one of theirs


class _PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    first: int
    targets: list[int]
    k: int


class _PlanHead(msgspec.Struct, frozen=True, array_like=True):
    """A plan but for its arrays, of whose words it has the counts."""

    num_decodes: int
    counts: list[int]
    mask_width: int
    booked: int
    starts: tuple[RowStart, ...] = ()
    prompt_logprobs: tuple[_PromptLogprobs, ...] = ()


class Step(msgspec.Struct, frozen=True):
    """Launch this plan. booked: steps, from the first one, whose transfers between the tiers are over."""

    plan: StepPlan
    booked: int


class Capture(msgspec.Struct, frozen=True):
    """Capture a CUDA graph, as `Runner.capture` has it."""

    missed: bool


Message = Step | Capture
_STEP, _CAPTURE, _CAPTURE_MISSED = range(3)
_PREFIX = struct.Struct("<II")  # kind, and length of the head
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_PlanHead] = msgspec.msgpack.Decoder(_PlanHead)


def encode_capture(*, missed: bool) -> bytes:
    return _PREFIX.pack(_CAPTURE_MISSED if missed else _CAPTURE, 0)


def encode_step(plan: StepPlan, booked: int) -> bytes:
    """Return the frame of a `Step`: a kind, the length of the head, the head, and the arrays' words."""
    arrays: tuple[Int32, ...] = _ARRAYS(plan)
    counts = list(map(_SIZE, arrays))
    runs = tuple(_PromptLogprobs(run.first, run.targets.tolist(), run.k) for run in plan.prompt_logprobs)
    head = _encoder.encode(
        _PlanHead(
            plan.num_decodes,
            counts,
            plan.masks.shape[1],
            booked,
            plan.starts,
            runs,
        )
    )
    assert sum(map(_BYTES, arrays)) == WORD * sum(counts), "a plan's arrays are int32"
    padding = bytes(-len(head) % WORD)
    # Arrays are joined as they lie, but for columns of larger ones: copying all into one would take long.
    words = [np.ascontiguousarray(array).data for array in arrays if array.size]
    return b"".join((_PREFIX.pack(_STEP, len(head)), head, padding, *words))


def decode(frame: bytearray) -> Message:
    """Return what `encode_step` or `encode_capture` was given; the arrays are views of `frame`."""
    kind, length = _PREFIX.unpack_from(frame)
    if kind != _STEP:
        return Capture(kind == _CAPTURE_MISSED)
    end = _PREFIX.size + length
    head = _decoder.decode(memoryview(frame)[_PREFIX.size : end])
    words: Int32 = np.frombuffer(frame, np.int32, offset=end + -length % 4)
    ends = list(accumulate(head.counts))
    arrays = [words[end - count : end] for count, end in zip(head.counts, ends, strict=True)]
    flat = dict(zip(_FLAT, arrays, strict=False))
    pairs = {
        name: array.reshape(-1, 2)
        for name, array in zip(_PAIRS, arrays[len(_FLAT) : len(_FLAT) + len(_PAIRS)], strict=True)
    }
    masks = arrays[-1].reshape(len(flat["masked_samples"]), head.mask_width)
    runs = tuple(
        PromptLogprobs(run.first, np.array(run.targets, np.int32), run.k) for run in head.prompt_logprobs
    )
    plan = StepPlan(
        num_decodes=head.num_decodes,
        starts=head.starts,
        prompt_logprobs=runs,
        masks=masks,
        **flat,
        **pairs,
    )
    return Step(plan, head.booked)

"""Prompts that end with a vector: what the device gives of each becomes the request's only output."""

from __future__ import annotations

import numpy as np

from quire.engine.arrays import Vectors
from quire.engine.messages import Output, PoolingParams
from quire.engine.schedule.draft import InFlightStep
from quire.engine.schedule.lifecycle import finish
from quire.engine.schedule.outputs import describe_first, not_finite
from quire.engine.schedule.state import SchedulerState


def commit_vectors(state: SchedulerState, step: InFlightStep, vectors: Vectors) -> list[Output]:
    """End the sequences whose prompts a step has computed, with their vectors [S, D]."""
    outputs = []
    for sequence, vector in zip(step.samples.sequences, vectors, strict=True):
        request = sequence.group.request
        if sequence.finish_reason is not None or request.pooling is None:
            continue
        output = Output(request.id, sequence.index, [])
        describe_first(state, sequence.group, output)
        if np.isfinite(vector).all():
            output.finish_reason = "stop"
            output.vector = finished(vector, request.pooling).tobytes()
        else:
            output.finish_reason = "error"
            output.error = not_finite("numbers")
        outputs.append(output)
        finish(state, sequence, output.finish_reason)
    return outputs


def finished(vector: Vectors, params: PoolingParams) -> Vectors:
    """Return what a request wants of a vector [D]: its beginning, of length 1, or after an activation."""
    if params.dimensions is not None:
        vector = vector[: params.dimensions]
    if params.normalize:
        vector = vector / np.maximum(np.linalg.norm(vector), np.float32(1e-12))
    if params.activation == "sigmoid":
        vector = np.reciprocal(1 + np.exp(-vector))
    elif params.activation == "softmax":
        exponents = np.exp(vector - vector.max())
        vector = exponents / exponents.sum()
    return np.asarray(vector, np.float32)

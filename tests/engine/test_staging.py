"""Pinned buffers: as much memory as steps need, and uploads that arrive whole if they are larger."""

from __future__ import annotations

import numpy as np
import torch

from quire.engine.device.limits import Limits, staging_words
from quire.engine.device.staging import ROTATION, Staging

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_many_rows_of_long_contexts_pin_little() -> None:
    """1,024 sequences of a million tokens each: all their tables at once would be 4.3 GB."""
    most = 1 << 20
    words = staging_words(Limits(1024, 8192, most), most // 16)
    assert 4 * words * ROTATION < 64 << 20


def test_what_is_more_than_usual_arrives_whole_and_disturbs_nothing() -> None:
    """As when a prompt of a million tokens is forked to many samples."""
    staging = Staging(64, DEVICE)
    small = [np.arange(i, i + 50, dtype=np.int32) for i in range(3 * ROTATION)]
    large = np.arange(10_000, dtype=np.int32)
    sent = []
    for i, words in enumerate(small):
        sent += staging.upload([words])
        if i % ROTATION == 3:
            sent += staging.upload([large, words])
        if i % 2 and DEVICE.type == "cuda":  # as two steps later, before buffers have their turn again
            torch.cuda.synchronize()
    got = [tensor.tolist() for tensor in sent]
    expected = []
    for i, words in enumerate(small):
        expected.append(words.tolist())
        if i % ROTATION == 3:
            expected += [large.tolist(), words.tolist()]
    assert got == expected


def test_a_buffer_that_has_grown_is_used_again() -> None:
    staging = Staging(64, DEVICE)
    for _ in range(3 * ROTATION):
        staging.upload([np.zeros(1000, np.int32)])
    assert staging.num_bytes == ROTATION * 4 * 1024

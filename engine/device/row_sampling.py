"""The sampling parameters of each device row: the host's copy, and columns on the device."""

from __future__ import annotations

import numpy as np
import torch

from quire.engine.device.staging import Staging
from quire.engine.schedule.plan import RowStart
from quire.kernels.sampling.state import SamplingState

_COLUMNS = 7  # int32 words a row: the seed takes two, the five others one each
_LEAST_SHARE = float(np.finfo(np.float32).tiny)  # of top-p: 0 would be no share, and filter nothing


class RowState:
    """SamplingState whose tensors are views of one int32 buffer, so that an update is one copy."""

    def __init__(self, rows: int, device: torch.device, staging: Staging) -> None:
        self._staging = staging
        self._words = np.zeros((_COLUMNS, rows), np.int32)
        self._floats = self._words.view(np.float32)
        self._seeds = self._words[:2].reshape(-1).view(np.int64)
        self._floats[4] = 1.0  # top_p
        self._device_words = torch.empty(self._words.size, dtype=torch.int32, device=device)
        columns = self._device_words.view(_COLUMNS, rows)
        self.state = SamplingState(
            seed=columns[:2].view(-1).view(torch.int64),
            temperature=columns[2].view(torch.float32),
            min_p=columns[3].view(torch.float32),
            top_p=columns[4].view(torch.float32),
            top_k=columns[5],
            index=columns[6],
        )
        self._upload()

    def start(self, starts: tuple[RowStart, ...]) -> None:
        """Lay down the sampling state of rows that begin a sequence, in stream order."""
        if not starts:
            return
        for start in starts:
            row, params = start.row, start.params
            self._seeds[row] = params.seed or 0  # none: greedy, or nobody's
            self._floats[2:5, row] = params.temperature, params.min_p, max(params.top_p, _LEAST_SHARE)
            self._words[5:7, row] = params.top_k, start.index
        self._upload()

    def _upload(self) -> None:
        self._staging.upload_words(self._device_words, self._words)

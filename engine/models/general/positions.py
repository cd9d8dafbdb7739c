"""Where a step's tokens stand, told to modelling code that would count from the first token of a call.

Most models take `position_ids`. Decoders of the BART family do not, but their tables of positions do; and
RoBERTa's kin take them as numbers of rows, which begin behind the row of padding.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn


class StepPositions:
    """Gives a decoder's tables the positions of the step that `begin` was told of.

    told: whether a table was ever given them. offset: rows of a table before that of the first position.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self.told = False
        self.offset = 0
        self._positions: Tensor | None = None
        for module in decoder.modules():
            takes = "position_ids" in inspect.signature(module.forward).parameters
            padding = getattr(module, "padding_idx", None)
            if takes and isinstance(module, nn.Embedding):
                module.register_forward_pre_hook(self._tell, with_kwargs=True)
            elif takes and hasattr(module, "create_position_ids_from_input_ids") and padding is not None:
                self.offset = int(padding) + 1
        parameters = inspect.signature(decoder.forward).parameters.values()
        self.taken = any(each.name == "position_ids" for each in parameters)
        self._passed = self.taken or any(each.kind is each.VAR_KEYWORD for each in parameters)

    def begin(self, positions: Tensor) -> dict[str, Tensor]:
        """Take the positions [T] of a step; return what the decoder is called with beside its tokens."""
        self._positions = positions + self.offset if self.offset else positions
        return {"position_ids": self._positions[None]} if self._passed else {}

    def _tell(
        self, module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._positions is None:
            return None
        counted = given.get("position_ids")  # TrOCR's and RoFormer's tables are given none, and count
        self.told = True
        positions = self._positions if counted is None else self._positions.view(counted.shape)
        return args, {**given, "position_ids": positions}

"""What proves that kernels compute a module that keeps states: it gives what its own code gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire.engine.models.general.proof import alike, noise
from quire.engine.models.general.stateful import CacheOfStates, Called
from quire.engine.models.general.whole_steps import WholeStepModule
from quire.kernels.formats.state_spec import LayerStates
from quire.kernels.recurrence.operations import Recurrences
from quire.kernels.recurrence.step import CARRIED, CHUNK, NO_STATE, StateStep

# A prompt in whole chunks and others, carried and from a block; the last leaves its states in block 1.
_CHUNKS = ((CHUNK, NO_STATE, -1), (40, CARRIED, 0), (CHUNK - 1, 0, -1), (3, CARRIED, 1))
_DECODES = ((1, 1), (1, 2))  # and two more tokens, in place and into another block
_TIMES = 4.0  # what rounding leaves of one operation: here are several


@torch.inference_mode()
def is_proved(module: nn.Module, layer: LayerStates, recurrences: Recurrences, hidden: int) -> bool:
    """Return whether kernels give what a module's own code does, of noise [tokens, hidden], on its device."""
    weight = next(module.parameters())
    prompt = sum(tokens for tokens, *_ in _CHUNKS)
    x = noise(prompt + len(_DECODES), hidden, weight)[None]
    pieces = [x[:, :prompt], *x[:, prompt:].split(1, dim=1)]
    try:
        theirs = _by_own_code(module, pieces)
        ours = _by_kernels(module, layer, recurrences, pieces)
        return all(alike(own, other, times=_TIMES) for own, other in zip(ours, theirs, strict=True))
    except torch.AcceleratorError:  # nothing more can be computed
        raise
    except Exception:  # modelling code may want anything, and a kernel more than a GPU has
        return False


def _by_own_code(module: nn.Module, pieces: Sequence[Tensor]) -> list[Tensor]:
    called, cache, results = Called(module), CacheOfStates({}), []
    for piece in pieces:
        results.append(called.forward(hidden_states=piece, **{called.cache: cache}))
        cache = CacheOfStates(cache.states)
    return results


def _by_kernels(
    module: nn.Module, layer: LayerStates, recurrences: Recurrences, pieces: Sequence[Tensor]
) -> list[Tensor]:
    device = pieces[0].device

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    described, first = [], 0
    for tokens, before, after in _CHUNKS:
        described += [first, tokens, before, after]
        first += tokens
    steps = [StateStep(numbers(), numbers(), numbers(*described).view(-1, 4))]
    steps += [StateStep(numbers(before), numbers(after), numbers().view(0, 4)) for before, after in _DECODES]
    states = [
        torch.zeros(3, *part.shape, dtype=getattr(torch, part.dtype), device=device) for part in layer.parts
    ]
    return [
        _of_step(module, recurrences, step, states, piece) for step, piece in zip(steps, pieces, strict=True)
    ]


def _of_step(
    module: nn.Module, recurrences: Recurrences, step: StateStep, states: Sequence[Tensor], piece: Tensor
) -> Tensor:
    whole = WholeStepModule(module, recurrences, lambda: (step, states))
    result: Tensor = whole(hidden_states=piece)
    return result

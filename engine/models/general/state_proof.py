"""What proves that kernels compute a module that keeps states: it gives what its own code gives.

It does so in steps that have all that a step may have: chunks that are carried and that go on from a
block, decodes of several sequences, from nothing, in place and into other blocks, and what pads. Blocks lie
apart, as they do in a cache, and have NaN until states are left there, so that what reads too much shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from quire.engine.models.general.kept_linear import like_of
from quire.engine.models.general.proof import TOLERANCE, noise
from quire.engine.models.general.stateful import CacheOfStates, Called
from quire.kernels.formats.state_spec import LayerStates
from quire.kernels.recurrence.step import CARRIED, CHUNK, NO_STATE, PADS, StateStep

_NOBODYS = 6  # the last block: of what pads
# A sequence of one token, as a decode; one that pads stands where the other sequence's first token is. That
# one leaves its states in block 1. The last chunk is not among those that are used.
_FIRST = ((NO_STATE, 3), (NO_STATE, PADS))
_CHUNKS = (
    (0, _NOBODYS, _NOBODYS), (CHUNK, NO_STATE, -1), (0, NO_STATE, -1), (40, CARRIED, 0), (CHUNK - 1, 0, -1),
    (3, CARRIED, 1), (0, NO_STATE, _NOBODYS),
)  # fmt: skip
# Two sequences that go on from the long one, and the short one; the last row pads.
_DECODES = (((1, 2), (1, 4), (3, 3), (NO_STATE, PADS)), ((2, 2), (4, 5), (3, 3), (NO_STATE, PADS)))
_PROMPT = sum(tokens for tokens, *_ in _CHUNKS)
_TIMES = 4.0  # what rounding leaves of one operation: here are several
Step: TypeAlias = tuple[StateStep, Sequence[Tensor]]  # and the states of a module
# Makes what stands for a module's `forward`, of the module and what tells it the step.
StandIn: TypeAlias = Callable[[nn.Module, Callable[[], Step | None]], Callable[..., Any]]


@torch.inference_mode()
def is_proved(module: nn.Module, layer: LayerStates, stand_in: StandIn, hidden: int) -> bool:
    """Return whether what stands in for a module gives what its own code does, of noise [tokens, hidden]."""
    weight = _multiplied(module)
    sizes = [1 + _PROMPT, *map(len, _DECODES)]
    given = noise(sum(sizes), hidden, weight)[None].split(sizes, dim=1)
    try:
        theirs = _by_own_code(module, given)
        ours = _by_kernels(module, layer, stand_in, given)
        return ours is not None and all(map(_agree, ours, theirs))
    except torch.AcceleratorError:  # nothing more can be computed
        raise
    except Exception:  # modelling code may want anything, and a kernel more than a GPU has
        return False


def _multiplied(module: nn.Module) -> Tensor:
    """Return what hidden states are multiplied by, whose type they have: others may be in fp32."""
    products = (like_of(part) for part in module.modules() if isinstance(part, nn.Linear))
    return next(products, next(module.parameters()))


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether tokens agree; behind those that own code was given, ours pad."""
    tokens = theirs.shape[1]
    own, padding = ours[:, :tokens], ours[:, tokens:]
    if own.shape != theirs.shape or own.dtype != theirs.dtype or not bool(padding.isfinite().all()):
        return False
    apart, length = (own.float() - theirs).norm(dim=-1), theirs.float().norm(dim=-1)
    # Where most of a token's sum cancels, what is left has the rounding of what was summed: that of others.
    least = _TIMES * TOLERANCE[theirs.dtype] * length.clamp(min=length.mean())
    return bool((apart <= least).all())  # NaN never is


def _by_own_code(module: nn.Module, given: Sequence[Tensor]) -> list[Tensor]:
    called = Called(module)
    short, long = CacheOfStates({}), CacheOfStates({})

    def call(tokens: Tensor, cache: CacheOfStates) -> Tensor:
        result: Tensor = called.forward(hidden_states=tokens, **{called.cache: cache})
        return result

    results = [torch.cat([call(given[0][:, :1], short), call(given[0][:, 1:], long)], dim=1)]
    states = {key: torch.cat([state, state, short.states[key]]) for key, state in long.states.items()}
    for tokens in given[1:]:
        cache = CacheOfStates(states)
        results.append(call(tokens[:, :3].transpose(0, 1), cache).transpose(0, 1))
        states = cache.states
    return results


def _by_kernels(
    module: nn.Module, layer: LayerStates, stand_in: StandIn, given: Sequence[Tensor]
) -> list[Tensor] | None:
    """Return what kernels give; None if they wrote where nothing is to be left."""
    device = given[0].device
    # With a block ahead of the first, and other states beside those of each block.
    memory = [
        torch.full((_NOBODYS + 2, 2, *part.shape), torch.nan, dtype=getattr(torch, part.dtype), device=device)
        for part in layer.parts
    ]
    states = [each[1:, 1] for each in memory]
    results = [
        _of_step(module, stand_in, (step, states), tokens)
        for step, tokens in zip(_steps(device), given, strict=True)
    ]
    others = [part for each in memory for part in (each[0], each[:, 0], each[-1])]
    return results if all(bool(each.isnan().all()) for each in others) else None


def _of_step(module: nn.Module, stand_in: StandIn, step: Step, tokens: Tensor) -> Tensor:
    result: Tensor = stand_in(module, lambda: step)(hidden_states=tokens)
    return result


def _steps(device: torch.device) -> list[StateStep]:
    """Return the step of prompts, and those of decodes."""

    def numbers(values: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    described, first = [], 1
    for tokens, before, after in _CHUNKS:
        described.append((first, tokens, before, after))
        first += tokens
    chunks = numbers(described)
    used = chunks.new_full((1,), len(chunks) - 1)
    steps: list[StateStep] = []
    for decodes in (_FIRST, *_DECODES):
        before, after = numbers(decodes).T.contiguous()
        steps.append(
            StateStep(before, after, chunks[:0]) if steps else StateStep(before, after, chunks, used)
        )
    return steps

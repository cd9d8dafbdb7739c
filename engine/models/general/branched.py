"""How a decoder of which some layers keep states is found to be `general.branches`', and proved to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.models.config import ModelConfig
from quire.engine.models.general.agreement import Agree
from quire.engine.models.general.branches import (
    AttentionBranch,
    BranchDecoder,
    HandedOn,
    MixerBranch,
    Part,
    Rotation,
    StepPlaces,
    UngatedBranch,
    normed_before,
    run_parts,
)
from quire.engine.models.general.kept_linear import let_stand_alone
from quire.engine.models.general.matching import Attending
from quire.engine.models.general.mlps import gated_of, ungated_of
from quire.engine.models.general.norms import norm_of
from quire.engine.models.general.observed import Mixed, Passage, SeenLayer, StateLayer, following
from quire.engine.models.general.proof import alike, linears, merged
from quire.engine.models.general.sandwich import (
    Branch,
    GatedBranch,
    ModuleBranch,
    normed_by,
    shape_of,
    takes_one,
)
from quire.engine.models.general.whole import look_up_of
from quire.kernels.backend import Backend
from quire.kernels.parallel.ranks import Ranks
from quire.kernels.pointwise.norm import Norm, rms_norm_reference

_MOST_BRANCHES = 3  # of a layer
_ROUNDINGS = 2.0  # of `proof.alike`'s tolerances, that each branch of a layer may add
_OUTPUT = ("o_proj", "out_proj", "dense", "wo")
_HIDDEN = "hidden_states"
_PLAIN = bool | int | float | str
_OWN = MixerBranch | ModuleBranch  # branches by a module of transformers' code


def branched_of(
    causal: nn.Module,
    seen: Mixed,
    attending: dict[int, Attending],
    config: ModelConfig,
    backend: Backend,
    ranks: Ranks | None,
    agree: Agree,
    replace: Callable[[Sequence[nn.Module]], list[nn.Module]],
) -> tuple[BranchDecoder, list[nn.Module]] | None:
    """Return the decoder as it was seen, and its modules that have another forward then.

    attending: by the number of the layer, where kernels take attention from the projection on. replace: has
    kernels compute parts of modules that the decoder calls, and returns those parts; they are left to their
    own code if layers give something else by them. None, if what passes between its parts is something else,
    or kernels give something else, on any rank.
    """
    last = following(seen.around, seen.layers[-1].whole.out)
    look_up, norm = look_up_of(causal, seen, backend, ranks), None if last is None else norm_of(last.module)
    ends = last is not None and norm is not None and torch.equal(last.out, seen.out)
    if not agree(ends and look_up is not None) or norm is None or look_up is None:
        return None
    rotations = [_rotation(each, seen.positions) for each in seen.rotations]
    layers: list[list[Part]] = []
    for number, layer in enumerate(seen.layers):
        place = config.place(number) if isinstance(layer, SeenLayer) else -1
        found = _parts(layer, attending.get(number), place, seen, rotations, backend)
        if not agree(bool(found)) or not found:
            return None
        layers.append(found)
    parts = [part for layer in layers for part in layer]
    if not any(part.mixes for part in parts):
        return None
    handing: list[nn.Module] = []
    for part in parts:
        branch = part.branch
        if isinstance(branch, MixerBranch) and branch.output is not None:
            handing += _outputs(branch.module)
    for module in handing:
        module.forward = HandedOn()
    of_kernels = replace([part.branch.module for part in parts if isinstance(part.branch, _OWN)])
    known = [part.branch for part in parts if isinstance(part.branch, AttentionBranch)]
    specs, dtype = config.cache_specs, seen.out.dtype
    shapes = {each.place: shape_of(each.attending, specs[each.place], dtype) for each in known}
    decoder = BranchDecoder(parts, norm, look_up, shapes, len(specs), backend, seen.tokens.device)
    for replaced in (of_kernels, []):
        if _gives(layers, seen, norm, backend, agree):
            return decoder, handing + replaced
        for module in replaced:
            del module.forward
            let_stand_alone(module)
    for module in handing:
        del module.forward
    return None


def _parts(
    seen: SeenLayer | StateLayer,
    attending: Attending | None,
    place: int,
    decoder: Mixed,
    rotations: Sequence[Rotation | None],
    backend: Backend,
) -> list[Part] | None:
    """Return a layer's branches, if what passes between them does so there, to the bit."""
    parts: list[Part] = []
    state = seen.whole.into
    while not _same(state, seen.whole.out):
        before, into = normed_by(seen.children, state)
        passage = following(seen.children, into)
        if passage is None or passage.out.shape != state.shape or len(parts) == _MOST_BRANCHES:
            return None
        behind, added = normed_by(seen.children, passage.out)
        if added.dtype != state.dtype:
            return None
        branch: AttentionBranch | MixerBranch | Branch | None
        if isinstance(seen, SeenLayer) and passage is seen.attention and attending is not None:
            branch = AttentionBranch(attending, place)
        elif passage.module in decoder.mixers:
            attends = isinstance(seen, SeenLayer) and passage is seen.attention
            branch = _mixer(passage, decoder, rotations, attends=attends)
        else:
            branch = _mlp(passage, backend)
        if branch is None:
            return None
        parts.append(Part(before, branch, behind))
        state = state + added
    return parts


def _same(state: Tensor, other: Tensor) -> bool:
    return state.dtype == other.dtype and torch.equal(state, other)


def _mlp(passage: Passage, backend: Backend) -> Branch | None:
    module = passage.module
    if not takes_one(passage):
        return None
    if (gated := gated_of(module)) is not None:
        return GatedBranch(gated, backend)
    if (ungated := ungated_of(module)) is not None and not ungated.adds:
        return UngatedBranch(ungated, backend)
    return ModuleBranch(module, backend)


def _rotation(seen: Passage, positions: Tensor) -> Rotation | None:
    """Return a rotation, if it is of the step's positions alone: what attends by it is seen with noise."""
    rotation = Rotation(seen.module, seen.arguments, seen.keywords, len(positions))
    try:
        ours = rotation.of(positions)
    except torch.AcceleratorError:  # nothing more can be computed
        raise
    except Exception:  # modelling code may want anything
        return None
    if not isinstance(ours, tuple) or not isinstance(seen.result, tuple):
        return None
    return rotation if len(ours) == len(seen.result) and all(map(_same, ours, seen.result)) else None


def _mixer(
    passage: Passage, decoder: Mixed, rotations: Sequence[Rotation | None], *, attends: bool
) -> MixerBranch | None:
    """Return a module that mixes tokens, if all else that it is given of them is their places."""
    keywords, arguments, positions = dict(passage.keywords), passage.arguments, decoder.positions
    by_name = keywords.pop(_HIDDEN, None) is not None
    if not by_name:
        arguments = arguments[1:]
    places: dict[str, Rotation | None] = {}
    for name, value in keywords.items():
        if isinstance(value, Tensor) and _same(value, positions[None]):
            places[name] = None
        for seen, rotation in zip(decoder.rotations, rotations, strict=True):
            if rotation is not None and value is seen.result:
                places[name] = rotation
    keywords = {name: each for name, each in keywords.items() if name not in places}
    if not all(_is_plain(each, len(positions)) for each in (*arguments, *keywords.values())):
        return None
    outputs = _outputs(passage.module)
    product = merged(outputs) if outputs and _is_last(passage, outputs[0]) else None
    return MixerBranch(passage.module, by_name, arguments, keywords, places, product, attends)


def _is_plain(value: Any, tokens: int) -> bool:
    """Return whether what a module is given is the same in each step: how many tokens there are is not."""
    return value is None or (isinstance(value, _PLAIN) and (value is True or value != tokens))


def _outputs(module: nn.Module) -> list[nn.Linear]:
    """Return the one projection that may be a module's last step, or none: what ranks sum stays theirs."""
    found = linears(module, [(name,) for name in _OUTPUT]) or []
    return [each for each in found if isinstance(each, nn.Linear) and "forward" not in vars(each)]


def _is_last(passage: Passage, output: nn.Linear) -> bool:
    """Return whether a module gives what its output's product does, and nothing follows that."""
    given: list[Tensor] = []
    hook = output.register_forward_hook(lambda _, __, out: given.append(out))
    try:
        result: Any = passage.module(*passage.arguments, **passage.keywords)
    finally:
        hook.remove()
    out = result[0] if isinstance(result, tuple) else result
    return len(given) == 1 and given[0].shape == out.shape and torch.equal(given[0], out)


def _gives(
    layers: Sequence[Sequence[Part]], seen: Mixed, final: Norm, backend: Backend, agree: Agree
) -> bool:
    """Return whether branches give what was seen of their layers, of all tokens and of one."""
    firsts = [parts[0].before for parts in layers[1:]] + [final]
    for parts, layer, outer in zip(layers, seen.layers, firsts, strict=True):
        for rows in (slice(None), slice(1)):
            if not agree(_computes(parts, layer, seen.positions[rows], rows, outer, backend)):
                return False
    return True


def _computes(
    parts: Sequence[Part],
    seen: SeenLayer | StateLayer,
    positions: Tensor,
    rows: slice,
    outer: Norm | None,
    backend: Backend,
) -> bool:
    """Return whether a layer's branches give what was seen of it, of these rows."""
    try:
        total, normed = _run(parts, seen, positions, rows, outer, backend)
    except torch.AcceleratorError:  # nothing more can be computed
        raise
    except Exception:  # a kernel may not compile for a device that nobody has tried
        return False
    expected = seen.whole.out[rows]
    if not alike(total, expected, times=_ROUNDINGS):
        return False
    if outer is not None:
        expected = rms_norm_reference(expected, outer.weight, outer.eps)
    return alike(normed, expected, times=_ROUNDINGS)


def _run(
    parts: Sequence[Part],
    seen: SeenLayer | StateLayer,
    positions: Tensor,
    rows: slice,
    outer: Norm | None,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Return a layer's residual behind it, of rows of what it was seen with, and the outer norm of that."""
    total = seen.whole.into[rows].clone()

    def attends(_: AttentionBranch) -> Callable[[Tensor], Tensor]:
        assert isinstance(seen, SeenLayer)
        attended = seen.attended[rows]
        return lambda _: attended

    every = zip(parts, [part.before for part in parts[1:]] + [outer], strict=True)
    normed = normed_before(parts[0], total, backend)
    return total, run_parts(every, total, normed, attends, StepPlaces(positions), backend)

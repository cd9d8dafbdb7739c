"""Linear layers' weights stay in the few bits that files have, of a model by transformers' code."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.models.float8_files import Float8Tensor
from quire.engine.models.general.branches import BranchDecoder
from quire.engine.models.general.delta_nets import DeltaNetModule
from quire.engine.models.general.kept_linear import KeptLinear
from quire.engine.models.general.model import GeneralModel
from quire.engine.models.general.plain import PlainDecoder
from quire.engine.models.general.proof import alike
from quire.engine.models.general.sandwich import SandwichDecoder
from quire.engine.models.general.whole import FusedDecoder
from quire.engine.models.packed_files import PackedTensor
from quire.kernels.backend import triton_backend
from quire.kernels.experts.routing import route_reference
from quire.kernels.gpu import gpu_of
from quire.kernels.quantised.linear import QuantisedLinear
from tests.models import kept_folder
from tests.models.kept_folder import edit, generate
from tests.models.kept_products_folder import (
    EXPANDING,
    KEEPING,
    KINDS,
    MOST_APART,
    kept_in,
    layers_in,
    load,
    save,
)

DECODERS = {
    "mistral": FusedDecoder,
    "phi3": FusedDecoder,
    "starcoder2": PlainDecoder,
    "gemma3_text": SandwichDecoder,
    "qwen3_5_text": BranchDecoder,
    "qwen3_next": BranchDecoder,
    "cohere": type(None),
}
EVERY = [
    *((kind, form) for kind in KINDS for form in ("blocks", "awq")),
    *(("gemma3_text", form) for form in kept_folder.FORMS if form not in ("blocks", "awq")),
]


@pytest.mark.parametrize(("kind", "form"), EVERY)
def test_kept_weights_stand_for_the_numbers_that_they_would_be(kind: str, form: str, tmp_path: Path) -> None:
    """And nothing is expanded that can be kept."""
    folder = save(kind, form, tmp_path)
    (ours, num_bytes), generated = load_and_generate_without_numbers(folder)
    other, expanded = load(folder, EXPANDING)
    assert type(ours.fusion.decoder) is type(other.fusion.decoder) is DECODERS[kind]
    assert len(ours.fusion.modules) == len(other.fusion.modules)
    numbers = {name: layer.weight for name, layer in layers_in(other).items()}
    for name, kept in kept_in(ours).items():
        assert torch.equal(kept, numbers[name])  # none of either, where another product has its rows
    (tokens, logits), (expected, theirs) = generated, generate(other)
    assert tokens == expected
    for each, wanted in zip(logits, theirs, strict=True):
        torch.testing.assert_close(each, wanted, atol=MOST_APART, rtol=1e-4)
    saved = sum(
        4 * math.prod(sizes) - form.num_bytes(*sizes)
        for name, form in ours.kept.items()
        for layer, sizes in sizes_in(ours).items()
        if name.endswith(f"{layer}.weight")
    )
    assert num_bytes == expanded - saved


def sizes_in(model: GeneralModel) -> dict[str, tuple[int, int]]:
    return {name: (each.out_features, each.in_features) for name, each in layers_in(model).items()}


def load_and_generate_without_numbers(
    folder: Path,
) -> tuple[tuple[GeneralModel, int], tuple[list[list[int]], list[Tensor]]]:
    """Return a model, its bytes and what it generates: loading, proofs and steps expand no weight."""
    read: list[str] = []

    def noted(tensor: Any, index: Any, expand: Any) -> Tensor:
        read.append(tensor.name)
        numbers: Tensor = expand(tensor, index)
        return numbers

    def refuse(layer: KeptLinear) -> Tensor:
        raise AssertionError("a layer's weight is expanded")

    with pytest.MonkeyPatch.context() as patch:
        for files in (Float8Tensor, PackedTensor):
            expand = files.__getitem__
            patch.setattr(files, "__getitem__", lambda tensor, index, of=expand: noted(tensor, index, of))
        patch.setattr(KeptLinear, "weight", property(refuse))
        model, num_bytes = load(folder)
        every = layers_in(model)
        # Those of few heads, and of a gate.
        dense = [name for name, (outputs, _) in sizes_in(model).items() if outputs % 16]
        assert [name for name, layer in every.items() if not isinstance(layer, KeptLinear)] == dense
        assert not [name for name in read if not any(part in name for part in (*dense, ".experts."))]
        assert len(model.kept) == len(every) - len(dense) > 0
        return (model, num_bytes), generate(model)


@pytest.mark.parametrize("form", ["blocks", "awq"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_of_the_device_at_hand_are_proved_to_compute_the_same(
    kind: str, form: str, tmp_path: Path
) -> None:
    device, backend, dtype = torch.device("cpu"), KEEPING, torch.float32
    if torch.cuda.is_available():
        device = torch.device("cuda")
        backend, dtype = triton_backend(gpu_of(device)), torch.bfloat16
    model, _ = load(save(kind, form, tmp_path), backend, dtype, device=device)
    assert type(model.fusion.decoder) is DECODERS[kind] and not model.takes_pieces
    for layer in layers_in(model).values():
        if isinstance(layer, KeptLinear) and layer.kept.shape[0]:
            x = torch.randn(5, layer.in_features, device=device).to(dtype)
            expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
            assert alike(KeptLinear.forward(layer, x), expected)  # whatever stands for that


@pytest.mark.parametrize(("kind", "parts"), [("qwen3_5_text", 2), ("qwen3_next", 2), ("qwen3_5_text", 1)])
def test_delta_nets_have_a_product_for_each_way_that_weights_are_held(
    kind: str, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if parts == 2:  # where betas and decays are of fewer heads than kernels want
        monkeypatch.setitem(KINDS, kind, KINDS[kind] | {"linear_num_value_heads": 4})
    folder = save(kind, "blocks", tmp_path)
    (ours, _), (other, _) = load(folder), load(folder, EXPANDING)
    nets = [part.forward.net for part in ours._decoder.modules() if isinstance(part.forward, DeltaNetModule)]
    assert nets and all(isinstance(net.product, QuantisedLinear) for net in nets)
    assert all((net.few is None) == (parts == 1) for net in nets)
    (tokens, logits), (expected, theirs) = generate(ours), generate(other)
    assert tokens == expected
    for each, wanted in zip(logits, theirs, strict=True):
        torch.testing.assert_close(each, wanted, atol=MOST_APART, rtol=1e-4)


def test_layers_beside_some_that_are_not_quantised_are_expanded(tmp_path: Path) -> None:
    """Those of other products are kept."""
    folder = save("gemma3_text", "rows", tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    whole = load(folder, EXPANDING)[0]
    numbers = layers_in(whole)["layers.1.mlp.up_proj"].weight.clone()
    edit(folder, lambda tensors: (tensors.pop(f"{name}_scale"), tensors.update({name: numbers})))
    model, _ = load(folder)
    dense = [name for name, layer in layers_in(model).items() if not isinstance(layer, KeptLinear)]
    assert dense == ["layers.1.mlp.gate_proj", "layers.1.mlp.up_proj"]
    assert generate(model)[0] == generate(whole)[0]


def test_a_fusion_that_is_undone_leaves_what_layers_had(tmp_path: Path) -> None:
    """Rows of heads that are rotated in part, and of gates, are in another order meanwhile."""
    folder = save("qwen3_5_text", "blocks", tmp_path)
    model, other = load(folder)[0], load(folder, EXPANDING)[0]
    own = layers_in(other)["layers.1.self_attn.q_proj"]
    assert not own.weight.numel() and not kept_in(model)["layers.1.self_attn.q_proj"].numel()
    model.fusion.undo()
    other.fusion.undo()
    for name, kept in kept_in(model).items():
        if "self_attn" in name:
            assert torch.equal(kept, layers_in(other)[name].weight) and kept.numel()


def test_kernels_read_no_scales_that_were_just_copied(tmp_path: Path) -> None:
    """Of a product's rows a layer has a view, by which kernels do not multiply unless it stands alone."""
    model, _ = load(save("cohere", "awq", tmp_path))
    layer = layers_in(model)["layers.0.mlp.gate_proj"]
    assert isinstance(layer, KeptLinear) and not layer.kept.scales.is_contiguous()
    multiplied: list[Tensor] = []

    def multiply(x: Tensor, product: Any) -> Tensor:
        multiplied.append(x)
        assert product.weight.scales.is_contiguous()
        result: Tensor = product(x)
        return result

    layer.multiply, x = multiply, torch.randn(3, 256)
    expected = layer(x)
    assert not multiplied
    model.fusion.undo()
    assert torch.equal(layer(x), expected) and len(multiplied) == 1


def test_layers_that_a_branch_leaves_to_their_own_code_have_scales_of_their_own(tmp_path: Path) -> None:
    """As a shared expert's, which was one product beside a router that a kernel computes otherwise."""

    def wrong(*given: Any) -> tuple[Tensor, Tensor]:
        weights, index = route_reference(*given)
        return weights, index.roll(1, dims=-1)

    model, _ = load(save("qwen3_next", "awq", tmp_path), replace(KEEPING, route=wrong))
    assert isinstance(model.fusion.decoder, BranchDecoder)
    layer = layers_in(model)["layers.0.mlp.shared_expert.gate_proj"]
    assert isinstance(layer, KeptLinear) and layer.kept.scales.is_contiguous()


@pytest.mark.parametrize("part", [".weight_scale", ".scales"])
def test_scales_that_are_not_finite_are_refused_by_name(part: str, tmp_path: Path) -> None:
    folder = save("gemma3_text", "rows" if part == ".weight_scale" else "gptq", tmp_path)
    name = "model.layers.1.self_attn.o_proj"

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name + part].view(-1)[5] = torch.inf

    edit(folder, spoil)
    with pytest.raises(ValueError, match=f"{name}.*stands for numbers that are not finite"):
        load(folder)

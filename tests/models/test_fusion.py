"""Which of a model's own code kernels stand for, and that nothing is replaced that differs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quire.engine.models.general import matching, mlps, norms, proof
from quire.engine.models.general.mlps import Ungated
from quire.engine.models.general.model import GeneralModel
from quire.engine.models.general.modules import (
    FusedMLP,
    GatedModule,
    LayerNormModule,
    LinearModule,
    ModuleMLP,
    NormModule,
    UngatedModule,
    UnreadRotation,
)
from quire.engine.models.general.observed import Passage
from quire.engine.models.general.sandwich import (
    GatedBranch,
    ModuleBranch,
    SandwichDecoder,
    SandwichLayer,
)
from quire.engine.models.loader import load_model
from quire.engine.models.pre_norm import GatedMLP
from quire.engine.models.reading import read_model
from quire.kernels.backend import Backend, torch_backend
from quire.kernels.linear.alone import add_normed_linear_reference, gated_linear_reference
from quire.kernels.pointwise import norm as rms
from quire.kernels.pointwise.activation import ACTIVATIONS, UNGATED
from tests.models.any_model import LAYERS, save_tiny


def load(kind: str, folder: Path) -> GeneralModel:
    save_tiny(kind, folder)
    return load_saved(folder)


def load_saved(
    folder: Path, dtype: torch.dtype = torch.float32, backend: Backend | None = None
) -> GeneralModel:
    config = read_model(folder, "transformers")
    model, _ = load_model(
        folder, config, backend or torch_backend(), device="cpu", dtype=dtype, max_model_len=100
    )
    assert isinstance(model, GeneralModel)
    return model


@pytest.mark.parametrize(
    ("kind", "mlp"),
    [
        ("llama", GatedMLP),
        ("qwen3", GatedMLP),  # norms of heads
        ("qwen2", GatedMLP),  # biases
        ("granite", GatedMLP),  # whose multipliers are 1
        ("smollm3", GatedMLP),  # some layers do not rotate
        ("qwen3_moe", ModuleMLP),
        ("mixtral", ModuleMLP),
        ("gpt_oss", ModuleMLP),  # sinks, and windows in some layers
        ("starcoder2", Ungated),  # layer norms, biases, no gate
        ("nemotron", Ungated),  # the square of a ReLU, norms whose weights are one more
    ],
)
def test_a_decoder_of_pre_norm_layers_runs_as_native_ones_do(kind: str, mlp: type, tmp_path: Path) -> None:
    decoder = load(kind, tmp_path).fusion.decoder
    assert decoder is not None
    assert {type(layer.mlp) for layer in decoder.layers} == {mlp}


@pytest.mark.parametrize(
    ("kind", "count", "mlp"),
    [
        ("gemma2", 4, GatedBranch),
        ("gemma3_text", 4, GatedBranch),
        ("exaone4", 2, GatedBranch),  # of what is added alone
        ("kolibri1", 4, ModuleBranch),  # experts
    ],
)
def test_a_decoder_that_norms_what_it_adds_runs_without_its_own_code(
    kind: str, count: int, mlp: type, tmp_path: Path
) -> None:
    decoder = load(kind, tmp_path).fusion.decoder
    assert isinstance(decoder, SandwichDecoder)
    for layer in decoder.layers:
        assert len(norms_of(layer)) == count and type(layer.mlp) is mlp


def raises(*given: Any) -> Tensor:
    raise RuntimeError("it does not compile for this device")


@pytest.mark.parametrize(
    "wrong",
    [
        {"add_normed_linear": lambda *given: add_normed_linear_reference(*given) * 1.05},
        {"gated_linear": lambda *given: gated_linear_reference(*given).roll(1, -1)},
        {"add_normed_linear": raises},
    ],
)
def test_a_layer_whose_kernels_give_something_else_is_left_to_its_own_code(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny("gemma2", tmp_path)
    fusion = load_saved(tmp_path, backend=replace(torch_backend(), **wrong)).fusion
    assert fusion.decoder is None


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_embedding_are_looked_up_and_scaled_at_once(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(kind, tmp_path)
    model = load_saved(tmp_path, dtype)
    module = model._decoder.embed_tokens
    tokens = torch.tensor([3, 96, 0])
    with torch.inference_mode():
        expected = module(tokens)
        monkeypatch.setattr(type(module), "forward", None)  # nobody asks it any more
        assert model.fusion.decoder is not None
        assert torch.equal(model.fusion.decoder._embed(tokens), expected)


def test_what_a_layer_adds_must_be_the_same_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm that the layer's own code scales once more."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer

    save_tiny("gemma2", tmp_path)
    forward = Gemma2DecoderLayer.forward

    def more(self: Any, hidden: Tensor, *given: Any, **named: Any) -> Tensor:
        return hidden + (forward(self, hidden, *given, **named) - hidden) * 1.001

    monkeypatch.setattr(Gemma2DecoderLayer, "forward", more)
    fusion = load_saved(tmp_path).fusion
    forwards = {type(module.forward) for module in fusion.modules}
    assert fusion.decoder is None and {NormModule, GatedModule} <= forwards


@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gemma3_text", "exaone4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_are_rounded_as_the_models_own_code_rounds(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """In 16 bits Gemma's are multiplied by one more than a weight before they are rounded, others after."""
    save_tiny(kind, tmp_path)
    model = load_saved(tmp_path, dtype)
    decoder = model.fusion.decoder
    assert isinstance(decoder, SandwichDecoder)
    wide = {norm.weight.dtype for layer in decoder.layers for norm in norms_of(layer)}
    assert wide == ({torch.float32} if kind.startswith("gemma") else {dtype})
    module = next(each for each in model._decoder.modules() if type(each).__name__.endswith("RMSNorm"))
    norm, x = norms.norm_of(module), torch.randn(50, module.weight.shape[0]).to(dtype)
    assert norm is not None
    same = torch_backend().rms_norm(x, norm.weight, norm.eps) == module(x)
    assert float(same.float().mean()) > 0.99


@pytest.mark.parametrize("kind", ["olmo2", "glm4"])
def test_elsewhere_modules_are_replaced(kind: str, tmp_path: Path) -> None:
    """Norms over all heads, and heads that are rotated in part."""
    fusion = load(kind, tmp_path).fusion
    forwards = {type(module.forward) for module in fusion.modules}
    assert fusion.decoder is None and {NormModule, GatedModule} <= forwards
    fusion.undo()
    assert not fusion.modules


def norms_of(layer: SandwichLayer) -> list[rms.Norm]:
    found = (layer.before, layer.attended, layer.between, layer.behind)
    return [norm for norm in found if norm is not None]


def rotations(model: GeneralModel) -> list[nn.Module]:
    return [module for module in model.fusion.modules if isinstance(module.forward, UnreadRotation)]


@pytest.mark.parametrize(("kind", "count"), [("olmo", 1), ("phi", 1), ("glm", 0)])
def test_angles_that_tables_have_are_not_computed_too(kind: str, count: int, tmp_path: Path) -> None:
    """Phi rotates a part of a head. GLM rotates every second number of one, which its own code does."""
    assert len(rotations(load(kind, tmp_path))) == count


def test_angles_that_somebody_reads_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that looks at them beside its attention."""
    from transformers.models.olmo.modeling_olmo import OlmoDecoderLayer

    save_tiny("olmo", tmp_path)
    forward = OlmoDecoderLayer.forward

    def more(self: Any, hidden: Tensor, position_embeddings: Any = None, **named: Any) -> Tensor:
        out = forward(self, hidden, position_embeddings=position_embeddings, **named)
        return out + 0 * position_embeddings[0].sum()

    monkeypatch.setattr(OlmoDecoderLayer, "forward", more)
    model = load_saved(tmp_path)
    assert model.fusion.modules and not rotations(model)


@pytest.mark.parametrize(
    "kind",
    [
        "phi",  # attention and MLP of one norm
        "bloom",  # an MLP that adds the residual
        "gpt2",  # weights transposed
        "falcon",  # linear layers of its own class
    ],
)
def test_mlps_of_two_products_and_layer_norms_are_replaced(kind: str, tmp_path: Path) -> None:
    forwards = [type(module.forward) for module in load(kind, tmp_path).fusion.modules]
    assert forwards.count(UngatedModule) == LAYERS and LayerNormModule in forwards


def test_products_of_other_parts_are_replaced(tmp_path: Path) -> None:
    """OPT has its MLP's in the layer itself, and an attention that is transformers' own."""
    fusion = load("opt", tmp_path).fusion
    assert [type(module.forward) for module in fusion.modules].count(LinearModule) == 6 * LAYERS


@torch.no_grad()
def test_linear_layers_are_what_they_give() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Named(nn.Linear):
        pass

    assert proof.linear_of(Doubled(8, 4)) is None
    layer, transposed, x = Named(8, 4), Conv1D(4, 8), torch.randn(3, 8)
    for module in (layer, transposed):
        found = proof.linear_of(module)
        assert found is not None and found.weight.is_contiguous()
        torch.testing.assert_close(found(x), module(x))


def test_what_passes_between_parts_must_be_the_same_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that does a little more than the parts that it is made of."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    save_tiny("llama", tmp_path)
    forward = LlamaDecoderLayer.forward

    def more(*given: Any, **named: Any) -> Tensor:
        return forward(*given, **named) * 1.001

    monkeypatch.setattr(LlamaDecoderLayer, "forward", more)
    assert load_saved(tmp_path).fusion.decoder is None


class Rotary(nn.Module):
    """Angles as transformers' modules give them; `kind` as their configuration names it."""

    def __init__(self, kind: str = "default", by_call: bool = False) -> None:
        super().__init__()
        self.rope_type, self.by_call = kind, by_call

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * torch.tensor([1.0, 0.1, 0.01])
        angles = torch.cat((angles, angles), dim=-1)
        if self.by_call:
            angles = angles / position_ids.max()
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@pytest.mark.parametrize("module", [Rotary("dynamic"), Rotary("longrope"), Rotary(by_call=True)])
def test_rotations_that_look_at_other_positions_are_left_alone(module: Rotary) -> None:
    assert table_of(module) is None


def test_a_table_has_half_a_heads_angles_of_each_position() -> None:
    table = table_of(Rotary())
    assert table is not None and table.shape == (50, 6)
    angles = torch.tensor([7.0, 0.7, 0.07])
    torch.testing.assert_close(table[7], torch.cat((angles.cos(), angles.sin())))


def table_of(module: Rotary) -> Tensor | None:
    positions, x = torch.tensor([0, 3, 4, 20]), torch.zeros(1, 4, 8)
    result = module(x, position_ids=positions[None])
    passage = Passage(module, x[0], result[0][0], (x,), {"position_ids": positions[None]}, result)
    return matching.rope_table(passage, positions, max_len=50)


class Norm(nn.Module):
    """An RMSNorm with a weight and one more."""

    def __init__(self, more: float, power: float, mean: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(48))
        self.eps = 1e-5
        self.more, self.power, self.mean = more, power, mean

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.mean * x.mean(-1, keepdim=True)
        scale = (x.pow(2).mean(-1, keepdim=True) + self.eps) ** self.power
        return (self.weight + self.more) * x * scale


@torch.no_grad()
def test_norms_are_told_apart() -> None:
    plain = norms.norm_of(Norm(0.0, -0.5, 0.0))
    assert plain is not None and plain.eps == 1e-5
    gemma = Norm(1.0, -0.5, 0.0)
    found = norms.norm_of(gemma)
    assert found is not None and torch.equal(found.weight, 1 + gemma.weight)
    gemma.weight *= 1e5  # beside which one is no more than rounding
    found = norms.norm_of(gemma)
    assert found is not None and torch.equal(found.weight, 1 + gemma.weight)
    assert norms.norm_of(Norm(0.5, -0.5, 0.0)) is None
    assert norms.norm_of(Norm(0.0, -0.51, 0.0)) is None
    assert norms.norm_of(Norm(0.0, -0.5, 1.0)) is None, "a layer norm"
    other = Norm(0.0, -0.5, 0.0)
    other.variance_epsilon = 1e-6  # type: ignore[assignment]
    assert norms.norm_of(other) is None, "it says another epsilon than it uses"


class MLP(nn.Module):
    def __init__(self, name: str, times: float = 1.0, limit: float = torch.inf) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48), nn.Linear(32, 48)
        self.down_proj = nn.Linear(48, 32, bias=False)
        self.act_fn = ACTIVATIONS[name] if name in ACTIVATIONS else getattr(torch, name)
        self.times, self.limit = times, limit

    def forward(self, x: Tensor) -> Tensor:
        gate = self.act_fn(self.gate_proj(x)).clamp(max=self.limit)
        result: Tensor = self.down_proj(gate * self.up_proj(x)) * self.times
        return result


@torch.no_grad()
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_mlps_share_the_memory_of_one_matrix(name: str) -> None:
    mlp, x = MLP(name), torch.randn(3, 32)
    expected = mlp(x)
    found = mlps.gated_of(mlp)
    assert found is not None and found.activation == name
    torch.testing.assert_close(GatedModule(found, torch_backend())(x), expected)
    torch.testing.assert_close(mlp(x), expected)
    assert mlp.up_proj.weight.data_ptr() == found.gate_up.weight[48:].data_ptr()


@torch.no_grad()
def test_other_mlps_are_left_alone() -> None:
    assert mlps.gated_of(MLP("tanh")) is None
    assert mlps.gated_of(MLP("silu", times=1.01)) is None
    assert mlps.gated_of(MLP("silu", limit=16.0)) is None, "no small input reaches it"


class Plain(nn.Module):
    """An MLP without a gate."""

    def __init__(self, name: str, limit: float = torch.inf) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 48), nn.Linear(48, 32)
        self.activation_fn, self.limit = UNGATED[name] if name in UNGATED else getattr(torch, name), limit

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(self.activation_fn(self.fc1(x)).clamp(max=self.limit))
        return result


@torch.no_grad()
@pytest.mark.parametrize("name", UNGATED)
def test_mlps_of_two_products_are_found_by_their_activations(name: str) -> None:
    mlp, x = Plain(name), torch.randn(2, 3, 32)
    found = mlps.ungated_of(mlp)
    assert found is not None and found.activation == name
    torch.testing.assert_close(UngatedModule(found, torch_backend())(x), mlp(x))


@torch.no_grad()
def test_other_mlps_of_two_products_are_left_alone() -> None:
    assert mlps.ungated_of(Plain("tanh")) is None
    assert mlps.ungated_of(Plain("relu", limit=16.0)) is None, "no small input reaches it"


@torch.no_grad()
def test_layer_norms_are_told_apart() -> None:
    plain = nn.LayerNorm(48)
    plain.weight.normal_()
    plain.bias.normal_()
    found = norms.layer_norm_of(plain)
    assert found is not None and found.bias is not None and found.eps == plain.eps
    assert norms.layer_norm_of(nn.LayerNorm(48, bias=False)) is not None
    assert norms.layer_norm_of(Norm(0.0, -0.5, 0.0)) is None, "an RMSNorm"
    other = nn.LayerNorm(48, eps=1e-5)
    other.variance_epsilon = 1e-3  # type: ignore[assignment]
    assert norms.layer_norm_of(other) is None, "it says another epsilon than it uses"


def test_a_layer_that_multiplies_what_it_adds_is_none_of_ours(tmp_path: Path) -> None:
    save_tiny("granite", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"residual_multiplier": 0.5}))
    fusion = load_saved(tmp_path).fusion
    assert fusion.decoder is None


def test_gelu_stands_in_a_layer_beside_kernels_of_silu(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"silu"', '"gelu_pytorch_tanh"'))
    decoder = load_saved(tmp_path).fusion.decoder
    assert decoder is not None and isinstance(decoder.layers[0].mlp, FusedMLP)

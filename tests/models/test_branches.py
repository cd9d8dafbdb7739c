"""Decoders of which some layers keep states, without their own code between what they add to the residual."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from quire.engine.device.block_size import in_blocks
from quire.engine.models.general.branches import (
    AttentionBranch,
    BranchDecoder,
    HandedOn,
    MixerBranch,
    UngatedBranch,
)
from quire.engine.models.general.delta_nets import DeltaNetModule
from quire.engine.models.general.model import GeneralModel
from quire.engine.models.general.modules import GatedModule, NormModule, RouterModule
from quire.engine.models.general.sandwich import GatedBranch, ModuleBranch
from quire.engine.models.general.scans import ScanModule, StateSpaceModule
from quire.engine.models.general.short_convolutions import ShortConvolutionModule
from quire.engine.models.general.stateful import state_modules
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.kernels.backend import torch_backend
from quire.kernels.experts.routing import route_reference
from quire.kernels.formats.kv_format import BF16, FP32
from quire.kernels.linear.alone import add_normed_linear_reference
from quire.kernels.pointwise.gate import sigmoid_gate_reference
from quire.kernels.recurrence.operations import REFERENCES
from tests.models.any_model import save_tiny, tiny_model
from tests.models.launches_of_step import launches_of_decode
from tests.models.paged_driver import BLOCK_SIZE, PagedDriver
from tests.models.test_fusion import load, load_saved

MIXES, ATTENDS = MixerBranch, AttentionBranch


@pytest.mark.parametrize(
    ("kind", "branches"),
    [
        ("qwen3_5_text", [MIXES, GatedBranch, ATTENDS, GatedBranch] * 2),
        ("qwen3_next", [MIXES, ModuleBranch, ATTENDS, ModuleBranch] * 2),
        ("lfm2", [MIXES, GatedBranch, ATTENDS, GatedBranch] * 2),
        ("bamba", [MIXES, GatedBranch, ATTENDS, GatedBranch] * 2),
        ("jamba", [MIXES, GatedBranch, ATTENDS, ModuleBranch] * 2),
        ("mamba2", [MIXES] * 4),
        ("falcon_mamba", [MIXES] * 4),
        ("nemotron_h", [MIXES, ModuleBranch, ATTENDS, UngatedBranch]),
        ("olmo_hybrid", [MIXES, GatedBranch] * 4),  # its norms are of all heads
        ("kimi_linear", [MIXES, GatedBranch, MIXES, ModuleBranch] * 2),
    ],
)
def test_a_decoder_of_which_layers_keep_states_is_its_branches(
    kind: str, branches: list[type], tmp_path: Path
) -> None:
    decoder = load(kind, tmp_path).fusion.decoder
    assert isinstance(decoder, BranchDecoder)
    assert [type(part.branch) for part in decoder.parts] == branches
    for part in decoder.parts:
        if isinstance(part.branch, MixerBranch):
            assert part.branch.output is not None  # and added to the residual


# With so many heads that in bf16 none is much of a token: what a head sees of few tokens may nearly cancel
# out, and is then divided by its size, so that roundings are as large.
NETS = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
OF_16_BITS: list[tuple[str, dict[str, Any], type]] = [
    ("qwen3_5_text", NETS, DeltaNetModule),
    ("qwen3_next", NETS, DeltaNetModule),
    ("olmo_hybrid", {"hidden_size": 256}, DeltaNetModule),  # its decays, its first weights, stay in fp32
    ("kimi_linear", {}, DeltaNetModule),
    ("lfm2", {}, ShortConvolutionModule),
    ("bamba", {}, StateSpaceModule),
    ("nemotron_h", {}, StateSpaceModule),
    ("jamba", {}, ScanModule),
]


@pytest.mark.parametrize(("kind", "sizes", "by"), OF_16_BITS)
def test_layers_that_keep_states_run_by_kernels_in_bf16(
    kind: str, sizes: dict[str, Any], by: type, tmp_path: Path
) -> None:
    save_tiny(kind, tmp_path, **sizes)
    if kind == "jamba":
        _shorten_steps(tmp_path)
    config, _ = in_blocks(read_model(tmp_path), 16, BF16, torch.bfloat16)
    backend = replace(torch_backend(), recurrences=REFERENCES)
    model, _ = load_model(tmp_path, config, backend, device="cpu", dtype=torch.bfloat16, max_model_len=100)
    assert isinstance(model, GeneralModel) and isinstance(model.fusion.decoder, BranchDecoder)
    modules = [module for _, module in state_modules(model._decoder)]
    assert {type(vars(module)["forward"]) for module in modules} == {by} and not model.takes_pieces
    if kind == "olmo_hybrid":
        assert next(modules[0].parameters()).dtype == torch.float32


def _shorten_steps(folder: Path) -> None:
    """Have states keep many tokens, as trained ones do: of one alone a sum is one number times the token."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in weights:
        if name.endswith("dt_proj.bias"):
            weights[name] -= 4.0
    save_file(weights, file, metadata={"format": "pt"})


def test_layers_share_a_table_of_heads_that_are_rotated_in_part(tmp_path: Path) -> None:
    decoder = load("qwen3_next", tmp_path).fusion.decoder
    assert isinstance(decoder, BranchDecoder)
    found = [part.branch.attending for part in decoder.parts if isinstance(part.branch, AttentionBranch)]
    ropes = [attending.layer.rope for attending in found]
    assert len(ropes) > 1
    assert len({id(rope) for rope in ropes}) == 1


def raises(*given: Any) -> Tensor:
    raise RuntimeError("it does not compile for this device")


@pytest.mark.parametrize(
    "wrong",
    [
        {"add_normed_linear": lambda *given: add_normed_linear_reference(*given) * 1.05},
        {"sigmoid_gate": lambda x, gate: sigmoid_gate_reference(x, 1.5 * gate)},
        {"add_normed_linear": raises},
    ],
)
def test_what_kernels_give_otherwise_is_left_to_its_own_code(wrong: dict[str, Any], tmp_path: Path) -> None:
    reference = tiny_model("qwen3_5_text", tmp_path)
    model = load_saved(tmp_path, backend=replace(torch_backend(), **wrong))
    forwards = {type(module.forward) for module in model.fusion.modules}
    assert model.fusion.decoder is None and {NormModule, GatedModule} <= forwards and HandedOn not in forwards
    theirs = reference.state_dict()
    for name, weight in model._decoder.named_parameters():
        assert torch.equal(weight, theirs[f"model.{name}"]), name


def test_parts_of_modules_are_proved_where_the_decoder_calls_them(tmp_path: Path) -> None:
    """Of experts the router, which a kernel may compute otherwise."""

    def wrong(*given: Any) -> tuple[Tensor, Tensor]:
        weights, index = route_reference(*given)
        return weights, index.roll(1, dims=-1)

    save_tiny("qwen3_next", tmp_path)
    for route, taken in ((route_reference, True), (wrong, False)):
        fusion = load_saved(tmp_path, backend=replace(torch_backend(), route=route)).fusion
        forwards = {type(module.forward) for module in fusion.modules}
        assert isinstance(fusion.decoder, BranchDecoder) and HandedOn in forwards
        assert (RouterModule in forwards) == taken


@pytest.mark.parametrize("tokens", [1, 8])
def test_layers_that_attend_by_their_own_code_are_proved_of_one_token_and_of_several(
    tokens: int, tmp_path: Path
) -> None:
    def wrong(residual: Tensor, *given: Any) -> Tensor:
        return add_normed_linear_reference(residual, *given) * (1.05 if len(residual) == tokens else 1.0)

    save_tiny("kimi_linear", tmp_path)
    kernels = replace(torch_backend(), add_normed_linear=wrong)
    assert load_saved(tmp_path, backend=kernels).fusion.decoder is None


def test_what_a_layer_adds_must_be_the_same_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

    save_tiny("qwen3_5_text", tmp_path)
    forward = Qwen3_5DecoderLayer.forward

    def more(self: Any, hidden: Tensor, *given: Any, **named: Any) -> Tensor:
        return hidden + (forward(self, hidden, *given, **named) - hidden) * 1.001

    monkeypatch.setattr(Qwen3_5DecoderLayer, "forward", more)
    assert load_saved(tmp_path).fusion.decoder is None


def test_angles_of_other_positions_than_the_steps_are_left_to_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What attends is seen with noise in place of attention, which tells nothing of angles."""
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid as code

    class Later(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.angles = own(config)

        def forward(self, hidden: Tensor, position_ids: Tensor) -> Any:
            return self.angles(hidden, position_ids + self.first)

    own = code.OlmoHybridRotaryEmbedding
    save_tiny("olmo_hybrid", tmp_path)
    monkeypatch.setattr(code, "OlmoHybridRotaryEmbedding", Later)
    for first, fused in ((0, True), (1, False)):
        monkeypatch.setattr(Later, "first", first, raising=False)
        assert (load_saved(tmp_path).fusion.decoder is not None) == fused


def test_how_many_tokens_there_are_is_left_to_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid as code

    save_tiny("olmo_hybrid", tmp_path)
    layer, attention = code.OlmoHybridAttentionDecoderLayer, code.OlmoHybridAttention
    of_layer, of_attention = layer.forward, attention.forward

    def telling(self: Any, hidden: Tensor, *given: Any, **named: Any) -> Any:
        return of_layer(self, hidden, *given, length=self.length(hidden), **named)

    def told(self: Any, *given: Any, length: int, **named: Any) -> Any:
        return of_attention(self, *given, **named)

    monkeypatch.setattr(layer, "forward", telling)
    monkeypatch.setattr(attention, "forward", told)
    for length, fused in ((lambda _: 5, True), (lambda hidden: hidden.shape[1], False)):
        monkeypatch.setattr(layer, "length", staticmethod(length), raising=False)
        assert (load_saved(tmp_path).fusion.decoder is not None) == fused


def test_modules_have_their_weights_and_their_code_again(tmp_path: Path) -> None:
    save_tiny("qwen3_5_text", tmp_path)
    model = load_saved(tmp_path)
    attention = model._decoder.layers[1].self_attn
    assert attention.q_proj.weight.numel() == 0
    model.fusion.undo()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, weight in model._decoder.named_parameters():
        assert torch.equal(weight, theirs[f"model.{name}"]), name
    assert "forward" not in vars(model._decoder.layers[0].linear_attn.out_proj)


# Of two layers: a norm is of each branch, an MLP two products, and attention writes keys and attends. Large
# states are in groups of layers, of all of which one kernel finds the blocks of decodes.
PAIRS = [
    ("qwen3_5_text", ["linear_attention", "full_attention"], (5 + 1) + 3 + (5 + 1) + 3),
    ("lfm2", ["conv", "full_attention"], (3 + 1) + 3 + (4 + 1) + 3),
    ("mamba2", [], 2 * (5 + 1)),
    ("falcon_mamba", [], 2 * (9 + 1)),
]


@pytest.mark.parametrize(("kind", "pair", "launches"), PAIRS)
def test_a_decode_launches_as_few_kernels(kind: str, pair: list[str], launches: int, tmp_path: Path) -> None:
    found = []
    for pairs in (1, 2):
        folder = tmp_path / str(pairs)
        folder.mkdir()
        kinds = {"layer_types": pair * pairs} if pair else {}
        save_tiny(kind, folder, num_hidden_layers=2 * pairs, **kinds)
        found.append(launches_of_decode(folder))
    more = found[1] - found[0]
    assert all(name.startswith("kernel") for name in more), more
    products = more["kernel add_normed_linear"]  # each of which has a norm behind it
    assert more.total() + products == launches, more


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "nemotron_h", "mamba2"])
def test_newest_tokens_get_what_they_get_among_all(kind: str, tmp_path: Path) -> None:
    """What follows the last branch that mixes tokens computes no others."""
    save_tiny(kind, tmp_path)
    config, _ = in_blocks(read_model(tmp_path), BLOCK_SIZE, FP32, torch.float32)
    backend = replace(torch_backend(), recurrences=REFERENCES)
    model, _ = load_model(tmp_path, config, backend, device="cpu", dtype=torch.float32, max_model_len=100)
    assert isinstance(model, GeneralModel) and isinstance(model.fusion.decoder, BranchDecoder)
    every, newest = (PagedDriver(model, config, rows=4, max_len=100) for _ in range(2))
    for step in (({}, {0: [3, 4, 5], 2: [6]}, 0), ({0: 7, 2: 8}, {1: [*range(3, 23)]}, 1), ({1: 9}, {}, 2)):
        expected, got = every.step(*step), newest.step_of_newest(*step)
        assert list(expected) == list(got)
        for row, logits in got.items():
            torch.testing.assert_close(logits, expected[row][-1], rtol=1e-5, atol=1e-5)

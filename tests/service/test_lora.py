"""A model with an adapter merged, as a user meets it: served, asked offline, and told of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.commands.serve import add_flags, read_settings
from quire.doctor import describe
from quire.engine import startup
from quire.engine.config import EngineConfig
from quire.service.commands.parser import Parser
from quire.service.commands.usage_error import UsageError
from quire.service.demo import MODEL_FOLDER
from quire.service.text.model_tokenizer import tokenizer_of
from tests.models.adapter_folder import delta_of, lora_of, save_adapter

PROMPTS = ["A block table is", "The KV cache"]
MODULES = {
    f"model.layers.{layer}.self_attn.{name}": size
    for layer in (0, 3)
    for name, size in (("q_proj", 256), ("v_proj", 128))
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of an adapter for the demo model."""
    tensors = {
        name: each for module, size in MODULES.items() for name, each in lora_of(module, size, 256).items()
    }
    return save_adapter(tmp_path_factory.mktemp("adapters") / "mine", tensors, MODEL_FOLDER)


@pytest.fixture(scope="module")
def merged(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the demo model with the adapter merged by plain arithmetic."""
    folder = tmp_path_factory.mktemp("models") / "merged"
    shutil.copytree(MODEL_FOLDER, folder)
    held, file = load_file(adapter / "adapter_model.safetensors"), folder / "model.safetensors"
    tensors = {name.removeprefix("base_model.model."): each for name, each in held.items()}
    weights = {name: each.float() for name, each in load_file(file).items()}
    for module in MODULES:
        weights[f"{module}.weight"] += delta_of(tensors, module)
    save_file(weights, file, {"format": "pt"})
    return folder


def answers(**settings: Any) -> tuple[list[str], LLM]:
    params = SamplingParams(max_tokens=24, temperature=0)
    with LLM(device="cpu", num_gpu_blocks_override=64, max_num_seqs=4, swap_space=0, **settings) as llm:
        return [each[0].text for each in llm.generate(PROMPTS, params, use_tqdm=False)], llm


def test_answers_are_those_of_the_merged_model(adapter: Path, merged: Path) -> None:
    expected, _ = answers(model=merged)
    plain, base = answers()
    assert base.info.merged is None and expected != plain
    for settings in (
        {"model": adapter},
        {"lora": adapter},
        {"lora": str(adapter), "model_impl": "transformers"},
    ):
        texts, llm = answers(**settings)
        assert texts == expected
        assert llm.info.merged == (str(adapter), MODEL_FOLDER)
        assert (
            dict(describe(llm.info))["adapter"] == f"{adapter} is merged into the weights of {MODEL_FOLDER}"
        )


def test_ranks_of_a_server_merge_it_as_one_does(adapter: Path, merged: Path) -> None:
    expected, _ = answers(model=merged)
    texts, _ = answers(lora=adapter, tensor_parallel_size=2)
    assert texts == expected


def test_grammars_and_the_end_of_a_text_are_of_the_adapters_tokenizer(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, own = tmp_path / "base", tmp_path / "own"
    shutil.copytree(MODEL_FOLDER, base)
    shutil.copytree(adapter, own)
    for folder, end in ((base, "<|eos|>"), (own, "<|end|>")):
        shutil.copy(Path(MODEL_FOLDER) / "tokenizer.json", folder)
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    (base / "generation_config.json").unlink()
    seen: list[Path] = []
    monkeypatch.setattr(startup, "grammars_of", lambda folder, *others: seen.append(folder))
    ends = []
    for lora in (None, own):
        _, llm = answers(model=base, lora=lora)
        ends.append(
            [llm.tokenizer.decode([token], skip_special_tokens=False) for token in llm.info.eos_token_ids]
        )
    assert seen == [base, own]
    assert ends == [["<|eos|>"], ["<|end|>"]]


def settings_of(*words: str) -> Any:
    parser = Parser("serve")
    add_flags(parser)
    return read_settings(parser.parse([*words]))


def test_it_is_served_by_its_own_name(adapter: Path) -> None:
    """Since it is not its base model any more."""
    for words in ([str(adapter)], ["--lora", str(adapter)]):
        assert settings_of(*words).service.served_model_names == ("mine",)
    assert settings_of("owner/base", "--lora", "owner/mine").service.served_model_names == ("owner/mine",)
    named = settings_of("--lora", str(adapter), "--served-model-name", "other")
    assert named.service.served_model_names == ("other",)


def test_an_adapter_that_cannot_be_merged_is_a_wrong_flag(adapter: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path, {}, MODEL_FOLDER, peft_type="LOKR")
    with pytest.raises(UsageError, match=r"--lora: .*peft_type is 'LOKR'; of adapters only LORA"):
        settings_of("--lora", str(tmp_path))
    with pytest.raises(UsageError, match="is an adapter itself, and one is merged"):
        settings_of(str(adapter), "--lora", str(adapter))


def test_texts_are_read_by_the_adapters_tokenizer_and_template(adapter: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(adapter, own)
    config = EngineConfig(model=str(own))
    usual = tokenizer_of(config, None)
    (own / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    asked = [{"role": "user", "content": "hello"}]

    def rendered() -> str:
        template = tokenizer_of(config, None).chat_template
        assert template is not None
        return template.render(asked, add_generation_prompt=False)

    assert (
        usual.chat_template is not None
        and usual.chat_template.render(asked, add_generation_prompt=False) != "hello!"
    )
    assert rendered() == "hello!"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODEL_FOLDER) / name, own)
    tokens = json.loads((own / "tokenizer.json").read_text())
    tokens["added_tokens"].append(
        dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        | {"id": 4096, "content": "<|mine|>", "special": True}
    )
    (own / "tokenizer.json").write_text(json.dumps(tokens))
    assert rendered() == "hello!"
    assert tokenizer_of(config, None).encode("<|mine|>", add_special_tokens=False) == [4096]
    assert usual.encode("<|mine|>", add_special_tokens=False) != [4096]

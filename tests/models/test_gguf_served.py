"""Commands and `LLM` take a GGUF file as they take a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from quire import LLM, SamplingParams
from quire.cli import main
from tests.models.gguf_file import own_cache, save_gguf
from tests.models.test_gguf import with_numbers_of
from tests.usage import usage_error

__all__ = ["own_cache"]
pytestmark = pytest.mark.usefixtures("own_cache")

CHAT = "{% for message in messages %}the{{ message.content }}{% endfor %}"
SMALL = ["--device", "cpu", "--swap-space", "0", "--num-gpu-blocks-override", "32"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return save_gguf("llama", tmp_path, Kind.Q8_0, metadata={"tokenizer.chat_template": CHAT})[0]


def test_tokens_are_those_of_its_model(file: Path) -> None:
    reference = with_numbers_of(file, file.parent / "folder")
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(str(file), device="cpu", swap_space=0.0, num_gpu_blocks_override=32) as llm:
        (given,) = llm.chat([{"role": "user", "content": "th"}], params)
        prompt = given.prompt_token_ids
        assert llm.tokenizer.decode(prompt, skip_special_tokens=False) == "theth"
        tokens = given.outputs[0].token_ids
    whole = torch.tensor([[*prompt, *tokens]])
    with torch.inference_mode():
        logits = reference(whole).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == [*tokens]


@pytest.mark.parametrize("command", ["generate", "doctor"])
def test_commands_take_a_file(command: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = ["--prompt", "the", "--max-tokens", "4"] if command == "generate" else []
    with pytest.raises(SystemExit) as end:
        main([command, str(file), *SMALL, *prompt])
    assert not end.value.code
    said = capsys.readouterr().out
    assert said
    if command == "doctor":
        assert f"model      {file} (LlamaForCausalLM)" in said
        assert f"verdict    it runs here. Type: quire serve {file}" in said


FLAGS = {
    "serve": [],
    "doctor": [],
    "generate": ["--prompt", "the"],
    "route": ["--replica", "http://10.0.0.7"],
}


@pytest.mark.parametrize("command", FLAGS)
def test_what_is_no_model_is_refused_before_anything_starts(
    command: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_bytes(file.read_bytes()[:500])
    assert f"{file} is not a complete GGUF file" in usage_error([command, str(file), *FLAGS[command]], capsys)

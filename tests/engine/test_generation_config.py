"""What generation_config.json says of sampling is requests' default; `--generation-config` chooses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

from quire.engine.models.generation_config import SamplingDefaults, read_sampling_defaults


def write(folder: Path, **fields: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_what_the_folder_says_is_taken_and_what_is_not_applied_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(
        tmp_path, temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=512, suppress_tokens=[7, 9, 100, -1],
        eos_token_id=[1, 2], num_beams=1, no_repeat_ngram_size=3, do_sample=True,
    )  # fmt: skip
    assert read_sampling_defaults("auto", tmp_path, 100) == SamplingDefaults(
        temperature=0.6, top_k=20, top_p=0.95, max_tokens=512, logit_bias={7: -100.0, 9: -100.0}
    )
    assert caplog.text.strip().endswith("not applied to requests: no_repeat_ngram_size")


def test_what_ends_texts_in_transformers_alone_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    neutral = {"num_return_sequences": 1, "stop_strings": None, "max_time": None, "token_healing": False}
    read_sampling_defaults("auto", write(tmp_path, **neutral), 100)
    assert not caplog.text
    ends = {"num_return_sequences": 2, "stop_strings": ["User:"], "max_time": 3.0, "token_healing": True}
    read_sampling_defaults("auto", write(tmp_path, **ends), 100)
    told = caplog.text.strip().rpartition("not applied to requests: ")[2]
    assert sorted(told.split(", ")) == sorted(ends)


def test_auto_takes_a_folder_without_one_vllm_takes_none_and_another_folder_is_named(tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    assert read_sampling_defaults("auto", tmp_path, 100) == SamplingDefaults()
    with pytest.raises(ValueError, match=r"--generation-config: .*other has no generation_config\.json"):
        read_sampling_defaults(str(other), tmp_path, 100)
    write(tmp_path, temperature=0.5)
    write(other, temperature=0.7)
    assert read_sampling_defaults("vllm", tmp_path, 100) == SamplingDefaults()
    assert read_sampling_defaults(str(other), tmp_path, 100) == SamplingDefaults(temperature=0.7)


def test_an_older_folder_says_so_in_its_config_json(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config: dict[str, object] = {
        "temperature": 0.5, "top_k": 50, "suppress_tokens": None, "no_repeat_ngram_size": 3,
        "text_config": {"temperature": 0.9, "repetition_penalty": 1.2, "suppress_tokens": [4]},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = SamplingDefaults(temperature=0.5, repetition_penalty=1.2, logit_bias={4: -100.0})
    assert read_sampling_defaults("auto", tmp_path, 100) == expected
    assert "config.json: not applied to requests: no_repeat_ngram_size" in caplog.text
    theirs = GenerationConfig.from_model_config(config)
    assert (theirs.temperature, theirs.repetition_penalty, theirs.suppress_tokens) == (0.5, 1.2, [4])
    assert read_sampling_defaults("vllm", tmp_path, 100) == SamplingDefaults()
    write(tmp_path, top_p=0.5)
    assert read_sampling_defaults("auto", tmp_path, 100) == SamplingDefaults(top_p=0.5)


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", 3.0), ("top_p", 0), ("top_k", "20"), ("max_new_tokens", 0)]
)
def test_what_no_request_could_say_is_refused_by_file_and_field(
    field: str, value: object, tmp_path: Path
) -> None:
    write(tmp_path, **{field: value})
    name = field.replace("new_", "")
    with pytest.raises(ValueError, match=rf"generation_config\.json: .*{name}.*--generation-config vllm"):
        read_sampling_defaults("auto", tmp_path, 100)

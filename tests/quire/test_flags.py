"""Where a flag's value comes from, and what is said of what cannot be."""

from __future__ import annotations

import re
import socket
from argparse import Namespace
from pathlib import Path

import pytest

from quire.cli import main
from quire.commands.table import COMMANDS, find, overview, parse
from quire.service.commands import unknown_flags
from quire.service.commands.usage_error import UsageError
from quire.service.errors import ServerFailed
from tests.usage import usage_error


def last_line(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command says at its end; it must not have done anything."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = capsys.readouterr().err + (ended.value.code if isinstance(ended.value.code, str) else "")
    assert ended.value.code not in (0, None)
    return told.strip().splitlines()[-1]


# -- help ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_flag_has_a_sentence_and_its_default(command: object) -> None:
    parser = find(command.name).parser()  # type: ignore[attr-defined]
    for flag in parser.flags:
        sentence = flag.help.partition(" [QUIRE_")[0]
        assert sentence.endswith("."), flag.name
        assert flag.switches or "Default: " in sentence, flag.name
    text = parser.format_help()
    assert "examples:" in text
    assert all(flag.name in text for flag in parser.flags if flag.name.startswith("-"))


def test_help_is_in_groups_and_without_a_command_there_is_an_overview(
    capsys: pytest.CaptureFixture[str],
) -> None:
    headings = re.findall(r"^(\S.*):$", find("serve").parser().format_help(), re.MULTILINE)
    assert headings[:4] == ["Arguments", "Model", "Batch", "KV cache"]
    assert headings[-1] == "examples"
    for words, code in (([], 2), (["--help"], 0), (["help"], 0)):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == code
        assert capsys.readouterr().out == overview()
    assert all(f"  {command.name} " in overview() for command in COMMANDS)


# -- what there is not --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sevre"], "quire: there is no command 'sevre': did you mean serve?"),
        (["serve", "--prot", "1"], "quire serve: there is no flag --prot: did you mean --port?"),
        (["serve", "--max-num-seq=1"], "there is no flag --max-num-seq: did you mean --max-num-seqs?"),
        (["serve", "--zzz"], "there is no flag --zzz: `quire serve --help` lists those that there are"),
        (["serve", "a", "b"], "'b' is one word too many"),
        (
            ["serve", "--enable-lora"],
            "--enable-lora: adapters that requests choose among are not there yet: --lora",
        ),
        (["serve", "-q", "awq"], "there is no flag -q: did you mean --quantization?"),
        (["serve", "--quantization"], "quire serve: --quantization: expected one argument"),
        (["serve", "--port", "x"], "quire serve: --port must be a whole number, got 'x'"),
        (["serve", "--port"], "quire serve: --port: expected one argument"),
        (["serve", "--device", "gpu"], "--device must be one of auto, cuda, cpu, got 'gpu'"),
    ],
)
def test_what_there_is_not_is_told_with_what_there_is(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in last_line(capsys, *words)


def test_no_flag_that_there_is_is_explained_away() -> None:
    ours = {flag.name for command in COMMANDS for flag in command.parser().flags}
    assert not {name for name in unknown_flags._OF_VLLM if name in ours}


# -- where values come from ---------------------------------------------------------------------------


def test_the_command_line_counts_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1\nhost: 10.0.0.1\nmax_num_seqs: 4\nserved-model-name: [a, b]\n")
    monkeypatch.setenv("QUIRE_PORT", "2")
    monkeypatch.setenv("QUIRE_HOST", "10.0.0.2")
    values = parse(["serve", "--config", str(file), "--port", "3"])
    assert (values.port, values.host, values.max_num_seqs, values.block_size) == (3, "10.0.0.2", 4, None)
    assert values.served_model_name == ["a", "b"]
    assert values.given == {"port", "host", "max_num_seqs", "served_model_name"}


def test_a_file_has_vllms_names_and_kinds(tmp_path: Path) -> None:
    def read(text: str) -> Namespace:
        file = tmp_path / "serve.yaml"
        file.write_text(text)
        return parse(["serve", "--config", str(file)])

    values = read("model: Qwen/Qwen3-0.6B\nenforce-eager: true\nenable-prefix-caching: false\n")
    assert (values.model, values.enforce_eager, values.enable_prefix_caching) == (
        "Qwen/Qwen3-0.6B",
        True,
        False,
    )
    assert read("no-enable-prefix-caching: true").enable_prefix_caching is False
    assert read("kv-events-config: {enable_kv_cache_events: true}").kv_events_config == (
        '{"enable_kv_cache_events": true}'
    )
    assert read("").port == 8000
    for text, told in (
        ("prot: 1", r"serve\.yaml: there is no entry prot: did you mean port\?"),
        (
            "enable-lora: true",
            r"serve\.yaml: enable-lora: adapters that requests choose among are not there yet",
        ),
        ("port: many", r"serve\.yaml: port must be a whole number, got 'many'"),
        ("port:", r"serve\.yaml: port must have a value, got null"),
        ("insecure: 1", r"serve\.yaml: insecure must be true or false, got 1"),
        ("- port", "must have a line for each flag"),
        ("a: [", r"serve\.yaml, line 1 is no YAML"),
    ):
        with pytest.raises(UsageError, match=told):
            read(text)
    with pytest.raises(UsageError, match="nowhere cannot be read: No such file"):
        parse(["serve", "--config", str(tmp_path / "nowhere")])


def test_an_environment_variable_is_blamed_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text, told in (
        ("QUIRE_PORT", "eighty", "QUIRE_PORT must be a whole number, got 'eighty'"),
        ("QUIRE_ENFORCE_EAGER", "yes", "QUIRE_ENFORCE_EAGER must be 0 or 1, got 'yes'"),
        (
            "QUIRE_QUANTIZED_WEIGHTS",
            "some",
            "QUIRE_QUANTIZED_WEIGHTS must be one of keep, expand, got 'some'",
        ),
        ("QUIRE_DTYPE", "fp8", "QUIRE_DTYPE must be one of auto, float32, float16, bfloat16, got 'fp8'"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, text)
            with pytest.raises(UsageError, match=told):
                parse(["serve"])
    monkeypatch.setenv("QUIRE_NO_ENABLE_PREFIX_CACHING", "1")
    monkeypatch.setenv("QUIRE_CORS_ORIGIN", "https://a.example\n\nhttps://b.example\n")
    values = parse(["serve", "--cors-origin", "https://c.example"])
    assert values.enable_prefix_caching is False
    assert [origin[8] for origin in values.cors_origin] == ["a", "b", "c"]


def test_types_have_vllms_names_too(monkeypatch: pytest.MonkeyPatch) -> None:
    values = parse(["serve", "--dtype", "half", "--kv-cache-dtype", "fp8"])
    assert (values.dtype, values.kv_cache_dtype) == ("float16", "fp8_e4m3")
    monkeypatch.setenv("QUIRE_DTYPE", "float")
    assert parse(["serve"]).dtype == "float32"


def test_underscores_are_dashes_in_names_and_stay_in_values() -> None:
    values = parse(["serve", "--max_num_seqs", "2", "--api_key=--a_b"])
    assert (values.max_num_seqs, values.api_key) == (2, ["--a_b"])


# -- before anything starts ---------------------------------------------------------------------------


def test_what_keeps_a_server_from_starting_is_told_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.service.commands.serve.make_server", lambda *_: pytest.fail("it starts"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = last_line(capsys, "serve", "--port", str(port))
    found = re.fullmatch(rf"quire serve: port {port} is taken; try --port (\d+)", told)
    assert found and int(found[1]) > port
    told = last_line(capsys, "serve", "--host", "192.0.2.1", "--insecure")
    assert told.startswith("quire serve: --host 192.0.2.1 is no address of this machine")
    told = last_line(capsys, "serve", str(tmp_path))
    assert told == f"quire serve: {tmp_path} has no config.json; give a folder that save_pretrained wrote"
    (tmp_path / "config.json").write_text("{}")
    told = last_line(capsys, "serve", str(tmp_path))
    assert told.startswith(f"quire serve: {tmp_path} has no tokenizer, neither tokenizer.json nor ")
    told = last_line(capsys, "route", "./nowhere", "--replica", "http://127.0.0.1:1")
    assert told.startswith("quire route: ./nowhere is no folder, and no Hub id (owner/name) either; give ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("generate --prompt a --temperature -1", r"temperature must be .* got -1\.0"),
        ("generate --prompt a --top-p 2", r"top_p must be .* got 2\.0"),
        ("why ID --url nope", r"--url: a server's URL must be http://host\[:port\] or .*, got 'nope'"),
        ("top --url 127.0.0.1:8000", r".*, got '127\.0\.0\.1:8000'; did you mean http://127\.0\.0\.1:8000\?"),
        (
            "chat localhost:8321",
            r"localhost:8321 is no folder and no URL: did you mean http://localhost:8321\?",
        ),
        ("chat http://", r"a server's URL must be http://host\[:port\] .*, got 'http://'"),
        ("serve --api-key-file nofile", r"--api-key-file nofile cannot be read: .*"),
        ("route --replica http://r:80 --api-key-file nofile", r"--api-key-file nofile cannot be read: .*"),
        (
            "serve --generation-config nofolder",
            r"--generation-config: nofolder has no .*; give auto, vllm .*",
        ),
        ("generate /nowhere --prompt a", r"/nowhere is no folder, and no Hub id .*"),
        ("bench /nowhere", r"/nowhere is no folder, and no Hub id .*"),
        ("doctor /nowhere", r"/nowhere is no folder, and no Hub id .*"),
        ("doctor /nowhere --plan", r"/nowhere is no folder, and no Hub id .*"),
        ("generate --prompt hi\udcff", r"--prompt is not UTF-8, from character 3 on: convert it"),
        ("bench --profile /dev/null/x", r"--profile /dev/null/x is no folder to write to: Not a directory"),
    ],
)
def test_a_value_that_cannot_be_ends_a_command_before_anything_starts(
    words: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for begins in (
        "quire.service.http.lifecycle.OrderlyServer.serve_until_stopped",
        "quire.engine.startup.start_engine",
        "quire.llm.LLM",
        "urllib.request.urlopen",
    ):
        monkeypatch.setattr(begins, lambda *_, **__: pytest.fail("it starts"))
    command = words.split(maxsplit=1)[0]
    assert re.fullmatch(f"quire {command}: {told}", usage_error(words.split(), capsys))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--port", "70000"], "--port must be between 0 and 65535, got 70000"),
        (["--host", ""], "--host must be an address or a name, got ''; try 127.0.0.1"),
        (["--redis-url", "there", "--host", "::1"], "--redis-url must be redis://.*, got 'there'"),
    ],
)
def test_doctor_refuses_the_address_that_serve_refuses(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.service.commands.serve.make_server", lambda *_: pytest.fail("it starts"))
    for command in ("serve", "doctor"):
        assert re.fullmatch(f"quire {command}: {told}", usage_error([command, *flags], capsys))


def test_a_model_is_served_by_a_name_that_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.service.commands.serve.make_server", lambda *_: pytest.fail("it starts"))
    for name in ("", " "):
        told = usage_error(["serve", "--served-model-name", "a", "--served-model-name", name], capsys)
        assert "--served-model-name must have at least one character" in told
    monkeypatch.setenv("QUIRE_SERVED_MODEL_NAME", "")
    told = usage_error(["serve"], capsys)
    assert "QUIRE_SERVED_MODEL_NAME is empty: unset it, or give it a line for each value" in told


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_ends_a_server_is_its_last_line(
    log_format: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But no line that is no object among those that are."""

    def fail(*_: object) -> None:
        raise ServerFailed("no memory is left for the KV cache")

    monkeypatch.setattr("quire.service.commands.serve.make_server", fail)
    monkeypatch.setenv("QUIRE_LOG_FORMAT", log_format)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0"])
    told = "quire serve: no memory is left for the KV cache"
    assert ended.value.code == (told if log_format == "text" else 1)
    assert capsys.readouterr().err == ""

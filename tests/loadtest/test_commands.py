"""The command line against `quire serve` with the bundled model: both ends must count the same."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import serving

from quire.loadtest.__main__ import main
from quire.loadtest.analysis.result import read_result, read_results

SECONDS = 60


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--swap-space", "0", "--num-gpu-blocks-override", "256") as address:
        yield address


def test_a_chat_of_two_turns_in_two_processes(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--api", "chat", "--lengths", "40x9", "--requests", "5", "--turns", "2", "--concurrency", "3"]
    files = ["--json", str(tmp_path / "run.json"), "--html", str(tmp_path / "run.html")]
    main(["run", "--url", url, "--processes", "2", *flags, *files])  # 1 where the machine was too busy
    result = read_result(tmp_path / "run.json")
    assert [(record.session, record.turn) for record in result.records] == [
        (session, turn) for session in range(5) for turn in range(2)
    ]
    assert not result.summary.failures
    assert result.target.model == "quire-demo"
    assert result.summary.output_tokens == 5 * 2 * 9
    change = result.counters_change
    assert change["vllm:prefix_cache_queries_total"] == result.summary.prompt_tokens
    assert change["vllm:prefix_cache_hits_total"] == result.summary.cached_tokens > 0
    assert "<svg" in (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "TTFT" in capsys.readouterr().out


def test_tokens_without_text_are_timed_as_they_come(url: str, tmp_path: Path) -> None:
    """The model is made to say its end token only, which shows as nothing."""
    flags = ["--lengths", "12x20", "--requests", "3", "--text", "--concurrency", "1", "--processes", "1"]
    body = ["--extra-body", '{"logit_bias": {"1": 100}}']
    main(["run", "--url", url, *flags, *body, "--json", str(tmp_path / "run.json")])
    summary = read_result(tmp_path / "run.json").summary
    assert not summary.failures and summary.output_tokens == 60
    assert summary.tpot.count == 3


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is too busy for the client's schedule makes no rate one that was not sustained."""
    monkeypatch.setattr("quire.loadtest.analysis.summary.MOST_LAG", SECONDS)


@pytest.mark.usefixtures("patient")
def test_a_sweep_of_samples_and_a_comparison(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--lengths", "12x4", "--requests", "4", "--n", "2", "--text", "--processes", "1"]
    sweep = ["sweep", "--url", url, *flags, "--rates", "20,40", "--latency-limit", "60000"]
    main([*sweep, "--json", str(tmp_path / "sweep.json")])
    assert "knee: 40 requests/s" in capsys.readouterr().out
    run = ["run", "--url", url, "--most-token", "4000", "--processes", "1", "--lengths", "12x4", "--requests"]
    for name in ("a", "b"):
        main([*run, "4", "--rate", "50", "--beam-width", "2", "--json", str(tmp_path / f"{name}.json")])
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert "normalised" in capsys.readouterr().out
    results = [str(tmp_path / f"{name}.json") for name in ("sweep", "a")]
    assert main(["report", *results, "--html", str(tmp_path / "all.html")]) == 0
    page = (tmp_path / "all.html").read_text(encoding="utf-8")
    assert page.count("<h2>") == 3  # two rates and a run


@pytest.mark.usefixtures("patient")
def test_no_rate_of_a_sweep_finds_the_prompts_of_another(url: str, tmp_path: Path) -> None:
    flags = ["--lengths", "64x2", "--requests", "3", "--text", "--processes", "1", "--rates", "40,50"]
    file = tmp_path / "sweep.json"
    for body in ({}, {}, {"cache_salt": "mine"}):  # nor does a sweep find those of one before
        more = ["--latency-limit", "60000", "--extra-body", json.dumps(body)]
        main(["sweep", "--url", url, *flags, *more, "--json", str(file)])
        runs = read_results(file)
        assert [run.summary.cached_tokens for run in runs] == [0, 0]
        assert all(run.target.extra_body["cache_salt"].startswith(body.get("cache_salt", "")) for run in runs)


@pytest.mark.usefixtures("patient")
def test_a_sweep_in_which_all_fails_has_no_knee(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The token ids are beyond the model's vocabulary."""
    flags = ["--lengths", "40x20", "--requests", "3", "--processes", "1", "--rates", "40,50"]
    file, page = tmp_path / "sweep.json", tmp_path / "sweep.html"
    assert main(["sweep", "--url", url, *flags, "--json", str(file), "--html", str(page)]) == 1
    out = capsys.readouterr().out
    assert "3 × HTTP 400: " in out and "no request succeeded" in out
    assert "knee: none: 40 requests/s, the lowest rate, were not sustained" in out
    assert len(read_results(file)) == 1, "it goes on although a rate was not sustained"
    assert "Knee: none: 40 requests/s" in page.read_text(encoding="utf-8")


@pytest.mark.usefixtures("patient")
def test_a_sweep_says_when_the_knee_is_not_reached(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--lengths", "12x4", "--requests", "3", "--text", "--processes", "1", "--rates", "40,50"]
    page = tmp_path / "sweep.html"
    sweep = ["sweep", "--url", url, *flags, "--latency-limit", "60000"]
    assert main([*sweep, "--html", str(page)]) == 0
    assert "knee: 50 requests/s or more" in capsys.readouterr().out
    assert "Knee: 50 requests/s or more" in page.read_text(encoding="utf-8")


def test_what_cannot_be_done_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
    assert main(["run", "--url", nobody, "--rate", "1"]) == 1
    assert "no HTTP server answers" in capsys.readouterr().err
    assert main(["run", "--model", "m", "--url", nobody]) == 1
    assert "--rate" in capsys.readouterr().err
    assert (
        main(["run", "--model", "m", "--url", nobody, "--workload", "single", "--n", "2", "--rate", "1"]) == 1
    )
    assert "--lengths only" in capsys.readouterr().err
    assert main(["run", "--model", "m", "--url", nobody, "--rate", "1", "--api-key-env", "NO_SUCH_KEY"]) == 1
    assert "NO_SUCH_KEY" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "--lengths", "many"])
    assert "128x64" in capsys.readouterr().err

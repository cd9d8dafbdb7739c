"""Options that are out of range or would have no effect are refused by name, before anything is sent."""

from __future__ import annotations

import pytest

from quire.loadtest.__main__ import main

NOWHERE = ["--url", "http://127.0.0.1:9", "--model", "m"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("run --concurrency 0", "--concurrency must be at least 1, got 0"),
        ("run --concurrency -2", "--concurrency must be at least 1, got -2"),
        ("run --rate 1 --processes 0", "--processes must be at least 1, got 0"),
        ("run --rate 1 --requests 0 --workload single", "--requests must be at least 1"),
        ("run --rate 0", "--rate must be more than 0"),
        ("run --rate nan", "--rate must be more than 0"),
        ("run --rate 1 --burstiness -1", "--burstiness must be more than 0"),
        ("run --rate 1 --shared-prefix -5", "--shared-prefix must be at least 0"),
        ("run --rate 1 --slo-ttft -5", "--slo-ttft must be more than 0"),
        ("run --rate 1 --timeout 0", "--timeout must be more than 0"),
        ("run --rate 1 --workload single --text", "--text: goes with --lengths only, not --workload"),
        ("run --rate 1 --workload single --n 2", "--n: goes with --lengths only"),
        ("run --rate 1 --trace x --most-token 900", "--most-token: goes with --lengths only, not --trace"),
        ("run --rate 1 --trace x --think 2", "--think: goes with --lengths only"),
        ("run --trace x --seed 1", "--seed has no effect"),
        ("run --workload single --concurrency 1 --seed 0", "--seed has no effect"),
        ("run --concurrency 1 --burstiness 1", "--burstiness has no effect without --rate"),
        ("run --concurrency 1 --text --think 1", "--think has no effect with one turn"),
        ("run --concurrency 1 --text --most-token 900", "--most-token has no effect on prompts of text"),
        ("sweep --rates 1 --refine -1", "--refine must be at least 0"),
        ("sweep --rates 1 --latency-limit 0", "--latency-limit must be more than 0"),
        ("sweep --rates 1 --workload single --text", "--text: goes with --lengths only"),
    ],
)
def test_an_option_is_refused_by_name(flags: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags.split(), *NOWHERE]) == 1
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["compare nofile nofile", "report nofile --html page"])
def test_a_file_that_is_not_there_is_named_first(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags.split()) == 1
    told = "nofile: No such file or directory; give the path of another one"
    assert capsys.readouterr().err.strip().endswith(f": {told}")


@pytest.mark.parametrize(
    "flags",
    [
        "run --rate 1 --workload single --seed 1 --burstiness 0.5",
        "sweep --rates 1 --workload single --seed 1 --burstiness 0.5",
        "run --concurrency 1 --turns 2 --text --think 1 --seed 3 --shared-prefix 0",
        "run --rate 1 --most-token 900 --n 2",
    ],
)
def test_options_that_go_together_are_not_refused(
    flags: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*arguments: object) -> None:
        raise ValueError("it was to be measured")

    monkeypatch.setattr("quire.loadtest.client.commands._measure", measured)
    assert main([*flags.split(), *NOWHERE]) == 1
    assert "it was to be measured" in capsys.readouterr().err

"""The command line and the test hook that the chart renders, run against each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from grafana.scene import ROOT, quire
from tests.helm.chart import VALUES, container, find, render

KEY = "one-of-the-tests"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """`helm install -f values-cpu.yaml`, but for where it listens."""
    command, *flags = container(render(*VALUES["cpu"]), "quire")["args"]
    listening = [flag for flag in flags if flag.startswith(("--host", "--port"))]
    with quire(command, *(flag for flag in flags if flag not in listening), "--api-key", KEY) as url:
        yield url


def run_hook(server: str, key: str) -> subprocess.CompletedProcess[str]:
    (client,) = find(render(*VALUES["cpu"]), "Pod")["spec"]["containers"]
    assert client["command"] == ["python", "-c"]
    environment = {"SERVER": server, "QUIRE_API_KEY": key}
    assert set(environment) == {variable["name"] for variable in client["env"]}
    return subprocess.run(
        [sys.executable, "-c", *client["args"]],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_hook_gets_a_completion(server: str) -> None:
    done = run_hook(server, KEY)
    assert done.returncode == 0, done.stderr
    assert "quire-demo answers:" in done.stdout


def test_hook_fails_where_nobody_is_served(server: str) -> None:
    done = run_hook(server, "wrong")
    assert done.returncode != 0
    assert "401" in done.stderr

"""The Dockerfile, read: it installs what pyproject.toml says, and its image is the one the chart runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

from tests.helm.chart import CHART, ROOT, container, find, render

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")

Instruction = tuple[str, str]


def stages() -> list[list[Instruction]]:
    """The instructions of each stage, its FROM first."""
    joined = re.sub(r"\\\n", "", "".join(line for line in TEXT.splitlines(True) if not line.startswith("#")))
    found: list[list[Instruction]] = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, rest = line.split(None, 1)
        if word == "FROM":
            found.append([])
        if found:  # an ARG may come before
            found[-1].append((word, rest))
    return found


BUILD, FINAL = stages()


def of(stage: list[Instruction], word: str) -> list[str]:
    return [rest for instruction, rest in stage if instruction == word]


def environment() -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(of(FINAL, "ENV"))))


def test_linter_finds_nothing() -> None:
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([linter, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_stages_share_one_base_with_a_version() -> None:
    assert (of(BUILD, "FROM"), of(FINAL, "FROM")) == (["${BASE} AS build"], ["${BASE}"])
    (base,) = re.findall(r"^ARG BASE=(.*)$", TEXT, re.MULTILINE)
    assert re.fullmatch(r"python:3\.(1[1-9])\.\d+-slim-\w+", base)


def test_it_installs_the_project_and_nothing_else() -> None:
    runs = [command for command in of(BUILD, "RUN") + of(FINAL, "RUN") if "pip" in command]
    (command,) = runs
    assert command.endswith("/opt/quire/bin/pip install -c constraints.txt .")
    copied = [word for line in of(BUILD, "COPY") for word in line.split()[:-1]]
    assert PROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == ["quire*"]
    linked = [path.name for path in (ROOT / "quire").iterdir() if path.is_symlink()]
    files = ["pyproject.toml", "constraints.txt", "README.md", "LICENSE"]
    assert sorted(copied) == sorted(["quire", *linked, *files])
    assert of(FINAL, "COPY") == ["--from=build /opt/quire /opt/quire"]


def test_context_holds_what_is_copied_and_no_more() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*"
    copied = {word for line in of(BUILD, "COPY") for word in line.split()[:-1]}
    assert {rule.removeprefix("!") for rule in rules if rule.startswith("!")} == copied


def test_it_is_the_image_that_the_chart_runs() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == PROJECT["project"]["version"]
    part = container(render(), "quire")
    security = find(render(), "Deployment")["spec"]["template"]["spec"]["securityContext"]
    assert of(FINAL, "USER") == [f"{security['runAsUser']}:{security['runAsGroup']}"]
    assert json.loads(of(FINAL, "ENTRYPOINT")[0]) == ["quire"]  # no shell between: signals reach it
    assert "command" not in part


def test_what_it_writes_is_mounted() -> None:
    part = container(render(), "quire")
    mounts = {mount["mountPath"] for mount in part["volumeMounts"]}
    assert {*of(FINAL, "VOLUME"), "/tmp"} <= mounts
    given = {variable["name"]: variable.get("value") for variable in part["env"]}
    for name in ("HOME", "HF_HOME", "TRITON_CACHE_DIR"):
        assert environment()[name] == given[name]
        assert any(Path(given[name]).is_relative_to(mount) for mount in mounts)

"""The image's name and where it comes from stand in values.yaml; all that builds and publishes it agrees."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART, HELMS, ROOT, helm, pods, render

VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["appVersion"]
IMAGE = f"{VALUES['image']['repository']}:{VERSION}"
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/image.yml").read_text(encoding="utf-8"))
PAGES = ("Dockerfile", "README.md", "docs/operations.md", "helm/README.md")


def images(*arguments: str) -> set[str]:
    """Return the images of the chart's own pods: all but Redis'."""
    return {
        part["image"]
        for labels, spec in pods(render(*arguments))
        for part in spec["containers"]
        if labels["app.kubernetes.io/component"] != "redis"
    }


def fake_builder(folder: Path | None = None) -> dict[str, str]:
    """Return an environment where `docker` and `helm push` only write down, in `folder`, what is asked."""
    environment = {name: text for name, text in os.environ.items() if name != "MAKEFLAGS"}
    if folder is None:
        return environment | {"BUILDER": "docker"}
    real = Path(sys.executable).parent / HELMS[-1]
    programs = {
        "docker": f'echo "docker $*" >> {folder}/asked',
        "helm": f"""
            if [ "$1" = push ]; then cp "$2" {folder}/pushed.tgz; echo "helm push $3" >> {folder}/asked
            else exec {real} "$@"; fi
        """,
    }
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (folder / name).chmod(stat.S_IRWXU)
    return environment | {"PATH": f"{folder}:{environment['PATH']}"}


def test_every_pod_has_the_image_of_values_with_the_chart_s_version() -> None:
    assert images("--set", "router.enabled=true,redis.enabled=true") == {IMAGE}
    assert images("--set", "image.repository=a.example/b,image.tag=1.0") == {"a.example/b:1.0"}


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_that_image(page: str) -> None:
    named = re.findall(r"[\w./-]*quire:\d[\w.]*", (ROOT / page).read_text(encoding="utf-8"))
    assert set(named) <= {IMAGE}


def test_make_builds_it() -> None:
    done = subprocess.run(
        ["make", "-n", "image"], check=False, cwd=ROOT, env=fake_builder(), capture_output=True, text=True
    )
    assert f"docker build  -t {IMAGE} ." in done.stdout, done.stderr


def steps(job: str) -> dict[str, Any]:
    """By name, else by what they run."""
    return {step.get("name", step.get("run", "")): step for step in WORKFLOW["jobs"][job]["steps"]}


def run_step(name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As GitHub does."""
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", steps("publish")[name]["run"]],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_published_chart_names_the_published_image(tmp_path: Path) -> None:
    done = run_step("Publish", **fake_builder(tmp_path), GITHUB_REPOSITORY_OWNER="Some-One")
    assert done.returncode == 0, done.stderr
    image = f"ghcr.io/some-one/quire:{VERSION}"
    asked = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
    assert [" ".join(line.split()) for line in asked] == [
        f"docker build -t {image} .",
        f"docker push {image}",
        "helm push oci://ghcr.io/some-one/charts",
    ]
    for name in HELMS:
        shown = helm(name, "template", "quire", str(tmp_path / "pushed.tgz"))
        manifests = [found for found in yaml.safe_load_all(shown.stdout) if found]
        assert {part["image"] for _, pod in pods(manifests) for part in pod["containers"]} == {image}


def test_a_registry_has_to_be_named() -> None:
    done = subprocess.run(
        ["make", "publish"], check=False, cwd=ROOT, env=fake_builder(), capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "Usage: .ci/publish REGISTRY" in done.stderr


@pytest.mark.parametrize(
    ("tag", "right"), [(f"v{VERSION}", True), (f"v{VERSION}.1", False), (VERSION, False)]
)
def test_only_the_version_s_own_tag_publishes(tag: str, right: bool) -> None:
    done = run_step("The tag is the chart's appVersion", GITHUB_REF_NAME=tag)
    assert (done.returncode == 0) is right


def test_the_workflow_tests_first_and_may_do_no_more_than_it_needs() -> None:
    assert WORKFLOW[True]["push"] == {"tags": ["v*"]}  # YAML 1.1 reads `on` as true
    assert WORKFLOW["permissions"] == {"contents": "read"}
    publish = WORKFLOW["jobs"]["publish"]
    assert publish["needs"] == "test" and "make image-test" in steps("test")
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert publish["permissions"] == {"contents": "read", "packages": "write"}
    for job in WORKFLOW["jobs"]:
        for step in steps(job).values():
            subprocess.run(["bash", "-n", "-c", step.get("run", "")], check=True)
            assert "${{" not in step.get("run", "")  # what is put in there would be run


def test_notes_say_where_nodes_get_an_image_without_a_registry() -> None:
    for setting, said in (("image.tag=", True), ("image.repository=ghcr.io/someone/quire", False)):
        done = helm(HELMS[-1], "install", "quire", str(CHART), "--dry-run=client", "--set", setting)
        assert (f"kind load docker-image {IMAGE}" in done.stdout) is said

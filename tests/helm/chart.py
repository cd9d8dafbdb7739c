"""The chart as real helms render it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm"
HERE = Path(__file__).parent
HELMS = ("helm-3.18", "helm-4.1")
VALUES: dict[str, tuple[str, ...]] = {
    "default": (),
    "cpu": ("-f", str(CHART / "values-cpu.yaml")),
    "everything": ("-f", str(HERE / "everything.yaml")),
    "external": ("-f", str(HERE / "external.yaml")),
    "dns": ("-f", str(HERE / "dns.yaml")),
}
FEATURES: dict[str, tuple[str, ...]] = {  # one or a few each, as chart-testing tools look for them
    path.name.removesuffix("-values.yaml"): ("-f", str(path))
    for path in sorted((CHART / "ci").glob("*-values.yaml"))
}
NAMES = {values: "llm" if values == "external" else "quire" for values in VALUES}  # of the Deployment
Manifest = dict[str, Any]


def helm(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / name, *arguments]
    # It ends with all its memory, 50 MB; to collect garbage before is a fifth of its time.
    environment = {**os.environ, "GOGC": "off"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@functools.cache
def template(*arguments: str, helm_name: str = HELMS[-1]) -> str:
    """What `helm template` prints for the release "quire" in the namespace "llms"."""
    done = helm(helm_name, "template", "quire", str(CHART), "--namespace", "llms", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(*arguments: str, helm_name: str = HELMS[-1]) -> list[Manifest]:
    rendered = template(*arguments, helm_name=helm_name)
    return [manifest for manifest in yaml.load_all(rendered, yaml.CSafeLoader) if manifest is not None]


def refusal(*arguments: str, helm_name: str = HELMS[-1]) -> str:
    """Why it does not render."""
    done = helm(helm_name, "template", "quire", str(CHART), *arguments)
    assert done.returncode != 0, f"{arguments} rendered"
    return done.stderr


def find(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The one manifest of this kind (and name)."""
    (found,) = (
        manifest
        for manifest in manifests
        if manifest["kind"] == kind and name in (None, manifest["metadata"]["name"])
    )
    return found


def pods(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """(labels, spec) of every pod that there would be."""
    for manifest in manifests:
        if manifest["kind"] == "Pod":
            yield manifest["metadata"]["labels"], manifest["spec"]
        elif manifest["kind"] in ("Deployment", "StatefulSet"):
            pod = manifest["spec"]["template"]
            yield pod["metadata"]["labels"], pod["spec"]


def container(manifests: list[Manifest], deployment: str) -> Manifest:
    (only,) = find(manifests, "Deployment", deployment)["spec"]["template"]["spec"]["containers"]
    return only

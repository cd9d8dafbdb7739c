"""ServiceMonitor, PrometheusRule and the dashboard's ConfigMap are made where a Prometheus operator is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import CHART, HELMS, helm, render
from tests.helm.cluster import PROMETHEUS_OPERATOR, empty_cluster
from tests.helm.validity import validate

OBJECTS = {
    ("ServiceMonitor", "quire"): "serviceMonitor",
    ("PrometheusRule", "quire"): "rules",
    ("ConfigMap", "quire-dashboard"): "dashboard",
}
API = ("--api-versions", "monitoring.coreos.com/v1")


def made(*arguments: str) -> set[str]:
    """Return which parts of `metrics` are rendered."""
    found = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in render(*arguments)}
    return {part for thing, part in OBJECTS.items() if thing in found}


@pytest.mark.parametrize("name", HELMS)
@pytest.mark.parametrize("operator", [True, False])
def test_an_install_sees_whether_there_is_an_operator(name: str, operator: bool, tmp_path: Path) -> None:
    with empty_cluster(tmp_path, *([PROMETHEUS_OPERATOR] if operator else [])) as config:
        dry_run = ("--dry-run=server", "--disable-openapi-validation", "--kubeconfig", str(config))
        done = helm(name, "install", "quire", str(CHART), "-n", "llms", *dry_run)
    assert done.returncode == 0, done.stderr
    manifests, notes = done.stdout.split("MANIFEST:\n")[1].split("\nNOTES:\n")
    kinds = {manifest["kind"] for manifest in yaml.safe_load_all(manifests) if manifest}
    assert ({"ServiceMonitor", "PrometheusRule", "ConfigMap"} & kinds == set()) is not operator
    for kind, thing in OBJECTS:
        (said,) = re.findall(rf"{kind} {thing}\b.*", notes)
        assert ("the cluster has no API monitoring.coreos.com/v1" in said) is not operator
    assert ("metrics.serviceMonitor.labels" in notes) is operator  # without which it may not be chosen


def test_what_is_made_is_valid() -> None:
    assert made(*API) == {"serviceMonitor", "rules", "dashboard"}
    for manifest in render(*API):
        validate(manifest)


@pytest.mark.parametrize("part", OBJECTS.values())
def test_yes_and_no_are_obeyed(part: str) -> None:
    assert made("--set", f"metrics.{part}.enabled=true") == {part}
    assert made(*API, "--set", f"metrics.{part}.enabled=false") == {*OBJECTS.values()} - {part}


def test_a_pod_monitor_takes_the_place_of_the_service_monitor() -> None:
    assert made(*API, "--set", "metrics.podMonitor.enabled=true") == {"rules", "dashboard"}


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("metrics.serviceMonitor.enabled=false", "metrics.serviceMonitor.enabled is false"),
        ("metrics.podMonitor.enabled=true", "there is a PodMonitor instead"),
    ],
)
def test_notes_say_why_it_is_left_out(setting: str, why: str) -> None:
    done = helm(HELMS[-1], "install", "quire", str(CHART), "--dry-run=client", "--set", setting)
    assert f"ServiceMonitor quire: {why}\n" in done.stdout

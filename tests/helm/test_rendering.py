"""What the chart renders is valid, and its parts fit together. Rendered by real helms."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.docs.pages import PAGES, blocks
from tests.helm.chart import (
    CHART,
    FEATURES,
    HELMS,
    ROOT,
    VALUES,
    Manifest,
    find,
    helm,
    pods,
    render,
    template,
)
from tests.helm.crds import CRDS
from tests.helm.validity import NEWEST, validate

every_set = pytest.mark.parametrize("values", VALUES)


@pytest.mark.parametrize("name", HELMS)
def test_helm_is_the_version_that_its_name_says(name: str) -> None:
    assert helm(name, "version", "--short").stdout.startswith(f"v{name.removeprefix('helm-')}.")


@pytest.mark.parametrize("name", HELMS)
@every_set
def test_lint_finds_nothing(name: str, values: str) -> None:
    done = helm(name, "lint", "--strict", str(CHART), *VALUES[values])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 chart(s) failed" in done.stdout
    assert "[WARNING]" not in done.stdout


def without_random(text: str) -> str:
    """Keys and passwords that are made anew, and what mentions them in their Secrets."""
    return re.sub(r"(api-key: |cache-seed: |-password: |#|replica:|router:)[\w=]{40,}", r"\1", text)


@every_set
def test_both_helms_render_the_same(values: str) -> None:
    old, new = (without_random(template(*VALUES[values], helm_name=name)) for name in HELMS)
    assert old == new


@every_set
def test_manifests_are_valid(values: str) -> None:
    kinds = set()
    for manifest in render(*VALUES[values]):
        kinds.add(manifest["kind"])
        validate(manifest)
    assert kinds >= {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "Pod"}


def test_every_kind_is_rendered_by_some_values() -> None:
    kinds = {manifest["kind"] for values in (VALUES | FEATURES).values() for manifest in render(*values)}
    assert kinds >= {*CRDS, "StatefulSet", "HorizontalPodAutoscaler", "Secret", "ConfigMap", "ServiceAccount"}
    assert "PersistentVolumeClaim" in kinds


def test_a_misspelt_field_is_not_valid() -> None:
    """The validators would notice."""
    manifests = render(*VALUES["everything"])
    deployment = find(manifests, "Deployment", "quire")
    deployment["spec"]["template"]["spec"]["tolerationz"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, NEWEST, strict=True)
    monitor = find(manifests, "ServiceMonitor")
    monitor["spec"]["endpoints"][0]["intervall"] = "15s"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(monitor, CRDS["ServiceMonitor"])


def test_rules_are_valid_promql(tmp_path: Path) -> None:
    rules = find(render(*VALUES["everything"]), "PrometheusRule")["spec"]
    assert rules == yaml.safe_load((ROOT / "grafana" / "rules.yaml").read_text(encoding="utf-8"))
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(rules))
    subprocess.run(["promtool", "check", "rules", file], check=True, capture_output=True)


def test_dashboard_is_the_one_of_the_repository() -> None:
    dashboard = find(render(*VALUES["everything"]), "ConfigMap", "quire-dashboard")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"  # what Grafana's sidecar looks for
    ours = json.loads((ROOT / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
    assert json.loads(dashboard["data"]["quire.json"]) == ours


def selects(selector: dict[str, str], manifests: list[Manifest]) -> list[Manifest]:
    return [spec for labels, spec in pods(manifests) if selector.items() <= labels.items()]


@every_set
def test_selectors_find_exactly_their_pods(values: str) -> None:
    manifests = render(*VALUES[values])
    for manifest in manifests:
        spec = manifest.get("spec", {})
        match manifest["kind"]:
            case "Service":
                (pod,) = selects(spec["selector"], manifests)
                ports = {port["name"] for part in pod["containers"] for port in part["ports"]}
                assert {port["targetPort"] for port in spec["ports"]} <= ports
            case "Deployment" | "StatefulSet" | "PodDisruptionBudget":
                assert len(selects(spec["selector"]["matchLabels"], manifests)) == 1
            case "NetworkPolicy":
                assert len(selects(spec["podSelector"]["matchLabels"], manifests)) == 1
            case "HorizontalPodAutoscaler" | "ScaledObject":
                target = find(manifests, "Deployment", spec["scaleTargetRef"]["name"])
                assert "replicas" not in target["spec"]  # or each upgrade would scale back


def test_clients_reach_the_router_if_there_is_one() -> None:
    for values, component in (("default", "replica"), ("everything", "router")):
        service = find(render(*VALUES[values]), "Service", "quire")
        assert service["spec"]["selector"]["app.kubernetes.io/component"] == component


def test_what_the_service_monitor_scrapes() -> None:
    manifests = render(*VALUES["everything"])
    selector = find(manifests, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items()
    services = [
        manifest["metadata"]["name"]
        for manifest in manifests
        if manifest["kind"] == "Service" and selector <= manifest["metadata"]["labels"].items()
    ]
    assert sorted(services) == ["quire-replicas", "quire-router"]  # each pod once


@every_set
def test_names_that_are_referred_to_exist(values: str) -> None:
    manifests = render(*VALUES[values])
    made = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}
    given = {"keys", "hub", "redis-urls", "redis-ca", "models", "runner"} if values == "external" else set()
    for _, pod in pods(manifests):
        account = pod["serviceAccountName"]
        assert ("ServiceAccount", account) in made or account in given
        volumes = {volume["name"]: volume for volume in pod["volumes"]} if "volumes" in pod else {}
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert ("PersistentVolumeClaim", claim) in made or claim in given
            if "secret" in volume and volume["secret"]["secretName"] not in given:
                secret = made["Secret", volume["secret"]["secretName"]]
                assert {item["key"] for item in volume["secret"]["items"]} <= set(secret["stringData"])
        (part,) = pod["containers"]
        assert {mount["name"] for mount in part.get("volumeMounts", [])} == set(volumes)
        for variable in part.get("env", []):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference is not None and reference["name"] not in given:
                secret = made["Secret", reference["name"]]
                assert reference["key"] in {**secret.get("data", {}), **secret.get("stringData", {})}


def test_package_holds_what_the_templates_read(tmp_path: Path) -> None:
    done = helm(HELMS[-1], "package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("quire-*.tgz")
    done = helm(HELMS[0], "template", "quire", str(package), "--namespace", "llms", *VALUES["everything"])
    assert without_random(done.stdout) == without_random(template(*VALUES["everything"]))


def test_what_the_pages_install_renders() -> None:
    installed = 0
    for page in PAGES.values():
        for line in "".join(blocks("sh", page)).replace("\\\n", " ").splitlines():
            if line.startswith("helm install "):
                _, _, name, _, *arguments = shlex.split(line, comments=True)
                here = [str(ROOT / word) if (ROOT / word).is_file() else word for word in arguments]
                assert find(render(*here), "Deployment", name)
                installed += 1
    assert installed >= 6


def test_notes_say_what_several_gpus_do() -> None:
    for count, said in ((1, False), (4, True)):
        setting = f"gpu.count={count}"
        done = helm(HELMS[-1], "install", "quire", str(CHART), "--dry-run=client", "--set", setting)
        assert (f"divides the model among its {count} GPUs" in done.stdout) is said


@pytest.mark.parametrize("values", VALUES)
def test_notes_name_what_is_there(values: str) -> None:
    done = helm(HELMS[-1], "install", "quire", str(CHART), "--dry-run=client", "-n", "llms", *VALUES[values])
    assert done.returncode == 0, done.stderr
    notes = done.stdout.split("\nNOTES:\n")[1]
    manifests = render(*VALUES[values])
    for kind, pattern in (
        ("Deployment", r"deployment/(\S+)"),
        ("Service", r"service/(\S+)"),
        ("Secret", r"get secret (\S+)"),
    ):
        (name,) = re.findall(pattern, notes)
        assert name == "keys" or find(manifests, kind, name)

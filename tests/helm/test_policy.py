"""What must hold of every pod, whatever the values; and how pods come and go."""

from __future__ import annotations

import re

import pytest

from quire.engine.client import EXIT_SECONDS
from quire.service.config import ServiceConfig
from tests.helm.chart import NAMES, VALUES, Manifest, container, find, pods, render

every_set = pytest.mark.parametrize("values", VALUES)


@every_set
def test_pods_may_do_nothing_but_their_work(values: str) -> None:
    for _, pod in pods(render(*VALUES[values])):
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert all("hostPath" not in volume for volume in pod.get("volumes", []))
        for part in pod["containers"]:
            assert part["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@every_set
def test_images_have_a_version(values: str) -> None:
    for _, pod in pods(render(*VALUES[values])):
        for part in pod["containers"]:
            assert re.search(r":v?\d+\.\d+\.\d+", part["image"]), part["image"]


@every_set
def test_resources_are_bounded(values: str) -> None:
    for _, pod in pods(render(*VALUES[values])):
        for part in pod["containers"]:
            assert set(part["resources"]["requests"]) >= {"cpu", "memory"}
            assert "memory" in part["resources"]["limits"]
        for volume in pod.get("volumes", []):
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": None}), volume


def test_gpu_is_asked_for_by_default_only() -> None:
    assert container(render(), "quire")["resources"]["limits"]["nvidia.com/gpu"] == 1
    manifests = render(*VALUES["cpu"])
    assert "nvidia.com/gpu" not in container(manifests, "quire")["resources"]["limits"]
    assert "tolerations" not in find(manifests, "Deployment")["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("count", "requests", "limits"),
    [
        (0, {"cpu": "500m", "memory": "1.5Gi"}, {"memory": "34359738368"}),
        (1, {"cpu": "500m", "memory": "1.5Gi"}, {"memory": "34359738368", "nvidia.com/gpu": 1}),
        (2, {"cpu": "1000m", "memory": "3Gi"}, {"memory": "68719476736", "nvidia.com/gpu": 2}),
    ],
)
def test_resources_are_of_each_gpu(count: int, requests: Manifest, limits: Manifest) -> None:
    values = "resources.requests.cpu=500m,resources.requests.memory=1.5Gi,resources.limits.memory=34359738368"
    manifests = render("--set", f"gpu.count={count},{values}")
    assert container(manifests, "quire")["resources"] == {"requests": requests, "limits": limits}


def test_every_pod_runs_where_the_values_say() -> None:
    """The test's with the replicas, whose nodes have its image: taints might let it nowhere else."""
    placed = {
        labels["app.kubernetes.io/component"]: (
            spec["nodeSelector"]["pool"],
            spec["tolerations"][0]["key"],
            spec.get("priorityClassName"),
            next(iter(spec.get("affinity", [])), None),
            labels.get("team"),
        )
        for labels, spec in pods(render(*VALUES["everything"]))
    }
    assert placed == {
        "replica": ("gpu", "nvidia.com/gpu", "serving", "nodeAffinity", "inference"),
        "router": ("cpu", "a", "entrance", None, "edge"),
        "redis": ("memory", "b", None, "podAntiAffinity", None),
        "test": ("gpu", "nvidia.com/gpu", None, None, None),
    }


def seconds(probe: Manifest) -> int:
    return int(probe["periodSeconds"] * probe["failureThreshold"])


@every_set
def test_probes(values: str) -> None:
    manifests = render(*VALUES[values])
    server = container(manifests, NAMES[values])
    assert server["startupProbe"]["httpGet"]["path"] == "/ready"
    assert seconds(server["startupProbe"]) >= 1800  # a model may have to be downloaded
    assert server["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert server["livenessProbe"]["httpGet"]["path"] == "/health"
    for _, pod in pods(manifests):
        (part,) = pod["containers"]
        ports = {port["name"] for port in part.get("ports", [])}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            if ports:
                (action,) = (part[kind][how] for how in ("httpGet", "tcpSocket") if how in part[kind])
                assert action["port"] in ports


def test_startup_may_take_as_long_as_it_says() -> None:
    for allowed in (10, 61, 7200):
        manifests = render("--set", f"startup.timeoutSeconds={allowed}")
        assert allowed <= seconds(container(manifests, "quire")["startupProbe"]) < allowed + 5
        assert find(manifests, "Deployment")["spec"]["progressDeadlineSeconds"] > allowed


def test_keda_takes_no_replica_away_when_prometheus_knows_nothing() -> None:
    """Its default reads an empty answer as zero."""
    triggers = find(render(*VALUES["everything"]), "ScaledObject")["spec"]["triggers"]
    assert [trigger["metadata"]["ignoreNullValues"] for trigger in triggers] == ["false", "false"]


DRAINS = [VALUES[name] for name in VALUES] + [
    ("--set", f"drain.preStopSeconds={stop},drain.shutdownTimeoutSeconds={drain},drain.marginSeconds=8")
    for stop, drain in ((0, 0), (3600, 86400))
]


@pytest.mark.parametrize("arguments", DRAINS)
def test_grace_is_longer_than_leaving_takes(arguments: tuple[str, ...]) -> None:
    """preStop, then SIGTERM, --shutdown-timeout for streams, last events for the rest, the engine's end."""
    servers = [
        pod
        for _, pod in pods(render(*arguments))
        if pod["containers"][0].get("args", [""])[0] in ("serve", "route")
    ]
    assert servers
    for pod in servers:
        (part,) = pod["containers"]
        command, waits = part["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sleep"
        (drain,) = (arg.split("=")[1] for arg in part["args"] if arg.startswith("--shutdown-timeout="))
        leaving = int(waits) + int(drain) + ServiceConfig.terminal_timeout + EXIT_SECONDS
        assert pod["terminationGracePeriodSeconds"] > leaving


def test_an_upgrade_takes_no_second_gpu() -> None:
    strategy = find(render(), "Deployment")["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}


@pytest.mark.parametrize(
    ("setting", "field", "value"),
    [
        (None, "maxUnavailable", 1),
        ("podDisruptionBudget.maxUnavailable=0", "maxUnavailable", 0),
        ("podDisruptionBudget.minAvailable=0", "minAvailable", 0),
        ("podDisruptionBudget.minAvailable=50%", "minAvailable", "50%"),
    ],
)
def test_zero_is_a_disruption_budget_too(setting: str | None, field: str, value: object) -> None:
    budget = find(render(*(["--set", setting] if setting else [])), "PodDisruptionBudget")["spec"]
    assert {name: budget[name] for name in budget if name != "selector"} == {field: value}


def test_pods_start_anew_when_pinned_prefixes_change() -> None:
    sums = set()
    for text in ("one", "two"):
        manifests = render("--set", f"engine.pinnedPrefixes[0]={text}")
        sums.add(
            find(manifests, "Deployment")["spec"]["template"]["metadata"]["annotations"]["checksum/pins"]
        )
    assert len(sums) == 2


def checksums(*arguments: str) -> dict[str, str]:
    manifests = render(*arguments)
    return {
        manifest["metadata"]["name"]: str(manifest["spec"]["template"]["metadata"]["annotations"])
        for manifest in manifests
        if manifest["kind"] in ("Deployment", "StatefulSet")
    }


def test_pods_start_anew_when_a_secret_changes() -> None:
    fixed = ("--set", "auth.apiKey=k,redis.external.existingSecret=s,router.enabled=true")
    before = checksums(*fixed)
    assert checksums(*fixed, "--set", "metrics.dashboard.enabled=true") == before
    for change in ("auth.apiKey=other", "huggingFace.token=t"):
        after = checksums(*fixed, "--set", change)
        assert all(after[name] != before[name] for name in before), change
    urls = [f"auth.apiKey=k,router.enabled=true,redis.external.url=redis://{host}" for host in "ab"]
    before, after = (checksums("--set", url) for url in urls)
    assert all(after[name] != before[name] for name in before)


@pytest.mark.parametrize(
    ("model", "lora", "from_claim", "read_only"),
    [
        ("/cache/mine", "", True, True),
        ("/models/in-the-image", "", False, False),
        ("Qwen/Qwen3-0.6B", "", False, False),
        ("/cache/mine", "/cache/adapter", True, True),
        ("/models/in-the-image", "/cache/adapter", True, True),
        ("/cache/mine", "owner/adapter", True, False),  # whose files it keeps there
        ("Qwen/Qwen3-0.6B", "/cache/adapter", True, False),
        ("Qwen/Qwen3-0.6B", "owner/adapter", False, False),
    ],
)
def test_the_router_reads_a_model_where_the_replicas_do(
    model: str, lora: str, from_claim: bool, read_only: bool
) -> None:
    values = f"model.name={model},router.enabled=true,redis.enabled=true,modelCache.accessMode=ReadWriteMany"
    manifests = render("--set", f"{values},model.lora={lora}")
    found = {}
    for name in ("quire", "quire-router"):
        pod = find(manifests, "Deployment", name)["spec"]["template"]["spec"]
        (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] == "/cache")
        (volume,) = (v for v in pod["volumes"] if v["name"] == mount["name"])
        found[name] = volume.get("persistentVolumeClaim"), mount.get("readOnly", False)
    claim = {"claimName": find(manifests, "PersistentVolumeClaim")["metadata"]["name"]}
    assert found["quire"] == (claim, False)
    assert found["quire-router"] == (claim if from_claim else None, read_only)

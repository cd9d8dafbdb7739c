"""What must hold of every pod, whatever the values; and how pods come and go."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import yaml

from engine.config import EngineConfig
from engine.engine import EXIT_SECONDS
from engine.urls import split_address
from service import cli
from service.config import ServiceConfig
from service.pins import read_pins
from tests.helm.chart import NAMES, VALUES, Manifest, container, find, pods, render
from tests.helm.command_line import parsed, usage

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


@every_set
def test_server_understands_its_arguments(values: str) -> None:
    manifests = render(*VALUES[values])
    part = container(manifests, NAMES[values])
    arguments = parsed(manifests, NAMES[values])
    cli._engine_config(arguments)  # raises ValueError for what does not go together
    registry = cli._registry_config(arguments)
    assert (registry is not None) == (values in ("everything", "external"))
    if registry is not None:
        assert registry.advertise_url == "http://10.1.2.3:8000"
        assert registry.lease == (7.5 if values == "everything" else 15)
        assert arguments.cache_seed
    assert (arguments.host, arguments.port) == ("0.0.0.0", part["ports"][0]["containerPort"])
    if values == "everything":
        config = cli._engine_config(arguments)
        assert config == EngineConfig(
            model="Qwen/Qwen3-0.6B",
            device="cuda",
            dtype="bfloat16",
            kv_cache_dtype="fp8_e4m3",
            load_format="dummy",
            max_model_len=1000000,
            max_num_seqs=128,
            max_num_batched_tokens=16384,
            block_size=32,
            gpu_memory_utilization=0.85,
            num_gpu_blocks_override=5000000,
            swap_space=0.5,
            preemption_mode="recompute",
            enforce_eager=True,
            cache_seed=arguments.cache_seed,
        )
        assert arguments.served_model_name == ["qwen", "two words"]
        assert (arguments.max_num_queued_reqs, arguments.stall_timeout) == (500, 20)
        assert (arguments.max_num_queued_tokens, arguments.log_format) == (4000000, "json")


@pytest.mark.parametrize("values", ["everything", "external"])
def test_router_understands_its_arguments(values: str) -> None:
    manifests = render(*VALUES[values])
    router, server = parsed(manifests, f"{NAMES[values]}-router"), parsed(manifests, NAMES[values])
    assert router.command == "route"
    assert router.redis_url != server.redis_url  # it may only read
    for same in ("model", "cache_seed", "api_key", "shutdown_timeout", "host", "port", "log_format"):
        assert getattr(router, same) == getattr(server, same), same


def test_a_router_finds_replicas_by_dns_with_and_without_a_registry() -> None:
    """By the name and port of a Service that has an address for each of them."""
    for values in (VALUES["dns"], (*VALUES["everything"], "--set", "router.discovery=dns")):
        manifests = render(*values)
        router = parsed(manifests, "quire-router")
        assert (router.redis_url is not None) == (values != VALUES["dns"])
        host, port = split_address("--replica-dns", router.replica_dns)
        name, namespace, kind = host.split(".")
        assert (namespace, kind) == ("llms", "svc")
        service = find(manifests, "Service", name)["spec"]
        assert service["clusterIP"] == "None"
        assert service["selector"]["app.kubernetes.io/component"] == "replica"
        (serving,) = container(manifests, "quire")["ports"]
        assert serving["containerPort"] == int(port)  # an address of a headless Service is the pod's own
        assert 53 in ports(find(manifests, "NetworkPolicy", "quire-router")["spec"]["egress"])
    assert parsed(render(*VALUES["everything"]), "quire-router").replica_dns is None


@pytest.mark.parametrize(
    ("command", "left_out"),
    [
        ("serve", {"seed"}),  # of random weights
        ("route", {"replica"}),  # which discovery finds
    ],
)
def test_every_flag_has_a_value(command: str, left_out: set[str]) -> None:
    flags = {name.lower() for name in re.findall(r"\[QUIRE_(\w+)\]", usage(command))}
    switched = (
        "router.enabled=true,router.discovery=dns,auth.enabled=false",
        "engine.enablePrefixCaching=false",
    )
    given = {"model"}  # which has no dashes
    for values in (VALUES["everything"], *(("--set", off) for off in switched)):
        for _, pod in pods(render(*values)):
            (part,) = pod["containers"]
            if part.get("args", [""])[0] == command:
                dashed = [arg.removeprefix("--").split("=")[0] for arg in part["args"]]
                given |= {name.replace("-", "_") for name in dashed}
                given |= {name.removeprefix("QUIRE_").lower() for name in environment(part)}
    assert flags - given == left_out


def test_pinned_prefixes_are_the_file_that_the_server_reads(tmp_path: Path) -> None:
    manifests = render(*VALUES["everything"])
    (path,) = map(Path, parsed(manifests, "quire").pin_prefix)
    data = find(manifests, "ConfigMap", "quire-pins")["data"]
    (tmp_path / path.name).write_text(data[path.name], encoding="utf-8")
    values = yaml.safe_load(Path(VALUES["everything"][1]).read_text(encoding="utf-8"))
    pins = read_pins([tmp_path / path.name])
    assert msgspec.to_builtins(pins) == values["engine"]["pinnedPrefixes"]
    (mount,) = (
        m for m in container(manifests, "quire")["volumeMounts"] if m["mountPath"] == str(path.parent)
    )
    pod = find(manifests, "Deployment", "quire")["spec"]["template"]["spec"]
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == mount["name"])
    assert volume["configMap"]["name"] == "quire-pins"


def test_pods_start_anew_when_pinned_prefixes_change() -> None:
    sums = set()
    for text in ("one", "two"):
        manifests = render("--set", f"engine.pinnedPrefixes[0]={text}")
        sums.add(
            find(manifests, "Deployment")["spec"]["template"]["metadata"]["annotations"]["checksum/pins"]
        )
    assert len(sums) == 2


def test_a_key_is_asked_for_unless_switched_off() -> None:
    keyed, open_to_all = (parsed(render("--set", f"auth.enabled={on}"), "quire") for on in ("true", "false"))
    assert len(keyed.api_key) == 1
    assert not keyed.insecure
    assert not open_to_all.api_key
    assert open_to_all.insecure


def environment(part: Manifest) -> dict[str, Manifest]:
    return {variable["name"]: variable for variable in part["env"]}


def test_replicas_publish_only_with_a_registry() -> None:
    assert "QUIRE_REDIS_URL" not in environment(container(render(), "quire"))
    part = container(render(*VALUES["everything"]), "quire")
    names = environment(part)
    assert names["QUIRE_ADVERTISE_URL"]["value"] == f"http://$(POD_IP):{part['ports'][0]['containerPort']}"
    assert list(names).index("POD_IP") < list(names).index("QUIRE_ADVERTISE_URL")  # or it is not expanded
    assert names["QUIRE_REDIS_URL"]["valueFrom"]["secretKeyRef"]["key"] == "replica-url"


def test_replicas_and_router_have_an_environment_of_their_own() -> None:
    manifests = render(*VALUES["everything"])
    replica, router = (set(environment(container(manifests, name))) for name in ("quire", "quire-router"))
    assert {"HF_HUB_OFFLINE", "NODE"} <= replica - router
    assert router - replica == {"HF_ENDPOINT"}


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


def components(rule: Manifest, side: str) -> list[str | None]:
    """Which of the chart's own pods a rule is about; None: others."""
    return [
        peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component")
        for peer in rule.get(side, [])
    ]


def ports(rules: list[Manifest]) -> set[object]:
    return {port["port"] for rule in rules for port in rule["ports"]}


@pytest.mark.parametrize("model", ["/cache/mine", "/models/in-the-image", "Qwen/Qwen3-0.6B"])
def test_the_router_reads_a_model_where_the_replicas_do(model: str) -> None:
    values = f"model.name={model},router.enabled=true,redis.enabled=true,modelCache.accessMode=ReadWriteMany"
    manifests = render("--set", values)
    found = {}
    for name in ("quire", "quire-router"):
        pod = find(manifests, "Deployment", name)["spec"]["template"]["spec"]
        (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] == "/cache")
        (volume,) = (v for v in pod["volumes"] if v["name"] == mount["name"])
        found[name] = volume.get("persistentVolumeClaim"), mount.get("readOnly", False)
    claim = {"claimName": find(manifests, "PersistentVolumeClaim")["metadata"]["name"]}
    assert found["quire"] == (claim, False)
    assert found["quire-router"] == ((claim, True) if model.startswith("/cache/") else (None, False))


def test_network_policies_both_ways() -> None:
    manifests = render(*VALUES["everything"])
    policies = {
        name: find(manifests, "NetworkPolicy", f"quire{name}")["spec"] for name in ("", "-router", "-redis")
    }
    assert all(policy["policyTypes"] == ["Ingress", "Egress"] for policy in policies.values())
    (into_replicas,) = policies[""]["ingress"]
    assert components(into_replicas, "from") == ["router", None]  # and Prometheus
    (into_router,) = policies["-router"]["ingress"]
    assert components(into_router, "from") == [None, None, "test", None]  # two clients, and Prometheus
    assert ports(policies["-router"]["egress"]) == {53, 6379, 8000, 443, 3128, 5353}
    assert ports(policies[""]["egress"]) == {53, 6379, 443, 3128, 5353}
    (into_redis,) = policies["-redis"]["ingress"]
    assert components(into_redis, "from") == ["replica", "router"]
    assert policies["-redis"]["egress"] == []


@every_set
def test_ports_let_in_are_those_that_pods_listen_on(values: str) -> None:
    manifests = render(*VALUES[values])
    for manifest in manifests:
        if manifest["kind"] == "NetworkPolicy":
            wanted = manifest["spec"]["podSelector"]["matchLabels"].items()
            (pod,) = (spec for labels, spec in pods(manifests) if wanted <= labels.items())
            listening = {port["containerPort"] for port in pod["containers"][0]["ports"]}
            assert ports(manifest["spec"]["ingress"]) == listening


def test_network_policy_of_an_outer_redis_and_no_hub() -> None:
    manifests = render(*VALUES["external"])
    policy = find(manifests, "NetworkPolicy", "llm")["spec"]
    assert ports(policy["egress"]) == {53, 6380}
    (into_router,) = find(manifests, "NetworkPolicy", "llm-router")["spec"]["ingress"]
    assert "from" not in into_router  # anybody who reaches it

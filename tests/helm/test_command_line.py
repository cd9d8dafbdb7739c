"""Quire understands the command lines and environments that the chart renders, and each flag has a value."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import yaml

from quire.commands.settings import engine_config, registry_config
from quire.engine.config import EngineConfig
from quire.engine.urls import split_address
from quire.service.commands.pinned_prefixes import read_pinned_prefixes
from tests.helm.chart import FEATURES, NAMES, VALUES, Manifest, container, find, pods, render
from tests.helm.command_line import parsed, usage

every_set = pytest.mark.parametrize("values", VALUES)


@every_set
def test_server_understands_its_arguments(values: str) -> None:
    manifests = render(*VALUES[values])
    part = container(manifests, NAMES[values])
    arguments = parsed(manifests, NAMES[values])
    engine_config(arguments)  # raises ValueError for what does not go together
    registry = registry_config(arguments)
    assert (registry is not None) == (values in ("everything", "external"))
    if registry is not None:
        assert registry.advertise_url == "http://10.1.2.3:8000"
        assert registry.lease == (7.5 if values == "everything" else 15)
        assert arguments.cache_seed
    assert (arguments.host, arguments.port) == ("0.0.0.0", part["ports"][0]["containerPort"])
    if values == "everything":
        config = engine_config(arguments)
        assert config == EngineConfig(
            model="Qwen/Qwen3-0.6B",
            device="cuda",
            dtype="bfloat16",
            kv_cache_dtype="fp12_e4m7",
            load_format="dummy",
            quantized_weights="expand",
            quantization="gptq_marlin",
            runner="generate",
            model_impl="transformers",
            generation_config="vllm",
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
    for same in (
        "model",
        "chat_template",
        "cache_seed",
        "api_key",
        "shutdown_timeout",
        "host",
        "port",
        "log_format",
    ):
        assert getattr(router, same) == getattr(server, same), same


def test_an_adapter_is_merged_by_replicas_and_known_to_the_router() -> None:
    manifests = render(*FEATURES["adapter"])
    router, server = (parsed(manifests, name) for name in ("quire-router", "quire"))
    assert server.lora == router.lora == "/cache/adapters/mine"
    assert engine_config(server).lora == server.lora
    assert '"topic":"kv@$(POD_IP)@mine"' in " ".join(container(manifests, "quire")["args"])


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
    assert parsed(render(*VALUES["everything"]), "quire-router").replica_dns is None


@pytest.mark.parametrize(
    ("command", "left_out"),
    [
        ("serve", {"seed", "disable_custom_all_reduce"}),  # of random weights; for a fault of an interconnect
        ("route", {"replica"}),  # which discovery finds
    ],
)
def test_every_flag_has_a_value(command: str, left_out: set[str]) -> None:
    flags = {name.lower() for name in re.findall(r"\[QUIRE_(\w+)\]", usage(command))}
    switched = (
        "router.enabled=true,router.discovery=dns,auth.enabled=false",
        "engine.enablePrefixCaching=false",
        "engine.kvCacheMemoryBytes=12884901888",
        "gpu.count=2,gpu.expertParallel=true",
    )
    given = {"model"}  # which has no dashes
    for values in (VALUES["everything"], *FEATURES.values(), *(("--set", off) for off in switched)):
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
    pins = read_pinned_prefixes([tmp_path / path.name])
    assert msgspec.to_builtins(pins) == values["engine"]["pinnedPrefixes"]
    (mount,) = (
        m for m in container(manifests, "quire")["volumeMounts"] if m["mountPath"] == str(path.parent)
    )
    pod = find(manifests, "Deployment", "quire")["spec"]["template"]["spec"]
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == mount["name"])
    assert volume["configMap"]["name"] == "quire-pins"


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

"""Replicas behind Kubernetes' inference gateway."""

from __future__ import annotations

import msgspec
import pytest
import yaml

from quire.engine.config import KVEventsConfig
from tests.helm.chart import FEATURES, container, find, refusal, render

GATEWAY = ("--set", "gateway.enabled=true,gateway.name=inference-gateway")


def test_the_route_leads_to_the_pool_of_replicas_and_the_pool_to_its_picker() -> None:
    manifests = render(*GATEWAY)
    pool, route = find(manifests, "InferencePool"), find(manifests, "HTTPRoute")
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool["metadata"]["name"]}
    ]
    labels = find(manifests, "Deployment", "quire")["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]
    picker = pool["spec"]["endpointPickerRef"]
    service = find(manifests, "Service", picker["name"])["spec"]
    assert picker["port"]["number"] in {port["port"] for port in service["ports"]}
    pod = find(manifests, "Deployment", picker["name"])["spec"]["template"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()


def test_the_picker_knows_its_pool_and_reads_its_plugins() -> None:
    manifests = render(*GATEWAY)
    picker = container(manifests, "quire-endpoint-picker")
    assert {"--pool-name=quire", "--pool-namespace=llms"} <= set(picker["args"])
    (mount,) = picker["volumeMounts"]
    (file,) = find(manifests, "ConfigMap", "quire-endpoint-picker")["data"]
    assert f"--config-file={mount['mountPath']}/{file}" in picker["args"]


def test_plugins_are_the_values_own_and_a_change_restarts_the_picker() -> None:
    plain, own = render(*GATEWAY), render(*FEATURES["gateway"])
    text = find(own, "ConfigMap", "quire-endpoint-picker")["data"]["plugins.yaml"]
    assert yaml.safe_load(text)["plugins"] == [{"type": "random-picker"}]
    checksums = {
        find(each, "Deployment", "quire-endpoint-picker")["spec"]["template"]["metadata"]["annotations"][
            "checksum/config"
        ]
        for each in (plain, own)
    }
    assert len(checksums) == 2


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/tiny", "tiny"),
        ("/models/tiny.Q8_0.gguf", "tiny.Q8_0"),
        ("/models/tiny-00001-of-00002.gguf", "tiny"),
        ("owner/tiny-GGUF:Q8_0", "owner/tiny-GGUF:Q8_0"),
    ],
)
def test_models_go_by_the_names_that_servers_have_for_them(model: str, name: str) -> None:
    replica = container(render("--set", f"engine.kvEvents.enabled=true,model.name={model}"), "quire")
    (given,) = (each for each in replica["args"] if each.startswith("--kv-events-config="))
    assert f'"topic":"kv@$(POD_IP)@{name}"' in given


def test_events_of_the_cache_are_published_under_the_pods_address() -> None:
    arguments = ("--set", "engine.kvEvents.enabled=true,model.name=Qwen/Qwen3-0.6B")
    replica = container(render(*arguments), "quire")
    (given,) = (each.split("=", 1)[1] for each in replica["args"] if each.startswith("--kv-events-config="))
    config = msgspec.json.decode(given, type=KVEventsConfig)
    assert config.enabled and config.topic == "kv@$(POD_IP)@Qwen/Qwen3-0.6B"
    assert "POD_IP" in {variable["name"] for variable in replica["env"]}
    assert {5557, 5558} <= {port["containerPort"] for port in replica["ports"]}
    (policy,) = (each["spec"]["ingress"] for each in render(*arguments) if each["kind"] == "NetworkPolicy")
    assert {port["port"] for rule in policy for port in rule["ports"]} == {8000, 5557, 5558}


def test_two_that_choose_replicas_are_refused() -> None:
    both = ("--set", "router.enabled=true,router.discovery=dns")
    assert "gateway: it and router both choose" in refusal(*GATEWAY, *both)
    assert "gateway: name must be that of a Gateway" in refusal("--set", "gateway.enabled=true")
    events = ("--set", "engine.kvEvents.enabled=true,engine.enablePrefixCaching=false")
    assert "enablePrefixCaching must be on with kvEvents" in refusal(*events)

"""Who may talk to whom, by the network policies that the chart renders."""

from __future__ import annotations

import pytest

from tests.helm.chart import VALUES, Manifest, find, pods, render

every_set = pytest.mark.parametrize("values", VALUES)


def components(rule: Manifest, side: str) -> list[str | None]:
    """Which of the chart's own pods a rule is about; None: others."""
    return [
        peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component")
        for peer in rule.get(side, [])
    ]


def ports(rules: list[Manifest]) -> set[object]:
    return {port["port"] for rule in rules for port in rule["ports"]}


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
def test_ports_are_those_that_pods_listen_on_and_ask_names_at(values: str) -> None:
    manifests = render(*VALUES[values])
    for manifest in manifests:
        if manifest["kind"] == "NetworkPolicy":
            wanted = manifest["spec"]["podSelector"]["matchLabels"].items()
            (pod,) = (spec for labels, spec in pods(manifests) if wanted <= labels.items())
            listening = {port["containerPort"] for port in pod["containers"][0]["ports"]}
            assert ports(manifest["spec"]["ingress"]) == listening
            if listening == {8000}:
                assert 53 in ports(manifest["spec"]["egress"])  # names of Redis, replicas and the Hub


def test_network_policy_of_an_outer_redis_and_no_hub() -> None:
    manifests = render(*VALUES["external"])
    policy = find(manifests, "NetworkPolicy", "llm")["spec"]
    assert ports(policy["egress"]) == {53, 6380}
    (into_router,) = find(manifests, "NetworkPolicy", "llm-router")["spec"]["ingress"]
    assert "from" not in into_router  # anybody who reaches it

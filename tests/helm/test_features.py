"""Each feature of the chart by itself: its file in helm/ci lints, is valid, and renders to the same again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART, FEATURES, HELMS, VALUES, Manifest, container, find, helm, render, template
from tests.helm.validity import validate

DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
# What the chart makes where no cluster has it yet.
MADE = {
    "quire-api-key": {"api-key"},
    "quire-registry": {
        "cache-seed",
        "replica-password",
        "replica-url",
        "router-password",
        "router-url",
        "users.acl",
    },
}
every_feature = pytest.mark.parametrize("feature", FEATURES)


def leaves(values: Any, defaults: Any = DEFAULTS, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, value, default) of every value that the chart has, of those given."""
    for name, value in values.items():
        at = f"{path}.{name}".removeprefix(".")
        if isinstance(defaults[name], dict) and defaults[name]:
            yield from leaves(value, defaults[name], at)
        else:
            yield at, value, defaults[name]


def given(arguments: tuple[str, ...]) -> dict[str, Any]:
    return dict(yaml.safe_load(Path(arguments[1]).read_text(encoding="utf-8"))) if arguments else {}


@pytest.mark.parametrize("name", HELMS)
@every_feature
def test_lint_finds_nothing(name: str, feature: str) -> None:
    done = helm(name, "lint", "--strict", str(CHART), *FEATURES[feature])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


@every_feature
def test_manifests_are_valid(feature: str) -> None:
    for manifest in render(*FEATURES[feature]):
        validate(manifest)


@every_feature
def test_a_feature_differs_from_the_defaults(feature: str) -> None:
    changed = list(leaves(given(FEATURES[feature])))
    assert changed
    assert all(value != default for _, value, default in changed), changed
    assert render(*FEATURES[feature]) != render()


def test_every_value_is_given_by_some_file() -> None:
    seen = {path for values in (VALUES | FEATURES).values() for path, _, _ in leaves(given(values))}
    assert {path for path, _, _ in leaves(DEFAULTS)} - seen == set()


def held(secret: Manifest) -> dict[str, str]:
    return secret.pop("data", {}) | secret.pop("stringData", {})


@pytest.mark.parametrize("name", HELMS)
@pytest.mark.parametrize("values", VALUES | FEATURES)
def test_rendering_again_changes_only_what_is_made(name: str, values: str) -> None:
    """So a tool that renders without a cluster restarts no pod when it looks again."""
    arguments = (VALUES | FEATURES)[values]
    again = template.__wrapped__(*arguments, helm_name=name)
    first = render(*arguments, helm_name=name)
    second = [manifest for manifest in yaml.load_all(again, yaml.CSafeLoader) if manifest is not None]
    for one, other in zip(first, second, strict=True):
        if one["kind"] == "Secret":
            secret = one["metadata"]["name"].replace("-llm-", "-")
            before, after = held(one), held(other)
            different = {key for key in before | after if before.get(key) != after.get(key)}
            assert different <= (set() if values == "api-key" else MADE.get(secret, set()))
        assert one == other


def test_a_key_of_its_own_for_each_client_is_a_file_of_replicas_and_router() -> None:
    manifests = render(*FEATURES["router"])
    for name in ("quire", "quire-router"):
        part = container(manifests, name)
        assert "--api-key-file=/keys/keys" in part["args"]
        assert {"name": "keys", "mountPath": "/keys", "readOnly": True} in part["volumeMounts"]
        volumes = find(manifests, "Deployment", name)["spec"]["template"]["spec"]["volumes"]
        secret = {"secretName": "clients", "items": [{"key": "keys", "path": "keys"}]}
        assert {"name": "keys", "secret": secret} in volumes
    assert not any("api-key-file" in argument for argument in container(render(), "quire")["args"])


def test_other_sites_are_let_in_where_clients_come_in() -> None:
    def origins(feature: str, name: str) -> list[str]:
        arguments = container(render(*FEATURES[feature]), name)["args"]
        return [argument.split("=", 1)[1] for argument in arguments if argument.startswith("--cors-origin")]

    assert origins("named-keys", "quire") == ["https://chat.example", "http://localhost:3000"]
    assert origins("router", "quire-router") == ["*"]
    assert origins("router", "quire") == []

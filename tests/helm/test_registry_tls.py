"""A Redis whose certificate is of a private CA: what the chart mounts is what the client looks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from redis.connection import SSLConnection, parse_url

from tests.helm.chart import HELMS, NAMES, VALUES, Manifest, find, render
from tests.helm.command_line import parsed

URL = "rediss://user:word@redis.example:6379/2"
OF_VALUES = ("--set", f"redis.external.url={URL},redis.external.caSecret=ca,router.enabled=true")


def pod(manifests: list[Manifest], name: str) -> Any:
    return find(manifests, "Deployment", name)["spec"]["template"]["spec"]


def mounted(manifests: list[Manifest], name: str) -> dict[str, tuple[str, str]]:
    """(Secret, key) of each file that the Deployment's container finds of Secrets, read-only."""
    spec = pod(manifests, name)
    secrets = {volume["name"]: volume["secret"] for volume in spec["volumes"] if "secret" in volume}
    files = {}
    for mount in spec["containers"][0]["volumeMounts"]:
        if mount["name"] in secrets:
            assert mount["readOnly"] is True
            secret = secrets[mount["name"]]
            for item in secret["items"]:
                files[str(Path(mount["mountPath"]) / item["path"])] = (secret["secretName"], item["key"])
    return files


def settings(manifests: list[Manifest], name: str) -> dict[str, Any]:
    """What redis-py makes of the URL that quire is given."""
    understood = dict(parse_url(parsed(manifests, name).redis_url))
    assert understood.pop("connection_class") is SSLConnection
    return understood


@pytest.mark.parametrize("component", ["", "-router"])
@pytest.mark.parametrize("helm_name", HELMS)
def test_a_url_of_the_values_names_the_mounted_file(helm_name: str, component: str) -> None:
    manifests = render(*OF_VALUES, helm_name=helm_name)
    ((file, source),) = mounted(manifests, f"quire{component}").items()
    assert source == ("ca", "ca.crt")
    assert settings(manifests, f"quire{component}") == {
        "host": "redis.example",
        "port": 6379,
        "db": 2,
        "username": "user",
        "password": "word",
        "ssl_ca_certs": file,
    }


def test_what_the_url_already_asks_for_is_kept() -> None:
    changed = (OF_VALUES[0], OF_VALUES[1].replace(URL, f"{URL}?ssl_cert_reqs=required"))
    given = settings(render(*changed), "quire")
    assert (given["ssl_cert_reqs"], given["ssl_ca_certs"]) == ("required", "/redis-ca/ca.crt")


@pytest.mark.parametrize("component", ["", "-router"])
def test_a_url_of_a_secret_may_name_the_mounted_file(component: str) -> None:
    """As values.yaml says where it is."""
    manifests = render(*VALUES["external"])
    name = NAMES["external"] + component
    assert mounted(manifests, name) == {settings(manifests, name)["ssl_ca_certs"]: ("redis-ca", "root.pem")}


def test_nothing_is_mounted_or_appended_without_a_ca() -> None:
    manifests = render("--set", f"redis.external.url={URL},router.enabled=true")
    for name in ("quire", "quire-router"):
        assert not mounted(manifests, name)
        assert parsed(manifests, name).redis_url == URL

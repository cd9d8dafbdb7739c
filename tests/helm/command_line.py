"""The command line of a rendered container, as the process in it reads it."""

from __future__ import annotations

import functools
from base64 import b64decode
from typing import Any

import pytest

from quire.commands import table
from tests.helm.chart import Manifest, container

# What Secrets hold that the chart does not make.
GIVEN = {
    "replica-url": "rediss://replica:p@r:6380/0?ssl_ca_certs=/redis-ca/ca.crt",
    "router-url": "rediss://r:6380/0?ssl_ca_certs=/redis-ca/ca.crt",
    "token": "hf_secret",
}


def contents(secret: Manifest) -> dict[str, str]:
    encoded = secret.get("data", {}).items()
    return {key: b64decode(text).decode() for key, text in encoded} | secret.get("stringData", {})


@functools.cache
def usage(command: str) -> str:
    return table.find(command).parser().format_help()


def parsed(manifests: list[Manifest], name: str) -> Any:
    """The command line with its environment, as the container's process gets it."""
    part = container(manifests, name)
    secrets = {m["metadata"]["name"]: contents(m) for m in manifests if m["kind"] == "Secret"}
    with pytest.MonkeyPatch.context() as patch:
        for variable in part["env"]:
            text = variable.get("value", "").replace("$(POD_IP)", "10.1.2.3")
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference is not None:
                secret = secrets.get(reference["name"], GIVEN)
                text = secret.get(reference["key"], "given")
            patch.setenv(variable["name"], text)
            if variable["name"].startswith("QUIRE_"):
                assert f"[{variable['name']}]" in usage(part["args"][0])
        return table.parse(part["args"])

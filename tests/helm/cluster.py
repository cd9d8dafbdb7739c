"""An API server without anything in it, enough of one for `helm install --dry-run=server`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

CORE = {
    "v1": ("Service", "Secret", "ConfigMap", "ServiceAccount", "PersistentVolumeClaim", "Pod"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "policy/v1": ("PodDisruptionBudget",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
}
PROMETHEUS_OPERATOR = {"monitoring.coreos.com/v1": ("ServiceMonitor", "PodMonitor", "PrometheusRule")}


def plural(kind: str) -> str:
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"


def documents(apis: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return what discovery answers, by path."""
    groups = [api.split("/") for api in apis if "/" in api]
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                {
                    "name": group,
                    "versions": [{"groupVersion": f"{group}/{version}", "version": version}],
                    "preferredVersion": {"groupVersion": f"{group}/{version}", "version": version},
                }
                for group, version in groups
            ],
        },
    }
    for api, kinds in apis.items():
        answers[f"/apis/{api}" if "/" in api else f"/api/{api}"] = {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": api,
            "resources": [
                {
                    "name": plural(kind),
                    "singularName": kind.lower(),
                    "namespaced": True,
                    "kind": kind,
                    "verbs": ["create", "delete", "get", "list", "patch", "update"],
                }
                for kind in kinds
            ],
        }
    return answers


@contextmanager
def empty_cluster(folder: Path, *more: dict[str, tuple[str, ...]]) -> Iterator[Path]:
    """Serve the core's APIs and `more`. Yield a kubeconfig, written to `folder`."""
    apis = dict(CORE)
    for extra in more:
        apis |= extra
    answers = documents(apis)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            missing = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "reason": "NotFound",
                "code": 404,
            }
            status, answer = (200, answers[path]) if path in answers else (404, missing)
            if path.endswith("/secrets"):  # where Helm keeps its releases
                status, answer = 200, {"kind": "SecretList", "apiVersion": "v1", "metadata": {}, "items": []}
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        config = folder / "kubeconfig"
        config.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "empty", "cluster": {"server": url}}],
                    "contexts": [{"name": "empty", "context": {"cluster": "empty", "user": "nobody"}}],
                    "users": [{"name": "nobody", "user": {}}],
                    "current-context": "empty",
                }
            ),
            encoding="utf-8",
        )
        yield config
        server.shutdown()

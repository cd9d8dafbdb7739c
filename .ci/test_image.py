"""The image is built, published with its chart, and serves as that chart says; all without root.

`buildah run` stands for the kubelet: it starts containers with the user, environment, arguments and
mounts of the chart that was published, but without a cluster, and with the machine's network.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
HELM = ROOT / ".venv/bin/helm-4.1"
BASE = "localhost/quire-test-base"
ISOLATION = ("--isolation", "chroot")  # which needs no privileges, and works in a container, too
BASE_PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates"
STARTUP_SECONDS = 600
Manifest = dict[str, Any]


def run(*command: str | Path, **environment: str) -> str:
    """Run a command, which must succeed; return what it prints."""
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, command
    return done.stdout


def inside(script: str) -> str:
    """Run a shell script as who owns the container's files."""
    return run(*(["buildah", "unshare"] if os.geteuid() else []), "sh", "-ec", script)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def running(command: list[str | Path], url: str, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that has begun to answer."""
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            end = time.monotonic() + seconds
            while not answers(url):
                assert process.poll() is None and time.monotonic() < end, command
                time.sleep(0.5)
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def server_process(url: str) -> int:
    """Return which process serves there: with chroot isolation, a container's are among the machine's."""
    port = f"--port={url.rpartition(':')[2]}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            words = path.read_bytes().split(b"\0")
            if words[0].startswith(b"/opt/quire/bin/") and port in words:
                found.append(int(path.parent.name))
    (process,) = found
    return process


@pytest.fixture(scope="session", autouse=True)
def _own_makeflags() -> None:
    """What `make image-test` was given must not win over what is given to `make` in here."""
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image that the Dockerfile begins with, or Debian's packages where its registry is out of reach."""
    (wanted,) = re.findall(
        r"^ARG BASE=(.*)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
    )
    pull = ["buildah", "pull", "--retry", "0", f"docker.io/library/{wanted}"]
    if subprocess.run(pull, cwd=ROOT, check=False).returncode == 0:
        return f"docker.io/library/{wanted}"
    print(f"{wanted} cannot be pulled: its place is taken by Debian's packages")
    found = subprocess.run(["buildah", "inspect", "--type", "image", BASE], check=False, capture_output=True)
    if found.returncode:
        folder = tmp_path_factory.mktemp("base")
        archive = folder / "base.tar"
        run("mmdebstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", archive)
        (folder / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
        run("buildah", "build", *ISOLATION, "-t", BASE, folder)
        archive.unlink()
    return BASE


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("registry")
    address = f"localhost:{free_port()}"
    config = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "blobs")}},
        "http": {"addr": address},
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    with running(["docker-registry", "serve", folder / "config.yml"], f"http://{address}/v2/", 60):
        yield address


@pytest.fixture(scope="session")
def published(base: str, registry: str) -> Iterator[str]:
    """The address of the chart."""
    given = os.environ.get("BUILD_FLAGS", "")
    run(
        ".ci/publish",
        registry,
        BUILDER="buildah",
        BUILD_FLAGS=f"{' '.join(ISOLATION)} --build-arg BASE={base} {given}",
        PUSH_FLAGS="--tls-verify=false --disable-compression",
        HELM=str(HELM),
        HELM_FLAGS="--plain-http",
    )
    yield f"oci://{registry}/charts/quire"
    run("sh", "-c", f"buildah rmi $(buildah images -q {registry}/quire)")  # gigabytes


@pytest.fixture(scope="session")
def manifests(published: str) -> list[Manifest]:
    """What `helm install` of the published chart would make, on a cluster without GPUs."""
    values = ("--plain-http", "-f", "helm/values-cpu.yaml")
    return [
        found for found in yaml.safe_load_all(run(HELM, "template", "quire", published, *values)) if found
    ]


class Pod:
    """A manifest's container, as `buildah run` can start it."""

    def __init__(self, manifests: list[Manifest], kind: str, folder: Path) -> None:
        (manifest,) = (found for found in manifests if found["kind"] == kind)
        spec = manifest["spec"]["template"]["spec"] if kind == "Deployment" else manifest["spec"]
        (self.container,) = spec["containers"]
        user = spec["securityContext"]
        self.flags = [*ISOLATION, "--user", f"{user['runAsUser']}:{user['runAsGroup']}"]
        secrets = {
            found["metadata"]["name"]: found["data"] for found in manifests if found["kind"] == "Secret"
        }
        for variable in self.container["env"]:
            text = variable.get("value")
            if text is None:
                reference = variable["valueFrom"]["secretKeyRef"]
                text = base64.b64decode(secrets[reference["name"]][reference["key"]]).decode()
            self.flags += ["--env", f"{variable['name']}={text}"]
        for mount in self.container.get("volumeMounts", []):
            place = folder / mount["name"]
            place.mkdir()
            place.chmod(0o777)
            if mount["mountPath"] != "/dev/shm":
                self.flags += ["-v", f"{place}:{mount['mountPath']}"]

    def command(self, name: str, config: Manifest) -> list[str | Path]:
        """Return what starts it in the container `name` of an image with this configuration."""
        begin = self.container.get("command", config["Entrypoint"])
        return ["buildah", "run", *self.flags, name, "--", *begin, *self.container.get("args", [])]


@pytest.fixture(scope="session")
def container(manifests: list[Manifest]) -> Iterator[str]:
    """A container of the image that the chart names, pulled from where it says."""
    (image,) = {
        found["spec"]["template"]["spec"]["containers"][0]["image"]
        for found in manifests
        if found["kind"] == "Deployment"
    }
    name = run("buildah", "from", "--pull-always", "--tls-verify=false", image).strip()
    yield name
    run("buildah", "rm", name)


@pytest.fixture(scope="session")
def config(container: str) -> Manifest:
    return dict(json.loads(run("buildah", "inspect", container))["OCIv1"]["config"])


def test_it_is_built_for_what_the_chart_does(config: Manifest) -> None:
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["quire"]
    assert config["ExposedPorts"] == {"8000/tcp": {}}


def test_it_has_a_compiler_and_the_versions_that_were_asked_for(container: str) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = {line.lower().replace("_", "-") for line in lines if not line.startswith("#")}
    in_it = ("buildah", "run", *ISOLATION, container, "--")
    found = run(*in_it, "pip", "list", "--format=freeze").lower().replace("_", "-").splitlines()
    names = {line.split("==")[0] for line in wanted}
    versions = {line.split("+")[0] for line in found if line.split("==")[0] in names}  # 2.13.0+cpu
    assert versions and versions <= wanted
    assert any(line.startswith("quire==") for line in found)
    assert "Free Software" in run(*in_it, "cc", "--version")
    assert run(*in_it, "id", "-u").strip() == "10001"


def test_what_the_chart_starts_serves_and_ends_in_order(
    manifests: list[Manifest], container: str, config: Manifest, tmp_path: Path
) -> None:
    """And writes nothing but to its mounts, since the chart makes the root read-only."""
    for name in ("server", "client"):
        (tmp_path / name).mkdir()
    server, client = (
        Pod(manifests, kind, tmp_path / name) for kind, name in (("Deployment", "server"), ("Pod", "client"))
    )
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        f"--port={url.rpartition(':')[2]}" if part == "--port=8000" else part
        for part in server.command(container, config)
    ]
    client.flags += ["--env", f"SERVER={url}"]  # the last one counts
    run("buildah", "run", *ISOLATION, container, "--", "true")  # so that it makes its mount points
    stamp = tmp_path / "stamp"
    stamp.touch()
    try:
        with running(command, f"{url}/ready", STARTUP_SECONDS) as process:
            metrics = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
            assert 'quire_kv_blocks{state="free",tier="device"} 512.0' in metrics
            assert "quire-demo answers:" in run(*client.command(container, config))
            stop = f"kill -TERM {server_process(url)}"  # by its own user: `buildah run` passes no signal on
            run("buildah", "run", *ISOLATION, container, "--", "sh", "-c", stop)
            assert process.wait(60) == 0
        written = inside(
            f"m=$(buildah mount {container}); find $m -newer {stamp} -type f; buildah umount {container} >&2"
        )
        assert not written
    finally:
        inside(f"rm -rf {tmp_path}/server {tmp_path}/client")

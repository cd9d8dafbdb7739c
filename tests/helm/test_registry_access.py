"""What the chart's Redis lets a replica and the router do, tried on a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from redis.exceptions import NoPermissionError

from grafana import scene
from quire.engine.config import RegistryConfig
from quire.engine.registry.deployment import Deployment, seed_digest
from quire.engine.registry.redis import LOOKUP, REPLICAS, Keys, Load, Registry
from tests.helm.chart import VALUES, find, render

DEPLOYMENT = Deployment(
    model="m", revision="r", tokenizer="t", block_size=16, dtype="float32", seed=seed_digest(0)
)
KEYS = Keys(DEPLOYMENT.fingerprint)
REPLICA = "http://10.0.0.1:8000"
DIGEST = bytes(range(16))


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """URL of each user, of a Redis that was started as the chart does it."""
    manifests = render(*VALUES["everything"])
    secret = find(manifests, "Secret", "quire-registry")["stringData"]
    (server,) = find(manifests, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    options = server["args"]
    file = tmp_path_factory.mktemp("acl") / "users.acl"
    file.write_text(secret["users.acl"])
    mounted = {"/acl/users.acl": str(file), "/tmp": str(file.parent)}
    options = [mounted.get(option, option) for option in options[options.index("--dir") :]]
    with scene.redis(*options) as address:
        yield {
            user: secret[f"{user}-url"].replace("quire-redis:6379", address) for user in ("replica", "router")
        } | {"default": f"redis://{address}/0"}


def test_a_replica_publishes_and_the_router_reads_it(urls: dict[str, str]) -> None:
    config = RegistryConfig(redis_url=urls["replica"], advertise_url=REPLICA)
    registry = Registry(config, DEPLOYMENT, [], "p", "1")
    answer = registry.publish(1, [DIGEST], [], Load(running=2), anew=True)
    assert (answer.status, answer.blocks) == ("OK", 1)
    router = redis.Redis.from_url(urls["router"])
    ((_, url, running),) = router.eval_ro(REPLICAS, 1, KEYS.replicas, KEYS.meta, "url", "running")
    assert (url, running) == (REPLICA.encode(), b"2")
    found = router.eval_ro(LOOKUP, 1, KEYS.replicas, KEYS.meta, KEYS.blocks, DIGEST + bytes(16))
    assert found == [[REPLICA.encode(), 1]]
    assert list(router.scan_iter(Keys("*").replicas)) == [KEYS.replicas.encode()]
    registry.leave()
    registry.disconnect()


@pytest.mark.parametrize(
    ("user", "command"),
    [
        ("router", ("SET", f"{KEYS.meta}x", "1")),
        ("router", ("UNLINK", KEYS.replicas)),
        ("router", ("GET", "other")),
        ("router", ("EVAL", "return 1", "0")),
        ("router", ("FLUSHALL",)),
        ("router", ("CONFIG", "GET", "*")),
        ("replica", ("SET", "other", "1")),
        ("replica", ("FLUSHALL",)),
        ("replica", ("KEYS", "*")),
        ("replica", ("CONFIG", "SET", "maxmemory", "1")),
        ("replica", ("ACL", "LIST")),
    ],
)
def test_what_is_not_theirs_is_refused(urls: dict[str, str], user: str, command: tuple[str, ...]) -> None:
    with pytest.raises(NoPermissionError):
        redis.Redis.from_url(urls[user]).execute_command(*command)


def test_nobody_comes_in_without_a_password(urls: dict[str, str]) -> None:
    with pytest.raises(redis.AuthenticationError):
        redis.Redis.from_url(urls["default"]).ping()


def test_it_refuses_writes_rather_than_forget() -> None:
    """noeviction: an evicted key would be a replica's whole set."""
    (server,) = find(render(*VALUES["everything"]), "StatefulSet")["spec"]["template"]["spec"]["containers"]
    settings = dict(zip(server["args"][::2], server["args"][1::2], strict=True))
    assert settings["--maxmemory-policy"] == "noeviction"
    assert (settings["--save"], settings["--appendonly"]) == ("", "no")
    assert "--maxmemory" in settings

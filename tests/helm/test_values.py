"""An unknown value, one of the wrong kind, and combinations that could not work are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import jsonschema
import pytest
import yaml

from quire.engine.config import EngineConfig
from tests.helm.chart import CHART, HELMS, refusal, render

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SEQUENCES = EngineConfig(model="none").max_num_seqs
# objects of the Kubernetes API, or of Helm, that are not ours to describe
PICKER = "gateway.endpointPicker"
OPEN = {"affinity", "router.affinity", "redis.affinity", f"{PICKER}.affinity", "global"}
OPEN |= {f"{PICKER}.config.plugins[]", f"{PICKER}.config.schedulingProfiles[]"}  # the endpoint picker's own


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in schema:
        return schema
    return dict(SCHEMA["definitions"][schema["$ref"].removeprefix("#/definitions/")])


def objects(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, schema) of every object in there."""
    schema = resolved(schema)
    if schema.get("type") == "object":
        yield path, schema
        for name, inner in schema.get("properties", {}).items():
            yield from objects(inner, f"{path}.{name}".removeprefix("."))
    elif schema.get("type") == "array":
        yield from objects(schema["items"], f"{path}[]")


def test_every_object_is_closed() -> None:
    seen = dict(objects(SCHEMA))
    assert len(seen) > 50
    for path, schema in seen.items():
        if path in OPEN:
            continue
        if "properties" in schema:
            assert schema["additionalProperties"] is False, path
        else:  # a map, of labels for instance
            assert schema["additionalProperties"], path


def test_defaults_and_schema_name_the_same_values() -> None:
    def same(defaults: dict[str, Any], schema: dict[str, Any], path: str) -> None:
        properties = schema.get("properties")
        if properties is None or path in OPEN:
            return
        assert set(defaults) == set(properties) - ({"global"} if not path else set()), path
        for name, value in defaults.items():
            if isinstance(value, dict):
                same(value, resolved(properties[name]), f"{path}.{name}".removeprefix("."))

    same(DEFAULTS, SCHEMA, "")
    jsonschema.validate(DEFAULTS, SCHEMA)


def test_every_value_of_the_engine_has_a_comment() -> None:
    """On its line, or above it."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    lines = text.split("\nengine:\n")[1].split("\n\n")[0].splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        assert "#" in line or above.lstrip().startswith("#"), line


def test_choices_are_those_of_the_flags() -> None:
    hints = get_type_hints(EngineConfig)
    settings = {"device": "device", "dtype": "dtype", "kv_cache_dtype": "kvCacheDtype"}
    settings |= {"load_format": "loadFormat", "preemption_mode": "preemptionMode"}
    settings |= {"quantized_weights": "quantizedWeights"}
    engine = SCHEMA["properties"]["engine"]["properties"]
    assert {name: list(get_args(hints[name])) for name in settings} == {
        name: engine[key]["enum"] for name, key in settings.items()
    }


@pytest.mark.parametrize("name", HELMS)
@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("replicas=2", "replicas"),
        ("engine.maxSeqs=2", "maxSeqs"),
        ("redis.external.user=x", "user"),
        ("redis.leaseSeconds=0", "leaseSeconds"),
        ("metrics.podMonitor.enable=true", "enable"),
        ("networkPolicy.clients[0].pods=x", "pods"),
        ("networkPolicy.egress[0].port=1", "port"),
        ("engine.blockSize=17", "blockSize"),
        ("engine.kvCacheDtype=fp12", "kvCacheDtype"),
        ("engine.gpuMemoryUtilization=1.5", "gpuMemoryUtilization"),
        ("replicaCount=two", "replicaCount"),
        ("image.tag=latest", "tag"),
        ("redis.image.tag=latest", "tag"),
        ("drain.marginSeconds=0", "marginSeconds"),
        ("redis.external.url=http://r", "url"),
        ("redis.external.caSecretKey=a/b", "caSecretKey"),
        ("auth.namedKeys.existingSecretKey=a/b", "existingSecretKey"),
        ("service.corsOrigins[0]=chat.example", "corsOrigins"),
        ("router.extraEnv[0].value=x", "name"),
    ],
)
def test_helm_refuses_a_wrong_value_by_name(name: str, setting: str, named: str) -> None:
    assert named in refusal("--set", setting, helm_name=name)


@pytest.mark.parametrize("way", ["runtimeClassName=n", r"resources.limits.nvidia\.com/mig-1g\.10gb=1"])
def test_a_gpu_may_come_in_another_way(way: str) -> None:
    assert render("--set", f"engine.device=cuda,gpu.count=0,{way}")


@pytest.mark.parametrize(
    "settings",
    [f"engine.maxNumBatchedTokens={SEQUENCES}", "engine.maxNumBatchedTokens=8,engine.maxNumSeqs=8"],
)
def test_a_step_may_have_just_a_token_for_each_sequence(settings: str) -> None:
    assert render("--set", settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("autoscaling.hpa.enabled=true,autoscaling.keda.enabled=true", "either hpa or keda"),
        ("extraEnv[0].name=QUIRE_SEED", "extraEnv: QUIRE_SEED is one of quire's flags"),
        ("extraEnv[0].name=HF_TOKEN", "set one of these"),
        ("router.extraEnv[0].name=HF_HOME", "router.extraEnv: HF_HOME is set already"),
        ("extraEnv[0].name=A,extraEnv[1].name=A", "extraEnv: A is set already"),
        (
            r"podLabels.app\.kubernetes\.io/name=x",
            "podLabels: Services find the pods by app.kubernetes.io/name",
        ),
        (r"router.podLabels.app\.kubernetes\.io/component=x", "router.podLabels: Services find the pods by"),
        ("autoscaling.minReplicas=5", "minReplicas (5) is more than maxReplicas (4)"),
        ("router.enabled=true", "set redis.enabled"),
        ("redis.enabled=true,redis.external.url=redis://r", "not both"),
        ("redis.external.url=redis://r,redis.external.existingSecret=s", "either url or existingSecret"),
        ("redis.external.caSecret=ca", "set redis.external.url"),
        ("redis.enabled=true,redis.external.caSecret=ca", "set redis.external.url"),
        ("redis.external.url=redis://r,redis.external.caSecret=ca", "make it rediss://"),
        ("redis.external.url=rediss://r?ssl_ca_certs=/a,redis.external.caSecret=ca", "either caSecret or"),
        ("auth.apiKey=a,auth.existingSecret=s", "either apiKey or existingSecret"),
        ("huggingFace.token=a,huggingFace.existingSecret=s", "either token or existingSecret"),
        ("replicaCount=2", "ReadWriteMany"),
        ("replicaCount=2,modelCache.accessMode=ReadWriteOncePod", "ReadWriteMany"),
        ("autoscaling.hpa.enabled=true", "ReadWriteMany"),
        ("engine.device=cpu", "set gpu.count to 0"),
        ("engine.device=cuda,gpu.count=0", "set gpu.count to 1"),
        ("gpu.expertParallel=true", "set gpu.count to 2 or more"),
        ("gpu.expertParallel=true,gpu.count=0", "count is 0"),
        ("engine.numGpuBlocksOverride=9,engine.kvCacheMemoryBytes=9", "leave one of them out"),
        (
            "engine.maxNumBatchedTokens=31,engine.maxNumSeqs=32",
            "maxNumBatchedTokens (31) is less than maxNumSeqs (32)",
        ),
        (
            f"engine.maxNumBatchedTokens={SEQUENCES - 1}",
            f"maxNumBatchedTokens ({SEQUENCES - 1}) is less than maxNumSeqs ({SEQUENCES})",
        ),
        ("auth.enabled=false,auth.apiKey=a", "lets everyone in"),
        ("auth.enabled=false,auth.existingSecret=s", "lets everyone in"),
        ("auth.enabled=false,auth.namedKeys.existingSecret=s", "lets everyone in"),
        ("router.enabled=true,router.discovery=dns,router.allowReplicas[0]=a", "allowReplicas is for"),
        ("modelCache.persistent=false,modelCache.existingClaim=c", "leave the claim out"),
        ("modelCache.persistent=false,modelCache.storageClass=s", "leave it out, or existingClaim"),
        ("modelCache.existingClaim=c,modelCache.storageClass=s", "leave it out, or existingClaim"),
        ("serviceAccount.create=false,serviceAccount.annotations.a=b", "set serviceAccount.create"),
        ("engine.preemptionMode=swap,engine.swapSpace=0", "needs swapSpace"),
        ("engine.responseStore=redis", "responseStore is redis"),
        ("engine.enablePrefixCaching=false,redis.enabled=true", "enablePrefixCaching must be on"),
        ("redis.external.url=rediss://u:p@r:6380/0", "the url's port is 6380"),
        ("redis.external.url=redis://r,redis.external.port=6380", "the url's port is 6379"),
        ("model.name=/cache/m,modelCache.persistent=false", "set modelCache.persistent"),
        ("model.lora=/cache/a,modelCache.persistent=false", "/cache/a is in the model cache"),
        ("model.lora=a,engine.loadFormat=dummy", "lora (a) is merged into weights"),
        ("model.name=/cache/m,router.enabled=true,router.discovery=dns", "ReadWriteMany"),
        (
            "model.name=/cache/m,router.enabled=true,router.discovery=dns,modelCache.accessMode=ReadWriteOncePod",
            "ReadWriteMany",
        ),
        ("podDisruptionBudget.minAvailable=0,podDisruptionBudget.maxUnavailable=0", "not both"),
        ("metrics.serviceMonitor.enabled=true,metrics.podMonitor.enabled=true", "either serviceMonitor"),
    ],
)
def test_values_that_do_not_go_together(settings: str, said: str) -> None:
    assert said in refusal("--set", settings)

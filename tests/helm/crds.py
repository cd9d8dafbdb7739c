"""JSON schemas of the custom resources, of the fields that the chart uses: a misspelt one fails.

Written after the API references of prometheus-operator (monitoring.coreos.com/v1) and KEDA
(keda.sh/v1alpha1), of Gateway API (gateway.networking.k8s.io/v1) and its Inference Extension
(inference.networking.k8s.io/v1).
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string", "minLength": 1}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}
SECONDS: Schema = {"type": "integer", "minimum": 0}


def strict(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def several(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


def resource(version: str, kind: str, spec: Schema) -> Schema:
    metadata = strict({"name": STRING}, labels=LABELS, annotations=LABELS)
    return strict(
        {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": metadata, "spec": spec}
    )


EXPRESSION = strict(
    {"key": STRING, "operator": {"enum": ["In", "NotIn", "Exists", "DoesNotExist"]}}, values=several(STRING)
)
SELECTOR = strict({}, matchLabels=LABELS, matchExpressions=several(EXPRESSION))
ENDPOINT = strict({"port": STRING}, path=STRING, interval=DURATION)
RULE = strict(
    {"expr": STRING}, record=STRING, alert=STRING, labels=LABELS, annotations=LABELS, **{"for": DURATION}
)
POLICY = strict({"type": {"enum": ["Pods", "Percent"]}, "value": SECONDS, "periodSeconds": SECONDS})
SCALING = strict({"stabilizationWindowSeconds": SECONDS}, policies=several(POLICY))
TRIGGER = strict(
    {
        "type": {"const": "prometheus"},
        "metadata": strict(
            {"serverAddress": STRING, "query": STRING, "threshold": STRING},
            ignoreNullValues={"enum": ["true", "false"]},
        ),
    },
    name=STRING,
    metricType={"enum": ["AverageValue", "Value"]},
)
BEHAVIOR = strict({"scaleUp": SCALING, "scaleDown": SCALING})

PORT = strict({"number": {"type": "integer", "minimum": 1, "maximum": 65535}})
PICKER = strict(
    {"name": STRING, "port": PORT},
    group={"const": ""},
    kind={"const": "Service"},
    failureMode={"enum": ["FailOpen", "FailClose"]},
)
PATH = strict({"type": {"enum": ["Exact", "PathPrefix", "RegularExpression"]}, "value": STRING})
BACKEND = strict({"name": STRING}, group=STRING, kind=STRING, namespace=STRING, port=PORT, weight=SECONDS)
ROUTE = strict(
    {"backendRefs": several(BACKEND)},
    matches=several(strict({"path": PATH})),
    timeouts=strict({}, request=DURATION, backendRequest=DURATION),
)
GATEWAY = strict({"name": STRING}, group=STRING, kind=STRING, namespace=STRING, sectionName=STRING)

CRDS: dict[str, Schema] = {
    "ServiceMonitor": resource(
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        strict({"selector": SELECTOR, "endpoints": several(ENDPOINT)}),
    ),
    "PodMonitor": resource(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        strict({"selector": SELECTOR, "podMetricsEndpoints": several(ENDPOINT)}),
    ),
    "PrometheusRule": resource(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        strict({"groups": several(strict({"name": STRING, "rules": several(RULE)}))}),
    ),
    "InferencePool": resource(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        strict(
            {
                "selector": strict({"matchLabels": LABELS}),
                "targetPorts": {**several(PORT), "maxItems": 8},
                "endpointPickerRef": PICKER,
            },
            appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
        ),
    ),
    "HTTPRoute": resource(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        strict({"parentRefs": several(GATEWAY), "rules": several(ROUTE)}, hostnames=several(STRING)),
    ),
    "ScaledObject": resource(
        "keda.sh/v1alpha1",
        "ScaledObject",
        strict(
            {
                "scaleTargetRef": strict({"name": STRING}, apiVersion=STRING, kind=STRING),
                "triggers": several(TRIGGER),
            },
            minReplicaCount=SECONDS,
            maxReplicaCount=SECONDS,
            pollingInterval=SECONDS,
            cooldownPeriod=SECONDS,
            advanced=strict({"horizontalPodAutoscalerConfig": strict({"behavior": BEHAVIOR})}),
        ),
    ),
}

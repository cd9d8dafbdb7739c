"""Whether a manifest is what Kubernetes, or an operator's custom resource, takes."""

from __future__ import annotations

import json

import jsonschema
import kubernetes_validate

from tests.helm.chart import Manifest
from tests.helm.crds import CRDS

OLDEST, NEWEST = "1.28", "1.37"  # Chart.yaml's kubeVersion, and the newest that the validator knows


_valid: set[str] = set()  # most values render most manifests alike


def validate(manifest: Manifest) -> None:
    """Raise a ValidationError that says which field is wrong."""
    text = json.dumps(manifest, sort_keys=True)
    if text in _valid:
        return
    if manifest["kind"] in CRDS:
        jsonschema.validate(manifest, CRDS[manifest["kind"]])
    else:
        for version in (OLDEST, NEWEST):
            kubernetes_validate.validate(manifest, version, strict=True)
    _valid.add(text)

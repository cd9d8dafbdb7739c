"""/openapi.json holds: what it allows and what it forbids, thrown at a real server (schemathesis)."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi import checks

from quire.service.api.openapi import describe
from quire.service.api.operations import OPERATIONS, Operation
from tests.engine.nightly import NIGHTLY
from tests.service.live import Live

KEY = {"Authorization": "Bearer key"}
EXAMPLES = 100 if NIGHTLY else 10
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    schemathesis.checks.not_a_server_error,
    checks.unsupported_method,
]
# The types know no condition between two fields (stream_options needs stream: true), so what they allow may
# still be a 400; what they forbid must be one.
STRICT = [*CHECKS, checks.negative_data_rejection]


@pytest.fixture(scope="module")
def schema(live: Live) -> Iterator[BaseSchema]:
    document = httpx.get(f"{live.url}/openapi.json").json()
    loaded = schemathesis.openapi.from_dict(document)
    loaded.config.update(base_url=live.url)
    yield loaded


CASES = [(each, GenerationMode.POSITIVE) for each in OPERATIONS if not each.endless]
CASES += [(each, GenerationMode.NEGATIVE) for each in OPERATIONS if each.request is not None]


@pytest.mark.parametrize(("operation", "mode"), CASES, ids=lambda each: getattr(each, "path", str(each)))
def test_every_answer_is_one_that_is_described(
    schema: BaseSchema, operation: Operation, mode: GenerationMode
) -> None:
    described = schema[operation.path][operation.method.upper()]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=not NIGHTLY,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=described.as_strategy(generation_mode=mode))
    def hold(case: Case) -> None:
        answer = case.call(headers=KEY, timeout=30)
        case.validate_response(answer, checks=STRICT if mode is GenerationMode.NEGATIVE else CHECKS)

    hold()


def test_types_are_named_apart() -> None:
    """msgspec puts the module before names that two types share, and modules are nobody's business."""
    assert [name for name in describe("1")["components"]["schemas"] if "." in name] == []

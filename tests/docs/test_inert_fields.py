"""docs/api.md has the table of fields without effect, as it stands in the code."""

from __future__ import annotations

import pytest

from quire.service.inert import INERT, Inert
from tests.docs.pages import API, section

SECTION = section(API, "Fields without effect")


@pytest.mark.parametrize("kind", INERT)
def test_every_field_is_on_the_page_with_its_reason(kind: str) -> None:
    for row in INERT[kind]:
        line = (
            f"| {kind} | `{row.name}` | {'no effect' if isinstance(row, Inert) else 'refused'} | {row.why} |"
        )
        assert line in SECTION, f"docs/api.md needs the line\n{line}"


def test_the_page_has_nothing_else() -> None:
    lines = [line for line in SECTION.splitlines() if line.startswith("| ")]
    assert len(lines) - 2 == sum(map(len, INERT.values()))

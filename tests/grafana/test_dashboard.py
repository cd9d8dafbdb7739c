"""The dashboard's JSON and the rules, as files. test_live.py shows that they find data."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from grafana import dashboard, draw
from grafana.dashboard import PATH, encode
from grafana.panels import ROWS, Panel
from tests.helm.command_line import usage

ROOT = Path(__file__).parents[2]
BOARD = json.loads((ROOT / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = BOARD["panels"]


def test_json_is_what_the_code_makes() -> None:
    """Else run `python -m grafana.dashboard`."""
    assert PATH.read_text(encoding="utf-8") == encode()
    assert (ROOT / "grafana" / "dashboard.json").resolve() == PATH


@pytest.mark.parametrize("module", [dashboard, draw])
def test_help_is_help(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And draws or writes nothing."""

    def work(*arguments: object) -> None:
        pytest.fail("it begins its work")

    monkeypatch.setattr(module, "PATH", tmp_path / "written")
    monkeypatch.setattr(draw, "redis", work)
    monkeypatch.setattr(sys, "argv", [module.__name__, "--help"])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert not end.value.code and "usage:" in capsys.readouterr().out
    assert not (tmp_path / "written").exists()


def test_every_panel_is_there_once_and_has_its_place() -> None:
    assert [panel["title"] for panel in PANELS if panel["type"] == "row"] == list(ROWS)
    titles = [panel["title"] for panel in PANELS if panel["type"] != "row"]
    assert titles == [panel.title for panels in ROWS.values() for panel in panels]
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for one, other in combinations((panel["gridPos"] for panel in PANELS), 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
    assert all(place["x"] + place["w"] <= 24 for place in (panel["gridPos"] for panel in PANELS))


def test_latency_is_the_second_row() -> None:
    rows = list(ROWS.values())
    assert [panel.title for panel in rows[1]][:3] == [
        "Time to first token",
        "Inter-token latency",
        "Request latency",
    ]
    places = [panel["gridPos"] for panel in PANELS if panel["title"] in [panel.title for panel in rows[1]]]
    assert len({place["y"] for place in places}) == 1  # beside each other


@pytest.mark.parametrize(
    "panel", [panel for panels in ROWS.values() for panel in panels], ids=lambda p: p.title
)
def test_a_description_says_what_it_shows_and_what_to_do(panel: Panel) -> None:
    shown, _, todo = panel.description.partition(". ")
    assert shown[0].isupper() or shown[0].isdigit()
    assert re.search(
        r"\b(add|look|lower|raise|see|put|give|find|pin|wastes|refuses|makes room|ask)\b", todo
    ), todo
    assert todo.endswith(".")
    for flag in re.findall(r"--[a-z-]+", panel.description):
        assert re.search(rf"{flag}\b(?!-)", usage("serve")), flag
    titles = "|".join(
        sorted((panel.title for panels in ROWS.values() for panel in panels), key=len, reverse=True)
    )
    for name in re.findall(r"(?:look at|in|with|see) ([A-Z].*)", panel.description):
        assert re.match(rf"({titles}|Redis)\b", name), name


def test_latencies_show_single_requests_and_it_links_to_the_block_map() -> None:
    targets = {panel["title"]: panel.get("targets", []) for panel in PANELS}
    shown = {title for title, each in targets.items() if any(target.get("exemplar") for target in each)}
    assert shown == {"Time to first token", "Inter-token latency", "Request latency", "Queue time"}
    assert [link["url"] for link in BOARD["links"]] == ["${quire}/blocks"]


def test_it_can_be_imported_anywhere() -> None:
    """Nothing names a data source of some Grafana; what queries use as variables is defined."""
    variables = {variable["name"] for variable in BOARD["templating"]["list"]}
    assert variables == {"datasource", "job", "instance", "quire"}
    for panel in PANELS:
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["description"]
            assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH")[
                : len(panel["targets"])
            ]


@pytest.mark.parametrize(
    "command",
    [["check", "rules", "helm/files/rules.yaml"], ["test", "rules", "tests/grafana/rules_test.yaml"]],
)
def test_rules(command: list[str]) -> None:
    done = subprocess.run(["promtool", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

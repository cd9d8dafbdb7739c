"""The panels as a Grafana dashboard. `python -m grafana.dashboard` writes its JSON."""

from __future__ import annotations

import argparse
from itertools import count
from pathlib import Path

from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableRefresh,
)

from grafana.panels import ROWS, Panel
from grafana.queries import Query

# In the chart's folder, since Helm reads no other; grafana/dashboard.json is a link to it.
PATH = Path(__file__).parents[1] / "helm" / "files" / "dashboard.json"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
REFS = "ABCDEFGH"
ADDRESS = "http://127.0.0.1:8000"  # of a server or a router, as browsers see it
SERIES = '__name__=~"quire_kv_capacity_blocks|quire_route_replicas"'  # what replicas and routers have one of


def dashboard() -> build.Dashboard:
    board = (
        build.Dashboard("Quire")
        .uid("quire")
        .description(
            "The KV cache as memory: blocks, sharing, swapping, prefixes; and what users feel of it."
        )
        .tags(["quire", "llm"])
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .with_variable(build.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_servers("job", "Job", f"{{{SERIES}}}"))
        .with_variable(_servers("instance", "Instance", f'{{{SERIES}, job=~"$job"}}'))
        .with_variable(build.TextBoxVariable("quire").label("Quire's URL").default_value(ADDRESS))
        .link(
            build.DashboardLink("Blocks")
            .type(DashboardLinkType.LINK)
            .url("${quire}/blocks")
            .target_blank(True)
        )
    )
    ids = count(1)
    for title, panels in ROWS.items():
        board.with_row(build.Row(title).id(next(ids)))
        span = 6 if len(panels) % 4 == 0 else 8  # of 24: four or three beside each other
        for panel in panels:
            built = _stat(panel) if panel.kind == "stat" else _timeseries(panel, span)
            board.with_panel(built.id(next(ids)))
    return board


def _servers(name: str, label: str, series: str) -> build.QueryVariable:
    return (
        build.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(f"label_values({series}, {name})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".+")
    )


def _queries(panel: Panel) -> list[prometheus.Dataquery]:
    return [_query(query).ref_id(ref) for ref, query in zip(REFS, panel.queries, strict=False)]


def _query(query: Query) -> prometheus.Dataquery:
    built = prometheus.Dataquery().expr(query.expr).legend_format(query.legend)
    return built.exemplar(True) if query.exemplars else built


def _stat(panel: Panel) -> stat.Panel:
    built = stat.Panel().title(panel.title).description(panel.description).unit(panel.unit)
    built = built.datasource(SOURCE).height(4).span(4)
    for query in _queries(panel):
        built = built.with_target(query)
    return built


def _timeseries(panel: Panel, span: int) -> timeseries.Panel:
    built = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.description)
        .unit(panel.unit)
        .datasource(SOURCE)
        .height(8)
        .span(span)
        .min(0)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if panel.top is not None:
        built = built.max(panel.top)
    if panel.stacked:
        built = built.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(40)
    for query in _queries(panel):
        built = built.with_target(query)
    return built


def encode() -> str:
    return JSONEncoder(sort_keys=True, indent=1).encode(dashboard().build()) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    PATH.write_text(encode(), encoding="utf-8")


if __name__ == "__main__":
    main()

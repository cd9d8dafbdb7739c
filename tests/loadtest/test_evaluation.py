"""Each of the paper's figures in miniature: less memory, shorter requests, the same claims."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from quire.loadtest.__main__ import main
from quire.loadtest.client.lengths import Fixed, LogNormal, Shape
from quire.loadtest.client.sessions import Recipe
from quire.loadtest.evaluation import (
    block_size,
    chatbot,
    length_distributions,
    memory_layout,
    memory_waste,
    request_rates,
    shared_prefix,
    sharing,
)
from quire.loadtest.evaluation.figure import Cell, MadeFigure, Table, markdown_table
from quire.loadtest.evaluation.report import write_report
from quire.loadtest.evaluation.setting import Search, Setting
from quire.loadtest.simulator.systems import Kind

SHORT = Shape(LogNormal(20, 0.8, 4, 100), LogNormal(30, 0.8, 4, 100))
RATES = (2, 8, 24, 72)


def setting(scale: float, slots: int = 1024) -> Setting:
    """Room for four sequences of the longest, 256 tokens."""
    return Setting(scale=scale, slots=slots, max_model_len=256)


def column(table: Table, name: str) -> list[float]:
    at = table.header.index(name)
    return numbers([row[at] for row in table.rows])


def numbers(cells: list[Cell]) -> list[float]:
    found = [float(cell) for cell in cells if isinstance(cell, float | int)]
    assert len(found) == len(cells), cells
    return found


def is_rising(values: list[float]) -> bool:
    return all(one < other for one, other in pairwise(values))


def test_fig1_a_batch_grows_until_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_layout, "SHAREGPT", SHORT)
    monkeypatch.setattr(memory_layout, "BATCHES", (1, 2, 4, 16))
    parts, batches = memory_layout.fig1(setting(0.2)).tables
    assert column(parts, "per cent") == pytest.approx([65, 30, 5], abs=3)
    quire, existing = column(batches, "Quire: requests"), column(batches, "Orca (Max): requests")
    assert quire[:3] == pytest.approx([1, 2, 4]) and quire[3] > 6
    assert existing == pytest.approx([1, 2, 4, 4]), "there is room for four of the longest, and no more"
    assert is_rising(column(batches, "Quire: tok/s")) and is_rising(column(batches, "Orca (Max): tok/s")[:3])
    needed = column(batches, "Quire: GB"), column(batches, "Orca (Max): GB")
    assert all(one < other for one, other in zip(*needed, strict=True) if one < needed[0][-1])


def test_fig11_lengths_of_real_conversations_stand_beside_the_papers_means() -> None:
    figure = length_distributions.fig11(setting(0.2))
    (table,) = figure.tables
    recorded, log_normal, alpaca = table.rows
    assert isinstance(recorded[1], int) and recorded[1] > 9_000
    assert numbers(log_normal[2:4]) == pytest.approx([161.31, 337.99], rel=0.1)
    assert numbers(alpaca[2:4]) == pytest.approx([19.31, 58.45], rel=0.1)
    assert [chart.title for chart in figure.charts] == [row[0] for row in table.rows]
    assert all(sum(line.y) <= 100 + 1e-6 for chart in figure.charts for line in chart.lines)
    assert msgspec.json.decode(msgspec.json.encode(figure), type=type(figure)) == figure


def test_fig2_more_of_the_memory_holds_tokens_the_less_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_waste, "SHAREGPT", SHORT)
    monkeypatch.setattr(memory_waste, "RATE", 200.0)
    (table,) = memory_waste.fig2(setting(0.0)).tables
    assert [row[0] for row in table.rows] == ["Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "Quire"]
    held = column(table, "token states")
    assert is_rising(held) and held[-1] > 80
    for row in table.rows:
        assert sum(numbers(row[1:5])) == pytest.approx(100)
    assert column(table, "internal fragmentation")[2] == 0, "Oracle knows what it will need"
    assert column(table, "paper: token states") == [20.4, 26.8, 38.2, 96.3]


def test_fig12_and_13_paging_sustains_more(monkeypatch: pytest.MonkeyPatch) -> None:
    lowest: dict[Kind, float] = {"paged": 4, "oracle": 2, "pow2": 2, "max": 2, "padded": 0.5}
    monkeypatch.setattr(request_rates, "WORKLOADS", {"ShareGPT": (Recipe(SHORT, 40), lowest)})
    monkeypatch.setattr(request_rates, "RECORDED", {"ShareGPT, recorded": (Recipe(SHORT, 20), lowest)})
    monkeypatch.setattr(request_rates, "SERVERS", request_rates.SERVERS[:2])
    monkeypatch.setattr(request_rates, "HOUR", 3.0)
    monkeypatch.setattr(request_rates, "SEARCH", Search(seconds=2.0, fewest=30, halvings=1))
    figure = request_rates.fig12(setting(1.0))
    servers, table, _, on_four, checks = figure.tables
    assert [row[0] for row in servers.rows] == ["OPT-13B", "OPT-66B"]
    rates = column(table, "requests/s")
    assert is_rising(rates[::-1]), "Quire, Oracle, Pow2, Max, FasterTransformer"
    assert column(table, "Quire ÷ it") == pytest.approx([rates[0] / rate for rate in rates])
    assert [row[3] for row in table.rows] == [None, "1.7–2.7", None, "2.7–8", "up to 22"]
    assert [line.label for line in figure.charts[0].lines] == [row[0] for row in table.rows]
    assert [line.x[0] for line in figure.charts[0].lines] == list(lowest.values())
    assert [row[0] for row in checks.rows] == ["Quire", "Orca (Oracle)"]
    assert all(len(row) == 6 and min(numbers(row[1:])) > 0 for row in checks.rows)
    sustained = numbers([row[1] for row in on_four.rows[:4]])  # FasterTransformer: not even the least rate
    assert is_rising(sustained[::-1])
    assert sustained[0] < rates[0], "66B on four has less memory, and slower steps"
    assert [chart.title for chart in figure.charts] == [
        "OPT-13B, ShareGPT",
        "OPT-13B, ShareGPT, recorded",
        "OPT-66B, ShareGPT",
    ]
    assert "4 × A100 40GB" in figure.costs

    monkeypatch.setattr(request_rates, "BATCH_RUNS", {"ShareGPT": (Recipe(SHORT, 40), 72.0)})
    monkeypatch.setattr(
        request_rates, "PAPER_BATCHES", {"ShareGPT": (2.0, request_rates.PAPER_BATCHES["ShareGPT"][1])}
    )
    (table,) = request_rates.fig13(setting(1.0)).tables
    batches = column(table, "at 72 requests/s")
    assert is_rising(batches[::-1]) and batches[-1] <= 4
    assert column(table, "paper") == [30.42, 13.62, 9.81, 7.0]


def test_fig14_and_15_sharing_pays_the_more_the_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "WIDTHS", (2, 4))
    monkeypatch.setattr(sharing, "RATES", (2, 8, 24, 72))
    monkeypatch.setattr(sharing, "ALPACA", Shape(Fixed(40), LogNormal(15, 0.5, 4, 40)))
    monkeypatch.setattr(sharing, "SHAREGPT", Shape(Fixed(80), LogNormal(20, 0.5, 4, 40)))
    small = setting(0.08)
    (table,) = sharing.fig14(small).tables
    ratios = dict(zip([row[0] for row in table.rows], column(table, "ratio"), strict=True))
    assert ratios["4 samples"] > 1 and ratios["beams of 4"] > ratios["basic"]
    (table,) = sharing.fig15(small).tables
    saved = {(row[0], row[1]): row[2] for row in table.rows}
    for workload in ("Alpaca", "ShareGPT"):
        for how in ("samples", "beams"):
            assert 0 < saved[workload, f"{how}, 2"] < saved[workload, f"{how}, 4"] < 100
        assert saved[workload, "beams, 4"] > saved[workload, "samples, 4"]
    assert table.rows[0][3] == 6.09


def test_fig16_a_longer_prefix_gains_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "SENTENCES", Shape(Fixed(20), LogNormal(15, 0.5, 4, 40)))
    monkeypatch.setattr(shared_prefix, "PREFIXES", {"1 example": (40, 1.67), "5 examples": (160, 3.58)})
    monkeypatch.setattr(shared_prefix, "RATES", (10, 30, 90, 270))
    (table,) = shared_prefix.fig16(setting(0.08)).tables
    cached = column(table, "Quire, requests/s")
    without = column(table, "Quire without prefix cache, requests/s")
    assert all(with_cache > plain for with_cache, plain in zip(cached, without, strict=True))
    ratios = column(table, "Quire ÷ Orca")
    assert 1 < ratios[0] < ratios[1]
    assert column(table, "paper: ratio") == [1.67, 3.58]


def test_fig17_a_chatbot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chatbot, "SHAREGPT", SHORT)
    monkeypatch.setattr(chatbot, "LAST_TOKENS", 128)
    monkeypatch.setattr(chatbot, "RATES", RATES)
    sessions = chatbot.conversations(50, seed=1)
    assert sessions == chatbot.conversations(50, seed=1)
    assert max(len(session.turns[0].prompt) for session in sessions) == chatbot.LAST_TOKENS
    (table,) = chatbot.fig17(setting(0.12)).tables
    rates = column(table, "requests/s")
    assert rates[0] > max(rates[1:])
    assert [row[3] for row in table.rows] == [None, 2.0, 2.0, 2.0]


def test_fig18b_and_19_block_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_size, "SIZES", (4, 16, 128))
    monkeypatch.setattr(block_size, "RATES", {"ShareGPT": (Recipe(SHORT, 40), 60.0)})
    monkeypatch.setattr(block_size, "SHAREGPT", SHORT)
    table, best = block_size.fig18b(setting(1.0)).tables
    assert is_rising(column(table, "wasted inside blocks, %"))
    latencies = column(table, "ShareGPT, ms/token")
    assert latencies[-1] > latencies[0]
    assert best.rows[0][2] == "16–128"

    monkeypatch.setattr(block_size, "OVERLOAD", 200.0)
    monkeypatch.setattr(block_size, "HOST_SLOTS", 512)
    moved, end_to_end, meet = block_size.fig19(setting(0.2)).tables
    ours, papers, recompute = (column(moved, name) for name in moved.header[1:])
    assert len(set(recompute)) == 1
    assert all(one < other for one, other in zip(ours, papers, strict=True))
    assert is_rising(papers[::-1]) and papers[0] > recompute[0] > papers[-1]
    assert ours[0] < recompute[0]
    assert min(column(end_to_end, "preemptions (recompute)")) > 0
    ours, papers = (column(end_to_end, name) for name in end_to_end.header[2:4])
    assert papers[0] > ours[0], "swapping a small block layer by layer does not cost more than at once"
    assert "4 (one copy a block" in str(meet.rows[0][1])


def test_a_report_holds_every_figure_and_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_size, "RATES", {"ShareGPT": (Recipe(SHORT, 20), 60.0)})
    figure = block_size.fig18b(setting(1.0))
    again = block_size.fig18b(dataclasses.replace(setting(1.0), processes=2))
    assert figure == again, "the same seed gives another figure"
    where = {"commit": "abc", "date": "2026-01-02", "command": "python -m quire.loadtest figures"}
    other = msgspec.structs.replace(figure, name="other")
    write_report(tmp_path, [MadeFigure(figure=figure, **where)], ["fig2", "fig18b", "other"])
    write_report(tmp_path, [MadeFigure(figure=other, **where)], ["fig18b", "other"])
    made = msgspec.json.decode((tmp_path / "fig18b.json").read_bytes(), type=MadeFigure)
    assert made.figure == figure
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert markdown_table(figure.tables[0]) in text and "(fig18b-1.svg)" in text and figure.costs in text
    assert text.index("fig18b:") < text.index("other:")
    assert (tmp_path / "fig18b-1.svg").read_text(encoding="utf-8").startswith("<svg")
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2 and "16–128" in page and figure.source in page


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["simulate", "--rate", "2", "--requests", "10", "--lengths", "40x20", "--system"]
    for system in ("paged", "max"):
        assert main([*run, system, "--json", str(tmp_path / f"{system}.json")]) == 0
    assert "Orca (Max)" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "paged.json"), str(tmp_path / "max.json")]) == 0
    assert main(["figures", "fig3", "--output", str(tmp_path)]) == 1
    assert "fig18b" in capsys.readouterr().err
    steps = tmp_path / "steps.jsonl"
    record = ["record", "service/demo/model", "--lengths", "30x8", "--requests", "12", "--max-num-seqs", "4"]
    assert main([*record, "--output", str(steps)]) == 0
    out = capsys.readouterr().out
    assert "mean error of a step" in out and f"{len(steps.read_text().splitlines())} steps on" in out
    assert main([*run, "oracle", "--costs", str(steps)]) == 0
    assert "fitted to half of" in capsys.readouterr().out

"""README.md and docs/ name what there is: files, sections, flags, metrics and figures."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from quire.commands.table import COMMANDS
from quire.loadtest.throughput_chart import WORKLOADS, draw, read_table
from tests.docs.pages import PAGES, ROOT, anchors, blocks, run, section
from tests.grafana.test_live import METRICS, ROUTER_METRICS

FOLDERS = "engine|kernels|service|loadtest|quire|tests|grafana|helm|docs"
# Of `python -m MODULE ...` each, in one process: they import the same for seconds.
HELP_OF_ALL = """
import json, runpy, sys
for module, *arguments in json.loads(sys.argv[1]):
    sys.argv = [module, *arguments, "--help"]
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        assert not end.code, (module, arguments)
"""


@pytest.mark.parametrize("page", PAGES)
def test_files_and_sections_that_are_named_exist(page: str) -> None:
    text, here = PAGES[page], (ROOT / page).parent
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, heading = target.partition("#")
        if not path.startswith("https:"):
            linked = (here / path).resolve() if path else ROOT / page
            assert linked.exists(), target
            assert not heading or heading in anchors(linked.read_text(encoding="utf-8")), target
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", text)
    assert not [path for path in named if not (ROOT / path).exists()]


def test_every_page_is_linked() -> None:
    linked = re.findall(r"\]\((docs/[\w-]+\.md)\)", PAGES["README.md"])
    assert {page for page in PAGES if page.startswith("docs/")} <= set(linked)
    assert "service/chat.png" in PAGES["README.md"]


@pytest.mark.parametrize("page", PAGES)
def test_code_can_be_read(page: str) -> None:
    for program in blocks("python", PAGES[page]):
        compile(program, page, "exec")
    for commands in blocks("sh", PAGES[page]):
        subprocess.run(["bash", "-n", "-c", commands], check=True)


def test_flags_that_are_named_exist() -> None:
    commands = [["quire.cli", name] for name in (command.name for command in COMMANDS)]
    commands += [
        ["quire.loadtest", name] for name in ("run", "sweep", "compare", "record", "figures", "simulate")
    ]
    commands += [["quire.loadtest.cluster_demo"], ["quire.loadtest.chaos"]]
    known = run([sys.executable, "-c", HELP_OF_ALL, json.dumps(commands)])
    ours = "".join(text for page, text in PAGES.items() if page != "helm/README.md")  # which has helm's, too
    for flag in set(re.findall(r"`(--[a-z-]+)", ours)):
        assert re.search(rf"{flag}\b(?!-)", known), flag


def test_every_flag_of_a_command_is_on_the_page_of_commands() -> None:
    named = set(re.findall(r"--[a-z-]+", PAGES["docs/commands.md"]))
    for command in COMMANDS:
        flags = {flag.name for flag in command.parser().flags if flag.name.startswith("--")}
        assert not flags - named, command.name


def test_modules_that_are_named_exist() -> None:
    for module in set(re.findall(r"python -m ((?:quire|grafana)[\w.]*)", "".join(PAGES.values()))):
        path = ROOT / module.removeprefix("quire.").replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_every_metric_is_explained() -> None:
    described = section(PAGES["docs/operations.md"], "Metrics and dashboard")
    named = set(re.findall(r"`((?:quire_|vllm:)\w+)`", described))
    assert named == {*METRICS, *ROUTER_METRICS, "quire_kv_pinned_blocks"}


def test_the_chart_shows_the_table() -> None:
    table = read_table(PAGES["docs/benchmarks.md"])
    assert set(WORKLOADS) < set(table)
    drawn, kept = draw(table), (ROOT / "docs/throughput.svg").read_text(encoding="utf-8")
    assert re.findall(r">([^<>\n]+)</text>", drawn) == re.findall(r">([^<>\n]+)</text>", kept)

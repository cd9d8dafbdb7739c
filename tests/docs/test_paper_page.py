"""docs/paper.md names what exists, every figure of the paper, and every test of tests/paper."""

from __future__ import annotations

import re

from tests.docs.pages import PAGES, ROOT, section

PAGE = PAGES["docs/paper.md"]
NAMED = re.findall(r"`((?:engine|kernels|service|loadtest|tests|docs)/[\w./-]+)(?:::(\w+))?`", PAGE)


def test_every_file_that_is_named_exists() -> None:
    missing = sorted({path for path, _ in NAMED if not (ROOT / path).exists()})
    assert not missing, f"docs/paper.md names what is not there: {', '.join(missing)}"


def test_every_test_that_is_named_exists() -> None:
    missing = [
        f"{path}::{name}"
        for path, name in NAMED
        if name and (not (ROOT / path).exists() or f"def {name}(" not in (ROOT / path).read_text("utf-8"))
    ]
    assert not missing, f"docs/paper.md names tests that are not there: {', '.join(missing)}"


def test_every_worked_example_is_on_the_page() -> None:
    written = {
        (f"tests/paper/{file.name}", name)
        for file in (ROOT / "tests/paper").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.MULTILINE)
    }
    left_out = sorted(f"{path}::{name}" for path, name in written - set(NAMED))
    assert not left_out, f"docs/paper.md leaves out {', '.join(left_out)}"


def test_every_figure_of_the_paper_has_a_row() -> None:
    rows = re.findall(r"^\| ((?:Fig\.|table) [^|]+?) \|", section(PAGE, "Figures and tables"), re.MULTILINE)
    numbers: set[int] = set()
    for row in rows:
        first, *last = map(int, re.findall(r"\d+", row))
        numbers |= set(range(first, (last or [first])[0] + 1))
    assert numbers == set(range(1, 20)) and "table 1" in rows


def test_every_row_says_where_or_why_not() -> None:
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        assert all(cells), f"a cell is empty: {line}"


def test_every_figure_that_was_made_is_on_the_page() -> None:
    made = {path.name for path in (ROOT / "loadtest/results/evaluation").glob("fig*.json")}
    named = {
        path.rsplit("/", 1)[1] for path, _ in NAMED if path.startswith("loadtest/results/evaluation/fig")
    }
    assert made == named

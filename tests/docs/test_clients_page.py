"""What docs/clients.md tells people to run with a package runs, for each of the packages that is here."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec

import pytest

from tests.docs.pages import PAGES, PORT, blocks, run

PROGRAMS = {
    package: program
    for program in blocks("python", PAGES["docs/clients.md"])
    for package in re.findall(r"^from (\w+) import", program, re.MULTILINE)
}
HERE = [package for package in PROGRAMS if find_spec(package) is not None]


def test_the_packages_of_the_test_extra_are_here() -> None:
    assert {"anthropic", "ollama", "openai"} <= set(HERE)


@pytest.mark.parametrize("package", HERE)
def test_program_runs(port: str, package: str) -> None:
    program = PROGRAMS[package]
    assert program.count(PORT) == 1
    assert run([sys.executable, "-c", program.replace(PORT, port)]).strip()

"""README.md and the pages of docs/, and what stands in them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "helm/README.md")
}
README, API = PAGES["README.md"], PAGES["docs/api.md"]
PORT = "8000"  # the one that the pages name
SECONDS = 60


def section(text: str, heading: str) -> str:
    """Return what stands under the `heading` of the second level."""
    return text.split(f"\n## {heading}\n")[1].split("\n## ", maxsplit=1)[0]


def blocks(language: str, text: str) -> list[str]:
    """Return all code blocks of `text` in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def block(language: str, word: str, text: str) -> str:
    """Return the one code block of `text` in this language that holds `word`."""
    (found,) = [block for block in blocks(language, text) if word in block]
    return found


def anchors(text: str) -> set[str]:
    """Return the names that headings of `text` have in links."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def run(command: list[str]) -> str:
    """Run a command, which must succeed; return what it prints."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

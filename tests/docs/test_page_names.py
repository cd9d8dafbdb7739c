"""The pages on the code name what the code has: a rename anywhere has to be followed there."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.docs.pages import PAGES, ROOT

ON_CODE = [f"docs/{name}.md" for name in ("architecture", "development", "kernels", "kv-formats")]
EXAMPLES = {"NAME_reference"}  # that a reader replaces


@pytest.fixture(scope="module")
def words() -> set[str]:
    """Return all words of the source, of tests, and of their files' names."""
    endings = ("*.py", "Makefile", "*.toml", "*.yaml", "*.json")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *endings],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    paths = [ROOT / name for name in listed if name and not name.startswith("loadtest/results/")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())
    return set(re.findall(r"\w+", f"{text}\n{' '.join(listed)}"))


@pytest.mark.parametrize("page", ON_CODE)
def test_names_in_code_quotes_exist(page: str, words: set[str]) -> None:
    prose = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"[A-Za-z_]\w*", " ".join(re.findall(r"`([^`\n]+)`", prose))))
    assert not named - words - EXAMPLES


@pytest.mark.parametrize("page", PAGES)
def test_what_is_said_to_be_in_a_file_is_there(page: str) -> None:
    """Written as: Name, `folder/file.py`."""
    for name, path in re.findall(r"`?\b([A-Z]\w+|\w+_\w+)`?, `(\w+/[\w/]+\.py)`", PAGES[page]):
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8")), (name, path)


@pytest.mark.parametrize("page", PAGES)
def test_targets_of_make_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:`|^)make ([a-z][\w-]*)", PAGES[page], re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target

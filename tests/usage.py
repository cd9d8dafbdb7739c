"""Command lines that cannot be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire.cli import main


def usage_error(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that ends with 2; return what it says of the words, without the line's end."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"quire {words[0]}: ")
    return said

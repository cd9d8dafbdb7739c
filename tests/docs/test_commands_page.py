"""What docs/commands.md tells people to run does what it says, with the demo model."""

from __future__ import annotations

import sys

from tests.docs.pages import PAGES, block, run


def test_an_asyncio_program_streams() -> None:
    program = block("python", "AsyncLLM(", PAGES["docs/commands.md"])
    assert len(run([sys.executable, "-c", program]).split()) > 5

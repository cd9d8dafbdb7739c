"""What the columns of `quire bench` are."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

COLUMNS = {
    "workload": "its name, in loadtest/workloads.py",
    "out tok/s": "tokens that LLM.generate made a second, texts and all, in the median run",
    "in tok/s": "prompt tokens that it read a second",
    "req/s": "prompts that it answered a second",
    "seconds": "the whole of the run",
    "bound s": "the least that this device could take, by its bandwidth and its FLOP/s as measured here",
    "share": "the bound ÷ the seconds: 100% would be a device that never waits",
    "engine tok/s": "out tok/s of the engine stepped alone, without texts: the rest is the host's work",
    "steps": "how often the model ran",
    "schedule": "ms a step to choose what it computes",
    "launch": "ms a step to hand that to the device",
    "wait": "ms a step in which the host waited for the device",
    "commit": "ms a step to take in what was computed",
}


def explain(console: Console) -> None:
    """Print a line for each."""
    lines = Table.grid(padding=(0, 2))
    for name, meaning in COLUMNS.items():
        lines.add_row(name, meaning, style="dim")
    console.print(lines)

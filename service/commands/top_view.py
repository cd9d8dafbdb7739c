"""What `quire top` shows: the pool as the stream tells of it, and rates from the metrics."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from quire.engine.inspection.messages import ACTIVE, CACHED, COMPUTING, FREE, PINNED
from quire.service.inspector.updates import BlockUpdate, TableUpdate

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_BAR = 24  # characters
_COUNTERS = {
    "prompt tokens/s": "vllm:prompt_tokens_total",
    "output tokens/s": "vllm:generation_tokens_total",
    "blocks allocated/s": "quire_kv_block_allocations_total",
    "evictions/s": "quire_kv_block_evictions_total",
    "copies on write/s": "quire_kv_copy_on_write_total",
    "preemptions/s": "vllm:num_preemptions_total",
}


def read_metrics(text: str) -> dict[tuple[str, str], float]:
    """Return the samples of a Prometheus exposition by their names and labels as they stand."""
    return {(name, labels): float(value) for name, labels, value in _SAMPLE.findall(text)}


@dataclass
class Sequence:
    """A sequence and its blocks."""

    state: str
    key: str
    tokens: int
    blocks: list[int]
    num_host_blocks: int


@dataclass
class TopView:
    """All that is known of a server, and how it is drawn."""

    url: str
    update: BlockUpdate | None = None
    problem: str = "connecting"
    states: bytearray = field(default_factory=bytearray)
    sequences: dict[tuple[int, int], Sequence] = field(default_factory=dict)
    metrics: dict[tuple[str, str], float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    _metrics_at: float = 0.0

    def take(self, update: BlockUpdate) -> None:
        """Take what the stream has told."""
        self.problem = ""
        self.update = update
        if update.full:
            self.states = bytearray(update.states)
            self.sequences = {}
        else:
            for place, state in zip(np.frombuffer(update.places, np.int32), update.states, strict=True):
                self.states[place] = state
        for table in update.tables:
            self._take_table(table)
        for name in update.gone:
            self.sequences.pop(name, None)

    def _take_table(self, table: TableUpdate) -> None:
        name = table.request, table.index
        kept = self.sequences[name].blocks[: table.first] if name in self.sequences else []
        blocks = [*kept, *np.frombuffer(table.blocks, np.int32).tolist()]
        host = len(table.host_blocks) // 4
        self.sequences[name] = Sequence(table.state, table.key, table.tokens or 0, blocks, host)

    def take_metrics(self, text: str) -> None:
        """Take the metrics of now; rates are those since the last time."""
        before, self.metrics = self.metrics, read_metrics(text)
        now, then = time.monotonic(), self._metrics_at
        self._metrics_at = now
        if before:
            self.rates = {
                words: (self._total(name) - _total(before, name)) / max(now - then, 1e-9)
                for words, name in _COUNTERS.items()
            }

    def _total(self, name: str) -> float:
        return _total(self.metrics, name)

    # -- drawing ---------------------------------------------------------------------------------------

    def draw(self, height: int = 40) -> RenderableType:
        head = Text.assemble(("quire top ", "bold"), self.url, ("   q quits", "dim"))
        if self.problem:
            head.append(f"   {self.problem}", "bold red")
        if self.update is None:
            return head
        parts: list[RenderableType] = [head, self._memory(), self._rates()]
        keys = self._keys()
        if keys is not None:
            parts.append(keys)
        parts.append(self._requests(max(3, height - 14 - (0 if keys is None else keys.row_count + 2))))
        return Group(*parts)

    def _memory(self) -> Grid:
        update = self.update
        assert update is not None
        grid = Grid.grid(padding=(0, 2))
        for name, begin, size in (
            ("device", 0, update.num_blocks),
            ("host", update.num_blocks, update.num_host_blocks),
        ):
            if size:
                counts = Counter(self.states[begin : begin + size])
                used = counts[ACTIVE] + counts[COMPUTING]
                cached = counts[CACHED] + counts[PINNED]
                moving = size - used - cached - counts[FREE]
                words = f"{used:,} active  {cached:,} cached  {counts[FREE]:,} free"
                words += f"  {moving:,} moving" if moving else ""
                grid.add_row(name, _bar(used, cached, size), f"{words}  of {size:,}")
        return grid

    def _rates(self) -> Grid:
        grid = Grid.grid(padding=(0, 3))
        running, waiting, swapped = (
            sum(value for (name, labels), value in self.metrics.items() if _is(name, labels, state))
            for state in ("running", "waiting", "swapped")
        )
        grid.add_row(
            f"{running:.0f} running", f"{waiting:.0f} waiting", f"{swapped:.0f} swapped", self._hit_rate()
        )
        rates = [f"{words} {rate:,.0f}" for words, rate in self.rates.items()]
        for first in range(0, len(rates), 3):
            grid.add_row(*rates[first : first + 3])
        return grid

    def _hit_rate(self) -> str:
        found = {
            labels: value
            for (name, labels), value in self.metrics.items()
            if name == "quire_prefix_cache_tokens_total"
        }
        total = sum(found.values())
        if not total:
            return "prefix hits: no prompt yet"
        hits = total - sum(value for labels, value in found.items() if 'source="miss"' in labels)
        return f"prefix hits {hits / total:.1%} of {total:,.0f} prompt tokens"

    def _keys(self) -> Grid | None:
        """Return the keys that have requests with blocks, None where no keys are asked for."""
        requests, blocks = defaultdict(set), defaultdict(set)
        for (request, _), sequence in self.sequences.items():
            if sequence.key:
                requests[sequence.key].add(request)
                blocks[sequence.key].update(sequence.blocks)
        if not requests:
            return None
        grid = Grid(box=None, pad_edge=False, header_style="bold")
        for heading in ("key", "requests", "blocks"):
            grid.add_column(heading, justify="left" if heading == "key" else "right")
        for key in sorted(requests, key=lambda key: -len(blocks[key]))[:8]:
            grid.add_row(key, str(len(requests[key])), f"{len(blocks[key]):,}")
        return grid

    def _requests(self, most: int) -> Grid:
        by_request: defaultdict[int, list[Sequence]] = defaultdict(list)
        for (request, _), sequence in self.sequences.items():
            by_request[request].append(sequence)
        grid = Grid(box=None, pad_edge=False, header_style="bold")
        for heading in ("request", "state", "key", "sequences", "tokens", "blocks", "saved", "host"):
            grid.add_column(heading, justify="left" if heading in ("state", "key") else "right")
        rows = []
        for request, sequences in by_request.items():
            distinct = len({block for each in sequences for block in each.blocks})
            named = sum(len(each.blocks) for each in sequences)
            rows.append((distinct, request, sequences, named - distinct))
        for distinct, request, sequences, saved in sorted(rows, key=lambda row: (-row[0], row[1]))[:most]:
            tokens, host = (
                sum(values)
                for values in zip(*((s.tokens, s.num_host_blocks) for s in sequences), strict=True)
            )
            first = sequences[0]
            numbers = (len(sequences), tokens, distinct, saved, host)
            grid.add_row(str(request), first.state, first.key, *(f"{number:,}" for number in numbers))
        if len(rows) > most:
            grid.add_row(f"+{len(rows) - most}")
        return grid


def _bar(used: int, cached: int, size: int) -> Text:
    active = round(_BAR * used / size)
    kept = min(_BAR - active, round(_BAR * cached / size))
    return Text.assemble(
        ("█" * active, "cyan"), ("▓" * kept, "yellow"), ("░" * (_BAR - active - kept), "dim")
    )


def _is(name: str, labels: str, state: str) -> bool:
    return name == "quire_requests" and f'state="{state}"' in labels


def _total(metrics: dict[tuple[str, str], float], name: str) -> float:
    return sum(value for (known, _), value in metrics.items() if known == name)

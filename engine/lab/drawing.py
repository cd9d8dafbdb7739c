"""A pool to play with, drawn for a notebook."""

from __future__ import annotations

from html import escape

from quire.engine.lab.view import LabBlock, LabPool

_COLOURS = {"active": "#12877a", "cached": "#e0a445", "free": "#e4e8e5"}
_INKS = {"active": "#ffffff", "cached": "#1a201e", "free": "#69746f"}
_MOST_BLOCKS = 1024  # that are drawn: more would be slower to show than they are worth


def draw(pool: LabPool) -> str:
    """Return HTML: a cell for each block with its reference count, the tables, and the numbers."""
    shown = pool.blocks[:_MOST_BLOCKS]
    cells = "".join(_cell(number, block, pool.block_size) for number, block in enumerate(shown))
    left = len(pool.blocks) - len(shown)
    rest = f"<div>and {left:,} blocks more</div>" if left else ""
    tables = "".join(
        f"<div><b>{each.id}</b>: {each.tokens} tokens, "
        f"{'host ' if each.host_table else ''}blocks {escape(str(each.host_table or each.block_table))}</div>"
        for each in pool.sequences
    )
    numbers = (
        f"{pool.used} blocks used, {pool.naive} without sharing · {pool.cached} cached · {pool.free} free · "
        f"{pool.host_used} in host memory · {pool.copies} copies · fragmentation {pool.fragmentation:.0%}"
    )
    grid = "display:grid;grid-template-columns:repeat(16,2.1em);gap:2px;margin:.4em 0"
    return (
        f'<div style="font:13px ui-monospace,monospace"><div style="{grid}">{cells}</div>{rest}'
        f"<div>{numbers}</div>{tables}<div>{escape(pool.said)}</div></div>"
    )


def _cell(number: int, block: LabBlock, block_size: int) -> str:
    title = (
        f"block {number}: {block.state}, {block.references} references, {block.tokens} of {block_size} tokens"
    )
    style = (
        f"background:{_COLOURS[block.state]};color:{_INKS[block.state]};border-radius:3px;"
        "text-align:center;line-height:1.9em"
    )
    return f'<span title="{title}" style="{style}">{block.references or "·"}</span>'

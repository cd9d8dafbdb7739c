"""The page's modules by themselves, run in the browser that will run them."""

import random

import pytest
from playwright.sync_api import Page

# Runs a stream of bytes through readEvents(), once for each way of cutting it.
READ_EVENTS = """async ([bytes, ways]) => {
    const { readEvents } = await import("/static/sse.js");
    return Promise.all(ways.map(async (cuts) => {
        const edges = [0, ...cuts, bytes.length];
        const pieces = edges.slice(1).map((end, i) => new Uint8Array(bytes.slice(edges[i], end)));
        const body = new ReadableStream({
            start(controller) {
                for (const piece of pieces) controller.enqueue(piece);
                controller.close();
            },
        });
        const events = [];
        for await (const event of readEvents(body)) events.push([event.event, event.data]);
        return events;
    }));
}"""

STREAM = (
    ": comment\n\nevent: note\ndata: a\ndata:b\nid: 7\nretry: 10\n\ndata\n\ndata:  two spaces\r\n\r\n"
    "data: Grüße 🌍\r\rnonsense: x\n\nevent: empty\n\ndata: last\n\ndata: incomplete"
)
EVENTS = [
    ["note", "a\nb"],
    ["message", ""],
    ["message", " two spaces"],
    ["message", "Grüße 🌍"],
    ["message", "last"],
]


def test_events_do_not_depend_on_where_the_bytes_are_cut(blank_page: Page) -> None:
    stream = list(STREAM.encode())
    ways = [*([cut] for cut in range(len(stream) + 1)), list(range(1, len(stream)))]
    assert blank_page.evaluate(READ_EVENTS, [stream, ways]) == [EVENTS] * len(ways)


# The rendering of a text as [tag, children...] with text as strings; captions of code blocks are left out.
RENDER = """async (texts) => {
    const { Prose } = await import("/static/prose.js");
    const tree = (node) => node.nodeType === Node.TEXT_NODE
        ? node.data
        : [node.localName, ...[...node.childNodes].filter((n) => n.localName !== "figcaption").map(tree)];
    const prose = new Prose();
    for (const text of texts) prose.update(text);
    prose.node.normalize();
    return tree(prose.node).slice(1);
}"""

CASES = {
    "one\ntwo\n\nthree": [["p", "one\ntwo"], ["p", "three"]],
    "a **b** `c**` *d* __e__ _f_": [
        [
            "p",
            "a ",
            ["strong", "b"],
            " ",
            ["code", "c**"],
            " ",
            ["em", "d"],
            " ",
            ["strong", "e"],
            " ",
            ["em", "f"],
        ]
    ],
    "***both*** and **a *b* c**": [
        ["p", ["strong", ["em", "both"]], " and ", ["strong", "a ", ["em", "b"], " c"]]
    ],
    "snake_case_name, 2 * 3 * 4, **open, `tick": [["p", "snake_case_name, 2 * 3 * 4, **open, `tick"]],
    r"\*not\* \`code\`": [["p", "*not* `code`"]],
    "``a ` b``": [["p", ["code", "a ` b"]]],
    "# One\n### Three ##\ntext": [["h3", "One"], ["h5", "Three"], ["p", "text"]],
    "- a\n- b\n  - c\n  more\n\n- d": [
        ["ul", ["li", "a"], ["li", "b", ["ul", ["li", "c\nmore"]]], ["li", "d"]]
    ],
    "3. a\n4. b": [["ol", ["li", "a"], ["li", "b"]]],
    "text\n* item\n1. other": [["p", "text"], ["ul", ["li", "item"]], ["ol", ["li", "other"]]],
    "1. do:\n   ```sh\n   ls\n     -l\n   ```\n2. done": [
        ["ol", ["li", "do:", ["figure", ["pre", ["code", "ls\n  -l"]]]], ["li", "done"]]
    ],
    "```\na\n\n# b\n": [["figure", ["pre", ["code", "a\n\n# b\n"]]]],
    "````\n```\n````\nafter": [["figure", ["pre", ["code", "```"]]], ["p", "after"]],
    "> a\n> - b\n\n---": [["blockquote", ["p", "a"], ["ul", ["li", "b"]]], ["hr"]],
    "<b>&amp;</b>": [["p", "<b>&amp;</b>"]],
}


@pytest.mark.parametrize("text", CASES)
def test_markdown(blank_page: Page, text: str) -> None:
    assert blank_page.evaluate(RENDER, [text]) == CASES[text]


def test_markdown_that_grows_looks_like_markdown_at_once(blank_page: Page) -> None:
    pick = random.Random(0)
    pieces = [
        "a",
        "b c",
        " ",
        "\n",
        "\n\n",
        "- ",
        "  - ",
        "1. ",
        "# ",
        "> ",
        "```",
        "```py\n",
        "`",
        "*",
        "**",
        "_",
        "\\",
        "<i>",
    ]
    for _ in range(60):
        text = "".join(pick.choices(pieces, k=25))
        growing = [text[:end] for end in range(1, len(text) + 1)]
        assert blank_page.evaluate(RENDER, growing) == blank_page.evaluate(RENDER, [text]), repr(text)


@pytest.mark.parametrize(
    "piece", ["*a ", "**a ", "_a", "`", "`a``", "> ", "- ", "  - a\n", "[", "***", "\n- \n", "1. "]
)
def test_markdown_takes_any_text_in_stride(blank_page: Page, piece: str) -> None:
    """Nothing that a model repeats may hang the page: 200 kB would take hours if a rule were quadratic."""
    kept = blank_page.evaluate(
        """async (text) => {
            const { Prose } = await import("/static/prose.js");
            const prose = new Prose();
            prose.update(text);
            return prose.node.childNodes.length;
        }""",
        piece * (200_000 // len(piece)),
    )
    assert kept > 0


def test_every_state_that_has_blocks_has_a_cell(blank_page: Page) -> None:
    numbers = [0, 1, 2, 63, 64, 999, 100_000]
    cases = [[a, c, f] for a in numbers for c in numbers for f in numbers if a + c + f > 0]
    shares = blank_page.evaluate(
        """async (cases) => {
            const { shareCells } = await import("/static/kvbar.js");
            return cases.map(([active, cached, free]) => {
                const cells = Math.min(active + cached + free, 128);
                const s = shareCells({ active, cached, free }, cells);
                return [cells, s.active, s.cached, s.free];
            });
        }""",
        cases,
    )
    for blocks, (cells, *share) in zip(cases, shares, strict=True):
        assert sum(share) == cells, blocks
        if cells >= 3:
            assert all((n > 0) == (s > 0) for n, s in zip(blocks, share, strict=True)), (blocks, share)

"""The page's modules by themselves, run in the browser that will run them."""

import pytest
from playwright.sync_api import Page
from stub_server import StubServer

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


# Leaves a stream at its first event. Then it ends, or goes on: how often is it cancelled?
LEAVE_EVENTS = """async () => {
    const { readEvents } = await import("/static/sse.js");
    const leave = (ends) => new Promise((resolve) => {
        let ended = false;
        const body = new ReadableStream({
            start(controller) { controller.enqueue(new TextEncoder().encode("data: [DONE]\\n\\n")); },
            async pull(controller) {
                if (ended) return new Promise(() => {});
                ended = true;
                await new Promise((go) => setTimeout(go));
                if (!ends) return controller.enqueue(new Uint8Array());
                controller.close();
                setTimeout(() => resolve("read to its end"));
            },
            cancel() { resolve("cancelled"); },
        }, { highWaterMark: 0 });
        (async () => { for await (const event of readEvents(body)) break; })();
    });
    return [await leave(true), await leave(false)];
}"""


def test_a_stream_that_is_left_is_cancelled_unless_it_ends_soon(blank_page: Page) -> None:
    assert blank_page.evaluate(LEAVE_EVENTS) == ["read to its end", "cancelled"]


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


def test_a_chat_is_seen_however_large_the_pool_is(blank_page: Page) -> None:
    """[active, cached, free] of the pool, [active, shared, cached] of the chat, and squares of each kind."""
    cases = {
        "as many squares as blocks": ([12, 20, 32], [5, 2, 4]),
        "what is used, and room": ([3, 9, 21_000], [3, 1, 2]),
        "a square for several": ([200, 300, 20_000], [10, 3, 0]),
        "a full pool": ([900, 124, 0], [1, 0, 1]),
    }
    found = blank_page.evaluate(
        """async (cases) => {
            const { cellsOf, scaleOf } = await import("/static/kvbar.js");
            return cases.map(([[active, cached, free], [mine, shared, kept]]) => {
                const blocks = { active, cached, free };
                const cells = cellsOf(blocks, { active: mine, shared, cached: kept });
                const count = (name) => cells.filter((each) => each === name).length;
                const kinds = ["active own shared", "active own", "active", "cached own", "cached", "free"];
                return [scaleOf(blocks), ...kinds.map(count)];
            });
        }""",
        list(cases.values()),
    )
    assert dict(zip(cases, found, strict=True)) == {
        "as many squares as blocks": [1, 2, 3, 7, 4, 16, 32],
        "what is used, and room": [1, 1, 2, 0, 2, 7, 116],
        "a square for several": [8, 1, 1, 23, 0, 38, 65],
        "a full pool": [8, 0, 1, 111, 1, 15, 0],
    }


@pytest.mark.parametrize("path", ["/", "/blocks", "/blocks/lab"])
def test_all_modules_of_a_page_are_fetched_at_once(blank_page: Page, stub: StubServer, path: str) -> None:
    """Its links name each one that is there once it is loaded, but for theme.js and its own."""
    blank_page.goto(stub.url + path, wait_until="load")
    fetched, linked = blank_page.evaluate(
        """() => [
            performance.getEntriesByType("resource").map(({ name }) => name).filter((url) => /js$/.test(url)),
            [...document.querySelectorAll("link[rel=modulepreload]")].map(({ href }) => href),
        ]"""
    )
    own = {"/": "main.js", "/blocks": "blocks/inspector.js", "/blocks/lab": "blocks/lab.js"}[path]
    assert sorted(fetched) == sorted([*linked, f"{stub.url}/static/theme.js", f"{stub.url}/static/{own}"])


# What a tab has of an answer that another tab continues.
CONTINUED_ELSEWHERE = """async () => {
    const { Conversation } = await import("/static/conversation.js");
    const copyOf = (conversation) => Conversation.from(JSON.parse(JSON.stringify(conversation)));
    const ours = new Conversation();
    ours.ask("Count");
    const [answer] = ours.beginAnswers(["first"]);
    Object.assign(answer, { content: "One, ", status: "length", finishReason: "length", at: "9" });
    const theirs = copyOf(ours);
    ours.continueAnswer(answer, "second");
    theirs.merge(copyOf(ours));
    const { stream, status, content, at, finishReason } = theirs.branch.at(-1);
    return [stream, status, content, at, finishReason];
}"""


def test_a_continued_answer_is_picked_up_from_the_start_of_its_new_stream(blank_page: Page) -> None:
    assert blank_page.evaluate(CONTINUED_ELSEWHERE) == ["second", "streaming", "One, ", None, None]


# Six want a line; the fifth gives up, the first ends.
SIX = """async (locks) => {
    if (!locks) Object.defineProperty(navigator, "locks", { value: undefined, configurable: true });
    const { lines } = await import(`/static/lines.js?${locks}`);
    const told = [];
    const ends = [];
    const aborts = [];
    const run = (i) => {
        aborts[i] = new AbortController();
        const work = () => new Promise((resolve) => { told.push(`${i} runs`); ends[i] = resolve; });
        const waits = (queued) => told.push(`${i} ${queued ? "waits" : "goes on"}`);
        return lines.run(work, aborts[i].signal, waits).catch(({ message }) => told.push(`${i} ${message}`));
    };
    const until = async (count) => {
        while (told.length < count) await new Promise((next) => setTimeout(next));
    };
    const all = [];
    for (let i = 0; i < 6; i += 1) {
        all.push(run(i));
        await until(i + 1);
    }
    aborts[4].abort(new Error("leaves"));
    await all[4];
    ends[0]();
    await until(10);
    for (const i of [1, 2, 3, 5]) ends[i]();
    await Promise.all(all);
    all.push(run(6));
    await until(11);
    ends[6]();
    await all[6];
    delete navigator.locks;
    return told;
}"""


@pytest.mark.parametrize("locks", [True, False], ids=["shared with other windows", "without locks"])
def test_lines_are_taken_in_turn(blank_page: Page, locks: bool) -> None:
    assert blank_page.evaluate(SIX, locks) == [
        *("0 runs", "1 runs", "2 runs", "3 runs"),
        *("4 waits", "5 waits"),
        *("4 goes on", "4 leaves"),
        *("5 goes on", "5 runs"),
        "6 runs",
    ]

"""The live pool in a real browser, on the real server around an engine that tells what the test says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from page_console import Console
from playwright.sync_api import Browser, Page, expect
from test_accessibility import assert_accessible

from quire.engine.inspection.messages import (
    ACTIVE,
    CACHED,
    BlockAnswer,
    BlockQuestion,
    Holder,
    PoolAnswer,
    PoolQuestion,
    PrefixAnswer,
    PrefixNode,
    PrefixQuestion,
    Table,
)
from quire.engine.memory.move_kinds import ALLOCATE, EVICT, NOBODY, STEP
from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers
from tests.service.live import Live
from tests.service.pool_answers import Noted, after_requests, exactly

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


def int32(*numbers: int) -> bytes:
    return np.array(numbers, np.int32).tobytes()


def pool(tables: dict[int, list[int]], cached: list[int], moves: list[Noted], at: float) -> PoolAnswer:
    """64 blocks, and sequences of request 7 by index."""
    states, references = bytearray(64), bytearray(64)
    for block in cached:
        states[block] = CACHED
    for blocks in tables.values():
        for block in blocks:
            states[block], references[block] = ACTIVE, references[block] + 1
    rows = [
        Table(7, index, "running", 16 * len(blocks), int32(*blocks), b"") for index, blocks in tables.items()
    ]
    return exactly(PoolAnswer(at, 0.0, 64, 0, 16, bytes(states), bytes(references), rows, 0), moves)


START = pool({0: [0, 1, 2], 1: [0, 1, 3]}, [10, 11], [], 1000.0)
GROWN = pool({0: [0, 1, 2, 4], 1: [0, 1, 3]}, [10], [
    (STEP, 5, 0, 0, []), (ALLOCATE, 7, 0, 3, [4]), (EVICT, NOBODY, 0, 0, [11])
], 1001.0)  # fmt: skip


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    server = Live(Tokenizer(tiny_tokenizers.byte_level()))
    yield server
    assert server.end() == 0


@pytest.fixture
def visit(browser: Browser, live: Live) -> Iterator[Callable[..., Page]]:
    console, contexts = Console(), []

    def open_(start: PoolAnswer = START, active: str = "4", **options: Any) -> Page:
        tell(live, start)
        contexts.append(browser.new_context(reduced_motion="reduce", **options))
        page = contexts[-1].new_page()
        console.listen(page)
        page.goto(f"{live.url}/blocks")
        expect(count(page, "active")).to_have_text(active)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert console.problems == []


def tell(live: Live, answer: PoolAnswer) -> None:
    live.call(lambda: live.engine.answers.update({PoolQuestion: answer}))


def count(page: Page, state: str) -> Any:
    return page.locator("#counts div", has=page.get_by_text(state, exact=True)).locator("dd")


def show(page: Page, block: int) -> None:
    page.get_by_label("Block", exact=True).fill(str(block))
    page.get_by_role("button", name="Show", exact=True).click()


def test_a_block_tells_who_holds_it(visit: Callable[..., Page], live: Live) -> None:
    page = visit()
    holders = [Holder(7, 0, 1), Holder(7, 1, 1)]
    tokens = live.server.state.tokenizer.encode("the text of it", add_special_tokens=False)  # type: ignore[union-attr]
    live.call(
        lambda: live.engine.answers.update(
            {BlockQuestion: BlockAnswer(ACTIVE, 2, holders, 16, tokens, "ab12")}
        )
    )
    show(page, 1)
    card = page.get_by_role("region", name="The block")
    expect(card).to_contain_text("request 7.0 as its block 1, request 7.1 as its block 1")
    expect(card.locator("pre")).to_have_text("the text of it")
    live.call(
        lambda: live.engine.answers.update(
            {BlockQuestion: BlockAnswer(ACTIVE, 1, holders[:1], 32, None, "cd34")}
        )
    )
    show(page, 2)
    expect(card).to_contain_text("cd34")
    expect(card).to_contain_text("Its tokens are another key's.")
    show(page, 64)
    expect(page.locator("#block-number:invalid")).to_be_focused()
    expect(card).to_contain_text("Block 2")


def test_pointing_at_the_map_finds_the_block(visit: Callable[..., Page]) -> None:
    page = visit()
    canvas = page.locator("#map")
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(page.locator("#block-card h2")).to_have_text(re.compile(r"Block \d+"))
    expect(canvas).to_have_accessible_name(re.compile("58 free, 4 active, 2 cached"))


def test_a_requests_tables_show_what_is_shared(visit: Callable[..., Page], live: Live) -> None:
    page = visit()
    button = page.get_by_role("button", name=re.compile("Request 7"))
    expect(button).to_contain_text("2 sequences · 4 blocks · 2 saved by sharing")
    button.click()
    expect(page.locator("#tables")).to_contain_text("Sequence 1: 48 tokens, shares 2 blocks with sequence 0")
    assert page.locator("#tables .branch").first.locator(".chip").all_text_contents() == ["0", "1", "2"]
    assert_accessible(page)
    tell(live, pool({0: [0, 2], 1: [0, 3]}, [10, 11], [], 1001.0))
    expect(page.locator("#tables")).to_contain_text("All 2 sequences begin with the same 1 block;")
    expect(page.locator("#tables")).to_contain_text("Sequence 1: 32 tokens, shares 1 block with sequence 0")


def test_time_goes_back_and_the_trace_can_be_saved(visit: Callable[..., Page], live: Live) -> None:
    page = visit(timezone_id="Asia/Tokyo", locale="en-GB")
    tell(live, GROWN)
    expect(count(page, "active")).to_have_text("5")
    expect(page.locator("#moves time").first).to_have_text(re.compile(r"^09:1[67]:"))
    expect(page.locator("#moves")).to_contain_text("allocate block 4 for request 7")
    tell(live, pool({}, [10], [], 1002.0))
    expect(count(page, "active")).to_have_text("0")
    back = page.get_by_role("button", name="One step back")
    while count(page, "active").text_content() != "5":
        back.click()
    expect(count(page, "cached")).to_have_text("1")
    expect(page.locator("#moment")).to_contain_text("09:16:41.000")
    while count(page, "active").text_content() != "4":
        back.click()
    expect(page.get_by_role("button", name=re.compile("Request 7"))).to_contain_text("4 blocks")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    trace = json.loads(download.value.path().read_text())
    kinds = {event["cat"] for event in trace["traceEvents"] if event["ph"] == "i"}
    assert kinds == {"allocate", "evict"}
    assert {"X", "C", "M"} <= {event["ph"] for event in trace["traceEvents"]}
    page.get_by_role("button", name="Live", exact=True).click()
    expect(count(page, "active")).to_have_text("0")


def test_moves_from_before_the_page_was_open_are_gone_through_one_by_one(
    visit: Callable[..., Page], live: Live
) -> None:
    """Of requests that had ended by then: no block is in use any more."""
    page = visit(start=after_requests(1, num_blocks=64), active="0")
    moment, moves = page.locator("#moment"), page.locator("#moves li")
    expect(moves.first).to_contain_text("give back block")
    back, on = (page.get_by_role("button", name=f"One step {way}") for way in ("back", "on"))
    page.get_by_label("Moment").fill("0")
    expect(moment).to_contain_text("moment 0 of")
    expect(count(page, "free")).to_have_text("64")
    for active in ("1", "2", "3"):
        on.click()
        expect(count(page, "active")).to_have_text(active)
        expect(moves.first).to_contain_text(re.compile("allocate block . for request 0"))
    back.click()
    expect(count(page, "active")).to_have_text("2")


def test_the_prefix_tree_lists_runs(visit: Callable[..., Page], live: Live) -> None:
    page = visit()
    nodes = [
        PrefixNode(-1, int32(10, 11), 0, False, 3, 1, "aa"),
        PrefixNode(0, int32(0), 1, True, 2, 0, "bb"),
    ]
    live.call(lambda: live.engine.answers.update({PrefixQuestion: PrefixAnswer(0.0, nodes, 0, 5, 1)}))
    page.get_by_label("Colour by").select_option("prefix")
    expect(page.locator("#prefix-sum")).to_contain_text("1 text in 3 blocks")
    rows = page.locator("#prefixes li")
    expect(rows.first).to_contain_text("2 blocks · 3 hits · 1 evicted after it")
    expect(rows.last).to_contain_text("1 block · 2 hits · 1 in use · pinned")


def test_a_finger_hits_everything_on_a_phone(visit: Callable[..., Page]) -> None:
    page = visit(**PHONE)
    page.get_by_role("button", name=re.compile("Request 7")).click()
    for target in page.locator("button:visible, a:visible, select:visible, input:visible").all():
        box = target.bounding_box()
        assert box is not None and min(box["width"], box["height"]) >= 44, target
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.locator("#map").tap(position={"x": 150, "y": 150})
    expect(page.locator("#block-card h2")).to_have_text(re.compile(r"Block \d+"))


def test_the_map_waits_while_answers_in_other_windows_take_the_lines(visit: Callable[..., Page]) -> None:
    page = visit()
    other = page.context.new_page()
    other.goto(page.url.replace("/blocks", "/static/storage.js"))
    other.evaluate(
        """() => {
            const forever = () => new Promise(() => {});
            for (const i of [0, 1, 2, 3]) navigator.locks.request(`quire.line.${i}`, forever);
        }"""
    )
    page.reload()
    expect(page.get_by_role("status").first).to_have_text("waiting for answers in other windows")
    other.close()
    expect(page.get_by_role("status").first).to_have_text("live")
    expect(count(page, "active")).to_have_text("4")


@pytest.mark.parametrize("path", ["/blocks", "/blocks/lab"])
def test_without_a_key_it_waits_to_be_given_one(browser: Browser, path: str) -> None:
    server = Live(Tokenizer(tiny_tokenizers.byte_level()), api_keys=("secret",))
    server.call(lambda: server.engine.answers.update({PoolQuestion: START}))
    page = browser.new_page(color_scheme="dark")
    page.goto(server.url + path)
    dialog = page.get_by_role("dialog")
    expect(dialog).to_have_css("border-radius", "14px")
    expect(page.locator("#api-key")).to_be_focused()
    page.keyboard.press("Escape")
    locked = page.get_by_role("region", name="API key")
    expect(locked).to_contain_text("This server asks for an API key")
    assert_accessible(page)
    locked.get_by_role("button", name="Enter the key").click()
    page.locator("#api-key").fill("secret")
    page.keyboard.press("Enter")
    expect(locked).to_be_hidden()
    expect(page.locator("#counts dd, #map li").first).to_be_visible()
    page.context.close()
    assert server.end() == 0

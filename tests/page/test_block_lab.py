"""The block lab in a real browser, on the real server: each click is an operation on a pool of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from page_console import Console
from playwright.sync_api import Browser, Locator, Page, expect
from test_accessibility import assert_accessible

from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers
from tests.service.live import Live

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    server = Live(Tokenizer(tiny_tokenizers.byte_level()))
    yield server
    assert server.end() == 0


@pytest.fixture
def visit(browser: Browser, live: Live) -> Iterator[Callable[..., Page]]:
    console, contexts = Console(), []

    def open_(**options: Any) -> Page:
        contexts.append(browser.new_context(reduced_motion="reduce", **options))
        page = contexts[-1].new_page()
        console.listen(page)
        page.goto(f"{live.url}/blocks/lab")
        expect(page.locator("#map li")).to_have_count(64)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert console.problems == []


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def figure(page: Page, name: str) -> Locator:
    return page.locator(f"#{name}")


def test_buttons_of_a_sequence_run_the_block_manager(visit: Callable[..., Page], live: Live) -> None:
    page = visit()
    press(page, "New sequence")
    append = page.get_by_role("button", name="Append 64, sequence 1")
    at = append.evaluate("(button) => button.offsetTop")
    press(page, "Append 16, sequence 1")
    expect(page.locator("#path")).to_contain_text("BlockManager.grow")
    press(page, "Append 1, sequence 1")
    press(page, "Fork, sequence 1")
    expect(figure(page, "used")).to_have_text("2")
    expect(page.get_by_role("button", name="Fork, sequence 1")).to_be_focused()
    assert append.evaluate("(button) => button.offsetTop") == at
    expect(figure(page, "naive")).to_have_text("4")
    expect(page.locator("#map li").first.locator("b")).to_have_text("2")
    press(page, "Write to the last block, sequence 2")
    expect(page.locator("#path")).to_contain_text("BlockManager.copy_on_write")
    expect(figure(page, "copies")).to_have_text("1")
    press(page, "Swap out, sequence 2")
    expect(figure(page, "host")).to_have_text("2")
    expect(page.get_by_role("article", name="Sequence 2")).to_contain_text("host blocks")
    press(page, "Free, sequence 1")
    expect(figure(page, "used")).to_have_text("0")
    live.call(live.server.state.lab_pools.close)
    press(page, "Evict")
    expect(page.locator("#said")).to_contain_text("or the server has started anew. This is a new one.")
    page.goto("about:blank")
    live.wait(lambda: len(live.server.state.lab_pools) == 0)


def test_the_lessons_beams_and_why_they_take_eight(visit: Callable[..., Page]) -> None:
    page = visit()
    press(page, "Four beams of a 64-token prompt and 10 tokens")
    expect(figure(page, "used")).to_have_text("8")
    assert_accessible(page)
    expect(page.locator("#why")).to_contain_text("The lesson says 12 blocks against 16. It really takes 8")
    page.get_by_label("Tokens a beam").fill("17")
    press(page, "Four beams of a 64-token prompt and 17 tokens")
    expect(figure(page, "used")).to_have_text("12")
    expect(page.locator("#why")).to_contain_text("12 is right from 17 to 32 tokens")


def test_an_append_without_room_says_so(visit: Callable[..., Page]) -> None:
    page = visit()
    page.get_by_label("Block size").fill("1")
    press(page, "Start over")
    press(page, "New sequence")
    press(page, "Append 64, sequence 1")
    press(page, "Append 1, sequence 1")
    expect(page.get_by_role("status").first).to_contain_text("Nothing has changed: 65 tokens are more than")
    expect(figure(page, "used")).to_have_text("64")


def test_a_finger_hits_every_button(visit: Callable[..., Page]) -> None:
    page = visit(**PHONE)
    press(page, "New sequence")
    expect(page.get_by_role("article")).to_have_count(1)
    for target in page.locator("button:visible, a:visible, select:visible, input:visible").all():
        box = target.bounding_box()
        assert box is not None and min(box["width"], box["height"]) >= 44, target
    assert page.evaluate("document.documentElement.scrollWidth") == 390

"""A chat of many messages: its end is there at once, and the rest soon after, above it."""

import time
from collections.abc import Callable

from chatting import ask, last_answer, prose, said
from playwright.sync_api import Page, expect
from stub_server import StubServer

# Frames come when the test lets them.
HELD = """
    const frame = window.requestAnimationFrame.bind(window);
    let held = [];
    window.requestAnimationFrame = (draw) => (held ? held.push(draw) : frame(draw));
    window.release = () => {
        held.forEach((draw) => frame(draw));
        held = null;
    };
"""
TOP = "(node) => node.getBoundingClientRect().top"
HEIGHT = "scroller.scrollHeight"
IS_DRAWN = "(node) => node.querySelector('p').checkVisibility({ contentVisibilityAuto: true })"


def chat(pairs: int) -> dict[str, object]:
    messages: list[dict[str, object]] = []
    for i in range(pairs):
        parent = f"a{i - 1}" if i else None
        question = {"id": f"q{i}", "parent": parent, "role": "user", "content": f"Question {i}"}
        text = f"Answer {i}.\n\n" + "Some more words of it. " * 60 + f"\n\n```python\nprint({i})\n```\n"
        messages += [
            {**question, "status": "done"},
            {"id": f"a{i}", "parent": f"q{i}", "role": "assistant", "content": text, "status": "done"},
        ]
    return {"id": "long", "updated": int(time.time() * 1000), "leaf": f"a{pairs - 1}", "messages": messages}


def store(page: Page, stored: dict[str, object]) -> None:
    page.evaluate("(chat) => localStorage.setItem(`quire.chat.${chat.id}`, JSON.stringify(chat))", stored)


def test_its_end_is_built_first_and_nothing_moves_when_the_rest_comes(
    open_tab: Callable[..., Page], page: Page, stub: StubServer
) -> None:
    store(page, chat(60))
    tab = open_tab(HELD)
    answers, asked = tab.locator(".answer"), tab.locator(".asked")
    expect(prose(tab)).to_contain_text("Answer 59.")
    expect(answers).to_have_count(6)
    expect(answers.last.locator(".hljs-built_in")).to_be_in_viewport()
    read = answers.nth(1).element_handle()  # whatever comes before it
    assert read is not None
    read.evaluate("(node) => node.scrollIntoView()")
    expect(tab.get_by_role("button", name="Go to the newest text")).to_be_visible()
    before = read.evaluate(TOP)
    tab.evaluate("release()")
    expect(asked).to_have_text([f"Question {i}" for i in range(60)])
    expect(answers).to_have_count(60)
    assert abs(read.evaluate(TOP) - before) <= 1
    height = tab.evaluate(HEIGHT)
    tab.wait_for_function(f"() => !({IS_DRAWN})(document.querySelector('.answer'))")
    assert tab.evaluate(HEIGHT) == height
    tab.evaluate("scroller.scrollTop = 0")
    tab.wait_for_function(f"() => ({IS_DRAWN})(document.querySelector('.answer'))")
    expect(asked.first).to_be_in_viewport()
    assert tab.evaluate(HEIGHT) == height


def test_it_goes_on_before_all_of_it_is_built(
    open_tab: Callable[..., Page], page: Page, stub: StubServer
) -> None:
    store(page, chat(20))
    tab = open_tab(HELD)
    stub.scripts = [said("Done.")]
    ask(tab, "One more")
    expect(last_answer(tab).locator(".stats")).to_contain_text("cached")
    expect(tab.locator(".asked")).to_have_text([*(f"Question {i}" for i in range(14, 20)), "One more"])
    tab.evaluate("release()")
    expect(tab.locator(".asked")).to_have_text([*(f"Question {i}" for i in range(20)), "One more"])
    expect(prose(tab)).to_have_text("Done.")
    assert len(stub.requests[0]["messages"]) == 41


def test_another_version_of_an_early_message_is_shown_where_the_reader_is(
    open_tab: Callable[..., Page], page: Page
) -> None:
    stored = chat(20)
    messages = stored["messages"]
    assert isinstance(messages, list)
    text = "In other words. " * 400
    other = {"id": "b0", "parent": "q0", "role": "assistant", "content": text, "status": "done"}
    below = {"id": "p1", "parent": "b0", "role": "user", "content": "Why other words?", "status": "done"}
    stored["messages"] = [messages[0], other, below, *messages[1:]]
    store(page, stored)
    tab = open_tab()
    expect(tab.locator(".answer")).to_have_count(20)
    tab.evaluate("scroller.scrollTop = 0")
    versions = tab.get_by_role("group", name="Versions").first
    expect(versions).to_contain_text("2 / 2")
    first = tab.locator(".asked").first.element_handle()
    assert first is not None
    earlier = versions.get_by_role("button", name="Earlier version")
    earlier.focus()
    before = tab.evaluate("scroller.scrollTop")
    earlier.press("Enter")
    expect(tab.locator(".answer").first).to_contain_text("In other words.")
    expect(tab.locator(".asked")).to_have_text(["Question 0", "Why other words?"])
    assert tab.evaluate("scroller.scrollTop") == before
    assert first.evaluate("(node) => node.isConnected")
    expect(tab.get_by_role("button", name="Later version")).to_be_focused()

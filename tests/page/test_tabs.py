"""One chat in several tabs: neither loses what the other wrote, nor brings back what the other deleted."""

import threading
from collections.abc import AsyncIterator, Callable

from chatting import ask, chats, endless, last_answer, prose, said
from playwright.sync_api import Page, expect
from stub_server import StubServer, api_error, block_counts, delta, ending, opened

from tests.waiting import until

SECONDS = 20
OpenTab = Callable[..., Page]
# A tab to which the browser has not yet told what others stored.
DEAF = 'window.addEventListener("storage", (event) => event.stopImmediatePropagation());'


def begin(page: Page, stub: StubServer) -> None:
    stub.scripts = [said("Answer.")]
    ask(page, "Question")
    expect(prose(page)).to_have_text("Answer.")


def test_each_tab_shows_and_keeps_what_the_other_adds(
    page: Page, open_tab: OpenTab, stub: StubServer
) -> None:
    begin(page, stub)
    other = open_tab()
    expect(other.locator(".asked")).to_have_text(["Question"])
    asked = ["Question"]
    for tab, text in ((other, "From the other"), (page, "From the first"), (other, "Once more")):
        stub.scripts = [said(f"{text}: yes.")]
        ask(tab, text)
        asked.append(text)
        for shown in (page, other):
            expect(shown.locator(".asked")).to_have_text(asked)
            expect(prose(shown)).to_have_text(f"{text}: yes.")
            expect(last_answer(shown).locator(".stats")).to_contain_text("cached")
    sent = [message["content"] for message in stub.requests[-1]["messages"] if message["role"] == "user"]
    assert sent == asked
    for tab in (page, other):
        tab.reload()
        expect(tab.locator(".asked")).to_have_text(asked)
        expect(tab.get_by_role("group", name="Versions")).to_have_count(0)


def gated(go_on: threading.Event, before: str, after: str) -> Callable[[], AsyncIterator[str]]:
    """An answer in two halves, the second once the test wants it."""

    async def script() -> AsyncIterator[str]:
        if before:
            yield delta(before)
        await opened(go_on)
        yield delta(after) + ending(21, 7, 16)

    return script


def test_what_two_tabs_ask_at_once_are_two_branches(page: Page, open_tab: OpenTab, stub: StubServer) -> None:
    begin(page, stub)
    other = open_tab(DEAF)
    expect(other.locator(".asked")).to_have_text(["Question"])
    go_on = threading.Event()
    stub.scripts = [gated(go_on, "", "Of one."), said("Of two.")]
    ask(page, "One")
    expect(last_answer(page)).to_have_attribute("aria-busy", "true")
    ask(other, "Two")
    expect(prose(other)).to_have_text("Of two.")
    go_on.set()
    expect(prose(page)).to_have_text("Of one.")
    expect(page.locator(".question").last).to_contain_text("/ 2")
    for tab in (page, other):
        tab.reload()
        seen = set()
        versions = tab.locator(".question").last.get_by_role("group", name="Versions")
        for at, way in ((1, "Later"), (2, "Earlier")):
            if tab is other and at == 1 and "2 / 2" in versions.inner_text():
                versions.get_by_role("button", name="Earlier version").click()
            expect(versions).to_contain_text(f"{at} / 2")
            seen.add((tab.locator(".asked").last.inner_text(), prose(tab).inner_text()))
            versions.get_by_role("button", name=f"{way} version").click()
        assert seen == {("One", "Of one."), ("Two", "Of two.")}


def test_a_growing_answer_grows_in_every_tab(page: Page, open_tab: OpenTab, stub: StubServer) -> None:
    begin(page, stub)
    other = open_tab()
    go_on = threading.Event()
    stub.scripts = [gated(go_on, "Half of ", "it."), said("Under it.")]
    ask(page, "Slowly")
    expect(prose(other)).to_have_text("Half of")
    expect(last_answer(other)).to_have_attribute("aria-busy", "true")
    ask(other, "Meanwhile")
    expect(prose(other)).to_have_text("Under it.")
    expect(page.locator(".answer .prose")).to_have_text(["Answer.", "Half of", "Under it."])
    go_on.set()
    for tab in (page, other):
        expect(tab.locator(".answer .prose")).to_have_text(["Answer.", "Half of it.", "Under it."])
        expect(tab.locator(".answer .stats").nth(1)).to_contain_text("7 tokens")
        expect(tab.locator("[aria-busy=true]")).to_have_count(0)
    page.reload()
    expect(page.locator(".answer .prose")).to_have_text(["Answer.", "Half of it.", "Under it."])


def test_another_tab_reads_on_when_the_one_that_asked_goes(
    page: Page, open_tab: OpenTab, stub: StubServer
) -> None:
    begin(page, stub)
    other = open_tab()
    go_on = threading.Event()
    stub.scripts = [gated(go_on, "Half of ", "it.")]
    ask(other, "Slowly")
    expect(prose(page)).to_have_text("Half of")
    other.goto("about:blank")
    go_on.set()
    expect(prose(page)).to_have_text("Half of it.")
    expect(last_answer(page).locator(".stats")).to_contain_text("7 tokens")
    assert len(stub.requests) == 2


def test_a_question_that_is_being_edited_stays_so(page: Page, open_tab: OpenTab, stub: StubServer) -> None:
    begin(page, stub)
    other = open_tab()
    page.locator(".question").hover()
    page.get_by_role("button", name="Edit").click()
    field = page.get_by_label("Edit the message")
    field.fill("Half an edit")
    ask(other, "Beside")
    expect(prose(page)).to_have_text("Answer.")
    expect(page.locator(".answer")).to_have_count(2)
    expect(field).to_have_value("Half an edit")
    field.press("Enter")
    expect(page.locator(".asked")).to_have_text(["Half an edit"])
    expect(page.locator(".question")).to_contain_text("2 / 2")
    expect(other.locator(".question").first).to_contain_text("1 / 2")


def test_a_failed_answer_that_is_tried_again_stays_away(
    page: Page, open_tab: OpenTab, stub: StubServer
) -> None:
    other = open_tab()
    stub.scripts = [api_error(429, "The queue is full.", "queue_full"), said("Here it is.")]
    ask(page, "Hello")
    expect(last_answer(page)).to_contain_text("The queue is full.")
    chats(other).click()
    expect(last_answer(other)).to_contain_text("The queue is full.")
    last_answer(other).get_by_role("button", name="Retry").click()
    expect(prose(other)).to_have_text("Here it is.")
    stub.scripts = [said("More.")]
    ask(other, "And")
    expect(prose(other)).to_have_text("More.")
    expect(page.locator(".answer .prose")).to_have_text(["Here it is.", "More."])
    page.reload()
    expect(page.locator(".answer .prose")).to_have_text(["Here it is.", "More."])
    expect(page.get_by_role("group", name="Versions")).to_have_count(0)


def test_a_deleted_chat_does_not_come_back(page: Page, open_tab: OpenTab, stub: StubServer) -> None:
    begin(page, stub)
    told, deaf = open_tab(), open_tab(DEAF)
    stub.scripts = [endless]
    for tab in (told, deaf):
        ask(tab, "Go on for ever")
        expect(prose(tab)).to_contain_text("more more")
    told.get_by_label("Message", exact=True).fill("Not sent yet")
    chats(page)
    kept = page.evaluate("Object.entries(localStorage).find(([key]) => key.startsWith('quire.chat.'))")
    page.get_by_role("button", name="Delete “Question”").click()
    expect(told.locator("#toast")).to_contain_text("deleted in another tab")
    expect(told.locator(".asked")).to_have_count(0)
    expect(told.get_by_role("heading", name="Ask away")).to_be_visible()
    expect(told.get_by_label("Message", exact=True)).to_have_value("Not sent yet")
    assert stub.stopped.wait(20), "the tab goes on with the answer"
    deaf.evaluate("([key, chat]) => localStorage.setItem(key, chat)", kept)  # a save that was on its way
    expect(told.get_by_role("heading", name="Ask away")).to_be_visible()
    deaf.keyboard.press("Escape")
    expect(last_answer(deaf).locator(".stats")).to_contain_text("Stopped")
    for tab in (deaf, told):
        tab.reload()
        expect(tab.locator(".asked")).to_have_count(0)
    expect(told.get_by_label("Message", exact=True)).to_have_value("Not sent yet")
    expect(chats(page)).to_have_count(0)


def test_a_deletion_taken_back_holds_in_every_tab(page: Page, open_tab: OpenTab, stub: StubServer) -> None:
    begin(page, stub)
    other = open_tab()
    chats(page)
    page.get_by_role("button", name="Delete “Question”").click()
    expect(chats(other)).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(other.locator("#chat-list .chat-title")).to_have_text(["Question"])  # the panel is still open
    other.locator("#chat-list .chat").click()
    expect(prose(other)).to_have_text("Answer.")
    stub.scripts = [said("More.")]
    ask(other, "And")
    expect(prose(page)).to_have_text("More.")
    page.reload()
    expect(page.locator(".asked")).to_have_text(["Question", "And"])


def test_tabs_share_the_browsers_lines(page: Page, open_tab: OpenTab, stub: StubServer) -> None:
    other = open_tab()
    stub.scripts = [endless]
    for number in range(4):
        tab = (page, other)[number % 2]
        ask(tab, f"Chat {number}")
        expect(prose(tab)).to_contain_text("more")
        tab.get_by_role("button", name="New chat").click()
    ask(other, "Chat 4")
    waits = other.get_by_text("Waiting for other answers to end")
    expect(waits).to_be_visible()
    for tab in (page, other):
        assert tab.evaluate("fetch('/v1/models').then(({ status }) => status)") == 200
    other.keyboard.press("Escape")
    expect(last_answer(other).locator(".stats")).to_have_text("Stopped")
    other.get_by_role("button", name="Try again").click()
    expect(waits).to_be_visible()
    assert len(stub.requests) == 4
    page.goto("about:blank")
    expect(prose(other)).to_contain_text("more")
    assert [request["messages"][0]["content"] for request in stub.requests][4:] == ["Chat 4"]


def test_an_answer_that_waits_to_be_read_on_says_so(page: Page, stub: StubServer) -> None:
    go_on = threading.Event()
    stub.scripts = [gated(go_on, "Half of ", "it.")]
    ask(page, "Slowly")
    expect(prose(page)).to_have_text("Half of")
    other = page.context.new_page()
    other.goto(f"{stub.url}/static/storage.js")
    other.evaluate(
        """() => {
            const forever = () => new Promise(() => {});
            for (const i of [0, 1, 2, 3]) navigator.locks.request(`quire.line.${i}`, forever);
        }"""
    )
    page.reload()
    expect(last_answer(page)).to_contain_text("Waiting for other answers to end")
    expect(prose(page)).to_have_text("Half of")
    other.close()
    go_on.set()
    expect(prose(page)).to_have_text("Half of it.")


def test_tabs_share_one_stream_of_the_blocks(page: Page, open_tab: OpenTab, stub: StubServer) -> None:
    tabs = [open_tab(), open_tab()]
    for tab in (page, *tabs):
        expect(tab.locator("#kv-active")).to_have_text("12")
    until(lambda: stub.watchers == 1, "one tab watches for all", SECONDS)
    stub.blocks = block_counts(13, 20, 31)
    page.goto("about:blank")
    for tab in tabs:
        expect(tab.locator("#kv-active")).to_have_text("13")


def test_tabs_share_one_stream_of_the_start_up(page: Page, open_tab: OpenTab, stub: StubServer) -> None:
    """A browser has six connections for each server, and a model may take minutes to load."""
    stub.loaded.clear()
    stub.phases.insert(0, {"phase": "weights", "done": 1, "total": 4, "unit": "shards", "seconds": 2.0})
    page.goto("about:blank")
    tabs = [open_tab(), open_tab()]
    for tab in tabs:
        expect(tab.locator("#startup-detail")).to_have_text("1 of 4 shards")
    until(lambda: stub.loading == 1, "one tab reads for all", SECONDS)  # and the page that has left none
    tabs[0].close()  # another one reads on
    stub.loaded.set()
    for tab in tabs[1:]:
        expect(tab.locator("#startup")).to_be_hidden()
        expect(tab.locator("#kv-active")).to_have_text("12")


def test_without_locks_each_tab_has_lines_of_its_own(page: Page, open_tab: OpenTab, stub: StubServer) -> None:
    """As with plain http on another host."""
    lockless = "Object.defineProperty(Navigator.prototype, 'locks', { value: undefined });"
    tabs = [open_tab(lockless), open_tab(lockless)]
    for tab in tabs:
        expect(tab.locator("#kv-active")).to_have_text("12")
    until(lambda: stub.watchers == 3, "each tab watches", SECONDS)
    stub.scripts = [said("Answer.")]
    ask(tabs[0], "Question")
    expect(prose(tabs[0])).to_have_text("Answer.")

"""Answers that outlive their readers: a reload, another chat, a lost line; and those that end too early."""

import re
import threading
from collections.abc import AsyncIterator, Callable

from chatting import ask, chats, endless, last_answer, prose, said, sampled
from playwright.sync_api import Page, expect
from stub_server import StubServer, api_error, delta, ending, opened, total, usage


def halves(go_on: threading.Event, before: str, after: str) -> Callable[[], AsyncIterator[str]]:
    async def script() -> AsyncIterator[str]:
        yield delta(before)
        await opened(go_on)
        yield delta(after) + ending(21, 7, 16)

    return script


def test_an_answer_goes_on_after_a_reload(page: Page, stub: StubServer) -> None:
    go_on = threading.Event()
    stub.scripts = [halves(go_on, "Half of ", "it.")]
    ask(page, "Slowly")
    expect(prose(page)).to_have_text("Half of")
    page.reload()
    expect(prose(page)).to_have_text("Half of")
    expect(last_answer(page)).to_have_attribute("aria-busy", "true")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    message = page.get_by_label("Message", exact=True)
    message.fill("Too early")
    message.press("Enter")
    copy = page.locator(".question").get_by_role("button", name="Copy")
    copy.focus()
    go_on.set()
    expect(prose(page)).to_have_text("Half of it.")
    expect(last_answer(page).locator(".stats")).to_contain_text("7 tokens")
    expect(copy).to_be_focused()
    expect(message).to_have_value("Too early")
    assert len(stub.requests) == 1


def test_an_answer_goes_on_while_another_chat_is_shown(page: Page, stub: StubServer) -> None:
    go_on = threading.Event()
    stub.scripts = [halves(go_on, "Half of ", "it."), said("Beside it.")]
    ask(page, "Slowly")
    expect(prose(page)).to_have_text("Half of")
    page.get_by_role("button", name="New chat").click()
    ask(page, "Meanwhile")
    expect(prose(page)).to_have_text("Beside it.")
    chats(page)
    entry = page.locator("#chat-list li", has_text="Slowly")
    expect(entry.get_by_role("img", name="answering")).to_be_visible()
    go_on.set()
    expect(entry.get_by_role("img", name="new answer")).to_be_visible()
    entry.locator(".chat").click()
    expect(prose(page)).to_have_text("Half of it.")
    chats(page)
    expect(page.locator("#chat-list .sign")).to_have_count(0)


def test_a_lost_line_loses_nothing(page: Page, stub: StubServer) -> None:
    go_on = threading.Event()
    stub.scripts = [halves(go_on, "Half of ", "it.")]
    ask(page, "Slowly")
    expect(prose(page)).to_have_text("Half of")
    stub.lines += 1
    go_on.set()
    expect(prose(page)).to_have_text("Half of it.")
    expect(last_answer(page).locator(".stats")).to_contain_text("7 tokens")
    assert len(stub.requests) == 1


def test_what_ended_early_is_continued_behind_its_own_tokens(page: Page, stub: StubServer) -> None:
    async def too_long() -> AsyncIterator[str]:
        yield delta("One, ") + ending(21, 2, reason="length")

    stub.scripts = [too_long]
    ask(page, "Count")
    expect(last_answer(page).locator(".note")).to_have_text("The answer reached the token limit.")
    never = threading.Event()
    stub.scripts = [halves(never, "two, ", "")]
    page.get_by_role("button", name="Continue").click()
    expect(prose(page)).to_have_text("One, two,")
    stub.recordings.clear()  # a restart of the server
    stub.lines += 1
    expect(last_answer(page).locator(".note")).to_contain_text("was cut off")
    stub.scripts = [said("three.")]
    page.get_by_role("button", name="Continue").click()
    expect(prose(page)).to_have_text("One, two, three.")
    expect(last_answer(page).locator(".stats")).to_contain_text("5 tokens")
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)
    never.set()
    assert stub.paths == ["/v1/chat/completions", "/v1/completions", "/v1/completions"]
    assert stub.requests[-1]["prompt"] == [0, *map(ord, "One, two, ")]
    assert stub.requests[-1]["max_tokens"] == 2048 - 11


def test_samples_stand_side_by_side_until_one_is_gone_on_from(page: Page, stub: StubServer) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Samples").fill("2")
    page.get_by_label("Seed").fill("7")
    page.keyboard.press("Escape")
    stub.scripts = [sampled("Heads.", "Tails, I say.")]
    ask(page, "Toss a coin")
    samples = page.get_by_role("group", name="Samples")
    expect(samples.locator(".prose")).to_have_count(2)
    expect(samples.get_by_role("button", name="Go on from this one")).to_have_count(1)
    assert [(request["n"], request["seed"]) for request in stub.requests] == [(2, 7)]
    expect(samples.locator(".prose")).to_have_text(["Heads.", "Tails, I say."])
    lengths = samples.locator(".stats span").get_by_text(re.compile(r"^\d tokens?$"))
    expect(lengths).to_have_text(["1 token", "3 tokens"])
    expect(page.locator("#announcer")).to_have_text("2 answers. Heads.")
    expect(page.locator("[aria-current=true].answer")).to_have_accessible_name("Answer 1 of 2")
    stub.scripts = [sampled("Edge.", "Edge.")]
    samples.get_by_role("button", name="Try again").click()
    expect(samples.locator(".prose")).to_have_text(["Edge."] * 2)
    versions = samples.get_by_role("group", name="Versions")
    expect(versions).to_contain_text("2 / 2")
    versions.get_by_role("button", name="Earlier version").click()
    expect(versions).to_contain_text("1 / 2")
    expect(samples.locator(".prose")).to_have_text(["Heads.", "Tails, I say."])
    second = page.get_by_role("article", name="Answer 2 of 2")
    other = samples.locator(".answer:not(.chosen)")
    other.get_by_role("button", name="Go on from this one").press("Enter")
    expect(second).to_have_attribute("aria-current", "true")
    expect(samples.locator(".chosen footer button:focus")).to_have_count(1)
    stub.scripts = [sampled("Done.", "Done, too.")]
    ask(page, "Go on")
    expect(page.locator(".answer .prose").first).to_have_text("Tails, I say.")
    expect(samples.locator(".prose")).to_have_text(["Done.", "Done, too."])
    sent = [message["content"] for message in stub.requests[-1]["messages"]]
    assert sent == ["Toss a coin", "Tails, I say.", "Go on"]


def test_samples_go_on_after_a_reload_and_a_lost_line_each_to_its_end(page: Page, stub: StubServer) -> None:
    go_on = threading.Event()

    async def script() -> AsyncIterator[str]:
        yield delta("Heads.", index=0, usage=usage(21, 1)) + delta("Ta", index=1, usage=usage(21, 1))
        yield delta(finish_reason="stop", index=0, usage=usage(21, 1))
        await opened(go_on)
        yield delta("ils.", "length", index=1, usage=usage(21, 2)) + total(usage(21, 3))

    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Samples").fill("2")
    page.keyboard.press("Escape")
    stub.scripts = [script]
    ask(page, "Toss a coin")
    texts, answers = page.locator(".samples .prose"), page.locator(".samples .answer")
    for lose in (lambda: None, page.reload, lambda: setattr(stub, "lines", stub.lines + 1)):
        lose()
        expect(texts).to_have_text(["Heads.", "Ta"])
        expect(answers.nth(0)).to_have_attribute("aria-busy", "false")
        expect(answers.nth(1)).to_have_attribute("aria-busy", "true")
    copy = answers.nth(0).get_by_role("button", name="Copy")
    copy.focus()
    go_on.set()
    expect(texts).to_have_text(["Heads.", "Tails."])
    expect(answers.nth(0).locator(".note")).to_have_count(0)
    expect(answers.nth(1).locator(".note")).to_have_text("The answer reached the token limit.")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(copy).to_be_focused()
    assert len(stub.requests) == 1


def test_samples_that_failed_are_retried_together_and_stay_away(page: Page, stub: StubServer) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Samples").fill("2")
    page.keyboard.press("Escape")
    stub.scripts = [api_error(429, "The queue is full.", "queue_full"), sampled("Heads.", "Tails.")]
    ask(page, "Toss a coin")
    expect(page.get_by_role("alert")).to_have_count(2)
    expect(page.get_by_role("button", name="Go on from this one")).to_have_count(0)
    page.get_by_role("button", name="Retry").last.click()
    expect(page.locator(".samples .prose")).to_have_text(["Heads.", "Tails."])
    expect(page.get_by_role("button", name="Go on from this one")).to_have_count(1)
    expect(page.get_by_role("group", name="Versions")).to_have_count(0)


def test_streams_leave_the_browser_lines_for_the_rest(page: Page, stub: StubServer) -> None:
    stub.scripts = [endless]
    for number in range(4):
        ask(page, f"Chat {number}")
        expect(prose(page)).to_contain_text("more")
        page.get_by_role("button", name="New chat").click()
    ask(page, "Chat 4")
    waits = page.get_by_text("Waiting for other answers to end")
    expect(waits).to_be_visible()
    page.keyboard.press("Escape")
    expect(last_answer(page).locator(".stats")).to_have_text("Stopped")
    page.get_by_role("button", name="Try again").click()
    expect(waits).to_be_visible()
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("The page was left before this was sent.")
    page.get_by_role("button", name="Retry").click()
    expect(waits).to_be_visible()
    assert page.evaluate("fetch('/v1/models').then(({ status }) => status)") == 200
    assert len(stub.requests) == 4
    chats(page)
    page.locator("#chat-list .chat", has_text="Chat 0").click()
    page.keyboard.press("Escape")
    assert stub.stopped.wait(20)
    chats(page)
    page.locator("#chat-list .chat", has_text="Chat 4").click()
    expect(prose(page)).to_contain_text("more")
    assert [request["messages"][0]["content"] for request in stub.requests][4:] == ["Chat 4"]


def test_stop_also_ends_what_the_server_has_not_taken_yet(page: Page, stub: StubServer) -> None:
    stub.taken.clear()
    stub.scripts = [endless]
    with page.expect_request("**/v1/chat/completions"):
        ask(page, "Go on for ever")
    with page.expect_response(re.compile("/v1/streams/")) as early:
        page.keyboard.press("Escape")
    assert early.value.status == 404
    stub.taken.set()
    assert stub.stopped.wait(20), "the server goes on"
    expect(last_answer(page).locator(".stats")).to_have_text("Stopped")


def test_stop_does_not_wait_behind_streams_of_other_tabs(
    page: Page, open_tab: Callable[..., Page], stub: StubServer
) -> None:
    other = open_tab()
    stub.scripts = [endless]
    ask(page, "Go on for ever")
    expect(prose(page)).to_contain_text("more")
    other.evaluate(
        """async () => {
            const { blockEvents } = await import("/static/blocks/updates.js");
            for (let i = 0; i < 8; i += 1) blockEvents("detail=counts", new AbortController().signal).next();
        }"""
    )
    page.bring_to_front()
    page.keyboard.press("Escape")
    assert stub.stopped.wait(20), "the server goes on"
    expect(last_answer(page).locator(".stats")).to_contain_text("Stopped")


def test_a_base_model_continues_the_text(page: Page, stub: StubServer) -> None:
    stub.has_template = False
    page.reload()
    expect(page.get_by_text("continues what you write")).to_be_visible()
    stub.scripts = [said(" upon a time")]
    ask(page, "Once")
    expect(prose(page)).to_have_text("upon a time")
    assert (stub.paths, stub.requests[0]["prompt"]) == (["/v1/completions"], list(map(ord, "Once")))
    ask(page, "there was")
    expect(page.locator(".answer .prose")).to_have_text(["upon a time"] * 2)
    assert stub.requests[1]["prompt"] == list(map(ord, "Once upon a timethere was"))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Samples").fill("2")
    page.get_by_label("Seed").fill("7")
    page.keyboard.press("Escape")
    ask(page, "!")
    expect(page.locator(".samples .prose")).to_have_text(["upon a time"] * 2)
    assert sorted(request["seed"] for request in stub.requests[2:]) == [7, 8]


def test_thoughts_are_folded(page: Page, stub: StubServer) -> None:
    async def thinks() -> AsyncIterator[str]:
        yield delta("Hm, 6 times 7.").replace('"content"', '"reasoning"')
        yield delta("42") + ending(21, 9)

    stub.scripts = [thinks]
    ask(page, "What is it?")
    expect(prose(page).last).to_have_text("42")
    thoughts = last_answer(page).locator("details")
    expect(thoughts.get_by_text("Hm, 6 times 7.")).to_be_hidden()
    thoughts.get_by_text("Thoughts").click()
    expect(thoughts.get_by_text("Hm, 6 times 7.")).to_be_visible()
    ask(page, "Sure?")
    expect(page.locator(".answer")).to_have_count(2)
    expect(prose(page).last).to_have_text("42")
    assert stub.requests[-1]["messages"][1] == {"role": "assistant", "content": "42"}


def test_chats_are_found_renamed_and_beside_a_wide_page(
    open_page: Callable[..., Page], stub: StubServer
) -> None:
    page = open_page(viewport={"width": 1280, "height": 800})
    stub.scripts = [said("An answer about **whales**."), said("Another.")]
    for at, text in enumerate(("First", "Second"), 1):
        ask(page, text)
        expect(page.locator("#chat-list .chat")).to_have_count(at)
        expect(last_answer(page).locator(".stats")).to_contain_text("cached")
        page.get_by_role("button", name="New chat").click()
    side = page.get_by_role("complementary", name="Chats")
    expect(side.get_by_role("heading", name="Today")).to_be_visible()
    page.get_by_label("Search the chats").fill("WHALES")
    expect(side.locator(".chat-title")).to_have_text(["First"])
    side.locator(".chat").hover()
    side.get_by_role("button", name="Rename “First”").click()
    page.get_by_label("Name of the chat").fill("About the sea")
    page.keyboard.press("Enter")
    expect(side.locator(".chat-title")).to_have_text(["About the sea"])
    page.reload()
    expect(side.locator(".chat-title")).to_have_text(["Second", "About the sea"])
    sea = side.locator(".chat", has_text="About the sea")
    for key, focused in (("Enter", side.get_by_role("button", name="Rename “Second”")), ("Tab", sea)):
        side.get_by_role("button", name="Rename “Second”").press("Enter")
        page.get_by_label("Name of the chat").press(key)
        expect(focused).to_be_focused()
    second = side.locator(".chat", has_text="Second")
    second.press("Enter")
    expect(prose(page)).to_have_text("Another.")
    expect(second).to_be_focused()
    side.get_by_role("button", name="Delete “Second”").press("Enter")
    expect(side.get_by_role("button", name="Delete “About the sea”")).to_be_focused()
    sea.click()
    expect(page.locator("#model")).to_contain_text(re.compile(r"23 of 2,048.*76 % cached"))


def test_says_where_the_time_of_an_answer_went(page: Page, stub: StubServer) -> None:
    stub.scripts = [said("\n\n".join(["**Quickly.**"] * 70))]
    ask(page, "How fast?")
    read_out = re.compile(r"^Answer complete\. (Quickly\. ){55}Quick… and more$")
    expect(page.locator("#announcer")).to_have_text(read_out)
    why = last_answer(page).get_by_role("button", name="Why")
    why.click()
    rows = last_answer(page).locator(".why tr")
    expect(rows).to_have_text(["WhatTimeWork", "prefill12 ms21 tokens", "decode400 ms7 steps", "all412 ms"])
    expect(last_answer(page).locator(".why li")).to_have_text("16 of 21 prompt tokens found in the cache")
    expect(last_answer(page).locator(".why")).to_be_in_viewport(ratio=0.9)
    why.click()
    stub.recordings.clear()
    why.click()
    expect(last_answer(page).locator(".why")).to_have_text("The server does not know this request any more.")

"""Tools of a chat: offered, called, answered, and off."""

import json
from collections.abc import AsyncIterator

from chatting import ask, last_answer, prose, said
from playwright.sync_api import Page, expect
from stub_server import StubServer, ending, event

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def call(index: int, **part: str) -> str:
    """A part of a call, as chat streams it."""
    whole = (
        {"index": index, "id": f"call_{index}", "type": "function"} if "name" in part else {"index": index}
    )
    return event({"choices": [{"index": 0, "delta": {"tool_calls": [{**whole, "function": part}]}}]})


async def calls_twice() -> AsyncIterator[str]:
    yield (
        call(0, name="weather", arguments="") + call(0, arguments='{"city": ') + call(0, arguments='"Rome"}')
    )
    yield call(1, name="weather", arguments='{"city": "Oslo"}')
    yield ending(prompt_tokens=40, completion_tokens=20, reason="tool_calls")


def offer(page: Page, text: str) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools", exact=True).fill(text)


def test_calls_are_shown_and_what_is_written_next_is_their_result(page: Page, stub: StubServer) -> None:
    stub.scripts = [calls_twice, said("Warm and cold.")]
    offer(page, json.dumps(TOOLS))
    page.get_by_role("button", name="Done").click()
    ask(page, "Weather in Rome and Oslo?")
    expect(last_answer(page).locator(".calls p")).to_have_text(["Calls weather", "Calls weather"])
    expect(last_answer(page).locator(".calls pre")).to_have_text(['{"city": "Rome"}', '{"city": "Oslo"}'])
    expect(last_answer(page).locator(".note")).to_contain_text("What you write next goes back as the result.")
    page.reload()
    expect(last_answer(page).locator(".calls pre")).to_have_text(['{"city": "Rome"}', '{"city": "Oslo"}'])
    ask(page, "28 and 3 degrees")
    expect(prose(page)).to_have_text("Warm and cold.")
    assert [request["tools"] for request in stub.requests] == [TOOLS, TOOLS]
    question, called, *results = stub.requests[1]["messages"]
    assert question == {"role": "user", "content": "Weather in Rome and Oslo?"}
    made = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for i, arguments in enumerate(['{"city": "Rome"}', '{"city": "Oslo"}'])
    ]
    assert called == {"role": "assistant", "content": None, "tool_calls": made}
    assert results == [
        {"role": "tool", "tool_call_id": f"call_{i}", "content": "28 and 3 degrees"} for i in (0, 1)
    ]


def test_tools_off_keeps_them_and_sends_none(page: Page, stub: StubServer) -> None:
    stub.scripts = [said("Aye.")]
    offer(page, json.dumps(TOOLS))
    page.get_by_label("Tools off").check()
    page.get_by_role("button", name="Done").click()
    ask(page, "Hello")
    expect(prose(page)).to_have_text("Aye.")
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Tools", exact=True)).to_have_value(json.dumps(TOOLS))
    page.get_by_label("Tools off").uncheck()
    page.get_by_role("button", name="Done").click()
    ask(page, "Again")
    expect(page.locator(".answer")).to_have_count(2)
    expect(prose(page)).to_have_text("Aye.")
    assert ["tools" in request for request in stub.requests] == [False, True]


def test_what_are_no_tools_is_said_and_not_sent(page: Page, stub: StubServer) -> None:
    stub.scripts = [said("Aye.")]
    offer(page, "[{")
    problem = page.locator("#tools-problem")
    expect(problem).to_contain_text("This is no JSON")
    expect(page.get_by_label("Tools off")).to_be_hidden()
    page.get_by_label("Tools", exact=True).fill('{"name": "weather"}')
    expect(problem).to_contain_text("Tools are a list such as")
    page.keyboard.press("Escape")
    expect(page.locator("#toast-text")).to_contain_text("Not taken. Tools: Tools are a list")
    ask(page, "Hello")
    expect(prose(page)).to_have_text("Aye.")
    assert "tools" not in stub.requests[0]

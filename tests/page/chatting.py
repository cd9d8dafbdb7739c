"""Writing to the chat page, and what the stub answers."""

import asyncio
from collections.abc import AsyncIterator, Callable

from playwright.sync_api import Locator, Page, expect
from stub_server import delta, ending, total, usage


def ask(page: Page, text: str) -> None:
    box = page.get_by_label("Message", exact=True)
    box.fill(text)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    box.press("Enter")


def last_answer(page: Page) -> Locator:
    return page.locator(".answer").last


def prose(page: Page) -> Locator:
    return last_answer(page).locator(".prose")


def said(*texts: str) -> Callable[[], AsyncIterator[str]]:
    """A complete answer in these deltas."""

    async def script() -> AsyncIterator[str]:
        for text in texts:
            yield delta(text)
        yield ending(prompt_tokens=21, completion_tokens=max(len(texts), 2), cached_tokens=16)

    return script


def sampled(*texts: str) -> Callable[[], AsyncIterator[str]]:
    """Complete samples by one stream, each with as many tokens as it has words."""

    async def script() -> AsyncIterator[str]:
        for index, text in enumerate(texts):
            tokens = len(text.split())
            yield delta(text, index=index, usage=usage(21, tokens, 16))
            yield delta(finish_reason="stop", index=index, usage=usage(21, tokens, 16))
        yield total(usage(21, sum(len(text.split()) for text in texts), 16))

    return script


async def endless() -> AsyncIterator[str]:
    while True:
        yield delta("more ")
        await asyncio.sleep(0.01)


def chats(page: Page) -> Locator:
    """The entries of the list of chats, which it opens where it is not beside the page."""
    page.wait_for_selector("#open-chats[aria-expanded]")
    button = page.get_by_role("button", name="Chats", exact=True)
    if button.get_attribute("aria-expanded") == "false":
        button.click()
    return page.locator("#chat-list .chat-title")

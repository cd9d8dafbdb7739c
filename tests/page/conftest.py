"""One browser and one stub server for all the tests of the page.

Package scope, not session: Playwright's loop runs in the main thread as long as it lives, and asyncio.run() of
other packages' tests would meet it there.
"""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright
from stub_server import StubServer

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("The page's tests need a Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def running_stub() -> Iterator[StubServer]:
    server = StubServer()
    yield server
    server.stop()


@pytest.fixture
def stub(running_stub: StubServer) -> StubServer:
    running_stub.reset()
    return running_stub


@pytest.fixture
def open_page(browser: Browser, stub: StubServer) -> Iterator[Callable[..., Page]]:
    """Opens the page in a fresh profile. Afterwards its console must hold no error and no warning."""
    problems: list[str] = []
    contexts = []

    def listen(message: ConsoleMessage) -> None:
        # The browser reports every HTTP error status of a fetch; those the tests look at on the page itself.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            problems.append(message.text)

    def open_(**options: Any) -> Page:
        defaults: dict[str, Any] = {"viewport": {"width": 1000, "height": 760}, "reduced_motion": "reduce"}
        context = browser.new_context(**{**defaults, **options})
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", listen)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(stub.url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(scope="package")
def blank_page(browser: Browser, running_stub: StubServer) -> Iterator[Page]:
    """A page of the server's origin that runs nothing by itself, for tests of single modules."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{running_stub.url}/static/logo.svg")
    yield page
    context.close()


@pytest.fixture
def page(open_page: Callable[..., Page]) -> Page:
    return open_page()

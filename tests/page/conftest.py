"""One browser for the page's tests that follow one another, and one stub server for each module of them.

Not for the session: Playwright's loop runs in the main thread as long as it lives, and asyncio.run() of other
tests would meet it there.
"""

import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from page_console import Console
from playwright.sync_api import Browser, Page, expect, sync_playwright
from stub_server import StubServer

BLANK = "/static/storage.js"  # shown as text
SECONDS = 20  # until what is expected must be there, on a machine that has much else to do
expect.set_options(timeout=1000 * SECONDS)
# The shell is the same Chromium without windows to draw, which take a third of all that the tests take.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


RUNNING = pytest.StashKey[tuple[Browser, ExitStack]]()  # the browser, and what ends it


@pytest.fixture(scope="module")
def browser(pytestconfig: pytest.Config) -> Iterator[Browser]:
    """Yield a browser without pages; it starts once for all modules, which takes as long as some of them."""
    stash = pytestconfig.stash
    if RUNNING in stash and not stash[RUNNING][0].is_connected():
        _end(pytestconfig)
    if RUNNING not in stash:
        stash[RUNNING] = _start()
    running, _ = stash[RUNNING]
    yield running
    for context in running.contexts:
        context.close()


def _start() -> tuple[Browser, ExitStack]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.fail("The page's tests need a Chromium: apt-get install chromium-headless-shell")
    with ExitStack() as stack:
        playwright = stack.enter_context(sync_playwright())
        started = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        stack.callback(started.close)
        return started, stack.pop_all()


def _end(config: pytest.Config) -> None:
    if RUNNING in config.stash:
        config.stash[RUNNING][1].close()
        del config.stash[RUNNING]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """End the browser once no test of this folder is next."""
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path.parent != Path(__file__).parent:
            _end(item.config)


@pytest.fixture(scope="module")
def running_stub() -> Iterator[StubServer]:
    server = StubServer()
    yield server
    server.stop()


@pytest.fixture
def stub(running_stub: StubServer) -> StubServer:
    running_stub.reset()
    return running_stub


@pytest.fixture(scope="module")
def blank_page(browser: Browser, running_stub: StubServer) -> Iterator[Page]:
    """A page of the server's origin that runs nothing by itself."""
    context = browser.new_context(viewport={"width": 1000, "height": 760}, reduced_motion="reduce")
    page = context.new_page()
    page.goto(running_stub.url + BLANK)
    yield page
    context.close()


@pytest.fixture
def page(blank_page: Page, stub: StubServer) -> Iterator[Page]:
    """The chat page with nothing stored. Afterwards its console must hold no error and no warning."""
    console = Console()
    console.listen(blank_page)
    blank_page.goto(stub.url)
    yield blank_page
    blank_page.context.set_offline(False)
    blank_page.goto(stub.url + BLANK)  # leaves the chat page, which stores its conversation then
    blank_page.evaluate("localStorage.clear(); sessionStorage.clear()")
    console.leave(blank_page)
    assert console.problems == []


@pytest.fixture
def open_page(browser: Browser, stub: StubServer) -> Iterator[Callable[..., Page]]:
    """Opens the chat page in a browser context with options of its own, under the same condition."""
    console = Console()
    contexts = []

    def open_(**options: Any) -> Page:
        context = browser.new_context(reduced_motion="reduce", **options)
        contexts.append(context)
        page = context.new_page()
        console.listen(page)
        page.goto(stub.url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert console.problems == []


@pytest.fixture
def open_tab(page: Page, stub: StubServer) -> Iterator[Callable[..., Page]]:
    """Opens the chat page in another tab of the same browser, under the same condition."""
    console = Console()
    tabs = []

    def open_(script: str = "") -> Page:
        tab = page.context.new_page()
        tabs.append(tab)
        console.listen(tab)
        tab.add_init_script(script)
        tab.goto(stub.url)
        return tab

    yield open_
    for tab in tabs:
        tab.close()
    assert console.problems == []

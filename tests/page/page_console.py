"""What went wrong on a page, by what its console says."""

from playwright.sync_api import ConsoleMessage, Error, Page


class Console:
    """What went wrong on the pages that it listens to."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def listen(self, page: Page) -> None:
        page.on("console", self._message)
        page.on("pageerror", self._error)

    def leave(self, page: Page) -> None:
        page.remove_listener("console", self._message)
        page.remove_listener("pageerror", self._error)

    def _message(self, message: ConsoleMessage) -> None:
        # The browser reports every HTTP error status of a fetch; those the tests look at on the page itself.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.problems.append(message.text)

    def _error(self, error: Error) -> None:
        self.problems.append(str(error))

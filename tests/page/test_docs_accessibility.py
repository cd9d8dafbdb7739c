"""/docs in a browser: axe-core finds nothing in either theme, and a phone scrolls it one way only."""

import pytest
from playwright.sync_api import Browser
from test_accessibility import LOOKS, assert_accessible

from quire.service.api.docs_page import page as docs_page
from quire.service.api.openapi import describe


def some_of_it() -> str:
    """Two endpoints and two objects: all is made alike, and axe takes its time."""
    document = describe("0")
    paths, schemas = document["paths"], document["components"]["schemas"]
    document["paths"] = {path: paths[path] for path in ("/v1/chat/completions", "/version")}
    document["components"]["schemas"] = {name: schemas[name] for name in ("StreamOptions", "ErrorReply")}
    return docs_page(document)


@pytest.mark.parametrize("look", LOOKS)
def test_the_api_is_browsable(browser: Browser, look: str) -> None:
    context = browser.new_context(**LOOKS[look])
    page = context.new_page()
    page.set_content(some_of_it())
    assert_accessible(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= LOOKS[look]["viewport"]["width"]
    page.get_by_role("link", name="POST /v1/chat/completions").click()
    assert page.evaluate("document.querySelector(':target').id") == "post-v1-chat-completions"
    context.close()

"""axe-core finds nothing serious or critical on the page: in light, in dark, on a phone."""

from collections.abc import AsyncIterator, Callable

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from stub_server import StubServer, api_error, delta, ending

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
LOOKS = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 800}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 800}},
    "phone": {
        "color_scheme": "light",
        "viewport": {"width": 360, "height": 740},
        "has_touch": True,
        "is_mobile": True,
    },
}
ANSWER = """# Heading

A *list* of `things`:

1. one
2. two

> quoted

```python
print("a line that is long enough to be scrolled on a phone, since code is not wrapped there")
```
"""


async def answer() -> AsyncIterator[str]:
    yield delta(ANSWER) + ending(prompt_tokens=21, completion_tokens=40, cached_tokens=16)


def assert_accessible(page: Page) -> None:
    results = Axe().run(page, options={"runOnly": RULES})
    serious = [
        (each["impact"], each["id"], [node["html"] for node in each["nodes"]])
        for each in results.response["violations"]
        if each["impact"] in ("serious", "critical")
    ]
    assert serious == []
    assert len(results.response["passes"]) > 10  # it did look


@pytest.mark.parametrize("look", LOOKS)
def test_no_serious_finding(open_page: Callable[..., Page], stub: StubServer, look: str) -> None:
    page = open_page(**LOOKS[look])
    expect(page.locator("#suggestions button")).to_have_count(4)
    expect(page.locator("#kv")).to_be_visible()
    assert_accessible(page)

    stub.scripts = [answer, api_error(429, "The queue is full; try again in 2 s.", "queue_full")]
    box = page.get_by_label("Message", exact=True)
    for question in ("Show me everything", "Once more"):
        box.fill(question)
        box.press("Enter")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_visible()
    page.locator(".question").first.get_by_role("button", name="Edit").click()
    page.locator(".question").last.hover()
    assert_accessible(page)
    page.get_by_label("Edit the message").focus()
    page.keyboard.press("Escape")
    for name in ("Chats", "Settings"):
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.get_by_role("dialog")).to_be_visible()
        assert_accessible(page)
        page.keyboard.press("Escape")

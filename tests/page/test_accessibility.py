"""axe-core finds nothing on the page: in light, in dark, on a phone."""

import base64
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
ANSWER = """## Heading

#### Below it

A *list* of `things`:

1. one
2. two

> quoted

```python
print("a line that is long enough to be scrolled on a phone, since code is not wrapped there")
```

| table | with a [link](https://a.example/) |
|---|--:|
| 1 | 2 |

- [x] done

$$\\frac{1}{2}$$
"""


async def answer() -> AsyncIterator[str]:
    yield delta("Let me see.").replace('"content"', '"reasoning"')
    yield delta(ANSWER) + ending(prompt_tokens=21, completion_tokens=40, cached_tokens=16)


def assert_accessible(page: Page) -> None:
    results = Axe().run(page, options={"runOnly": RULES})
    found = [
        (each["impact"], each["id"], [node["html"] for node in each["nodes"]])
        for each in results.response["violations"]
    ]
    assert found == []
    assert len(results.response["passes"]) > 10  # it did look


# Of a field's border beside what is around it, which axe does not look at.
CONTRAST = """(field) => {
    const light = (colour) => {
        const parts = colour.match(/[0-9.]+/g).slice(0, 3).map((part) => part / 255);
        const [r, g, b] = parts.map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    };
    const border = light(getComputedStyle(field).borderTopColor);
    const paper = light(getComputedStyle(document.body).backgroundColor);
    return Math.max(border / paper, paper / border);
}"""


@pytest.mark.parametrize("look", LOOKS)
def test_no_finding(open_page: Callable[..., Page], stub: StubServer, look: str) -> None:
    page = open_page(**LOOKS[look])
    expect(page.locator("#suggestions button")).to_have_count(4)
    expect(page.locator("#kv")).to_be_visible()
    assert_accessible(page)
    page.evaluate("document.activeElement.blur()")
    for field in ("#composer", "#system"):
        assert page.locator(field).evaluate(CONTRAST) >= 3

    stub.scripts = [answer, api_error(429, "The queue is full; try again in 2 s.", "queue_full")]
    box = page.get_by_label("Message", exact=True)
    box.fill("Show me everything")
    box.press("Enter")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()  # the answer is there
    box.fill("Once more")
    box.press("Enter")
    expect(page.get_by_role("alert")).to_be_visible()
    page.locator(".question").first.get_by_role("button", name="Edit").click()
    page.locator(".question").last.hover()
    assert_accessible(page)
    page.get_by_label("Edit the message").focus()
    page.keyboard.press("Escape")
    for name in ("Chats", "Settings") if look == "phone" else ("Settings",):
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.get_by_role("dialog")).to_be_visible()
        assert_accessible(page)
        page.keyboard.press("Escape")


# How dark each rectangle of a picture is on average: 0 is white, 1 is black.
DARKNESS = """async ([picture, rectangles]) => {
    const bytes = Uint8Array.from(atob(picture), (c) => c.charCodeAt(0));
    const bitmap = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
    const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(bitmap, 0, 0);
    return rectangles.map((rectangle) => {
        const { data } = context.getImageData(...rectangle.map(Math.round));
        let light = 0;
        for (let i = 0; i < data.length; i += 4) light += data[i] + data[i + 1] + data[i + 2];
        return 1 - light / (data.length / 4) / 765;
    });
}"""
# The map's cells and the legend's swatches of a state.
PLACES = """(state) => {
    const box = (node) => {
        const { x, y, width, height } = node.getBoundingClientRect();
        return [x, y, width, height];
    };
    const [x, y, , height] = box(document.getElementById(`kv-${state}`));
    const side = 0.55 * 16;
    const swatch = [x, y + (height - side) / 2, side, side];
    return [swatch, ...[...document.querySelectorAll(`#kv-map .${state}`)].map(box)];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_forced_colours_leave_the_states_of_blocks_apart(
    open_page: Callable[..., Page], stub: StubServer, scheme: str
) -> None:
    page = open_page(forced_colors="active", color_scheme=scheme, viewport={"width": 1280, "height": 800})
    for state, count in (("active", 12), ("cached", 20), ("free", 32)):
        expect(page.locator(f"#kv-map .{state}")).to_have_count(count)
    picture = base64.b64encode(page.screenshot()).decode()
    full, hatched, empty = (
        page.evaluate(DARKNESS, [picture, page.evaluate(PLACES, state)])
        for state in ("active", "cached", "free")
    )
    if scheme == "dark":  # there a filling is light
        full, hatched, empty = ([1 - share for share in shares] for shares in (full, hatched, empty))
    assert min(full) > max(hatched) + 0.15
    assert min(hatched) > max(empty) + 0.05
    assert min(empty) > 0.05  # an outline: the whole is to be seen, too

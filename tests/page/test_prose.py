"""Markdown as the page shows it, in the browser that will show it."""

import random
import re

import pytest
from chatting import ask, chats, prose, said
from playwright.sync_api import Page, expect
from stub_server import StubServer

from quire.service.http.static import PAGE

# The rendering of texts that come one after the other as [tag, children...], with text as strings. Captions
# of code, colours, and space between blocks are left out.
RENDER = """async (texts) => {
    const { Prose } = await import("/static/prose.js");
    const shown = ({ localName, data }) => localName !== "figcaption" && data !== "\\n";
    const tree = (node) => {
        if (node.nodeType === Node.TEXT_NODE) return node.data.replace(/^\\n|\\n$/g, "");
        if (node.localName === "code" || node.matches(".math")) return [node.localName, node.textContent];
        const { checked, href, className } = node;
        const mark = checked ? "[x]" : href || (className === "right" ? className : "");
        return [node.localName + (mark && ` ${mark}`), ...[...node.childNodes].filter(shown).map(tree)];
    };
    const prose = new Prose();
    for (const text of texts) prose.update(text);
    prose.node.normalize();
    return tree(prose.node).slice(1);
}"""

CASES = {
    "one\ntwo\n\nthree": [["p", "one", ["br"], "two"], ["p", "three"]],
    "a **b** `c**` *d* ~~e~~": [
        ["p", "a ", ["strong", "b"], " ", ["code", "c**"], " ", ["em", "d"], " ", ["s", "e"]]
    ],
    "# One\n### Three ##\ntext": [["h3", "One"], ["h4", "Three"], ["p", "text"]],
    "## a\n> #### b\n\n### c\n# d\n## e\n# f\n### g\n#### h\n##### i\n###### j": [
        ["h3", "a"],
        ["blockquote", ["h4", "b"]],
        ["h4", "c"],
        ["h3", "d"],
        ["h4", "e"],
        ["h3", "f"],
        ["h4", "g"],
        ["h5", "h"],
        ["h6", "i"],
        ["h6", "j"],
    ],
    "- a\n- b\n  - c\n\n3. d": [["ul", ["li", "a"], ["li", "b", ["ul", ["li", "c"]]]], ["ol", ["li", "d"]]],
    "1. do:\n   ```sh\n   ls\n     -l\n   ```\n2. done": [
        ["ol", ["li", "do:", ["figure", ["pre", ["code", "ls\n  -l"]]]], ["li", "done"]]
    ],
    "````\n```\n````\nafter": [["figure", ["pre", ["code", "```"]]], ["p", "after"]],
    "> a\n> - b\n\n---": [["blockquote", ["p", "a"], ["ul", ["li", "b"]]], ["hr"]],
    "- [ ] a\n- [x] b": [["ul", ["li", ["input"], " a"], ["li", ["input [x]"], " b"]]],
    "| a | b |\n|---|--:|\n| 1 | 2 |": [
        [
            "div",
            [
                "table",
                ["thead", ["tr", ["th", "a"], ["th right", "b"]]],
                ["tbody", ["tr", ["td", "1"], ["td right", "2"]]],
            ],
        ]
    ],
    "see https://a.example/b?c=d.": [
        ["p", "see ", ["a https://a.example/b?c=d", "https://a.example/b?c=d"], "."]
    ],
    "[a](https://a.example/) [b](javascript:alert(1)) ![c](https://c.example/d.png)": [
        ["p", ["a https://a.example/", "a"], " [b](javascript:alert(1)) ", ["a https://c.example/d.png", "c"]]
    ],
    "costs $5 and $6": [["p", "costs $5 and $6"]],
    "<b>&amp;</b>": [["p", "<b>&</b>"]],
}


@pytest.mark.parametrize("text", CASES)
def test_markdown(blank_page: Page, text: str) -> None:
    assert blank_page.evaluate(RENDER, [text]) == CASES[text]


def test_markdown_that_grows_looks_like_markdown_at_once(blank_page: Page) -> None:
    pick = random.Random(0)
    pieces = ["a", "b c", " ", "\n", "\n", "\n\n", "- ", "  - ", "1. ", "# ", "> ", "```", "```py\n", "**"]
    pieces += [
        "## ",
        "### ",
        "\n===\n",
        "\\",
        "<i>",
        "| a |\n",
        "|--|\n",
        "- [ ] ",
        "$x$",
        "$$\n",
        "\\[",
        "\\]",
        "~~",
        "---\n",
        "    ",
    ]
    for _ in range(60):
        text = "".join(pick.choices(pieces, k=25))
        growing = [text[:end] for end in range(1, len(text) + 1)]
        assert blank_page.evaluate(RENDER, growing) == blank_page.evaluate(RENDER, [text]), repr(text)


def test_what_is_above_the_last_block_is_not_built_again(blank_page: Page) -> None:
    kept = blank_page.evaluate(
        """async () => {
            const { Prose } = await import("/static/prose.js");
            const prose = new Prose();
            let text = "";
            const seen = new Set();
            for (let i = 0; i < 50; i += 1) {
                text += `Paragraph ${i} of **many**.\\n\\n- item\\n- item\\n\\n`;
                prose.update(text);
                for (const child of prose.node.children) seen.add(child);
            }
            return [seen.size, prose.node.children.length];
        }"""
    )
    assert kept == [100, 100]


# Gives an answer more and more text, and returns which of its blocks change, and the longest text that is
# parsed and the longest HTML that is sanitised meanwhile.
WATCH = """async ([before, tokens, parser, sanitiser]) => {
    const { Prose } = await import("/static/prose.js");
    const longest = async (path, place, method) => {
        const { default: library } = await import(path);
        const seen = { length: 0 };
        const object = place(library);
        const original = object[method];
        object[method] = function (text, ...rest) {
            seen.length = Math.max(seen.length, text.length);
            return original.call(this, text, ...rest);
        };
        return { seen, restore: () => { object[method] = original; } };
    };
    const prose = new Prose();
    prose.update(before);
    prose.update(before); // marks what has settled
    const blocks = [...prose.node.children];
    const parsed = await longest(parser, (MarkdownIt) => MarkdownIt.prototype, "parse");
    const sanitised = await longest(sanitiser, (DOMPurify) => DOMPurify, "sanitize");
    const observer = new MutationObserver(() => {});
    observer.observe(prose.node, { subtree: true, childList: true, characterData: true, attributes: true });
    let text = before;
    for (const token of tokens) prose.update(text += token);
    const placeOf = ({ target }) => blocks.findIndex((block) => block.contains(target));
    const changed = observer.takeRecords().map(placeOf);
    parsed.restore();
    sanitised.restore();
    return [blocks.length, [...new Set(changed)], parsed.seen.length, sanitised.seen.length];
}"""


def vendored(pattern: str) -> str:
    (path,) = (PAGE / "vendor").glob(pattern)
    return f"/static/{path.relative_to(PAGE).as_posix()}"


def test_a_token_of_a_long_answer_costs_its_last_block_alone(blank_page: Page) -> None:
    section = "## Part\n\nOne **two** three.\n\n| a | b |\n|---|---|\n| 1 | $x$ |\n\n```py\nx = 1\n```\n\n"
    before = section * 200 + "The end"
    libraries = [vendored("markdown-it-*/*.mjs"), vendored("dompurify-*/*.mjs")]
    blocks, changed, parsed, sanitised = blank_page.evaluate(
        WATCH, [before, [" of", " the", " *long*", " answer"], *libraries]
    )
    assert blocks == 801
    assert changed == [800]
    assert 0 < parsed < 2 * len(section)
    assert 0 < sanitised < 2 * len(section)


@pytest.mark.parametrize("piece", ["*a ", "_a", "> ", "  - a\n", "[", "\n- \n", "\\[\n", "| a "])
def test_markdown_takes_any_text_in_stride(blank_page: Page, piece: str) -> None:
    """Nothing that a model repeats may hang the page: 60 kB would take hours if a rule were cubic."""
    shown = blank_page.evaluate(
        """async (text) => {
            const { Prose } = await import("/static/prose.js");
            const prose = new Prose();
            prose.update(text);
            return prose.node.textContent.length;
        }""",
        piece * (60_000 // len(piece)),
    )
    assert shown > 0


SHOW = """async (text) => {
    const { Prose } = await import("/static/prose.js");
    const prose = new Prose();
    prose.update(text);
    document.documentElement.append(prose.node);
}"""
FORMULAS = r"Euler: $e^{i\pi} = -1$, \(\vec{a}\) and" + "\n\n$$\n\\frac{1}{2} \\sqrt[3]{x}\n$$\n\n$\\bad{$"


def test_code_is_coloured_and_formulas_are_set(page: Page) -> None:
    """Under the page's policy: its console stays empty."""
    page.evaluate(SHOW, f"```python\nfor x in range(3): print('x')\n```\n\n{FORMULAS}")
    page.wait_for_selector(".hljs-keyword >> text=for")
    page.wait_for_function("document.querySelectorAll('.math .katex-html').length === 3")
    assert page.locator(".math.source").inner_text() == r"\bad{"
    assert page.locator(".math.display math").text_content().startswith("12")
    size = page.locator(".math.display .sqrt").bounding_box()
    assert size is not None
    assert size["height"] > 5
    page.wait_for_function("[...document.fonts].some((font) => font.status === 'loaded')")
    assert re.search(r"range\(3\)", page.locator("pre code").inner_text())


def test_text_from_right_to_left_is_laid_out_so(page: Page, stub: StubServer) -> None:
    stub.scripts = [said("مرحبا بالعالم.\n\n1. واحد\n\n> نعم\n\nAn *English* end.\n\n- item\n\n`code`")]
    ask(page, "שלום לך")
    expect(prose(page).locator("p").last).to_have_text("code")
    sides = page.evaluate(
        """() => [...document.querySelectorAll(".prose p, .prose li")].map((node) => {
            const range = document.createRange();
            range.selectNodeContents(node);
            const [box, text] = [node.getBoundingClientRect(), range.getBoundingClientRect()];
            return box.right - text.right < text.left - box.left ? "right" : "left";
        })"""
    )
    assert sides == ["right"] * 3 + ["left"] * 3
    marks = "(lists) => lists.map((list) => getComputedStyle(list).direction)"
    assert prose(page).locator("ol, blockquote, ul").evaluate_all(marks) == ["rtl", "rtl", "ltr"]
    for place in (page.locator(".asked"), page.locator("#prompt"), chats(page)):
        expect(place).to_have_css("unicode-bidi", "plaintext")

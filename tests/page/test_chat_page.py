"""The chat page in a real browser, against a stub of the server."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from chatting import ask, chats, endless, last_answer, prose, said
from playwright.sync_api import Page, expect
from stub_server import StubServer, api_error, delta, ending, event, opened, total, usage

OpenPage = Callable[..., Page]
FORBIDDEN = """Object.defineProperty(window, "localStorage", {
    get() { throw new DOMException("Access is denied.", "SecurityError"); },
});"""
WAITING = "Sent as soon as the model is ready."


def test_answer_streams_in_and_is_measured(page: Page, stub: StubServer) -> None:
    go_on = threading.Event()

    async def in_two_halves() -> AsyncIterator[str]:
        yield ": keep-alive\n\n" + event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        yield delta("A block holds ")
        await opened(go_on)
        yield delta("sixteen tokens.")
        yield ending(prompt_tokens=21, completion_tokens=7, cached_tokens=16)

    stub.scripts = [in_two_halves]
    ask(page, "What is a block?")
    expect(prose(page)).to_have_text("A block holds")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(last_answer(page)).to_have_attribute("aria-busy", "true")
    go_on.set()
    expect(prose(page)).to_have_text("A block holds sixteen tokens.")
    stats = last_answer(page).locator(".stats")
    expect(stats).to_contain_text(
        re.compile(r"tokens/s.*first token \d+ ms.*7 tokens.*16 of 21 prompt tokens cached")
    )
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator(".asked")).to_have_text("What is a block?")
    assert stub.requests == [
        {
            "model": "quire-demo",
            "messages": [{"role": "user", "content": "What is a block?"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_characters_cut_in_two_arrive_whole(page: Page, stub: StubServer) -> None:
    async def in_pieces() -> AsyncIterator[bytes]:
        stream = (delta("Grüße, 世界 🌍!") + ending(3, 4)).replace("\n", "\r\n").encode()
        for start in range(0, len(stream), 3):
            yield stream[start : start + 3]
            await asyncio.sleep(0)

    stub.scripts = [in_pieces]
    ask(page, "Greet the world")
    expect(prose(page)).to_have_text("Grüße, 世界 🌍!")


def test_stop_ends_the_stream_and_keeps_the_text(page: Page, stub: StubServer) -> None:
    stub.scripts = [endless]
    for stop in (
        lambda: page.get_by_role("button", name="Stop").click(),
        lambda: page.keyboard.press("Escape"),
    ):
        ask(page, "Go on for ever")
        expect(prose(page)).to_contain_text("more more")
        stop()
        expect(last_answer(page).locator(".stats")).to_contain_text(re.compile(r"Stopped.*\d+ tokens"))
        assert stub.stopped.wait(20), "the server goes on"
        stub.stopped.clear()
        expect(prose(page)).to_contain_text("more more")
        expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_refusal_is_shown_and_retried(page: Page, stub: StubServer) -> None:
    stub.scripts = [api_error(429, "The queue is full; try again in 2 s.", "queue_full"), said("Here it is.")]
    ask(page, "Hello")
    failure = last_answer(page).get_by_role("alert")
    expect(failure).to_contain_text("The queue is full; try again in 2 s.")
    expect(failure).to_contain_text("429 · queue_full")
    failure.get_by_role("button", name="Retry").click()
    expect(prose(page)).to_have_text("Here it is.")
    expect(page.locator(".answer")).to_have_count(1)
    assert [r["messages"] for r in stub.requests] == [[{"role": "user", "content": "Hello"}]] * 2


def test_question_without_an_answer_is_not_sent_again(page: Page, stub: StubServer) -> None:
    stub.scripts = [api_error(400, "The prompt is too long.", "context_length_exceeded"), said("Fine.")]
    ask(page, "Too long")
    failure = last_answer(page).get_by_role("alert")
    expect(failure).to_contain_text("The prompt is too long.")
    expect(failure).to_contain_text("shorten the message")
    expect(failure.get_by_role("button")).to_have_text(["Edit", "New chat"])
    failure.get_by_role("button", name="Edit").click()
    expect(page.get_by_label("Edit the message")).to_be_focused()
    page.keyboard.press("Escape")
    ask(page, "Short")
    expect(prose(page)).to_have_text("Fine.")
    assert stub.requests[1]["messages"] == [{"role": "user", "content": "Short"}]
    stub.scripts = [api_error(400, "The prompt is too long.", "context_length_exceeded")]
    ask(page, "Too long again")
    last_answer(page).get_by_role("button", name="New chat").click()
    expect(page.get_by_role("heading", name="Ask away")).to_be_visible()


def test_failure_in_mid_stream_keeps_the_text(page: Page, stub: StubServer) -> None:
    async def fails() -> AsyncIterator[str]:
        yield delta("Half of an ")
        yield event(
            {"error": {"message": "The engine died.", "type": "server_error", "param": None, "code": None}}
        )

    stub.scripts = [fails]
    ask(page, "Answer")
    expect(last_answer(page).get_by_role("alert")).to_contain_text("The engine died.")
    expect(prose(page)).to_have_text("Half of an")


def test_output_of_the_model_is_text_and_never_markup(page: Page, stub: StubServer) -> None:
    html = '<img src=x onerror="window.hit = 1"><script>window.hit = 1</script><b style="color:red">bold</b>'
    answer = f"{html}\n\n- {html}\n\n> {html}\n\n# {html}\n\n`{html}` **{html}**\n\n```{html}\n{html}\n```\n"
    stub.scripts = [said(*answer)]
    ask(page, html)
    expect(prose(page).locator("pre code")).to_have_text(html)
    expect(last_answer(page).locator(".stats")).to_contain_text("cached")
    assert prose(page).inner_text().count('<img src=x onerror="window.hit = 1">') >= 6
    expect(page.locator(".asked")).to_have_text(html)
    assert page.locator("#messages :is(img, script, b, [style], [onerror])").count() == 0
    assert page.evaluate("window.hit") is None


def test_links_of_the_model_lead_to_the_web_and_nowhere_else(page: Page, stub: StubServer) -> None:
    bad = ["javascript:window.hit=1", "data:text/html,x", "vbscript:x", "file:///etc/passwd", "/v1/models"]
    links = " ".join(f"[{i}]({target}) <{target}>" for i, target in enumerate(bad))
    stub.scripts = [said(f"[Web](https://a.example/) ![Picture](https://b.example/c.png) {links}")]
    ask(page, "Links")
    expect(last_answer(page).locator(".stats")).to_contain_text("cached")
    found = prose(page).locator("a[href]").evaluate_all("(all) => all.map((a) => [a.href, a.rel, a.target])")
    rel = "noopener noreferrer nofollow"
    assert found == [[href, rel, "_blank"] for href in ("https://a.example/", "https://b.example/c.png")]
    assert page.locator("#messages img").count() == 0


def test_code_block_can_be_copied(open_page: OpenPage, stub: StubServer) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    stub.scripts = [said("Run:\n\n```py", "thon\nprint('hi')\n", "\nprint('ho')\n```\n\nThat is all.")]
    ask(page, "Code please")
    block = prose(page).locator("figure.code")
    expect(block.locator("figcaption")).to_contain_text("python")
    block.get_by_role("button", name="Copy").click()
    expect(block.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "print('hi')\n\nprint('ho')"
    question = page.locator(".question").get_by_role("button", name="Copy")
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('plain http')); }")
    question.press("Enter")
    expect(page.locator(".question").get_by_role("button", name="Copied")).to_be_focused()
    assert page.evaluate("navigator.clipboard.readText()") == "Code please"
    page.evaluate("() => { document.execCommand = () => false; }")
    answer = last_answer(page).locator("footer")
    answer.get_by_role("button", name="Copy").click()
    expect(answer.get_by_role("button", name="Not copied")).to_be_visible()


def test_conversation_survives_a_reload_and_goes_on(page: Page, stub: StubServer) -> None:
    stub.scripts = [said("Hello **there**.")]
    ask(page, "Hi")
    expect(prose(page).locator("strong")).to_have_text("there")
    page.reload()
    expect(page.locator(".asked")).to_have_text(["Hi"])
    expect(page.locator(".answer").first.locator("strong")).to_have_text("there")
    stub.scripts = [said("Yes.")]
    ask(page, "Still there?")
    expect(prose(page)).to_have_text("Yes.")
    roles = [message["role"] for message in stub.requests[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_chats_are_kept_opened_and_deleted(page: Page, stub: StubServer) -> None:
    expect(page.get_by_role("button", name="New chat")).to_be_disabled()
    for at in (1, 2):
        stub.scripts = [said(f"Answer {at}.")]
        ask(page, f"Question {at}")
        expect(prose(page)).to_have_text(f"Answer {at}.")
        page.get_by_role("button", name="New chat").click()
        expect(page.get_by_role("heading", name="Ask away")).to_be_visible()
    page.reload()
    expect(page.locator(".asked")).to_have_count(0)
    expect(chats(page)).to_have_text(["Question 2", "Question 1"])
    page.get_by_role("button", name="Question 1").first.click()
    expect(prose(page)).to_have_text("Answer 1.")
    stub.scripts = [said("More.")]
    ask(page, "Go on")
    expect(prose(page)).to_have_text("More.")
    assert [message["content"] for message in stub.requests[-1]["messages"]] == [
        "Question 1",
        "Answer 1.",
        "Go on",
    ]
    expect(chats(page)).to_have_text(["Question 1", "Question 2"])  # the newest first
    page.get_by_role("button", name="Delete “Question 1”").click()
    expect(prose(page)).to_have_text("Answer 2.")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".asked")).to_have_text(["Question 1", "Go on"])
    expect(chats(page)).to_have_count(2)
    page.get_by_role("button", name="Delete “Question 2”").click()
    expect(page.locator(".asked")).to_have_text(["Question 1", "Go on"])
    page.reload()
    expect(chats(page)).to_have_text(["Question 1"])


def test_chats_are_exported_and_imported(open_page: OpenPage, stub: StubServer, tmp_path: Path) -> None:
    stub.scripts = [said("Exported **well**.")]
    first = open_page()
    ask(first, "Keep me")
    expect(prose(first)).to_have_text("Exported well.")
    chats(first)
    with first.expect_download() as download:
        first.get_by_role("button", name="Export all").click()
    file = tmp_path / "chats.json"
    download.value.save_as(file)

    second = open_page()
    expect(chats(second)).to_have_count(0)
    field = second.locator("#import-file")
    for text, problem in (
        ("no", "not JSON"),
        ("{}", "no conversations"),
        (broken(file), "1 of the file is damaged"),
        (re.sub(r'"updated": \d+', '"updated": 1e300', file.read_text()), "1 of the file is damaged"),
    ):
        bad = tmp_path / "bad.json"
        bad.write_text(text)
        field.set_input_files(bad)
        expect(second.locator("#import-problem")).to_contain_text(problem)
    field.set_input_files(file)
    expect(second.locator("#chat-list .chat-title")).to_have_text(["Keep me"])
    field.set_input_files(file)
    expect(second.locator("#import-problem")).to_have_text("Everything in the file is here already.")
    expect(prose(second).locator("strong")).to_have_text("well")
    second.reload()
    expect(prose(second)).to_have_text("Exported well.")


def test_full_or_forbidden_storage_is_told_and_loses_nothing(
    page: Page, open_tab: OpenPage, stub: StubServer, tmp_path: Path
) -> None:
    page.evaluate("""() => {
        let text = "x".repeat(1 << 20);
        for (let i = 0; text.length > 0; i += 1) {
            try { localStorage.setItem(`filler${i}`, text); }
            catch { text = text.slice(text.length / 2 + 1); }
        }
    }""")
    stub.scripts = [said("A long answer. " * 50)]
    assert_told(page, "storage is full", tmp_path / "full.json")
    page.evaluate("""() => {
        const fillers = Object.keys(localStorage).filter((key) => key.startsWith("filler"));
        for (const key of fillers) localStorage.removeItem(key);
    }""")
    chats(page).click()
    expect(page.locator("#toast")).to_be_hidden()
    page.reload()
    expect(prose(page)).to_contain_text("A long answer.")
    assert_told(open_tab(FORBIDDEN), "keep nothing", tmp_path / "forbidden.json")
    assert [request.get("seed") for request in stub.requests] == [7, 7]


def assert_told(page: Page, problem: str, file: Path) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Seed").fill("7")
    page.keyboard.press("Escape")
    ask(page, "Question")
    expect(prose(page)).to_contain_text("A long answer.")
    expect(page.locator("#toast")).to_contain_text(problem)
    expect(page.get_by_role("button", name="Undo")).to_be_hidden()
    edges = page.locator("#toast, #toast-text").evaluate_all(
        "(all) => all.map((n) => n.getBoundingClientRect().right)"
    )
    assert edges[0] - edges[1] > 12
    page.get_by_role("button", name="New chat").click()
    expect(chats(page)).to_have_text(["Question"])
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    download.value.save_as(file)
    assert "A long answer." in file.read_text()
    page.get_by_role("button", name="Delete “Question”").click()
    page.get_by_role("button", name="Undo").click()
    expect(prose(page)).to_contain_text("A long answer.")
    expect(page.locator("#toast")).to_contain_text(problem)


def broken(file: Path) -> str:
    """An export whose first message follows one that is not there."""
    exported = json.loads(file.read_text())
    exported["conversations"][0]["messages"][0]["parent"] = "nobody"
    return json.dumps(exported)


def test_edited_questions_and_new_tries_are_branches(page: Page, stub: StubServer) -> None:
    stub.scripts = [said("First."), said("Second."), said("Edited."), said("Further.")]
    ask(page, "Original")
    expect(prose(page)).to_have_text("First.")
    page.get_by_role("button", name="Try again").click()
    expect(prose(page)).to_have_text("Second.")
    answers = last_answer(page).get_by_role("group", name="Versions")
    expect(answers).to_contain_text("2 / 2")
    answers.get_by_role("button", name="Earlier version").click()
    expect(prose(page)).to_have_text("First.")

    question = page.locator(".question")
    question.get_by_role("button", name="Edit").click()
    field = page.get_by_label("Edit the message")
    expect(field).to_have_value("Original")
    field.press("Escape")
    expect(page.locator(".asked")).to_have_text("Original")
    question.get_by_role("button", name="Edit").click()
    field.fill("Changed")
    field.press("Enter")
    expect(prose(page)).to_have_text("Edited.")
    expect(page.locator(".asked")).to_have_text(["Changed"])
    assert stub.requests[-1]["messages"] == [{"role": "user", "content": "Changed"}]
    ask(page, "And then?")
    expect(prose(page)).to_have_text("Further.")

    versions = page.locator(".question").first.get_by_role("group", name="Versions")
    versions.get_by_role("button", name="Earlier version").click()
    expect(page.locator(".asked")).to_have_text(["Original"])
    expect(last_answer(page)).to_contain_text("2 / 2")  # the try that came last
    page.reload()
    expect(page.locator(".asked")).to_have_text(["Original"])
    versions.get_by_role("button", name="Later version").press("Enter")
    expect(page.locator(".asked")).to_have_text(["Changed", "And then?"])
    expect(versions.get_by_role("button", name="Earlier version")).to_be_focused()
    expect(prose(page)).to_have_text("Further.")


def test_the_keyboard_is_in_the_box_once_an_edit_is_sent(page: Page, stub: StubServer) -> None:
    stub.scripts = [said("Answer."), endless]
    ask(page, "Question")
    expect(prose(page)).to_have_text("Answer.")
    page.get_by_role("button", name="Edit").press("Enter")
    page.keyboard.type(" again")
    page.keyboard.press("Enter")
    expect(prose(page)).to_contain_text("more more")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.press("Escape")
    assert stub.stopped.wait(20)


def test_settings_are_sent_kept_and_checked(page: Page, stub: StubServer) -> None:
    stub.scripts = [said("Aye.")]
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("You are a pirate.")
    page.get_by_label("Temperature", exact=True).fill("0")
    page.get_by_label("Top-p", exact=True).fill("0.9")
    page.get_by_label("Top-k").fill("40")
    page.get_by_label("Min-p").fill("0.05")
    page.get_by_label("Repetition").fill("1.1")
    page.get_by_label("Max tokens").fill("64")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Presence penalty").fill("0.5")
    page.get_by_label("Stop at").fill("END\n\\n\\n")
    page.get_by_label("Answer in JSON").check()
    for name, id_, most in (
        ("Temperature", "temperature", 2),
        ("Seed", "seed", 9_000_000_000_000_000),
        ("Max tokens", "max_tokens", 16_777_216),
    ):
        page.get_by_label(name, exact=True).fill(str(most + 1))
        expect(page.locator(f"#{id_}-problem")).to_contain_text(f"{most}. Until then")
    page.get_by_role("button", name="Done").click()
    page.reload()
    ask(page, "Ahoy")
    expect(prose(page)).to_have_text("Aye.")
    body = stub.requests[-1]
    assert body["messages"][0] == {"role": "system", "content": "You are a pirate."}
    assert {name: value for name, value in body.items() if isinstance(value, int | float)} == {
        "temperature": 0,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "max_tokens": 64,
        "seed": 7,
        "stream": True,
    }
    assert (body["stop"], body["response_format"]) == (["END", "\n\n"], {"type": "json_object"})

    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Reset").click()
    page.keyboard.press("Escape")
    ask(page, "Again")
    expect(page.locator(".answer")).to_have_count(2)
    expect(prose(page)).to_have_text("Aye.")
    assert set(stub.requests[-1]) == {"model", "messages", "stream", "stream_options"}

    page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="Settings").click()
    expect(page.locator("#settings-scope")).to_have_text("For new chats.")
    expect(page.get_by_label("System prompt")).to_have_value("You are a pirate.")


def test_a_refused_setting_stays_in_the_panel_and_is_said(page: Page, stub: StubServer) -> None:
    stub.scripts = [said("Aye.")]
    opener = page.get_by_role("button", name="Settings")
    opener.click()
    field, problem = page.get_by_label("Temperature", exact=True), page.locator("#temperature-problem")
    field.fill("0.5")
    page.get_by_label("Top-k").fill("4")
    field.press("Control+a")
    field.press_sequentially("15")  # its first digit alone would be taken
    expect(problem).to_contain_text("0.5 holds")
    page.get_by_role("button", name="Done").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    expect(field).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.locator("#toast")).to_contain_text("Not taken. Temperature: Value must be less than")
    expect(opener).to_have_attribute("title", "Settings (not all are taken)")
    ask(page, "Ahoy")
    expect(prose(page)).to_have_text("Aye.")
    assert stub.requests[-1]["temperature"] == 0.5
    opener.click()
    expect(field).to_have_value("15")
    expect(field).to_be_focused()
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(problem).to_contain_text("less than or equal to 2. Until then 0.5 holds.")
    field.fill("1.5")
    expect(problem).to_have_text("")
    page.get_by_role("button", name="Done").click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(opener).to_have_attribute("title", "Settings (changed)")
    ask(page, "Again")
    expect(page.locator(".answer")).to_have_count(2)
    expect(prose(page)).to_have_text("Aye.")
    assert stub.requests[-1]["temperature"] == 1.5


def test_what_was_not_sent_is_kept_for_each_chat(page: Page, stub: StubServer) -> None:
    stub.scripts = [said("One.")]
    message = page.get_by_label("Message", exact=True)
    message.fill("For a chat\nto begin")
    page.reload()
    expect(message).to_have_value("For a chat\nto begin")
    ask(page, "First")
    expect(prose(page)).to_have_text("One.")
    page.reload()
    expect(page.locator(".asked")).to_have_text(["First"])
    expect(message).to_have_value("")
    message.fill("For the first")
    page.get_by_role("button", name="New chat").click()
    expect(message).to_have_value("")
    message.fill("For the second")
    page.reload()
    expect(message).to_have_value("For the second")
    chats(page).click()
    expect(message).to_have_value("For the first")
    page.reload()
    expect(message).to_have_value("For the first")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    message.press("Enter")
    expect(page.locator(".asked")).to_have_text(["First", "For the first"])
    expect(page.locator(".answer .prose")).to_have_text(["One.", "One."])
    page.reload()
    expect(message).to_have_value("")
    page.get_by_role("button", name="New chat").click()
    expect(message).to_have_value("For the second")


def test_an_answer_without_text_says_so(page: Page, stub: StubServer) -> None:
    async def cut() -> AsyncIterator[str]:
        yield ending(prompt_tokens=21, completion_tokens=9, reason="length")

    async def silent() -> AsyncIterator[str]:
        yield ending(prompt_tokens=21, completion_tokens=1)

    for script, reason, tokens in ((cut, "length", "9 tokens"), (silent, "stop", "1 token")):
        stub.scripts = [script]
        ask(page, "Say nothing")
        for _ in range(2):
            note = last_answer(page).locator(".note")
            expect(note).to_have_text(f"The model ended without text: {reason}")
            expect(last_answer(page).locator(".stats")).to_contain_text(tokens)
            page.reload()


def test_asks_for_the_key_until_it_fits(page: Page, stub: StubServer) -> None:
    stub.api_key = "secret"
    page.reload()
    field = page.get_by_label("API key", exact=True).locator("visible=true").last
    expect(page.locator("#key-reason")).to_have_role("status")
    expect(page.locator("#key-reason")).to_have_text("This server asks for an API key.")
    for wrong, reason in (
        ("schlüssel", "only letters, digits and signs of ASCII"),
        ("\u200b ", "That is no API key"),
        ("two words", "The server did not accept that key."),
    ):
        field.fill(wrong)
        field.press("Enter")
        expect(page.locator("#key-reason")).to_contain_text(reason)
    field.fill("\u200b secret\ufeff\u200b")
    field.press("Enter")
    stub.scripts = [said("Welcome.")]
    ask(page, "Open")
    expect(prose(page)).to_have_text("Welcome.")

    stub.api_key = "changed"
    ask(page, "Open again")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.locator("#api-key").fill("changed")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".answer .prose")).to_have_text(["Welcome.", "Welcome."])
    assert page.evaluate("localStorage.length + JSON.stringify(localStorage)").count("changed") == 0


def test_a_kept_key_that_cannot_be_sent_is_asked_for_anew(page: Page, stub: StubServer) -> None:
    keep = "(key) => sessionStorage.setItem('quire.api-key', JSON.stringify(key))"
    page.evaluate(keep, "schlüssel\u2009")
    page.reload()
    expect(page.locator("#model")).to_have_attribute("data-phase", "ready")  # it asks for none
    stub.api_key = "secret"
    page.reload()
    expect(page.locator("#key-reason")).to_contain_text("What this tab kept is no API key: one has only")
    page.evaluate(keep, " secret\u200b")
    page.reload()
    expect(page.locator("#model")).to_have_attribute("data-phase", "ready")
    page.evaluate(keep, "another")
    page.reload()
    expect(page.locator("#key-reason")).to_have_text("The server did not accept that key.")


def test_a_key_holds_where_the_browser_keeps_nothing(open_tab: OpenPage, stub: StubServer) -> None:
    stub.api_key = "secret"
    page = open_tab(FORBIDDEN.replace("localStorage", "sessionStorage"))
    page.locator("#api-key").fill("secret")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_attribute("data-phase", "ready")


def test_without_a_key_it_waits_to_be_given_one(page: Page, stub: StubServer) -> None:
    stub.api_key = "secret"
    page.reload()
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    card = page.get_by_role("region", name="Server start-up")
    expect(card).to_contain_text("This server asks for an API key")
    expect(page.get_by_role("dialog")).to_be_hidden()
    card.get_by_role("button", name="Enter the key").click()
    expect(page.locator("#key-reason")).to_have_text("This server asks for an API key.")
    page.locator("#api-key").fill("secret")
    page.keyboard.press("Enter")
    expect(page.locator("#model-name")).to_have_text("quire-demo")


def test_start_up_is_shown_until_the_server_is_ready(page: Page, stub: StubServer) -> None:
    stub.loaded.clear()
    stub.phases = [
        {"phase": "download", "done": 5, "total": 5, "unit": "files", "seconds": 2.5},
        {"phase": "weights", "done": 600_000_000, "total": 1_500_000_000, "unit": "bytes", "seconds": 1.0},
        *stub.phases,
    ]
    page.reload()
    card = page.get_by_role("region", name="Server start-up")
    expect(card).to_contain_text("Loading the weights")
    expect(card).to_contain_text("600.0 MB of 1.50 GB")
    expect(card).to_contain_text("Downloading the model · 2.5 s")
    page.get_by_label("Message", exact=True).fill("Early")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    expect(page.locator("#model-name")).to_have_text("loading")
    stub.loaded.set()
    expect(card).to_be_hidden()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_what_is_entered_early_is_sent_once_when_the_server_is_ready(page: Page, stub: StubServer) -> None:
    stub.scripts = [said("Here."), said("Again.")]
    stub.loaded.clear()
    page.reload()
    message, waiting = page.get_by_label("Message", exact=True), page.get_by_text(WAITING)
    message.fill("Early")
    message.press("Enter")
    expect(waiting).to_be_visible()
    message.press("!")  # changed: it waits to be entered again
    expect(waiting).not_to_be_attached()
    message.press("Enter")
    expect(waiting).to_be_visible()
    message.press("Escape")
    expect(waiting).not_to_be_attached()
    message.press("Enter")
    expect(message).to_have_value("Early!")
    assert stub.requests == []
    stub.loaded.set()
    expect(prose(page)).to_have_text("Here.")
    expect(message).to_have_value("")
    page.context.set_offline(True)
    expect(page.locator("#model")).to_have_attribute("data-phase", "offline")
    page.context.set_offline(False)
    expect(page.locator("#model")).to_have_attribute("data-phase", "ready")
    assert [request["messages"][-1]["content"] for request in stub.requests] == ["Early!"]


def test_what_is_entered_early_goes_to_no_other_chat(page: Page, stub: StubServer) -> None:
    stub.scripts = [said("One.")]
    ask(page, "First")
    expect(prose(page)).to_have_text("One.")
    stub.loaded.clear()
    page.reload()
    message, waiting = page.get_by_label("Message", exact=True), page.get_by_text(WAITING)
    for again in (False, True):
        message.fill("Meant for the first")
        message.press("Enter")
        expect(waiting).to_be_visible()
        if again:
            chats(page).click()
        else:
            page.get_by_role("button", name="New chat").click()
        expect(waiting).not_to_be_attached()
        expect(message).to_have_value("Meant for the first" if again else "")
        if not again:
            chats(page).click()
            expect(message).to_have_value("Meant for the first")
    stub.loaded.set()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    assert len(stub.requests) == 1


def test_enter_beside_an_answer_sends_nothing_later(page: Page, stub: StubServer) -> None:
    """Nor if the server was not to be seen at that moment."""
    stub.scripts = [endless]
    ask(page, "Go on and on")
    expect(prose(page)).to_contain_text("more")
    others = re.compile("/(blocks/events.*|startup|v1/models)$")
    page.route(others, lambda route: route.abort())
    stub.watches += 1
    expect(page.locator("#model")).to_have_attribute("data-phase", "offline")
    message = page.get_by_label("Message", exact=True)
    message.fill("Later")
    message.press("Enter")
    message.press("Escape")
    page.unroute(others)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    expect(message).to_have_value("Later")
    assert len(stub.requests) == 1


def test_names_the_model_and_says_when_it_is_the_demo(page: Page, stub: StubServer) -> None:
    notice = page.get_by_text("is a tiny demonstration model")
    expect(notice).to_be_visible()
    expect(page.locator("#model-name")).to_have_text("quire-demo")
    stub.model = "Qwen/Qwen3-0.6B"
    page.reload()
    expect(page.locator("#model-name")).to_have_text("Qwen3-0.6B")
    expect(page.locator("#model")).to_have_attribute("title", "Qwen/Qwen3-0.6B, context of 2,048 tokens")
    expect(notice).to_be_hidden()


def test_shows_the_blocks_of_the_kv_cache(page: Page, stub: StubServer) -> None:
    bar = page.get_by_role("region", name="KV cache")
    expect(bar).to_contain_text("64 blocks of 16 tokens")
    for state, number in (("active", 12), ("cached", 20), ("free", 32)):
        expect(page.locator(f"#kv-{state}")).to_have_text(str(number))
        expect(page.locator(f"#kv-map .{state}")).to_have_count(number)
    expect(page.locator("#kv-map")).to_have_accessible_name(
        re.compile("12 blocks active, 20 cached, 32 free, of 64")
    )


def test_marks_the_blocks_of_this_chat_and_shared_ones(page: Page, stub: StubServer) -> None:
    expect(page.locator("#kv-own")).to_be_hidden()
    stub.scripts = [said("A block holds sixteen tokens.")]
    stub.own = {"active": 5, "shared": 2, "cached": 4, "host": 0}
    ask(page, "What is a block?")
    expect(page.locator("#kv-map .own")).to_have_count(9)
    expect(page.locator("#kv-map .shared")).to_have_count(2)
    expect(page.locator("#kv-own")).to_have_text("9")
    expect(page.locator("#kv-shared")).to_have_text("2")
    expect(page.locator("#kv-map")).to_have_accessible_name(re.compile("9 of this chat, 2 of them shared"))
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#kv-map .own")).to_have_count(0)
    expect(page.locator("#kv-own")).to_be_hidden()


def test_keyboard_writes_lines_and_sends(page: Page, stub: StubServer) -> None:
    stub.scripts = [said("Two lines.")]
    expect(page.locator("#model-name")).to_have_text("quire-demo")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    expect(prose(page)).to_have_text("Two lines.")
    assert stub.requests[0]["messages"][0]["content"] == "one\ntwo"
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_scrolls_with_the_text_until_the_reader_scrolls_up(page: Page, stub: StubServer) -> None:
    at_end = "(s => s.scrollHeight - s.scrollTop - s.clientHeight < 2)(document.getElementById('scroller'))"
    go_on = threading.Event()

    async def long() -> AsyncIterator[str]:
        for i in range(60):
            yield delta(f"Paragraph {i}.\n\n")
        await opened(go_on)
        yield delta("The end.") + ending(5, 400)

    stub.scripts = [long]
    ask(page, "Write a lot")
    expect(prose(page)).to_contain_text("Paragraph 59.")
    page.wait_for_function(at_end)
    page.mouse.move(400, 300)
    page.mouse.wheel(0, -600)
    jump = page.get_by_role("button", name="Go to the newest text")
    expect(jump).to_be_visible()
    go_on.set()
    expect(prose(page)).to_contain_text("The end.")
    assert not page.evaluate(at_end)
    jump.click()
    page.wait_for_function(at_end)
    expect(jump).to_be_hidden()


def test_a_long_answer_costs_no_more_than_what_is_seen_of_it(page: Page, stub: StubServer) -> None:
    """While it comes, the browser passes over its blocks out of sight, and knows how tall they are."""
    is_drawn = "document.querySelector('.prose .math').checkVisibility({ contentVisibilityAuto: true })"
    drawn, passed_over = f"() => {is_drawn}", f"() => !{is_drawn}"
    height = "document.getElementById('scroller').scrollHeight"
    more, end = threading.Event(), threading.Event()

    async def long() -> AsyncIterator[str]:
        yield delta("".join(f"1. The height of $x_{{{i}}}$\n\n   is kept.\n\n---\n\n" for i in range(60)))
        await opened(more)
        yield delta("More.")
        await opened(end)
        yield ending(5, 400)

    stub.scripts = [long]
    ask(page, "Write a lot")
    page.wait_for_function("() => document.querySelectorAll('.prose .katex').length === 60")
    before = page.evaluate(height)
    assert page.evaluate(drawn)  # not yet: first its height has to be known
    more.set()
    page.wait_for_function(passed_over)
    assert page.evaluate(height) - before < 100
    page.mouse.move(400, 300)
    page.mouse.wheel(0, -100_000)
    page.wait_for_function(drawn)
    page.get_by_role("button", name="Go to the newest text").click()
    page.wait_for_function(passed_over)
    end.set()
    page.wait_for_function(drawn)
    assert page.evaluate(height) - before < 100


def test_phone_has_no_sideways_scroll(open_page: OpenPage, stub: StubServer) -> None:
    page = open_page(viewport={"width": 320, "height": 640}, has_touch=True, is_mobile=True)
    fits = (
        "document.documentElement.scrollWidth <= innerWidth && scroller.scrollWidth <= scroller.clientWidth"
    )
    expect(page.locator("#kv-map i")).to_have_count(64)
    assert page.evaluate(fits)
    expect(page.get_by_role("link", name="KV cache")).to_be_in_viewport(ratio=1)
    stub.scripts = [said(f"{'w' * 200}\n\n`{'c' * 200}`\n\n```\n{'x' * 300}\n```\n\n- - {'y' * 200}")]
    ask(page, "https://example.com/" + "z" * 200)
    expect(prose(page).locator("pre")).to_be_visible()
    expect(last_answer(page).locator(".stats")).to_contain_text("cached")
    assert page.evaluate(fits)
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_role("heading", name="Settings")).to_be_in_viewport()
    assert page.evaluate(fits)
    for name in ("Done", "Close settings"):
        expect(page.get_by_role("button", name=name)).to_be_in_viewport()
    page.set_viewport_size({"width": 320, "height": 256})  # 400 % of a small window: the text needs the room
    expect(page.locator("#kv")).to_be_hidden()


def test_all_that_a_sample_offers_fits_a_phone(open_page: OpenPage, stub: StubServer) -> None:
    page = open_page(viewport={"width": 320, "height": 640}, has_touch=True, is_mobile=True)

    async def cut() -> AsyncIterator[str]:
        for index in (0, 1):
            yield delta("Cut.", "length", index=index, usage=usage(21, 2))
        yield total(usage(21, 4))

    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Samples").fill("2")
    page.keyboard.press("Escape")
    stub.scripts = [cut]
    ask(page, "Answer twice")
    page.get_by_role("button", name="Try again").click()
    count = page.get_by_text("2 / 2")
    expect(page.get_by_role("button", name="Continue")).to_be_visible()
    boxes = (
        "(all) => all.map((n) => [n, n.closest('.answer')].map((each) => each.getBoundingClientRect().right))"
    )
    offered = page.locator(".samples .actions :is(button, .branch-count)")
    assert all(right < edge for right, edge in offered.evaluate_all(boxes))
    assert count.evaluate("(node) => node.getClientRects()[0].height < 30")


def test_dark_mode_follows_the_system_and_the_button(open_page: OpenPage) -> None:
    lightness = (
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).every(c => c > 128)"
    )
    page = open_page(color_scheme="dark")
    assert page.evaluate(lightness) is False
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(lightness) is True
    metas = "[...document.querySelectorAll('meta[name=theme-color]')]"
    frame = f"{metas}.find(({{ media }}) => matchMedia(media).matches)"
    assert page.evaluate(f"{frame}.content") == "#fbfbfa"
    page.reload()
    assert page.evaluate(f"{frame}.content") == "#fbfbfa"
    assert page.evaluate(lightness) is True
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(lightness) is False
    assert page.evaluate("localStorage.getItem('quire.theme')") is None
    assert page.evaluate(f"{frame}.content") == "#131615"


def test_comes_back_when_the_server_does(page: Page, stub: StubServer) -> None:
    expect(page.locator("#model")).to_have_attribute("data-phase", "ready")
    page.context.set_offline(True)
    expect(page.locator("#model")).to_have_attribute("data-phase", "offline")
    expect(page.get_by_role("region", name="Server start-up")).to_contain_text("cannot be reached")
    page.context.set_offline(False)
    expect(page.locator("#model")).to_have_attribute("data-phase", "ready")
    expect(page.get_by_role("region", name="Server start-up")).to_be_hidden()

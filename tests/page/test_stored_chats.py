"""Chats that another version of the page stored, or that came in a file by whoever wrote it."""

import json
from pathlib import Path
from typing import Any

import pytest
from chatting import ask, chats, last_answer, prose, said
from playwright.sync_api import Page, expect
from stub_server import StubServer

QUESTION = {"id": "q", "parent": None, "role": "user", "content": "Question", "status": "done"}
ANSWER = {"id": "a", "parent": "q", "role": "assistant", "content": "**Kept**", "status": "done"}
NULLS = {"tokensPerSecond": None, "firstTokenMs": None, "completionTokens": None, "promptTokens": 7}


@pytest.mark.parametrize(
    ("rest", "about"),
    [
        ({"stats": None, "times": None}, None),
        ({"stats": NULLS, "earlier": "7"}, "about"),
        ({"reasoning": 5, "request": {}, "group": [], "part": "1", "choice": {}}, {"name": 5, "at": "now"}),
        ({"finishReason": {}, "stream": 5, "at": 5, "times": 5}, {"settings": {"samples": 1e9}}),
        ({}, {"settings": {"samples": 1.5, "system": 5, "tools": {}, "temperature": "hot"}}),
    ],
    ids=["nulls", "null figures", "other kinds", "more samples than there are", "other settings"],
)
def test_what_is_malformed_is_left_out_and_the_chat_goes_on(
    page: Page, stub: StubServer, tmp_path: Path, rest: dict[str, Any], about: Any
) -> None:
    chat = {"id": "c", "updated": 1, "messages": [QUESTION, ANSWER | rest], "leaf": "a", "about": about}
    file = tmp_path / "chats.json"
    file.write_text(json.dumps({"format": "quire-conversations", "version": 1, "conversations": [chat]}))
    listed = chats(page)
    page.locator("#import-file").set_input_files(file)
    expect(listed).to_have_text(["Question"])
    page.reload()
    expect(prose(page).locator("strong")).to_have_text("Kept")
    for nonsense in ("object", "NaN", "null", "Thoughts"):
        expect(last_answer(page)).not_to_contain_text(nonsense)
    stub.scripts = [said("Next.")]
    ask(page, "Go on")
    expect(prose(page)).to_have_text("Next.")
    contents = [message["content"] for message in stub.requests[0]["messages"]]
    assert contents == ["Question", "**Kept**", "Go on"]

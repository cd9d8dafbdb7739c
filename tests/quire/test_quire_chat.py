"""`quire chat`: the conversation, its commands, and both who may answer."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from rich.console import Console

from quire.chat.conversation import Conversation, Ended
from quire.chat.markdown import split_whole
from quire.chat.speakers import AnswerFailed, EngineSpeaker, Message, ServerSpeaker, Settings
from quire.chat.terminal import converse, show
from quire.cli import main
from quire.llm import LLM
from tests.quire.stub_api import stub_api
from tests.usage import usage_error


class Parrot:
    """Says what it was last told, a word at a time, and remembers what it was asked."""

    name = "parrot"

    def __init__(self) -> None:
        self.asked: list[tuple[list[Message], dict[str, Any]]] = []

    def answer(self, messages: list[Message], settings: Settings) -> Generator[str, None, None]:
        self.asked.append((list(messages), dict(settings)))
        if messages[-1]["content"] == "fail":
            raise AnswerFailed("no room")
        for word in messages[-1]["content"].split():
            yield f"{word} "


def talk_with(parrot: Parrot) -> tuple[Conversation, list[str]]:
    told: list[str] = []
    return Conversation(parrot, show="".join, tell=told.append), told


def test_turns_are_remembered_until_reset() -> None:
    parrot = Parrot()
    talk, told = talk_with(parrot)
    for line in ("one", "two", "fail", "/retry"):
        talk.take(line)
    assert [message["content"] for message in parrot.asked[1][0]] == ["one", "one ", "two"]
    assert told == ["No answer: no room"]
    assert parrot.asked[3] == parrot.asked[1]  # what failed was never said
    talk.take("/reset")
    talk.take("three")
    assert [message["content"] for message in parrot.asked[-1][0]] == ["three"]
    talk.take("/system Be brief.")
    talk.take("four")
    assert [message["role"] for message in parrot.asked[-1][0]] == ["system", "user"]


def test_settings_are_sent_and_wrong_ones_refused() -> None:
    parrot = Parrot()
    talk, told = talk_with(parrot)
    for line in ("/set temperature 0.2", "/set top-k 5", "/set", "a", "/set temperature", "b"):
        talk.take(line)
    assert told[2] == "Set: temperature 0.2, top_k 5."
    assert [settings for _, settings in parrot.asked] == [{"temperature": 0.2, "top_k": 5}, {"top_k": 5}]
    for line, why in (
        ("/set temperature 9", "Temperature must be between 0.0 and 2.0, got 9."),
        ("/set temperature hot", "temperature must be a number, got hot."),
        ("/set warmth 1", "There is no warmth: there is temperature, "),
        ("/sat", "There is no /sat. /reset"),
    ):
        talk.take(line)
        assert told[-1].startswith(why)
    assert talk.settings == {"top_k": 5}
    with pytest.raises(Ended):
        talk.take("/exit")


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said() -> None:
    def pieces() -> Iterator[str]:
        yield "one "
        raise KeyboardInterrupt

    shown = io.StringIO()
    assert show(pieces(), Console(file=shown, force_terminal=True)) == "one "
    assert "(stopped)" in shown.getvalue()


def test_markdown_is_drawn_when_a_block_is_whole() -> None:
    assert split_whole("A **b") == ("", "A **b")
    assert split_whole("# A\n\nb\n") == ("# A\n\n", "b\n")
    code = "```python\na = 1\n\nb = 2\n"
    assert split_whole(code) == ("", code)
    assert split_whole(f"{code}```\n\n- c") == (f"{code}```\n\n", "- c")


def test_each_line_of_a_pipe_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('hello there\n"""two\nlines"""\n'))
    parrot = Parrot()
    converse(parrot, "", {})
    assert capsys.readouterr().out == "hello there \ntwo lines \n"
    assert parrot.asked[1][0][-1]["content"] == "two\nlines"


def test_what_is_no_utf_8_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\udcff\nhello\n"))
    parrot = Parrot()
    converse(parrot, "", {})
    assert "that is not UTF-8" in str(capsys.readouterr())
    assert [asked[-1]["content"] for asked, _ in parrot.asked] == ["hello"]


# -- who answers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with stub_api() as found:
        yield found


def test_a_server_answers(url: str) -> None:
    hello: list[Message] = [{"role": "user", "content": "hello"}]
    assert "".join(ServerSpeaker(f"{url}/v1/", "secret", None).answer(hello, {})) == "I first "
    assert "".join(ServerSpeaker(url, "secret", "second").answer(hello, {})) == "I second "
    with pytest.raises(AnswerFailed, match=r"give a valid API key \(401\)"):
        list(ServerSpeaker(url, None, None).answer(hello, {}))
    cut = ServerSpeaker(url, "secret", None).answer(hello, {"temperature": 2})
    assert next(cut) == "I "
    with pytest.raises(AnswerFailed, match="too hot"):
        next(cut)


def test_the_command_talks_with_a_server(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    monkeypatch.setenv("QUIRE_API_KEY", "secret\nanother")
    with pytest.raises(SystemExit) as ended:
        main(["chat", url, "--model-name", "second"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "I second \n"
    with pytest.raises(SystemExit, match=r"^quire chat: .*no server answers at .*; `quire serve` starts one"):
        main(["chat", "http://127.0.0.1:1"])
    for words, told in (
        (["chat", url, "--max-num-seqs", "2"], "--max-num-seqs is of a model in this process"),
        (["chat", "--model-name", "x"], "--model-name is for a server"),
    ):
        assert f"quire chat: {told}" in usage_error(words, capsys)


def test_an_engine_answers() -> None:
    llm = LLM(device="cpu", max_num_seqs=2, num_gpu_blocks_override=64, swap_space=0)
    speaker = EngineSpeaker(llm, "quire-demo")
    hello: list[Message] = [{"role": "user", "content": "What is a KV cache?"}]
    settings = {"temperature": 0, "max_tokens": 8}
    pieces = list(speaker.answer(hello, settings))
    assert "".join(pieces) == "".join(speaker.answer(hello, settings)) != ""
    left = speaker.answer(hello, settings)
    next(left)
    left.close()
    assert not llm.core.has_work
    with pytest.raises(AnswerFailed, match="/reset begins a new one"):
        list(speaker.answer([{"role": "user", "content": "a " * 5000}], settings))

"""Pages to chat on: Open WebUI itself, by its API and in a browser, and what LibreChat asks a model by."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Page, expect, sync_playwright

from tests.clients.conftest import CLIENTS, SAID, answering, call_of, embedding
from tests.clients.open_webui import OpenWebUI, serving
from tests.docs.pages import PAGES, PORT, block, section
from tests.service import tool_templates
from tests.service.live import Live

pytestmark = pytest.mark.timeout(600)  # Open WebUI alone starts for half a minute, or longer
HERE, PACKAGES = Path(__file__).parent, Path(CLIENTS or "").resolve()
QUESTION, GIVES, TITLE, THOUGHT = "How warm is it in Bern?", "21 degrees", "Weather of Bern", "I wonder."
UNTHINKING = "<think>\n\n</think>\n\n"
THINKING = tool_templates.HERMES + f"{{%- if enable_thinking is false %}}{UNTHINKING}{{% endif %}}"
MODELS = ("tiny", "responses.tiny", "ollama.tiny")
MESSAGES = [{"role": "user", "content": QUESTION}]
ENTITLED = {"title": TITLE, "language": "English"}
TOOL = f'''
class Tools:
    def get_weather(self, city: str) -> str:
        """
        Tell how warm it is.
        :param city: its name
        """
        return f"{GIVES} in {{city}}"
'''


def answer(prompt: str) -> str:
    """Return what a model says that thinks, calls the weather's tool where it has one, and knows titles."""
    thought = "" if prompt.endswith(UNTHINKING) else f"<think>\n{THOUGHT}\n</think>\n\n"
    return thought + answer_itself(prompt)


def answer_itself(prompt: str) -> str:
    if re.search("concise.{0,20} title", prompt):
        if '"extract"' in prompt:
            return call_of("extract", ENTITLED)
        return json.dumps(ENTITLED) if re.search('JSON|"title"|language', prompt) else TITLE
    if '"get_weather"' in prompt and GIVES not in prompt:
        return f"I look.\n{call_of('get_weather', {'city': 'Bern'})}"
    return SAID


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with answering(answer, THINKING) as live:
        yield live


@pytest.fixture(scope="module")
def open_webui(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenWebUI]:
    """To which a model is an OpenAI's, and, with prefixes, an Ollama's and one that Responses are asked of.

    Another model is for its documents.
    """
    with embedding() as documents:
        settings = {
            "ENABLE_OLLAMA_API": "True",
            "OLLAMA_BASE_URL": live.url,
            "OLLAMA_API_CONFIGS": json.dumps({"0": {"prefix_id": "ollama"}}),
            "RAG_EMBEDDING_ENGINE": "openai",
            "RAG_EMBEDDING_MODEL": "tiny",
            "RAG_OPENAI_API_BASE_URL": f"{documents.url}/v1",
        }
        home = tmp_path_factory.mktemp("open-webui")
        with serving(PACKAGES / "open-webui", live.url, home, **settings) as page:
            admin = page.get("/openai/config")
            admin["OPENAI_API_BASE_URLS"] *= 2
            admin["OPENAI_API_CONFIGS"] = {"1": {"prefix_id": "responses", "api_type": "responses"}}
            page.post("/openai/config/update", **admin)
            page.post("/api/v1/tools/create", id="weather", name="Weather", content=TOOL, meta={})
            assert {model["id"] for model in page.get("/api/models?refresh=true")["data"]} == set(MODELS)
            yield page


def test_open_webui_by_its_api(open_webui: OpenWebUI) -> None:
    assert open_webui.get("/ollama/api/version")["version"]
    for model in MODELS:
        asked: dict[str, Any] = {"model": model, "messages": MESSAGES}
        whole = open_webui.post("/api/chat/completions", **asked, stream=False)
        assert whole["choices"][0]["message"]["content"] == SAID
        titled = open_webui.post("/api/v1/tasks/title/completions", **asked)
        assert json.loads(titled["choices"][0]["message"]["content"])["title"] == TITLE
        called = open_webui.post("/api/chat/completions", **asked, stream=False, tool_ids=["weather"])
        assert called["choices"][0]["finish_reason"] == "tool_calls"
    for model in ("tiny", "ollama.tiny"):
        asked = {"model": model, "messages": MESSAGES}
        assert open_webui.streamed("/api/chat/completions", **asked) == SAID
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 100}  # as Anthropic's clients ask it
    assert open_webui.post("/api/v1/messages/count_tokens", **asked)["input_tokens"] > 0
    assert open_webui.post("/api/v1/messages", **asked)["content"][-1]["text"] == SAID


def test_open_webui_searches_documents(open_webui: OpenWebUI) -> None:
    file = open_webui.upload("/api/v1/files/?process=true&process_in_background=false", "cat.txt", "the cat")
    found = open_webui.post(
        "/api/v1/retrieval/query/collection", collection_names=[f"file-{file['id']}"], query="the cat", k=1
    )
    assert found["documents"] == [["the cat"]]


def test_open_webui_in_a_browser(open_webui: OpenWebUI) -> None:
    open_webui.post("/api/v1/users/user/settings/update", ui={"showChangelog": False})
    for model in MODELS:
        open_webui.post(
            "/api/v1/models/create", id=model, name=model, meta={"toolIds": ["weather"]}, params={}
        )
    browsers = ("chromium", "google-chrome", "chromium-headless-shell")
    path = next(filter(None, map(shutil.which, browsers)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for model in MODELS:
            page = browser.new_page()
            page.set_default_timeout(60_000)
            chat(page, f"{open_webui.url}/?model={model}")
            page.close()
        browser.close()


def chat(page: Page, url: str) -> None:
    """Ask twice: a tool is called, thinking is folded, and the chat has its title."""
    page.goto(url)
    for count, text in ((1, QUESTION), (2, "And tomorrow?")):
        page.locator("#chat-input").fill(text)
        page.locator("#chat-input").press("Enter")
        expect(page.get_by_text(SAID)).to_have_count(count, timeout=60_000)
    expect(page.get_by_text("get_weather")).to_have_count(1)
    expect(page.get_by_text(re.compile("^Thought"))).to_have_count(2)
    expect(page.get_by_text(TITLE).first).to_be_visible()


@pytest.mark.parametrize("provider", ["openAI", "anthropic"])
def test_librechat(live: Live, provider: str) -> None:
    told = block("yaml", "custom:", section(PAGES["docs/clients.md"], "LibreChat"))
    settings = yaml.safe_load(told.replace(PORT, str(live.port)).replace("quire-demo", "tiny"))
    program = (HERE / "librechat.mjs").read_text()
    done = subprocess.run(
        ["node", "--input-type=module", "-", provider, live.url, json.dumps(settings)],
        input=program,
        cwd=PACKAGES / "librechat",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout.splitlines()[-1])
    assert out["models"] == (["tiny"] if provider == "openAI" else [])
    assert out["whole"] == SAID and out["streamed"] == f"I look.{SAID}"
    # a model that is none of Anthropic's is not asked to think there
    assert out["thought"] == {"openAI": THOUGHT * 2, "anthropic": ""}[provider]
    assert out["tools"] == [f"{GIVES} in Bern"]
    assert out["titles"] == {"completion": TITLE, "functions": TITLE}
    # of a custom endpoint it asks for no usage, and counts itself
    assert len(out["tokens"]) == {"openAI": 0, "anthropic": 2}[provider]

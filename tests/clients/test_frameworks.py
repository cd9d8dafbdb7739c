"""Frameworks and gateways in Python, whole and streamed, with tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.conftest import SAID
from tests.service.live import Live

QUESTION: Any = [{"role": "user", "content": "How warm is it in Bern?"}]
CITY = {"city": "Bern"}


def get_weather(city: str) -> str:
    """Tell how warm it is."""
    return f"21 degrees in {city}"


@pytest.mark.parametrize("responses", [False, True])
def test_langchain(serve_model: Callable[..., Live], responses: bool) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    live = serve_model("get_weather", CITY, "21 degrees")
    model = ChatOpenAI(base_url=f"{live.url}/v1", api_key="none", model="tiny", use_responses_api=responses)
    weather = tool(get_weather)
    said: list[Any] = [("user", QUESTION[0]["content"])]
    said.append(model.bind_tools([weather]).invoke(said))
    (call,) = said[-1].tool_calls
    assert (call["name"], call["args"]) == ("get_weather", CITY)
    said.append(weather.invoke(call))
    assert model.invoke(said).text == SAID
    assert "".join(chunk.text for chunk in model.stream(said)) == SAID


@pytest.mark.parametrize("provider", ["openai", "anthropic", "ollama", "ollama_chat"])
def test_litellm(serve_model: Callable[..., Live], provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    from litellm import completion

    live = serve_model()
    base = f"{live.url}/v1" if provider == "openai" else live.url
    asked: Any = {"model": f"{provider}/tiny", "api_base": base, "api_key": "none", "messages": QUESTION}
    assert completion(**asked).choices[0].message.content == SAID
    chunks = completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID


def test_openai_agents(serve_model: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool
    from openai import AsyncOpenAI

    live = serve_model("get_weather", CITY, "21 degrees")

    async def ask() -> list[str]:
        client = AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none")
        model = OpenAIResponsesModel("tiny", client)
        agent = Agent(name="a", instructions="Be brief.", tools=[function_tool(get_weather)], model=model)
        whole = await Runner.run(agent, QUESTION)
        streamed = Runner.run_streamed(agent, QUESTION)
        async for _ in streamed.stream_events():
            pass
        return [whole.final_output, streamed.final_output]

    assert asyncio.run(ask()) == [SAID, SAID]


def test_langchain_embeds(serve_embeddings: Live) -> None:
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(
        base_url=f"{serve_embeddings.url}/v1", api_key="none", model="tiny", check_embedding_ctx_length=False
    )
    first, second = embeddings.embed_documents(["hello there", "the cat"])
    assert embeddings.embed_query("the cat") == second != first


def test_litellm_embeds_and_ranks(serve_embeddings: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    from litellm import embedding, rerank

    url = serve_embeddings.url
    reply = embedding(model="openai/tiny", api_base=f"{url}/v1", api_key="none", input=["hello", "the cat"])
    assert [each["index"] for each in reply.data] == [0, 1]
    ranked = rerank(
        model="cohere/tiny", api_base=url, api_key="none", query="the cat", documents=["hello", "the cat"]
    )
    assert [each["index"] for each in ranked.results] == [1, 0]

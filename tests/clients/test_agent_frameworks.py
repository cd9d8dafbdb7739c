"""Frameworks for agents: each calls a tool, then tells what the model says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.conftest import SAID
from tests.service.live import Live

CITY = {"city": "Bern"}
QUESTION = "How warm is it in Bern?"
GIVES = "21 degrees"


def get_weather(city: str) -> str:
    """Tell how warm it is.

    Args:
        city: its name
    """
    return f"{GIVES} in {city}"


@pytest.fixture
def url(serve_model: Callable[..., Live]) -> str:
    return f"{serve_model('get_weather', CITY, GIVES).url}/v1"


def test_langgraph(url: str) -> None:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=url, api_key="none", model="tiny")
    agent = create_agent(model, tools=[get_weather])
    said: list[Any] = agent.invoke({"messages": [("user", QUESTION)]})["messages"]
    assert said[-1].text == SAID and GIVES in said[-2].text
    tokens = agent.stream({"messages": [("user", QUESTION)]}, stream_mode="messages")
    assert "".join(chunk.text for chunk, _ in tokens if chunk.type == "AIMessageChunk").endswith(SAID)


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_pydantic_ai(url: str, kind: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    of_kind = OpenAIChatModel if kind == "chat" else OpenAIResponsesModel
    agent = Agent(of_kind("tiny", provider=OpenAIProvider(base_url=url, api_key="none")), tools=[get_weather])

    async def ask() -> list[str]:
        whole = await agent.run(QUESTION)
        async with agent.run_stream(QUESTION) as streamed:
            return [whole.output, await streamed.get_output()]

    assert asyncio.run(ask()) == [SAID, "I look."]  # a stream's first text is its answer


def test_smolagents(serve_model: Callable[..., Live]) -> None:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    live = serve_model("final_answer", {"answer": SAID}, "never said")
    model = OpenAIServerModel("tiny", api_base=f"{live.url}/v1", api_key="none")
    agent = ToolCallingAgent([tool(get_weather)], model, max_steps=2, verbosity_level=0)
    assert agent.run(QUESTION) == SAID


def test_haystack(url: str) -> None:
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    model = OpenAIChatGenerator(Secret.from_token("none"), "tiny", api_base_url=url)
    agent = Agent(chat_generator=model, tools=[create_tool_from_function(get_weather)])
    said = agent.run(messages=[ChatMessage.from_user(QUESTION)])["messages"]
    assert said[-1].text == SAID


def test_autogen(url: str) -> None:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    known: Any = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
    client = OpenAIChatCompletionClient(
        model="tiny", base_url=url, api_key="none", model_info={**known, "family": "unknown"}
    )
    agent = AssistantAgent("a", client, tools=[get_weather], reflect_on_tool_use=True)
    said = asyncio.run(agent.run(task=QUESTION)).messages[-1]
    assert said.to_text() == SAID


def test_instructor(serve_model: Callable[..., Live]) -> None:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    live = serve_model("City", CITY, "never said")
    client = instructor.from_openai(OpenAI(base_url=f"{live.url}/v1", api_key="none"))
    found = client.chat.completions.create(
        model="tiny", response_model=City, messages=[{"role": "user", "content": QUESTION}]
    )
    assert found.city == "Bern"


def test_dspy(serve_model: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import dspy

    live = serve_model()
    model = dspy.LM("openai/tiny", api_base=f"{live.url}/v1", api_key="none", cache=False)
    assert model(QUESTION) == [SAID]

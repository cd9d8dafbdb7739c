"""LlamaIndex's agent at the URL that is given calls a tool; print what it says then."""

from __future__ import annotations

import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def get_weather(city: str) -> str:
    """Tell how warm it is."""
    return f"21 degrees in {city}"


async def ask(url: str) -> str:
    model = OpenAILike(
        model="tiny", api_base=url, api_key="none", is_chat_model=True, is_function_calling_model=True
    )
    return str(await FunctionAgent(tools=[get_weather], llm=model).run("How warm is it in Bern?"))


print(asyncio.run(ask(sys.argv[1])))

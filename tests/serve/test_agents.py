"""The tool loop as the openai-agents package runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serve import script
from tests.serve.server import Server

agents = pytest.importorskip("agents", reason="pip install openai-agents")

pytestmark = pytest.mark.mpi(2)


@pytest.fixture(scope="module")
def server(scripted: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(scripted, 2, folder=tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("stream", [True, False])
def test_an_agent_calls_its_tools_and_answers(server: Server, api: str, stream: bool) -> None:
    called: list[tuple[str, str]] = []

    async def run() -> Any:
        agents.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
            agent = agents.Agent(
                name="Clerk",
                instructions=script.instructions(642),
                tools=[_tool(call.name, call.result, called) for call in script.CALLS],
                model=kind(model="scripted-model", openai_client=client),
                model_settings=agents.ModelSettings(temperature=0),
            )
            if not stream:
                return await agents.Runner.run(agent, script.REQUEST)
            result = agents.Runner.run_streamed(agent, script.REQUEST)
            assert len([event async for event in result.stream_events()]) > 40
            return result

    result = asyncio.run(run())
    assert called == [(call.name, call.arguments) for call in script.CALLS]
    assert result.final_output == script.ANSWER


def _tool(name: str, result: str, called: list[tuple[str, str]]) -> Any:
    (tool,) = (tool for tool in script.TOOLS if tool.name == name)

    async def invoke(context: Any, arguments: str) -> str:
        called.append((name, arguments))
        return result

    return agents.FunctionTool(
        name=name,
        description=tool.description,
        params_json_schema=tool.parameters,
        on_invoke_tool=invoke,
        strict_json_schema=False,
    )

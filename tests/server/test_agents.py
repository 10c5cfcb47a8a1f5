"""Agents of openai-agents and LangGraph: each calls two tools in turn, and answers with what they returned.

Both packages are optional: pip install openai-agents langgraph langchain-openai
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from real_files import FOLDER, real
from sakiyomi import LLM
from sakiyomi.server.schema import ChatRequest
from scripted import script
from server_toys import marked_tokenizer, running
from toys import tiny_llama

QUESTION = "How is the weather in Paris, and how many foxes are there?"
ANSWER = "It is sunny, and there are 3."
OVER = "<|over|>"
CALLED = [("weather", "Paris"), ("count", "foxes & <bears>", 2)]


class Form(NamedTuple):
    """A template, and what a model of it writes: a call of weather, one of count, and an answer."""

    template: str
    weather: str
    count: str
    answer: str = "{answer}"


def pairs(call: str, each: str) -> tuple[str, str]:
    """Two calls whose arguments are written one by one."""
    count = each.format("animal", "foxes & <bears>") + each.format("least", "2")
    return call.format("weather", each.format("city", "Paris")), call.format("count", count)


def objects(call: str) -> tuple[str, str]:
    """Two calls whose arguments are one object."""
    values: list[dict[str, Any]] = [{"city": "Paris"}, {"animal": "foxes & <bears>", "least": 2}]
    texts = [json.dumps(value) for value in values]
    return call.replace("NAME", "weather").replace("ARGS", texts[0]), call.replace("NAME", "count").replace(
        "ARGS", texts[1]
    )


HERMES = '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>'
CHANNEL = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FORMS = [
    Form("Qwen-Qwen2.5-7B-Instruct", *objects(HERMES)),
    Form("Qwen-Qwen3-0.6B", *objects(f"<think>\nHm.\n</think>\n\n{HERMES}"), "<think>\nHm.\n</think>\n\n{answer}"),
    Form(
        "Qwen3-Coder",
        *pairs("<tool_call>\n<function={}>\n{}</function>\n</tool_call>", "<parameter={}>\n{}\n</parameter>\n"),
    ),
    Form("mistralai-Mistral-Nemo-Instruct-2407",
         *objects('[TOOL_CALLS][{"name": "NAME", "arguments": ARGS, "id": "abcdef123"}]')),
    Form("meta-llama-Llama-3.1-8B-Instruct", *objects('{"name": "NAME", "parameters": ARGS}')),
    Form(
        "GLM-4.6",
        *pairs("\n<tool_call>{}\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
    ),
    Form("ByteDance-Seed-OSS", *pairs(
        "<seed:tool_call>\n<function={}>\n{}</function>\n</seed:tool_call>", "<parameter={}>{}</parameter>\n")),
    Form("moonshotai-Kimi-K2", *objects(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGS"
        "<|tool_call_end|><|tool_calls_section_end|>")),
    Form(
        "MiniMax-M2",
        *pairs(
            'Hm.\n</think>\n\n<minimax:tool_call>\n<invoke name="{}">\n{}</invoke>\n</minimax:tool_call>',
            '<parameter name="{}">{}</parameter>\n',
        ),
        "Hm.\n</think>\n\n{answer}",
    ),
    Form(
        "openai-gpt-oss-120b",
        *objects(f"{CHANNEL}<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGS<|call|>"),
        f"{CHANNEL}<|channel|>final<|message|>{{answer}}<|return|>",
    ),
    Form("LFM2-8B-A1B", '<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>',
         '<|tool_call_start|>[count(animal="foxes & <bears>", least=2)]<|tool_call_end|>'),
    Form("microsoft-Phi-3.5-mini-instruct", *objects('{"name": "NAME", "arguments": ARGS}')),  # the general form
]  # fmt: skip

# ---------------------------------------------------------------- agents

Run = Callable[[str, bool, "Choose"], tuple[str, list[Any]]]
"""Runs an agent against this address, streamed or not: its answer, and the calls of its tools."""
Choose = Callable[[int], str | None]
"""The tool to choose after so many calls; None: as the model decides, "none": no tool."""


def openai_agent(kind: str) -> Run:
    """An agent of openai-agents, whose model asks ``kind``: chat completions or responses."""
    agents = pytest.importorskip("agents", reason="pip install openai-agents")

    def run(url: str, stream: bool, choose: Choose) -> tuple[str, list[Any]]:
        agents.set_tracing_disabled(True)
        seen: list[Any] = []

        def done() -> None:
            agent.model_settings.tool_choice = choose(len(seen))

        def weather(city: str) -> str:
            """Tell the weather."""
            seen.append(("weather", city))
            done()
            return "sunny"

        def count(animal: str, least: int) -> str:
            """Count animals."""
            seen.append(("count", animal, least))
            done()
            return "3"

        async def talk() -> str:
            async with httpx.AsyncClient(verify=False) as web:
                client = openai.AsyncOpenAI(
                    base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300, http_client=web
                )
                agent.model = getattr(agents, f"OpenAI{kind}Model")(model="toy", openai_client=client)
                if not stream:
                    return str((await agents.Runner.run(agent, QUESTION)).final_output)
                result = agents.Runner.run_streamed(agent, QUESTION)
                async for _ in result.stream_events():
                    pass
                return str(result.final_output)

        agent = agents.Agent(
            name="agent",
            instructions="Use the tools.",
            tools=[agents.function_tool(weather), agents.function_tool(count)],
            model_settings=agents.ModelSettings(temperature=0, max_tokens=300, tool_choice=choose(0)),
            reset_tool_choice=False,
        )
        return asyncio.run(talk()), seen

    return run


def graph_agent() -> Run:
    """A graph of LangGraph that goes from the model to its tools and back."""
    graphs = pytest.importorskip("langgraph.graph", reason="pip install langgraph")
    prebuilt = pytest.importorskip("langgraph.prebuilt", reason="pip install langgraph")
    chats = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")

    def run(url: str, stream: bool, choose: Choose) -> tuple[str, list[Any]]:
        seen: list[Any] = []

        def weather(city: str) -> str:
            """Tell the weather."""
            seen.append(("weather", city))
            return "sunny"

        def count(animal: str, least: int) -> str:
            """Count animals."""
            seen.append(("count", animal, least))
            return "3"

        with httpx.Client(verify=False) as web:
            model = chats.ChatOpenAI(
                base_url=f"{url}/v1", api_key="none", model="toy", http_client=web, max_retries=0, timeout=300,
                temperature=0, max_tokens=300, streaming=stream,
            )  # fmt: skip

            def ask(state: dict[str, Any]) -> dict[str, Any]:
                bound = model.bind_tools([weather, count], tool_choice=choose(len(seen)))
                return {"messages": [bound.invoke(state["messages"])]}

            graph = graphs.StateGraph(graphs.MessagesState)
            graph.add_node("model", ask)
            graph.add_node("tools", prebuilt.ToolNode([weather, count]))
            graph.add_edge(graphs.START, "model")
            graph.add_conditional_edges("model", prebuilt.tools_condition)
            graph.add_edge("tools", "model")
            found = graph.compile().invoke({"messages": [("system", "Use the tools."), ("user", QUESTION)]})
        return str(found["messages"][-1].content), seen

    return run


AGENTS: dict[str, Callable[[], Run]] = {
    "openai-agents": lambda: openai_agent("ChatCompletions"),
    "openai-agents, responses": lambda: openai_agent("Responses"),
    "langgraph": graph_agent,
}


@pytest.fixture(scope="module")
def toy() -> LLM:
    marks = sorted({mark for form in FORMS for text in form[1:] for mark in re.findall(r"<[|][^<>]+[|]>", text)})
    tokenizer = marked_tokenizer([*marks, OVER])
    tokenizer.eos_token = OVER  # the usual one of toys is a mark of channels
    model = tiny_llama(max_position_embeddings=16384, eos_token_id=tokenizer.eos_token_id)
    return LLM((model, tokenizer), "none", compile=False)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.template)
def test_an_agent_calls_two_tools_in_turn(agent: str, form: Form, toy: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each format, streamed for every other one; what it is told of a call goes back into the prompt."""
    run = AGENTS[agent]()
    template = real(f"llama.cpp/models/templates/{form.template}.jinja")

    def said(body: ChatRequest) -> str:
        results = [message.content for message in body.messages if message.role == "tool"]
        return [form.weather, form.count, form.answer.replace("{answer}", ANSWER)][len(results)]

    script(monkeypatch, said, toy.tokenizer.eos_token_id)
    with running(toy, chat_template=str(template)) as (_, url):
        answer, seen = run(url, FORMS.index(form) % 2 == 0, lambda _: None)
    assert seen == CALLED
    assert ANSWER in answer


@pytest.fixture(scope="module")
def small() -> Iterator[str]:
    """The address of a server with SmolLM2, whose template knows no tools."""
    with running(LLM(str(real(FOLDER)), "none", max_context=2048), served_name="toy") as (server, url):
        assert server.card()["tools"] == "general"
        yield url


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_with_a_small_model(agent: str, small: str) -> None:
    """SmolLM2 has 135M parameters, and is told which tool to call."""
    answer, seen = AGENTS[agent]()(small, False, lambda calls: ["weather", "count", "none"][min(calls, 2)])
    assert [name for name, *_ in seen] == ["weather", "count"]
    assert answer

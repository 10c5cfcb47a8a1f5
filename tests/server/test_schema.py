"""The OpenAPI document is kept to: what it allows is served or refused in words, what it forbids is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from server_toys import bombs, running, toy_llm, web

HOW: dict[str, Any] = {"max_examples": 10, "deadline": None, "derandomize": True, "database": None}
HOW["suppress_health_check"] = [*HealthCheck]

LENGTHS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
"""How each path is told how long a text may become."""


def _tool(schema: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.mark.thorough
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_path_keeps_to_its_document(mode: GenerationMode) -> None:
    tried: dict[str, int] = {}
    with running(toy_llm("none"), max_body=100_000_000) as (_, url):
        document = schemathesis.openapi.from_url(f"{url}/openapi.json")
        for found in document.get_all_operations():
            operation = found.ok()
            if mode is GenerationMode.NEGATIVE and (operation.method != "post" or operation.path == "/extract"):
                continue  # they take everything, or no JSON

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(**HOW)
            def keeps(case: Case) -> None:
                body: Any = case.body
                if isinstance(body, dict) and case.path in LENGTHS:  # the test is not for long texts
                    first, *_ = names = LENGTHS[case.path]
                    for name in names:
                        if isinstance(body.get(name), int):
                            body[name] = min(4, body[name])
                    if mode is GenerationMode.POSITIVE and all(body.get(name) is None for name in names):
                        body[first] = 4  # who asks for no length gets a long text
                # No document can say that the model must be the server's, or a prompt's tokens few.
                case.call_and_validate(base_url=url, excluded_checks=[positive_data_acceptance], timeout=120)
                tried[case.path] = tried.get(case.path, 0) + 1

            keeps()
    assert tried["/v1/completions"] > 5 and tried["/v1/chat/completions"] > 5


KEPT = ("temperature", "top_p", "seed", "n", "stream", "stop", "speculation", "presence_penalty", "min_p", "user")
HARM: dict[str, dict[str, Any]] = {
    **{
        kind: {"response_format": {"type": "json_schema", "json_schema": {"schema": it}}}
        for kind, it in bombs().items()
    },
    **{f"{kind} for tools": {"tools": [_tool(it)], "tool_choice": "required"} for kind, it in bombs().items()},
    "a tool of a megabyte": {"tools": [_tool({"type": "object", "description": "x" * 1_000_000})]},
    "a thousand tools": {"tools": [_tool({"type": "object"}, f"f{i}") for i in range(1000)]},
}


@pytest.mark.thorough
def test_every_body_with_a_bomb_in_it_is_served_or_refused() -> None:
    """On a model with a chat template: the server answers, in words, and goes on."""
    answers: set[int] = set()
    with running(toy_llm("none"), max_body=100_000_000) as (_, url):
        document = schemathesis.openapi.from_url(f"{url}/openapi.json")
        for found in document.get_all_operations():
            operation = found.ok()
            if operation.method != "post" or operation.path == "/extract":
                continue

            @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE), harm=st.sampled_from([*HARM]))
            @settings(**(HOW | {"max_examples": 5}))
            def holds(case: Case, harm: str) -> None:
                # What is refused before the grammar is read is another test's matter.
                body: Any = {name: value for name, value in case.body.items() if name in KEPT}
                said = {"messages": [{"role": "user", "content": "a"}]} if "chat" in case.path else {"prompt": "a"}
                body |= {"model": "toy", "max_tokens": 4, **said, **HARM[harm]}
                reply = web.post(f"{url}{case.path}", json=body, timeout=120)
                assert reply.status_code in (200, 400), (harm, reply.text[:500])
                assert reply.status_code == 200 or "backtrace" not in reply.json()["error"]["message"]
                answers.add(reply.status_code)

            holds()
        assert web.get(f"{url}/health").status_code == 200
    assert answers == {200, 400}


def test_the_document_has_the_bounds_of_every_number() -> None:
    with running(toy_llm("none")) as (_, url):
        document = web.get(f"{url}/openapi.json").json()
    asked = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert asked["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 128}
    assert '"ge"' not in json.dumps(document) and '"le"' not in json.dumps(document)

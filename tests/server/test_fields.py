"""Every field of every body: what is wrong is named by its place, and null is what a field is by default.

Bodies are read by the front of several servers, which reads them as one server does and has no model.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import types
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

import httpx
import pytest
from anthropic.types import message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from sakiyomi.scale.front import make_front
from sakiyomi.scale.in_process import Asked, Part
from sakiyomi.server.config import ServerConfig

Place = tuple[str | int, ...]


class Takers:
    """Takes every body that comes so far."""

    dead: tuple[type[BaseException], ...] = ()
    busy: tuple[type[BaseException], ...] = ()

    async def ask(self, asked: Asked) -> AsyncGenerator[Part]:
        yield Part(200, [(b"content-type", b"application/json")], b"{}", [])

    async def figures(self) -> list[dict[str, Any]]:
        return []


FRONT = make_front(Takers(), ServerConfig())


@functools.cache
def schemas() -> dict[str, Any]:
    """The schema of each path's body."""
    return {
        path: content["schema"]
        for path, verbs in FRONT.openapi()["paths"].items()
        for what in verbs.values()
        if (content := what.get("requestBody", {}).get("content", {}).get("application/json")) is not None
    }


def kinds(path: str) -> Any:
    """The model of a path's body."""
    (route,) = (route for route in FRONT.routes if getattr(route, "path", "") == path)
    return route.dependant.body_params[0].field_info.annotation


def answers(asked: Sequence[tuple[str, Any]]) -> list[httpx.Response]:
    """Each body comes from a client of its own: who is refused often has to wait."""

    async def ask(number: int, path: str, body: Any) -> httpx.Response:
        transport = httpx.ASGITransport(FRONT, client=(f"client {number}", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return await client.post(path, json=body)

    async def ask_all() -> list[httpx.Response]:
        return [await ask(number, path, body) for number, (path, body) in enumerate(asked)]

    return asyncio.run(ask_all())


# ---------------------------------------------------------------- bodies by their schema


def branches(schema: Any) -> list[Any]:
    """What a value may be, without null."""
    while "$ref" in schema:
        schema = FRONT.openapi()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return [leaf for each in schema[several] for leaf in branches(each)]
    return [] if schema.get("type") == "null" else [schema]


def small(schema: Any) -> Any:
    """The smallest value of a schema."""
    if not (found := branches(schema)):
        return None
    schema = found[0]
    for word in ("const", "enum"):
        if word in schema:
            return schema[word] if word == "const" else schema[word][0]
    match schema.get("type"):
        case "object":
            return {name: small(schema["properties"][name]) for name in schema.get("required", ())}
        case "array":
            return [small(schema.get("items", {})) for _ in range(schema.get("minItems", 0))]
        case "integer" | "number":
            return max(1, schema.get("minimum", 1))
        case "boolean":
            return False
    return "a"


def places(schema: Any) -> Iterator[tuple[Place, Any, list[Any]]]:
    """Every place in values of a schema, with a value that has it, and what may stand there."""
    yield (), small(schema), branches(schema)
    for each in branches(schema):
        below: list[tuple[str | int, Any]] = [*each.get("properties", {}).items()]
        if isinstance(each.get("additionalProperties"), dict) and "properties" not in each:
            below.append(("5", each["additionalProperties"]))
        for name, field in below:
            for place, value, kinds in places(field):
                yield (name, *place), small(each) | {name: value}, kinds
        for place, value, kinds in places(each["items"]) if each.get("type") == "array" else ():
            yield (0, *place), [value], kinds


def put(body: Any, place: Place, value: Any) -> Any:
    """A copy of a body with another value at a place."""
    if not place:
        return value
    body = copy.deepcopy(body)
    inside = functools.reduce(lambda found, part: found[part], place[:-1], body)
    inside[place[-1]] = value
    return body


def written(place: Place) -> str:
    """A place as errors write it."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def wrong(kinds: list[Any]) -> Any:
    """A value that may not stand where one of these may; None: everything may."""
    values: dict[str, Any] = {"object": {"a": 1}, "string": "\x00?", "number": 0.5, "array": [[[]]]}
    taken = {{"integer": "number"}.get(kind["type"], kind["type"]) for kind in kinds if "type" in kind}
    taken |= {"string" for kind in kinds if "const" in kind or "enum" in kind}
    return next((value for kind, value in values.items() if kind not in taken), None) if taken else None


def valid(path: str) -> list[tuple[Place, Any, list[Any]]]:
    """Every place of a path's body below its top."""
    return [found for found in places(schemas()[path]) if found[0]]


PATHS = sorted(schemas())


def test_every_path_with_a_body_is_walked() -> None:
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"} < {*PATHS}
    found = [written(place) for place, _, _ in valid("/v1/messages")]
    assert "messages[0].content[0].content[0].cache_control.ttl" in found and len(found) > 60


@pytest.mark.parametrize("path", PATHS)
def test_bodies_of_the_schema_are_taken(path: str) -> None:
    bodies = [body for _, body, _ in valid(path)]
    for body, reply in zip(bodies, answers([(path, body) for body in bodies]), strict=True):
        assert reply.status_code == 200, (body, reply.text)


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_field_is_named_at_every_depth(path: str) -> None:
    """One wrong value, one field that is not known, and one that is missing, at each place in turn."""
    cases: list[tuple[Place, Any, str]] = []
    for place, body, kinds in valid(path):
        if (value := wrong(kinds)) is not None:
            cases.append((place, put(body, place, value), "is "))
        for kind in kinds:
            if kind.get("additionalProperties") == {"type": "null"}:
                below = put(body, place, small(kind) | {"zzz": 1})
                cases.append(((*place, "zzz"), below, "is not supported"))
            for name in kind.get("required", ()):
                left = {key: value for key, value in small(kind).items() if key != name}
                if name != "type" or len(kinds) == 1:
                    cases.append(((*place, name), put(body, place, left), "is missing"))
    cases.append((("zzz",), small(schemas()[path]) | {"zzz": 1}, "is not supported"))
    for (place, body, words), reply in zip(cases, answers([(path, body) for _, body, _ in cases]), strict=True):
        error = reply.json()["error"]
        assert reply.status_code == 400, (written(place), body)
        assert error["message"].startswith(f"the field {written(place)!r} {words}"), (written(place), body, error)
        assert error.get("param", written(place)) == written(place)


@pytest.mark.parametrize("path", PATHS)
def test_a_kind_that_is_not_known_is_named(path: str) -> None:
    """Objects of several kinds: a part of another kind, one without a kind, and one that is no object."""
    cases = []
    for place, body, kinds in valid(path):
        if len(kinds) > 1 and all("type" in kind.get("properties", {}) for kind in kinds):
            known = [kind["properties"]["type"] for kind in kinds]
            without = {key: value for key, value in small(kinds[0]).items() if key != "type"}
            if not any("default" in kind for kind in known):
                cases.append(((*place, "type"), put(body, place, without)))
            cases.append(((*place, "type"), put(body, place, without | {"type": "no_kind", "zzz": 1})))
            cases.append((place, put(body, place, "text")))
    for (place, body), reply in zip(cases, answers([(path, body) for _, body in cases]), strict=True):
        assert reply.status_code == 400
        assert reply.json()["error"]["message"].startswith(f"the field {written(place)!r} is "), (body, reply.text)
    assert cases or path not in ("/v1/chat/completions", "/v1/messages", "/v1/responses")


@pytest.mark.parametrize("path", PATHS)
def test_every_union_is_told_apart_by_its_value(path: str) -> None:
    """Otherwise pydantic tries all of its kinds, and a wrong field gets the complaints of each."""
    for schema in (schemas()[path], *FRONT.openapi()["components"]["schemas"].values()):
        for field in schema.get("properties", {}).values():
            assert len([each for each in field.get("anyOf", ()) if each != {"type": "null"}]) <= 1, field


# ---------------------------------------------------------------- null


@pytest.mark.parametrize("path", PATHS)
def test_null_is_the_default_of_every_field_that_may_be_left_out(path: str) -> None:
    kind = kinds(path)
    asked = []
    for place, body, _ in valid(path):
        if isinstance(place[-1], str) and place[-1] != "5":  # a key of a mapping
            without = put(body, place, None)
            inside = functools.reduce(lambda found, part: found[part], place[:-1], copy.deepcopy(without))
            del inside[place[-1]]
            left = put(body, place[:-1], inside)
            try:
                expected = kind.model_validate(left)
            except ValueError:  # it is required
                continue
            asked.append(without)
            assert kind.model_validate(without) == expected, place
    assert len(asked) >= 1 or path == "/detokenize"
    assert {reply.status_code for reply in answers([(path, body) for body in asked])} <= {200}


SDK: dict[str, Any] = {
    "/v1/completions": completion_create_params.CompletionCreateParamsBase,
    "/v1/chat/completions": chat_params.CompletionCreateParamsBase,
    "/v1/responses": response_create_params.ResponseCreateParamsBase,
    "/v1/embeddings": embedding_create_params.EmbeddingCreateParams,
    "/v1/messages": message_create_params.MessageCreateParamsBase,
}


@pytest.mark.parametrize("path", SDK)
def test_null_is_taken_where_the_makers_own_clients_send_it(path: str) -> None:
    """Of fields that are not supported, too: they ask for nothing."""
    hints: Mapping[str, Any] = get_type_hints(SDK[path])
    nullable = [name for name, hint in hints.items() if get_origin(hint) in (Union, types.UnionType)]
    nullable = [name for name in nullable if type(None) in get_args(hints[name]) and name != "prompt"]
    body = small(schemas()[path]) | dict.fromkeys(nullable)
    (reply,) = answers([(path, body)])
    assert reply.status_code == 200, reply.text
    assert nullable or path == "/v1/embeddings"


REPLAYED: dict[str, Any] = {
    "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
    "reasoning": None, "reasoning_content": None, "name": None, "tool_call_id": None,
    "tool_calls": [{"id": "a", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}],
}  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_messages_of_other_servers_are_taken_back(path: str) -> None:
    (reply,) = answers([(path, {"messages": [{"role": "user", "content": "a"}, REPLAYED]})])
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(("text", "taken"), [("null", "{}"), ("[]", "{}"), ("", "{}"), (None, "{}"), ("3", ""),
                                             ('{"a": 1}', '{"a": 1}'), ("{a", "{a"), ("[1]", ""),
                                             ("[" * 20000, "[" * 20000)], ids=lambda text: str(text)[:9])  # fmt: skip
def test_arguments_of_earlier_calls_are_an_object(text: str | None, taken: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": text}
    asked: dict[str, Any] = {
        "/v1/chat/completions": {"messages": [{"role": "assistant", "tool_calls": [call]}]},
        "/v1/responses": {"input": [item]},
    }
    places = ("messages[0].tool_calls[0].function.arguments", "input[0].arguments")
    for (path, body), place, reply in zip(asked.items(), places, answers([*asked.items()]), strict=True):
        if taken:
            body = kinds(path).model_validate(body)
            found = body.chat() if path == "/v1/responses" else body
            assert found.messages[0].tool_calls[0].function.arguments == taken
        else:
            assert reply.status_code == 400
            assert reply.json()["error"]["message"].startswith(f"the field '{place}' is {json.dumps(text)}: ")

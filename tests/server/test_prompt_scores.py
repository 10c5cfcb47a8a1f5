"""What evaluation harnesses and load generators ask a server for: scores of prompts, tokens, figures in every event."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from sakiyomi import LLM, SamplingParams
from sakiyomi.server.app import Server
from server_toys import web

PROMPT = "Once upon a time"


def post(site: tuple[Server, str], path: str, **body: Any) -> Any:
    return web.post(site[1] + path, json=body)


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_echo(api: OpenAI, own: LLM, ids: bool, stream: bool) -> None:
    """As lm-evaluation-harness asks for likelihoods: the prompt's tokens, then one new one."""
    tokens = own.tokenizer(PROMPT).input_ids
    asked = {"model": "toy", "prompt": tokens if ids else PROMPT, "max_tokens": 1, "logprobs": 2, "temperature": 0}
    found = api.completions.create(**asked, echo=True, stream=stream)  # type: ignore[call-overload]
    choice = next(iter(found)).choices[0] if stream else found.choices[0]
    (out,) = own.generate([tokens], SamplingParams(max_new_tokens=1, prompt_logprobs=2, logprobs=2))
    assert choice.text == PROMPT + out.text
    told = choice.logprobs
    assert len(told.tokens) == len(tokens) + 1 and "".join(told.tokens[:-1]) == PROMPT
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    expected = [token.logprob for token in out.prompt_logprobs[1:]] + [out.trace[0].logprob]
    assert told.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert [len(top) for top in told.top_logprobs[1:]] == [2] * len(tokens)
    assert told.text_offset == [len("".join(told.tokens[:i])) for i in range(len(tokens) + 1)]


def test_a_prompt_alone(site: tuple[Server, str], own: LLM) -> None:
    reply = post(site, "/v1/completions", prompt=[PROMPT, "The fox"], max_tokens=0, echo=True, logprobs=0).json()
    assert [choice["text"] for choice in reply["choices"]] == [PROMPT, "The fox"]
    assert reply["usage"]["completion_tokens"] == 0 and reply["choices"][0]["finish_reason"] == "length"
    assert len(reply["choices"][0]["logprobs"]["tokens"]) == len(own.tokenizer(PROMPT).input_ids)
    refused = post(site, "/v1/completions", prompt=PROMPT, max_tokens=0)
    assert refused.status_code == 400 and "max_tokens is 0" in refused.json()["error"]["message"]


def test_prompt_logprobs_as_vllm_has_them(site: tuple[Server, str], own: LLM) -> None:
    tokens = own.tokenizer(PROMPT).input_ids
    (out,) = own.generate([tokens], SamplingParams(max_new_tokens=1, prompt_logprobs=1))
    reply = post(site, "/v1/completions", prompt=PROMPT, max_tokens=1, prompt_logprobs=1).json()
    first, *others = reply["choices"][0]["prompt_logprobs"]
    assert first is None
    for entry, token in zip(others, out.prompt_logprobs[1:], strict=True):
        said = entry[str(token.token_id)]
        assert said["logprob"] == pytest.approx(token.logprob, abs=1e-4) and said["rank"] == token.rank
        assert {str(token.token_id), str(token.top_logprobs[0][0])} == set(entry)
    chat = post(
        site, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=1, prompt_logprobs=0
    ).json()
    assert (
        len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"] and "prompt_logprobs" not in chat["choices"][0]
    )


def test_figures_in_every_event(api: OpenAI) -> None:
    """As guidellm and vLLM's benchmark ask for them."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = list(
        api.completions.create(
            model="toy",
            prompt=PROMPT,
            max_tokens=12,
            stream=True,
            stream_options=options,
            extra_body={"ignore_eos": True},
        )  # type: ignore[call-overload]
    )
    counts = [event.usage.completion_tokens for event in events]
    assert counts == sorted(counts) and counts[-1] == 12 and counts[0] < 12
    assert not events[-1].choices and events[-1].usage.prompt_tokens > 0


NEUTRAL = {
    "request_id": "a", "metadata": {"k": "v"}, "priority": 3, "store": False, "service_tier": "auto", "min_tokens": 0,
    "safety_identifier": "x", "prompt_cache_key": "y", "skip_special_tokens": True, "use_beam_search": False,
    "spaces_between_special_tokens": True, "include_stop_str_in_output": False, "return_tokens_as_token_ids": False,
}  # fmt: skip


def test_fields_that_change_nothing(site: tuple[Server, str]) -> None:
    plain, full = (
        post(site, "/v1/completions", prompt=PROMPT, temperature=0, **extra).json()["choices"][0]["text"]
        for extra in ({}, NEUTRAL | {"add_special_tokens": True, "suffix": None, "best_of": 1})
    )
    assert plain == full
    for name, value in {"skip_special_tokens": False, "best_of": 2, "suffix": "x", "min_tokens": 4}.items():
        refused = post(site, "/v1/completions", prompt=PROMPT, **{name: value})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == name


def test_tokens(site: tuple[Server, str], own: LLM) -> None:
    tokens = own.tokenizer(PROMPT).input_ids
    found = post(site, "/tokenize", prompt=PROMPT, return_token_strs=True).json()
    assert found["tokens"] == tokens and found["count"] == len(tokens) and "".join(found["token_strs"]) == PROMPT
    assert found["max_model_len"] == 4096
    bare = own.tokenizer(PROMPT, add_special_tokens=False).input_ids
    assert post(site, "/tokenize", prompt=PROMPT, add_special_tokens=False, model="toy").json()["tokens"] == bare
    assert post(site, "/detokenize", tokens=tokens).json() == {"prompt": own.tokenizer.decode(tokens)}
    messages = [{"role": "user", "content": "hi"}]
    chat = post(site, "/v1/chat/completions", messages=messages, max_tokens=1).json()
    assert post(site, "/tokenize", messages=messages).json()["count"] == chat["usage"]["prompt_tokens"]
    for body, words in (
        ({}, "one of them"),
        ({"prompt": "a", "messages": messages}, "one of them"),
        ({"messages": messages, "add_special_tokens": True}, "leave it out"),
        ({"prompt": "a", "model": "other"}, "there is no model"),
        ({"prompt": "a" * 3_000_000}, "shorten it"),
    ):
        reply = post(site, "/tokenize", **body)
        assert reply.status_code in (400, 404, 413), body
        assert reply.status_code == 413 or words in reply.json()["error"]["message"]
    unknown = post(site, "/detokenize", tokens=[10**6])
    assert unknown.status_code == 400 and "1000000" in unknown.json()["error"]["message"]

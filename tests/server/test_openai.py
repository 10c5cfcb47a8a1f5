"""The server as OpenAI's own client sees it: texts are the library's, alone or in company, at once or as they come."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI

import sakiyomi
from sakiyomi import LLM, SamplingParams
from sakiyomi.server.app import Server
from server_toys import client, figures, running, toy_llm, web

AHEAD = {"speculation": {"gamma": 3}}
PROMPTS = ["Once upon a time", "The fox went", "むかしむかし", "One day she said: ", "A smile 😀"]


def wanted(own: LLM, prompt: Any, **values: Any) -> Any:
    return own.generate(prompt, SamplingParams(**values))


def complete(api: OpenAI, prompt: Any, **values: Any) -> Any:
    return api.completions.create(
        model="toy", prompt=prompt, extra_body=AHEAD | values.pop("body", {}), **({"max_tokens": 24} | values)
    )


# ---------------------------------------------------------------- texts


def test_a_completion_is_the_librarys_text(api: OpenAI, own: LLM) -> None:
    reply = complete(api, PROMPTS[0], temperature=0, max_tokens=24.0)  # to JSON a whole number
    expected = wanted(own, PROMPTS[0], max_new_tokens=24)
    assert reply.choices[0].text == expected.text
    assert reply.choices[0].finish_reason == expected.finish_reason
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (
        expected.prompt_tokens,
        len(expected.token_ids),
    )


def test_reading_ahead_is_in_the_figures_and_can_be_left(api: OpenAI) -> None:
    ahead = complete(api, PROMPTS[0], temperature=0)
    alone = complete(api, PROMPTS[0], temperature=0, body={"speculation": {"drafter": "off"}})
    figures = ahead.usage.speculation
    assert figures["accepted"] > 0 and figures["drafted"] > figures["accepted"]
    assert ahead.usage.completion_tokens_details.accepted_prediction_tokens == figures["accepted"]
    assert figures["tau"] == pytest.approx((ahead.usage.completion_tokens - 1) / figures["rounds"])
    assert alone.usage.speculation | {"rounds": 0} == {
        "rounds": 0, "drafted": 0, "accepted": 0, "acceptance_rate": 0.0, "tau": 1.0,
    }  # fmt: skip
    assert alone.choices[0].text == ahead.choices[0].text


@pytest.mark.thorough
def test_one_of_several_drafters_is_chosen_for_a_request() -> None:
    """Greedy texts and those of a seed do not depend on it, and tokens come from the one that was chosen."""
    with running(toy_llm("suffix+prompt-lookup")) as (_, url):
        (card,) = web.get(f"{url}/v1/models").json()["data"]
        assert (card["drafter"], card["drafters"]) == ("suffix+prompt-lookup", ["suffix", "prompt-lookup"])
        for settings in ({"temperature": 0}, {"temperature": 1, "seed": 3}):
            texts = set()
            for choice in ("auto", "suffix+prompt-lookup", "suffix", "prompt-lookup", "off"):
                speculation = {"drafter": choice} | ({} if choice == "off" else {"gamma": 3})
                asked = {"prompt": [7, 8, 9] * 8, "max_tokens": 60, "trace": True, "speculation": speculation}
                reply = web.post(f"{url}/v1/completions", json=asked | settings).json()
                (choice_,) = reply["choices"]
                texts.add(choice_["text"])
                tokens = [token for step in choice_["trace"] for token in step["tokens"]]
                sources = {token["source"] for token in tokens if token["status"] == "accepted"}
                assert sources <= ({choice} if choice in card["drafters"] else set(card["drafters"]))
                assert bool(reply["usage"]["speculation"]["drafted"]) == (choice != "off")
            assert len(texts) == 1
        wrong = web.post(f"{url}/v1/completions", json={"prompt": "A", "speculation": {"drafter": "model"}})
        assert "'suffix', 'prompt-lookup'" in wrong.json()["error"]["message"]


def test_samples_of_several_prompts_are_those_of_the_library(api: OpenAI, own: LLM) -> None:
    how = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
    reply = complete(api, PROMPTS[:2], n=2, **how)
    expected = wanted(own, PROMPTS[:2], n=2, max_new_tokens=24, **how)
    assert [choice.text for choice in reply.choices] == [sample.text for part in expected for sample in part]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in reply.choices}) == 4


def test_token_ids_go_in_as_they_are(api: OpenAI, own: LLM) -> None:
    ids = own.tokenizer(PROMPTS[1])["input_ids"]
    assert complete(api, ids, temperature=0).choices[0].text == complete(api, PROMPTS[1], temperature=0).choices[0].text


@pytest.mark.thorough
def test_texts_are_the_same_in_company(site: tuple[Server, str], own: LLM) -> None:
    """Twenty at once on six places, greedy and seeded, long prompts among them."""
    long = " ".join(PROMPTS[:2] * 80)
    asked = [
        {"prompt": prompt + str(i), "temperature": temperature, "seed": 7, "max_tokens": 20}
        for i, temperature in enumerate((0, 0.8, 0, 1.0))
        for prompt in [*PROMPTS[:4], long]
    ]
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda values: complete(client(site[1]), **values).choices[0].text, asked))
    for values, text in zip(asked, found, strict=True):
        expected = wanted(own, values["prompt"], max_new_tokens=20, temperature=values["temperature"], seed=7)
        assert text == expected.text


@pytest.mark.thorough
def test_exact_is_bit_equal_in_company() -> None:
    """With ``exact`` also the log probabilities are the library's plain ones, to the last bit, prompts used again."""
    how = {"max_tokens": 20, "temperature": 0.9, "top_p": 0.95, "seed": 7, "logprobs": 3}
    own = toy_llm("none", exact=True, chunk_size=16)
    asked = [PROMPTS[0] * 9, *PROMPTS, PROMPTS[0] * 9 + PROMPTS[1]]
    with running(toy_llm(exact=True, chunk_size=16, max_batch=4)) as (_, url), ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda prompt: complete(client(url), prompt, **how), asked))
        found.append(complete(client(url), asked[-1], **how))
        found.append(complete(client(url), asked[-1], **how))
    for prompt, reply in zip([*asked, asked[-1], asked[-1]], found, strict=True):
        best = SamplingParams(max_new_tokens=20, temperature=0.9, top_p=0.95, seed=7, logprobs=3)
        expected = own.generate(prompt, best)
        assert reply.choices[0].text == expected.text
        assert reply.choices[0].logprobs.token_logprobs == [entry.logprob for entry in expected.trace]
    assert found[-1].usage.prompt_tokens_details.cached_tokens >= 16
    assert sum(reply.usage.speculation["accepted"] for reply in found) > 10


@pytest.mark.thorough
@pytest.mark.parametrize("reuse", [True, False])
def test_prompts_that_begin_alike_are_read_once(own: LLM, reuse: bool) -> None:
    """At the same moment, too; a prompt with several samples counts once, by the sample that has read it."""
    asked = [PROMPTS[0] * 30 + prompt for prompt in PROMPTS[:4]]
    with running(toy_llm(max_batch=6), reuse=reuse) as (server, url), ThreadPoolExecutor(len(asked)) as pool:
        replies = list(pool.map(lambda prompt: complete(client(url), prompt, temperature=0), asked))
        samples = complete(client(url), PROMPTS[1] * 30, n=3, seed=7)
        hits = server.metrics.registry.get_sample_value("vllm:prefix_cache_hits_total", {"model_name": "toy"})
    assert [reply.choices[0].text for reply in replies] == [
        wanted(own, prompt, max_new_tokens=24).text for prompt in asked
    ]
    cached = sorted(reply.usage.prompt_tokens_details.cached_tokens for reply in replies)
    assert all(count > 256 for count in cached[1:]) == reuse
    assert cached[0] == samples.usage.prompt_tokens_details.cached_tokens == 0
    assert hits == (sum(cached) + 2 * (samples.usage.prompt_tokens - 1) if reuse else 0)


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_stream_is_the_text_an_event_a_round(api: OpenAI, prompt: str) -> None:
    whole = complete(api, prompt, temperature=0)
    events = list(complete(api, prompt, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].text for event in events[:-1]) == whole.choices[0].text
    assert [event.choices[0].finish_reason for event in events[:-1]][-1] == whole.choices[0].finish_reason
    assert events[-1].choices == [] and events[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(events) == 1 + events[-1].usage.speculation["rounds"] + 1  # the prefill, the rounds, the figures
    assert len({event.id for event in events}) == 1


def test_a_chat_streams_its_choices_side_by_side(api: OpenAI) -> None:
    how: dict[str, Any] = {
        "model": "toy", "messages": [{"role": "user", "content": "Hello"}], "n": 2, "seed": 3, "max_tokens": 12,
    }  # fmt: skip
    whole = api.chat.completions.create(**how)
    texts = {0: "", 1: ""}
    reasons = {}
    for i, event in enumerate(api.chat.completions.create(**how, stream=True)):
        choice = event.choices[0]
        if i == 0:
            assert choice.delta.role == "assistant"
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert [choice.message.content for choice in whole.choices] == [texts[0], texts[1]]
    assert [choice.finish_reason for choice in whole.choices] == [reasons[0], reasons[1]]


def test_a_trace_says_where_each_token_came_from(api: OpenAI) -> None:
    events = list(complete(api, PROMPTS[0], temperature=0, stream=True, body={"trace": True}))
    parts = [part for event in events for part in event.choices[0].trace]
    tokens = [token for part in parts for token in part["tokens"]]
    assert "".join(token["text"] for token in tokens) == "".join(event.choices[0].text for event in events)
    assert {token["status"] for token in tokens} >= {"plain", "accepted", "recovered"}
    assert all(0 < token["target_prob"] <= 1 for token in tokens)
    assert [token["round"] for token in tokens] == sorted(token["round"] for token in tokens)
    assert parts[0]["round"] is None  # the prefill's
    for part in parts[1:]:
        tree = part["round"]
        assert len(tree["tokens"]) == len(tree["parents"]) == len(tree["target_probs"]) == len(tree["texts"])
        accepted = [tree["tokens"][node] for node in tree["path"]]
        assert [*accepted, tree["token"]][: len(part["tokens"])] == [token["token_id"] for token in part["tokens"]]
    assert parts[-1]["stats"]["tokens"] == len(tokens)
    assert 0 < parts[0]["stats"]["seconds"] < parts[-1]["stats"]["seconds"]
    whole = complete(api, PROMPTS[0], temperature=0, body={"trace": True})
    again = [token for part in whole.choices[0].trace for token in part["tokens"]]
    assert [(t["token_id"], t["status"], t["text"]) for t in again] == [
        (t["token_id"], t["status"], t["text"]) for t in tokens
    ]


# ---------------------------------------------------------------- options


def test_stop_strings_end_the_text(api: OpenAI) -> None:
    text = complete(api, PROMPTS[1], temperature=0).choices[0].text
    middle = text[len(text) // 2 : len(text) // 2 + 3]
    reply = complete(api, PROMPTS[1], temperature=0, stop=[middle, "never there"])
    assert reply.choices[0].text == text[: text.index(middle)]
    assert reply.choices[0].finish_reason == "stop"


def test_log_probabilities(api: OpenAI, own: LLM) -> None:
    reply = complete(api, PROMPTS[0], temperature=0.7, seed=1, logprobs=3)
    found = reply.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == reply.usage.completion_tokens
    assert found.text_offset[0] == 0 and found.text_offset == sorted(found.text_offset)
    for name, value, best in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert value < 0 and len(best) <= 3 and max(best.values()) >= value - 1e-5
        if name in best:
            assert best[name] == pytest.approx(value, abs=1e-4)
    streamed = list(complete(api, PROMPTS[0], temperature=0.7, seed=1, logprobs=3, stream=True))
    assert [offset for event in streamed for offset in event.choices[0].logprobs.text_offset] == found.text_offset


def test_log_probabilities_of_a_chat_have_bytes(api: OpenAI) -> None:
    reply = api.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "😀"}], max_tokens=12, seed=2, logprobs=True, top_logprobs=2
    )
    content = reply.choices[0].logprobs.content
    data = b"".join(bytes(entry.bytes) for entry in content)
    assert data.decode(errors="replace").startswith(reply.choices[0].message.content.rstrip("\ufffd"))
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert math.exp(content[0].top_logprobs[0].logprob) <= 1


@pytest.mark.thorough
def test_biases_and_penalties_change_the_text(api: OpenAI, own: LLM) -> None:
    plain = wanted(own, PROMPTS[0], max_new_tokens=24)
    first = plain.token_ids[0]
    biased = complete(api, PROMPTS[0], temperature=0, logit_bias={str(first): -100})
    assert biased.choices[0].text == wanted(own, PROMPTS[0], max_new_tokens=24, logit_bias={first: -100.0}).text
    assert biased.choices[0].text != plain.text
    # With the largest penalty, of a model whose logits are small, no token comes twice until others have come.
    reply = complete(
        api, PROMPTS[0], temperature=0, presence_penalty=2, frequency_penalty=2, logprobs=0, max_tokens=200
    )
    usual = complete(api, PROMPTS[0], temperature=0, logprobs=0, max_tokens=200)
    assert len(set(reply.choices[0].logprobs.tokens)) > len(set(usual.choices[0].logprobs.tokens))


def test_a_penalty_is_counted_along_the_drafts_path(api: OpenAI) -> None:
    how = {"temperature": 0, "frequency_penalty": 1.5, "max_tokens": 60}
    alone = complete(api, PROMPTS[2], **how, body={"speculation": {"drafter": "off"}})
    ahead = complete(api, PROMPTS[2], **how)
    assert ahead.choices[0].text == alone.choices[0].text
    assert ahead.usage.speculation["accepted"] > 0


# ---------------------------------------------------------------- conversations


def test_the_next_turn_goes_on_from_the_last_one(api: OpenAI, own: LLM) -> None:
    said = [{"role": "user", "content": "Tell me of the fox who lived in a wood, and of the river."}]
    first = api.chat.completions.create(model="toy", messages=said, max_tokens=16, temperature=0)
    said += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And then?"},
    ]
    second = api.chat.completions.create(model="toy", messages=said, max_tokens=16, temperature=0)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1
    ids = own.tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    expected = wanted(own, [own.tokenizer(ids, add_special_tokens=False)["input_ids"]], max_new_tokens=16)[0]
    assert second.choices[0].message.content == expected.text


def test_a_message_may_come_back_as_it_was_given(api: OpenAI) -> None:
    """Clients send the whole message object of a reply, null fields and all; texts may come in parts."""
    said: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]}
    ]
    said.append({"role": "user", "content": "Hello", "name": "Ann"})
    first = api.chat.completions.create(model="toy", messages=said, max_tokens=8)
    said += [first.choices[0].message.model_dump(), {"role": "user", "content": "Go on"}]
    assert api.chat.completions.create(model="toy", messages=said, max_tokens=8).choices[0].message.role == "assistant"


def test_without_a_template_a_chat_is_one_text() -> None:
    with running(toy_llm("none", template=None)) as (_, url):
        api = client(url)
        said = [{"role": "user", "content": "The fox"}]
        chat = api.chat.completions.create(model="toy", messages=said, max_tokens=8, temperature=0)
        text = api.completions.create(model="toy", prompt="The fox", max_tokens=8, temperature=0)
        assert chat.choices[0].message.content == text.choices[0].text
        with pytest.raises(openai.BadRequestError, match="system message has no place"):
            api.chat.completions.create(model="toy", messages=[{"role": "system", "content": "Be kind."}, *said])


# ---------------------------------------------------------------- figures


def test_the_figures_are_those_of_the_replies() -> None:
    """Under vLLM's names, and added up over requests alone and side by side."""
    with running(toy_llm(max_batch=2)) as (_, url):
        api = client(url)
        prompts = [*PROMPTS[:3], PROMPTS[0] * 9]
        with ThreadPoolExecutor(3) as pool:
            replies = list(pool.map(lambda prompt: complete(api, prompt, temperature=0, n=2), prompts))
        replies.append(complete(api, PROMPTS[0] * 9 + PROMPTS[1], temperature=0))
        replies.append(complete(api, PROMPTS[3], temperature=0.9, seed=1, max_tokens=1))
        found = figures(url)
        usages = [reply.usage for reply in replies]
        samples = 2 * len(prompts) + 2

        def total(name: str) -> int:
            return sum(int(usage.speculation[name]) for usage in usages)

        assert found["vllm:request_success_total/length"] + found.get("vllm:request_success_total/stop", 0) == samples
        assert found["vllm:generation_tokens_total"] == sum(usage.completion_tokens for usage in usages)
        asked_for, hits = found["vllm:prefix_cache_queries_total"], found["vllm:prefix_cache_hits_total"]
        assert found["vllm:prompt_tokens_total"] + hits == asked_for
        assert asked_for == sum(usage.prompt_tokens for usage in usages) * 2 - sum(u.prompt_tokens for u in usages[-2:])
        assert hits >= 8
        drafted, accepted = (found[f"vllm:spec_decode_num_{name}_tokens_total"] for name in ("draft", "accepted"))
        assert (drafted, accepted) == (total("drafted"), total("accepted")) and 0 < accepted < drafted
        kept = [found[f"vllm:spec_decode_num_accepted_tokens_per_pos_total/{place}"] for place in range(16)]
        assert sum(kept) == accepted and kept == sorted(kept, reverse=True) and kept[3] == 0  # gamma is 3
        assert found["vllm:spec_decode_num_drafts_total"] >= kept[0] > 0
        rounds, committed = found["sakiyomi:rounds_total"], found["sakiyomi:committed_tokens_total"]
        assert found["sakiyomi:tau"] == pytest.approx(committed / rounds) and rounds == total("rounds")
        assert committed == found["vllm:generation_tokens_total"] - samples  # the first ones come with the prefill
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                     "request_prompt_tokens", "request_generation_tokens"):  # fmt: skip
            assert found[f"vllm:{name}_count"] == samples
        assert found["vllm:request_generation_tokens_sum"] == found["vllm:generation_tokens_total"]
        assert 0 < found["vllm:inter_token_latency_seconds_count"] <= rounds
        assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
        asked = {"model": "toy", "prompt": PROMPTS[0] * 99, "max_tokens": 900, "ignore_eos": True, "stream": True}
        with web.stream("POST", f"{url}/v1/completions", json=asked) as reply:
            lines = reply.iter_lines()
            next(lines)
            found = figures(url)
            assert found["vllm:num_requests_running"] == 1
            assert 0 < found["vllm:kv_cache_usage_perc"] < 1 and found["sakiyomi:kv_cache_bytes"] > 0


@pytest.mark.parametrize("reuse", [True, False])
def test_cache_usage_counts_what_is_retained(reuse: bool) -> None:
    """After a reply its slot keeps the text for the next turn, and the gauge says so; without reuse nothing is held."""
    with running(toy_llm("none", max_batch=2, max_context=200), reuse=reuse) as (_, url):
        asked = {"model": "toy", "prompt": list(range(3, 100)), "max_tokens": 4, "ignore_eos": True}
        assert web.post(f"{url}/v1/completions", json=asked).status_code == 200
        assert figures(url)["vllm:kv_cache_usage_perc"] == pytest.approx(100 / 400 if reuse else 0.0)


def test_cache_usage_leaves_out_what_was_evicted() -> None:
    """Of a long text a budget of 40 pairs stays: the share is that of the columns that a slot can have."""
    llm = toy_llm("none", max_batch=2, cache="streaming", kv_budget=40, chunk_size=32)
    with running(llm) as (_, url):
        asked = {"model": "toy", "prompt": [5] * 400, "max_tokens": 1}
        assert web.post(f"{url}/v1/completions", json=asked).status_code == 200
        (limit,) = {columns for layer in llm.target.cache.sizing.limits or () for columns in layer}
        assert figures(url)["vllm:kv_cache_usage_perc"] == pytest.approx(40 / (2 * limit))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("values", "words", "param"),
    [
        ({"body": {"best_of": 2}}, "'best_of' is 2", "best_of"),
        ({"body": {"speculation": {"width": 2}}}, "speculation.width", "speculation.width"),
        ({"body": {"speculation": {"drafter": "medusa"}}}, "this server knows", "speculation.drafter"),
        ({"body": {"speculation": {"drafter": "off", "gamma": 2}}}, "leave them out", "speculation"),
        (
            {"body": {"kv_budget": 64}},
            "is 64; it is fixed when the model is loaded, and here there is none",
            "kv_budget",
        ),
        ({"temperature": 3}, "'temperature' is 3: ", "temperature"),
        ({"temperature": "1"}, "'temperature' is \"1\": ", "temperature"),
        ({"prompt": [1.5]}, r"'prompt\[0\]' is 1.5: Input should be a valid integer", "prompt[0]"),
        ({"prompt": ["a"] * 200}, "prompt: 200 samples in one request; this server allows 16", "prompt"),
        ({"prompt": ["a"] * 2049}, "at most 2048 items", "prompt"),
        ({"body": {"speculation": {"tree": "chain", "nodes": 3}}}, "'chain'", "speculation.nodes"),
        ({"body": {"speculation": {"gamma": 0}}}, "'speculation.gamma' is 0: .* greater", "speculation.gamma"),
        ({"body": {"speculation": "off"}}, "'speculation' is \"off\": ", "speculation"),
        ({"body": {"stop_token_ids": [320]}}, "vocabulary has 320 tokens", "stop_token_ids"),
        ({"stop": ["x", ""]}, "stop has '' in it", "stop"),
        ({"user": "x" * 600}, "at most 512", "user"),
        ({"n": 17}, "17 samples", "n"),
        ({"logit_bias": {"x": 1}}, "token ids", "logit_bias"),
        ({"logit_bias": {"4000": 1}}, "token ids below 320", "logit_bias"),
        ({"prompt": ""}, "empty", "prompt"),
        ({"prompt": [400]}, "the model's vocabulary has 320 tokens", "prompt"),
        ({"prompt": "x" * 5000}, "shorten it", "prompt"),
        ({"max_tokens": 5000}, "room for", "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "needs stream", "stream_options"),
    ],
)
def test_what_cannot_be_met_is_a_400_that_names_it(api: OpenAI, values: dict[str, Any], words: str, param: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        complete(api, **({"prompt": "a"} | values))
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert caught.value.code


def test_an_unknown_model_is_a_404(api: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has 'toy'"):
        api.completions.create(model="gpt-4o", prompt="a")
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("gpt-4o")
    assert api.models.retrieve("toy").max_model_len == 4096  # type: ignore[attr-defined]
    assert [model.id for model in api.models.list()] == ["toy"]


@pytest.mark.parametrize(
    ("message", "words", "param"),
    [
        ({"role": "user", "content": "a\ud800"}, "unicode", "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "sound", "sound": {}}]},
            "'text' or 'image_url'",
            "messages[0].content[0].type",
        ),
        ({"role": "user"}, "no content", "messages[0].content"),
        ({"role": "poet", "content": "x"}, "'messages[0].role' is \"poet\"", "messages[0].role"),
        ({"role": "user", "content": "x", "mood": 1}, "'messages[0].mood' is not supported", "messages[0].mood"),
    ],
)
def test_messages_that_no_template_takes(site: tuple[Server, str], message: Any, words: str, param: str) -> None:
    content = json.dumps({"model": "toy", "messages": [message]})  # the client itself would not send half a character
    headers = {"content-type": "application/json"}
    reply = web.post(f"{site[1]}/v1/chat/completions", content=content, headers=headers)
    error = reply.json()["error"]
    assert reply.status_code == 400 and words in error["message"] and error["param"] == param


def test_what_a_template_knows_besides_goes_into_it() -> None:
    """As for Qwen3, whose template writes an empty thought where ``enable_thinking`` is false."""
    template = "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %} at once{% endif %}"
    with running(toy_llm("none", template=template)) as (_, url):
        said: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "Go"}], "max_tokens": 1}

        def size(**known: Any) -> int:
            reply = client(url).chat.completions.create(**said, extra_body={"chat_template_kwargs": known})
            return int(reply.usage.prompt_tokens)

        assert size(enable_thinking=False) > size(enable_thinking=True) == size()
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs has 'tokenize', which"):
            size(tokenize=True)


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/v1/nothing", 404, "lists all paths"),
        ("GET", "/v1/completions", 405, "takes POST, not GET"),
        ("POST", "/v1/completions/", 404, "no '/v1/completions/'"),
        ("POST", "/api/chat", 404, "Ollama"),
        ("POST", "/completion", 404, "/v1/completions"),
    ],
)
def test_paths_that_are_not_there(site: tuple[Server, str], method: str, path: str, status: int, words: str) -> None:
    reply = web.request(method, site[1] + path)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert words in reply.json()["error"]["message"] and reply.json()["error"]["code"]


def test_who_asks_with_head_gets_what_get_gives_without_the_body(site: tuple[Server, str]) -> None:
    for path in ("/", "/health", "/v1/models", "/version"):
        reply, whole = web.head(site[1] + path), web.get(site[1] + path)
        assert (reply.status_code, reply.content) == (200, b"")
        assert reply.headers["content-length"] == str(len(whole.content))
    assert web.head(f"{site[1]}/v1/completions").status_code == 405
    assert web.get(f"{site[1]}/version").json() == {"version": sakiyomi.__version__}

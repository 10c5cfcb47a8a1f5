"""Chats in the place of texts: written by the model's template, wherever a prompt is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sakiyomi import LLM, InputError, SamplingParams
from sakiyomi.core.errors import LoadError
from sakiyomi.engine.chat_template import Dialogue, prompt_ids
from toys import tiny_llama, tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if mood is defined %}[{{ mood }}]{% endif %}{% for t in tools or [] %}{{ t.name }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = [{"role": "user", "content": "Who is it?"}]
LONGER = [*ASKED, {"role": "assistant", "content": "A fox."}, {"role": "user", "content": "Where?"}]
SHORT = SamplingParams(max_new_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return LLM((tiny_llama(), tokenizer), None, compile=False)


def reply(llm: LLM, text: str) -> list[int]:
    """The reply to a prompt that is written out."""
    ids = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
    return list(llm.generate([ids], SHORT)[0].token_ids)


def test_a_chat_is_written_by_the_template(llm: LLM) -> None:
    expected = reply(llm, "<user>Who is it?\n<assistant>")
    assert list(llm.chat(ASKED, SHORT).token_ids) == expected
    assert list(llm.generate(ASKED, SHORT).token_ids) == expected
    assert [token for step in llm.stream(ASKED, SHORT) for token in step.token_ids] == expected
    with llm.conversation() as conversation:
        assert list(conversation.generate(ASKED, SHORT).token_ids) == expected
    assert prompt_ids(llm.tokenizer, ASKED, 2) == Dialogue(llm.tokenizer).read(ASKED)  # a chat is not cut


def test_a_list_of_chats_gives_a_list(llm: LLM) -> None:
    longer = reply(llm, "<user>Who is it?\n<assistant>A fox.\n<user>Where?\n<assistant>")
    for found in (llm.chat([ASKED, LONGER], SHORT), llm.generate([ASKED, LONGER], SHORT)):
        assert [list(one.token_ids) for one in found] == [reply(llm, "<user>Who is it?\n<assistant>"), longer]
    mixed = llm.generate(["Who is it?", LONGER], SHORT)
    assert list(mixed[1].token_ids) == longer
    assert list(mixed[0].token_ids) == list(llm.generate("Who is it?", SHORT).token_ids)


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({"chat_template_kwargs": {"mood": "sly"}}, "<user>Who is it?\n[sly]<assistant>"),
        ({"tools": [{"name": "look"}]}, "<user>Who is it?\nlook<assistant>"),
        ({"chat_template": "{{ messages[0].content }}"}, "Who is it?"),
    ],
)
def test_options_of_the_template(llm: LLM, options: dict[str, Any], written: str) -> None:
    assert list(llm.chat(ASKED, SHORT, **options).token_ids) == reply(llm, written)


def test_a_begun_reply_goes_on(llm: LLM) -> None:
    begun = [*ASKED, {"role": "assistant", "content": "A"}]
    found = llm.chat(begun, SHORT, continue_final_message=True)
    assert list(found.token_ids) == reply(llm, "<user>Who is it?\n<assistant>A")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Who?", "expected a list of objects with role and content"),
        ([ASKED, "Who?"], "expected a list of objects with role and content"),
        ([{"content": "Who?"}], "message 1 of the chat"),
        ([*ASKED, {"role": "assistant"}], "message 2 of the chat"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "expected path"),
    ],
)
def test_what_is_no_chat(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        llm.chat(messages, SHORT)


def test_images_are_refused_where_the_model_reads_none(llm: LLM, tmp_path: Path) -> None:
    part = {"type": "image", "path": str(tmp_path / "none.png")}
    with pytest.raises(LoadError, match=r"none\.png"):
        llm.chat([{"role": "user", "content": [part]}], SHORT)
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (4, 4)).save(tmp_path / "none.png")
    with pytest.raises(InputError, match="the model reads text"):
        llm.chat([{"role": "user", "content": [part]}], SHORT)


def test_without_a_template_messages_are_one_text() -> None:
    plain = LLM((tiny_llama(), tiny_tokenizer()), None, compile=False)
    expected = list(plain.generate("Who is it?", SHORT).token_ids)
    assert list(plain.chat(ASKED, SHORT).token_ids) == expected

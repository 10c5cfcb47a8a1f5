"""Every recipe reads chats as it reads texts: written by the target's template, asked where the assistant speaks."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from retriever import RetrieverConfig
from sakiyomi.core.errors import InputError
from sakiyomi.train.commands import COMMANDS
from sakiyomi.train.counted import Library
from sakiyomi.train.draft import train_draft
from toys import tiny_tokenizer
from train_toys import draft_config, stories, story_file, tiny_target

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LOOP: dict[str, Any] = {"tokens": 128, "row_tokens": (64,), "step_tokens": 64, "warmup_steps": 1, "compile": False}
TEXT = LOOP | {"threads": 1}
SIZES = {"vocab": 300, "hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 48, "max_positions": 256}
TAUGHT = TEXT | {"samples": 4, "sample_batch": 4, "sample_tokens": 4, "eval_prompts": 1}
BESIDE = TEXT | {"eval_rows": 1, "device": "cpu"}
SETTINGS: dict[str, dict[str, Any]] = {
    "target": TEXT | SIZES | {"eval_tokens": 64},
    "draft": TAUGHT | {"hidden": 16, "heads": 2, "intermediate": 24, "cost": "0.1"},
    "medusa": TEXT | {"heads": 2, "eval_prompts": 1, "device": "cpu"},
    "eagle": TAUGHT | {"unroll": 2, "speed": False},
    "mtp": TAUGHT | {"unroll": 2, "init": "new", "speed": False},
    "block": TAUGHT | {"guesses": 2, "layers": 1, "anchors": 4, "mask": 299, "speed": False},
    "retaining": BESIDE | {"width": 8},
    "lococo": BESIDE | {"kv_budget": 24, "merged": 2, "chunk_size": 32, "kernel": 3},
    "distill-data": {"samples": 4, "batch": 4, "tokens": 4, "device": "cpu"},
    "ngram": {"positions": 16},
    "retriever": TEXT
    | SIZES
    | {"stage_shares": (1.0,), "eval_prompts": 1, "final_prompts": 1, "eval_lengths": (256,)}
    | {"vocab": 700, "layers": 2},
}
KINDS = {name: kind for name, kind in COMMANDS.items() if name != "speech"} | {"retriever": RetrieverConfig}


def chat_file(path: Path, count: int = 30, seed: int = 0) -> Path:
    """Chats of two rounds, half of them in ShareGPT's form, the others as messages."""
    texts = stories(2 * count, seed)
    lines = []
    for i, (asked, told) in enumerate(zip(texts[::2], texts[1::2], strict=True)):
        turns = [("human", "Tell me a tale."), ("gpt", asked), ("human", "And another?"), ("gpt", told)]
        chat: dict[str, Any] = {"conversations": [{"from": role, "value": text} for role, text in turns]}
        if i % 2:
            names = {"human": "user", "gpt": "assistant"}
            chat = {"messages": [{"role": names[role], "content": text} for role, text in turns]}
        lines.append(json.dumps(chat) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def templated_target(folder: Path) -> Path:
    """A tiny target whose tokenizer has a chat template."""
    target = tiny_target(folder)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target)
    return target


@pytest.mark.few(4)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_recipe_takes_chats(name: str, tmp_path: Path) -> None:
    """Given as training data, and held out; a recipe with a target of its own has no template."""
    assert SETTINGS.keys() == KINDS.keys()
    config = KINDS[name]
    known = {flag.name for flag in config.flags()}
    settings = SETTINGS[name] | {"out": str(tmp_path / ("out.jsonl" if name == "distill-data" else "out"))}
    settings["text" if "text" in known else "data"] = (str(chat_file(tmp_path / "chats.jsonl")),)
    if "target" in known:
        settings["target"] = str(templated_target(tmp_path))
    if "valid" in known:
        settings["valid"] = (f"chats={chat_file(tmp_path / 'valid.jsonl', 4, 1)}",)
    package = "sakiyomi.train." if name in COMMANDS else ""
    module = importlib.import_module(f"{package}{name.replace('-', '_')}")
    train = getattr(module, f"train_{name.replace('-', '_')}")
    assert train(config.of(**settings))["finished"]


@pytest.mark.parametrize("given", ["text", "prompts"])
def test_a_draft_learns_from_answers_to_chats(given: str, tmp_path: Path) -> None:
    target, chats = templated_target(tmp_path), str(chat_file(tmp_path / "chats.jsonl"))
    config = draft_config(tmp_path, target, **{given: (chats,)})
    summary = train_draft(config)
    assert summary["epochs"].keys() == {"chats.jsonl" if given == "text" else "train.jsonl", "samples.jsonl"}
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = [
        tokenizer.decode(record["tokens"][: record["prompt"]])
        for record in map(json.loads, Path(config.loop.out, "samples.jsonl").read_text(encoding="utf-8").splitlines())
    ]
    assert all(prompt.startswith("<user>Tell me a tale.</user>") for prompt in prompts)
    assert all(prompt.endswith("</user><assistant>") for prompt in prompts)


FORMS: list[dict[str, Any]] = [
    {"conversations": [{"from": "human", "value": "Why?"}]},
    {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]},
    {"turns": ["Why?", "And how?"]},
    {"instruction": "Why?"},
]


@pytest.mark.parametrize("name", ["draft", "eagle", "block", "mtp"])
def test_prompts_in_all_forms(name: str, tmp_path: Path) -> None:
    """ShareGPT, messages, turns (the first one), instructions: each is asked through the template."""
    target, path = templated_target(tmp_path), tmp_path / "asked.jsonl"
    path.write_text("\n".join(map(json.dumps, FORMS)), encoding="utf-8")
    settings = SETTINGS[name] | {"out": str(tmp_path / "out"), "target": str(target), "prompts": (str(path),)}
    settings |= {"text": (str(story_file(tmp_path / "text.jsonl")),), "samples": 4, "sample_tokens": 8}
    module = importlib.import_module(f"sakiyomi.train.{name}")
    assert getattr(module, f"train_{name}")(KINDS[name].of(**settings))["finished"]
    tokenizer = AutoTokenizer.from_pretrained(target)
    lines = (tmp_path / "out" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    for record in map(json.loads, lines):
        prompt = tokenizer.decode(record["tokens"][: record["prompt"]])
        assert prompt == "<user>Why?</user><assistant>"
    assert lines


def test_questions_without_an_answer_are_asked_whole(tmp_path: Path) -> None:
    """A file of `prompt` alone; other records do not go with it."""
    path = tmp_path / "asked.jsonl"
    path.write_text("\n".join([json.dumps({"prompt": f"What is {i}?"}) for i in range(4)]), encoding="utf-8")
    found = Library(tiny_tokenizer(), 320).prompts(path, 200, "--tokens", print)
    assert len(found) == 4 and all((ids < 0).all() for ids in found)
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({"text": "A story."}))
    with pytest.raises(InputError, match="1 records of other kinds"):
        Library(tiny_tokenizer(), 320).prompts(path, 200, "--tokens", print)


def test_prompts_that_leave_no_room_are_left_out(tmp_path: Path) -> None:
    library, path = Library(tiny_tokenizer(), 320), chat_file(tmp_path / "chats.jsonl", 10)
    notes: list[str] = []
    short = library.prompts(path, 60, "--tokens", notes.append)
    assert len(short) == 10 and notes == ["chats.jsonl: 10 prompts of more than 60 tokens left out"]
    assert all((prompt < 0).all() for prompt in short)
    with pytest.raises(InputError, match=r"leave 3 tokens for a prompt of .*; set --tokens lower"):
        library.prompts(path, 3, "--tokens", notes.append)
    with pytest.raises(InputError, match="leave 95 tokens for a prompt"):
        library.prompts(story_file(tmp_path / "text.jsonl"), 95, "--tokens", notes.append)


def test_a_chat_that_is_held_out_is_not_asked(tmp_path: Path) -> None:
    library, path = Library(tiny_tokenizer(), 320), chat_file(tmp_path / "chats.jsonl", 20)
    held = library.hold_back([path], 2, 64, seed=1)
    assert len(held) == 2 and len(library.documents(path)) == 18
    assert len(library.prompts(path, 10**6, "--tokens", print)) == 2 * 18
    assert all((document >= 0).all() for document in library.documents(path)), "every token counts, unless marked"
    marked = Library(tiny_tokenizer(), 320, marked=True).documents(path)
    assert all((document < 0).any() and (document >= 0).any() for document in marked)

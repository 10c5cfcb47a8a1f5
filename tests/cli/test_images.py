"""Images on the command line: the text behind them is that of transformers; what reads none says so in one line."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from causal_models import TOKENIZER
from multimodal_toys import IMAGE, PATCH, SIDE, seeing_model
from sakiyomi.cli import app
from toys import save_model, tiny_llama, tiny_tokenizer

NEW = 6
MARK = TOKENIZER.convert_ids_to_tokens(IMAGE)
FIRST, SECOND = "んおか", "がぎ"
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ '" + MARK + "' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llava with a processor of its own, cat.png and dog.png; text and blind: models without, notes.txt."""
    folder = tmp_path_factory.mktemp("seeing")
    save_model(folder / "seeing", seeing_model("llava"), TOKENIZER)
    save_model(folder / "blind", seeing_model("llava"), TOKENIZER)
    save_model(folder / "text", tiny_llama(), tiny_tokenizer())
    sides = {"height": SIDE, "width": SIDE}
    pixels = hf.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=sides)
    options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = hf.LlavaProcessor(
        pixels, copy.deepcopy(TOKENIZER), patch_size=PATCH, chat_template=TEMPLATE, image_token=MARK, **options
    )
    processor.save_pretrained(folder / "seeing")
    for seed, name in enumerate(("cat", "dog")):
        blocks = np.random.default_rng(seed).integers(0, 255, (3, 4, 3), np.uint8)
        Image.fromarray(blocks.repeat(10, 0).repeat(10, 1)).save(folder / f"{name}.png")
    (folder / "notes.txt").write_text("no image", encoding="utf-8")
    return folder


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(folder)

    def call(*arguments: str, lines: str | None = None) -> Result:
        options = ["--compile", "false", "--max-new-tokens", str(NEW), "--ignore-eos", "--draft", "prompt-lookup"]
        return CliRunner().invoke(app, [*arguments, *options], input=lines)

    return call


@torch.no_grad()
def wanted(folder: Path, text: str, *names: str) -> str:
    """What transformers writes behind a text with marks."""
    processor: Any = hf.AutoProcessor.from_pretrained(folder / "seeing")
    made = processor(text=[text], images=[Image.open(folder / f"{name}.png") for name in names], return_tensors="pt")
    done = seeing_model("llava").generate(**made, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return str(TOKENIZER.decode(done[0, made["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.thorough
def test_generate(folder: Path, run: Callable[..., Result]) -> None:
    """Streamed and not, one image and two, before every prompt."""
    cat, dog = wanted(folder, MARK + FIRST, "cat"), wanted(folder, MARK + FIRST, "dog")
    assert cat != dog, "the image is not looked at"
    result = run("generate", FIRST, "--target", "seeing", "--image", "cat.png")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{cat}\n"
    result = run("generate", FIRST, SECOND, "--target", "seeing", "--image", "dog.png", "--image", "cat.png", "--json")
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    texts = [wanted(folder, MARK * 2 + prompt, "dog", "cat") for prompt in (FIRST, SECOND)]
    assert [done["text"] for done in found["generations"]] == texts
    assert found["images"] == ["dog.png", "cat.png"] and found["prompts"] == [FIRST, SECOND]
    assert found["generations"][0]["prompt_tokens"] == 8 + len(FIRST)


@pytest.mark.thorough
def test_weights_are_quantized(folder: Path, run: Callable[..., Result]) -> None:
    """Images are read by a model whose text part is rounded, by its packed copy, and by that alone."""
    outs = []
    for target in ("seeing", "seeing", "seeing/sakiyomi-int8-float32"):
        options = [] if outs and target != "seeing" else ["--quantize", "int8"]
        result = run("generate", FIRST, "--target", target, "--image", "cat.png", *options)
        assert result.exit_code == 0 and "packed anew" not in result.output, result.output
        outs.append(result.stdout)
    assert outs[0] == outs[1] == outs[2] != "\n"


def test_chat(folder: Path, run: Callable[..., Result]) -> None:
    """An image goes with the next message, is seen by later ones, saved, and looked at again."""
    lines = [
        "/image cat.png",
        FIRST,
        SECOND,
        "/save talk.json",
        "/reset",
        "/image dog.png",
        "/image",
        "/load talk.json",
    ]
    result = run("chat", "seeing", "--json", lines="\n".join([*lines, FIRST, ""]))
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout.splitlines()[-1])["messages"]
    text = MARK + FIRST
    for reply, message in zip(said[1::2], (SECOND, FIRST, ""), strict=True):
        assert reply["content"] == wanted(folder, text, "cat")
        text += reply["content"] + message
    assert said[0]["content"] == [{"type": "image", "path": "cat.png"}, {"type": "text", "text": FIRST}]
    assert "no image goes with the next message" in result.stderr


WRONG = {
    "a model of text": (["--target", "text", "--image", "cat.png"], r"'text' \(llama\) reads no images"),
    "no processor": (["--target", "blind", "--image", "cat.png"], "'blind' has no image processor"),
    "no image": (["--target", "seeing", "--image", "notes.txt"], "notes.txt: the image cannot be read"),
    "no file": (["--target", "seeing", "--image", "bird.png"], "the image 'bird.png' cannot be read .*check the path"),
    "a prefix": (["--target", "seeing", "--image", "cat.png", "--prefix", "a.kv"], "drop --prefix, or --image"),
    "a policy": (["--target", "seeing", "--image", "cat.png", "--cache", "quant-8"], "use cache='full'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_shown(run: Callable[..., Result], case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error, and, but for what is known of a model that runs, before its weights are read."""
    flags, words = WRONG[case]
    if case != "a policy":
        monkeypatch.setattr("sakiyomi.cli.generate.load", lambda model: pytest.fail("the target was loaded"))
    result = run("generate", FIRST, *flags)
    assert result.exit_code != 0 and result.stdout == ""
    assert re.search(words, " ".join(result.stderr.split())), result.stderr
    assert "Traceback" not in result.output


def test_a_chat_without_eyes(run: Callable[..., Result]) -> None:
    result = run("chat", "text", lines="/image cat.png\n")
    assert "'text' reads no images: it is a model of text" in " ".join(result.stderr.split())

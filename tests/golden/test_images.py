"""Models of text and images: text alone, and behind images, is that of transformers, whatever is drafted."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import causal_models
from architectures import VOCAB, greedy, model_of, prompt
from causal_models import TOKENIZER
from drafters import Branching
from multimodal_toys import IMAGE, MARK, SEEING, Processor, image, seeing_model, seen
from sakiyomi import LLM, ImagePrompt, InputError, SamplingParams, UnsupportedError
from toys import save_model

NEW = 20
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True, gamma=3)


def told(length: int, seed: int) -> str:
    return str(TOKENIZER.decode([token for token in prompt(length, seed) if token > IMAGE + 3]))


TEXTS = [f"{told(9, 1)}{MARK}{told(7, 2)}", f"{MARK}{told(4, 3)}{MARK}{told(9, 4)}"]
IMAGES = [[image(1)], [image(2), image(3)]]


def llm_of(name: str, draft: Any = "none", **options: Any) -> LLM:
    return LLM((seeing_model(name), Processor(name, TOKENIZER)), draft, compile=False, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SEEING)
def test_text_alone(name: str) -> None:
    """The text part runs as any model: chains, trees, batches, chunks."""
    assert causal_models.check(seeing_model(name)) == {"state": "runs"}


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_a_folder_of_the_whole_model(name: str, tmp_path: Path) -> None:
    folder, tokens = save_model(tmp_path, seeing_model(name), TOKENIZER), prompt(11, 1)
    llm = LLM(folder, "prompt-lookup", compile=False)
    assert llm.generate([tokens], GREEDY)[0].token_ids == greedy(seeing_model(name), tokens, NEW)
    with pytest.raises(InputError, match="no image processor"):
        llm.generate([ImagePrompt(TEXTS[0], IMAGES[0])], GREEDY)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SEEING)
def test_text_behind_images(name: str) -> None:
    """Alone, in a batch beside text, with trees of drafts that are right now and then."""
    processor, words = Processor(name, TOKENIZER), prompt(11, 1)
    wanted = [seen(name, processor, *pair, NEW) for pair in zip(TEXTS, IMAGES, strict=True)]
    assert wanted[0] != seen(name, processor, TEXTS[0], [image(4)], NEW), "the image is not looked at"
    wanted.append(greedy(seeing_model(name), words, NEW))
    prompts = [*map(ImagePrompt, TEXTS, IMAGES), words]
    tokens = [
        processor([text], images, "pt")["input_ids"][0].tolist() for text, images in zip(TEXTS, IMAGES, strict=True)
    ]
    drafter = Branching(
        {tuple(given): text for given, text in zip([*tokens, words], wanted, strict=True)}, "sometimes", VOCAB
    )
    for draft in ("none", drafter):
        llm = llm_of(name, draft)
        done = llm.generate(prompts, GREEDY)
        assert [out.token_ids for out in done] == wanted
        assert [out.prompt_tokens for out in done] == [*map(len, tokens), len(words)]
        assert llm.generate(prompts[0], GREEDY).token_ids == wanted[0]
        assert not llm.engine._speculation.broken


class Beginning(Processor):
    """Writes a begin token as transformers' processors do, unless it is told not to."""

    def __call__(
        self, text: Sequence[str], images: Sequence[Tensor], return_tensors: str, add_special_tokens: bool = True
    ) -> dict[str, Tensor]:
        return super().__call__(["</s>" * add_special_tokens + text[0]], images, return_tensors)


def test_the_begin_token_that_a_template_wrote_is_not_written_again() -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.bos_token = "</s>"
    llm = LLM((seeing_model("gemma3"), Beginning("gemma3", tokenizer)), "none", compile=False)
    sizes = [llm.engine.process(ImagePrompt(text, IMAGES[0])).tokens.count(1) for text in (f"</s>{TEXTS[0]}", TEXTS[0])]
    assert sizes == [1, 1]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gemma3", "qwen3_5"])
def test_nothing_is_reused_across_images(name: str) -> None:
    """Marks of different images are the same tokens."""
    processor, llm = Processor(name, TOKENIZER), llm_of(name)
    with llm.conversation() as conversation:
        for images in (IMAGES[0], [image(4)], IMAGES[0]):
            out = conversation.generate(ImagePrompt(TEXTS[0], images), GREEDY)
            assert out.token_ids == seen(name, processor, TEXTS[0], images, NEW)
        tokens = prompt(11, 1)
        assert conversation.generate(tokens, GREEDY).token_ids == greedy(seeing_model(name), tokens, NEW)


def test_images_are_refused_in_one_line() -> None:
    given = ImagePrompt(TEXTS[0], IMAGES[0])
    with pytest.raises(InputError, match="the model reads text"):
        LLM((model_of("llama"), TOKENIZER), "none", compile=False).generate([given], GREEDY)
    with pytest.raises(UnsupportedError, match="use cache='full'"):
        llm_of("gemma3", cache="quant-8").generate([given], GREEDY)
    with pytest.raises(InputError, match=r"does not take it .*1 marks and 2 images"):
        llm_of("gemma3").generate([ImagePrompt(TEXTS[0], IMAGES[1])], GREEDY)
    with pytest.raises(InputError, match="no images"):
        ImagePrompt("a", [])

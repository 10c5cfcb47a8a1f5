"""Real checkpoints: the text that their authors know, transformers' greedy text, and a known speed-up in tokens.

Random models show that two computations agree; these show that it is language that comes out, and that a small model
that was trained on the same stories does read ahead for a larger one.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from architectures import greedy
from checkpoints import SHARED, convert, needs_shared
from sakiyomi import LLM, SamplingParams
from sakiyomi.model_executor.loading import load_model

pytestmark = needs_shared

LILY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, let's go to the park.\""
)
EXPLORE = (
    ", there was a little girl named Lily. She loved to play outside and explore the world around her. One day, she "
    "saw a big, red ball. She was so happy and wanted to play with it."
)
STARTS = ("Once upon a time", "One day, a little", "There was a", "Tim and Sue", "The cat")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda name: convert(name, root / name))


@pytest.fixture(scope="module")
def target(folders: Any) -> LLM:
    return LLM(folders("bitllama-3M"), f"model:{folders('stories260K')}", compile=False)


def test_the_known_text_of_stories260k(folders: Any) -> None:
    """The text that its author documents, from the begin token alone."""
    llm = LLM(folders("stories260K"), "none", compile=False)
    (out,) = llm.generate([[1]], SamplingParams(max_new_tokens=120))
    assert out.text.strip().startswith(LILY)


@pytest.mark.thorough
def test_the_known_text_of_bitllama_3m(target: LLM) -> None:
    """A quantization-aware model of ternary weights, with tiny activations, and a draft beside it."""
    out = target.generate("Once upon a time", SamplingParams(max_new_tokens=70, gamma=4))
    assert out.text.startswith(EXPLORE)
    assert (
        "".join(step.text for step in target.stream("Once upon a time", SamplingParams(max_new_tokens=70))) == out.text
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["stories260K", "bitllama-3M", "bitllama-1M", "babyllama-105"])
def test_greedy_text_is_transformers_own(folders: Any, name: str) -> None:
    folder = folders(name)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    llm = LLM(folder, "none", compile=False)
    prompts = [tokenizer(text)["input_ids"] for text in STARTS]
    done = llm.generate(list(STARTS), SamplingParams(max_new_tokens=60))
    for tokens, out in zip(prompts, done, strict=True):
        expected = greedy(model, tokens, 60, stop=[2])
        assert out.token_ids == expected
        assert out.prompt_tokens == len(tokens)
        before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (tokens, tokens + expected))
        assert before + out.text == whole


def stories() -> list[str]:
    """Beginnings of held-out stories."""
    with gzip.open(SHARED / "data" / "text" / "tinystories_valid.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"][:60] for _, line in zip(range(5), lines, strict=False)]


@pytest.mark.thorough
def test_a_small_model_reads_ahead_for_a_larger_one(folders: Any, target: LLM) -> None:
    """About 3.4 tokens per target pass, as transformers' own assisted generation gave with this pair.

    Too few would show that the draft's cache is wrong (its tokens are then refused), which no equality of texts shows.
    """
    model = AutoModelForCausalLM.from_pretrained(folders("bitllama-3M")).eval()
    prompts = stories()
    done = target.generate(prompts, SamplingParams(max_new_tokens=120, gamma=4, ignore_eos=True))
    for text, out in zip(prompts, done, strict=True):
        assert out.token_ids == greedy(model, target.tokenizer(text)["input_ids"], 120, stop=[-1])
    tau = sum(out.stats.committed for out in done) / sum(out.stats.rounds for out in done)
    assert tau == pytest.approx(3.4, abs=0.15)


@pytest.mark.thorough
def test_as_few_passes_as_transformers_assisted_generation(folders: Any, target: LLM) -> None:
    """The same pair, gamma and prompts there: target passes counted by a hook, their first one holds the prompt too."""
    large, small = (
        AutoModelForCausalLM.from_pretrained(folders(name)).eval() for name in ("bitllama-3M", "stories260K")
    )
    small.generation_config.num_assistant_tokens = 4
    small.generation_config.num_assistant_tokens_schedule = "constant"
    small.generation_config.assistant_confidence_threshold = 0.0
    passes = []
    large.register_forward_pre_hook(lambda *_: passes.append(1))
    ours = 0
    for text in stories()[:3]:
        ids = torch.tensor([target.tokenizer(text)["input_ids"]])
        large.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=80,
            do_sample=False,
            assistant_model=small,
            eos_token_id=-1,
        )
        ours += target.generate(text, SamplingParams(max_new_tokens=80, gamma=4, ignore_eos=True)).stats.rounds + 1
    assert ours == pytest.approx(len(passes), rel=0.06)


@pytest.mark.thorough
@pytest.mark.parametrize("gamma", [1, 2, 4, 8])
def test_tau_with_a_fixed_gamma_is_what_acceptance_says(target: LLM, folders: Any, gamma: int) -> None:
    """Committed tokens are the accepted ones and one of the target's a round; equality with transformers' own drafts
    is counted on the same prompts by a plain loop: propose greedily, keep what agrees.
    """
    draft, large = (AutoModelForCausalLM.from_pretrained(folders(f)).eval() for f in ("stories260K", "bitllama-3M"))
    text = STARTS[0]
    out = target.generate(text, SamplingParams(max_new_tokens=60, gamma=gamma, ignore_eos=True))
    tokens = target.tokenizer(text)["input_ids"]
    whole = tokens + greedy(large, tokens, 60, stop=[-1])
    place, rounds = len(tokens) + 1, 0
    while place < len(whole):
        room = min(gamma, len(whole) - place - 1)
        ahead = greedy(draft, whole[:place], room, stop=[-1]) if room else []
        agreed = next((i for i, t in enumerate(ahead) if t != whole[place + i]), len(ahead))
        place, rounds = place + agreed + 1, rounds + 1
    assert out.stats.rounds == rounds
    assert out.stats.committed == out.stats.accepted + out.stats.rounds


@pytest.mark.thorough
def test_sampled_stories_are_the_same_with_and_without_a_draft(folders: Any, target: LLM) -> None:
    """Coupled, on a real pair: equal texts, and a fair share of drafts accepted."""
    plain = LLM(folders("bitllama-3M"), "none", compile=False)
    values = SamplingParams(max_new_tokens=80, temperature=1.0, top_p=0.95, seed=7, gamma=4)
    drafted = target.generate(list(STARTS), values)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain.generate(list(STARTS), values)]
    assert sum(out.stats.accepted for out in drafted) / sum(out.stats.drafted for out in drafted) > 0.4


@pytest.fixture(scope="module")
def across(folders: Any) -> LLM:
    """A draft of one token a character for a target of 512 pieces."""
    return LLM(folders("bitllama-3M"), f"model:{folders('babyllama-105')}", compile=False)


@pytest.mark.thorough
def test_a_draft_of_another_tokenizer_reads_ahead(folders: Any, across: LLM) -> None:
    """transformers commits 2.4 tokens a pass with this pair; here the draft's text comes as the target would cut it.

    The texts are longer than the draft's context of 256 characters.
    """
    model = AutoModelForCausalLM.from_pretrained(folders("bitllama-3M")).eval()
    prompts = stories()
    done = across.generate(prompts, SamplingParams(max_new_tokens=120, gamma=6, ignore_eos=True))
    for text, out in zip(prompts, done, strict=True):
        assert out.token_ids == greedy(model, across.tokenizer(text)["input_ids"], 120, stop=[-1])
    tau = sum(out.stats.committed for out in done) / sum(out.stats.rounds for out in done)
    assert tau >= 2.6


@pytest.mark.thorough
def test_a_draft_of_longer_pieces_takes_back_the_last_of_them(folders: Any) -> None:
    """4096 pieces against 512: the target's text ends inside the draft's words most of the time.

    Read on from there, as if a word ended, it commits 2.1 tokens a pass.
    """
    llm = LLM(folders("bitllama-3M"), "model:tales-draft", compile=False)
    plain = LLM(folders("bitllama-3M"), "none", compile=False)
    params = SamplingParams(max_new_tokens=120, gamma=4, ignore_eos=True)
    done = llm.generate(stories(), params)
    assert [out.token_ids for out in done] == [out.token_ids for out in plain.generate(stories(), params)]
    assert sum(out.stats.committed for out in done) / sum(out.stats.rounds for out in done) >= 2.9


@pytest.mark.thorough
def test_sampled_stories_across_tokenizers(folders: Any, across: LLM) -> None:
    """The same text as without a draft for a seed; drafts are still accepted, as point masses."""
    plain = LLM(folders("bitllama-3M"), "none", compile=False)
    values = SamplingParams(max_new_tokens=60, temperature=0.8, seed=3, gamma=4)
    drafted = across.generate(list(STARTS), values)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain.generate(list(STARTS), values)]
    assert sum(out.stats.accepted for out in drafted) / sum(out.stats.drafted for out in drafted) > 0.2


@pytest.mark.thorough
def test_known_losses(folders: Any) -> None:
    """The converter is right: nats per token on held-out stories are the documented ones."""
    with gzip.open(SHARED / "data" / "text" / "tinystories_valid.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for _, line in zip(range(80), lines, strict=False)]
    for name, known in (("stories260K", 1.334), ("bitllama-1M", 1.407), ("bitllama-3M", 1.262)):
        loaded = load_model(folders(name))
        total, count = 0.0, 0
        for text in texts[:40]:
            ids = torch.tensor([loaded.tokenizer(text)["input_ids"][:512]])
            with torch.no_grad():
                loss = loaded.model(input_ids=ids, labels=ids).loss
            total, count = total + float(loss) * (ids.shape[1] - 1), count + ids.shape[1] - 1
        assert total / count == pytest.approx(known, abs=0.08), name

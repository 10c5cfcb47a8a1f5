"""EAGLE heads read ahead: the text stays the target's own, and the guesses are those of the method."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from architectures import VOCAB, greedy, prompt
from damage import DAMAGES, refusals
from eagle_toys import guessed, new_head, original_folder, speculators_folder
from sakiyomi import LLM, Draft, InputError, LoadError, SamplingParams, UnsupportedError
from sakiyomi.drafters import parse_drafters
from sakiyomi.drafters.base import Context
from sakiyomi.drafters.eagle import EagleDrafter
from sakiyomi.drafters.eagle_heads.formats import EagleFile, read_eagle
from sakiyomi.kernels.build import native
from toys import character_tokenizer, save_model, tiny_llama

NEW = 24
PROMPTS = [prompt(11, 1), prompt(3, 2), prompt(70, 3)]
TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "some tokens": {"tokens": list(range(3, VOCAB, 2))},
    "norms": {"norm_before_residual": True, "fc_norm": True, "norm_before_fc": True},
    "3.1": {"norm_output": True},
    "qwen3": {"kind": "qwen3"},
    "two layers": {"depth": 2},
    "parallel": {"mask": 5, "depth": 2},
}
SIZES: list[dict[str, Any]] = [
    {"gamma": 4, "tree": "chain"},
    {"gamma": 4, "tree": "best-first", "nodes": 12},
    {"gamma": 3, "tree": "dynamic", "nodes": 10},
    {"gamma": 3, "tree": "static", "nodes": 9},
    {"tree": [1, 3, 2, 1]},
    {"gamma": "auto"},
]


@cache
def target() -> Any:
    return tiny_llama(vocab=VOCAB, layers=8, seed=3)


@cache
def head(name: str) -> EagleFile:
    return new_head(target(), **HEADS[name])


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NEW, "ignore_eos": True} | values))


def llm_of(draft: Any, **options: Any) -> LLM:
    return LLM((target(), TOKENIZER), draft, **({"compile": False, "strict": True} | options))


@cache
def texts() -> tuple[list[list[int]], list[list[int]]]:
    """Greedy as transformers has it, and sampled as without a draft."""
    sampled = llm_of("none").generate(PROMPTS, params(temperature=1.0, seed=3))
    return [greedy(target(), tokens, NEW) for tokens in PROMPTS], [out.token_ids for out in sampled]


def rounds(folder: Path, **options: Any) -> list[tuple[list[int], list[int]]]:
    """The texts before the rounds of a request, and the chains that were drafted."""
    out = llm_of(f"eagle:{folder}", **options).generate(PROMPTS, params(gamma=4, tree="chain"), rounds_trace=True)
    return [
        (tokens + [e.token_id for e in one.trace if e.round < entry.round], list(entry.tokens))
        for tokens, one in zip(PROMPTS, out, strict=True)
        for entry in one.rounds_trace or []
        if entry.tokens
    ]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        *((name, speculators_folder) for name in HEADS),
        *((name, original_folder) for name in ("plain", "some tokens", "parallel")),
    ],
)
def test_guesses_are_those_of_the_method(name: str, write: Callable[..., Path], tmp_path: Path) -> None:
    done = rounds(write(tmp_path / "head", head(name)))
    assert len(done) > NEW
    for text, chain in done:
        assert chain == guessed(target(), head(name), text, len(chain))


@pytest.mark.parametrize("wrong", [{"shift": 0}, {"off": -1}, {"off": 1}, {"turned": True}], ids=str)
def test_what_is_misread_easily_is_noticed(wrong: dict[str, Any], tmp_path: Path) -> None:
    """Another feature, other layers or another order give other guesses: the comparison above can fail."""
    done = rounds(speculators_folder(tmp_path, head("plain")))
    others = [guessed(target(), head("plain"), text, len(chain), **wrong) for text, chain in done]
    assert sum(chain != other for (_, chain), other in zip(done, others, strict=True)) > len(done) / 2


def test_offsets_are_no_tokens(tmp_path: Path) -> None:
    done = rounds(speculators_folder(tmp_path, head("some tokens")))
    tokens = head("some tokens").tokens
    assert tokens is not None
    assert {token for _, chain in done for token in chain} <= set(tokens.tolist())
    wrong = replace(head("some tokens"), tokens=tokens - torch.arange(len(tokens)))
    others = [guessed(target(), wrong, text, len(chain)) for text, chain in done]
    assert sum(chain != other for (_, chain), other in zip(done, others, strict=True)) > len(done) / 2


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", ["plain", "some tokens", "parallel"])
def test_trees(name: str, size: dict[str, Any], tmp_path: Path) -> None:
    """Greedy as transformers has it, sampled as without a draft."""
    llm = llm_of(f"eagle:{speculators_folder(tmp_path, head(name))}")
    expected, sampled = texts()
    done = llm.generate(PROMPTS, params(**size))
    assert [out.token_ids for out in done] == expected
    assert size.get("gamma") == "auto" or sum(out.stats.drafted for out in done) > NEW
    values = params(temperature=1.0, seed=3, **size)
    assert [out.token_ids for out in llm.generate(PROMPTS, values)] == sampled


@pytest.mark.parametrize("draft", ["eagle:{}+suffix", "early-exit:1+eagle:{}"])
def test_merged_with_other_drafts(draft: str, tmp_path: Path) -> None:
    llm = llm_of(draft.format(speculators_folder(tmp_path, head("plain"))))
    done = llm.generate(PROMPTS, params(gamma=3, nodes=12))
    assert [out.token_ids for out in done] == texts()[0]


@pytest.mark.skipif(native() is None, reason="traced passes are of the compiled kernels")
@pytest.mark.parametrize("options", [{"compile": "auto"}, {"exact": True}, {"max_batch": 1}], ids=str)
def test_other_paths(options: dict[str, Any], tmp_path: Path) -> None:
    folder = speculators_folder(tmp_path, head("plain"))
    llm = llm_of(f"eagle:{folder}", **options)
    for _ in range(2):
        out = llm.generate(PROMPTS, params(gamma=4))
        assert [one.token_ids for one in out] == texts()[0]
    if options == {"compile": "auto"}:
        for text, chain in rounds(folder, **options):
            assert chain == guessed(target(), head("plain"), text, len(chain))


def test_conversations_and_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head follows a conversation; behind a prefix it reads what the target reads for the request."""
    llm = llm_of(f"eagle:{speculators_folder(tmp_path, head('plain'))}", chunk_size=16)
    chains = params(gamma=3, tree="chain")

    propose = EagleDrafter.propose
    asked: list[tuple[list[int], list[int]]] = []

    def noted(self: EagleDrafter, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        drafts = propose(self, contexts, gammas)
        asked.append((list(contexts[0].tokens), list(drafts[0].tree.tokens)))
        return drafts

    monkeypatch.setattr(EagleDrafter, "propose", noted)

    def say(talk: Any, tokens: list[int]) -> list[int]:
        before = len(asked)
        out = talk.generate(tokens, chains)
        assert out.token_ids == greedy(target(), tokens, NEW)
        assert sum(map(bool, (chain for _, chain in asked[before:]))) > NEW / 3
        return tokens + out.token_ids

    with llm.conversation() as talk:
        first = say(talk, PROMPTS[2])
        second = say(talk, first + PROMPTS[0])
        say(talk, first[:-5] + PROMPTS[1])  # the end of the first reply is another one
        say(talk, PROMPTS[1])
        say(talk, second + PROMPTS[1])
    wrong = [len(text) for text, chain in asked if chain != guessed(target(), head("plain"), text, len(chain))]
    assert not wrong, ([len(t) for t, _ in asked], wrong)
    with llm.conversation(llm.prefix(PROMPTS[2])) as talk:  # whose features are not known: the guesses are others
        say(talk, PROMPTS[2] + PROMPTS[0])


def test_a_folder_says_what_it_holds(tmp_path: Path) -> None:
    eagle = speculators_folder(tmp_path / "eagle", head("plain"))
    model = save_model(tmp_path / "model", tiny_llama(vocab=VOCAB), TOKENIZER)
    assert parse_drafters(f"{eagle}+suffix") == [f"eagle:{eagle}", "suffix"]
    assert parse_drafters([str(model), "tales-draft"]) == [f"model:{model}", "model:tales-draft"]
    assert parse_drafters("tales-medusa") == ["medusa:tales-medusa"]
    assert parse_drafters(str(original_folder(tmp_path / "o", head("plain")))) == [f"eagle:{tmp_path / 'o'}"]
    assert [out.token_ids for out in llm_of(str(eagle)).generate(PROMPTS, params())] == texts()[0]


# ---------------------------------------------------------------- what is refused


def _config(folder: Path, **changes: Any) -> None:
    place = folder / "config.json"
    config = json.loads(place.read_text())
    place.write_text(json.dumps(config | changes))


def refused(folder: Path, kind: type[Exception], *words: str) -> None:
    with pytest.raises(kind) as error:
        llm_of(f"eagle:{folder}")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_heads_of_another_target(tmp_path: Path) -> None:
    other = tiny_llama(vocab=VOCAB, layers=8, dim=48)
    refused(speculators_folder(tmp_path / "wide", new_head(other)), UnsupportedError, "144", "96", "another model")
    deep = original_folder(tmp_path / "deep", head("plain"))
    _config(deep, eagle_aux_hidden_state_layer_ids=[2, 10, 21])
    refused(deep, UnsupportedError, "1, 9, 20", "has 8", "another model")
    more = new_head(target(), tokens=[*range(10), VOCAB + 7])
    refused(original_folder(tmp_path / "more", replace(more, config=more.config | {"vocab_size": VOCAB + 8})),
            UnsupportedError, str(VOCAB + 7), str(VOCAB))  # fmt: skip


def test_folders_that_hold_no_head(tmp_path: Path) -> None:
    refused(tmp_path / "none", LoadError, "no EAGLE head", "none")
    with pytest.raises(InputError, match="names no head"):
        llm_of("eagle:")
    for changes, word in (
        ({"architectures": ["GPT9"]}, "GPT9"),
        ({"architectures": None, "model_type": "strange"}, "strange"),
    ):
        folder = original_folder(tmp_path / word, head("plain"))
        _config(folder, **changes)
        refused(folder, LoadError, "holds no EAGLE head", word)
    folder = original_folder(tmp_path / "kind", head("plain"))
    _config(folder, model_type="gpt9")
    refused(folder, LoadError, "gpt9", "llama")
    folder = original_folder(tmp_path / "sizes", head("plain"))
    _config(folder, intermediate_size=17)
    refused(folder, LoadError, "config.json")
    part = head("plain")
    lacking = {name: tensor for name, tensor in part.tensors.items() if "hidden_norm" not in name}
    refused(original_folder(tmp_path / "part", replace(part, tensors=lacking)), LoadError, "hidden_norm")
    more = part.tensors | {"layers.0.strange.weight": torch.zeros(3)}
    refused(original_folder(tmp_path / "strange", replace(part, tensors=more)), LoadError, "strange")


def test_no_damage_passes(tmp_path: Path) -> None:
    folder = speculators_folder(tmp_path, head("plain"))
    assert refusals([folder / "model.safetensors"], DAMAGES, lambda: read_eagle(folder, 8)) == DAMAGES

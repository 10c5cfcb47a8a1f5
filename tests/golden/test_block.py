"""Block drafters read ahead: the text stays the target's own, and the guesses are those of the method."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from architectures import VOCAB, greedy, model_of, prompt
from block_toys import deepspec_folder, dflash_folder, guessed, new_block, speculators_folder
from damage import DAMAGES, refusals
from sakiyomi import LLM, Draft, InputError, LoadError, SamplingParams, UnsupportedError
from sakiyomi.drafters import parse_drafters
from sakiyomi.drafters.base import Context
from sakiyomi.drafters.block import BlockDrafter
from sakiyomi.drafters.block_heads.formats import BlockFile, read_block
from sakiyomi.kernels.build import native
from toys import character_tokenizer, tiny_llama

NEW = 24
PROMPTS = [prompt(11, 1), prompt(3, 2), prompt(70, 3)]
TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
DSPARK: dict[str, Any] = {"anchored": True, "confident": True}
BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scaled": {"logit_scale": 0.3, "softcap": 2.0},
    "anchored": {"anchored": True},
    "vanilla": DSPARK | {"markov": "vanilla"},
    "gated": DSPARK | {"markov": "gated", "trusts_tokens": False},
    "rnn": DSPARK | {"markov": "rnn"},
    "confident": DSPARK,
    "some tokens": {"tokens": list(range(3, VOCAB, 2)), "markov": "vanilla"},
}
SIZES: list[dict[str, Any]] = [
    {"gamma": 4, "tree": "chain"},
    {"gamma": 4, "tree": "best-first", "nodes": 12},
    {"gamma": 9, "tree": "ddtree", "nodes": 15},
    {"gamma": 3, "tree": "dynamic", "nodes": 10},
    {"gamma": 3, "tree": "static", "nodes": 9},
    {"tree": [1, 3, 2, 1]},
    {"gamma": "auto"},
]


@cache
def target() -> Any:
    return tiny_llama(vocab=VOCAB, layers=8, seed=3)


@cache
def block(name: str) -> BlockFile:
    return new_block(target(), **BLOCKS[name])


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
    out = llm_of(f"block:{folder}", **options).generate(PROMPTS, params(gamma=4, tree="chain"), rounds_trace=True)
    return [
        (tokens + [e.token_id for e in one.trace if e.round < entry.round], list(entry.tokens))
        for tokens, one in zip(PROMPTS, out, strict=True)
        for entry in one.rounds_trace or []
        if entry.tokens
    ]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        *((name, dflash_folder) for name in ("plain", "causal", "scaled")),
        *((name, deepspec_folder) for name in ("anchored", "vanilla", "gated", "rnn", "confident")),
        *((name, speculators_folder) for name in ("plain", "anchored", "vanilla", "some tokens")),
    ],
)
def test_guesses_are_those_of_the_method(name: str, write: Callable[..., Path], tmp_path: Path) -> None:
    done = rounds(write(tmp_path / "block", block(name)))
    assert len(done) > NEW
    for text, chain in done:
        assert chain == guessed(target(), block(name), text, len(chain))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("plain", wrong) for wrong in ({"off": -1}, {"off": 1}, {"turned": True}, {"ahead": -1}, {"ahead": 1})),
        *(("plain", wrong) for wrong in ({"mixed": True}, {"causal": True}, {"mask": 2}, {"size": 14})),
        ("causal", {"causal": False}), ("vanilla", {"markov": ""}), ("anchored", {"anchored": False}),
        ("gated", {"markov": "vanilla"}),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_misread_easily_is_noticed(name: str, wrong: dict[str, Any], tmp_path: Path) -> None:
    """Other layers, another order, other rows, norms or masks give other guesses: the comparison above can fail."""
    done = rounds((dflash_folder if name in ("plain", "causal") else deepspec_folder)(tmp_path, block(name)))
    others = [guessed(target(), block(name), text, len(chain), **wrong) for text, chain in done]
    assert sum(chain != other for (_, chain), other in zip(done, others, strict=True)) > len(done) / 2


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", ["plain", "rnn", "some tokens"])
def test_trees(name: str, size: dict[str, Any], tmp_path: Path) -> None:
    """Greedy as transformers has it, sampled as without a draft."""
    llm = llm_of(f"block:{(deepspec_folder if name == 'rnn' else speculators_folder)(tmp_path, block(name))}")
    expected, sampled = texts()
    done = llm.generate(PROMPTS, params(**size))
    assert [out.token_ids for out in done] == expected
    assert size.get("gamma") == "auto" or sum(out.stats.drafted for out in done) > NEW
    values = params(temperature=1.0, seed=3, **size)
    assert [out.token_ids for out in llm.generate(PROMPTS, values)] == sampled


@pytest.mark.parametrize("draft", ["block:{}+suffix", "early-exit:1+block:{}"])
def test_merged_with_other_drafts(draft: str, tmp_path: Path) -> None:
    llm = llm_of(draft.format(dflash_folder(tmp_path, block("plain"))))
    done = llm.generate(PROMPTS, params(gamma=3, nodes=12))
    assert [out.token_ids for out in done] == texts()[0]


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_hybrids_as_targets(name: str, tmp_path: Path) -> None:
    """Hidden states come from layers of every kind."""
    model = model_of(name)
    folder = dflash_folder(tmp_path, new_block(model, layers=(0, 1, 2)))
    llm = LLM((model, TOKENIZER), f"block:{folder}", compile=False, strict=True)
    done = llm.generate(PROMPTS, params(gamma=3, tree="ddtree", nodes=6))
    assert [out.token_ids for out in done] == [greedy(model, tokens, NEW) for tokens in PROMPTS]
    assert sum(out.stats.drafted for out in done) > NEW


@pytest.mark.skipif(native() is None, reason="traced passes are of the compiled kernels")
@pytest.mark.parametrize("options", [{"compile": "auto"}, {"exact": True}, {"max_batch": 1}], ids=str)
def test_other_paths(options: dict[str, Any], tmp_path: Path) -> None:
    folder = dflash_folder(tmp_path, block("plain"))
    llm = llm_of(f"block:{folder}", **options)
    for _ in range(2):
        out = llm.generate(PROMPTS, params(gamma=4))
        assert [one.token_ids for one in out] == texts()[0]
    if options == {"compile": "auto"}:
        for text, chain in rounds(folder, **options):
            assert chain == guessed(target(), block("plain"), text, len(chain))


def test_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiled kernels a block's rows see each other, too."""
    monkeypatch.setattr("sakiyomi.kernels.native.PackedWeights.create", lambda: None)
    for text, chain in rounds(dflash_folder(tmp_path, block("plain"))):
        assert chain == guessed(target(), block("plain"), text, len(chain))


def test_conversations_and_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter follows a conversation, whose next turn may contradict the end of the last."""
    llm = llm_of(f"block:{dflash_folder(tmp_path, block('plain'))}", chunk_size=16)
    chains = params(gamma=3, tree="chain")
    propose = BlockDrafter.propose
    asked: list[tuple[list[int], list[int]]] = []

    def noted(self: BlockDrafter, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        drafts = propose(self, contexts, gammas)
        asked.append((list(contexts[0].tokens), list(drafts[0].tree.tokens)))
        return drafts

    monkeypatch.setattr(BlockDrafter, "propose", noted)

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
    wrong = [len(text) for text, chain in asked if chain != guessed(target(), block("plain"), text, len(chain))]
    assert not wrong, ([len(text) for text, _ in asked], wrong)
    with llm.conversation(llm.prefix(PROMPTS[2])) as talk:  # whose features are not known: the guesses are others
        say(talk, PROMPTS[2] + PROMPTS[0])


def test_a_folder_says_what_it_holds(tmp_path: Path) -> None:
    for write in (dflash_folder, deepspec_folder, speculators_folder):
        folder = write(tmp_path / write.__name__, block("plain"))
        assert parse_drafters(f"{folder}+suffix") == [f"block:{folder}", "suffix"]
    assert [out.token_ids for out in llm_of(str(folder)).generate(PROMPTS, params())] == texts()[0]


# ---------------------------------------------------------------- what is refused


def _config(folder: Path, **changes: Any) -> None:
    place = folder / "config.json"
    config = json.loads(place.read_text())
    place.write_text(json.dumps(config | changes))


def refused(folder: Path, kind: type[Exception], *words: str) -> None:
    with pytest.raises(kind) as error:
        llm_of(f"block:{folder}")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_drafters_of_another_target(tmp_path: Path) -> None:
    other = tiny_llama(vocab=VOCAB, layers=8, dim=48)
    refused(dflash_folder(tmp_path / "wide", new_block(other)), UnsupportedError, "192", "128", "another model")
    deep = replace(block("plain"), options=replace(block("plain").options, layers=(1, 9, 20)))
    refused(dflash_folder(tmp_path / "deep", deep), UnsupportedError, "1, 9, 20", "has 8", "another model")
    more = new_block(target(), tokens=[*range(10), VOCAB + 7])
    more = replace(more, config=more.config | {"vocab_size": VOCAB + 8})
    refused(speculators_folder(tmp_path / "more", more), UnsupportedError, str(VOCAB + 7), str(VOCAB))
    mask = replace(block("plain"), options=replace(block("plain").options, mask=VOCAB + 3))
    refused(dflash_folder(tmp_path / "mask", mask), UnsupportedError, str(VOCAB + 3), str(VOCAB))


def test_folders_that_hold_no_drafter(tmp_path: Path) -> None:
    refused(tmp_path / "none", LoadError, "no block drafter", "none")
    with pytest.raises(InputError, match="names no drafter"):
        llm_of("block:")
    for name, changes, kind, words in (
        ("strange", {"architectures": ["GPT9"], "dflash_config": None}, LoadError, ["holds no block drafter", "GPT9"]),
        ("second", {"architectures": ["DFlash2DraftModel"]}, UnsupportedError, ["architecture DFlash2DraftModel"]),
        ("windows", {"layer_types": ["sliding_attention"] * 2}, UnsupportedError, ["sliding window"]),
        ("domino", {"dflash_config": {"projector_type": "domino"}}, UnsupportedError, ["projector_type 'domino'"]),
        ("sizes", {"intermediate_size": 17}, LoadError, ["config.json"]),
        ("block", {"block_size": None}, LoadError, ["block_size"]),
        ("heads", {"markov_rank": 5}, LoadError, ["markov_head.*", "missing"]),
    ):
        folder = dflash_folder(tmp_path / name, block("plain"))
        config = json.loads((folder / "config.json").read_text()) | changes
        config = {entry: value for entry, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        refused(folder, kind, *words)
    part = block("plain")
    lacking = {name: tensor for name, tensor in part.tensors.items() if "k_norm" not in name}
    refused(dflash_folder(tmp_path / "part", replace(part, tensors=lacking)), LoadError, "k_norm")
    more = part.tensors | {"layers.0.strange.weight": torch.zeros(3)}
    refused(dflash_folder(tmp_path / "more", replace(part, tensors=more)), LoadError, "strange")


def test_no_damage_passes(tmp_path: Path) -> None:
    folder = speculators_folder(tmp_path, block("plain"))
    assert refusals([folder / "model.safetensors"], DAMAGES, lambda: read_block(folder, 8)) == DAMAGES

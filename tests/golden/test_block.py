"""Block drafters read ahead: the text stays the target's own, and the guesses are those of the method."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from architectures import VOCAB, greedy, model_of
from block_toys import deepspec_folder, dflash_folder, guessed, new_block, speculators_folder
from damage import DAMAGES, refusals
from read_ahead import (
    NEW,
    PROMPTS,
    TOKENIZER,
    Guess,
    as_pickle,
    check_conversations,
    check_trees,
    dealt,
    deep_target,
    drafted,
    llm_over,
    others,
    params,
    refused,
    texts,
)
from sakiyomi import LLM, InputError, LoadError, UnsupportedError
from sakiyomi.drafters import parse_drafters
from sakiyomi.drafters.block import BlockDrafter
from sakiyomi.drafters.block_heads.formats import BlockFile, read_block
from sakiyomi.kernels.build import native
from toys import tiny_llama

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
    "second": {"kernel": 2, "group": 8, "selected": 4},
    "second anchored": {"kernel": 3, "group": 4, "selected": 7, "anchored": True},
    "some tokens": {"tokens": list(range(3, VOCAB, 2)), "markov": "vanilla"},
}
_refused = partial(refused, "block")
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
def block(name: str) -> BlockFile:
    return new_block(deep_target(), **BLOCKS[name])


def llm_of(draft: Any, **options: Any) -> LLM:
    return llm_over(deep_target(), draft, **options)


def rounds(folder: Path, **options: Any) -> list[tuple[list[int], list[int]]]:
    return drafted(llm_of(f"block:{folder}", **options))


@cache
def rounds_of(name: str, write: Callable[..., Path]) -> list[tuple[list[int], list[int]]]:
    return rounds(write(Path(tempfile.mkdtemp()), block(name)))


@cache
def tree_llm(name: str) -> LLM:
    write = deepspec_folder if name == "rnn" else speculators_folder
    return llm_of(f"block:{write(Path(tempfile.mkdtemp()), block(name))}")


def expected(name: str, **wrong: Any) -> Guess:
    """What the method guesses; ``wrong``: misread so."""
    return lambda text, count: guessed(deep_target(), block(name), text, count, **wrong)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "write"),
    [
        *((name, dflash_folder) for name in ("plain", "causal", "scaled")),
        *((name, deepspec_folder) for name in ("anchored", "vanilla", "gated", "rnn", "confident")),
        *(
            (name, speculators_folder)
            for name in ("plain", "anchored", "vanilla", "some tokens", "second", "second anchored")
        ),
    ],
)
def test_guesses_are_those_of_the_method(name: str, write: Callable[..., Path]) -> None:
    done = rounds_of(name, write)
    assert len(done) > NEW
    assert not others(done, expected(name))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("plain", wrong) for wrong in ({"off": -1}, {"off": 1}, {"turned": True}, {"ahead": -1}, {"ahead": 1})),
        *(("plain", wrong) for wrong in ({"mixed": True}, {"causal": True}, {"mask": 2}, {"size": 14})),
        ("causal", {"causal": False}), ("vanilla", {"markov": ""}), ("anchored", {"anchored": False}),
        ("gated", {"markov": "vanilla"}), ("second", {"kernel": 0}), ("second", {"selected": 0}),
        ("second", {"selected": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_misread_easily_is_noticed(name: str, wrong: dict[str, Any]) -> None:
    """Other layers, another order, other rows, norms or masks give other guesses: the comparison above can fail."""
    write = {"plain": dflash_folder, "causal": dflash_folder, "second": speculators_folder}.get(name, deepspec_folder)
    done = rounds_of(name, write)[::4]
    assert others(done, expected(name, **wrong)) > len(done) / 2


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "size"), dealt(["second", "rnn", "some tokens", "plain"], SIZES))
def test_trees(name: str, size: dict[str, Any]) -> None:
    """Greedy as transformers has it, sampled as without a draft."""
    check_trees(tree_llm(name), deep_target(), size)


@pytest.mark.few(1)
@pytest.mark.parametrize("draft", ["block:{}+suffix", "early-exit:1+block:{}"])
def test_merged_with_other_drafts(draft: str, tmp_path: Path) -> None:
    llm = llm_of(draft.format(dflash_folder(tmp_path, block("plain"))))
    done = llm.generate(PROMPTS, params(gamma=3, nodes=12))
    assert [out.token_ids for out in done] == texts(deep_target())[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_hybrids_as_targets(name: str, tmp_path: Path) -> None:
    """Hidden states come from layers of every kind."""
    model = model_of(name)
    folder = dflash_folder(tmp_path, new_block(model, layers=(0, 1, 2)))
    llm = LLM((model, TOKENIZER), f"block:{folder}", compile=False, strict=True)
    done = llm.generate(PROMPTS, params(gamma=3, tree="ddtree", nodes=6))
    assert [out.token_ids for out in done] == [greedy(model, tokens, NEW) for tokens in PROMPTS]
    assert sum(out.stats.drafted for out in done) > NEW


@pytest.mark.thorough
@pytest.mark.skipif(native() is None, reason="traced passes are of the compiled kernels")
@pytest.mark.parametrize("name", ["plain", "second"])
@pytest.mark.parametrize("options", [{"compile": "auto"}, {"exact": True}, {"max_batch": 1}], ids=str)
def test_other_paths(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder = (speculators_folder if name == "second" else dflash_folder)(tmp_path, block(name))
    llm = llm_of(f"block:{folder}", **options)
    for _ in range(2):
        out = llm.generate(PROMPTS, params(gamma=4))
        assert [one.token_ids for one in out] == texts(deep_target())[0]
    if options == {"compile": "auto"}:
        assert not others(rounds(folder, **options), expected(name))


@pytest.mark.thorough
def test_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiled kernels a block's rows see each other, too."""
    monkeypatch.setattr("sakiyomi.kernels.native.PackedWeights.create", lambda: None)
    assert not others(rounds(dflash_folder(tmp_path, block("plain"))), expected("plain"))


@pytest.mark.thorough
def test_conversations_and_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(f"block:{dflash_folder(tmp_path, block('plain'))}", chunk_size=16)
    check_conversations(llm, deep_target(), BlockDrafter, expected("plain"), monkeypatch)


def test_a_folder_says_what_it_holds(tmp_path: Path) -> None:
    for write in (dflash_folder, deepspec_folder, speculators_folder):
        folder = write(tmp_path / write.__name__, block("plain"))
        assert parse_drafters(f"{folder}+suffix") == [f"block:{folder}", "suffix"]
    assert [out.token_ids for out in llm_of(str(folder)).generate(PROMPTS, params())] == texts(deep_target())[0]


@pytest.mark.parametrize("said", [None, []])
def test_without_an_architecture_the_first_row_guesses_nothing(said: list[str] | None, tmp_path: Path) -> None:
    folder = dflash_folder(tmp_path, block("plain"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"architectures": said}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert not read_block(folder, 8).options.anchored


# ---------------------------------------------------------------- what is refused


def test_drafters_of_another_target(tmp_path: Path) -> None:
    other = tiny_llama(vocab=VOCAB, layers=8, dim=48)
    _refused(dflash_folder(tmp_path / "wide", new_block(other)), UnsupportedError, "192", "128", "another model")
    deep = replace(block("plain"), options=replace(block("plain").options, layers=(1, 9, 20)))
    _refused(dflash_folder(tmp_path / "deep", deep), UnsupportedError, "1, 9, 20", "has 8", "another model")
    more = new_block(deep_target(), tokens=[*range(10), VOCAB + 7])
    more = replace(more, config=more.config | {"vocab_size": VOCAB + 8})
    _refused(speculators_folder(tmp_path / "more", more), UnsupportedError, str(VOCAB + 7), str(VOCAB))
    mask = replace(block("plain"), options=replace(block("plain").options, mask=VOCAB + 3))
    _refused(dflash_folder(tmp_path / "mask", mask), UnsupportedError, str(VOCAB + 3), str(VOCAB))


def test_damaged_selectors_and_convolutions(tmp_path: Path) -> None:
    whole = block("second")
    for name in ("candidate_selector.successor_codebook", "layers.1.mlp_conv.base_kernel"):
        left = {part: tensor for part, tensor in whole.tensors.items() if part != name}
        _refused(speculators_folder(tmp_path / name, replace(whole, tensors=left)), LoadError, name.split(".")[-1])
    odd = replace(whole, options=replace(whole.options, group=7))
    _refused(speculators_folder(tmp_path / "odd", odd), LoadError, "groups of 7 numbers")


@pytest.mark.thorough
def test_folders_that_hold_no_drafter(tmp_path: Path) -> None:
    _refused(tmp_path / "none", LoadError, "no block drafter", "none")
    with pytest.raises(InputError, match="names no block drafter"):
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
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
        config = {entry: value for entry, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        _refused(folder, kind, *words)
    part = block("plain")
    lacking = {name: tensor for name, tensor in part.tensors.items() if "k_norm" not in name}
    _refused(dflash_folder(tmp_path / "part", replace(part, tensors=lacking)), LoadError, "k_norm")
    more = part.tensors | {"layers.0.strange.weight": torch.zeros(3)}
    _refused(dflash_folder(tmp_path / "more", replace(part, tensors=more)), LoadError, "strange")


def test_weights_stored_as_pickle_are_asked_for(tmp_path: Path) -> None:
    folder = dflash_folder(tmp_path, block("plain"))
    as_pickle(folder)
    _refused(folder, LoadError, "pickle", "allow_pickle=True")
    out = llm_of(f"block:{folder}", allow_pickle=True).generate(PROMPTS, params(gamma=2))
    assert [one.token_ids for one in out] == texts(deep_target())[0]
    assert sum(one.stats.drafted for one in out) > NEW


def test_no_damage_passes(tmp_path: Path) -> None:
    folder = speculators_folder(tmp_path, block("plain"))
    assert refusals([folder / "model.safetensors"], DAMAGES, lambda: read_block(folder, 8)) == DAMAGES

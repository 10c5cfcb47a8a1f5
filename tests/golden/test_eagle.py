"""EAGLE heads read ahead: the text stays the target's own, and the guesses are those of the method."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from architectures import VOCAB, prompt
from damage import DAMAGES, refusals
from eagle_toys import first_folder, guessed, new_head, original_folder, speculators_folder
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
from sakiyomi.core.digests import tokenizer_digest
from sakiyomi.drafters import DrafterContext, parse_drafters
from sakiyomi.drafters.eagle import EagleDrafter
from sakiyomi.drafters.eagle_heads.formats import EagleFile, read_eagle
from sakiyomi.drafters.native_trees import NativeTrees
from sakiyomi.drafters.ngram_file import write_tables
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.kernels.build import native
from sakiyomi.model_executor.build import build_runner
from sakiyomi.train.ngram import count_tables
from toys import save_model, tiny_llama

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "some tokens": {"tokens": list(range(3, VOCAB, 2))},
    "norms": {"norm_before_residual": True, "fc_norm": True, "norm_before_fc": True},
    "3.1": {"norm_output": True},
    "qwen3": {"kind": "qwen3"},
    "two layers": {"depth": 2},
    "parallel": {"mask": 5, "depth": 2},
    "first": {"first": True, "layers": (7,)},
    "first, two layers": {"first": True, "layers": (7,), "depth": 2},
}
_refused = partial(refused, "eagle")
SIZES: list[dict[str, Any]] = [
    {"gamma": 4, "tree": "chain"},
    {"gamma": 4, "tree": "best-first", "nodes": 12},
    {"gamma": 3, "tree": "dynamic", "nodes": 10},
    {"gamma": 3, "tree": "static", "nodes": 9},
    {"tree": [1, 3, 2, 1]},
    {"gamma": "auto"},
]


@cache
def head(name: str) -> EagleFile:
    return new_head(deep_target(), **HEADS[name])


def llm_of(draft: Any, **options: Any) -> LLM:
    return llm_over(deep_target(), draft, **options)


def rounds(folder: Path, **options: Any) -> list[tuple[list[int], list[int]]]:
    return drafted(llm_of(f"eagle:{folder}", **options))


def _folder(place: Path, name: str) -> Path:
    return (first_folder if head(name).options.first else speculators_folder)(place, head(name))


@cache
def rounds_of(name: str, write: Callable[..., Path]) -> list[tuple[list[int], list[int]]]:
    return rounds(write(Path(tempfile.mkdtemp()), head(name)))


@cache
def tree_llm(name: str) -> LLM:
    return llm_of(f"eagle:{_folder(Path(tempfile.mkdtemp()), name)}")


def expected(name: str, **wrong: Any) -> Guess:
    """What the method guesses; ``wrong``: misread so."""
    return lambda text, count: guessed(deep_target(), head(name), text, count, **wrong)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "write"),
    [
        *((name, first_folder if "first" in name else speculators_folder) for name in HEADS),
        *((name, original_folder) for name in ("plain", "some tokens", "parallel")),
    ],
)
def test_guesses_are_those_of_the_method(name: str, write: Callable[..., Path]) -> None:
    done = rounds_of(name, write)
    assert len(done) > NEW
    assert not others(done, expected(name))


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 0.9, "seed": 3},
    "ratio": {"temperature": 0.9, "top_k": 20, "seed": 3, "acceptance": "ratio"},
}


@pytest.mark.skipif(native() is None, reason="the kernels are not available")
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("some tokens", "greedy"),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in product(("some tokens", "3.1"), SAMPLED)),
    ],
)
def test_kernels_grow_the_trees_of_python(
    name: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, grow, passes = _folder(tmp_path, name), NativeTrees.grow, [0]

    def counted(*given: Any) -> int | None:
        done = grow(*given)
        passes[0] += done or 0
        return done

    for size in (SIZES[1], SIZES[3]) if rule == "ratio" else (SIZES[1],):
        found = []
        for kernels in (False, True):
            monkeypatch.setattr(NativeTrees, "grow", counted if kernels else lambda *given: None)
            llm, asked = llm_of(f"eagle:{folder}", compile="auto"), params(**size, **SAMPLED[rule])
            out = llm.generate(PROMPTS, asked, rounds_trace=True)
            found.append([(one.token_ids, [(e.tokens, e.parents) for e in one.rounds_trace or []]) for one in out])
        assert found[0] == found[1]
    assert passes[0] > NEW / 2, "the kernels grew nothing"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("plain", wrong) for wrong in ({"shift": 0}, {"off": -1}, {"off": 1}, {"turned": True})),
        *(("first", wrong) for wrong in ({"shift": 0}, {"off": -1}, {"turned": True})),
    ],
    ids=str,
)
def test_what_is_misread_easily_is_noticed(name: str, wrong: dict[str, Any]) -> None:
    """Another feature, other layers or another order give other guesses: the comparison above can fail."""
    done = rounds_of(name, first_folder if name == "first" else speculators_folder)[::4]
    assert others(done, expected(name, **wrong)) > len(done) / 2


@pytest.mark.thorough
def test_offsets_are_no_tokens() -> None:
    done = rounds_of("some tokens", speculators_folder)[::4]
    tokens = head("some tokens").tokens
    assert tokens is not None
    assert {token for _, chain in done for token in chain} <= set(tokens.tolist())
    wrong = replace(head("some tokens"), tokens=tokens - torch.arange(len(tokens)))
    assert others(done, lambda text, count: guessed(deep_target(), wrong, text, count)) > len(done) / 2


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "size"), dealt(["plain", "some tokens", "parallel", "first"], SIZES))
def test_trees(name: str, size: dict[str, Any]) -> None:
    """Greedy as transformers has it, sampled as without a draft."""
    check_trees(tree_llm(name), deep_target(), size)


@pytest.mark.few(1)
@pytest.mark.parametrize("draft", ["eagle:{}+suffix", "early-exit:1+eagle:{}"])
def test_merged_with_other_drafts(draft: str, tmp_path: Path) -> None:
    llm = llm_of(draft.format(speculators_folder(tmp_path, head("plain"))))
    done = llm.generate(PROMPTS, params(gamma=3, nodes=12))
    assert [out.token_ids for out in done] == texts(deep_target())[0]


@pytest.mark.thorough
@pytest.mark.skipif(native() is None, reason="traced passes are of the compiled kernels")
@pytest.mark.parametrize("options", [{"compile": "auto"}, {"exact": True}, {"max_batch": 1}], ids=str)
def test_other_paths(options: dict[str, Any], tmp_path: Path) -> None:
    folder = speculators_folder(tmp_path, head("plain"))
    llm = llm_of(f"eagle:{folder}", **options)
    for _ in range(2):
        out = llm.generate(PROMPTS, params(gamma=4))
        assert [one.token_ids for one in out] == texts(deep_target())[0]
    if options == {"compile": "auto"}:
        assert not others(rounds(folder, **options), expected("plain"))


@pytest.mark.few(1)
@pytest.mark.parametrize("exact", [False, True])
@torch.no_grad()
def test_more_rows_than_a_pass_has_features(exact: bool, tmp_path: Path) -> None:
    """Each row reads its own feature, as where every request is read alone."""
    build = partial(build_runner, compile=False, max_slots=20, exact=exact)
    folder = str(speculators_folder(tmp_path, head("plain")))
    target = build(deep_target())
    around = DrafterContext(None, target, VOCAB, pack=lambda loaded, _: build(loaded.model, owned=True))
    drafter = EagleDrafter.make(folder, around)
    own, tokens = drafter._head, [prompt(60, seed) for seed in range(20)]
    features = torch.randn(20, 60, deep_target().config.hidden_size, generator=torch.Generator().manual_seed(1))
    segments = [SequenceRows(own.model.cache.take(), 0, text) for text in tokens]
    for segment in segments:
        own.model.cache.reserve(segment.slot, 60)
    together = own.read(segments, features.flatten(0, 1))
    alone = [own.read([segment], feature) for segment, feature in zip(segments, features, strict=True)]
    for found, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.allclose(found, torch.cat(parts), atol=1e-4)


@pytest.mark.thorough
def test_conversations_and_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(f"eagle:{speculators_folder(tmp_path, head('plain'))}", chunk_size=16)
    check_conversations(llm, deep_target(), EagleDrafter, expected("plain"), monkeypatch)


def test_a_folder_says_what_it_holds(tmp_path: Path) -> None:
    eagle = speculators_folder(tmp_path / "eagle", head("plain"))
    model = save_model(tmp_path / "model", tiny_llama(vocab=VOCAB), TOKENIZER)
    assert parse_drafters(f"{eagle}+suffix") == [f"eagle:{eagle}", "suffix"]
    assert parse_drafters([str(model), "tales-draft"]) == [f"model:{model}", "model:tales-draft"]
    assert parse_drafters("tales-medusa") == ["medusa:tales-medusa"]
    assert parse_drafters(str(original_folder(tmp_path / "o", head("plain")))) == [f"eagle:{tmp_path / 'o'}"]
    assert parse_drafters(str(first_folder(tmp_path / "1", head("first")))) == [f"eagle:{tmp_path / '1'}"]
    assert [out.token_ids for out in llm_of(str(eagle)).generate(PROMPTS, params())] == texts(deep_target())[0]


def test_auto_takes_the_head_beside_the_target(tmp_path: Path) -> None:
    target = save_model(tmp_path, deep_target(), TOKENIZER)
    assert LLM(str(target), compile=False).draft.name == "recycle+suffix+prompt-lookup"
    tables, known = count_tables([np.arange(VOCAB)], 2, VOCAB), tokenizer_digest(TOKENIZER)
    write_tables(target / "ngram.safetensors", 2, tables, {"tokenizer": known, "vocab_size": str(VOCAB)})
    assert LLM(str(target), compile=False).draft.name == "recycle+suffix+prompt-lookup+ngram"
    speculators_folder(target / "eagle", head("plain"))
    llm = LLM(str(target), compile=False, strict=True)
    assert isinstance(llm.draft, EagleDrafter)
    assert [out.token_ids for out in llm.generate(PROMPTS, params())] == texts(deep_target())[0]


# ---------------------------------------------------------------- what is refused


def test_heads_of_one_layer_for_another_target(tmp_path: Path) -> None:
    wide = new_head(tiny_llama(vocab=VOCAB, layers=8, dim=48), first=True, layers=(7,))
    _refused(first_folder(tmp_path / "wide", wide), UnsupportedError, "48", "32", "another model")
    more = head("first")
    more = replace(more, config=more.config | {"vocab_size": VOCAB + 8})
    _refused(first_folder(tmp_path / "more", more), UnsupportedError, str(VOCAB + 7), str(VOCAB))
    part = {name: tensor for name, tensor in head("first").tensors.items() if "down_proj" not in name}
    _refused(first_folder(tmp_path / "part", replace(head("first"), tensors=part)), LoadError, "down_proj")


@pytest.mark.parametrize("content", [{}, {"model_type": "strange"}, {"architectures": ["GPT9"]}], ids=str)
def test_folders_that_say_nothing_known(content: dict[str, Any], tmp_path: Path) -> None:
    """Without a prefix they are taken for a model; one error with what the file says."""
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(LoadError) as found:
        llm_of(str(tmp_path))
    assert str(tmp_path) in str(found.value)
    with pytest.raises(InputError, match="unknown draft"):
        llm_of(str(tmp_path / "none"))


def test_half_a_file_is_said_to_be_one(tmp_path: Path) -> None:
    folder = original_folder(tmp_path, head("plain"))
    place = folder / "model.safetensors"
    place.write_bytes(place.read_bytes()[: place.stat().st_size // 2])
    for draft in (f"eagle:{folder}", str(folder)):
        with pytest.raises(LoadError, match="cut off"):
            llm_of(draft)


def _config(folder: Path, **changes: Any) -> None:
    place = folder / "config.json"
    config = json.loads(place.read_text(encoding="utf-8"))
    place.write_text(json.dumps(config | changes), encoding="utf-8")


def test_heads_of_another_target(tmp_path: Path) -> None:
    other = tiny_llama(vocab=VOCAB, layers=8, dim=48)
    _refused(speculators_folder(tmp_path / "wide", new_head(other)), UnsupportedError, "144", "96", "another model")
    deep = original_folder(tmp_path / "deep", head("plain"))
    _config(deep, eagle_aux_hidden_state_layer_ids=[2, 10, 21])
    _refused(deep, UnsupportedError, "1, 9, 20", "has 8", "another model")
    width = original_folder(tmp_path / "width", head("plain"))
    _config(width, target_hidden_size=48)
    _refused(width, UnsupportedError, "48", "32", "another model")
    more = new_head(deep_target(), tokens=[*range(10), VOCAB + 7])
    _refused(original_folder(tmp_path / "more", replace(more, config=more.config | {"vocab_size": VOCAB + 8})),
            UnsupportedError, str(VOCAB + 7), str(VOCAB))  # fmt: skip


def test_a_flag_that_is_null_is_false(tmp_path: Path) -> None:
    """Where it is missing, it is on for speculators."""
    folder = original_folder(tmp_path, head("plain"))
    _config(folder, speculators_model_type="eagle3", transformer_layer_config=head("plain").config)
    assert read_eagle(folder, 8).options.norm_before_residual
    for said in (None, True):
        _config(folder, norm_before_residual=said)
        assert read_eagle(folder, 8).options.norm_before_residual is bool(said)


def test_folders_that_hold_no_head(tmp_path: Path) -> None:
    _refused(tmp_path / "none", LoadError, "no EAGLE head", "none")
    with pytest.raises(InputError, match="names no EAGLE head"):
        llm_of("eagle:")
    for changes, word in (
        ({"architectures": ["GPT9"]}, "GPT9"),
        ({"architectures": None, "model_type": "strange"}, "strange"),
    ):
        folder = original_folder(tmp_path / word, head("plain"))
        _config(folder, **changes)
        _refused(folder, LoadError, "holds no EAGLE head", word)
    folder = original_folder(tmp_path / "kind", head("plain"))
    _config(folder, model_type="gpt9")
    _refused(folder, LoadError, "gpt9", "llama")
    folder = original_folder(tmp_path / "sizes", head("plain"))
    _config(folder, intermediate_size=17)
    _refused(folder, LoadError, "config.json")
    part = head("plain")
    lacking = {name: tensor for name, tensor in part.tensors.items() if "hidden_norm" not in name}
    _refused(original_folder(tmp_path / "part", replace(part, tensors=lacking)), LoadError, "hidden_norm")
    more = part.tensors | {"layers.0.strange.weight": torch.zeros(3)}
    _refused(original_folder(tmp_path / "strange", replace(part, tensors=more)), LoadError, "strange")


def test_weights_stored_as_pickle_are_asked_for(tmp_path: Path) -> None:
    folder = original_folder(tmp_path, head("plain"))
    as_pickle(folder)
    _refused(folder, LoadError, "pickle", "allow_pickle=True")
    out = llm_of(f"eagle:{folder}", allow_pickle=True).generate(PROMPTS, params(gamma=2))
    assert [one.token_ids for one in out] == texts(deep_target())[0]
    assert sum(one.stats.drafted for one in out) > NEW


def test_no_damage_passes(tmp_path: Path) -> None:
    folder = speculators_folder(tmp_path, head("plain"))
    assert refusals([folder / "model.safetensors"], DAMAGES, lambda: read_eagle(folder, 8)) == DAMAGES


@pytest.mark.skipif(native() is None, reason="the kernels are not available")
def test_a_head_beside_a_rounded_target_has_4_bits() -> None:
    """Whatever it guesses, the text is the target's."""
    greedy = params(max_new_tokens=24)
    for quantize, bits in ((None, None), ("int8", "int4")):
        plain, llm = (LLM("tales", draft, quantize=quantize, strict=True) for draft in ("none", "eagle:tales-eagle"))
        assert isinstance(llm.draft, EagleDrafter)
        found = llm.draft.model.weights.quantization
        assert (None if found is None else found.kind) == bits
        done = llm.generate("Once upon a time", greedy)
        assert done.token_ids == plain.generate("Once upon a time", greedy).token_ids
        assert done.stats.accepted > 4

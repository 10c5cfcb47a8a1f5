"""A target's own layer for further tokens reads ahead: the text stays the target's, the guesses are the layer's."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from architectures import VOCAB, greedy
from mtp_toys import TARGETS, MtpToy, guessed, new_toy, target_folder
from read_ahead import PROMPTS, TOKENIZER, Guess, drafted, others, params
from sakiyomi import LLM, InputError, LoadError, UnsupportedError
from sakiyomi.kernels.build import native
from toys import save_model, tiny_llama

NEW = 16
SIZES: list[dict[str, Any]] = [
    {"gamma": 4, "tree": "best-first", "nodes": 12},
    {"gamma": 3, "tree": "static", "nodes": 9},
    {"gamma": "auto"},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp")


@cache
def toy(name: str) -> MtpToy:
    return new_toy(name)


def folder(folders: Path, name: str) -> str:
    place = folders / name
    return str(place if place.exists() else target_folder(place, toy(name), TOKENIZER))


def llm_of(target: str, draft: str = "mtp", **options: Any) -> LLM:
    return LLM(target, draft, **({"compile": False, "strict": True, "dtype": "float32"} | options))


@cache
def rounds(target: str) -> list[tuple[list[int], list[int]]]:
    return drafted(llm_of(target), max_new_tokens=NEW)


def expected(name: str, **wrong: Any) -> Guess:
    """What the layer guesses; ``wrong``: misread so."""
    return lambda text, count: guessed(toy(name), text, count, **wrong)


@pytest.mark.thorough
@pytest.mark.parametrize("name", TARGETS)
def test_guesses_are_those_of_the_layer(name: str, folders: Path) -> None:
    done = rounds(folder(folders, name))
    assert len(done) > NEW
    assert not others(done, expected(name))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("qwen3_5", wrong) for wrong in ({"turned": True}, {"raw": True}, {"shift": 0})),
        *(("mimo", wrong) for wrong in ({"turned": True}, {"raw": True})),
    ],
    ids=str,
)
def test_what_is_misread_easily_is_noticed(name: str, wrong: dict[str, Any], folders: Path) -> None:
    """Another order, the hidden state before the norm or of another token give other guesses."""
    done = rounds(folder(folders, name))[::4]
    assert others(done, expected(name, **wrong)) > len(done) / 2


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3", "mimo"])
def test_the_first_row_is_blank_where_the_family_has_it_so(name: str, folders: Path) -> None:
    """Of short texts, where it matters, some guesses would be others."""
    done = rounds(folder(folders, name))
    blank = TARGETS[name][0] != "Qwen3-Next"
    assert others(done, expected(name, blank=not blank)) > 2


@pytest.mark.thorough
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3"])
def test_trees(name: str, size: dict[str, Any], folders: Path) -> None:
    """Greedy as transformers has it, sampled as without a draft."""
    target = folder(folders, name)
    llm = llm_of(target)
    done = llm.generate(PROMPTS, params(max_new_tokens=NEW, **size))
    assert [out.token_ids for out in done] == [greedy(toy(name).model, tokens, NEW) for tokens in PROMPTS]
    assert size.get("gamma") == "auto" or sum(out.stats.drafted for out in done) > NEW
    values = params(max_new_tokens=NEW, temperature=1.0, seed=3, **size)
    plain = llm_of(target, "none").generate(PROMPTS, values)
    assert [out.token_ids for out in llm.generate(PROMPTS, values)] == [out.token_ids for out in plain]


@pytest.mark.few(1)
@pytest.mark.skipif(native() is None, reason="traced passes and quantized weights are of the compiled kernels")
@pytest.mark.parametrize("options", [{"compile": "auto"}, {"quantize": "int8"}], ids=str)
def test_other_paths(options: dict[str, Any], folders: Path) -> None:
    target = folder(folders, "qwen3_5")
    done = llm_of(target, "mtp+suffix", **options).generate(PROMPTS, params(max_new_tokens=NEW, gamma=4))
    plain = llm_of(target, "none", **options).generate(PROMPTS, params(max_new_tokens=NEW))
    assert [out.token_ids for out in done] == [out.token_ids for out in plain]
    assert sum(out.stats.drafted for out in done) > NEW


def test_targets_without_such_a_layer(tmp_path: Path) -> None:
    model = tiny_llama(vocab=VOCAB)
    plain = save_model(tmp_path / "plain", model, TOKENIZER)
    with pytest.raises(LoadError, match=r"holds no MTP layer.*mtp\.fc\.weight"):
        llm_of(str(plain))
    with pytest.raises(InputError, match="no folder"):
        LLM((model, TOKENIZER), "mtp")
    with pytest.raises(LoadError, match=r"no MTP layer in 'here'"):
        llm_of(str(plain), "mtp:here")


def test_damaged_layers(tmp_path: Path) -> None:
    place = target_folder(tmp_path / "target", toy("mimo"), TOKENIZER) / "model.safetensors"
    whole = load_file(place)
    prefix = "model.mtp_layers.0."
    for name, word in (("hidden_layernorm.weight", "hidden_layernorm"), ("mlp.up_proj.weight", "up_proj")):
        part = {key: tensor for key, tensor in whole.items() if key != prefix + name}
        save_file(part, place, {"format": "pt"})
        with pytest.raises(LoadError, match=word):
            llm_of(str(place.parent))
    narrow = whole[f"{prefix}input_proj.weight"][:, :-2].contiguous()
    save_file(whole | {f"{prefix}input_proj.weight": narrow}, place, {"format": "pt"})
    with pytest.raises(UnsupportedError, match="joins two vectors of 31 values, and the target's have 32"):
        llm_of(str(place.parent))

"""Beginnings that are read once: what goes on from one is what a request with the whole text gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import architectures
from architectures import ALL, VOCAB, model_of, prompt
from drafters import Branching, texts_of
from sakiyomi import LLM, InputError, LoadError, SamplingParams
from toys import character_tokenizer

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
CACHES: dict[str, dict[str, Any]] = {
    "full": {},
    "h2o": {"cache": "h2o[local=4]", "kv_budget": 24, "chunk_size": 16},
    "pyramidkv": {"cache": "pyramidkv[window=4,local=0,pyramid=4]", "kv_budget": 24, "chunk_size": 16},
    "packed": {"cache": "quant-4[residual=16]", "chunk_size": 16},
    "h2o, packed": {"cache": "h2o[local=4]+quant-4[residual=8]", "kv_budget": 44, "chunk_size": 16},
    "infllm": {"cache": "infllm[block=4,sinks=4,local=4]", "kv_budget": 24, "chunk_size": 16},
    "moved": {"cache": "streaming[local=4,positions=reassigned]", "kv_budget": 24, "chunk_size": 16},
}
BEGINNING, ENDS = prompt(64, 1), [prompt(9, 2), prompt(21, 3), prompt(3, 4)]
PARAMS = SamplingParams(max_new_tokens=70, ignore_eos=True)


def make(cache: str, draft: Any = "none", name: str = "llama", **options: Any) -> LLM:
    return LLM((model_of(name), TOKENIZER), draft, compile=False, **(CACHES[cache] | options))


@pytest.mark.thorough
@pytest.mark.parametrize("cache", CACHES)
def test_going_on_is_reading_it_all(cache: str, tmp_path: Path) -> None:
    """From a file, several prompts at once. 64 tokens are whole chunks: a request with all tokens has the same borders.
    Nothing of the beginning is read again.
    """
    llm = make(cache)
    whole = [llm.generate([[*BEGINNING, *end]], PARAMS)[0].token_ids for end in ENDS]
    llm.prefix(BEGINNING).save(tmp_path / "beginning.safetensors")
    fresh = make(cache)
    prefix = fresh.load_prefix(tmp_path / "beginning.safetensors")
    done = fresh.generate(ENDS, PARAMS, prefix=prefix)
    assert [out.token_ids for out in done] == whole
    assert [out.stats.reused for out in done] == [64] * 3
    assert fresh.target.cache.free == 8, "a place was not given back"


def test_a_prefix_that_is_read_ahead_from() -> None:
    plain = make("h2o")
    wanted = [out.token_ids for out in plain.generate(ENDS, PARAMS, prefix=plain.prefix(BEGINNING))]
    drafter = Branching(texts_of([[*BEGINNING, *end] for end in ENDS], wanted), "sometimes", VOCAB)
    llm = make("h2o", drafter)
    done = llm.generate(ENDS, PARAMS, prefix=plain.prefix(BEGINNING))
    assert [out.token_ids for out in done] == wanted
    assert sum(out.stats.accepted for out in done) > 20


def test_conversations_fork() -> None:
    """Two conversations go on from one beginning, and do not disturb it."""
    llm = make("full")
    prefix = llm.prefix(BEGINNING)
    before = {name: tensor.clone() for name, tensor in prefix.tensors.items()}
    texts = []
    for end in (*ENDS, ENDS[0]):
        with llm.conversation(prefix) as conversation:
            texts.append(conversation.generate([*BEGINNING, *end], PARAMS).token_ids)
            assert conversation.stats.reused == 64
    assert texts[0] == texts[3] != texts[1]
    assert all(torch.equal(tensor, prefix.tensors[name]) for name, tensor in before.items())


def test_what_is_kept_is_small() -> None:
    llm = make("h2o")
    prefix = llm.prefix(BEGINNING)
    assert prefix.pairs == [[24, 24]] * 3
    assert prefix.bytes == 3 * 2 * 24 * (8 + 8) * 4


def test_what_is_packed_stays_packed() -> None:
    prefix = make("packed").prefix(BEGINNING)
    assert prefix.pairs == [[64, 64]] * 3
    # 32 columns as they are, and 32 in 4 bits: 5 bits for a key's number, and a value's 8 in 4 bits with 32 for all
    assert prefix.bytes == 3 * 2 * 32 * ((8 + 8) * 4 + 8 * 5 // 8 + 4 + 4)


def test_others_are_refused(tmp_path: Path) -> None:
    """Another model, budget, policy or dtype; no file, another file."""
    file = tmp_path / "beginning.safetensors"
    make("h2o").prefix(BEGINNING).save(file)
    for other, word in (
        (
            LLM((architectures.make(ALL["llama"](), seed=1), TOKENIZER), "none", compile=False, **CACHES["h2o"]),
            "weights",
        ),
        (make("h2o", kv_budget=30), "kv_budget '24'"),
        (make("pyramidkv"), "cache"),
        (make("h2o", chunk_size=32), "chunk_size"),
    ):
        with pytest.raises(InputError, match=word):
            other.load_prefix(file)
    with pytest.raises(LoadError, match="no file"):
        make("h2o").load_prefix(tmp_path / "none.safetensors")
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(LoadError, match="build it again"):
        make("h2o").load_prefix(file)


@pytest.mark.thorough
def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sakiyomi.cli import app

    def run(*arguments: str) -> dict[str, Any]:
        app([*arguments, "--json"], standalone_mode=False)
        found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return found

    text, out = tmp_path / "text.txt", tmp_path / "out.safetensors"
    text.write_text("Once upon a time there was a little fox who lived in a wood. " * 20, encoding="utf-8")
    options = ["--cache", "h2o[local=8]", "--kv-budget", "64", "--chunk-size", "64", "--compile", "false"]
    built = run("cache", "build", str(text), str(out), *options)
    assert built["bytes"] * 3 < built["full_bytes"]
    about = run("cache", "info", str(out))
    assert about["pairs"] == [64, 64] and about["tokens"] == built["tokens"]
    assert about["recipe"]["cache"] == "h2o[local=8]"
    done = run("generate", " One day", "--prefix", str(out), "--draft", "none", "--max-new-tokens", "8", *options)
    assert done["generations"][0]["stats"]["reused"] == built["tokens"]

"""Tokenizers of GGUF files: those of others against the tokens that llama.cpp expects, and what a file may say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from real_tokenizers import NAMES, built, examples
from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.gguf import GgufFile
from sakiyomi.model_executor.gguf import folder as folders
from sakiyomi.model_executor.gguf.tokenizer import GgufTokenizer, build_tokenizer
from sakiyomi.model_executor.loading.folder import light_tokenizer, read_tokenizer
from sakiyomi.model_executor.loading.recorded_tokenizer import KNOWN, _answers, recorded_tokenizer
from toys import tiny_tokenizer

NORMAL, CONTROL, USER = 1, 3, 4


def file(**values: Any) -> GgufFile:
    known = {f"tokenizer.{'' if key.startswith('chat') else 'ggml.'}{key}": value for key, value in values.items()}
    return GgufFile((Path("m.gguf"),), known, {})


def byte_level(**values: Any) -> GgufFile:
    """The tokens of ``tiny_tokenizer``, with two more behind them."""
    backend = tiny_tokenizer()
    vocabulary = sorted(backend.get_vocab().items(), key=lambda each: each[1])
    tokens = [token for token, _ in vocabulary] + ["<|im_end|>", "<think>"]
    state = json.loads(backend.backend_tokenizer.to_str())
    merges = [" ".join(pair) for pair in state["model"]["merges"]]
    types = [CONTROL] + [NORMAL] * (len(vocabulary) - 1) + [CONTROL, USER]
    given = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": merges, "token_type": np.array(types)}
    return file(**given | {"eos_token_id": 0} | values)


def pieces(**values: Any) -> GgufFile:
    """A small vocabulary of SentencePiece's BPE."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab", "▁a"]
    types = [2, CONTROL, CONTROL] + [6] * 256 + [NORMAL] * 6
    scores = [0.0] * 259 + [-float(n) for n in range(6)]
    given = {"model": "llama", "tokens": tokens, "token_type": np.array(types), "scores": np.array(scores, np.float32)}
    return file(**given | values)


def ids(made: GgufTokenizer, text: str, *, special: bool = False) -> list[int]:
    return list(made.backend.encode(text, add_special_tokens=special).ids)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_that_llama_cpp_expects(name: str) -> None:
    made = built(name)
    for text, wanted in examples(name):
        assert ids(made, text) == wanted, text


@pytest.mark.parametrize("name", NAMES)
def test_texts_come_back(name: str) -> None:
    made = built(name)
    for text, wanted in examples(name):
        assert made.backend.decode(wanted, skip_special_tokens=False) == text


def test_ends_are_those_named_and_those_known_by_their_text() -> None:
    assert [built("gemma-4").backend.id_to_token(end) for end in built("gemma-4").ends] == [
        "<eos>", "<turn|>", "<|tool_response>",
    ]  # fmt: skip
    assert [built("qwen2").backend.id_to_token(end) for end in built("qwen2").ends] == ["<|endoftext|>", "<|im_end|>"]
    made = build_tokenizer(byte_level(eot_token_id=5))
    assert made.ends == (0, 5, len(tiny_tokenizer()))


def test_a_byte_level_vocabulary() -> None:
    made, own = build_tokenizer(byte_level()), tiny_tokenizer()
    for text in ("The fox, 123 times ½", "むかし\n\n x", ""):
        assert ids(made, text) == own.encode(text, add_special_tokens=False)
    end = len(own)
    assert ids(made, "a<|im_end|>b<think>") == [*own.encode("a"), end, *own.encode("b"), end + 1]
    assert made.backend.decode([end, end + 1], skip_special_tokens=True) == "<think>"


def test_pieces_are_merged_by_score() -> None:
    made = build_tokenizer(pieces())
    vocabulary = made.backend.get_vocab()
    assert ids(made, "ab") == [vocabulary["▁ab"]]  # "ab" is likelier than "▁a"
    assert ids(made, "ab", special=True) == [1, vocabulary["▁ab"]]
    assert ids(made, "é") == [vocabulary["▁"], vocabulary["<0xC3>"], vocabulary["<0xA9>"]]
    assert made.backend.decode(ids(made, "ab é b")) == "ab é b"
    bare = build_tokenizer(pieces(add_space_prefix=False, add_bos_token=False, add_eos_token=True))
    assert ids(bare, "ab", special=True) == [vocabulary["ab"], 2]


def light(made: GgufTokenizer, folder: Path, *, fresh: bool) -> Any:
    """The tokenizer that a start from a file uses: the one just made, or the one that is kept."""
    config: Any = SimpleNamespace(save_pretrained=lambda place: None, pad_token_id=None)
    folders._write(folder, config, made, folder / "m.gguf")
    return light_tokenizer(folder, made.backend if fresh else None)


def check_light(found: Any, folder: Path) -> None:
    whole = read_tokenizer(folder, trust_remote_code=False)
    assert {name: getattr(found, name) for name in KNOWN} == {name: getattr(whole, name) for name in KNOWN}
    assert list(_answers(found)) == list(_answers(whole))
    assert vars(found)["_whole"] is None


@pytest.mark.parametrize("name", NAMES)
def test_transformers_tokenizer_says_nothing_else(name: str, tmp_path: Path) -> None:
    check_light(light(built(name), tmp_path, fresh=True), tmp_path)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("given", [
    byte_level(chat_template="one"), byte_level(pre="llama-bpe", bos_token_id=0, padding_token_id=7),
    pieces(add_bos_token=False, add_eos_token=True, **{"chat_template.tool_use": "two", "chat_template": "one"}),
], ids=["bytes", "named", "pieces"])  # fmt: skip
def test_a_start_needs_no_tokenizer_of_transformers(given: GgufFile, fresh: bool, tmp_path: Path) -> None:
    made = build_tokenizer(given)
    found = light(made, tmp_path, fresh=fresh)
    check_light(found, tmp_path)
    (tmp_path / "copy").mkdir()
    found.save_pretrained(tmp_path / "copy")
    kept = AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert list(_answers(kept)) == list(_answers(found)) and kept.chat_template == found.chat_template
    known = {name: getattr(found, name) for name in (*KNOWN, "special_tokens_map")}
    assert recorded_tokenizer(found, tmp_path) == (known, None)
    found.add_tokens(["fox and hen"])  # all else is transformers' own, and a change is recorded
    found.save_pretrained(tmp_path / "copy")
    assert "fox and hen" in (tmp_path / "copy/tokenizer.json").read_text(encoding="utf-8")
    _, backend = recorded_tokenizer(found, tmp_path)
    assert backend is not None and b"fox and hen" in backend


def test_chat_templates() -> None:
    assert build_tokenizer(byte_level(chat_template="one")).settings["chat_template"] == "one"
    several = byte_level(chat_template="one")
    several.metadata["tokenizer.chat_template.tool_use"] = "two"
    assert build_tokenizer(several).settings["chat_template"] == [
        {"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"},
    ]  # fmt: skip


def test_empty_and_repeated_tokens_keep_their_numbers() -> None:
    given = byte_level()
    tokens = given.metadata["tokenizer.ggml.tokens"]
    given.metadata["tokenizer.ggml.tokens"] = [*tokens[:-2], "", tokens[5]]
    made = build_tokenizer(given)
    assert made.backend.get_vocab_size() == len(tokens)
    assert made.backend.token_to_id(tokens[5]) == len(tokens) - 1


@pytest.mark.parametrize(("given", "kind", "words"), [
    (file(model="gpt2"), LoadError, "holds no tokenizer"),
    (file(tokens=["a"]), LoadError, "holds no tokenizer"),
    (file(model="bert", tokens=["a"]), UnsupportedError, "kind 'bert'"),
    (byte_level(pre="nonesuch"), UnsupportedError, "'nonesuch'"),
    (byte_level(merges=None), LoadError, "without its merges"),
    (byte_level(token_type=np.array([1])), LoadError, "1 types of tokens"),
    (byte_level(pre=3), LoadError, "tokenizer.ggml.pre is 3"),
    (pieces(scores=np.zeros(3)), LoadError, "3 scores"),
    (pieces(unknown_token_id=100_000), LoadError, "cannot be read"),
    (pieces(add_bos_token="yes"), LoadError, "add_bos_token is 'yes'"),
])  # fmt: skip
def test_what_is_no_tokenizer(given: GgufFile, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        build_tokenizer(given)
    assert "m.gguf" in str(caught.value) and "\n" not in str(caught.value)

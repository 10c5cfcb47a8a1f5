"""`sakiyomi train ngram`: counts against counting by hand, alpha against its definition, files that are refused."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from typer.testing import CliRunner

from sakiyomi import LLM, SamplingParams, theory
from sakiyomi.cli.train import app
from sakiyomi.core.digests import tokenizer_digest
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.drafters.ngram_file import FileTables, read_tables, write_tables
from sakiyomi.train.commands import TrainNgram
from sakiyomi.train.counted import Library
from sakiyomi.train.ngram import Bigrams, count_tables, train_ngram
from toys import tiny_tokenizer
from train_toys import story_file, tiny_target

runner = CliRunner()
A = "a" * 64


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=30), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_tables_are_counts(texts: list[list[int]], order: int, least: int) -> None:
    tables = FileTables(order, count_tables([np.array(text) for text in texts], order, 5, least=least, keep=3))
    for length in range(order):
        after: dict[tuple[int, ...], Counter[int]] = {}
        for text in texts:
            for i in range(len(text) - length):
                after.setdefault(tuple(text[i : i + length]), Counter())[text[i + length]] += 1
        for run, counts in after.items():
            seen = tables.after(run)
            kept = {t: c for t, c in counts.items() if c >= (least if length > 1 else 1)}
            if not kept:
                assert seen is None
                continue
            assert seen is not None
            total, kinds, top, known = seen
            assert (total, kinds) == (sum(counts.values()), len(counts))
            assert [known[token] for token in top] == sorted(kept.values(), reverse=True)[: 3 if run else 5]
            assert all(counts[token] == known[token] for token in top)
        if length:
            assert tables.after((9,) * length) is None


def test_tables_of_a_file_may_begin_anywhere() -> None:
    """Arrays that are mapped behind a table with an odd number of bytes."""
    tensors = count_tables([np.array([0, 1, 2, 0, 1, 3, 0, 1, 2])], 3, 5, least=1, keep=3)

    def moved(tensor: Any) -> Any:
        room = np.zeros(tensor.nbytes + 1, np.uint8)
        room[1:] = tensor.view(np.uint8)
        return room[1:].view(tensor.dtype)

    tables, odd = FileTables(3, tensors), FileTables(3, {name: moved(tensor) for name, tensor in tensors.items()})
    assert odd.after((0, 1)) == tables.after((0, 1)) is not None


def test_bigram_rows_are_distributions() -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 6, 50) for _ in range(3)]
    grams = Bigrams(documents, 8)
    assert grams.unigram.sum() == pytest.approx(1.0)
    for token in range(8):
        row = grams.row(token)
        assert row.shape == (8,)
        assert row.sum() == pytest.approx(1.0)
        assert (row > 0).all()
    followers = Counter(int(b) for d in documents for a, b in itertools.pairwise(d) if a == 2)
    assert int(grams.row(2).argmax()) in {t for t, c in followers.items() if c == max(followers.values())}


def config(folder: Path, **changes: object) -> TrainNgram:
    values = {
        "out": str(folder / "tables.safetensors"),
        "text": (str(story_file(folder / "train.jsonl")),),
        "target": str(tiny_target(folder)),
        "valid": (f"stories={story_file(folder / 'valid.jsonl', count=6, seed=1)}",),
        "positions": 100,
    }
    return TrainNgram.of(**(values | changes))  # type: ignore[arg-type]


def test_alpha_is_the_mean_overlap_over_held_out_prefixes(tmp_path: Path) -> None:
    """Against the definition, computed with transformers prefix by prefix."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    summary = train_ngram(config(tmp_path))
    found = summary["held_out"]["stories"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    grams = Bigrams(Library(tokenizer, 300).documents(tmp_path / "train.jsonl"), 300)
    overlaps = {"unigram": [], "bigram": []}  # type: ignore[var-annotated]
    for text in Library(tokenizer, 300).documents(tmp_path / "valid.jsonl"):
        left = 100 - len(overlaps["unigram"])
        tokens = text[: min(left + 1, 127)].tolist()
        if len(tokens) < 2:
            break
        with torch.no_grad():
            rows = model(input_ids=torch.tensor([tokens[:-1]])).logits[0].double().softmax(-1).numpy()
        for token, p in zip(tokens, rows, strict=False):
            for kind, q in (("unigram", grams.unigram), ("bigram", grams.row(token))):
                overlaps[kind].append(theory.acceptance((p / p.sum()).tolist(), q.tolist()))
    assert found["positions"] == 100 == len(overlaps["unigram"])
    for kind, values in overlaps.items():
        alpha = found[f"{kind}_alpha"]
        assert alpha == pytest.approx(np.mean(values), abs=1e-5)
        gamma = int(found[f"{kind}_alpha_gamma"])
        assert gamma == theory.optimal_gamma(alpha, found["c"])
        assert found[f"{kind}_alpha_speedup"] == pytest.approx(theory.speedup(alpha, gamma, found["c"]))


def test_the_command_and_the_draft(tmp_path: Path) -> None:
    given = config(tmp_path)
    result = runner.invoke(
        app, ["ngram", "--out", given.out, "--text", given.text[0], "--target", given.target, "--positions", "50"]
    )
    assert result.exit_code == 0, result.output
    for line in ("held-out held back:", "  unigram_alpha: ", "  bigram_alpha: ", "  bigram_alpha_speedup: "):
        assert line in result.stdout
    values = SamplingParams(max_new_tokens=30)
    drafts = ("none", f"ngram:{given.out}")
    texts = [LLM(given.target, draft, compile=False).generate("Once upon a time", values) for draft in drafts]
    assert texts[0].token_ids == texts[1].token_ids


@pytest.mark.thorough
def test_tables_of_the_targets_own_text_know_it(tmp_path: Path) -> None:
    given = config(tmp_path, samples=40, sample_tokens=40, positions=20, least=1, order=5)
    summary = train_ngram(given)
    assert summary["tokens"] > 40 * 40
    llm = LLM(given.target, draft=f"ngram:{given.out}", compile=False)
    # All samples began with so many tokens of a text.
    length = summary["tokens"] // 40 - 40
    prompts = [text[:length].tolist() for text in Library(llm.tokenizer, 300).documents(tmp_path / "train.jsonl")]
    done = llm.generate(prompts, SamplingParams(max_new_tokens=40, ignore_eos=True, gamma=4))
    assert sum(out.stats.accepted for out in done) > 10 * len(done)


def test_without_a_target(tmp_path: Path) -> None:
    given = config(tmp_path, target="", tokenizer=str(tiny_target(tmp_path)), valid=())
    result = runner.invoke(
        app, ["ngram", "--out", given.out, "--text", given.text[0], "--tokenizer", given.tokenizer, "--json"]
    )
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["finished"]
    assert "held_out" not in summary
    assert Path(given.out).stat().st_size == summary["bytes"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": ""}, "give --out"),
        ({"text": ()}, "give --text"),
        ({"target": ""}, "set --target"),
        ({"tokenizer": "x"}, "not both"),
        ({"order": 6}, "at most 5"),
        ({"order": 0}, "set --order"),
        ({"target": "", "tokenizer": "x", "samples": 3}, "set --samples"),
    ],
)
def test_settings_that_cannot_be_meant(changes: dict[str, object], message: str) -> None:
    values = {"out": "x", "text": ("y",), "target": "tales"} | changes
    with pytest.raises(InputError, match=message):
        TrainNgram.of(**values)  # type: ignore[arg-type]


def test_an_out_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        train_ngram(config(tmp_path, out=str(tmp_path)))


def tables_file(path: Path, tokenizer: str = A) -> bytes:
    tensors = count_tables([np.arange(20) % 7], 3, 7, least=1)
    write_tables(path, 3, tensors, {"tokenizer": tokenizer, "vocab_size": "7"})
    return path.read_bytes()


def test_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tables"
    content = tables_file(path)
    assert read_tables(path, A, 7).order == 3
    with pytest.raises(LoadError, match="of another tokenizer"):
        read_tables(path, "b" * 64, 7)
    with pytest.raises(LoadError, match="does not know"):
        read_tables(path, A, 6)
    with pytest.raises(LoadError, match="cannot be read"):
        read_tables(tmp_path / "none", A, 7)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(LoadError, match="is cut off"):
        read_tables(path, A, 7)
    path.write_bytes(content.replace(b'"format":"2"', b'"format":"3"'))
    with pytest.raises(LoadError, match="format '3', this version reads 1 and 2"):
        read_tables(path, A, 7)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(LoadError, match="is damaged"):
        read_tables(path, A, 7)
    path.write_bytes(content.replace(b'"order":"3"', b'"order":"2"'))
    with pytest.raises(LoadError, match="is damaged"):
        read_tables(path, A, 7)
    save_file({"weight": np.zeros(3)}, path)
    with pytest.raises(LoadError, match="format None"):
        read_tables(path, A, 7)


def test_files_of_format_1_are_read(tmp_path: Path) -> None:
    """They have no digests. One whose order does not fit its tables is refused all the same."""
    tensors = count_tables([np.arange(20) % 7], 3, 7, least=1)
    about = {"tokenizer": A, "vocab_size": "7", "format": "1", "checksum": "01234567"}
    save_file(tensors, tmp_path / "old", about | {"order": "3"})
    assert read_tables(tmp_path / "old", A, 7).after((3,)) == FileTables(3, tensors).after((3,)) is not None
    save_file(tensors, tmp_path / "odd", about | {"order": "4"})
    with pytest.raises(LoadError, match="lacks tables of order 4"):
        read_tables(tmp_path / "odd", A, 7)


def test_digests_tell_tokenizers_apart() -> None:
    assert tokenizer_digest(tiny_tokenizer()) == tokenizer_digest(tiny_tokenizer())
    assert tokenizer_digest(tiny_tokenizer()) != tokenizer_digest(tiny_tokenizer(300))

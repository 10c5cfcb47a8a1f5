"""Drafts that go on learning: they get better at what their user writes, and what is written never depends on them."""

from __future__ import annotations

import copy
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from sakiyomi import LLM, SamplingParams
from sakiyomi.cli import app
from sakiyomi.core.errors import InputError, LoadError, UnsupportedError
from sakiyomi.core.preflight import check_drafts
from sakiyomi.drafters import learning
from sakiyomi.drafters.learned_file import Learned, LearnedFile, read_learned
from sakiyomi.drafters.learning import HeadLearner
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.kernels.native import PackedLinear
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.head_rows import HeadRows
from toys import save_model, tiny_llama, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPTS = [[5 + i, 100, 7, 9, 31] for i in range(3)]
runner = CliRunner()


@pytest.fixture(autouse=True)
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a text is over."""
    monkeypatch.setattr(learning, "SHARE", 1e9)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_model(folder / "target", tiny_llama(dim=64, seed=1), TOKENIZER)
    save_model(folder / "draft", tiny_llama(layers=1, seed=2), TOKENIZER)
    return folder


def llm_of(pair: Path, learn: str, **options: Any) -> LLM:
    draft = f"model:{pair / 'draft'}" + (f"[learn={learn}]" if learn else "")
    options = {"compile": False, "strict": True, "dtype": "float32"} | options
    return LLM(str(pair / "target"), draft, **options)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": 24, "gamma": 3, "ignore_eos": True} | values))


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"compile": "auto"}, {"dtype": "bfloat16"}, {"exact": True}])
def test_it_learns_and_the_text_stays(
    pair: Path, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, plain = llm_of(pair, str(tmp_path / "learnt"), **options), llm_of(pair, "", **options)
    texts = [out.token_ids for out in plain.generate(PROMPTS, params())]
    accepted = []
    monkeypatch.setattr(learning, "RATE", 1.0)  # a random draft has further to go than a trained one
    for _ in range(8):
        done = llm.generate(PROMPTS, params())
        assert [out.token_ids for out in done] == texts
        accepted.append(sum(out.stats.accepted for out in done))
    assert accepted[-1] > accepted[0] + 10
    sampled = [each.generate(PROMPTS, params(temperature=1.0, seed=4)) for each in (plain, llm)]
    assert [out.token_ids for out in sampled[0]] == [out.token_ids for out in sampled[1]]


def test_a_conversation_is_learnt_from_request_by_request(pair: Path, tmp_path: Path) -> None:
    path = tmp_path / "learnt"
    with llm_of(pair, str(path)).conversation() as talk:
        first = talk.generate(PROMPTS[0], params())
        talk.generate([*PROMPTS[0], *first.token_ids, 8, 9], params())
    found = read_learned(path)
    assert (found.texts, found.seen) == (2, 2 * 23)


@pytest.mark.thorough
def test_off_is_the_default_and_leaves_nothing(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAKIYOMI_CACHE_DIR", str(tmp_path))
    for learn in ("", "off"):
        llm = llm_of(pair, learn)
        llm.generate([PROMPTS[0]], params())
        assert llm.draft.learner is None
    assert not (tmp_path / "learned").exists()
    llm_of(pair, "on").generate([PROMPTS[0]], params())
    (file,) = (tmp_path / "learned").iterdir()
    assert read_learned(file).texts == 1


@pytest.mark.thorough
def test_what_was_learnt_is_there_in_the_next_process(pair: Path, tmp_path: Path) -> None:
    path = tmp_path / "learnt"
    first = llm_of(pair, str(path))
    for _ in range(4):
        first.generate(PROMPTS, params())
    again = llm_of(pair, str(path))
    rows = [
        each.draft.learner._rows.read(torch.arange(320)) for each in (first, again, llm_of(pair, str(tmp_path / "x")))
    ]
    assert (rows[0] - rows[1]).abs().max() < 1e-3 * (rows[0] - rows[2]).abs().max(), "16 bits of each change are kept"
    result = runner.invoke(app, ["memory", "show", str(path), "--json"])
    assert '"texts": 12' in result.stdout
    assert runner.invoke(app, ["memory", "clear", str(path)]).exit_code == 0
    assert not path.exists()


def test_two_processes_add_to_one_file(tmp_path: Path) -> None:
    def some(tokens: list[int], change: float, texts: int) -> Learned:
        count = len(tokens)
        changes = np.full((count, 4), change, np.float32)
        return Learned(
            "d" * 64, np.array(tokens), changes, np.full((4, 4), float(texts), np.float32), texts, 10 * texts
        )

    one, other = (LearnedFile(tmp_path / "learnt", "d" * 64, 4, 100) for _ in range(2))
    mine = one.save(some([3, 5], 1.0, 1))
    both = other.save(some([5, 9], 2.0, 2))
    assert both.tokens.tolist() == [3, 5, 9]
    assert both.changes[:, 0].tolist() == [1.0, 3.0, 2.0]
    assert (both.texts, both.seen, both.moments[0, 0]) == (3, 30, 3.0)
    mine = copy.deepcopy(mine)
    mine.changes[0] += 0.5  # goes on from what it knew: the other's part is not lost, and its own not counted twice
    assert one.save(mine).changes[:, 0].tolist() == [1.5, 3.0, 2.0]
    if os.name == "posix":
        assert stat.S_IMODE((tmp_path / "learnt").stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["learnt"]


@pytest.mark.thorough
def test_a_write_that_fails_leaves_the_old_file(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "learnt"
    llm = llm_of(pair, str(path))
    llm.generate([PROMPTS[0]], params())
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    (out,) = llm.generate([PROMPTS[1]], params())
    assert len(out.token_ids) == 24
    assert path.read_bytes() == before
    assert "is not kept" in caplog.text


@pytest.mark.thorough
def test_damaged_files_are_refused(pair: Path, tmp_path: Path) -> None:
    path = tmp_path / "learnt"
    llm_of(pair, str(path)).generate([PROMPTS[0]], params())
    whole = path.read_bytes()
    for place in (9, 30, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(LoadError, match=r"damaged|format|no file of a draft"):
            llm_of(pair, str(path))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LoadError, match="sakiyomi memory clear"):
        llm_of(pair, str(path))
    path.write_bytes(whole)
    save_model(tmp_path / "draft", tiny_llama(layers=1, seed=3), TOKENIZER)
    with pytest.raises(LoadError, match="another draft"):
        LLM(str(pair / "target"), f"model:{tmp_path / 'draft'}[learn={path}]", compile=False)
    with pytest.raises(LoadError, match="no folder"):
        llm_of(pair, str(tmp_path / "no" / "learnt"))


def test_specs_that_cannot_be_meant(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="once more"):
        check_drafts("model:tales-draft[learn=on][learn=off]")
    with pytest.raises(InputError, match=r"has \[learn=\]"):
        check_drafts("model:tales-draft[learn=]")
    for spec in ("eagle:tales-eagle[learn=on]", "medusa:tales-medusa[learn=on]"):
        with pytest.raises(InputError, match=f"is for draft models.*; {spec.partition(':')[0]} runs where"):
            check_drafts(spec)
    check_drafts("suffix+model:tales-draft[learn=on]")
    check_drafts("tales-draft[learn=on]")


def test_drafts_of_another_tokenizer_do_not_learn(pair: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "draft", tiny_llama(vocab=300, layers=1), tiny_tokenizer(300))
    with pytest.raises(UnsupportedError, match="different tokenizers"):
        LLM(str(pair / "target"), f"model:{tmp_path / 'draft'}[learn=on]", compile=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_lie_where_the_head_reads_them(dtype: torch.dtype) -> None:
    """Of a head whose weight is the embedding's, too, which stays."""
    model = tiny_llama(tie_word_embeddings=True).to(dtype)
    original, hidden = model.lm_head.weight.detach().clone(), torch.randn(3, 32).to(dtype)
    packed = build_runner(model, compile=False, owned=False)
    rows = HeadRows(packed)
    tokens, fresh = torch.tensor([0, 31, 32, 319]), torch.randn(4, 32).to(dtype).float()
    assert torch.equal(rows.read(tokens), original[tokens].float())
    rows.write(tokens, fresh)
    assert torch.equal(rows.read(tokens), fresh)
    wanted = original.index_copy(0, tokens, fresh.to(dtype))
    with torch.no_grad(), packed.lock:
        if isinstance(packed.head, PackedLinear):
            packed.begin(BatchPlan([]), 3)
        found = packed.head(hidden)
    torch.testing.assert_close(found, hidden @ wanted.T, rtol=1e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(model.lm_head.weight, original)
    assert torch.equal(packed.module.get_input_embeddings().weight, original)


def test_a_step_is_that_of_the_cross_entropy(tmp_path: Path) -> None:
    """With all tokens among the likeliest the gradient is autograd's, and whitened states meet themselves alone."""
    model = tiny_llama(vocab=8, layers=1)
    learner = HeadLearner(build_runner(model, compile=False, owned=False), str(tmp_path / "learnt"))
    states, right = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)), torch.tensor([1, 1, 7, 0, 3])
    before = learner._rows.read(torch.arange(8))
    logits = (states @ before.T).requires_grad_()
    torch.nn.functional.cross_entropy(logits, right, reduction="sum").backward()
    learner._step(logits.detach(), states, right)
    change = states @ (learner._rows.read(torch.arange(8)) - before).T
    assert logits.grad is not None
    # Where states are few, each is whitened to a direction that is at right angles to the others.
    torch.testing.assert_close(change, -learning.RATE * logits.grad, rtol=0.15, atol=0.02)

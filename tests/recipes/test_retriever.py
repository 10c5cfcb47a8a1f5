"""The retrieval model: its rows, the pass over parted rows, its accuracy, a tiny run from end to end and resumed."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from retrieval_rows import ANSWER, KNOWN, NOTHING, OTHER, WANTED, RetrievalRows
from retrieval_start import start_looking_back
from retriever import (
    ASKED,
    RetrieverConfig,
    _Retriever,
    accuracy,
    answers_and_text,
    notes,
    parted_pass,
    retrieval_tokenizer,
    train_retriever,
)
from sakiyomi.core.embedded import embedded
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.train.llama import new_llama
from sakiyomi.train.long_tasks import TASKS
from sakiyomi.train.long_tasks.made import ADJECTIVES, NOUNS
from train_toys import losses, stop_at, stories, story_file


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return retrieval_tokenizer(stories(60), 800, 4096)


@pytest.fixture(scope="module")
def rows(tokenizer: PreTrainedTokenizerBase) -> RetrievalRows:
    return RetrievalRows(stories(60), tokenizer, seed=3)


def config(folder: Path, **changes: Any) -> RetrieverConfig:
    settings: dict[str, Any] = {
        "out": str(folder / "out"),
        "text": (str(story_file(folder / "train.jsonl")),),
        "valid": (f"stories={story_file(folder / 'valid.jsonl', count=10, seed=1)}",),
        "tokens": 6 * 512,
        "row_tokens": (128, 256),
        "stage_shares": (0.5, 0.5),
        "step_tokens": 512,
        "vocab": 700,
        "hidden": 32,
        "layers": 2,
        "heads": 2,
        "kv_heads": 1,
        "intermediate": 48,
        "max_positions": 512,
        "eval_prompts": 1,
        "final_prompts": 2,
        "eval_lengths": (256,),
        "compile": False,
        "threads": 1,
    }
    return RetrieverConfig.of(**(settings | changes))


def test_digits_and_the_words_of_keys_are_pieces() -> None:
    tokenizer = retrieval_tokenizer(stories(60), 800, 4096)
    assert tokenizer.tokenize(" 4481") == ["Ġ", "4", "4", "8", "1"]
    assert all(len(tokenizer.tokenize(f" {word}")) == 1 for word in (*ADJECTIVES, *NOUNS))
    assert all(len(tokenizer.tokenize(word)) == 1 for word in ADJECTIVES)


@pytest.mark.few(1)
@pytest.mark.parametrize("length", [128, 512])
def test_rows_are_whole_texts_with_their_answers_marked(
    rows: RetrievalRows, tokenizer: PreTrainedTokenizerBase, length: int
) -> None:
    answered = 0
    for step in (0, 2, 4):
        batch = rows.batch(step, 24, length, False)
        again = rows.batch(step, 24, length, True)
        assert all((batch[name] == again[name]).all() for name in batch)
        assert batch["ids"].shape == batch["roles"].shape == (24, length + 1)
        for ids, roles in zip(batch["ids"], batch["roles"], strict=True):
            known = ids[roles != NOTHING]
            assert (roles[: len(known)] != NOTHING).all()
            text = tokenizer.decode(known[1:])
            if "Question" in text:
                # The parts are joined where the tokenizer would cut the whole text, too.
                assert tokenizer(text)["input_ids"] == known.tolist()
                assert len(known) > 0.6 * length
                answers = tokenizer.decode(ids[roles == ANSWER])
                last = text.rsplit("\n", 1)[1]
                assert last.endswith(answers[-5:])
                answered += 1
    assert answered > 20
    assert (rows.batch(0, 2, length, False)["ids"] != rows.batch(2, 2, length, False)["ids"]).any()


def test_questions_of_a_row_are_answered_by_its_text(rows: RetrievalRows, tokenizer: PreTrainedTokenizerBase) -> None:
    seen = 0
    for seed in range(30):
        ids, _ = rows._asked("kv-dense", np.random.default_rng(seed), 385)
        text = tokenizer.decode(ids[1:])
        pairs = json.loads(text[text.index("{") : text.index("}") + 1])
        for line in text[text.index("}") :].split("\n"):
            if line.startswith("Answer: "):
                key, value = json.loads("{" + line.removeprefix("Answer: ") + "}").popitem()
                assert pairs[key] == value
                seen += 1
    assert seen > 30


@pytest.mark.parametrize("length", [128, 512])
def test_parted_rows(rows: RetrievalRows, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
    batch = rows.batch(1, 24, length, False)
    half = length // 2
    assert batch["ids"].shape == (24, length + 1)
    assert batch["end"].tolist() == [half]
    first = 0
    for ids, roles in zip(batch["ids"], batch["roles"], strict=True):
        text, questions = tokenizer.decode(ids[1:half]), tokenizer.decode(ids[half:])
        assert questions.lstrip().startswith("Question: ")
        assert (roles[:half] != ANSWER).all()
        asked = [line for line in questions.split("\n") if line.startswith("Question: ")]
        answers = tokenizer.decode(ids[roles == ANSWER]).replace('"', ".").split(".")
        # The last one may be cut off.
        for answer in answers[:-1]:
            assert answer.strip() in text
        noted = np.isin(roles, (OTHER, WANTED))
        assert noted.any() == text.startswith("Question: ")
        if noted.any():
            first += 1
            assert asked[0] in text
            assert not noted[half:].any()
            wanted = tokenizer.decode(ids[roles == WANTED])
            assert wanted == "".join(sorted((answer.strip() for answer in answers), key=text.find))
            others = tokenizer.decode(ids[roles == OTHER])
            assert len(others) % 4 in (0, 1, 2, 3)
            assert others == "" or others[:4] in text
    assert 4 < first < 20


def test_a_parted_pass_shows_the_text_to_the_last_layer_alone(
    rows: RetrievalRows, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    batch = rows.batch(1, 4, 128, False)
    ids, end = torch.from_numpy(batch["ids"]), int(batch["end"][0])
    other = ids.clone()
    other[:, 30] = (other[:, 30] + 1) % 800
    torch.manual_seed(0)
    model = new_llama(config(tmp_path).sizes, tokenizer, layers=3, vocab=800, max_positions=512)

    def changed(place: int) -> list[bool]:
        """Whether another token of the text changes what is read by the last layer, and what comes out of it."""
        with torch.no_grad():
            pairs = zip(parted_pass(model, ids, end), parted_pass(model, other, end), strict=True)
        return [bool((one - two)[:, place].abs().max() > 1e-6) for one, two in pairs]

    assert changed(40) == [True, True]
    assert changed(end + 5) == [True, False]
    whole = model.model(input_ids=ids).last_hidden_state
    parted, _ = parted_pass(model, ids, end)
    assert torch.allclose(whole[:, :end], parted[:, :end], atol=1e-5)
    assert not torch.allclose(whole[:, end:], parted[:, end:], atol=1e-3)


def test_notes_count_both_kinds_of_values() -> None:
    sign = 1.0 - 2.0 * (torch.arange(8) % 2)
    roles = torch.tensor([[KNOWN, WANTED, OTHER, OTHER]])
    right = torch.stack((sign, sign, -sign, -sign))[None]
    counts = torch.tensor([2.0, 1.0])
    assert float(notes(right, roles, counts)) < 0.01
    assert float(notes(-right, roles, counts)) > 10
    unsure = notes(torch.zeros(1, 4, 8), roles, counts)
    assert float(unsure) == pytest.approx(2 * np.log(2), rel=1e-4)
    assert float(notes(right, torch.full_like(roles, KNOWN), torch.ones(2))) == 0


def test_the_loss_counts_answers_and_a_little_text() -> None:
    hidden, head = torch.randn(1, 3, 8), torch.randn(5, 8)
    labels, roles = torch.tensor([[1, 2, 3]]), torch.tensor([[KNOWN, ANSWER, NOTHING]])
    each = F.cross_entropy((hidden @ head.T)[0], labels[0], reduction="none")
    found = answers_and_text(0.1, hidden, head, labels, roles, torch.tensor([1.0, 2.0]))
    assert float(found) == pytest.approx(float(each[1] + 0.1 * each[:2].mean()), rel=1e-5)
    nothing = answers_and_text(0.1, hidden, head, labels, torch.zeros_like(roles), torch.ones(2))
    assert float(nothing) == 0


class Knowing:
    """Stands for a model that guesses every next token right, but for the `wrong`-th from the end of each row."""

    device, training = torch.device("cpu"), False

    def __init__(self, size: int, wrong: int | None) -> None:
        self._size, self._wrong = size, wrong

    def eval(self) -> None: ...

    def train(self, mode: bool) -> None: ...

    def model(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        following = torch.roll(input_ids, -1, 1)
        if self._wrong is not None:
            for row in following:
                filled = int((row != 0).nonzero().max())
                row[filled - self._wrong] = 1
        return SimpleNamespace(last_hidden_state=F.one_hot(following, self._size).float())

    def lm_head(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.mark.parametrize("task", ASKED)
@pytest.mark.parametrize("query_first", [False, True])
def test_accuracy(task: str, query_first: bool, tokenizer: PreTrainedTokenizerBase) -> None:
    def share(wrong: int | None) -> float:
        model: Any = Knowing(800, wrong)
        return accuracy(model, tokenizer, task, 400, prompts=4, query_first=query_first)

    assert share(None) == 1
    assert share(1) == 0
    # Far in front of the answer nothing counts.
    assert share(60) == 1


def test_the_start_looks_back_and_for_the_same_again(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    sizes = config(tmp_path, hidden=128, heads=4, kv_heads=2, layers=2)
    torch.manual_seed(0)
    model = new_llama(sizes.sizes, tokenizer, layers=2, vocab=800, max_positions=512)
    model.set_attn_implementation("eager")
    count = 40
    ids = torch.randperm(800)[:count].repeat(2)[None]

    def seen(layer: int, head: int, back: int) -> float:
        """Mean weight that the second half gives to tokens so far back."""
        with torch.no_grad():
            weights = model(input_ids=ids, output_attentions=True).attentions[layer][0, head]
        return float(torch.diagonal(weights, -back)[count - back + 2 :].mean())

    assert seen(0, 0, 1) < 0.1
    start_looking_back(model, 1)
    for head in range(4):
        assert seen(0, head, head + 1) > 0.7
        # What stood behind the same token, or the same two, the last time.
        assert seen(1, head, count - 1) > 0.1
        assert seen(1, head, count - 5) < 0.05


@pytest.mark.thorough
def test_the_embedded_model_answers() -> None:
    """Its card has the shares of many prompts; a few are enough to see that the files are those of a trained model."""
    folder = embedded("retriever")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    own = AutoTokenizer.from_pretrained(folder)
    for query_first in (False, True):
        for task in ("passkey", "kv"):
            assert accuracy(model, own, task, 1024, prompts=4, query_first=query_first, seed=9) >= 0.75
    example = TASKS["passkey"].make(np.random.default_rng(3), 600, own)
    ids = own(example.prompt(), return_tensors="pt", return_token_type_ids=False)
    count = ids["input_ids"].shape[1]
    written = model.generate(**ids, max_new_tokens=TASKS["passkey"].answer_tokens, do_sample=False)[0, count:]
    assert TASKS["passkey"].score(own.decode(written), example) == 1
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4 << 20


def test_stages_follow_each_other(tmp_path: Path) -> None:
    run = _Retriever(config(tmp_path, stage_shares=(0.25, 0.75)))
    for share, length in ((0, 128), (0.24, 128), (0.25, 256), (0.99, 256), (1.0, 256), (1.2, 256)):
        assert {run.row_length(step, share) for step in range(3)} == {length}


@pytest.mark.thorough
def test_a_tiny_run_from_end_to_end(tmp_path: Path) -> None:
    summary = train_retriever(
        config(tmp_path, note=("Stories, no licence needed",)), "python recipes/retriever.py --out x"
    )
    assert summary["steps"] == 6
    folder = Path(summary["model"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.config.num_key_value_heads == 1
    assert len(tokenizer) == model.config.vocab_size == 700
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    assert card["held_out"]["stories"]["bits_per_character"] > 0
    for filler in ("noise", "stories"):
        found = card["held_out"][f"accuracy at 256 tokens, filler: {filler}"]
        assert set(found) == {*ASKED, *(f"{task}, question in front" for task in ASKED)}
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "| kv-dense, question in front |" in text
    assert "python recipes/retriever.py --out x" in text
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_a_resumed_run_sees_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = config(tmp_path, out=str(tmp_path / "whole"))
    train_retriever(whole)
    parts = config(tmp_path, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGINT)
        assert not train_retriever(parts)["finished"]
    train_retriever(config(tmp_path, out=str(tmp_path / "parts"), resume=True))
    assert losses(parts.loop.out) == losses(whole.loop.out)


def test_other_text_is_refused_when_resumed(rows: RetrievalRows, tokenizer: PreTrainedTokenizerBase) -> None:
    rows.restore(rows.state())
    with pytest.raises(LoadError, match="their text has changed"):
        RetrievalRows(stories(61), tokenizer, seed=3).restore(rows.state())


def test_bad_settings(tmp_path: Path) -> None:
    for changes, message in (
        ({"stage_shares": (1.0,)}, "stage_shares is .* expected 2 shares"),
        ({"max_positions": 128}, "max_positions is 128, expected 256 or more"),
        ({"kv_heads": 3}, "kv_heads|heads"),
        ({"eval_lengths": (100,)}, "eval_lengths is .100"),
    ):
        with pytest.raises(InputError, match=message):
            config(tmp_path, **changes)


@pytest.mark.thorough
def test_a_tokenizer_of_another_size_is_refused(tmp_path: Path) -> None:
    train_retriever(config(tmp_path, tokens=512))
    shutil.rmtree(tmp_path / "out" / "checkpoints")
    with pytest.raises(InputError, match="has 700 pieces"):
        train_retriever(config(tmp_path, vocab=710))

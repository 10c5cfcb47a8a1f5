"""`sakiyomi tune --train`: answers, the choice of a drafter, the forecast, stopping and continuing, what is kept."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from real_files import FOLDER, real
from sakiyomi import LLM, InputError
from sakiyomi.cli import app
from sakiyomi.core.prompts import read_prompts
from sakiyomi.evaluation.tuning import training
from sakiyomi.evaluation.tuning.config import PairConfig
from sakiyomi.evaluation.tuning.forecast import acceptance_of, forecast
from sakiyomi.evaluation.tuning.kinds import LEARNT, Choice, Costs, choose, coverage, told
from sakiyomi.train.answers import INSTRUCTIONS, as_asked, instructions, own_prompts, user_turn
from sakiyomi.train.commands import COMMANDS
from sakiyomi.train.loop import Loop
from sakiyomi.train.samples import sample_continuations
from train_toys import stop_at, tiny_target

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MINUTES = "0.015"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of its own for profiles, short answers, few texts."""
    monkeypatch.setenv("SAKIYOMI_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setattr("sakiyomi.train.taught.NEW_TOKENS", 24)
    monkeypatch.setattr("sakiyomi.evaluation.tuning.search.available", lambda llm, target: ["suffix"])
    for name, value in (("NEW_TOKENS", 64), ("BATCH", 12), ("MEASURED_TEXTS", 2), ("STEP", 256), ("ROW", 128)):
        monkeypatch.setattr(training, name, value)


def chat_model(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A tiny model with a chat template."""
    path = tiny_target(folder, positions=256)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


def tuned(target: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and whole output of the command."""
    flags = ["--train", MINUTES, "--dtype", "float32", "--count", "4", "--seconds", "1", "--max-new-tokens", "8"]
    done = CliRunner().invoke(app, ["tune", "--model", str(target), *flags, "--finalists", "1", *more, "--json"])
    last = done.stdout.strip().splitlines()[-1:] or [""]
    return done.exit_code, json.loads(last[0]) if last[0].startswith("{") else {}, done.output


def test_a_chat_model(tmp_path: Path) -> None:
    """One command answers instructions through the template, trains, measures the drafter and keeps the best; again,
    in another precision, it only measures."""
    target = chat_model(tmp_path)
    code, found, output = tuned(target)
    assert code == 0, output
    trained = found["trained"]
    assert trained["finished"] and trained["draft"].startswith("eagle:")
    assert any(row["draft"] == trained["draft"] and "measured_speedup" in row for row in found["table"])
    assert found["conditions"]["prompts"] == "instructions"
    assert "training an EAGLE head: a step costs" in output and "of 0 min: tau" in output
    tokenizer = AutoTokenizer.from_pretrained(target)
    lines = Path(trained["answers"]).read_text(encoding="utf-8").splitlines()
    prompts = {tuple(one["tokens"][: one["prompt"]]) for one in map(json.loads, lines)}
    ours = {tuple(as_asked(tokenizer, chat)) for chat in instructions(held_out=False)}
    kept = {tuple(as_asked(tokenizer, chat)) for chat in instructions(held_out=True)}
    assert prompts & ours and not prompts & kept
    assert tokenizer.decode(lines and json.loads(lines[0])["tokens"]).startswith("<user>")
    if found["best"]["draft"] == "none":
        assert found["file"] is None
    else:
        assert LLM(str(target), dtype="float32").profile is not None
    card = Path(trained["folder"]) / f"{MINUTES}-minutes" / "eagle" / "model" / "card.json"
    before = card.stat().st_mtime_ns
    code, again, output = tuned(target, "--quantize", "int8")
    assert code == 0 and again["trained"]["draft"] == trained["draft"] and card.stat().st_mtime_ns == before
    assert len(Path(trained["answers"]).read_text(encoding="utf-8").splitlines()) == len(lines)


@pytest.mark.thorough
def test_stop_and_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the training keeps a checkpoint; the same command continues from it."""
    target = chat_model(tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, 0, signal.SIGINT)
        code, found, output = tuned(target)
    assert code == 130 and not found["trained"]["finished"], output
    assert "the same command continues" in output
    first: list[int] = []
    original = Loop._step

    def stepping(self: Loop) -> float:
        first.append(self.progress.step)
        return original(self)

    monkeypatch.setattr(Loop, "_step", stepping)
    code, found, output = tuned(target)
    assert code == 0 and found["trained"]["finished"], output
    assert all(step >= 1 for step in first), "the step at hand was finished, and no step is made twice"


def test_a_kill_while_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole batches of answers are kept, and their time counts."""
    target = chat_model(tmp_path)
    config = PairConfig(target=str(target), dtype="float32", train=float(MINUTES) * 100)

    def killed(llm: LLM, prompts: list[list[int]], **more: Any) -> list[list[int]]:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(prompts)
        return sample_continuations(llm, prompts, **more)

    seen: list[list[list[int]]] = []
    monkeypatch.setattr("sakiyomi.train.samples.sample_continuations", killed)
    with pytest.raises(KeyboardInterrupt):
        training.train_drafter(config, lambda text: None, lambda line: True)
    (folder,) = (tmp_path / "profiles" / "trained").iterdir()
    assert len((folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()) == 24
    assert training.State.read(folder / "state.json").answered > 0


@pytest.mark.parametrize(("seconds", "batch"), [(0.001, 192), (0.5, 32), (60.0, 32)])
def test_as_many_answers_are_asked_for_as_take_some_seconds(
    seconds: float, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a minute of one batch would be charged as a minute, and more would be lost when it is stopped."""
    monkeypatch.undo()
    llm: Any = SimpleNamespace(max_context=2048, target=SimpleNamespace(pass_seconds=lambda rows: seconds))
    assert training._batch(llm) == batch


def test_the_state_of_an_older_version(tmp_path: Path) -> None:
    """It had the row's tokens, which are ignored and not written again."""
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"answered": 3.0, "agreed": True, "row": 512}), encoding="utf-8")
    state = training.State.read(path)
    state.write(path)
    assert state.answered == 3.0 and state.agreed and "row" not in json.loads(path.read_text(encoding="utf-8"))


def test_no_is_no(tmp_path: Path) -> None:
    """Who does not want to go on after the forecast is asked again next time, and what is there is kept."""
    asked: list[str] = []

    def ask(line: str) -> bool:
        asked.append(line)
        return False

    config = PairConfig(target=str(chat_model(tmp_path)), dtype="float32", train=float(MINUTES))
    found = training.train_drafter(config, lambda text: None, ask)
    assert not found["finished"] and len(asked) == 1 and "tau" in asked[0] and "x" in asked[0]
    found = training.train_drafter(config, lambda text: None, lambda line: asked.append(line) or True)
    assert found["finished"] and len(asked) == 2, "asked once more, and then no more"


@pytest.mark.thorough
def test_no_template(tmp_path: Path) -> None:
    """A base model continues texts: beginnings of stories, then beginnings of its own."""
    target = chat_model(tmp_path, None)
    code, found, output = tuned(target)
    assert code == 0, output
    assert found["conditions"]["prompts"] == "beginnings of stories"
    llm = LLM(str(target), "none", dtype="float32", compile=False)
    own = own_prompts(llm, 3, 1)
    assert len(own) == 3 and all(ids[0] == llm.tokenizer.eos_token_id and len(ids) > 8 for ids in own)


@pytest.mark.thorough
def test_a_gguf_file(tmp_path: Path) -> None:
    """Its blocks are read for the training, and the drafter is kept outside its folder."""
    file = tmp_path / "tiny.gguf"
    done = CliRunner().invoke(app, ["export", "gguf", str(chat_model(tmp_path)), str(file)])
    assert done.exit_code == 0, done.output
    code, found, output = tuned(file)
    assert code == 0 and found["trained"]["finished"], output
    assert Path(found["trained"]["folder"]).parent == tmp_path / "profiles" / "trained"


@pytest.mark.thorough
def test_prompts_of_the_user(tmp_path: Path) -> None:
    """Of a file every eighth prompt is measured with, and the others are learnt from; all forms are read."""
    forms: list[Callable[[str], dict[str, Any]]] = [
        lambda text: {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "Yes."}]},
        lambda text: {"messages": [{"role": "user", "content": text}]},
        lambda text: {"turns": [text, "And then?"]},
        lambda text: {"text": text},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(json.dumps(forms[i % 4](f"Question {i}?")) for i in range(20)), encoding="utf-8")
    code, found, output = tuned(chat_model(tmp_path), "--prompts", str(file))
    assert code == 0, output
    lines = Path(found["trained"]["answers"]).read_text(encoding="utf-8").splitlines()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    written = " ".join(tokenizer.decode(one["tokens"][: one["prompt"]]) for one in map(json.loads, lines))
    missing = {i for i in range(20) if f"<user>Question {i}?" not in written}
    assert {0, 8, 16} <= missing and len(missing) <= 8, "a batch of twelve is written in any case"
    measured = read_prompts(found["trained"]["prompts"])
    assert len(measured) == 3 and found["conditions"]["calibrated_on"] <= 2


def test_a_small_model_is_told_its_share_of_a_target_pass(tmp_path: Path) -> None:
    costs = Costs(0.01, {1: 1.0, 8: 1.5}, 1e-10)
    choice = Choice("draft", 0, 1.0, 0.0025, 4, 1.5, False)
    found = training._settings(
        PairConfig(target="target", train=1.0), choice, costs, tmp_path / "answers", tmp_path, 128
    )
    assert float(found["cost"]) == 0.25


@pytest.mark.parametrize("kind", LEARNT)
def test_a_recipe_gets_the_vocabulary_that_was_chosen(kind: str, tmp_path: Path) -> None:
    """Small models have all tokens, and no option for fewer."""
    costs, size = Costs(0.01, {1: 1.0, 8: 1.5}, 1e-10), 0 if kind == "draft" else 4096
    choice = Choice(kind, size, 1.0, 0.0025, 4, 1.5, False)
    found = training._settings(
        PairConfig(target="target", train=1.0), choice, costs, tmp_path / "answers", tmp_path, 128
    )
    assert COMMANDS[kind].of(**found).flat().get("draft_vocab", 0) == size


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kind", "lstm"], "expected auto, eagle"),
        (["--train", "-1"], "train"),
        (["--watch"], "leave out --train"),
        (["--train", "0", "--yes"], "give --train MINUTES"),
        (["--train", "0", "--kind", "eagle"], "give --train MINUTES"),
    ],
)
def test_wrong_settings(tmp_path: Path, flags: list[str], said: str) -> None:
    """They are refused before anything is loaded."""
    code, _, output = tuned(tmp_path, *flags)
    assert code == 2 and said in output, output


def test_wrong_prompts(tmp_path: Path) -> None:
    """Too few, or too long for the target."""
    target, file = chat_model(tmp_path), tmp_path / "few.txt"
    code, _, output = tuned(target, "--prompts", str(file))
    assert code == 1 and "cannot be read" in output
    file.write_text("One?\n", encoding="utf-8")
    code, _, output = tuned(target, "--prompts", str(file))
    assert code == 2 and "give" in output
    file.write_text("One?\nTwo?\n", encoding="utf-8")
    code, _, output = tuned(target, "--prompts", str(file))
    assert code == 2 and "every 8th is kept for measuring" in output
    file.write_text("\n".join(["Long " * 300] * 9), encoding="utf-8")
    code, _, output = tuned(target, "--train-prompts", str(file))
    assert code == 2 and "no prompt leaves room" in output


# ---------------------------------------------------------------- the choice and the forecast

SMALL = SimpleNamespace(
    hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536
)


def answers(vocab: int, count: int = 50) -> list[np.ndarray]:
    """Texts whose tokens have Zipf's frequencies."""
    rng = np.random.default_rng(1)
    return [np.minimum(rng.zipf(1.3, 200), vocab) - 1 for _ in range(count)]


def test_a_large_vocabulary_is_cut() -> None:
    """With 49k tokens and more the head over all of them is most of a step, and a head with a cut one wins."""
    for vocab in (49152, 262144):
        weights = training.weights_of(SMALL, vocab)
        costs = Costs.of({1: 0.015, 4: 0.016, 8: 0.018}, weights)
        best = choose(costs, SMALL, vocab, answers(vocab))[0]
        assert best.kind == "eagle" and 0 < best.draft_vocab <= 16384 and best.covered > 0.9
        for kind in ("block", "medusa"):
            assert 0 < choose(costs, SMALL, vocab, answers(vocab), kind)[0].draft_vocab <= 16384
        whole = choose(costs, SMALL, vocab, answers(vocab), "draft")[0]
        assert whole.draft_vocab == 0 and whole.speedup < best.speedup
        assert f"proposes {best.draft_vocab} tokens" in told([best, whole], costs)


def test_a_small_vocabulary_is_whole() -> None:
    """Nothing is cut where no size is smaller than the vocabulary."""
    costs = Costs.of({1: 0.015, 8: 0.018}, training.weights_of(SMALL, 2000))
    found = choose(costs, SMALL, 2000, answers(2000))
    assert {one.kind for one in found} == set(LEARNT) and all(one.draft_vocab == 0 for one in found)
    with pytest.raises(InputError, match="written nothing"):
        choose(costs, SMALL, 2000, [])


def test_wide_passes_that_cost_much() -> None:
    """Where a pass over two rows costs two plain ones, no draft is predicted to be faster."""
    costs = Costs.of({1: 0.01, 2: 0.02, 8: 0.08}, training.weights_of(SMALL, 49152))
    assert choose(costs, SMALL, 49152, answers(49152))[0].gamma == 0


def test_coverage() -> None:
    """Of the last fifth, by the most frequent tokens of the others; of unseen ones the lower ids come first."""
    texts = [np.array([1, 1, 1, 2, 2, 3])] * 4 + [np.array([1, 2, 3, 9])]
    assert coverage(texts, 10, [1, 2, 3, 9, 10]) == {1: 0.25, 2: 0.5, 3: 0.75, 9: 0.75, 10: 1.0}


def point(seconds: float, tau: float) -> dict[str, Any]:
    return {"seconds": seconds, "measures": {"held_back": {"tau_chain_4": tau, "position_1": 0.5}}}


def test_forecast() -> None:
    """It grows with the training that is left, follows the growth so far, and ends at what is measured."""
    costs = Costs.of({1: 0.015, 4: 0.016, 8: 0.018}, training.weights_of(SMALL, 49152))
    choice = choose(costs, SMALL, 49152, answers(49152))[0]
    assert acceptance_of({"tau_chain_4": 1 + 0.5 + 0.25 + 0.125 + 0.0625}) == pytest.approx(0.5)
    short, long = (forecast([point(120, 1.5)], end, choice, costs) for end in (240, 3600))
    assert 1.3 < short.tau < long.tau and short.speedup < long.speedup
    fast = forecast([point(120, 1.5), point(240, 1.9)], 3600, choice, costs)
    slow = forecast([point(120, 1.85), point(240, 1.9)], 3600, choice, costs)
    assert fast.tau > slow.tau
    done = forecast([point(120, 1.5), point(240, 1.9)], 240, choice, costs)
    assert done.now == pytest.approx(acceptance_of({"tau_chain_4": 1.9})) and "about" in str(done)


# ---------------------------------------------------------------- prompts


def test_instructions_are_many_and_varied() -> None:
    """A few hundred, none twice, in several languages; an eighth is held out."""
    found = [chat[0]["content"] for chat in read_prompts(INSTRUCTIONS)]
    assert len(found) >= 300 and len(set(found)) == len(found)
    assert len(instructions(held_out=True)) == -(-len(found) // 8)
    assert max(map(len, found)) < 400 and any(ord(letter) > 0x3000 for letter in "".join(found))


def test_a_user_turn(tmp_path: Path) -> None:
    """The model continues what stands before a user's message, and ends where the template goes on."""
    tokenizer = AutoTokenizer.from_pretrained(chat_model(tmp_path))
    begin, end = user_turn(tokenizer) or ([], "")
    assert tokenizer.decode(begin) == "<user>" and end.startswith(tokenizer.eos_token)
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    assert user_turn(tokenizer) is None
    tokenizer.chat_template = "always the same"
    assert user_turn(tokenizer) is None


def test_a_real_user_turn() -> None:
    """That of SmolLM2, with its system prompt."""
    tokenizer = AutoTokenizer.from_pretrained(real(FOLDER))
    begin, end = user_turn(tokenizer) or ([], "")
    assert tokenizer.decode(begin).endswith("<|im_start|>user\n") and end.startswith("<|im_end|>")

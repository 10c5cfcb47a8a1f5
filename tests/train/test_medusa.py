"""Training of Medusa heads: what counts, what is learnt, what a run leaves behind, and what it refuses."""

from __future__ import annotations

import gzip
import json
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from sakiyomi import LLM, InputError, LoadError, SamplingParams
from sakiyomi.drafters.medusa_heads.backbone import Backbone
from sakiyomi.drafters.medusa_heads.formats import read_heads, write_heads
from sakiyomi.drafters.medusa_heads.heads import HeadsShape, MedusaHeads
from sakiyomi.drafters.medusa_heads.ranks import LISTED, Ranks, rank_texts
from sakiyomi.model_executor.loading import load_model
from sakiyomi.theory import best_tree, expected_tree_tokens
from sakiyomi.train.chats import chat_prompts, encode_chat
from sakiyomi.train.checkpoint import checkpoints
from sakiyomi.train.commands import TrainDistillData, TrainMedusa
from sakiyomi.train.counted import read_counted, token_ids
from sakiyomi.train.distill_data import load_writer, train_distill_data
from sakiyomi.train.hidden import HiddenStates
from sakiyomi.train.losses import heads_loss
from sakiyomi.train.medusa import guess_loss, train_medusa
from sakiyomi.train.samples import Asked, Write, by
from toys import tiny_llama, tiny_tokenizer
from train_toys import losses, stop_at, stories, story_file, tiny_gpt2, tiny_target

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"from": "human", "value": "Say one."},
    {"from": "gpt", "value": "One."},
    {"from": "human", "value": "Say two."},
    {"from": "gpt", "value": "Two."},
]


def medusa_config(folder: Path, target: Path, **changes: Any) -> TrainMedusa:
    """Two heads and a budget of a few steps."""
    data = story_file(folder / "train.jsonl")
    valid = story_file(folder / "valid.jsonl", count=6, seed=1)
    settings: dict[str, Any] = {
        "out": str(folder / "medusa"),
        "target": str(target),
        "data": (str(data),),
        "valid": (f"stories={valid}",),
        "heads": 2,
        "tokens": 8 * 64,
        "row_tokens": (32,),
        "step_tokens": 64,
        "warmup_steps": 2,
        "eval_prompts": 2,
        "lr": 0.01,
        "compile": False,
        "threads": 1,
        "device": "cpu",
    }
    return TrainMedusa.of(**(settings | changes))


def chat_file(path: Path, *chats: Any) -> Path:
    path.write_text("".join(json.dumps({"conversations": chat}) + "\n" for chat in chats), encoding="utf-8")
    return path


# ---------------------------------------------------------------- a run


@pytest.mark.thorough
@pytest.mark.parametrize("own", [False, True])
def test_from_end_to_end(own: bool, tmp_path: Path, pictures: None) -> None:
    """Heads get better, the target stays as it is, and what is left behind can be used at once."""
    target = tiny_target(tmp_path)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    config = medusa_config(tmp_path, target, own_head=own, layers=2, tokens=60 * 64)
    summary = train_medusa(config, "the command")
    assert summary["finished"]
    assert before == {path.name: path.read_bytes() for path in target.iterdir()}
    folder = Path(summary["model"])
    found = read_heads(folder)
    assert (found.format, found.heads.shape.heads, found.heads.shape.layers) == ("medusa", 2, 2)
    assert found.heads.shape.own == (2 if own else 0)
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["base_model_name_or_path"] == str(target)
    card = (folder / "README.md").read_text(encoding="utf-8")
    for words in ("2 Medusa heads of 2 residual blocks", "the command", "head 2 top 5", "expected tau", "memory:"):
        assert words in card, words
    assert {"loss.png", "accuracy.png", "card.json"} <= {path.name for path in folder.iterdir()}
    assert (Path(config.loop.out) / "heads.png").is_file(), "drawn at every evaluation"
    steps = losses(config.loop.out)
    assert sum(steps[-10:]) < 0.9 * sum(steps[:10])
    measures = summary["held_out"]["stories"]
    assert measures["head_1_top_1"] <= measures["head_1_top_5"] <= 1.0
    assert [tree["nodes"] for tree in summary["trees"]["stories"]] == [4, 8, 16, 32, 64]
    assert 1.0 <= summary["trees"]["stories"][0]["replayed_tau"] <= 3.0
    assert summary["memory"]["peak"] > summary["memory"]["parts"]["target"] > 0
    texts = [
        LLM(str(target), draft, compile=False, strict=True, dtype="float32")
        .generate("Once upon a time", SamplingParams(max_new_tokens=20, gamma=2))
        .token_ids
        for draft in ("none", f"medusa:{folder}")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("own", [False, True])
def test_a_cut_vocabulary(own: bool, tmp_path: Path) -> None:
    """Only the kept tokens are drafted, by rows of the target's head or by the heads' own; the text is the target's."""
    target = tiny_target(tmp_path)
    config = medusa_config(tmp_path, target, draft_vocab=40, own_head=own, tokens=20 * 64)
    summary = train_medusa(config)
    assert "40 of its tokens are proposed" in summary["about"]
    steps = losses(config.loop.out)
    assert sum(steps[-6:]) < sum(steps[:6])
    found = read_heads(summary["model"])
    kept, rows = found.heads.token_map, found.heads.own
    assert found.format == "vllm" and kept is not None and rows is not None
    assert rows.shape[:2] == (2 if own else 1, 40)
    whole = load_model(str(target), dtype="float32", device="cpu").model.get_output_embeddings().weight
    assert torch.equal(rows[0], whole[kept].bfloat16()) != own
    llm = LLM(str(target), summary["model"], compile=False, strict=True, dtype="float32")
    plain = LLM(str(target), "none", compile=False, dtype="float32")
    prompts = [list(range(5, 25)), list(range(40, 60))]
    sizes: list[dict[str, Any]] = [
        {"tree": "chain"},
        {"tree": "best-first", "nodes": 8},
        {"tree": "static", "nodes": 8, "temperature": 1.0, "seed": 3},
    ]
    for size in sizes:
        params = SamplingParams(max_new_tokens=24, gamma=2, ignore_eos=True, **size)
        done = llm.generate(prompts, params, rounds_trace=True)
        drafted = {token for out in done for entry in out.rounds_trace or () for token in entry.tokens}
        assert drafted and drafted <= set(kept.tolist())
        if "temperature" not in size:
            assert [out.token_ids for out in done] == [out.token_ids for out in plain.generate(prompts, params)]
    with pytest.raises(InputError, match="can only be written as 'vllm'"):
        write_heads(found.heads, tmp_path / "other", "medusa")


@pytest.mark.parametrize(
    ("wrong", "said"), [(5000, "draft_vocab is 5000.*300 tokens.*0 for all"), (-2, "draft_vocab is -2")]
)
def test_vocabularies_that_cannot_be(wrong: int, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        train_medusa(medusa_config(tmp_path, tiny_target(tmp_path), draft_vocab=wrong))


@pytest.mark.thorough
def test_a_target_of_another_architecture(tmp_path: Path) -> None:
    summary = train_medusa(medusa_config(tmp_path, tiny_gpt2(tmp_path)))
    assert summary["finished"]
    assert summary["held_out"]["stories"]["tokens"] > 0


@pytest.mark.thorough
def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(tmp_path)
    whole = medusa_config(tmp_path, target, out=str(tmp_path / "whole"), positions=0.5)
    train_medusa(whole)
    config = medusa_config(tmp_path, target, out=str(tmp_path / "parts"), positions=0.5)
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGINT)
        assert not train_medusa(config)["finished"]
    summary = train_medusa(medusa_config(tmp_path, target, out=str(tmp_path / "parts"), positions=0.5, resume=True))
    assert summary["finished"]
    assert losses(str(tmp_path / "parts")) == losses(str(tmp_path / "whole"))
    logs = [(tmp_path / name / "heads.jsonl").read_text(encoding="utf-8").splitlines() for name in ("whole", "parts")]
    assert {json.loads(line)["step"]: line for line in logs[1]} == dict(enumerate(logs[0]))
    one, other = (read_heads(tmp_path / name / "model").heads.weights for name in ("whole", "parts"))
    assert torch.equal(one, other)
    with pytest.raises(InputError, match="heads is 3"):
        train_medusa(medusa_config(tmp_path, target, out=str(tmp_path / "parts"), heads=3, resume=True))


@pytest.mark.thorough
def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(tmp_path)
    config = medusa_config(tmp_path, target, save_minutes=0.0)
    real, written = torch.save, []

    def full(state: Any, file: Any) -> None:
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        written.append(state["progress"]["step"])
        real(state, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(LoadError, match=r"No space left on device.*--resume"):
        train_medusa(config)
    monkeypatch.undo()
    kept = checkpoints(Path(config.loop.out) / "checkpoints")
    assert [int(path.stem.split("-")[1]) for path in kept] == [2, 3]
    assert not list((Path(config.loop.out) / "checkpoints").glob("*.partial"))
    assert train_medusa(medusa_config(tmp_path, target, resume=True))["finished"]


@pytest.mark.thorough
def test_joint_training_tunes_a_copy_of_the_target(tmp_path: Path) -> None:
    """Two stages; the target's own files stay, and the heads belong to the tuned copy."""
    pytest.importorskip("peft", reason="joint training needs peft")
    target = tiny_target(tmp_path)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    config = medusa_config(tmp_path, target, joint=True, lora_rank=2, tokens=20 * 64, heads_first=0.5, lr=0.02)
    summary = train_medusa(config)
    assert before == {path.name: path.read_bytes() for path in target.iterdir()}
    tuned = tmp_path / "medusa" / "target"
    assert summary["base"] == str(tuned)
    old, new = (load_model(str(place), dtype="float32", device="cpu").model.state_dict() for place in (target, tuned))
    assert old.keys() == new.keys()
    changed = [name for name in old if not torch.equal(old[name], new[name])]
    assert any("q_proj" in name for name in changed)
    assert not any("embed" in name or "norm" in name for name in changed)
    llm = LLM(str(tuned), f"medusa:{summary['model']}", compile=False, strict=True, dtype="float32")
    plain = LLM(str(tuned), "none", compile=False, dtype="float32")
    values = SamplingParams(max_new_tokens=20, gamma=2)
    texts = [one.generate("Once upon a time", values).token_ids for one in (llm, plain)]
    assert texts[0] == texts[1]
    stopped = medusa_config(tmp_path, target, out=str(tmp_path / "again"), joint=True, lora_rank=2)
    assert train_medusa(stopped)["finished"], "adapters of the run before are not in the way"


def test_short_held_out_texts_are_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 tokens or more, with the end token in front."""

    class AnsweredError(Exception):
        pass

    def answer(llm: LLM, prompts: list[list[int]], **more: Any) -> None:
        raise AnsweredError(list(map(len, prompts)))

    monkeypatch.setattr("sakiyomi.train.medusa.continuations", answer)
    target, short = tiny_target(tmp_path), tmp_path / "short.jsonl"
    short.write_text("".join(json.dumps({"tokens": [5] * count}) + "\n" for count in (6, 7, 20)), encoding="utf-8")
    with pytest.raises(AnsweredError, match=re.escape("[8, 21]")):
        train_medusa(medusa_config(tmp_path, target, valid=(f"short={short}",)))


@pytest.mark.thorough
def test_without_held_out_data_some_is_held_back(tmp_path: Path) -> None:
    data = tmp_path / "long.jsonl"
    text = [" ".join(stories(4, seed=i)) for i in range(40)]
    data.write_text("".join(json.dumps({"text": one}) + "\n" for one in text), encoding="utf-8")
    target = tiny_target(tmp_path)
    summary = train_medusa(medusa_config(tmp_path, target, data=(str(data),), valid=()))
    assert summary["held_back"] == 2
    assert "held_back" in summary["held_out"]


# ---------------------------------------------------------------- what is learnt


@pytest.mark.parametrize(("own", "kept"), [(0, 11), (3, 11), (1, 7), (3, 7)])
def test_the_loss_is_the_slow_sum(own: int, kept: int) -> None:
    """Head k learns the token k + 2 places on, tokens that do not count teach nothing, later heads weigh less.

    Of a cut vocabulary the tokens that are not proposed teach nothing either.
    """
    torch.manual_seed(0)
    heads = MedusaHeads(HeadsShape(3, 1, 8, kept, own))
    with torch.no_grad():
        heads.weights.normal_()
        if heads.own is not None:
            heads.own.normal_()
    known = torch.randperm(11)[:kept].sort().values
    heads.token_map = known if kept < 11 else None
    weight, hidden = torch.randn(11, 8), torch.randn(2, 9, 8)
    rows = torch.randint(0, 11, (2, 10))
    rows[0, :6] = ~rows[0, :6]
    config = TrainMedusa.of(target="x", out="x", data=("x",), heads=3, head_decay=0.5)
    loss, means = guess_loss(config, heads, hidden, rows, weight, 0)
    logits = heads(hidden.flatten(0, 1), weight).view(3, 2, 9, kept)
    place = {token: at for at, token in enumerate(known.tolist())}
    rows = torch.tensor([[place.get(token, -1) for token in row] for row in rows.tolist()])
    expected, each = torch.zeros(()), []
    for k in range(3):
        terms = [
            F.cross_entropy(logits[k, b, t], rows[b, t + k + 2])
            for b in range(2)
            for t in range(9 - 3)
            if rows[b, t + k + 2] >= 0
        ]
        each.append(float(torch.stack(terms).mean().detach()))
        expected = expected + 0.5**k * torch.stack(terms).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert means[:, 0].tolist() == pytest.approx(each, rel=1e-5)
    for k in range(3):
        labels = rows[:, k + 2 : k + 8].flatten()
        guesses = logits[k, :, :6].flatten(0, 1).topk(5).indices[labels >= 0] == labels[labels >= 0, None]
        assert means[k, 1:].tolist() == pytest.approx(guesses.cumsum(1).float().mean(0).tolist())
    loss.backward()
    mine = [parameter.grad.clone() for parameter in heads.parameters() if parameter.grad is not None]
    heads.zero_grad()
    expected.backward()
    for one, other in zip(mine, [p.grad for p in heads.parameters() if p.grad is not None], strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_pieces_of_logits_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    features, head = torch.randn(2, 50, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    labels, weights = torch.randint(0, 30, (2, 50)), torch.rand(2, 50).round()
    found = []
    for size in (1 << 20, 60):
        monkeypatch.setattr("sakiyomi.train.losses.LOGITS_AT_ONCE", size)
        loss, _ = heads_loss(features, head, labels, weights)
        found.append((loss, *torch.autograd.grad(loss, (features, head))))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_a_head_for_all_has_one_gradient() -> None:
    """Its casts and gradients are the largest tensors of a step: one of each, and none for each head's head."""
    features, head = torch.randn(3, 5, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    kept: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = heads_loss(features, head, torch.randint(0, 30, (3, 5)), torch.ones(3, 5))
    loss.backward()
    assert kept.count(head.shape) == 1 and head.grad is not None


def test_the_hidden_states_are_what_the_head_reads_and_come_from_disk(tmp_path: Path) -> None:
    model = tiny_llama().bfloat16()
    backbone = Backbone(model)
    ids = torch.randint(0, 320, (5, 16))
    with torch.no_grad():
        expected = model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    kept = HiddenStates(backbone, tmp_path, limit_bytes=3 * 16 * 32 * 2)
    for _ in range(2):
        assert torch.equal(kept(ids), expected)
    kept.close()
    assert (kept.computed, kept.found) == (5 + 2, 3), "what is beyond the limit is computed each time"
    assert not list(tmp_path.iterdir()), "the file goes with the process"


def test_a_row_that_comes_twice_in_a_batch_is_kept_once(tmp_path: Path) -> None:
    backbone = Backbone(tiny_llama().bfloat16())
    ids = torch.randint(0, 320, (3, 16))
    plain, kept = HiddenStates(backbone, tmp_path), HiddenStates(backbone, tmp_path, limit_bytes=1 << 20)
    for rows in ([0, 1, 0, 1], [2, 1], [0, 2, 1]):
        assert torch.equal(kept(ids[rows]), plain(ids[rows]))
    kept.close()


@pytest.mark.thorough
@pytest.mark.parametrize("joint", [False, True])
def test_without_mixed_precision(joint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if joint:
        pytest.importorskip("peft", reason="joint training needs peft")
    seen, compute = set[torch.dtype](), HiddenStates._compute

    def noted(self: HiddenStates, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        found = compute(self, rows)
        seen.add(found[0].dtype)
        return found

    monkeypatch.setattr(HiddenStates, "_compute", noted)
    monkeypatch.setattr("sakiyomi.train.config.multiplies_bf16", lambda: False)
    more: dict[str, Any] = {"joint": True, "heads_first": 0.5} if joint else {}
    assert train_medusa(medusa_config(tmp_path, tiny_target(tmp_path), **more))["finished"]
    assert seen == {torch.float32}, "of the target, too"


@pytest.mark.thorough
def test_a_log_that_was_cut_off_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGINT)
        train_medusa(medusa_config(tmp_path, target))
    with (tmp_path / "medusa" / "heads.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')
    assert train_medusa(medusa_config(tmp_path, target, resume=True))["finished"]


# ---------------------------------------------------------------- data


def test_of_a_chat_the_assistants_tokens_count() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    messages = [("user", "Say one."), ("assistant", "One."), ("user", "Say two."), ("assistant", "Two.")]
    chat = encode_chat(tokenizer, messages)
    assert chat is not None
    counted = tokenizer.decode([token for token in chat.tolist() if token >= 0])
    assert counted == "One.</assistant>Two.</assistant>"
    text = tokenizer.decode(token_ids(chat).tolist())
    assert text == "<user>Say one.</user><assistant>One.</assistant><user>Say two.</user><assistant>Two.</assistant>"
    prompts = chat_prompts(tokenizer, messages)
    assert [tokenizer.decode(prompt) for prompt in prompts] == [
        "<user>Say one.</user><assistant>",
        "<user>Say one.</user><assistant>One.</assistant><user>Say two.</user><assistant>",
    ]
    # What stands before a reply is what the model is asked with.
    assert token_ids(chat)[: len(prompts[0])].tolist() == prompts[0]


def test_chats_without_a_template() -> None:
    tokenizer = tiny_tokenizer()
    chat = encode_chat(tokenizer, [("user", "Hello."), ("assistant", "Hi.")])
    assert chat is not None
    assert tokenizer.decode(token_ids(chat).tolist()) == "USER: Hello.\nASSISTANT: Hi.\n<|end|>"
    assert tokenizer.decode([token for token in chat.tolist() if token >= 0]) == " Hi.\n<|end|>"


def test_the_kinds_of_records_and_files(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    path = tmp_path / "all.jsonl.gz"
    records: list[Any] = [
        {"text": "A tale."},
        {"tokens": [5, 6, 7], "prompt": 2},
        {"conversations": CHAT},
        {"messages": [{"role": "user", "content": "Hi."}]},
    ]
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))
    found = read_counted(path, tokenizer, 320)
    assert len(found) == 3, "a chat in which the assistant says nothing is passed over"
    assert [~5, ~6, 7] in [document.tolist() for document in found]
    (tmp_path / "list.json").write_text(json.dumps([{"conversations": CHAT}]), encoding="utf-8")
    assert len(read_counted(tmp_path / "list.json", tokenizer, 320)) == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": \n', "line 2 is not JSON"),
        ("a.json", '[{"text": "x"},\n\n}', "line 3 is not JSON"),
        ("a.json", '{"text": "x"}', "expected a list of objects"),
        ("a.jsonl", '["x"]\n', "line 1 holds a list"),
        ("a.jsonl", '{"conversations": [{"from": "cat", "value": "x"}]}\n', "line 1 has a message from 'cat'"),
        ("a.jsonl", '{"conversations": [{"from": "gpt", "value": 3}]}\n', "line 1 .* int content"),
        ("a.jsonl", '{"tokens": [1, 999]}\n', "line 1 .* the model knows 320"),
        ("a.jsonl", '{"tokens": [1, 2], "prompt": 3}\n', "line 1 has no"),
        ("a.jsonl", '{"conversations": [{"from": "human", "value": "x"}]}\n', "no assistant says anything"),
        ("a.jsonl", "\n", "holds no document"),
    ],
)
def test_wrong_data_is_named_by_its_line(name: str, content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises((LoadError, InputError), match=words):
        read_counted(tmp_path / name, tiny_tokenizer(), 320)


def test_data_that_is_too_short_or_without_turns_is_refused(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    short = tmp_path / "short.jsonl"
    short.write_text('{"tokens": [1, 2]}\n', encoding="utf-8")
    with pytest.raises(InputError, match="3 tokens that count"):
        train_medusa(medusa_config(tmp_path, target, data=(str(short),)))
    silent = chat_file(tmp_path / "silent.jsonl", CHAT[:1])
    with pytest.raises(InputError, match="no assistant says anything"):
        train_medusa(medusa_config(tmp_path, target, data=(str(silent),)))
    with pytest.raises(InputError, match="too few documents to hold some back"):
        train_medusa(
            medusa_config(tmp_path, target, data=(str(story_file(tmp_path / "few.jsonl", count=5)),), valid=())
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"device": "cuda:77"}, "torch sees"),
        ({"precision": "fp16"}, "precision is 'fp16'"),
    ],
)
def test_a_device_or_precision_that_is_not_there(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        train_medusa(medusa_config(tmp_path, tiny_target(tmp_path), **changes))


@pytest.mark.thorough
def test_heads_learn_from_chats(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    chats = chat_file(tmp_path / "chats.jsonl", *[CHAT] * 20)
    summary = train_medusa(medusa_config(tmp_path, target, data=(str(chats),), valid=(f"chats={chats}",)))
    assert summary["finished"]
    assert summary["held_out"]["chats"]["tokens"] > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 0}, "heads is 0"),
        ({"head_decay": 1.5}, "head_decay is 1.5"),
        ({"row_tokens": (32, 64)}, "one length"),
        ({"row_tokens": (8,), "heads": 8}, "more than 9"),
        ({"precision": "int8"}, "precision is 'int8'"),
        ({"data": ()}, "data not given"),
        ({"joint": True, "cache_gib": 1.0}, "cache_gib is 1.0"),
        ({"lora_rank": 4}, "without --joint"),
    ],
)
def test_settings_out_of_range(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        medusa_config(tmp_path, tmp_path, **changes)


# ---------------------------------------------------------------- answers of the target


def distill_config(folder: Path, target: Path, **changes: Any) -> TrainDistillData:
    settings: dict[str, Any] = {
        "out": str(folder / "made" / "answers.jsonl"),
        "target": str(target),
        "data": (str(story_file(folder / "train.jsonl")),),
        "samples": 8,
        "batch": 4,
        "tokens": 8,
        "device": "cpu",
    }
    return TrainDistillData.of(**(settings | changes))


def test_answers_are_the_targets_and_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(tmp_path)
    config = distill_config(tmp_path, target)
    assert train_distill_data(config)["written"] == 8
    whole = Path(config.out).read_text(encoding="utf-8")
    lines = whole.splitlines(keepends=True)
    for killed in (lines[4][:9], "".join(lines[4:7])):  # within a line, within a batch
        Path(config.out).write_text("".join(lines[:4]) + killed, encoding="utf-8")
        assert train_distill_data(config)["written"] == 4
        assert Path(config.out).read_text(encoding="utf-8") == whole
    record = json.loads(lines[0])
    llm = LLM(str(target), "none", compile=False)
    text = llm.generate([record["tokens"][: record["prompt"]]], SamplingParams(max_new_tokens=8))[0].token_ids
    assert record["tokens"][record["prompt"] :] == text, "the first batches are greedy"
    monkeypatch.setattr(
        "sakiyomi.train.samples.sample_continuations", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    done = train_distill_data(distill_config(tmp_path, target, samples=12))
    assert (done["finished"], done["samples"]) == (False, 8)
    with pytest.raises(InputError, match="was written with seed 1"):
        train_distill_data(distill_config(tmp_path, target, seed=2))


def test_batches_of_answers_come_in_any_order(tmp_path: Path) -> None:
    """A later one waits under its number, also for the next run; the file is that of one engine."""
    target = tiny_target(tmp_path)
    config = distill_config(tmp_path, target, samples=16)
    train_distill_data(config)
    out, record = Path(config.out), Path(config.out).with_suffix(".json")
    whole = out.read_bytes()
    assert sorted(path.name for path in out.parent.iterdir()) == ["answers.json", "answers.jsonl"]
    out.unlink()
    done: list[int] = []

    def backwards(_: str) -> Write:
        def write(batches: Iterable[Asked]) -> Iterator[tuple[Asked, list[list[int]]]]:
            for asked, texts in list(by(llm)(batches))[::-1]:
                if len(done) == 3:
                    raise KeyboardInterrupt
                done.append(asked.seed)
                yield asked, [list(text) for text in texts]

        return write

    llm = load_writer(config)[0]
    assert not train_distill_data(config, "", backwards)["finished"]
    assert done == [3, 2, 1] and out.read_bytes() == b"" and record.exists()
    with pytest.raises(InputError, match="was written with seed 1"):
        train_distill_data(distill_config(tmp_path, target, seed=2))
    assert train_distill_data(config)["samples"] == 16
    assert out.read_bytes() == whole and not list(out.parent.glob("*.parts"))


def test_answers_to_chats_are_training_data(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    chats = chat_file(tmp_path / "chats.jsonl", CHAT, CHAT[:3])
    config = distill_config(tmp_path, target, data=(str(chats),))
    train_distill_data(config)
    tokenizer = load_model(str(target), dtype="float32", device="cpu").tokenizer
    for line in Path(config.out).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        assert tokenizer.decode(record["tokens"][: record["prompt"]]).endswith("ASSISTANT:")
    with pytest.raises(InputError, match="chats and 1 records"):
        (tmp_path / "both.jsonl").write_text(
            chats.read_text(encoding="utf-8") + '{"text": "A tale."}\n', encoding="utf-8"
        )
        train_distill_data(distill_config(tmp_path, target, data=(str(tmp_path / "both.jsonl"),)))
    found = read_counted(Path(config.out), tokenizer, 300)
    assert all((document < 0).any() and (document >= 0).any() for document in found)


# ---------------------------------------------------------------- ranks and trees


def test_ranks_are_those_of_the_tokens_that_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Place p is behind token p of prompt and text; head k guesses the token k + 2 places on."""
    ids = [3, 4, 5, 6, 7, 8]
    logits = torch.zeros(2, len(ids), 20)
    logits[0, 1, [6, 2]] = torch.tensor([2.0, 3.0])  # behind token 4: head 1 ranks the coming 6 second
    logits[1, 1, 7] = 1.0  # head 2 has the coming 7 first
    logits[0, 2, 9] = 1.0  # behind token 5: the coming 7 is one of the rest
    logits[0, 3, 8] = 5.0

    def places(text: Sequence[int]) -> torch.Tensor:
        return torch.arange(float(len(text)))[:, None]

    def guess(hidden: torch.Tensor) -> torch.Tensor:
        return logits[:, hidden[:, 0].long()]

    ranks = rank_texts(places, guess, [ids[:2]], [ids[2:]])
    assert ranks.texts[0].tolist() == [[1, 0], [1, 0], [0, -1]]
    monkeypatch.setattr("sakiyomi.drafters.medusa_heads.ranks.PLACES", 2)
    assert rank_texts(places, guess, [ids[:2]], [ids[2:]]).texts[0].tolist() == ranks.texts[0].tolist()
    far = torch.arange(20.0).flip(0)
    worst = rank_texts(places, lambda hidden: far.expand(2, len(hidden), 20), [[19, 19]], [[19] * 4])
    assert worst.texts[0].tolist()[0] == [LISTED, LISTED]


def test_the_best_tree_is_that_of_all_levels() -> None:
    levels = [[0.6, 0.2, 0.1], [0.5, 0.3], [0.4]]
    paths = best_tree(levels, 6, 3)
    assert paths == [(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (2,)]
    assert expected_tree_tokens(levels, paths) == pytest.approx(1 + 0.6 + 0.3 + 0.2 + 0.18 + 0.12 + 0.1)
    assert best_tree([[0.5]], 5, 1) == [(0,)]
    with pytest.raises(InputError, match="largest first"):
        best_tree([[0.5], [0.1, 0.2]], 3, 2)


def test_a_replay_counts_rounds() -> None:
    text = np.array([[0, 0], [5, 0], [1, 0], [0, -1]], np.int16)
    ranks = Ranks([text])
    assert ranks.replay([]) == 1.0
    assert ranks.replay([(0,), (0, 0)]) == pytest.approx(4 / 2)  # three tokens, then place 3: two rounds
    assert ranks.replay([(0,)]) == pytest.approx(4 / 3)
    assert ranks.accuracies()[0][:3] == [0.5, 0.25, 0.0]

"""Weights on disk: the same text as in memory, little memory held, and clear words where files fail.

The oracle of every text is the same model in memory.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import rows as script
from architectures import VOCAB, greedy, model_of, prompt
from drafters import Branching, Scripted, texts_of
from sakiyomi import LLM, InputError, LoadError, MemoryLimitError, SamplingParams
from sakiyomi.drafters.draft_length import FAR, FAR_NODES, MOST_NODES, AutoSize, Costs
from sakiyomi.evaluation.bench import suites
from sakiyomi.evaluation.bench.config import BenchConfig
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.loading import fit, load_model, offload
from sakiyomi.model_executor.loading.stream import Extent, WeightStream
from toys import character_tokenizer, save_model, tiny_llama

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
PROMPTS = [prompt(11, 1), prompt(3, 2)]
NEW = 16


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models would stay in memory as a whole."""
    monkeypatch.setattr("sakiyomi.model_executor.loading.stream.SMALL", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", model_of("llama"), TOKENIZER)


def wanted(name: str = "llama", count: int = NEW) -> list[list[int]]:
    return [greedy(model_of(name), tokens, count) for tokens in PROMPTS]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NEW, "ignore_eos": True} | values))


def texts(llm: LLM, **values: Any) -> list[list[int]]:
    return [out.token_ids for out in llm.generate(PROMPTS, params(**values))]


def weights(llm: LLM) -> WeightStream:
    stream = llm.target.weights.stream
    assert stream is not None
    return stream


# ---------------------------------------------------------------- text


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen2", "falcon"])
def test_greedy_text_is_that_of_the_model_in_memory(name: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / name, model_of(name), TOKENIZER)
    expected = wanted(name)
    guesses = texts_of(PROMPTS, expected)
    for draft in ("none", Scripted(guesses, "sometimes", VOCAB), Branching(guesses, "sometimes", VOCAB)):
        llm = LLM(os.fspath(folder), draft, offload="disk")
        assert llm.target.offloaded
        assert all(parameter.is_meta for parameter in llm.target.module.parameters())
        assert texts(llm, gamma=3) == expected
        assert all(parameter.is_meta for parameter in llm.target.module.parameters()), "something stayed in memory"


@pytest.mark.few(1)
@pytest.mark.parametrize("values", [{"gamma": 5, "nodes": 64}, {"gamma": "auto"}, {"gamma": 3, "tree": "chain"}])
@pytest.mark.parametrize(
    "sampled", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "seed": 4, "top_p": 0.9}]
)
def test_text_with_a_draft_model(values: dict[str, Any], sampled: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """Greedy, and sampled by the coupled rule: the same seed gives the same text as in memory, trees included."""
    draft = save_model(tmp_path / "draft", tiny_llama(VOCAB, 1, 16, seed=1), TOKENIZER)
    expected = texts(LLM(os.fspath(folder), "none", compile=False), **sampled)
    llm = LLM(os.fspath(folder), f"model:{draft}", offload="disk", compile=False)
    assert texts(llm, **sampled, **values) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_read_in_place_whatever_their_dtype(dtype: str, tmp_path: Path) -> None:
    """Stored in 16 bits and wanted in 32: converted as they come, and no second copy is written anywhere."""
    model = tiny_llama(VOCAB).to(torch.bfloat16)
    folder = save_model(tmp_path / "model", model, TOKENIZER)
    llm = LLM(os.fspath(folder), "none", offload="disk", dtype=dtype, compile=False)
    assert llm.target.dtype == getattr(torch, dtype)
    assert weights(llm).files == [folder / "model.safetensors"]
    if dtype == "float32":
        assert texts(llm) == [greedy(model.float(), tokens, NEW) for tokens in PROMPTS]


def test_a_pair_loaded_with_a_device_map(folder: Path, tmp_path: Path) -> None:
    """As transformers loads it, some layers here and some in files; the user's own object is not changed."""
    places: dict[str, Any] = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.rotary_emb": "cpu"} | {f"model.layers.{i}": "disk" if i else "cpu" for i in range(3)}
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=str(tmp_path / "files"))
    hooks = {name: module._hf_hook for name, module in model.named_modules() if hasattr(module, "_hf_hook")}
    maps = {name: getattr(hook, "weights_map", None) for name, hook in hooks.items()}
    llm = LLM((model, TOKENIZER), Branching(texts_of(PROMPTS, wanted()), "sometimes", VOCAB))
    assert texts(llm, gamma=4) == wanted()
    assert len(weights(llm).extents) == sum(len(list(layer.parameters())) for layer in model.model.layers[1:])
    assert {name: getattr(hook, "weights_map", None) for name, hook in hooks.items()} == maps
    assert [greedy(model, tokens, NEW) for tokens in PROMPTS] == wanted()


@pytest.mark.thorough
def test_a_pair_whose_weights_accelerate_wrote_out(tmp_path: Path) -> None:
    """``disk_offload`` has a file a tensor, more of them than are kept open, in a format of its own."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny_llama(VOCAB, layers=8).to(torch.bfloat16)
    expected = [greedy(model, tokens, NEW) for tokens in PROMPTS]
    accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    llm = LLM((model, TOKENIZER), "none", compile=False)
    assert len(weights(llm).files) > 64
    assert texts(llm) == expected


def test_a_pair_with_tied_weights(tmp_path: Path) -> None:
    """Embedding and head are one matrix in the file: rows of it for the one, the whole for the other."""
    model = tiny_llama(VOCAB, tie_word_embeddings=True)
    folder = save_model(tmp_path / "model", model, TOKENIZER)
    llm = LLM(os.fspath(folder), "none", offload="disk", compile=False)
    assert texts(llm) == [greedy(model, tokens, NEW) for tokens in PROMPTS]
    held = weights(llm).extents
    assert held["lm_head.weight"].offset == held["model.embed_tokens.weight"].offset


def test_a_model_that_is_packed_layer_by_layer_is_not_offloaded(folder: Path) -> None:
    """Its hooks are gone when it runs: graphs, sizes and planning are those of any model in memory."""
    llm = LLM(os.fspath(folder), "none", quantize="int8", compile=False)
    assert not llm.target.offloaded and llm.target.weights.stream is None


def test_weights_kept_in_memory_by_hooks_are_not_copied() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny_llama(VOCAB)
    expected = [greedy(model, tokens, NEW) for tokens in PROMPTS]
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    llm = LLM((model, TOKENIZER), "none")
    ours = {
        name: module._hf_hook for name, module in llm.target.module.named_modules() if type(module) is torch.nn.Linear
    }
    for name, module in model.named_modules():
        if name in ours:
            assert ours[name].weights_map["weight"].data_ptr() == module._hf_hook.weights_map["weight"].data_ptr()
    assert texts(llm) == expected


def test_early_exit_runs_the_first_layers_alone(folder: Path) -> None:
    llm = LLM(os.fspath(folder), "early-exit:1", offload="disk")
    read, before = weights(llm), weights(llm).bytes_read
    llm.draft.model.score([SequenceRows(0, 0, [1])]).logits if llm.target.cache.room else None  # type: ignore[union-attr]
    assert texts(llm, gamma=2) == wanted()
    assert read.bytes_read > before


@pytest.mark.thorough
def test_experts_are_written_out_once_and_go_with_the_model(tmp_path: Path) -> None:
    """What transformers converts cannot be read in place."""
    folder, room = save_model(tmp_path / "model", model_of("mixtral"), TOKENIZER), tmp_path / "room"
    room.mkdir()
    with pytest.raises(LoadError, match="pass a folder for them"):
        LLM(os.fspath(folder), "none", offload="disk")
    assert not LLM(os.fspath(folder), "none", offload="auto", compile=False).target.offloaded  # it fits
    llm = LLM(os.fspath(folder), "none", offload=room)
    assert texts(llm) == wanted("mixtral")
    assert list(room.iterdir())
    del llm
    texts(LLM(os.fspath(save_model(tmp_path / "other", model_of("llama"), TOKENIZER)), "none", offload="disk"))
    gc.collect()  # the model of a thread's last pass lives until its next one
    assert not list(room.iterdir())


def test_auto_keeps_what_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LLM(os.fspath(folder), "none", offload="auto", compile=False)
    assert not whole.target.offloaded
    size = sum(parameter.nbytes for parameter in model_of("llama").parameters())
    monkeypatch.setattr(offload, "available_bytes", lambda device="cpu": size)
    part = LLM(os.fspath(folder), "none", offload="auto", compile=False)
    parameters = list(part.target.module.parameters())
    assert part.target.offloaded and any(p.is_meta for p in parameters) and not all(p.is_meta for p in parameters)
    assert texts(whole) == texts(part) == wanted()


# ---------------------------------------------------------------- reading


def test_a_pass_reads_each_weight_once_and_of_the_embedding_a_few_rows(folder: Path) -> None:
    llm = LLM(os.fspath(folder), "none", offload="disk", compile=False)
    stream = weights(llm)
    texts(llm)
    before = stream.bytes_read
    llm.target.score([SequenceRows(0, 0, [5, 6])])
    embedding = stream.extents["model.embed_tokens.weight"].nbytes
    others = sum(extent.nbytes for extent in stream.extents.values()) - embedding
    assert stream.bytes_read - before == others + 2 * embedding // VOCAB


def stream_of(path: Path, count: int, ahead: int) -> tuple[WeightStream, list[torch.Tensor]]:
    tensors = [torch.randn(64, 4 + i % 3) for i in range(count)]
    extents, offset = {}, 0
    with path.open("wb") as file:
        for i, tensor in enumerate(tensors):
            file.write(tensor.numpy().tobytes())
            extents[str(i)] = Extent(path, offset, torch.float32, tuple(tensor.shape), torch.float32)
            offset += tensor.nbytes
    return WeightStream(extents, ahead=ahead), tensors


def test_what_follows_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    stream, tensors = stream_of(tmp_path / "weights", 12, ahead=6000)
    for lap in range(3):
        for i, tensor in enumerate(tensors):
            if lap > 1 or (lap and i):  # what follows the last one is known when it has followed
                assert str(i) in stream.ahead.coming
            assert torch.equal(stream.take(str(i)), tensor)
            assert sum(stream.extents[name].nbytes for name in stream.ahead.coming) <= 6000
    for i in (3, 4, 9, 10, 0, 1):  # another way through them
        assert torch.equal(stream.take(str(i)), tensors[i])
    assert torch.equal(stream.rows("2", [5, 0]), tensors[2][[5, 0]])


def test_a_tensor_in_use_stays(tmp_path: Path) -> None:
    stream, tensors = stream_of(tmp_path / "weights", 12, ahead=6000)
    views = [stream.take(str(i))[3:7] for i in range(12)]
    for path in stream.files:
        path.unlink()
    for _ in range(2):
        for i in range(12):
            stream.take(str(i))
    assert all(torch.equal(view, right[3:7]) for view, right in zip(views, tensors, strict=True))


def test_small_tensors_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, tensors = stream_of(tmp_path / "weights", 12, ahead=6000)
    monkeypatch.setattr("sakiyomi.model_executor.loading.stream.SMALL", 1024)  # those of 64 x 4
    for _ in range(3):
        for i, tensor in enumerate(tensors):
            assert torch.equal(stream.take(str(i)), tensor)
    small = sum(tensor.nbytes for tensor in tensors if tensor.nbytes == 1024)
    large = sum(tensor.nbytes for tensor in tensors if tensor.nbytes > 1024)
    assert stream.bytes_read == small + 3 * large


# ---------------------------------------------------------------- planning


def test_large_trees_are_considered_where_weights_are_fetched(folder: Path) -> None:
    drafter = Branching(texts_of(PROMPTS, wanted()), "always", VOCAB)
    seen: list[Costs] = []
    for how, nodes in (({"offload": "disk"}, FAR_NODES), ({}, MOST_NODES)):
        llm = LLM(os.fspath(folder), drafter, compile=False, **how)
        seen.append(llm.engine._speculation._costs(1))
        assert seen[-1].nodes == nodes
    far = Costs(lambda rows: 1.0, 0.001, 0.001, depth=FAR, nodes=FAR_NODES)
    asked = AutoSize(trees=True).next(lambda: far)
    assert asked.worth is not None
    assert (asked.worth.depth, asked.nodes) == (FAR, FAR_NODES)
    chain = AutoSize(trees=False, start=0.95).next(lambda: far)
    assert 24 <= chain.depth <= FAR


def test_a_pass_that_reads_everything_is_not_tried_out(folder: Path) -> None:
    """One pass of one row is timed; more rows are taken to cost as much until a round has shown what they do."""
    llm = LLM(os.fspath(folder), "none", offload="disk", compile=False)
    passes: list[int] = []
    run = llm.target.run
    llm.target.run = lambda plan, size, **how: (passes.append(size), run(plan, size, **how))[1]  # type: ignore[method-assign, func-returns-value, assignment]
    first = llm.target.pass_seconds(1)
    assert set(passes) == {1}
    assert llm.target.pass_seconds(129) == llm.target.pass_seconds(40) == first
    assert set(passes) == {1}
    llm.target.clock._seconds[128, False] = 3 * first
    assert llm.target.pass_seconds(100) == 3 * first
    assert llm.target.pass_seconds(40) == first


# ---------------------------------------------------------------- what goes wrong


def test_a_file_that_is_cut_off_ends_the_request_and_no_more(folder: Path) -> None:
    llm = LLM(os.fspath(folder), "none", offload="disk", compile=False)
    whole = (folder / "model.safetensors").read_bytes()
    steps = iter(llm.stream(PROMPTS[0], params()))
    next(steps)
    os.truncate(folder / "model.safetensors", len(whole) // 2)
    with pytest.raises(LoadError, match=r"cannot be read any more \(it ends after .* bytes\).*put it back"):
        list(steps)
    assert not llm.engine.busy and llm.target.cache.free == llm.target.cache.max_slots
    with pytest.raises(LoadError, match="cannot be read any more"):
        texts(llm)
    (folder / "model.safetensors").write_bytes(whole)
    assert texts(llm) == wanted()


def test_requests_that_wait_go_on_when_the_file_is_back(folder: Path) -> None:
    """The pass that failed ends those in it; who was not in it is served."""
    llm = LLM(os.fspath(folder), "none", offload="disk", compile=False, max_batch=1)
    whole = (folder / "model.safetensors").read_bytes()
    first, second = (llm.engine.submit(tokens, params()) for tokens in PROMPTS)
    os.truncate(folder / "model.safetensors", 100)
    (step,) = llm.engine.step()
    assert step.request == first.id and isinstance(step.error, LoadError)
    (folder / "model.safetensors").write_bytes(whole)
    (done,) = llm.engine.complete([second])
    assert done.token_ids == wanted()[1]


def test_files_that_are_removed_meanwhile_are_still_read(folder: Path) -> None:
    llm = LLM(os.fspath(folder), "none", offload="disk", compile=False)
    shutil.rmtree(folder)
    assert texts(llm) == wanted()


def test_a_removed_folder_of_many_files(tmp_path: Path) -> None:
    """Not all of them are open: it is said which one is missing."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny_llama(VOCAB, layers=8)
    accelerate.disk_offload(model, str(tmp_path / "files"), execution_device=torch.device("cpu"))
    llm = LLM((model, TOKENIZER), "none", compile=False)
    shutil.rmtree(tmp_path / "files")
    with pytest.raises(LoadError, match=r"\.dat cannot be read any more"):
        texts(llm)


def test_a_folder_without_room_or_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, room = save_model(tmp_path / "model", model_of("mixtral"), TOKENIZER), tmp_path / "room"
    room.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
        with pytest.raises(MemoryLimitError, match=r"has 10 bytes free; free some, or pass another folder"):
            load_model(os.fspath(folder), offload=room)
    with monkeypatch.context() as patch:

        def refuse(**_: Any) -> str:
            raise PermissionError(errno.EACCES, "Permission denied")

        patch.setattr(offload.tempfile, "mkdtemp", refuse)
        with pytest.raises(LoadError, match=r"nothing can be written to .*room.*Permission denied.*another folder"):
            load_model(os.fspath(folder), offload=room)
    with monkeypatch.context() as patch:

        def full(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr("transformers.integrations.accelerate.save_file", full)
        with pytest.raises(LoadError, match=r"No space left.*while weights were written to .*room"):
            load_model(os.fspath(folder), offload=room)
    assert not list(room.iterdir()), "something half-written was left"


@pytest.mark.parametrize(
    ("value", "more", "says"),
    [
        ("cpu", {}, "whose memory that is"),
        ("nowhere", {}, "no folder that exists"),
        ("", {}, "expected 'auto'"),
        (7, {}, "expected 'auto'"),
    ],
)
def test_values_that_cannot_be_meant(value: Any, more: dict[str, Any], says: str, folder: Path) -> None:
    with pytest.raises(InputError, match=says):
        LLM(os.fspath(folder), "none", offload=value, **more)


def test_pairs() -> None:
    with pytest.raises(InputError, match="a loaded model is used as it is"):
        LLM((model_of("llama"), TOKENIZER), "none", offload="disk")


def test_a_model_that_does_not_fit_is_told_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "available_bytes", lambda device="cpu": 1000)
    monkeypatch.setattr("sakiyomi.core.memory.available_bytes", lambda device="cpu": 1000)
    with pytest.raises(MemoryLimitError, match="offload='auto'"):
        LLM(os.fspath(folder), "none")


# ---------------------------------------------------------------- what it says of itself


@pytest.mark.thorough
def test_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "offload.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, {})


@pytest.mark.thorough
def test_the_row(folder: Path, tmp_path: Path) -> None:
    """Every line has the text of the first one; tau, speed-up and share belong together; the disk was read."""
    draft = save_model(tmp_path / "draft", tiny_llama(VOCAB, 1, 16, seed=1), TOKENIZER)
    config = BenchConfig(
        target=os.fspath(folder),
        draft=f"model:{draft}",
        dtype="float32",
        compile=False,
        repeats=1,
        count=1,
        max_new_tokens=12,
        prompt_tokens=8,
    )
    found = suites.measure("offload", config, rows=script.ROWS)
    lines = {line["name"]: line for line in found.lines}
    drafted = ["15 nodes, 8 levels", "64 nodes, 16 levels", "128 nodes, 16 levels", "auto"]
    oracle = ["oracle:0.95, gamma 16", "oracle:0.95, gamma 24"]
    assert list(lines) == ["plain", *drafted, *oracle, "transformers plain"]
    assert all(line["equal"] for line in lines.values())
    assert lines["oracle:0.95, gamma 24"]["tau"] > 3
    for line in found.lines[:-1]:
        assert line["share"] == pytest.approx(line["ratio"] / line["tau"])
        assert line["read GB/s"] > 0
    assert found.conditions["disk_gb_per_second"] > 0

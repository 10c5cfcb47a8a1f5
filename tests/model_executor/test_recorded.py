"""Recorded models: logits and texts of the models themselves without their classes, and never a stale recording."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from architectures import CONFIGS, VOCAB, model_of, prompt
from damage import DAMAGES, damaged
from recordings import DTYPES, record
from sakiyomi import LLM, InputError, SamplingParams
from sakiyomi.cache.policies.retaining.formats import fingerprint
from sakiyomi.core.checkpoint import read_checkpoint, read_header
from sakiyomi.core.digests import load_tensors, tokenizer_digest
from sakiyomi.core.embedded import EMBEDDED, embedded
from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.files import cache_folder
from sakiyomi.core.text import profile
from sakiyomi.core.version import __version__
from sakiyomi.engine.chat_template import Dialogue
from sakiyomi.engine.llm import _record_at_the_end
from sakiyomi.engine.rendering import Rendering
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.kernels.build import native
from sakiyomi.model_executor.features import HEAD
from sakiyomi.model_executor.loading import load_model, recorder, recording
from sakiyomi.model_executor.loading.folder import read_tokenizer
from sakiyomi.model_executor.loading.recorded_tokenizer import RecordedTokenizer, recorded_tokenizer
from sakiyomi.model_executor.loading.recording import SHIPPED
from sakiyomi.model_executor.recorded_model import RecordedModel
from sakiyomi.model_executor.runner import ModelRunner
from toys import character_tokenizer, save_model, tiny_llama, unigram_tokenizer, word_piece_tokenizer
from warm import warm

pytestmark = pytest.mark.skipif(native() is None, reason="recordings are of the compiled kernels")
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
NOT_RECORDED: set[str] = set()
"""Models that keep their own attention, so that nothing is traced."""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No recordings but a test's own."""
    monkeypatch.setattr(recording, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(recording, "SHIPPED", "none")
    monkeypatch.delenv("SAKIYOMI_RECORD")


def recorded(target: str | Path) -> LLM:
    """The models, loaded from their recordings."""
    assert LLM(target, "none").record()
    found = LLM(target, "none")
    assert isinstance(found.target.module, RecordedModel)
    return found


def logits(runner: ModelRunner) -> list[torch.Tensor]:
    """Of a prompt's last row, of a tree behind it, and of a batch."""
    with runner.cache.lent(60) as first, runner.cache.lent(60) as second:
        whole = runner.score([SequenceRows(first, 0, prompt(37), prompt=True)], last=True)
        tree = runner.score([SequenceRows(first, 37, prompt(5, 1), (-1, 0, 0, 1, 2))])
        both = [SequenceRows(first, 37, prompt(3, 2)), SequenceRows(second, 0, prompt(6, 3))]
        return [whole.logits.clone(), tree.logits.clone(), runner.score(both).logits.clone()]


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_equal_to_the_last_bit(name: str, dtype: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / name, model_of(name), character_tokenizer())
    own = LLM(folder, "none", dtype=dtype)
    own.record()
    again = LLM(folder, "none", dtype=dtype)
    assert isinstance(again.target.module, RecordedModel) == (name not in NOT_RECORDED)
    assert all(torch.equal(a, b) for a, b in zip(logits(own.target), logits(again.target), strict=True))
    assert own.generate([prompt(9)], GREEDY)[0].token_ids == again.generate([prompt(9)], GREEDY)[0].token_ids
    assert fingerprint(own.target.module, None) == fingerprint(again.target.module, None)
    assert own.engine.stop_ids == again.engine.stop_ids and own.max_context == again.max_context


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passes_have_the_rows_that_they_need(dtype: str, tmp_path: Path) -> None:
    """Or hardly more: nothing has to be proven of a row count before it comes. Rows are equal in all of them."""
    folder, tokens = save_model(tmp_path / "llama", model_of("llama"), character_tokenizer()), prompt(70, 1)
    llm = LLM(folder, "none", dtype=dtype)
    llm.record()
    target = LLM(folder, "none", dtype=dtype).target
    assert isinstance(target.module, RecordedModel)
    assert [target.padded(rows) for rows in (1, 2, 3, 5, 9, 17, 33, 65)] == [1, 2, 3, 5, 10, 20, 40, 80]
    assert all(size < 1.25 * rows for rows in range(1, 128) if (size := target.padded(rows)) > rows)
    with llm.target.cache.lent(80) as slot:
        expected = llm.target.score([SequenceRows(slot, 0, tokens)]).logits.clone()
    with target.cache.lent(80) as slot:
        for rows in range(1, 71):
            found = target.score([SequenceRows(slot, 0, tokens[:rows])]).logits
            assert torch.equal(found, expected[:rows]), rows


def test_hidden_states_of_eager_passes(tmp_path: Path) -> None:
    """They are those of recorded passes."""
    target = recorded(save_model(tmp_path / "llama", model_of("llama"), character_tokenizer())).target
    with target.cache.lent(8) as slot:
        rows = [SequenceRows(slot, 0, prompt(5), prompt=True)]
        for last in (False, True):
            expected = target.score(rows, last=last).features[HEAD].clone()
            with target.eagerly():
                assert torch.equal(target.score(rows, last=last).features[HEAD], expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "qwen3"])
def test_outputs_of_layers_need_no_modules(name: str, tmp_path: Path) -> None:
    """Nor a comparison of every row count; they stay what they are when something else wants the modules."""
    folder = save_model(tmp_path / name, model_of(name), character_tokenizer())
    own, again = LLM(folder, "none").target, recorded(folder).target
    for target in (own, again):
        target.capture([1])
        target.capture([0])
    assert isinstance(again.module, RecordedModel) and again.recorder is not None and 1 in again.recorder.ready
    tokens = [SequenceRows(0, 0, prompt(9), prompt=True)], [SequenceRows(0, 9, prompt(3, 1), (-1, 0, 0))]
    found: list[list[torch.Tensor]] = []
    for target in (own, again, again):
        if len(found) == 2:
            again.unfold()
            assert not isinstance(again.module, RecordedModel)
        with target.cache.lent(16) as slot:
            passes = [target.score([replace(row, slot=slot) for row in rows]) for rows in tokens]
        found.append([one.features[layer].clone() for one in passes for layer in (HEAD, 0, 1)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert not torch.equal(found[0][1], found[0][2])


@pytest.mark.thorough
@pytest.mark.parametrize(("quantize", "dtype"), [("int8", "bfloat16"), ("int4", "float32")])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma3"])
def test_packed_copies_are_equal_to_the_last_bit(name: str, quantize: str, dtype: str, tmp_path: Path) -> None:
    """Loaded by the model's folder, and as a folder of their own."""
    folder = save_model(tmp_path / name, model_of(name), character_tokenizer())
    own = LLM(folder, "none", dtype=dtype, quantize=quantize)  # type: ignore[arg-type]
    assert own.record()
    (copy,) = (path for path in folder.iterdir() if path.is_dir())
    assert LLM(copy, "none").record()
    expected, text = logits(own.target), own.generate([prompt(9)], GREEDY)[0].token_ids
    for again in (LLM(folder, "none", dtype=dtype, quantize=quantize), LLM(copy, "none")):  # type: ignore[arg-type]
        assert isinstance(again.target.module, RecordedModel)
        assert again.target.weights.quantization == own.target.weights.quantization is not None
        assert all(torch.equal(a, b) for a, b in zip(expected, logits(again.target), strict=True))
        assert again.generate([prompt(9)], GREEDY)[0].token_ids == text
    assert (
        LLM(folder, "early-exit:1", dtype=dtype, quantize=quantize).generate([prompt(9)], GREEDY)[0].token_ids == text
    )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tales(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A folder with the recordings of the embedded pair, and a text of it without them."""
    folder = tmp_path_factory.mktemp("tales")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "cache_folder", lambda: folder)
        patch.setattr(recording, "SHIPPED", "none")
        patch.delenv("SAKIYOMI_RECORD")
        plain = LLM("tales", "auto")
        text = plain.generate("Once upon a time", GREEDY).token_ids
        assert not isinstance(plain.target.module, RecordedModel) and plain.record()
    return folder, text


@pytest.mark.thorough
@pytest.mark.parametrize(
    "draft",
    [
        *("auto", "prompt-lookup", "medusa:tales-medusa", "eagle:tales-eagle", "block:tales-block"),
        *("early-exit:4", "self-evicted"),
    ],
)
def test_every_drafter_runs_beside_it(
    draft: str, tales: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that want the model's modules get them."""
    monkeypatch.setattr(recording, "cache_folder", lambda: tales[0])
    found = LLM("tales", draft)
    assert found.generate("Once upon a time", GREEDY).token_ids == tales[1]
    if draft not in ("early-exit:4", "self-evicted"):
        assert isinstance(found.target.module, RecordedModel)


@pytest.mark.thorough
def test_neither_transformers_nor_torchs_compiler_is_imported(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from sakiyomi import LLM, SamplingParams
from sakiyomi.model_executor.loading import recording
recording.cache_folder = lambda: Path(sys.argv[1])
recording.SHIPPED = "none"
llm = LLM("tales")
print(llm.generate("Once", SamplingParams(max_new_tokens=20)).text)
llm.record()
print([name for name in ("transformers", "torch._dynamo") if name in sys.modules], file=sys.stderr)
"""
    command = ["-W", "ignore", "-c", script, str(tmp_path)]
    runs = [
        subprocess.run([*start, *command], capture_output=True, encoding="utf-8", check=True)
        for start in (warm(), (sys.executable,))  # the one that records imports everything anyway
    ]
    assert runs[0].stdout == runs[1].stdout
    assert "transformers" in runs[0].stderr.splitlines()[-1]
    assert runs[1].stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("hinders", ["nothing", "setting", "no text", "failure"])
def test_a_program_records_when_it_ends(hinders: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is switched off, there was no text, or the program failed."""
    found = LLM(save_model(tmp_path / "toy", tiny_llama(), character_tokenizer()), "none")
    monkeypatch.setattr("sakiyomi.engine.llm._alive", {found})
    if hinders == "setting":
        monkeypatch.setenv("SAKIYOMI_RECORD", "off")
    if hinders == "failure":
        monkeypatch.setattr(sys, "last_type", ZeroDivisionError, raising=False)
    if hinders != "no text":
        found.generate([prompt(9)], GREEDY)
    _record_at_the_end()
    assert bool(list((tmp_path / "cache").glob("recorded/toy-*.safetensors"))) == (hinders == "nothing")


@pytest.mark.thorough
def test_the_end_of_a_program_is_noticed(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "toy", tiny_llama(), character_tokenizer())
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(cache_folder() / "kernels")
    script = f"from sakiyomi import LLM\nllm = LLM({str(folder)!r}, 'none')\nllm.wait()\nllm.generate('a')\n"
    environment = os.environ | {"SAKIYOMI_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], env=environment, check=True)
    assert list((tmp_path / "cache").glob("recorded/toy-*.safetensors"))


def _about(path: Path) -> str:
    """What a recording says of its model, but the version of transformers that it was made with."""
    return re.sub(r'"transformers_version": "[0-9.]+"', "", read_header(path).metadata["about"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EMBEDDED)
def test_recordings_that_come_with_models_are_of_their_files(name: str, dtype: str) -> None:
    """Whoever changes a file of an embedded model, its card too, runs recipes/recordings.py."""
    folder = embedded(name)
    key = recording.shipped_key(folder, read_checkpoint(folder))
    assert f'"key": "{key}"' in read_header(folder / SHIPPED.format(dtype)).metadata["about"]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_models_bring_theirs(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded of the model now, whose passes give its very logits, is what came with it."""
    fresh, kept = tmp_path / "fresh", embedded(name) / SHIPPED.format(dtype)
    assert record(name, dtype, fresh)
    assert _about(fresh) == _about(kept)
    assert _operators(fresh) == _operators(kept)
    for place in (b"site-packages", str(embedded(name)).encode(), str(Path(recording.__file__).parent).encode()):
        assert place not in fresh.read_bytes()
    monkeypatch.setattr(recording, "SHIPPED", SHIPPED)
    for found in (LLM(name, "none", dtype=dtype), LLM(name, "none")):
        assert isinstance(found.target.module, RecordedModel) and found.record()
    assert not isinstance(LLM(name, "none", dtype="float16").target.module, RecordedModel)
    assert not isinstance(LLM(name, "none", quantize="int8").target.module, RecordedModel)


@pytest.mark.thorough
def test_an_old_recording_hides_none_that_comes_with_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    name = EMBEDDED[0]
    monkeypatch.setattr(recording, "__version__", "0.0.1")
    assert LLM(name, "none").record()
    monkeypatch.setattr(recording, "__version__", __version__)
    assert not isinstance(LLM(name, "none").target.module, RecordedModel)
    monkeypatch.setattr(recording, "SHIPPED", SHIPPED)
    assert isinstance(LLM(name, "none").target.module, RecordedModel)


def _operators(place: Path) -> dict[str, str]:
    """Of each script, whatever its values are called."""
    with recording.undeprecated():
        scripts = {name: io.BytesIO(tensor.numpy().tobytes()) for name, tensor in load_tensors(place).items()}
        graphs = {name: torch.jit.load(script).forward.graph for name, script in scripts.items()}
        return {name: torch._C._jit_pass_canonicalize(graph, False).str(False) for name, graph in graphs.items()}


# ---------------------------------------------------------------- tokenizers

TOKENIZERS = {"characters": character_tokenizer, "unigrams": unigram_tokenizer}


@pytest.fixture(params=[*TOKENIZERS, "tales", "file"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, RecordedTokenizer]:
    """A transformers tokenizer, and the recorded one."""
    if request.param in TOKENIZERS:
        TOKENIZERS[request.param]().save_pretrained(tmp_path)
    folder = tmp_path if request.param in TOKENIZERS else embedded("tales")
    whole = read_tokenizer(folder, trust_remote_code=False)
    known, backend = recorded_tokenizer(whole, tmp_path / "elsewhere" if request.param == "file" else folder)
    assert (backend is None) is (request.param != "file")
    return whole, recording._tokenizer(folder, json.loads(json.dumps(known)), backend)


def test_a_recorded_tokenizer_answers_as_its_own(tokenizer: tuple[Any, RecordedTokenizer]) -> None:
    whole, found = tokenizer
    text = "Once upon a time, naïve 先読み 🙂</s>\n"
    assert found(text).input_ids == found(text)["input_ids"] == whole(text).input_ids
    assert found(text).keys() <= whole(text).keys()
    assert found.decode(whole(text).input_ids) == whole.decode(whole(text).input_ids)
    assert profile(found) == profile(whole) and tokenizer_digest(found) == tokenizer_digest(whole)
    assert vars(found)["_whole"] is None and not hasattr(found, "no_such_thing")
    # All else is the tokenizer's own, and so is everything from then on.
    assert found([text, "a"], padding=False).input_ids == whole([text, "a"]).input_ids
    found.pad_token = "<unk>"
    assert found.pad_token == "<unk>" and found.pad_token_id == whole.unk_token_id
    found.add_tokens(["先読み"])
    assert len(found) == len(whole) + 1 == len(found.get_vocab()) and found.decode([len(whole)]) == "先読み"
    assert found.convert_ids_to_tokens([len(whole)]) == ["先読み"] and found("先読み").input_ids[-1] >= 0
    assert found.convert_tokens_to_ids("先読み") == len(whole) in found.added_tokens_decoder


def test_chat_templates_need_no_tokenizer_of_transformers(tmp_path: Path) -> None:
    whole = character_tokenizer("abcdefghijklmnopqrstuvwxyzW? ")
    text = "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
    tools = text + "{% for t in tools %}{{ t.name }}{% endfor %}"
    asked, taken = [{"role": "user", "content": "Who?"}], Rendering(tools=[{"name": "find"}])
    for whole.chat_template in (text, {"default": text, "tool_use": tools}):
        whole.save_pretrained(tmp_path)
        known, _ = recorded_tokenizer(whole, tmp_path)
        found = recording._tokenizer(tmp_path, json.loads(json.dumps(known)), None)
        assert Dialogue(found).read(asked) == Dialogue(whole).read(asked)
        assert Dialogue(found).template == Dialogue(whole).template
        assert found.chat_template == text or Dialogue(found).read(asked, taken) == Dialogue(whole).read(asked, taken)
        with pytest.raises(InputError, match="which is no name that a template has"):
            Dialogue(found).read(asked, Rendering(options={"padding": True}))
        assert vars(found)["_whole"] is None
    changed = {"apply_chat_template": lambda self, *_, **__: "mine", "__module__": "transformers.changed"}
    whole.__class__ = type("Changed", (type(whole),), changed)
    known, _ = recorded_tokenizer(whole, tmp_path)
    assert RecordedTokenizer(whole.backend_tokenizer, known, lambda: whole).apply_chat_template(asked) == "mine"


def test_a_tokenizer_that_does_more_is_not_recorded(tmp_path: Path) -> None:
    for wrong in (word_piece_tokenizer(), SimpleNamespace(decode=str)):  # the first one tidies what it decodes
        with pytest.raises(UnsupportedError, match="its tokenizer"):
            recorded_tokenizer(wrong, tmp_path)


# ---------------------------------------------------------------- what makes a recording worthless


def _other_weights(folder: Path, place: Path) -> None:
    tiny_llama(vocab=VOCAB, seed=5).save_pretrained(folder)


def _other_ends(folder: Path, place: Path) -> None:
    settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": 7}), encoding="utf-8")


def _other_tokenizer(folder: Path, place: Path) -> None:
    character_tokenizer("xyz").save_pretrained(folder)


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")


def _damaged(folder: Path, place: Path) -> None:
    data = bytearray(place.read_bytes())
    data[-5] ^= 1
    place.write_bytes(data)


def _cut(folder: Path, place: Path) -> None:
    place.write_bytes(place.read_bytes()[:-9])


def _older(folder: Path, place: Path) -> None:
    recording.FORMAT += 1


@pytest.mark.few(1)
@pytest.mark.parametrize("change", [_other_weights, _other_ends, _other_tokenizer, _damaged, _cut, _older])
def test_a_recording_of_something_else_is_not_used(
    change: Callable[[Path, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "FORMAT", recording.FORMAT)
    folder = save_model(tmp_path / "model", tiny_llama(vocab=VOCAB), character_tokenizer())
    recorded(folder)
    change(folder, recording.place_of(folder, None))
    fresh = LLM(folder, "none")
    assert not isinstance(fresh.target.module, RecordedModel)
    plain = LLM(folder, "none", compile=False)
    assert fresh.engine.stop_ids == plain.engine.stop_ids
    assert fresh.generate([prompt(9)], GREEDY)[0].token_ids == plain.generate([prompt(9)], GREEDY)[0].token_ids


def _lost(copy: Path) -> None:
    shutil.rmtree(copy)


def _changed(copy: Path) -> None:
    place = copy / "packed.safetensors"
    data = bytearray(place.read_bytes())
    data[-5] ^= 1
    place.write_bytes(data)


def _rows_changed(copy: Path) -> None:
    place = copy / "model.safetensors"
    data = bytearray(place.read_bytes())
    data[-5] ^= 1
    place.write_bytes(data)


def _of_other_layers(copy: Path) -> None:
    place = copy / "sakiyomi.json"
    about = json.loads(place.read_text(encoding="utf-8"))
    about["layers"].popitem()
    place.write_text(json.dumps(about), encoding="utf-8")


@pytest.mark.thorough
@pytest.mark.parametrize("change", [_lost, _changed, _rows_changed, _of_other_layers])
def test_a_recording_of_another_packed_copy_is_not_used(change: Callable[[Path], None], tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", tiny_llama(vocab=VOCAB), character_tokenizer())
    own = LLM(folder, "none", quantize="int8")
    assert own.record()
    (copy,) = (path for path in folder.iterdir() if path.is_dir())
    change(copy)
    fresh = LLM(folder, "none", quantize="int8")
    assert not isinstance(fresh.target.module, RecordedModel)
    assert fresh.generate([prompt(9)], GREEDY)[0].token_ids == own.generate([prompt(9)], GREEDY)[0].token_ids
    assert fresh.record()
    assert isinstance(LLM(folder, "none", quantize="int8").target.module, RecordedModel)


def test_what_cannot_be_kept_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a packed copy there is nothing that the recording could read."""
    folder = save_model(tmp_path / "model", tiny_llama(vocab=VOCAB), character_tokenizer())
    monkeypatch.setattr("sakiyomi.model_executor.loading.packed.save_tensors", lambda *_: 1 / 0)
    assert not LLM(folder, "none", quantize="int8").record()


def test_no_damage_to_a_recording_passes(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", tiny_llama(vocab=VOCAB), character_tokenizer())
    recorded(folder)
    place, rng = recording.place_of(folder, None), random.Random(0)
    data = place.read_bytes()
    for _ in range(DAMAGES):
        place.write_bytes(damaged(data, rng))
        assert recording.read_recording(folder, None, None, lambda: None, lambda config: None) is None
    place.write_bytes(data)
    assert recording.read_recording(folder, None, None, lambda: None, lambda config: None) is not None


@pytest.mark.parametrize(
    ("name", "error"),
    [("torch.jit.load", RuntimeError), ("sakiyomi.model_executor.program.Builder", UnsupportedError)],
)
def test_a_script_that_another_torch_cannot_run_is_not_used(
    name: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's class is loaded instead."""
    folder = save_model(tmp_path / "model", tiny_llama(vocab=VOCAB), character_tokenizer())
    recorded(folder)

    def failing(*_: object) -> None:
        raise error("it has changed")

    monkeypatch.setattr(name, failing)
    assert not isinstance(LLM(folder, "none", compile="auto").target.module, RecordedModel)


def test_what_is_wrong_with_the_model_is_said_as_without_a_recording(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", tiny_llama(vocab=VOCAB), character_tokenizer())
    recorded(folder)
    _no_tokenizer(folder)
    with pytest.raises(LoadError, match=r"the tokenizer in .* cannot be read"):
        LLM(folder, "none")


def test_large_models_are_recorded_if_they_are_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST", 1000)
    folder = save_model(tmp_path / "model", tiny_llama(vocab=VOCAB), character_tokenizer())
    assert not LLM(folder, "none").record() and not recording.place_of(folder, None).exists()
    own = LLM(folder, "none", quantize="int8")
    tried: list[int] = []
    own.target.watchers.append(lambda plan, seconds: tried.append(plan.rows))
    assert own.record() and max(tried) == recorder.TRIED[-2]
    again = LLM(folder, "none", quantize="int8")
    assert isinstance(again.target.module, RecordedModel)
    assert again.generate([prompt(9)], GREEDY)[0].token_ids == own.generate([prompt(9)], GREEDY)[0].token_ids
    monkeypatch.setattr(recorder, "MOST_PACKED", 1000)
    recording.place_of(folder, None, "int8").unlink()
    assert not LLM(folder, "none", quantize="int8").record()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options", [{"exact": True}, {"compile": False}, {"quantize": "int8"}, {"cache": "streaming", "kv_budget": 64}]
)
def test_what_wants_the_modules_does_not_use_it(options: dict[str, object], tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", tiny_llama(vocab=VOCAB), character_tokenizer())
    recorded(folder)
    assert not isinstance(LLM(folder, "none", **options).target.module, RecordedModel)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_load_model_gives_transformers_models(tales: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "cache_folder", lambda: tales[0])
    assert not isinstance(load_model("tales").model, RecordedModel)


def test_a_script_that_computes_something_else_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is wrong with a recording shows when it is proven, not in a text."""
    folder = save_model(tmp_path / "model", tiny_llama(vocab=VOCAB), character_tokenizer())
    made = recorder._script

    def wrong(runner: ModelRunner, names: dict[int, str]) -> tuple[bytes, list[str], int]:
        script, read, outputs = made(runner, names)
        norms = [i for i, name in enumerate(read) if "norm" in name]
        read[norms[0]], read[norms[1]] = read[norms[1]], read[norms[0]]
        return script, read, outputs

    model = tiny_llama(vocab=VOCAB)
    with torch.no_grad():
        for i, module in enumerate(m for m in model.modules() if "Norm" in type(m).__name__):
            module.weight += 0.1 * i
    save_model(folder, model, character_tokenizer())
    monkeypatch.setattr(recorder, "_script", wrong)
    llm = LLM(folder, "none")
    caplog.set_level("DEBUG", "sakiyomi")
    llm.record()
    assert not recording.place_of(folder, None).exists() and "gives other logits" in caplog.text


@pytest.mark.thorough
def test_the_file_says_what_it_is() -> None:
    recorded("tales")
    about = json.loads(read_header(recording.place_of(embedded("tales"), None)).metadata["about"])
    assert about["kind"] == "LlamaForCausalLM" and about["layers"][-1]["weight"].startswith("model.layers.11.")
    with pytest.raises(UnsupportedError, match="counted from 0"):
        LLM("tales", "none").target.capture([99])

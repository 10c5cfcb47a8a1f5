"""Packed copies: written by the first load, read by the next ones; made again or refused where they are of no use."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import toys
from architectures import ALL, CONFIGS, make, model_of, prompt
from sakiyomi import LLM, InputError, LoadError, MemoryLimitError, SamplingParams, UnsupportedError
from sakiyomi.cli import app
from sakiyomi.core.embedded import embedded
from sakiyomi.core.memory import readable
from sakiyomi.core.prompts import STORIES
from sakiyomi.evaluation.bench.config import BenchConfig
from sakiyomi.evaluation.bench.suites import measure
from sakiyomi.kernels.experts import is_experts
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.kernels.quantization import compare
from sakiyomi.model_executor.loading import load_model, packed, read_checkpoint
from sakiyomi.model_executor.loading import model as loading_model
from sakiyomi.model_executor.loading.accelerated import torchao
from sakiyomi.model_executor.loading.reader import Reader
from sakiyomi.model_executor.structural_copy import structural_copy
from toys import tiny_llama, tiny_tokenizer
from warm import warm

pytestmark = pytest.mark.skipif(PackedWeights.create() is None, reason="the C++ kernels cannot be compiled here")
TOKENIZER = tiny_tokenizer()
SERVED = [name for name in ALL if name != "gptj"]
COPY = "sakiyomi-int8-float32"


def saved(folder: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    TOKENIZER.save_pretrained(folder)
    return folder


def load(target: Any, draft: str = "none", **options: Any) -> LLM:
    return LLM(target if isinstance(target, tuple) else str(target), draft, compile=False, **options)


def tokens(llm: LLM, count: int = 8, **values: Any) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=count, ignore_eos=True, **values)
    return [done.token_ids for done in llm.generate([prompt(40), prompt(9, 1)], params)]


def answers(llm: LLM) -> tuple[Any, ...]:
    """What is said of the quantization, which is None without one, layers that are computed together, and texts."""
    return llm.target.weights.quantization, llm.target.weights.siblings, tokens(llm)


def same(a: LLM, b: LLM) -> bool:
    return a.target.weights.quantization is not None and answers(a) == answers(b)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with its packed copy."""
    folder = saved(tmp_path_factory.mktemp("models") / "good", tiny_llama())
    load(folder, quantize="int8")
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy of both that a test may damage."""
    return Path(shutil.copytree(good, tmp_path / "model"))


@pytest.fixture
def fresh(good: Path, tmp_path: Path) -> Path:
    """The same without the packed copy."""
    return Path(shutil.copytree(good, tmp_path / "model", ignore=shutil.ignore_patterns("sakiyomi-*")))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAKIYOMI_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_weights_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked to read weights must be a packed folder."""
    read = Reader.read

    def only_packed(self: Reader, *args: Any, **options: Any) -> Any:
        assert packed.is_packed(self.folder), "the model's own weights are read"
        return read(self, *args, **options)

    monkeypatch.setattr(Reader, "read", only_packed)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


refused = functools.partial(toys.refused, load)


def contents(folder: Path) -> dict[str, str]:
    """Every file, its time and what it holds; without the packed copies."""
    files = [path for path in folder.rglob("*") if path.is_file() and "sakiyomi-" not in str(path.relative_to(folder))]
    return {
        str(path.relative_to(folder)): f"{path.stat().st_mtime_ns} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in files
    }


# --- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("name", SERVED)
def test_every_architecture(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The loaded pair, the first load from the disk, the next one and the packed folder itself are one and the same."""
    folder = saved(tmp_path / "model", model_of(name))
    first = load(folder, quantize="int8")
    others = [load((model_of(name), TOKENIZER), quantize="int8"), load(folder, quantize="int8"), load(folder / COPY)]
    said = [answers(llm) for llm in (first, *others)]
    assert said[0][0] is not None and all(each == said[0] for each in said)
    weights = first.target.weights
    assert others[-1].target.weights.packed_experts == weights.packed_experts
    assert weights.packed_experts == any(map(is_experts, weights.module.modules()))
    four = load(folder, quantize="int4", dtype="bfloat16")
    assert same(load(folder, quantize="int4", dtype="bfloat16"), four)
    assert not warnings(caplog)


def test_the_second_load_reads_the_copy_alone(good: Path, no_weights_read: None) -> None:
    assert load(good, quantize="int8").target.weights.quantization is not None


@pytest.mark.thorough
def test_a_copy_for_each_kind_and_dtype(fresh: Path) -> None:
    before = contents(fresh)
    for kind in ("int8", "int4"):
        for dtype in ("float32", "bfloat16"):
            load(fresh, quantize=kind, dtype=dtype)
    copies = {path.name for path in fresh.iterdir() if path.is_dir()}
    assert copies == {f"sakiyomi-int{n}-{dtype}" for n in (8, 4) for dtype in ("float32", "bfloat16")}
    assert contents(fresh) == before, "the user's files are not touched"


def test_nothing_is_left_over(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    load(fresh, quantize="int8")
    assert not list((tmp_path / "temporary").iterdir())
    assert {path.name for path in fresh.iterdir() if path.is_dir()} == {COPY}


@pytest.mark.thorough
def test_exact_and_drafts(fresh: Path, tmp_path: Path) -> None:
    """A packed folder may be the target, the draft, or both."""
    draft = saved(tmp_path / "draft", tiny_llama(seed=1))
    plain = load(fresh, quantize="int8", exact=True)
    wanted = tokens(plain, 20)
    load(draft, quantize="int8")
    for target, drafter in ((fresh, draft), (fresh / COPY, draft / COPY), (fresh / COPY, fresh / COPY)):
        options = {} if target.name == COPY else {"quantize": "int8"}
        llm = load(target, f"model:{drafter}", exact=True, **options)
        assert tokens(llm, 20, gamma=3) == wanted
        assert tokens(llm, 20, gamma=1, seed=1, temperature=0.9) == tokens(plain, 20, seed=1, temperature=0.9)


def test_a_packed_folder_can_be_moved(folder: Path, tmp_path: Path, no_weights_read: None) -> None:
    first = load(folder, quantize="int8")
    moved = shutil.move(folder / COPY, tmp_path / "elsewhere")
    shutil.rmtree(folder)
    assert same(load(moved), first)


def test_shards(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", tiny_llama(), max_shard_size="40kB")
    assert not (folder / "model.safetensors").exists()
    assert same(load(folder, quantize="int8"), load((tiny_llama(), TOKENIZER), quantize="int8"))
    assert same(load(folder, quantize="int8"), load(folder / COPY))


def test_pickles(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", tiny_llama())
    (folder / "model.safetensors").unlink()
    torch.save(tiny_llama().state_dict(), folder / "pytorch_model.bin")
    first = load(folder, quantize="int8", allow_pickle=True)
    assert same(load(folder, quantize="int8", allow_pickle=True), first)
    assert same(load(folder / COPY), first)


@pytest.mark.usefixtures("own_code")
def test_code_of_a_model_goes_with_it(tmp_path: Path) -> None:
    folder = saved(tmp_path / "coded", tiny_llama())
    (folder / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n",
        encoding="utf-8",
    )
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_own import OwnConfig\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n",
        encoding="utf-8",
    )
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {
        "model_type": "own",
        "auto_map": auto_map,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    first = load(folder, quantize="int8", trust_remote_code=True)
    assert same(load(folder, quantize="int8", trust_remote_code=True), first)
    assert same(load(folder / COPY, trust_remote_code=True), first)
    refused(LoadError, "trust_remote_code=True", target=folder / COPY)


def test_experts_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers stacks them: left on disk they would be written there again, to fill somebody's /tmp."""
    folder = saved(tmp_path / "model", model_of("mixtral"))
    monkeypatch.setattr(Reader, "read_later", lambda self: pytest.fail("left on disk"))
    load(folder, quantize="int8")


def test_weights_that_transformers_converts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should they come to be left on disk all the same, they are read again, at once."""
    folder = saved(tmp_path / "model", model_of("mixtral"))
    monkeypatch.setattr("sakiyomi.model_executor.loading.model.by_layer", lambda *_: True)
    assert same(load(folder, quantize="int8"), load((model_of("mixtral"), TOKENIZER), quantize="int8"))


def test_the_command_says_once_where_the_copy_is(fresh: Path) -> None:
    command = ["generate", "Once", "--target", str(fresh), "--draft", "none", "--quantize", "int8"]
    command += ["--compile", "false", "--max-new-tokens", "2"]
    first, second = (CliRunner().invoke(app, command) for _ in range(2))
    (line,) = [line for line in first.stderr.splitlines() if str(fresh / COPY) in line]
    assert re.search(r"packed copy of 79.0 kB is kept in .*; remove that folder to have the space back", line)
    assert "int8: " in first.stderr and "int8: " in second.stderr
    assert "packed copy" not in second.stderr
    assert first.stdout == second.stdout


def test_a_pair_is_not_saved(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny_llama()
    before = model.lm_head.weight.clone()
    load((model, TOKENIZER), quantize="int8")
    assert torch.equal(model.lm_head.weight, before), "the user's model is as it was"
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(
    fresh: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed.os, "access", lambda *_: False)
    first = load(fresh, quantize="int8")
    assert not [path for path in fresh.iterdir() if path.is_dir()]
    (copy,) = (cache / "packed").iterdir()
    monkeypatch.setattr(Reader, "read_later", lambda self: pytest.fail("packed anew"))
    assert same(load(fresh, quantize="int8"), first)
    assert same(load(copy), first)
    assert not warnings(caplog)


@pytest.mark.thorough
def test_models_from_elsewhere_have_their_copies_in_the_cache(
    fresh: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the hub's cache nor the package is ours to write to."""
    monkeypatch.setattr("sakiyomi.model_executor.loading.model.fetch", lambda *_, **__: fresh)
    for name in ("someone/some-model", "tales-draft"):
        load(name, quantize="int8")
        load(name, quantize="int8")
    assert not [path for path in fresh.iterdir() if path.is_dir()]
    assert not list(embedded("tales-draft").glob("sakiyomi-*"))
    assert len(list((cache / "packed").iterdir())) == 2


def test_a_copy_in_a_folder_that_cannot_be_written(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, no_weights_read: None
) -> None:
    monkeypatch.setattr(packed.os, "access", lambda *_: False)
    load(folder, quantize="int8")


def test_two_first_loads_at_once(fresh: Path) -> None:
    code = "import sys; from sakiyomi import LLM; LLM(sys.argv[1], 'none', quantize='int8', compile=False)"
    processes = [
        subprocess.Popen([*warm(), "-c", code, str(fresh)], stderr=subprocess.PIPE, encoding="utf-8") for _ in range(2)
    ]
    for process in processes:
        said = process.communicate(timeout=200)[1]
        assert process.returncode == 0 and "sakiyomi" not in said and "meta device" not in said, said
    assert {path.name for path in fresh.iterdir() if path.is_dir()} == {COPY}
    load(fresh / COPY)


def test_many_writers_leave_one_whole_copy(tmp_path: Path) -> None:
    place = tmp_path / "copy"

    def write(number: int) -> None:
        for i in range(20):
            fresh = tmp_path / f"copy.{number}-{i}.tmp"
            fresh.mkdir()
            for name in "ab":
                (fresh / name).write_text(str(number), encoding="utf-8")
            packed._replace(fresh, place)

    threads = [Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    assert (place / "a").read_text(encoding="utf-8") == (place / "b").read_text(encoding="utf-8")


# --- copies that are of no use ----------------------------------------------------------------------------------------


def about(copy: Path, change: Callable[[dict[str, Any]], object], *, forged: bool = False) -> None:
    """Change sakiyomi.json; forged: as if it had been written so."""
    path = copy / packed.ABOUT
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    if forged:
        values["digest"] = packed._digest(values)
    path.write_text(json.dumps(values), encoding="utf-8")


def layer(values: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = values["layers"]["model.layers.0.mlp.up_proj"]
    return found


def cut(name: str, keep: int) -> Callable[[Path], object]:
    return lambda copy: (copy / name).write_bytes((copy / name).read_bytes()[:keep])


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "version": ("format 99", lambda copy: about(copy, lambda values: values.update(format=99))),
    "no object": ("sakiyomi.json", lambda copy: (copy / "sakiyomi.json").write_text("[]", encoding="utf-8")),
    "no json": ("sakiyomi.json", lambda copy: (copy / "sakiyomi.json").write_text('{"format": 1', encoding="utf-8")),
    "empty": ("format None", lambda copy: (copy / "sakiyomi.json").write_text("{}", encoding="utf-8")),
    "bits": ("was changed", lambda copy: about(copy, lambda values: layer(values).update(bits=4))),
    "cache": ("was changed", lambda copy: about(copy, lambda values: values["cache"].pop())),
    "unknown bits": ("KeyError: 3", lambda copy: about(copy, lambda v: layer(v).update(bits=3), forged=True)),
    "size": ("other sizes", lambda copy: about(copy, lambda v: layer(v).update(out=1000), forged=True)),
    "odd size": ("other sizes", lambda copy: about(copy, lambda v: layer(v).update({"in": 31}), forged=True)),
    "layer": ("other layers", lambda copy: about(copy, lambda v: v["layers"].update(extra=layer(v)), forged=True)),
    "layers": ("TypeError", lambda copy: about(copy, lambda v: v.update(layers=None), forged=True)),
    "sibling": ("KeyError", lambda copy: about(copy, lambda v: v["siblings"].append(["a", "b"]), forged=True)),
    "report": ("TypeError", lambda copy: about(copy, lambda v: v["report"].pop("tokens"), forged=True)),
    "cut off": ("packed.safetensors is cut off", cut("packed.safetensors", -100)),
    "header": ("packed.safetensors is cut off", cut("packed.safetensors", 20)),
    "nothing": ("packed.safetensors is cut off", cut("packed.safetensors", 0)),
    "gone": ("packed.safetensors", lambda copy: (copy / "packed.safetensors").unlink()),
    "embeddings": ("model.safetensors is cut off", cut("model.safetensors", -1)),
    "no embeddings": ("no weights", lambda copy: (copy / "model.safetensors").unlink()),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage(kind: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a target it is refused; beside the model it is made again, with one line."""
    reason, damage = DAMAGE[kind]
    damage(folder / COPY)
    refused(LoadError, str(folder / COPY), reason, "load the model itself with quantize", target=folder / COPY)
    load(folder, quantize="int8")
    (line,) = warnings(caplog)
    assert reason in line and line.endswith("it is packed anew now") and "\n" not in line
    load(folder / COPY)


def test_a_layer_that_the_config_does_not_have(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another number of layers than was packed: none may be left unpacked, none may be missing."""
    for count in (1, 3):
        path = folder / COPY / "config.json"
        path.write_text(
            json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"num_hidden_layers": count}), encoding="utf-8"
        )
        refused(LoadError, "no intact packed model", "load the model itself", target=folder / COPY)


def test_changed_weights(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = load(folder, quantize="int8")
    tiny_llama(seed=3).save_pretrained(folder)
    after = load(folder, quantize="int8")
    (line,) = warnings(caplog)
    assert "was packed from other weights" in line and "packed anew" in line
    assert not same(after, before)
    assert same(after, load((tiny_llama(seed=3), TOKENIZER), quantize="int8"))
    assert same(after, load(folder, quantize="int8"))
    assert len(warnings(caplog)) == 1


def test_a_weight_between_the_places_that_are_compared(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 64 + 5000] ^= 1
    path.write_bytes(data)
    load(folder, quantize="int8")
    assert "other weights" in warnings(caplog)[0]


# --- writing that fails -----------------------------------------------------------------------------------------------


def nothing_written(folder: Path, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    llm = load(folder, quantize="int8")
    (line,) = warnings(caplog)
    assert "cannot be saved" in line and reason in line and "packed anew next time" in line
    assert not [path for path in folder.iterdir() if path.is_dir()]
    assert all(len(row) == 8 for row in tokens(llm))


def test_a_full_disk(fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    usage = shutil.disk_usage(fresh)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    nothing_written(fresh, caplog, "1.0 kB are free")


def fails_with(error: BaseException) -> Callable[..., None]:
    def save_tensors(path: Path, tensors: Any) -> None:
        path.write_bytes(b"half of it")
        raise error

    return save_tensors


def test_a_disk_that_fills(fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(packed, "save_tensors", fails_with(OSError("no space left")))
    nothing_written(fresh, caplog, "no space left")


@pytest.mark.thorough
def test_a_file_in_its_place(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    (fresh / COPY).write_text("mine", encoding="utf-8")
    nothing_written(fresh, caplog, COPY)
    assert (fresh / COPY).read_text(encoding="utf-8") == "mine"


def killed_while_saving(fresh: Path) -> Path:
    """What a process leaves that is killed while it writes the copy of a model."""
    code = (
        "import os, signal, sys\nfrom sakiyomi import LLM\nfrom sakiyomi.model_executor.loading import packed\n"
        "packed.save_tensors = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "LLM(sys.argv[1], 'none', quantize='int8', compile=False)"
    )
    done = subprocess.run([*warm(), "-c", code, str(fresh)], timeout=200, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = [path for path in fresh.iterdir() if path.is_dir()]
    assert left.name.startswith(f"{COPY}.") and left.suffix == ".tmp"
    return left


def test_the_next_load_removes_what_a_killed_one_left(fresh: Path) -> None:
    left = killed_while_saving(fresh)
    load(fresh, quantize="int8")
    left.mkdir()
    load(fresh, quantize="int8")  # from the copy
    assert {path.name for path in fresh.iterdir() if path.is_dir()} == {COPY}


def test_what_may_still_be_written_stays(tmp_path: Path) -> None:
    """Of a living process, of another machine's where something changes, of another copy, of somebody else."""
    alive, here, gone = os.getpid(), packed._HERE, 2**22 + 1  # above every number of a process
    old = time.time() - 2 * packed._SILENT
    kept = [
        f"{COPY}.{alive}-{here}-00000000.tmp",
        f"{COPY}.{gone}-ffffffff-00000000.tmp",
        f"sakiyomi-int4-float32.{gone}-{here}-00000000.tmp",
        f"{COPY}.mine.tmp",
    ]
    removed = [
        f"{COPY}.{gone}-{here}-00000001.tmp",
        f"{COPY}.{gone}-{here}-00000002.old",
        f"{COPY}.1-eeeeeeee-00000003.tmp",
    ]
    for name in (*kept, *removed):
        (tmp_path / name).mkdir()
        (tmp_path / name / "packed.safetensors").write_bytes(b"half of it")
        os.utime(tmp_path / name, (old, old))
    os.utime(tmp_path / removed[-1] / "packed.safetensors", (old, old))
    packed.remove_leftovers(tmp_path / COPY)
    assert {path.name for path in tmp_path.iterdir()} == set(kept)
    packed.remove_leftovers(tmp_path / "nowhere" / COPY)


def test_ctrl_c_while_saving(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "save_tensors", fails_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        load(fresh, quantize="int8")
    assert not [path for path in fresh.iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    "place", ["sakiyomi.model_executor.loading.reader.quiet", "sakiyomi.model_executor.quantizing.layer_errors"]
)
def test_ctrl_c_before(place: str, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(place, stop)
    with pytest.raises(KeyboardInterrupt):
        load(fresh, quantize="int8")
    assert not list((tmp_path / "temporary").iterdir())
    assert not [path for path in fresh.iterdir() if path.is_dir()]


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_options_that_contradict_a_packed_folder(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = good / COPY
    refused(InputError, "packed copy already", "leave quantize at None", target=copy, quantize="int4")
    refused(InputError, "bfloat16", "float32", "leave dtype at 'auto'", target=copy, dtype="bfloat16")
    with pytest.raises(UnsupportedError, match="only LLM runs; pass the model's own folder"):
        load_model(copy)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    refused(InputError, "packed for the CPU", "device='cpu'", target=copy)


def test_what_is_quantized_already(fresh: Path) -> None:
    path = fresh / "config.json"
    settings = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | settings), encoding="utf-8")
    refused(InputError, "quantized already", "leave quantize at None", target=fresh, quantize="int8")


def test_a_dtype_that_the_kernels_do_not_know(fresh: Path) -> None:
    refused(UnsupportedError, "float16", "bfloat16", target=fresh, quantize="int8", dtype="float16")
    refused(UnsupportedError, "float16", target=(tiny_llama().half(), TOKENIZER), quantize="int8")


def test_no_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before weights are read."""
    monkeypatch.setattr(Reader, "read", lambda *_, **__: pytest.fail("weights were read"))
    monkeypatch.setattr("sakiyomi.kernels.quantization.native", lambda: None)
    for target, options in ((folder, {"quantize": "int8"}), (folder / COPY, {}), (folder, {"quantize": "int4"})):
        refused(UnsupportedError, "compiled CPU kernels", "sakiyomi info", "without quantize", target=target, **options)


def test_a_model_that_the_kernels_do_not_serve(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", model_of("gpt_neox_japanese"))
    refused(UnsupportedError, "GPTNeoXJapanese", "leave quantize at None", target=folder, quantize="int8")
    assert not [path for path in folder.iterdir() if path.is_dir()]


# --- on a GPU, as far as it can be seen without one -------------------------------------------------------------------


def test_torchao_rounds_what_is_loaded_for_a_gpu(fresh: Path) -> None:
    pytest.importorskip("torchao")
    reader = Reader("it", fresh, read_checkpoint(fresh), torch.bfloat16, torch.device("cpu"))
    model = reader.read(torchao("int8", "it", torch.bfloat16))
    assert {type(layer.self_attn.q_proj.weight).__name__ for layer in model.model.layers} == {"Int8Tensor"}
    assert type(model.lm_head.weight) is torch.nn.Parameter
    with torch.no_grad():
        ids = torch.tensor([prompt(30)])
        got, wanted = structural_copy(model)(ids).logits.float(), tiny_llama()(ids).logits
    assert float((got - wanted).norm() / wanted.norm()) < 0.2


@pytest.fixture
def by_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be quantized for the CPU goes the way of a GPU instead."""
    pytest.importorskip("torchao")
    by_torchao = loading_model._by_torchao
    monkeypatch.setattr(
        loading_model, "_to_be_quantized", lambda reader, tokenizer, kind, *_: by_torchao(reader, kind, tokenizer)
    )


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "40kB"}])
def test_what_torchao_changed_is_reported(fresh: Path, by_torchao: None, options: dict[str, Any]) -> None:
    tiny_llama().save_pretrained(fresh, **options)
    llm = load(fresh, quantize="int8", dtype="bfloat16")
    report = llm.target.weights.quantization
    assert report is not None
    assert (report.kind, report.layers, report.kept, report.tokens) == ("int8", 14, ("lm_head",), 512)
    ids = torch.tensor([TOKENIZER("\n".join(STORIES)).input_ids[:512]])
    with torch.no_grad():
        before = tiny_llama().bfloat16()(ids).logits[0]
        after = (
            Reader("it", fresh, read_checkpoint(fresh), torch.bfloat16, torch.device("cpu"))
            .read(torchao("int8", "it", torch.bfloat16))(ids)
            .logits[0]
        )
    assert (report.agreement, report.divergence) == pytest.approx(compare(before, after), rel=0.05)
    assert 0.5 < report.agreement < 1 and 0 < report.divergence < 0.1
    assert not [path for path in fresh.iterdir() if path.is_dir()], "there is no packed copy of it"
    assert all(len(row) == 8 for row in tokens(llm))


def test_bytes_that_torchao_s_weights_take(fresh: Path, by_torchao: None) -> None:
    whole = load(fresh, dtype="bfloat16").target.weights.bytes
    rounded = load(fresh, quantize="int8", dtype="bfloat16").target.weights.bytes
    head = tiny_llama().lm_head.weight.numel() * 2
    assert whole is not None and rounded is not None
    assert 0.5 * (whole - head) < rounded - head < 0.65 * (whole - head)  # with their scales


def test_weights_that_cannot_stay_on_disk(fresh: Path, by_torchao: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then main memory has to hold the model, which is asked before."""
    monkeypatch.setattr("sakiyomi.model_executor.loading.model.by_layer", lambda *_: False)
    monkeypatch.setattr(Reader, "read_later", lambda self: pytest.fail("left on disk"))
    assert load(fresh, quantize="int8", dtype="bfloat16").target.weights.quantization is not None
    monkeypatch.setattr("sakiyomi.core.memory._group_headroom", lambda: 1000)
    refused(MemoryLimitError, "1.0 kB are available", target=fresh, quantize="int8", dtype="bfloat16")


@pytest.mark.thorough
def test_the_bench_has_speeds_of_what_torchao_rounded(fresh: Path, by_torchao: None) -> None:
    config = BenchConfig(
        target=str(fresh),
        draft=f"model:{fresh}",
        dtype="bfloat16",
        quantize="int8",
        repeats=1,
        max_new_tokens=8,
        prompt_tokens=12,
        count=2,
        gamma=2,
        compile=False,
    )
    found = measure("speculative", config)
    assert all(line["tokens_per_second"] for line in found.lines)
    assert [line["equal"] for line in found.lines[3:]] == [True, True], found.notes
    assert str(found.conditions["rounding"]).startswith("int8: 14 layers, 1 kept as they were (lm_head)")


def test_torchao_in_4_bits_knows_bfloat16_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    torchao("int4", "it", torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"'it' is in torch\.float16; pass dtype='bfloat16'"):
        torchao("int4", "it", torch.float16)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(LoadError, match="needs torchao; pip install torchao"):
        torchao("int8", "it", torch.bfloat16)


def test_a_loaded_model_on_a_gpu_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda", 0)))
    refused(UnsupportedError, "on a GPU", "pass its folder", target=(model, TOKENIZER), quantize="int8")


# --- memory -----------------------------------------------------------------------------------------------------------


def wide(tmp_path: Path) -> Path:
    """A model that is mostly linear layers, each small beside the whole."""
    config = CONFIGS["llama"]()
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 64, 128, 12
    return saved(tmp_path / "wide", make(config))


def test_too_large_and_what_would_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = wide(tmp_path)
    size = (folder / "model.safetensors").stat().st_size
    monkeypatch.setattr(Reader, "read", lambda *_, **__: pytest.fail("weights were read"))

    def message(share: float, **options: Any) -> str:
        room = int(share * size)
        monkeypatch.setattr("sakiyomi.core.memory._group_headroom", lambda: room)
        text = refused(MemoryLimitError, f"where {readable(room)} are available", "needs", target=folder, **options)
        return text.partition("; ")[2]

    assert "with dtype='bfloat16' this one needs about" in message(0.9)
    assert "with quantize='int8' this one needs about" in message(0.45)
    assert "with quantize='int8' this one needs about" in message(0.45, dtype="bfloat16")
    assert "with quantize='int4' this one needs about" in message(0.26)
    assert "quantize" not in message(0.05)
    assert "with quantize='int4' this one needs about" in message(0.26, quantize="int8")
    assert message(0.05, quantize="int8") == message(0.05, quantize="int4") == "choose a smaller model"


def test_what_is_said_to_fit_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = wide(tmp_path)
    size = (folder / "model.safetensors").stat().st_size
    monkeypatch.setattr("sakiyomi.model_executor.loading.fit.available_bytes", lambda *_: int(0.3 * size))
    monkeypatch.setattr("sakiyomi.core.memory.available_bytes", lambda *_: int(0.3 * size))
    load(folder, quantize="int4")
    load(folder, quantize="int4")


def test_experts_are_not_said_to_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "model", model_of("mixtral"))
    monkeypatch.setattr("sakiyomi.core.memory._group_headroom", lambda: 100_000)
    assert "quantize=" not in refused(MemoryLimitError, target=folder, dtype="bfloat16")
    refused(MemoryLimitError, "in bfloat16 needs", target=folder, dtype="bfloat16", quantize="int4")


def test_a_packed_model_that_does_not_fit(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sakiyomi.core.memory._group_headroom", lambda: 1000)
    refused(MemoryLimitError, "the packed model", "1.0 kB are available", target=good / COPY)


@pytest.mark.thorough
def test_nothing_is_written_into_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an embedded model is named by its path, or by a link to it."""
    monkeypatch.setattr(packed, "cache_folder", lambda: tmp_path / "cache")
    inside = embedded("tales-draft")
    (tmp_path / "link").symlink_to(inside)
    for name in ("tales-draft", inside, tmp_path / "link"):
        load(name, quantize="int8")
    assert not [path for path in inside.iterdir() if path.name.startswith("sakiyomi-")]
    assert len(list((tmp_path / "cache" / "packed").iterdir())) in (1, 2)  # named by folder, and by link

"""A model in stages gives the texts of the model, and is one error when a stage is gone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sakiyomi import LLM, SamplingParams
from sakiyomi.core.errors import InputError, LoadError, UnsupportedError, WorkerError
from sakiyomi.core.model_folder import STAGES
from sakiyomi.core.preflight import check_settings
from sakiyomi.model_executor.loading import load_model
from sakiyomi.model_executor.stages import cut, is_cut
from sakiyomi.model_executor.stages.pipeline import SharedSlots
from train_toys import target_config, tiny_gpt2, tiny_target

PROMPTS = ["Once upon a time", "Tom had a ball. One day Mia saw", "Once upon a time Ben"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def staged(folder: Path) -> Iterator[LLM]:
    """In two processes, with a draft that is always right."""
    out = folder.with_name("cut")
    assert cut(folder, 2, out) == [1, 1]
    yield LLM(str(out), f"model:{folder}", dtype="float32", max_batch=3)


@pytest.mark.thorough
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}])
def test_texts_are_those_of_the_whole_model(staged: LLM, folder: Path, params: dict[str, Any]) -> None:
    whole = LLM(str(folder), f"model:{folder}", dtype="float32", max_batch=3)
    asked = SamplingParams(**({"max_new_tokens": 24, "gamma": 3} | params))
    for _ in range(2):  # eager at first, and replayed then
        found = [llm.generate([*PROMPTS, PROMPTS[0]], asked) for llm in (staged, whole)]
        assert [text.token_ids for text in found[0]] == [text.token_ids for text in found[1]]
    assert staged.target.weights.module.config.num_hidden_layers == 1 and staged.name == str(folder.with_name("cut"))


def test_commands_take_it(staged: LLM, folder: Path, tmp_path: Path) -> None:
    """Before anything is loaded its parts are looked at, of which a machine may have one."""
    out = folder.with_name("cut")
    check_settings({"target": str(out)})
    (tmp_path / STAGES).write_bytes((out / STAGES).read_bytes())
    with pytest.raises(LoadError, match="and no stage"):
        check_settings({"target": str(tmp_path)})
    shutil.copytree(out / "stage-1", tmp_path / "stage-1")
    check_settings({"target": str(tmp_path)})
    (tmp_path / "stage-1" / "config.json").unlink()
    with pytest.raises(LoadError, match=r"no config.json in .*stage-1"):
        check_settings({"target": str(tmp_path)})


@pytest.mark.thorough
def test_processes_of_torchrun_end_together(staged: LLM, folder: Path) -> None:
    """The first one says when it has ended; nobody takes that for a death."""
    out = folder.with_name("cut")
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "sakiyomi"]
    asked = ["generate", PROMPTS[0], "--target", str(out), "--draft", "none", "--max-new-tokens", "8"]
    done = subprocess.run([*run, *asked], capture_output=True, encoding="utf-8", timeout=300, check=False)
    assert done.returncode == 0 and "ended" not in done.stderr, done.stderr[-2000:]
    assert done.stdout.strip()


def test_a_conversation_goes_on_in_its_slots(staged: LLM, folder: Path) -> None:
    """Slots are taken back, forked and given on; the other stage's with them."""
    whole = LLM(str(folder), "none", dtype="float32", max_batch=3)
    params = SamplingParams(max_new_tokens=8)
    shared = "Once upon a time Lily had a boat. One day Max saw the hat and said, look at my stone. "
    found = []
    for llm in (staged, whole):
        chat = llm.conversation()
        texts = [chat.generate(shared, params).token_ids, chat.generate("They played.", params).token_ids]
        found.append(texts + [text.token_ids for text in llm.generate([shared + "Tom", shared + "Sue"], params)])
    assert found[0] == found[1]


def test_what_stages_cannot_do_is_refused(staged: LLM, folder: Path, tmp_path: Path) -> None:
    assert is_cut(folder.with_name("cut"))
    assert not is_cut(folder)
    for options in ({"quantize": "int8"}, {"exact": True}, {"cache": "h2o", "kv_budget": 64}):
        with pytest.raises(UnsupportedError, match="is a model in stages, which runs with cache='full'"):
            LLM(str(folder.with_name("cut")), "none", **options)
    with pytest.raises(InputError, match=r"stages is 3, and .* has 2 layers; give a number from 2 to 2"):
        cut(folder, 3, tmp_path / "three")
    with pytest.raises(InputError, match="exists and is not an empty folder"):
        cut(folder, 2, folder)
    shutil.copytree(folder.with_name("cut"), tmp_path / "other")
    (tmp_path / "other" / "stages.json").write_text(json.dumps({"format": 2}), encoding="utf-8")
    with pytest.raises(LoadError, match="has format 2, expected 1; cut the model anew"):
        LLM(str(tmp_path / "other"), "none")
    with pytest.raises(UnsupportedError, match="in several processes, which is not saved"):
        assert isinstance(staged.target.cache, SharedSlots)
        staged.target.cache.snapshot(0, 1)


@pytest.mark.thorough
def test_a_killed_stage_is_one_error(staged: LLM) -> None:
    """The last test of the module: the model is gone."""
    import multiprocessing

    (child,) = [child for child in multiprocessing.active_children() if child.pid]
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"process 1 of 2 .* ended by signal SIGKILL; .*: load the model again"):
        staged.generate("Once", SamplingParams(max_new_tokens=4))


def test_other_names_of_layers_and_ends(tmp_path: Path) -> None:
    cut(tiny_gpt2(tmp_path), 2, tmp_path / "cut")
    whole = load_model(str(tiny_gpt2(tmp_path)), dtype="float32").model
    first, second = (load_model(str(tmp_path / "cut" / f"stage-{i}"), dtype="float32").model for i in range(2))
    assert torch.equal(first.transformer.wte.weight, whole.transformer.wte.weight)
    assert second.transformer.wte.weight.shape[0] == 8
    assert len(first.transformer.h) == len(second.transformer.h) == 1
    assert torch.equal(second.transformer.h[0].mlp.c_fc.weight, whole.transformer.h[1].mlp.c_fc.weight)


def test_a_packed_copy_is_cut_as_it_is(folder: Path, tmp_path: Path) -> None:
    LLM(str(folder), "none", quantize="int8", compile=False)
    (packed,) = folder.glob("sakiyomi-int8-*")
    cut(packed, 2, tmp_path / "cut")
    whole = load_model(str(packed), packed=True)
    second = load_model(str(tmp_path / "cut" / "stage-1"), packed=True)
    name = "model.layers.{}.mlp.down_proj"
    own, its = (m.model.get_submodule(name.format(i)).tensors() for m, i in ((second, 0), (whole, 1)))
    assert own.keys() == its.keys()
    assert all(torch.equal(own[part], its[part]) for part in own)
    assert target_config(tmp_path).sizes.layers == 2

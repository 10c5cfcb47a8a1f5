"""llama.cpp beside us: the same tokens from a file of the same weights; without the package one line says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.prompts import STORIES
from sakiyomi.evaluation.bench import llamacpp
from sakiyomi.evaluation.bench.llamacpp import LlamaCpp, gguf_file, gguf_folder, missing
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.quality import perplexity, their_logits
from sakiyomi.model_executor.loading import Loaded, load_model
from toys import save_model, tiny_llama, tiny_tokenizer

needed = pytest.mark.skipif(missing() is not None, reason=f"optional: {missing()}")
PARAMS = SamplingParams(max_new_tokens=48)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "cache_folder", lambda: tmp_path / "cache")


def tiny(folder: Path, model: LlamaForCausalLM) -> Loaded:
    return load_model(str(save_model(folder, model, tiny_tokenizer())), dtype="float32")


def rounded(loaded: Loaded) -> list[str]:
    """Rounded kinds with which this build of llama.cpp can compute on this machine."""
    kinds = ["Q8_0", "Q4_0"]
    for kind in list(kinds):
        try:
            llamacpp.check(gguf_file(loaded, kind))
        except UnsupportedError:
            kinds.remove(kind)
    return kinds


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "find_spec", lambda name: None if name == "llama_cpp" else "there")
    assert missing() == "llama-cpp-python not installed; pip install 'sakiyomi[bench]'"


@needed
def test_beside_others_on_a_gpu_it_has_to_run_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_cpp.llama_supports_gpu_offload", lambda: False)
    assert missing() is None
    assert "built for the CPU alone" in str(missing(gpu=True))
    monkeypatch.setattr("llama_cpp.llama_supports_gpu_offload", lambda: True)
    assert missing(gpu=True) is None


@needed
def test_the_tokens_are_those_of_transformers() -> None:
    """In float32, where near-ties are rare; with drafts of every length, refused ones and accepted ones."""
    target, draft = (load_model(name, dtype="float32") for name in ("tales", "tales-draft"))
    prompts = [target.tokenizer(text).input_ids[:40] for text in STORIES[:2]]
    expected = [Transformers(target.model).generate(prompt, PARAMS) for prompt in prompts]
    file, guess = gguf_file(target, "F32"), gguf_file(draft, "F32")
    runs = [LlamaCpp(file, 88, (0,), wide=True), LlamaCpp(file, 88, (0,), file, gamma=3, wide=True)]
    runs += [LlamaCpp(file, 88, (0,), guess, gamma, wide=True) for gamma in (1, 4)]
    for run in runs:
        assert [run.generate(prompt, PARAMS) for prompt in (*prompts, *prompts)] == expected * 2


@needed
def test_embeddings_of_their_own_an_end_token_and_rows_that_are_no_blocks(tmp_path: Path) -> None:
    loaded = tiny(tmp_path / "model", tiny_llama(dim=48, head_dim=12))
    prompt = list(range(5, 25))
    free = Transformers(loaded.model).generate(prompt, SamplingParams(max_new_tokens=20, ignore_eos=True))
    run = LlamaCpp(gguf_file(loaded, "F32"), 40, [free[6]], wide=True)
    assert run.generate(prompt, SamplingParams(max_new_tokens=20, ignore_eos=True)) == free
    assert run.generate(prompt, PARAMS) == free[: free.index(free[6]) + 1]
    for kind in ("BF16", "F16", *rounded(loaded)):  # 48 numbers are a block and a half
        assert len(LlamaCpp(gguf_file(loaded, kind), 40).generate(prompt, SamplingParams(max_new_tokens=5))) == 5


@needed
def test_perplexity_by_its_own_passes(tmp_path: Path) -> None:
    """In float32 it is that of transformers; rounded weights have one of their own."""
    loaded = tiny(tmp_path / "model", tiny_llama())
    chunks = [list(range(5, 60)), list(range(200, 170, -1))]
    found = {
        kind: perplexity(LlamaCpp(gguf_file(loaded, kind), 64, wide=True, every=True).logits, chunks)
        for kind in ("F32", *rounded(loaded))
    }
    expected = perplexity(their_logits(loaded.model), chunks)
    assert found.pop("F32") == pytest.approx(expected, rel=1e-3)
    assert len({*found.values(), expected}) == len(found) + 1
    assert all(value == pytest.approx(expected, rel={"Q8_0": 0.02, "Q4_0": 0.5}[kind]) for kind, value in found.items())


@needed
def test_a_file_is_written_once_for_each_version_of_a_model(tmp_path: Path) -> None:
    loaded = tiny(tmp_path / "model", tiny_llama())
    first = gguf_file(loaded, "Q8_0")
    written = first.stat().st_mtime_ns
    assert gguf_file(loaded, "Q8_0") == first
    assert first.stat().st_mtime_ns == written
    assert first.stat().st_size < gguf_file(loaded, "BF16").stat().st_size
    again = gguf_file(tiny(tmp_path / "model", tiny_llama(seed=1)), "Q8_0")
    assert again != first
    assert again.name.startswith("model-q8_0-")


@needed
def test_a_build_that_dies_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not take the bench along."""
    loaded = tiny(tmp_path / "model", tiny_llama())
    llamacpp.check(gguf_file(loaded, "F32"))
    dead = tmp_path / "python"
    dead.write_text("#!/bin/sh\nkill -SEGV $$\n")
    dead.chmod(0o755)
    monkeypatch.setattr(llamacpp.sys, "executable", str(dead))
    with pytest.raises(UnsupportedError, match=r"dies by SIGSEGV on model-f32-.*\.gguf; build"):
        llamacpp.check(gguf_file(loaded, "F32"))


@needed
def test_a_target_from_a_gguf_file_has_no_configuration_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "files" / "target.gguf"
    target.parent.mkdir()
    target.write_bytes(b"GGUF")
    loaded = dataclasses.replace(tiny(tmp_path / "model", tiny_llama()), name=str(target), folder=target.parent)
    first = gguf_file(loaded, "F32")
    target.write_bytes(b"GGUF of other weights")
    assert gguf_file(loaded, "F32") != first


@needed
def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path, *_: object) -> None:
        path.write_bytes(b"GGUF")
        raise OSError(28, "No space left on device")

    loaded = tiny(tmp_path / "model", tiny_llama())
    with monkeypatch.context() as patch, pytest.raises(LoadError, match="No space left"):
        patch.setattr(llamacpp, "_write", fails)
        gguf_file(loaded, "F32")
    assert not list(gguf_folder().iterdir())
    file = gguf_file(loaded, "F32")
    file.write_bytes(b"GGUF")
    with pytest.raises(LoadError, match="remove the file"):
        LlamaCpp(file, 40)


@needed
@pytest.mark.parametrize("values", [{"attention_bias": True}, {"hidden_act": "gelu"}])
def test_other_models_are_refused(tmp_path: Path, values: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match="without biases"):
        gguf_file(tiny(tmp_path / "model", tiny_llama(**values)), "F32")  # type: ignore[arg-type]

"""GGUF files as targets of what is built on models: audits, benchmarks, heads, training; and where they are refused."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from changed_gguf import MISSING, changed
from sakiyomi import LLM, InputError, LoadError, SamplingParams, UnsupportedError
from sakiyomi.cli import app
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.audit.audit import AuditConfig, audit
from sakiyomi.evaluation.bench import suites
from sakiyomi.evaluation.bench.config import BenchConfig
from sakiyomi.evaluation.bench.models import Pair, rounding
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.model_executor.gguf import folder
from sakiyomi.model_executor.gguf.export import write_gguf
from sakiyomi.model_executor.loading import packed, recording
from sakiyomi.model_executor.recorded_model import RecordedModel
from sakiyomi.model_executor.stages import cut
from sakiyomi.model_executor.weights import quantizes
from toys import byte_fallback_tokenizer, save_model, tiny_llama, tiny_tokenizer

native_only = pytest.mark.skipif(PackedWeights.create() is None, reason="the C++ kernels cannot be compiled here")
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "m.gguf"
    write_gguf(path, tiny_llama(), tiny_tokenizer(), "Q8_0")
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "sound.gguf"
    write_gguf(path, tiny_llama(), tiny_tokenizer(), "F32")
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start is the first one of its test; the compiled kernels stay where they are."""
    for module in (folder, packed, recording):
        monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.delenv("SAKIYOMI_RECORD")


# ---------------------------------------------------------------- rows in 8 bits


@native_only
def test_an_audit_judges_by_the_file_itself(file: Path) -> None:
    """Rows in 8 bits are no defect: what transformers makes of the unpacked numbers is no reference for them."""
    config = AuditConfig(max_new_tokens=24, gammas=(2,), seeds=(0,))
    options = {"compile": False, "dtype": "float32"}
    report = audit(str(file), f"model:{file}", prompts=["Once upon a time", "The fox"], config=config, options=options)
    assert report.reference == "own plain"
    assert report.ok, report.to_dict()


@native_only
def test_a_benchmark_compares_its_texts_with_its_own(file: Path) -> None:
    shared = {"repeats": 1, "max_new_tokens": 24, "prompt_tokens": 12, "count": 2, "gamma": 2, "compile": False}
    found = suites.measure(
        "speculative", BenchConfig(target=str(file), draft=f"model:{file}", dtype="float32", **shared)
    )
    assert [line.get("weights") for line in found.lines] == [None, None, None, "other", "other"]
    assert all(line["tokens_per_second"] for line in found.lines)
    assert found.conditions["rounding"] == "rows in 8 bits, weights as the file has them"


@native_only
def test_weights_that_are_numbers_round_nothing(sound: Path) -> None:
    llm = LLM(sound, "none", compile=False)
    assert not quantizes(llm.target.weights) and rounding(llm) is None
    assert EngineView(llm).generate(["the fox"], GREEDY)


def test_transformers_drafts_with_another_tokenizer(tmp_path: Path) -> None:
    """As of `sakiyomi demo --model FILE`, whose draft is that of another model."""
    target = save_model(tmp_path / "target", tiny_llama(), tiny_tokenizer())
    other = byte_fallback_tokenizer()
    draft = save_model(tmp_path / "draft", tiny_llama(len(other), layers=1), other)
    pair = Pair(BenchConfig(target=str(target), draft=f"model:{draft}", max_new_tokens=4, count=1))
    assert len(pair.peer("assisted").generate(pair.prompts[0], SamplingParams(max_new_tokens=4, ignore_eos=True))) == 4


# ---------------------------------------------------------------- recordings


@native_only
def test_the_first_start_is_recorded_with_an_embedding_of_its_own(file: Path) -> None:
    """Its layers are the first in the kernels' tables, as a recording wants them."""
    llm = LLM(file, "none")
    wanted = llm.generate("the fox", GREEDY).token_ids
    assert llm.record()
    again = LLM(file, "none")
    assert isinstance(again.target.module, RecordedModel)
    assert again.generate("the fox", GREEDY).token_ids == wanted


@native_only
@pytest.mark.few(1)
@pytest.mark.parametrize("draft", ["early-exit:1", "self-evicted"])
def test_passes_of_a_recorded_model_are_recorded_for_drafters_too(
    draft: str, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert LLM(file, "none").record()
    with caplog.at_level(logging.INFO, "sakiyomi"):
        llm = LLM(file, draft)
        assert not isinstance(llm.target.weights.module, RecordedModel)
        llm.wait()
        llm.generate("the fox", GREEDY)
    assert not any("cannot be recorded" in record.getMessage() for record in caplog.records)


# ---------------------------------------------------------------- what is refused


def test_a_file_has_no_layer_for_further_tokens(file: Path) -> None:
    with pytest.raises(InputError, match=r"m\.gguf is no folder in Hugging Face format"):
        LLM(file, "mtp")


def test_a_file_is_not_cut(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"m\.gguf is a GGUF file, which is not cut into stages"):
        cut(file, 2, tmp_path / "out")


@pytest.mark.parametrize("names", [("a.gguf",), ("a.gguf", "b.gguf"), tuple(f"{i}.gguf" for i in range(9))])
def test_a_folder_of_files_names_them(names: Sequence[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(LoadError) as caught:
        LLM(tmp_path, "none")
    shown = ", ".join([*names[:3], *(["..."] if names[3:] else [])])
    assert f"the GGUF files {shown}; pass such a file, not the folder" in str(caught.value)


@pytest.mark.parametrize(("keys", "said"), [
    ({"llama.rope.freq_base": 0.0}, "rope.freq_base is 0.0; expected a number above 0"),
    ({"llama.rope.freq_base": -1.0}, "rope.freq_base is -1.0; expected a number above 0"),
    ({"llama.rope.freq_base": float("nan")}, "rope.freq_base is nan; expected a finite number"),
    ({"llama.attention.layer_norm_rms_epsilon": float("inf")}, "layer_norm_rms_epsilon is inf; expected a finite"),
    ({"llama.attention.head_count": 0}, "attention.head_count is 0; expected a number above 0"),
    ({"llama.attention.head_count_kv": 0}, "attention.head_count_kv is 0; expected a number above 0"),
    ({"tokenizer.ggml.merges": ["x", "y z w"]}, "has 2 merges, and none of them joins two of its tokens"),
    ({"tokenizer.ggml.merges": MISSING}, "without its merges"),
])  # fmt: skip
def test_settings_of_which_nothing_can_be_computed(
    keys: dict[str, object], said: str, sound: Path, tmp_path: Path
) -> None:
    path = changed(sound, tmp_path / "m.gguf", keys)
    with pytest.raises(LoadError) as caught:
        LLM(path, "none")
    assert str(path) in str(caught.value) and said in str(caught.value)


@pytest.mark.few(2)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "blk.1.ffn_norm.weight", "token_embd.weight"])
def test_weights_that_are_no_numbers(name: str, value: float, sound: Path, tmp_path: Path) -> None:
    """Named by the file, and not taken for layers that our cache does not serve."""
    shape = {"blk.0.attn_q.weight": (32, 32), "token_embd.weight": (320, 32)}.get(name, (32,))
    path = changed(sound, tmp_path / "m.gguf", {}, {name: np.full(shape, value, np.float32)})
    with pytest.raises(LoadError) as caught:
        LLM(path, "none")
    message = str(caught.value)
    assert message.startswith(f"{path}: the logits of LlamaForCausalLM are no numbers") and "again" in message
    if "norm" in name:
        assert "model.layers.1.post_attention_layernorm.weight" in message


# ---------------------------------------------------------------- chats


@pytest.mark.few(2)
@pytest.mark.parametrize(("template", "said"), [
    ("{% for m in messages %}{{m.role}", "TemplateSyntaxError"),
    ("{{ raise_exception('no user') }}", "no user"),
    (7, "chat template"),
])  # fmt: skip
def test_a_damaged_template_is_one_sentence(template: object, said: str, sound: Path, tmp_path: Path) -> None:
    path = changed(sound, tmp_path / "m.gguf", {"tokenizer.chat_template": template})
    asked = ["chat", "--target", str(path), "--draft", "none", "--compile", "false", "--max-new-tokens", "2"]
    done = CliRunner().invoke(app, asked, input="hello\n")
    assert done.exit_code == 2 and said in done.output and "none for plain text" in done.output
    assert CliRunner().invoke(app, [*asked, "--template", "none"], input="hello\n").exit_code == 0

"""GGUF files: the same tokens as the folder they were written from, and bad ones refused in one line."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from architectures import greedy, prompt
from damage import DAMAGES, refusals
from sakiyomi import LLM, LoadError, MemoryLimitError, SakiyomiError, SamplingParams, UnsupportedError
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.model_executor.gguf import export
from sakiyomi.model_executor.gguf.export import write_gguf
from sakiyomi.model_executor.loading import load_model
from toys import save_model, tiny_llama, tiny_tokenizer

gguf = pytest.importorskip("gguf")
native_only = pytest.mark.skipif(PackedWeights.create() is None, reason="the C++ kernels cannot be compiled here")
TEXTS = ["The fox went", "むかし"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "folder", tiny_llama(), tiny_tokenizer())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("files")
    for kind in ("F32", "BF16", "F16", "Q8_0", "Q4_0"):
        write_gguf(place / f"{kind}.gguf", tiny_llama(), tiny_tokenizer(), kind)
    return place


@pytest.fixture
def file(files: Path, tmp_path: Path) -> Path:
    """One that a test may damage."""
    return Path(shutil.copy(files / "F32.gguf", tmp_path / "model.gguf"))


def written(target: Path, **options: Any) -> list[tuple[list[int], str]]:
    llm = LLM(str(target), "none", compile=False, **options)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    return [(done.token_ids, done.text) for done in llm.generate(TEXTS, params)]


def refused(kind: type[SakiyomiError], *words: str, target: Path, **options: Any) -> None:
    with pytest.raises(kind) as caught:
        load_model(target, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(target), *words):
        assert word in message, message


def test_the_same_tokens(files: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wanted = written(folder)
    capfd.readouterr()  # what libraries say when they are imported first
    assert written(files / "F32.gguf") == wanted
    shown = [line for text in capfd.readouterr() for line in text.splitlines() if "a packed copy of" not in line]
    assert not shown, "transformers shows a bar of its own"


# --- what transformers leaves out -------------------------------------------------------------------------------------

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip


def with_more(path: Path, model: Any, monkeypatch: pytest.MonkeyPatch, add: Callable[[Any], None]) -> Path:
    """The file of a model in float32, with more in it than the weights and what they need."""
    begin = gguf.GGUFWriter.write_header_to_file

    def more(writer: Any, *args: Any) -> None:
        add(writer)
        begin(writer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", more)
        patch.setattr(export, "_divisors", lambda model: None)
        patch.setattr(export, "_positions", lambda config: {})
        patch.setattr(export, "build_config", lambda file: model.config)  # which may be refused, as is to be shown
        write_gguf(path, model, tiny_tokenizer(), "F32")
    return path


def tensor(name: str, values: Any) -> Callable[[Any], None]:
    return lambda writer: writer.add_tensor(name, np.array(values, np.float32))


def divisors(model: Any) -> list[float]:
    """As llama.cpp's converter writes them for Llama 3.1."""
    plain = tiny_llama().model.rotary_emb.inv_freq
    return list((plain / model.model.rotary_emb.inv_freq).tolist())


@pytest.mark.few(2)
@pytest.mark.parametrize("options", [{}, {"exact": True}, {"draft": "early-exit:1"}, {"max_context": 300}])
def test_divisors_of_the_frequencies_are_used(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain, tokens = tiny_llama(rope_parameters=LLAMA3), tiny_llama(), prompt(150)
    file = with_more(tmp_path / "m.gguf", model, monkeypatch, tensor("rope_freqs.weight", divisors(model)))
    options = {"draft": "none", "compile": False} | options
    llm = LLM(str(file), **options)
    (out,) = llm.generate([tokens], SamplingParams(max_new_tokens=10, ignore_eos=True))
    assert out.token_ids == greedy(model, tokens, 10) != greedy(plain, tokens, 10)


@native_only
def test_packed_copies_keep_the_divisors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAKIYOMI_CACHE_DIR", str(tmp_path / "cache"))
    model, tokens = tiny_llama(rope_parameters=LLAMA3), prompt(150)
    folder = save_model(tmp_path / "folder", model, tiny_tokenizer())
    file = with_more(tmp_path / "m.gguf", model, monkeypatch, tensor("rope_freqs.weight", divisors(model)))
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    wanted, *found = (
        LLM(str(target), "none", quantize="int8").generate([tokens], params)[0].token_ids
        for target in (folder, file, file)
    )
    assert found == [wanted, wanted]


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["yarn", "linear", "longrope"])
def test_scaled_positions_are_used(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0}
    rope |= {"factor": 4.0} if kind != "longrope" else {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    rope |= {"original_max_position_embeddings": 128} if kind != "linear" else {}
    model, tokens = tiny_llama(rope_parameters=rope), prompt(100)

    def add(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        if kind == "longrope":
            tensor("rope_factors_short.weight", [1.0] * 4)(writer)
            tensor("rope_factors_long.weight", [3.0] * 4)(writer)
        else:
            writer.add_rope_scaling_factor(4.0)
        if kind != "linear":
            writer.add_rope_scaling_orig_ctx_len(128)

    file = with_more(tmp_path / "m.gguf", model, monkeypatch, add)
    config = load_model(file).model.config.rope_parameters
    assert {key: config[key] for key in rope} == rope
    (out,) = LLM(str(file), "none", compile=False).generate(
        [tokens], SamplingParams(max_new_tokens=10, ignore_eos=True)
    )
    assert out.token_ids == greedy(model, tokens, 10)


def test_what_nobody_reads_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def add(writer: Any) -> None:
        tensor("blk.0.attn_sinks.weight", [1.0] * 4)(writer)
        writer.add_float32("llama.final_logit_softcapping", 30.0)

    file = with_more(tmp_path / "m.gguf", tiny_llama(), monkeypatch, add)
    load_model(file)
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: metadata of the model that are not used: final_logit_softcapping",
        f"{file}: 1 tensors of the file are not used: blk.0.attn_sinks.weight",
    ]


@pytest.mark.parametrize(("add", "named"), [
    (tensor("rope_freqs.weight", [1.0] * 3), "rope_freqs.weight"),
    (tensor("rope_factors_long.weight", [1.0] * 4), "rope_factors_long.weight"),
    (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "rope.scaling.type longrope"),
    (lambda writer: (writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), writer.add_rope_scaling_factor(4.0),
                     writer.add_rope_scaling_yarn_log_mul(0.1)), "rope.scaling.yarn_log_multiplier"),
])  # fmt: skip
def test_positions_that_the_model_would_not_have_are_refused(
    add: Callable[[Any], None], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = with_more(tmp_path / "m.gguf", tiny_llama(), monkeypatch, add)
    refused(UnsupportedError, named, "Hugging Face format", target=file)


@pytest.mark.thorough
@native_only
def test_rounded(file: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed copy goes into the cache: whose the folder is that the file lies in nobody knows."""
    monkeypatch.setenv("SAKIYOMI_CACHE_DIR", str(tmp_path / "cache"))
    (file.parent / "somebodys.py").write_text("", encoding="utf-8")
    before = {path.name for path in tmp_path.iterdir()}
    for kind in ("int8", "int4"):
        wanted = written(folder, quantize=kind)
        assert written(file, quantize=kind) == wanted
        assert written(file, quantize=kind) == wanted
        (copy,) = (tmp_path / "cache" / "packed").glob(f"*{kind}*")
        assert written(copy) == wanted
        assert not (copy / "somebodys.py").exists()
    assert {path.name for path in tmp_path.iterdir()} == before | {"cache"}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16"), ("Q4_0", "bfloat16")],
)
def test_weights_are_ordinary_numbers(kind: str, dtype: str, files: Path) -> None:
    """In the dtype they are stored in; rounded ones come back in bfloat16, and in float32 where that is asked for."""
    assert load_model(files / f"{kind}.gguf").model.dtype == getattr(torch, dtype)
    model = load_model(files / f"{kind}.gguf", dtype="float32").model
    assert {type(module) for module in model.modules() if hasattr(module, "in_features")} == {torch.nn.Linear}
    own = tiny_llama()
    ids = torch.tensor([prompt(20)])
    with torch.no_grad():
        got, wanted = model(ids).logits, own(ids).logits
    most = {"F32": 1e-5, "F16": 0.01, "BF16": 0.05, "Q8_0": 0.1, "Q4_0": 1.0}[kind]
    assert float((got - wanted).norm() / wanted.norm()) < most


def test_a_file_is_named_like_a_folder(file: Path) -> None:
    loaded = load_model(str(file))
    assert loaded.name == str(file)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the fox")) == "the fox"


def test_a_file_may_draft(files: Path, folder: Path) -> None:
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, gamma=3)
    (plain,), (out,) = (
        LLM(str(folder), draft).generate(TEXTS[:1], params) for draft in ("none", str(files / "Q8_0.gguf"))
    )
    assert out.token_ids == plain.token_ids and out.stats.tau > 2


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_a_file_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "vocabulary", lambda *_: {"tokenizer.ggml.model": "no_vocab"})
    write_gguf(tmp_path / "bare.gguf", tiny_llama(), None, "F32")
    refused(LoadError, "holds no tokenizer", "(model, tokenizer)", target=tmp_path / "bare.gguf")


def test_an_unknown_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "nonesuch")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(UnsupportedError, "nonesuch", "Hugging Face format", target=tmp_path / "other.gguf")


@pytest.mark.parametrize("keep", [4, 20, 100, 3000, -50_000, -10])
def test_a_file_that_is_cut_off(keep: int, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:keep])
    refused(LoadError, "no intact GGUF file", "download it again", target=file)


@pytest.mark.thorough
def test_a_damaged_file_is_refused_in_words_or_read(file: Path) -> None:
    assert refusals([file], DAMAGES // 2, lambda: LLM(file, "none", compile=False).generate("the fox"))


@pytest.mark.parametrize("data", [b"", b"GG", b"no such file"])
def test_something_else(data: bytes, file: Path) -> None:
    file.write_bytes(data)
    refused(LoadError, "does not begin as a GGUF file does", "download it again", target=file)


def test_no_such_file(tmp_path: Path) -> None:
    refused(LoadError, "there is no file", "nowhere.gguf", target=tmp_path / "nowhere.gguf")


def test_a_plain_install_reads_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert load_model(file).model.config.model_type == "llama"


def test_a_file_that_does_not_fit_unpacked(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 4 bits take four times the file's size; rounding them again would not help."""
    file = files / "Q4_0.gguf"
    weights = sum(parameter.numel() for parameter in tiny_llama().parameters())
    monkeypatch.setattr(
        "sakiyomi.model_executor.loading.reader.Reader.read", lambda *_, **__: pytest.fail("weights were read")
    )
    monkeypatch.setattr("sakiyomi.core.memory._group_headroom", lambda: int(1.9 * weights))
    refused(MemoryLimitError, "in bfloat16 needs", "the largest model that fits", target=file)
    monkeypatch.setattr("sakiyomi.core.memory._group_headroom", lambda: int(2.1 * weights))
    refused(MemoryLimitError, "in float32 needs", "with dtype='bfloat16'", target=file, dtype="float32")


def test_on_a_gpu(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UnsupportedError, match="takes no GGUF file; pass the model's folder, or device='cpu'"):
        load_model(file, quantize="int8")

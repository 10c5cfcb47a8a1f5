"""Every way in, and every bad input: one clear error that names the value and the remedy."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import toys
from sakiyomi import LLM
from sakiyomi.core import memory
from sakiyomi.core.embedded import EMBEDDED, embedded
from sakiyomi.core.errors import InputError, LoadError, MemoryLimitError, UnsupportedError
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.model_executor.loading import Loaded, check_pair, load_model, read_checkpoint, same_tokenizer
from toys import byte_fallback_tokenizer, save_model, tiny_llama, tiny_tokenizer
from warm import warm


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "good", tiny_llama(), tiny_tokenizer())


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(good, tmp_path / "model"))


refused = functools.partial(toys.refused, load_model)


def set_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")


# --- what works -------------------------------------------------------------------------------------------------------


def test_folder(good: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load_model(good)
    assert isinstance(loaded, Loaded)
    assert loaded.owned
    assert loaded.folder == good
    assert loaded.name == str(good)
    assert not loaded.model.training
    assert loaded.model.dtype == torch.float32
    assert torch.equal(loaded.model.lm_head.weight, tiny_llama().lm_head.weight)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the fox")) == "the fox"
    assert capfd.readouterr() == ("", ""), "loading a small model should be silent"


def test_transformers_settings_are_left_alone(good: Path) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(good)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "torch.bfloat16"])
def test_dtype_is_honoured(good: Path, dtype: Any) -> None:
    assert load_model(str(good), dtype=dtype).model.dtype == torch.bfloat16


def test_dtype_auto_is_the_checkpoints(folder: Path) -> None:
    tiny_llama().to(torch.bfloat16).save_pretrained(folder)
    assert load_model(folder).model.dtype == torch.bfloat16
    # An old config without a dtype: the tensors themselves tell.
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert load_model(folder).model.dtype == torch.bfloat16


def test_sharded_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    tiny_llama().save_pretrained(folder, max_shard_size="40kB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert torch.equal(load_model(folder).model.lm_head.weight, tiny_llama().lm_head.weight)


def test_tied_weights_are_not_missing(folder: Path) -> None:
    tiny_llama(tie_word_embeddings=True).save_pretrained(folder)
    model = load_model(folder).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_pair_is_used_as_it_is() -> None:
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    loaded = load_model((model, tokenizer))
    assert loaded.model is model
    assert loaded.tokenizer is tokenizer
    assert not loaded.owned
    assert loaded.folder is None


def test_home_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert load_model("~/model").folder == folder


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_models(name: str) -> None:
    try:
        folder = embedded(name)
    except LoadError:
        pytest.skip(f"the model {name} has not been trained in this checkout")
    loaded = load_model(name)
    assert loaded.folder == folder
    assert loaded.name == name


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float12", "int8", "", torch.int8])
def test_unknown_dtype(good: Path, dtype: Any) -> None:
    refused(InputError, "dtype", repr(dtype), "'bfloat16'", target=good, dtype=dtype)


@pytest.mark.parametrize("device", ["gpu0", "", "cuda:x", "mps", "meta"])
def test_unknown_device(good: Path, device: str) -> None:
    refused(InputError, "device", repr(device), "'cpu'", target=good, device=device)


def test_a_device_that_is_not_there(good: Path) -> None:
    refused(InputError, "cuda:99", "device='cpu'", target=good, device="cuda:99")


def test_options_that_contradict_a_pair() -> None:
    pair = (tiny_llama(), tiny_tokenizer())
    refused(InputError, "bfloat16", "float32", "dtype='auto'", target=pair, dtype="bfloat16")
    pair[0].to("meta")
    refused(InputError, "meta", "cpu", "device='auto'", target=pair, device="cpu")


@pytest.mark.parametrize("target", [None, 3, ["a", "b"], (1, 2), (None,)])
def test_a_target_of_another_kind(target: Any) -> None:
    refused(InputError, "expected", target=target)


def test_a_model_without_its_tokenizer() -> None:
    refused(InputError, "LlamaForCausalLM", "(model, tokenizer)", target=tiny_llama())
    refused(InputError, "in this order", target=(tiny_tokenizer(), tiny_llama()))


# --- folders ----------------------------------------------------------------------------------------------------------


def test_missing_folder(tmp_path: Path) -> None:
    refused(LoadError, "no folder", "nowhere", target=tmp_path / "nowhere")
    refused(LoadError, "no folder", "./nowhere", target="./nowhere")
    refused(LoadError, "no folder", "a/b/c", target="a/b/c")
    refused(LoadError, "no folder", "''", target="")


def test_a_file_instead_of_a_folder(folder: Path) -> None:
    refused(LoadError, "is a file", "folder", target=folder / "model.safetensors")


def test_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(LoadError, "config.json", str(folder), "Hugging Face format", target=folder)
    (folder / "x.gguf").write_bytes(b"GGUF")
    refused(LoadError, "GGUF", target=folder)
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    refused(LoadError, "adapter", "merge", target=folder)


@pytest.mark.parametrize("text", ["{broken", "[1]", "", '{"model_type": 3}', '{"model_type": "nonesuch"}', "{}"])
def test_bad_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="utf-8")
    refused(LoadError, "config.json", target=folder)


def test_config_with_a_senseless_value(folder: Path) -> None:
    set_config(folder, hidden_size="large")
    refused(LoadError, "config.json", "hidden_size", target=folder)


def test_folder_without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    refused(LoadError, "no tokenizer", "tokenizer.json", target=folder)


def test_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    refused(LoadError, "tokenizer", str(folder), target=folder)


# --- weights ----------------------------------------------------------------------------------------------------------


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    refused(LoadError, "no weights", "model.safetensors", "other.safetensors", target=folder)


@pytest.mark.parametrize("keep", [0, 5, 8, 100, 2000, -1])
def test_truncated_weights(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(LoadError, "model.safetensors", "cut off", "download", target=folder)


@pytest.mark.parametrize(
    ("place", "damage"),
    [(0, b"\xff" * 8), (8, b"no json"), (8, b'{"a":7}'.ljust(12)), (-1, b"\0\0extra bytes at the end")],
)
def test_damaged_weights(folder: Path, place: int, damage: bytes) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:place] + damage + content[place + len(damage) if place >= 0 else len(content) :])
    refused(LoadError, "model.safetensors", "no intact", "download", target=folder)


def test_header_that_contradicts_itself(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    assert content.count(b'"F32"') > 1
    path.write_bytes(content.replace(b'"F32"', b'"F64"', 1))
    refused(LoadError, "no intact", "F64", target=folder)


def test_git_lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n", encoding="utf-8"
    )
    refused(LoadError, "git lfs pull", target=folder)


def sharded(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    tiny_llama().save_pretrained(folder, max_shard_size="40kB")
    return folder / "model.safetensors.index.json"


def test_missing_shard(folder: Path) -> None:
    sharded(folder)
    lost = sorted(folder.glob("model-*.safetensors"))[1]
    lost.unlink()
    refused(LoadError, "missing", lost.name, target=folder)


def test_truncated_shard(folder: Path) -> None:
    sharded(folder)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    refused(LoadError, shard.name, "cut off", target=folder)


def test_bad_shard_index(folder: Path) -> None:
    index = sharded(folder)
    good = index.read_text(encoding="utf-8")
    index.write_text("{", encoding="utf-8")
    refused(LoadError, index.name, target=folder)
    index.write_text('{"weight_map": {}}', encoding="utf-8")
    refused(LoadError, index.name, "weight_map", target=folder)
    index.write_text(good.replace("model-00001", "../model-00001"), encoding="utf-8")
    refused(LoadError, "outside", target=folder)
    values = json.loads(good)
    values["weight_map"]["lost.weight"] = next(iter(values["weight_map"].values()))
    index.write_text(json.dumps(values), encoding="utf-8")
    refused(LoadError, "lost.weight", "belong together", target=folder)


def test_weights_of_another_shape(folder: Path) -> None:
    set_config(folder, intermediate_size=128)
    refused(LoadError, "cannot be loaded", str(folder), target=folder)


def test_weights_that_lack_tensors(folder: Path) -> None:
    # transformers only warns, and would generate with random layers.
    set_config(folder, num_hidden_layers=3)
    refused(LoadError, "lack", "model.layers.2", target=folder)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(tiny_llama().state_dict(), folder / "pytorch_model.bin")


def test_pickle_is_refused(folder: Path) -> None:
    pickled(folder)
    refused(LoadError, "pytorch_model.bin", "pickle", "allow_pickle=True", target=folder)
    assert torch.equal(load_model(folder, allow_pickle=True).model.lm_head.weight, tiny_llama().lm_head.weight)


def test_code_of_a_pickle_does_not_run(folder: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "owned"),)

    pickled(folder)
    torch.save({"model.embed_tokens.weight": Evil()}, folder / "pytorch_model.bin")
    refused(LoadError, "pickle", target=folder)
    refused(LoadError, "cannot be loaded", target=folder, allow_pickle=True)
    assert not (tmp_path / "owned").exists()


def test_checkpoint_figures(good: Path) -> None:
    checkpoint = read_checkpoint(good)
    parameters = sum(p.numel() for p in tiny_llama().parameters())
    assert checkpoint.parameters == parameters
    assert checkpoint.stored_bytes == checkpoint.bytes_as(4) == 4 * parameters
    assert checkpoint.bytes_as(2) == 2 * parameters
    assert checkpoint.dtype == "float32"


# --- code that comes with a model -------------------------------------------------------------------------------------


def with_code(folder: Path, model_type: str) -> Path:
    """A folder whose Python file leaves a mark when it runs."""
    mark = folder / "it-ran"
    (folder / "configuration_own.py").write_text(
        f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
        "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n",
        encoding="utf-8",
    )
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_own import OwnConfig\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n",
        encoding="utf-8",
    )
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    set_config(folder, model_type=model_type, auto_map=auto_map)
    return mark


def test_remote_code_does_not_run_unasked(folder: Path) -> None:
    mark = with_code(folder, "own")
    refused(LoadError, "'own'", "trust_remote_code=True", target=folder)
    assert not mark.exists()


@pytest.mark.usefixtures("own_code")
def test_remote_code_runs_when_trusted(folder: Path) -> None:
    mark = with_code(folder, "own")
    assert type(load_model(folder, trust_remote_code=True).model).__name__ == "OwnModel"
    assert mark.exists()


def test_native_class_instead_of_remote_code(folder: Path) -> None:
    mark = with_code(folder, "llama")
    assert type(load_model(folder).model).__name__ == "LlamaForCausalLM"
    assert not mark.exists()


# --- kinds of models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["t5", "bart", "whisper", "marian", "pegasus"])
def test_encoder_decoder_models(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
    refused(UnsupportedError, kind, "encoder-decoder", target=tmp_path)


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra"])
def test_encoders(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
    refused(UnsupportedError, kind, "encoder", target=tmp_path)


def test_models_that_are_no_language_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}), encoding="utf-8")
    refused(UnsupportedError, "vit", "causal", target=tmp_path)


KINDS = [
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "opt", "gpt2", "gpt_neox",
    "olmo2", "starcoder2", "falcon", "granite", "stablelm", "bloom", "mpt", "mixtral", "cohere2", "gpt_oss", "mamba",
    "mamba2", "jamba", "bamba", "zamba2", "recurrent_gemma", "nemotron_h", "falcon_h1", "qwen3_next", "lfm2",
    "rwkv", "xlstm", "minimax",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_decoders_are_not_refused(kind: str, tmp_path: Path) -> None:
    from sakiyomi.model_executor.loading.families import check_supported, read_config

    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
    check_supported(read_config(tmp_path), kind)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_too_large_is_refused_before_it_is_read(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = read_checkpoint(good).parameters
    monkeypatch.setattr(
        "sakiyomi.model_executor.loading.model.Reader.read", lambda *_: pytest.fail("weights were read")
    )
    monkeypatch.setattr("sakiyomi.core.memory._group_headroom", lambda: 3 * parameters)
    message = refused(MemoryLimitError, "float32", "are available", "the largest model", target=good)
    assert memory.readable(4 * parameters) in message
    assert "dtype='bfloat16'" in message, "a dtype in which it fits should be named"
    monkeypatch.setattr("sakiyomi.core.memory._group_headroom", lambda: parameters)
    assert "bfloat16" not in refused(MemoryLimitError, "float32", target=good)


def test_available_memory_obeys_the_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, root = tmp_path / "proc/self/cgroup", tmp_path / "sys/fs/cgroup"
    monkeypatch.setattr(memory, "_ROOT", tmp_path)
    assert memory.available_bytes() > 0, "no such file: the machine's memory"

    own.parent.mkdir(parents=True)
    own.write_text("0::/a/b\n", encoding="utf-8")
    (root / "a" / "b").mkdir(parents=True)
    for folder, limit in ((root / "a" / "b", "max"), (root / "a", "1000")):
        (folder / "memory.max").write_text(limit, encoding="utf-8")
        (folder / "memory.current").write_text("900", encoding="utf-8")
        (folder / "memory.stat").write_text("anon 800\ninactive_file 50\n", encoding="utf-8")
    assert memory.available_bytes() == 150, "a parent's limit holds, file pages can be given back"

    own.write_text("5:memory:/x\n4:cpu:/\n", encoding="utf-8")
    group = root / "memory" / "x"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("2000", encoding="utf-8")
    (group / "memory.usage_in_bytes").write_text("500", encoding="utf-8")
    (group / "memory.stat").write_text("total_inactive_file 0\n", encoding="utf-8")
    assert memory.available_bytes() == 1500
    (group / "memory.limit_in_bytes").write_text(str((1 << 63) - 4096), encoding="utf-8")
    assert memory.available_bytes() > 1_000_000


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1500, "1.5 kB"),
        (123_400_000, "123 MB"),
        (13.5e9, "13.5 GB"),
        (2e12, "2.0 TB"),
    ],
)
def test_readable(count: float, text: str) -> None:
    assert memory.readable(count) == text


# --- embedded names ---------------------------------------------------------------------------------------------------


def test_embedded_names() -> None:
    refused(InputError, "retriever-retaining", "holds retaining heads", target="retriever-retaining")
    refused(InputError, "tales-retaining", "holds retaining heads", "locret:tales-retaining", target="tales-retaining")
    refused(InputError, "tales-medusa", "holds Medusa heads", "medusa:tales-medusa", target="tales-medusa")
    refused(InputError, "tales-eagle", "holds an EAGLE head", "eagle:tales-eagle", target="tales-eagle")
    assert (embedded("tales-medusa") / "medusa_lm_head.safetensors").is_file()
    with pytest.raises(InputError, match="no embedded model"):
        embedded("tails")


def test_embedded_files_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["sakiyomi.core.embedded"], "EMBEDDED_ROOT", tmp_path)
    refused(LoadError, "tales", str(tmp_path), "install", target="tales")


# --- the hub ----------------------------------------------------------------------------------------------------------

LOAD = """
import sys, time
import importlib, huggingface_hub.constants
importlib.reload(huggingface_hub.constants)  # a fork: as they were set for this process
from sakiyomi.core.errors import SakiyomiError
from sakiyomi.model_executor.loading import load_model
import huggingface_hub, transformers
start = time.perf_counter()
try:
    loaded = load_model(sys.argv[1], **eval(sys.argv[2]))
    print("loaded", sum(p.numel() for p in loaded.model.parameters()))
except SakiyomiError as error:
    print(type(error).__name__, error)
print(time.perf_counter() - start)
"""


def in_new_process(name: str, cache: Path, endpoint: str, options: str = "{}", **env: str) -> tuple[str, float]:
    """huggingface_hub reads its settings once in a process."""
    settings = os.environ | {"HF_HOME": str(cache), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"} | env
    for proxy in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        settings.pop(proxy, None)
    done = subprocess.run(
        [*warm(), "-c", LOAD, name, options],
        env=settings,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    )
    said, seconds = done.stdout.strip().rsplit("\n", 1)
    return said, float(seconds)


def test_hub_id_without_network_fails_fast(tmp_path: Path) -> None:
    said, seconds = in_new_process("someone/some-model", tmp_path, "http://127.0.0.1:9")
    assert said.startswith("LoadError")
    for word in ("someone/some-model", "hub id", "cannot be reached", "folder", "tales"):
        assert word in said
    assert seconds < 10


def test_hub_id_offline(tmp_path: Path) -> None:
    said, seconds = in_new_process("gpt2", tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert said.startswith("LoadError")
    assert "HF_HUB_OFFLINE" in said
    assert seconds < 5


def test_hub_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    from sakiyomi.core import hub

    class Silent:
        def model_info(self, *_: Any, **__: Any) -> None:
            time.sleep(2)

    monkeypatch.setattr("huggingface_hub.HfApi", Silent)
    monkeypatch.setattr(hub, "_ANSWER_WITHIN", 0.1)
    assert hub._ask("a/b") is None


@pytest.fixture
def hub(good: Path) -> Iterator[tuple[str, list[str]]]:
    """A server that speaks as much of the hub's protocol as a download takes; it holds a/good and a/pickled."""
    asked: list[str] = []
    commit = "0123456789abcdef0123456789abcdef01234567"
    files = {path.name: path.read_bytes() for path in good.iterdir()}
    repos = {"a/good": files, "a/pickled": {"config.json": files["config.json"], "pytorch_model.bin": b"x"}}
    repos["a/bert"] = {**files, "config.json": b'{"model_type": "bert"}'}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(body=True)

        def do_HEAD(self) -> None:
            self.reply(body=False)

        def reply(self, body: bool) -> None:
            path = self.path.split("?")[0].strip("/")
            asked.append(path)
            content, kind = self.find(path)
            self.send_response(200 if content is not None else 404)
            if content is None:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content or b"")))
            self.send_header("ETag", f'"{path.replace("/", "-")}"')
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if body and content is not None:
                self.wfile.write(content)

        def find(self, path: str) -> tuple[bytes | None, str]:
            for repo, held in repos.items():
                if path.startswith(f"api/models/{repo}"):
                    rest = path.removeprefix(f"api/models/{repo}").strip("/")
                    if rest.startswith("tree"):
                        listing: Any = [
                            {"type": "file", "path": name, "size": len(data), "oid": name}
                            for name, data in held.items()
                        ]
                    else:
                        siblings = [{"rfilename": name, "size": len(data)} for name, data in held.items()]
                        listing = {"id": repo, "sha": commit, "siblings": siblings, "tags": [], "private": False}
                    return json.dumps(listing).encode(), "application/json"
                if path.startswith(f"{repo}/resolve/"):
                    return held.get(path.rsplit("/", 1)[1]), "application/octet-stream"
            return None, "text/plain"

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_hub_download_then_offline(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    address, asked = hub
    said, _ = in_new_process("a/good", tmp_path, address)
    assert said == f"loaded {sum(p.numel() for p in tiny_llama().parameters())}"
    assert any(path.endswith("model.safetensors") for path in asked)
    said, seconds = in_new_process("a/good", tmp_path, "http://127.0.0.1:9")
    assert said.startswith("loaded"), "the cached copy serves without a network"
    assert seconds < 20


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a/none", ["LoadError", "a/none", "no model of that name", "hf auth login"]),
        ("a/pickled", ["LoadError", "only pickle weights", "allow_pickle"]),
        ("a/bert", ["UnsupportedError", "bert"]),
    ],
)
def test_hub_refusals_download_no_weights(
    hub: tuple[str, list[str]], tmp_path: Path, name: str, words: list[str]
) -> None:
    address, asked = hub
    said, _ = in_new_process(name, tmp_path, address)
    for word in words:
        assert word in said
    assert not any(path.endswith((".safetensors", ".bin")) for path in asked)


# --- pairs ------------------------------------------------------------------------------------------------------------


def loaded(vocab: int = 320, tokenizer: Any = None, name: str = "x") -> Loaded:
    return Loaded(tiny_llama(vocab), tokenizer or tiny_tokenizer(), name, None, owned=True)


def test_same_tokenizer() -> None:
    assert same_tokenizer(tiny_tokenizer(), tiny_tokenizer())
    assert not same_tokenizer(tiny_tokenizer(), byte_fallback_tokenizer())
    assert not same_tokenizer(tiny_tokenizer(), None)


@pytest.mark.parametrize(
    ("extra", "same"),
    [
        ("<pad>", True),
        ("[unused7]", True),
        ("<extra_id_0>", True),
        ("<|reserved_special_token_3|>", True),
        ("<|im_start|>", False),
        ("padding is a word", False),
        ("emptyhanded", False),
    ],
)
def test_padding_entries_do_not_count(extra: str, same: bool) -> None:
    longer = tiny_tokenizer()
    longer.add_tokens([extra])
    assert same_tokenizer(tiny_tokenizer(), longer) is same
    assert same_tokenizer(longer, tiny_tokenizer()) is same


def test_own_pad_token_does_not_count() -> None:
    longer = tiny_tokenizer()
    longer.add_special_tokens({"pad_token": "<<filling>>"})
    assert same_tokenizer(tiny_tokenizer(), longer)


def test_an_end_token_that_also_pads_counts() -> None:
    longer = tiny_tokenizer()
    longer.add_special_tokens({"pad_token": "<|im_end|>", "eos_token": "<|im_end|>"})
    assert not same_tokenizer(tiny_tokenizer(), longer)


def test_shorter_vocabulary_is_another() -> None:
    assert not same_tokenizer(tiny_tokenizer(300), tiny_tokenizer(320))


def test_check_pair_gives_the_shared_size() -> None:
    assert check_pair(loaded(352), loaded(320)) == 320
    assert check_pair(loaded(320), loaded(352)) == 320


def test_check_pair_refuses_another_tokenizer() -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_pair(loaded(name="big"), loaded(tokenizer=byte_fallback_tokenizer(), name="small"))
    message = str(caught.value)
    for word in ("big", "small", str(len(tiny_tokenizer())), str(len(byte_fallback_tokenizer())), "train draft"):
        assert word in message


def test_check_pair_refuses_a_draft_with_too_few_rows() -> None:
    with pytest.raises(UnsupportedError, match=r"300 tokens.*320"):
        check_pair(loaded(320), loaded(300))


# --- configurations of other files ------------------------------------------------------------------------------------


def test_a_configuration_with_fewer_layers_than_the_weights(folder: Path) -> None:
    """transformers would leave out the last ones, and the text would be another."""
    set_config(folder, num_hidden_layers=1)
    refused(LoadError, "speaks of 1 layers", "have 2", "the same source", target=folder)


@pytest.mark.parametrize("count", [10**9, 10**5])
def test_a_configuration_with_absurdly_many_layers_is_refused_at_once(folder: Path, count: int) -> None:
    set_config(folder, num_hidden_layers=count)
    began = time.perf_counter()
    refused(LoadError, "num_hidden_layers", "no model has so many", target=folder)
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [2, null]}'])
def test_damaged_generation_settings_are_refused(folder: Path, text: str) -> None:
    """transformers leaves such a file out in silence, and chats then never end."""
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    refused(LoadError, "generation_config.json", target=folder)


def test_tensors_that_nobody_reads_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file(load_file(path) | {"model.extra.weight": torch.zeros(3)}, path, {"format": "pt"})
    load_model(folder)
    assert "1 tensors are not used by LlamaForCausalLM: model.extra.weight" in caplog.text


def test_layers_for_further_tokens_are_no_unused_tensors(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The draft "mtp" reads them."""
    from safetensors.torch import load_file, save_file

    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text(encoding="utf-8"))
    further = f"model.layers.{config['num_hidden_layers']}.enorm.weight"
    save_file(load_file(path) | {further: torch.zeros(3)}, path, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}), encoding="utf-8")
    load_model(folder)
    assert "not used" not in caplog.text


@pytest.mark.skipif(PackedWeights.create() is None, reason="the C++ kernels cannot be compiled here")
def test_rounded_weights_of_a_model_in_float16_have_rows_in_bfloat16(tmp_path: Path) -> None:
    """The kernels have no others of 16 bits; a dtype that is given stays a clear error."""
    tiny_llama().half().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert LLM(str(tmp_path), "none", quantize="int8").target.dtype is torch.bfloat16
    with pytest.raises(UnsupportedError, match="dtype='bfloat16'"):
        LLM(str(tmp_path), "none", quantize="int8", dtype="float16")

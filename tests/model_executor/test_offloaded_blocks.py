"""Packed layers on disk (GGUF files, int8, int4): the text of the model in memory, and only some layers in memory.

The oracle of every text is the same file or folder without ``offload``.
"""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from architectures import prompt
from gguf_toys import model_of
from sakiyomi import LLM, MemoryLimitError, SamplingParams, UnsupportedError
from sakiyomi.core.files import cache_folder
from sakiyomi.kernels.native import PackedExperts, PackedLayer, PackedLinear, PackedWeights
from sakiyomi.model_executor.gguf.export import write_gguf
from sakiyomi.model_executor.loading import offload
from sakiyomi.model_executor.loading.packed_stream import PackedStream
from toys import save_model, tiny_llama, tiny_tokenizer
from warm import warm

pytestmark = [
    pytest.mark.skipif(PackedWeights.create() is None, reason="the C++ kernels cannot be compiled here"),
    pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="pages are counted as Linux counts them"),
]
PROMPTS = [prompt(11, 1), prompt(3, 2)]
PAGE = 1 << 16
"""The system maps some pages around one that is read."""


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test's own; tiny layers are dropped as large ones are."""
    kernels = cache_folder() / "kernels"
    monkeypatch.setenv("SAKIYOMI_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(kernels, target_is_directory=True)
    monkeypatch.setattr("sakiyomi.model_executor.loading.stream.SMALL", 0)


def texts(llm: LLM, **values: Any) -> list[list[int]]:
    params = SamplingParams(**({"max_new_tokens": 12, "ignore_eos": True} | values))
    return [out.token_ids for out in llm.generate(PROMPTS, params)]


def stream_of(llm: LLM) -> PackedStream:
    found = llm.target.weights.stream
    assert llm.target.offloaded and isinstance(found, PackedStream) and found.layers
    return found


def written(path: Path, model: Any = None, kind: str = "Q4_0") -> str:
    write_gguf(path, model or tiny_llama(dim=64), tiny_tokenizer(), kind)
    return os.fspath(path)


def resident(folder: Path) -> int:
    """Bytes of mapped files in this folder that are in the memory of this process."""
    count = 0
    with Path("/proc/self/pagemap").open("rb") as pages:
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            if str(folder) in line and "kernels" not in line:
                first, last = (int(each, 16) // mmap.PAGESIZE for each in line.split()[0].split("-"))
                pages.seek(8 * first)
                entries = pages.read(8 * (last - first))
                count += sum(entries[place] >> 7 for place in range(7, len(entries), 8))
    return count * mmap.PAGESIZE


def most_resident(llm: LLM, folder: Path) -> int:
    """The same while texts are generated, counted behind the product of every layer."""
    counts: list[int] = []
    for layer in stream_of(llm).layers.values():
        layer.register_forward_hook(lambda *_: counts.append(resident(folder)), prepend=True)
    texts(llm, max_new_tokens=2)
    return max(counts)


def starts(target: str, where: Any = "disk", **options: Any) -> Iterator[LLM]:
    """The first start, which packs the model, and the second one, which maps its copy."""
    for _ in range(2):
        yield LLM(target, offload=where, **({"draft": "none"} | options))


# ---------------------------------------------------------------- text


@pytest.mark.parametrize("draft", ["none", "early-exit:1", "suffix+prompt-lookup", "self"])
def test_text_is_that_of_the_file_in_memory(draft: str, tmp_path: Path) -> None:
    target = written(tmp_path / "m.gguf")
    draft = target if draft == "self" else draft
    values: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}]
    found = []
    for llm in starts(target, draft=draft):
        found.append([texts(llm, **each) for each in values])
        assert stream_of(llm).bytes_read and llm.target.mode == "eager"
    plain = LLM(target, "none")
    assert found == [[texts(plain, **each) for each in values]] * 2


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{"exact": True}, {"cache": "h2o", "kv_budget": 64}, {"cache": "quant-4"}], ids=str)
def test_options_of_packed_models(options: dict[str, Any], tmp_path: Path) -> None:
    target = written(tmp_path / "m.gguf")
    assert texts(LLM(target, "early-exit:1", offload="disk", **options)) == texts(LLM(target, "none", **options))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_models(kind: str, tmp_path: Path) -> None:
    """A folder that is quantized at its first start, and its packed copy, by itself too."""
    target = os.fspath(save_model(tmp_path / "m", tiny_llama(dim=64), tiny_tokenizer()))
    first, second = starts(target, quantize=kind)
    found = [texts(llm) for llm in (first, second)]
    (copy,) = (tmp_path / "m").glob(f"*{kind}*")
    assert stream_of(second).files == [copy / "packed.safetensors"]
    alone = LLM(os.fspath(copy), "none", offload="disk")
    assert [*found, texts(alone)] == [texts(LLM(target, "none", quantize=kind))] * 3
    assert stream_of(alone).bytes_read > 0


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "mamba"])
def test_experts_and_states(kind: str, tmp_path: Path) -> None:
    """Of a mixture a pass reads the chosen experts only."""
    target = written(tmp_path / "m.gguf", model_of(kind), "Q8_0")
    found = []
    for llm in starts(target):
        found.append(texts(llm))
        layers = stream_of(llm).layers.values()
        stacks = [layer for layer in layers if isinstance(layer, PackedExperts)]
        assert bool(stacks) == (kind != "mamba")
        before = stream_of(llm).bytes_read
        llm.generate([[5]], SamplingParams(max_new_tokens=1))
        whole, every = (
            sum(tensor.nbytes for layer in layers if isinstance(layer, part) for tensor in layer.tensors().values())
            for part in (PackedLinear, PackedLayer)
        )
        assert whole < stream_of(llm).bytes_read - before < every
    assert found == [texts(LLM(target, "none"))] * 2


# ---------------------------------------------------------------- memory


def test_only_the_layers_at_work_are_in_memory(tmp_path: Path) -> None:
    """At both starts, and while they load; the size of the rest does not matter."""
    target = written(tmp_path / "m.gguf", tiny_llama(dim=256, layers=12))
    for llm in starts(target):
        layers = {id(part): part for part in llm.target.module.modules() if isinstance(part, PackedLayer)}
        sizes = [sum(t.nbytes for t in layer.tensors().values()) for layer in layers.values()]
        held = resident(tmp_path / "cache")
        assert held < sum(sizes) / 8, "what was packed or read at load stays in memory"
        # q, k and v are computed together, and gate and up
        assert most_resident(llm, tmp_path / "cache") <= 2 * max(sizes) + 16 * PAGE < sum(sizes) / 3
        assert resident(tmp_path / "cache") < sum(sizes) / 8
        del llm
        gc.collect()
    assert most_resident_in_memory(target, tmp_path) > sum(sizes) * 0.9, "the count would see what is in memory"


def most_resident_in_memory(target: str, tmp_path: Path) -> int:
    llm = LLM(target, "none", compile=False)
    texts(llm)
    found = resident(tmp_path / "cache")
    assert not llm.target.offloaded
    return found


CHILD = """
import sys
from sakiyomi import LLM, SamplingParams
from sakiyomi.core.memory import peak_bytes, reset_peak, resident_bytes
small, large, how = sys.argv[1:]
params = SamplingParams(max_new_tokens=3, ignore_eos=True)
def run(target):
    llm = LLM(target, "none", compile=False, offload=None if how == "none" else how)
    return llm.generate([[5, 6, 7]], params)[0].token_ids
run(small)
before = resident_bytes()
assert reset_peak()
print(run(large), peak_bytes() - before)
"""


@pytest.mark.thorough
def test_peak_memory_of_a_process(tmp_path: Path) -> None:
    """All its memory, libraries left out, at the first start and at the second: some layers of a model of 50 MB."""
    small = written(tmp_path / "small.gguf")
    large = written(tmp_path / "large.gguf", tiny_llama(dim=1024, layers=10), "Q4_0")
    size = Path(large).stat().st_size
    assert size > 50e6

    def run(how: str) -> tuple[str, int]:
        program = [*warm(), "-c", CHILD, small, large, how]
        found = subprocess.run(program, capture_output=True, text=True, encoding="utf-8", check=True).stdout
        text, _, peak = found.strip().rpartition(" ")
        return text, int(peak)

    (first, packing), (second, mapped), (plain, whole) = run("disk"), run("disk"), run("none")
    assert first == second == plain
    print(f"{size=} {packing=} {mapped=} {whole=}")
    assert max(packing, mapped) < 0.6 * size < whole


def test_auto_keeps_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = written(tmp_path / "m.gguf")
    whole = LLM(target, "none", offload="auto", compile=False)
    assert not whole.target.offloaded
    size = sum(
        t.nbytes for p in whole.target.module.modules() if isinstance(p, PackedLayer) for t in p.tensors().values()
    )
    wanted = texts(whole)
    monkeypatch.setattr(offload, "available_bytes", lambda device="cpu": size)
    part = LLM(target, "none", offload="auto", compile=False)
    count = sum(isinstance(each, PackedLayer) for each in part.target.module.modules())
    assert 0 < len(stream_of(part).layers) < count
    assert texts(part) == wanted


# ---------------------------------------------------------------- what goes wrong


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = written(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedError, match=r"offload='disk': .*m\.gguf' is a GGUF file, whose blocks only the CPU"):
        LLM(target, "none", offload="disk", dtype="float16")
    with monkeypatch.context() as patch:
        patch.setattr(offload.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
        with pytest.raises(MemoryLimitError, match="has 10 bytes free; free some, or pass another folder"):
            LLM(target, "none", offload="disk")
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(MemoryLimitError, match="packed weights do not fit on the disk"):
            LLM(target, "none", offload=tmp_path)
    assert not list((tmp_path / "cache" / "packed").glob("*")), "something half-written was left"
    monkeypatch.setattr("sakiyomi.core.memory.available_bytes", lambda device="cpu": 1000)
    with pytest.raises(MemoryLimitError, match="offload='auto'"):
        LLM(target, "none")

"""Other engines: a process and an environment of their own; one clear line for whatever goes wrong there."""

from __future__ import annotations

import dataclasses
import os
import shlex
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fake_engines import GOOD, Fake, fake
from sakiyomi.core.embedded import embedded
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.params import SamplingParams
from sakiyomi.evaluation.bench import contest, suites
from sakiyomi.evaluation.bench.config import BenchConfig, silent
from sakiyomi.evaluation.bench.contest import Load, Texts
from sakiyomi.evaluation.bench.engines import gguf_files
from sakiyomi.evaluation.bench.engines.process import EngineProcess, python_of
from sakiyomi.evaluation.bench.engines.registry import ENGINES, OtherEngine, environments, without_recordings
from sakiyomi.evaluation.bench.frame import PairRow
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.model_executor.loading import load_model
from toys import save_model, tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the fake environments are links and shell scripts")
TASK: dict[str, Any] = {"draft": None, "threads": 1}
FUSSY = """
    def start(task):
        def write(batch, tokens):
            if len(batch) > 1:
                raise ValueError("one at a time")
            return [[7] * tokens]

        return write, {}
"""
DIES = """
    import os, sys

    def start(task):
        def write(batch, tokens):
            print("out of luck", file=sys.stderr, flush=True)
            os.abort()

        return write, {}
"""


# ---------------------------------------------------------------- the process


def test_lines_in_and_out(tmp_path: Path) -> None:
    """What libraries print does not disturb; batches come one after the other, and only they are timed."""
    process = EngineProcess(fake(tmp_path, GOOD), tmp_path, TASK)
    try:
        assert process.settings == {"version": "1.0", "threads": 1}
        assert process.alive
        found = process.run([[[1, 2], [3]], [[4]]], 2)
        assert found.outputs == ((3, 4), (3, 4), (4, 5))
        assert found.tokens == 6
        assert 0.02 <= found.seconds < 5
        assert process.run([[[299]]], 3).outputs == ((299, 0, 1),)
    finally:
        process.close()
    assert not process.alive
    process.close()  # twice does no harm


def test_an_engine_that_is_not_installed(tmp_path: Path) -> None:
    engine = ENGINES[0]
    with pytest.raises(UnsupportedError, match=r"not installed; python3 -m venv .*/openvino && .*/pip install open"):
        EngineProcess(engine, tmp_path, TASK)
    bare = fake(tmp_path, "def start(task):\n    import no_such_engine")
    with pytest.raises(UnsupportedError, match=r"No module named 'no_such_engine' .it is installed by .*fake-package"):
        EngineProcess(bare, tmp_path, TASK)


def test_an_engine_that_dies(tmp_path: Path) -> None:
    process = EngineProcess(fake(tmp_path, DIES), tmp_path, TASK)
    with pytest.raises(UnsupportedError, match=r"died by SIGABRT: .*out of luck"):
        process.run([[[1]]], 1)
    assert not process.alive
    with pytest.raises(UnsupportedError, match="died by SIG"):
        process.run([[[1]]], 1)
    ends = fake(tmp_path, "import sys\n\ndef start(task):\n    sys.exit('no licence')", "ends")
    with pytest.raises(UnsupportedError, match="ended with exit code 1: no licence"):
        EngineProcess(ends, tmp_path, TASK)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("hello", "answered hello, which is no JSON"),
        ("[1, 2]", r"answered \[1, 2\], which has no outputs"),
        ('{"seconds": 1}', "has no outputs"),
        ('{"outputs": [["a"]], "seconds": 1}', "which has no outputs and seconds"),
        ('{"outputs": [[1, 2]]}', "which has no outputs and seconds"),
        ('{"outputs": [[1]], "seconds": 1}', "wrote 1 tokens where 2 for each of 1 were due"),
    ],
)
def test_an_engine_that_answers_garbage(answer: str, said: str, tmp_path: Path) -> None:
    script = f"read line; echo '{{\"settings\": {{}}}}'; read line; echo '{answer}'; read line"
    process = EngineProcess(fake(tmp_path, "", python=script), tmp_path, TASK)
    with pytest.raises(UnsupportedError, match=said):
        process.run([[[1]]], 2)
    assert not process.alive


def test_what_an_engine_cannot_do_does_not_end_it(tmp_path: Path) -> None:
    process = EngineProcess(fake(tmp_path, FUSSY), tmp_path, TASK)
    with pytest.raises(UnsupportedError, match="ValueError: one at a time"):
        process.run([[[1], [2]]], 2)
    assert process.run([[[1]], [[2]]], 2).outputs == ((7, 7), (7, 7))
    process.close()


def test_a_model_is_converted_once(tmp_path: Path) -> None:
    """For each version of its files; a command that fails leaves nothing behind."""
    text = """
        import sys

        def convert(model, kind, out):
            code = "import sys; assert sys.argv[1] != 'int4', 'no 4 bits'; open(sys.argv[2] + '/made', 'a').write('x')"
            return [sys.executable, "-c", code, kind, out]

        def start(task):
            return None, {name: task[name] for name in ("model", "draft")}
    """
    engine = fake(tmp_path, text)
    (tmp_path / "model").mkdir()
    task = {**TASK, "model": str(tmp_path / "model"), "kind": "int8", "folder": str(tmp_path / "converted")}

    def opened(**more: Any) -> dict[str, Any]:
        process = EngineProcess(engine, tmp_path, {**task, **more})
        process.close()
        return process.settings

    first = opened()
    assert (first, first["draft"]) == (opened(draft=None), None)
    assert (Path(first["model"]) / "made").read_text(encoding="utf-8") == "x"
    assert opened(draft=task["model"])["draft"] == first["model"]
    (tmp_path / "model" / "weights.bin").write_text("others", encoding="utf-8")
    assert opened()["model"] != first["model"]
    with pytest.raises(UnsupportedError, match=r"cannot be converted: .*no 4 bits"):
        opened(kind="int4")
    assert not [path for path in (tmp_path / "converted").glob("*int4*") if not path.name.startswith(".")]


def test_an_engine_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    script = "read line; echo '{\"settings\": {}}'; sleep 60 & echo $! > "
    script += shlex.quote(str(tmp_path / "child")) + "; wait"
    process = EngineProcess(fake(tmp_path, "", python=script), tmp_path, TASK, writing=0.3)
    began = time.perf_counter()
    with pytest.raises(UnsupportedError, match=r"gave no answer within 0.3 seconds"):
        process.run([[[1]]], 2)
    assert time.perf_counter() - began < 20
    child = Path(f"/proc/{int((tmp_path / 'child').read_text(encoding='utf-8'))}/stat")
    if Path("/proc/self").exists():
        for _ in range(100):  # whoever adopts it has to read how it ended
            if not child.exists() or child.read_text(encoding="utf-8").split()[2] == "Z":
                break
            time.sleep(0.05)
        else:
            pytest.fail("what the engine started is still there")


def test_recordings_are_left_out_where_an_engine_reads_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same folder every time; one without recordings is itself."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = embedded("tales-draft")
    bare = without_recordings(folder)
    names = {path.name for path in folder.iterdir()}
    recorded = {name for name in names if name.startswith("recorded-")}
    assert recorded and {path.name for path in bare.iterdir()} == names - recorded
    assert (bare / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert without_recordings(folder) == bare and without_recordings(bare) == bare


# ---------------------------------------------------------------- the row


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> BenchConfig:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "target", tiny_llama(), tiny_tokenizer())
    save_model(folder / "draft", tiny_llama(seed=1, layers=1), tiny_tokenizer())
    return BenchConfig(
        target=str(folder / "target"),
        draft=f"model:{folder / 'draft'}",
        repeats=1,
        max_new_tokens=6,
        prompt_tokens=12,
        count=2,
        gamma=2,
        compile=False,
        quantize="int8",
    )


@pytest.fixture
def measured(pair: BenchConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Row:
    """One engine that works, one that dies in its first run, one without an environment; small loads."""
    good, dead = fake(tmp_path, GOOD, "good"), fake(tmp_path, DIES, "dead")
    absent = Fake("Engine absent", "absent", "absent-package", ("float32", "int8"), drafts=False)
    monkeypatch.setattr(contest, "ENGINES", (dead, absent, good))
    monkeypatch.setattr(contest, "TOGETHER", (2, 3))
    monkeypatch.setattr(contest, "PROMPT", 40)
    monkeypatch.setattr(contest, "ALONE", 2)
    return suites.measure("peers", dataclasses.replace(pair, environments=str(tmp_path)))


@pytest.mark.thorough
def test_the_rest_of_the_table_goes_on(measured: Row) -> None:
    lines = {line["name"]: line for line in measured.lines}
    ours = ["sakiyomi plain", "sakiyomi speculative", "sakiyomi, gamma auto"]
    theirs = ["transformers plain", "transformers assisted", "transformers prompt lookup"]
    fakes = ["Engine good plain", "Engine good draft model"]
    loads = ["1 request", "2 requests", "3 requests", "prompt of 40 tokens"]
    expected = []
    for kind in ("float32", "int8"):
        for load in loads:
            reads = load == loads[-1]
            names = theirs if load == loads[0] else theirs[:1]
            names = names + (ours[:1] if reads else ours)
            names += [] if kind == "int8" else fakes[:1] if reads else fakes
            expected += [f"{kind}, {load}: {name}" for name in names]
    assert list(lines) == expected
    assert all(line["tokens_per_second"] > 0 for line in lines.values())
    for name, line in lines.items():
        assert line["agreement"] == (0 if "Engine" in name else 1) or name.startswith("int8")
        assert ("text_perplexity" in line) == ("prompt of" not in name)
        assert line["equal"] is None or line["equal"] or name.startswith("int8")
    for name in (name for name in lines if "Engine" in name and "prompt of" not in name):
        alike = lines[f"{name.split(':')[0]}: transformers plain"]
        assert lines[name]["text_perplexity"] > alike["text_perplexity"]
    prompt = lines["float32, prompt of 40 tokens: Engine good plain"]
    assert prompt["tokens"] == 2 * 40


@pytest.mark.thorough
def test_each_that_is_left_out_has_one_line(measured: Row) -> None:
    out = [note for note in measured.notes if "left out" in note]
    assert [note.split(" is left out: ")[0] for note in out] == [
        "Engine absent plain, float32",
        "Engine dead plain",
        "Engine dead draft model",
        "Engine dead plain, int8",
        "Engine dead draft model, int8",
        "Engine absent plain, int8",
        "Engine good plain, int8",
        "Engine good draft model, int8",
    ]
    assert "not installed; python3 -m venv" in out[0]
    assert "died by SIGABRT" in out[1]
    assert "it runs float32 here" in out[3]
    assert str(measured.conditions["Engine good plain, float32"]).startswith("version 1.0, threads ")


def test_an_engine_runs_a_target_without_a_draft_model(pair: BenchConfig, tmp_path: Path) -> None:
    """As ``bench card`` asks for it: alone, and for a target whose draft is no model."""
    config = dataclasses.replace(pair, draft="ngram", quantize=None, environments=str(tmp_path))
    row = PairRow("card", config, silent)
    load = Load("", [[1, 2]], 2)
    with ExitStack() as stack:
        absent = Fake("Engine absent", "absent", "absent-package", ("float32",))
        others = contest.opened(row, "float32", [load], stack, [fake(tmp_path, GOOD), absent], ["plain"])
        assert [note.split(":")[0] for note in row.notes] == ["Engine absent is left out"]
        (contender,) = load.raced(others)
        assert contender.name == "Engine fake" and contender.run().outputs == ((3, 4),)


@pytest.mark.thorough
def test_without_compiled_kernels_our_kind_is_left_out(
    pair: BenchConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sakiyomi.kernels.quantization.native", lambda: None)
    monkeypatch.setattr("sakiyomi.kernels.native.native", lambda: None)
    monkeypatch.setattr(contest, "ENGINES", ())
    monkeypatch.setattr(contest, "TOGETHER", (2,))
    found = suites.measure("peers", dataclasses.replace(pair, environments=str(tmp_path)))
    assert all(line["name"].startswith("float32") for line in found.lines)
    assert found.notes[-1].startswith("sakiyomi int8 is left out:")


def test_prompts_of_a_load_begin_differently() -> None:
    found = contest._different([[1, 2, 3], [4, 5]], 5)
    assert found == [[1, 2, 3], [4, 5], [2, 3, 1], [5, 4], [3, 1, 2]]


def test_what_is_said_of_texts(pair: BenchConfig) -> None:
    """The model's own greedy text is more likely than others; texts are compared with the first ones."""
    loaded = load_model(pair.target)
    prompts = [[5, 6, 7], [8, 9]]
    own = [Transformers(loaded.model).generate(p, SamplingParams(max_new_tokens=6, ignore_eos=True)) for p in prompts]
    texts = Texts(loaded.model, Load("two", prompts, 6, together=True))
    first = texts.figures(tuple(map(tuple, own)))
    other = texts.figures((tuple(own[0]), (1, 2, 3, 4, 5, 6)))
    assert (first["agreement"], other["agreement"]) == (1, 0.5)
    assert 1 < first["text_perplexity"] < other["text_perplexity"]


# ---------------------------------------------------------------- those that are installed


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.key)
def test_an_installed_engine_writes_the_tokens_of_transformers(
    engine: OtherEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where near-ties are rare; plain and with a draft, one at a time and several at once."""
    folder = environments(os.environ.get("SAKIYOMI_TEST_ENGINES"))
    try:
        python_of(engine, folder)
    except UnsupportedError as error:
        pytest.skip(f"optional: {error}")
    monkeypatch.setattr(gguf_files, "cache_folder", lambda: tmp_path)
    target, draft = (load_model(name, dtype="float32") for name in ("tales", "tales-draft"))
    prompts = [target.tokenizer(text).input_ids for text in ("Once upon a time there was a", "The little dog ran to")]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    expected = tuple(tuple(Transformers(target.model).generate(prompt, params)) for prompt in prompts)
    kind = "float32"
    for other in (None, draft):
        task = {"kind": kind, "gamma": 3, "threads": 2, "context": 64, "requests": 2, "folder": str(tmp_path)}
        task["model"] = str(engine.checkpoint(target, kind))
        task["draft"] = None if other is None or not engine.drafts else str(engine.checkpoint(other, kind))
        process = EngineProcess(engine, folder, task)
        try:
            assert process.run([[prompt] for prompt in prompts], 24).outputs == expected
            if process.drafted and engine.key == "onnxruntime":
                with pytest.raises(UnsupportedError, match="one request at a time"):
                    process.run([prompts], 24)
            else:
                assert process.run([prompts], 24).outputs == expected
        finally:
            process.close()

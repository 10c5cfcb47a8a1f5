"""LoCoCo's merger: the paper's formula, its files, its place behind a policy, and what it is refused with."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from architectures import VOCAB, model_of, prompt
from sakiyomi import LLM, InputError, LoadError, SamplingParams, UnsupportedError
from sakiyomi.cache.policies import CacheSpec, read_cache
from sakiyomi.cache.policies.lococo import LoCoCo
from sakiyomi.cache.policies.merging.convolutions import Convolutions, MergingShape
from sakiyomi.cache.policies.merging.formats import FILE, read_merging, write_merging
from sakiyomi.cache.quantized import Packing
from sakiyomi.evaluation.bench.long.systems import System
from toys import character_tokenizer, places_of

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
BUDGET, CHUNK, MERGED = 24, 16, 5


def random_convolutions(model: Any, merged: int = MERGED, kernel: int = 21) -> Convolutions:
    """Of a toy architecture, wide enough that mixtures differ from means."""
    llm = LLM((model, TOKENIZER), "none", cache="recency[local=4]", kv_budget=50, chunk_size=CHUNK, compile=False)
    shapes = llm.target.cache.shapes
    dims = tuple((shape.key_dim, shape.value_dim) for shape in shapes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = Convolutions(MergingShape(dims, tuple(shape.heads for shape in shapes), merged, kernel))
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("merging") / "llama"
    write_merging(random_convolutions(model_of("llama")), path, base="toy", recipe={"scores": "h2o"})
    return str(path)


def plainly(made: Convolutions, layer: int, keys: Tensor, values: Tensor, best: list[int], head: int) -> Any:
    """One head by the reference's formula, a matrix W' over all that is not among the best."""
    count = made.shape.merged
    rest = [column for column in range(len(keys)) if column not in best[:-count]]
    anchors = sorted(best[-count:])
    both = torch.cat([keys[rest], values[rest]], 1)
    conv: Any = made.convolutions[layer]
    half, scores = made.shape.kernel // 2, torch.empty(count, len(rest))
    for slot in range(count):
        for place in range(len(rest)):
            total = conv.bias[slot].clone()
            for step in range(-half, half + 1):
                if 0 <= place + step < len(rest):
                    total += conv.weight[slot, :, step + half] @ both[place + step]
            scores[slot, place] = total
    onehot = torch.zeros(count, len(rest))
    for slot, anchor in enumerate(anchors):
        onehot[slot, rest.index(anchor)] = 1.0
    norm = made.norms[layer][head][:, None]
    whole = onehot * (1 - norm) + scores.softmax(1) * norm
    return anchors, whole @ keys[rest], whole @ values[rest]


@torch.no_grad()
def test_the_formula() -> None:
    torch.manual_seed(1)
    made = Convolutions(MergingShape(((4, 6), (3, 3)), (2, 3), 3, 5))
    made.norms[0].copy_(torch.tensor([[0.5, 0.8, 0.1], [0.3, 0.0, 1.0]]))
    keys, values = torch.randn(2, 17, 4), torch.randn(2, 17, 6)
    best = torch.stack([torch.randperm(17)[:8] for _ in range(2)])
    anchors, merged_keys, merged_values = made(0, keys, values, best, slice(0, 2))
    for head in range(2):
        columns, own_keys, own_values = plainly(made, 0, keys[head], values[head], best[head].tolist(), head)
        assert anchors[head].tolist() == columns
        torch.testing.assert_close(merged_keys[head], own_keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(merged_values[head], own_values, atol=1e-5, rtol=1e-5)
    one = made(0, keys[1:], values[1:], best[1:], slice(1, 2))  # heads that are seen by themselves have their own norm
    torch.testing.assert_close(one[1], merged_keys[1:])


def test_what_mixtures_are_worth(tmp_path: Path) -> None:
    """The least score of their head, so that they are merged again; or their anchors'."""
    scores, anchors = torch.tensor([[3.0, 1.0, 2.0, 5.0], [-1.0, 4.0, 0.0, 2.0]]), torch.tensor([[0, 2], [1, 3]])
    for again, wanted in ((True, [[1.0, 1.0, 1.0, 5.0], [-1.0, -1.0, 0.0, -1.0]]), (False, scores.tolist())):
        made = Convolutions(MergingShape(((4, 4),), (2,), 2, 3, again), norm=0.125)
        write_merging(made, tmp_path / str(again))
        found = read_merging(tmp_path / str(again)).convolutions
        assert found.scored(scores, anchors).tolist() == wanted
        assert found.norms[0].tolist() == [[0.125, 0.125]] * 2


@pytest.mark.thorough
def test_merged_pairs_count_in_the_budget(folder: str) -> None:
    """After a border: as many pairs as without a merger, the mixtures over the anchors, the others as they were."""
    llm = LLM(
        (model_of("llama"), TOKENIZER),
        "none",
        cache=f"h2o[local=4]+lococo:{folder}",
        kv_budget=BUDGET,
        chunk_size=CHUNK,
        compile=False,
    )
    eviction: Any = llm.target.eviction
    merge, seen = eviction.policy.merger.merge, []

    def watched(view: Any, scores: Tensor, best: Tensor) -> Tensor:
        before = view.keys.clone(), view.values.clone()
        lowered = merge(view, scores, best)
        made = read_merging(folder).convolutions
        with torch.no_grad():
            for head in range(len(best)):
                own = view.heads.start + head
                columns, keys, values = plainly(
                    made, view.layer, before[0][head], before[1][head], best[head].tolist(), own
                )
                others = [column for column in range(scores.shape[1]) if column not in columns]
                for now, was, new in ((view.keys, before[0], keys), (view.values, before[1], values)):
                    torch.testing.assert_close(now[head][columns], new, atol=1e-4, rtol=1e-4)
                    assert torch.equal(now[head][others], was[head][others])
                assert (lowered[head][columns] == scores[head].min()).all()
                assert torch.equal(lowered[head][others], scores[head][others])
        seen.append((view.layer, best.shape[1]))
        return lowered

    eviction.policy.merger.merge = watched
    with llm.conversation() as conversation:
        conversation.generate(prompt(70), SamplingParams(max_new_tokens=70, ignore_eos=True))
        assert {len(head) for layer in places_of(eviction, 0) for head in layer} == {BUDGET}
    assert len(seen) == 3 * 5 and {count for _, count in seen} == {BUDGET}, "borders at 32, 48, 64, 70 and 134"


def test_nothing_is_merged_where_all_fits_or_a_window_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gemma2")
    write_merging(random_convolutions(model), tmp_path)
    layers = []
    merge = LoCoCo.merge
    monkeypatch.setattr(
        LoCoCo, "merge", lambda self, view, *rest: layers.append(view.layer) or merge(self, view, *rest)
    )
    llm = LLM(
        (model, TOKENIZER),
        "none",
        cache=f"h2o[local=4]+lococo:{tmp_path}",
        kv_budget=BUDGET,
        chunk_size=CHUNK,
        compile=False,
    )
    llm.generate([prompt(20)], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert not layers
    llm.generate([prompt(60)], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert set(layers) == {1}, "layers 0 and 2 have windows"


# ---------------------------------------------------------------- files


def test_files(folder: str, tmp_path: Path) -> None:
    found = read_merging(folder)
    made = random_convolutions(model_of("llama"))
    assert (found.convolutions.shape, found.base, found.recipe) == (made.shape, "toy", {"scores": "h2o"})
    for own, stored in zip(made.parameters(), found.convolutions.parameters(), strict=True):
        assert torch.equal(own, stored)
    with pytest.raises(LoadError, match=r"no merging convolutions in .*nowhere.*train lococo"):
        read_merging(tmp_path / "nowhere")
    write_merging(made, tmp_path / "other")
    config = json.loads((tmp_path / "other/config.json").read_text(encoding="utf-8"))
    save_file(load_file(tmp_path / "other" / FILE), tmp_path / "other" / FILE)  # of another tool, without digests
    for changes, words in (
        ({"kind": "retaining_heads"}, "holds 'retaining_heads', expected merging_convolutions"),
        ({"merged": 7}, "do not fit together"),
        ({"dims": 3}, "do not fit together"),
        ({"kernel": 4}, "do not fit together.*odd kernel"),
    ):
        (tmp_path / "other/config.json").write_text(json.dumps(config | changes), encoding="utf-8")
        with pytest.raises(LoadError, match=words):
            read_merging(tmp_path / "other")
    (tmp_path / "other/config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(tmp_path / "other" / FILE)
    tensors.pop("norms.1")
    save_file(tensors, tmp_path / "other" / FILE)
    with pytest.raises(LoadError, match=r"do not fit together.*norms\.1"):
        read_merging(tmp_path / "other")
    (tmp_path / "other" / FILE).write_bytes((tmp_path / "other" / FILE).read_bytes()[:-40])
    with pytest.raises(LoadError, match="cut off"):
        read_merging(tmp_path / "other")


@pytest.mark.parametrize("text", ['{"kind": "of another time"}', "{", ""])
def test_what_was_written_with_the_tensors_is_believed(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """config.json may be damaged, or from before: a process may be killed between two files."""
    write_merging(random_convolutions(model_of("llama")), tmp_path, base="toy", recipe={"scores": "h2o"})
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert read_merging(tmp_path).recipe == {"scores": "h2o"}
    assert "whose own configuration is taken" in caplog.text


def make(model: Any, cache: str, budget: int = BUDGET) -> LLM:
    return LLM((model, TOKENIZER), "none", cache=cache, kv_budget=budget, chunk_size=CHUNK, compile=False)


def test_convolutions_of_another_model(folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        UnsupportedError, match=r"read 2 heads with keys of 8 and values of 8 in layer 0.* has 2 with 10"
    ):
        make(model_of("qwen3"), f"h2o[local=4]+lococo:{folder}")
    deeper = random_convolutions(model_of("llama"))
    shape = MergingShape(deeper.shape.dims[:2], deeper.shape.kv_heads[:2], MERGED)
    write_merging(Convolutions(shape), tmp_path / "two")
    with pytest.raises(UnsupportedError, match="those of 2 layers, and the model has 3"):
        make(model_of("llama"), f"h2o[local=4]+lococo:{tmp_path / 'two'}")
    write_merging(deeper, tmp_path / "tuned", base="another", fingerprint={"weights": "0" * 64})
    with caplog.at_level(logging.WARNING, "sakiyomi"):
        make(model_of("llama"), f"h2o[local=4]+lococo:{tmp_path / 'tuned'}")
    assert "were trained for another, and this model has other weights" in caplog.text


def test_a_folder_of_convolutions_is_no_model(folder: str) -> None:
    with pytest.raises(InputError, match="holds merging convolutions and no model; give cache='lococo:"):
        LLM(folder)


# ---------------------------------------------------------------- specs


@pytest.mark.parametrize(
    ("spec", "policy", "recent"),
    [
        ("lococo:a/b", "h2o", 0.5),
        ("h2o[recent=0.25,local=8]+lococo:a/b", "h2o", 0.25),
        ("locret:c+d/e+lococo:a/b", "locret", 0.0),
        ("snapkv+lococo:a/b", "snapkv", 0.0),
    ],
)
def test_specs(spec: str, policy: str, recent: float) -> None:
    found, packing, sparse, _ = read_cache(spec)
    assert sparse is None
    assert found is not None and found.merger is not None and packing is None
    assert (found.name, found.recent, found.merger.file) == (policy, recent, "a/b")


def test_specs_without_it_are_what_they_were() -> None:
    for spec in ("h2o", "locret:x/lococo", "locret:lococo:y"):
        found = read_cache(spec).policy
        assert found is not None and found.merger is None
    assert read_cache("quant-4") == CacheSpec(packing=Packing(4, 64))


@pytest.mark.parametrize("spec", ["lococo", "h2o+lococo", "full+lococo:a", "h2o+lococo:a+lococo:b"])
def test_wrong_specs(spec: str) -> None:
    with pytest.raises(InputError, match=r"lococo:FOLDER .*`sakiyomi train lococo`"):
        read_cache(spec)


def test_what_it_does_not_go_with(folder: str) -> None:
    model = model_of("llama")
    with pytest.raises(InputError, match=r"lococo with quantized keys: .*rounded at every boundary"):
        make(model, f"h2o[local=4]+lococo:{folder}+quant-4", 200)
    with pytest.raises(InputError, match="lococo with infllm: nothing is dropped"):
        make(model, f"infllm[block=4,sinks=4,local=4]+lococo:{folder}", 60)
    with pytest.raises(InputError, match=r"h2o keeps 17 in any case, 5 merged ones among them"):
        make(model, f"h2o[local=12]+lococo:{folder}", 17)
    with pytest.raises(LoadError, match=r"no merging convolutions in 'nowhere'"):
        make(model, "h2o+lococo:nowhere")


def test_names_in_tables() -> None:
    assert System("locret:x/heads+lococo:runs/y/model", "1/8").name == "locret:heads+lococo:model"
    assert System("h2o+lococo:a/b/", "1/8").name == "h2o+lococo:b"
    assert System("locret:retriever-retaining+quant-4", "1/8").name == "locret:retriever-retaining+quant-4"

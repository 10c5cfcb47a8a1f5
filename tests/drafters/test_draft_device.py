"""A draft model on another device than the target's. Two devices are not to be had here: a stand-in watches that
no operator of torch sees tensors of both models."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sakiyomi.core.draft_specs import model_spec
from sakiyomi.core.errors import InputError, LoadError, UnsupportedError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.preflight import check_drafts
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.model_pool import ModelPool
from seq2seq_toys import build
from toys import save_model, tiny_llama, tiny_tokenizer


class TwoDevices(TorchDispatchMode):
    """Whose a tensor is follows from what it was computed from; an operator on tensors of two models is an error."""

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[int, str] = {}
        self.seen: set[str] = set()

    def own(self, tensor: Tensor, name: str) -> None:
        """Say whose it is, with all that shares its memory."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._owners:
            weakref.finalize(storage, self._owners.pop, key, None)
        self._owners[key] = name

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        owners = {self._owners.get(leaf.untyped_storage()._cdata) for leaf in given} - {None}
        if len(owners) > 1:
            raise RuntimeError(f"{function} has tensors of {owners}")
        found = function(*args, **(kwargs or {}))
        for owner in owners:
            self.seen.add(str(owner))
            for leaf in tree_leaves(found):
                if isinstance(leaf, Tensor):
                    self.own(leaf, str(owner))
        return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("pair"), tiny_tokenizer()
    save_model(folder / "target", tiny_llama(layers=2), tokenizer)
    save_model(folder / "draft", tiny_llama(seed=1, layers=1), tokenizer)
    return folder


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "acceptance": "ratio", "tree": "chain"},
        {"temperature": 0.8, "top_p": 0.9, "acceptance": "traversal"},
        {"acceptance": "typical", "temperature": 0.7, "logit_bias": {5: 1.0}},
    ],
    ids=str,
)
def test_nothing_of_the_draft_meets_anything_of_the_target(
    params: dict[str, Any], pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In plain torch, where every operator passes by; the kernels take what is on the host alone."""
    monkeypatch.setenv("SAKIYOMI_NATIVE", "0")
    llm = LLM(str(pair / "target"), f"model:{pair / 'draft'}[device=cpu]", compile=False, dtype="float32")
    wanted = SamplingParams(max_new_tokens=12, gamma=3, ignore_eos=True, seed=3, **params)
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    apart, watch = llm.generate(prompts, wanted), TwoDevices()
    models = {"target": llm.target, "draft": llm.draft.model}  # type: ignore[union-attr]
    for name, runner in models.items():
        for tensor in (*runner.weights.module.parameters(), *runner.weights.module.buffers()):
            watch.own(tensor, name)
    with watch:
        watched = llm.generate(prompts, wanted)
    assert watch.seen == {"target", "draft"}
    assert [each.token_ids for each in watched] == [each.token_ids for each in apart]
    assert all(each.stats.drafted for each in watched)


def test_the_stand_in_notices_a_meeting() -> None:
    first, second, watch = torch.ones(2), torch.ones(2), TwoDevices()
    watch.own(first, "target")
    watch.own(second, "draft")
    with watch, pytest.raises(RuntimeError, match="has tensors of"):
        first[:1].add(second.view(2)[1:])


def test_the_device_reaches_the_loader(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    load = ModelPool.load

    def loading(self: ModelPool, name: str, device: str | None = None) -> Any:
        asked.append(device)
        return load(self, name, device)

    monkeypatch.setattr(ModelPool, "load", loading)
    LLM(str(pair / "target"), f"suffix+model:{pair / 'draft'}[device=cpu]", compile=False)
    LLM(str(pair / "target"), f"model:{pair / 'draft'}", compile=False)
    assert asked == ["cpu", None]
    assert model_spec("org/a[1]b[device=cuda:1]") == ("org/a[1]b", "cuda:1", "")


def test_what_cannot_be_is_refused(pair: Path, tmp_path: Path) -> None:
    spec = f"model:{pair / 'draft'}[device="
    with pytest.raises(InputError, match=r"device is 'npu'"):
        LLM(str(pair / "target"), f"{spec}npu]", compile=False)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="torch sees 0 CUDA devices"):
            LLM(str(pair / "target"), f"{spec}cuda:1]", compile=False)
    with pytest.raises(InputError, match="names no model"):
        check_drafts("model:[device=cpu]")
    with pytest.raises(LoadError):
        check_drafts(f"model:{tmp_path / 'none'}[device=cpu]")
    toy = tmp_path / "bart"
    save_model(toy, build("bart"), tiny_tokenizer())
    with pytest.raises(UnsupportedError, match="drafts of encoder-decoder models run where the target runs"):
        LLM(str(toy), f"model:{toy}[device=cpu]", compile=False)

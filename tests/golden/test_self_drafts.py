"""Drafts made of the target itself, by its first layers or by its rounded weights: the text stays the target's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from architectures import ALL, VOCAB, greedy, model_of, prompt, references
from read_ahead import dealt
from sakiyomi import LLM, InputError, SamplingParams, UnsupportedError
from sakiyomi.kernels.build import native
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.early_exit import FirstLayers
from toys import character_tokenizer, save_model, tiny_llama

NEW = 16
PROMPTS = [prompt(11, 1), prompt(3, 2), prompt(19, 3)]
TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
needs_kernels = pytest.mark.skipif(native() is None, reason="no compiled kernels here")


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NEW, "ignore_eos": True, "gamma": 3} | values))


def llm_of(draft: str, name: str = "llama", **options: Any) -> LLM:
    return LLM((model_of(name), TOKENIZER), draft, **({"compile": False, "strict": True} | options))


def cut(model: nn.Module, count: int) -> Any:
    """transformers' own model, with its first layers only."""
    short = copy.deepcopy(model)
    for module in short.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == 3:
                setattr(module, name, child[:count])
    return short


@pytest.mark.thorough
@pytest.mark.parametrize("name", ALL)
def test_early_exit_of_every_architecture(name: str) -> None:
    """Greedy, ragged, in a batch; something was drafted, and something of it was refused and overwritten."""
    for count in (1, 2):
        done = llm_of(f"early-exit:{count}", name).generate(PROMPTS, params())
        assert [out.token_ids for out in done] == references(name, PROMPTS, NEW)
        assert sum(out.stats.drafted for out in done) > NEW
        assert sum(out.stats.rejected for out in done) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("gamma", [1, 2, 5])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_the_first_layers_say_what_they_would_say_alone(name: str, gamma: int) -> None:
    """From keys and values in a wrong place they would say something else, and only the speed would suffer."""
    for count in (1, 2):
        done = llm_of(f"early-exit:{count}", name).generate(PROMPTS, params(gamma=gamma), rounds_trace=True)
        short = cut(model_of(name), count)
        for tokens, out in zip(PROMPTS, done, strict=True):
            for entry in out.rounds_trace or []:
                before = tokens + [e.token_id for e in out.trace if e.round < entry.round]
                assert list(entry.tokens) == (greedy(short, before, len(entry.tokens)) if entry.tokens else [])


BRANCHING: list[dict[str, Any]] = [
    {"tree": "best-first", "nodes": 3},  # fewer nodes than levels and siblings
    {"tree": "best-first", "gamma": 4, "nodes": 15},
    {"tree": "dynamic", "gamma": 4, "nodes": 12},
    {"tree": "static", "gamma": 3, "nodes": 9},
    {"gamma": "auto"},
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "size"), dealt(["llama", "gpt2", "gemma2", "falcon"], BRANCHING))
def test_trees_of_early_exit(name: str, size: dict[str, Any]) -> None:
    """Greedy as transformers has it, sampled as without a draft, and really trees of no more nodes than asked for."""
    llm, nodes = llm_of("early-exit:2", name), size.get("nodes", 31)
    done = llm.generate(PROMPTS, params(**size), rounds_trace=True)
    assert [out.token_ids for out in done] == references(name, PROMPTS, NEW)
    rounds = [entry for out in done for entry in out.rounds_trace or []]
    assert max(len(entry.tokens) for entry in rounds) <= nodes
    if "nodes" in size:
        assert any(entry.parents.count(-1) > 1 for entry in rounds)
        assert sum(out.stats.accepted for out in done) > 0
    values = params(temperature=1.0, seed=3, **size)
    expected = llm_of("none", name).generate(PROMPTS, values)
    assert [out.token_ids for out in llm.generate(PROMPTS, values)] == [out.token_ids for out in expected]


@pytest.mark.thorough
def test_a_tree_holds_what_the_first_layers_say_behind_each_of_its_nodes() -> None:
    """A level is read in one pass behind those before it: with keys of a sibling in a path it would say otherwise."""
    done = llm_of("early-exit:1").generate(PROMPTS, params(tree="dynamic", gamma=4, nodes=14), rounds_trace=True)
    short = cut(model_of("llama"), 1)
    deep = 0
    for tokens, out in zip(PROMPTS, done, strict=True):
        for entry in out.rounds_trace or []:
            before = tokens + [e.token_id for e in out.trace if e.round < entry.round]
            for node, parent in enumerate(entry.parents):
                path: list[int] = []
                place = parent
                while place >= 0:
                    path.insert(0, entry.tokens[place])
                    place = entry.parents[place]
                if parent in entry.parents[:node]:
                    continue  # its first child is the likeliest token behind it
                assert [entry.tokens[node]] == greedy(short, before + path, 1)
                deep += len(path) > 1
    assert deep > NEW


def test_a_tree_of_early_exit_is_accepted_more_often_than_a_chain() -> None:
    chain, tree = (
        llm_of("early-exit:2").generate(PROMPTS, params(max_new_tokens=60, **size))
        for size in ({"tree": "chain"}, {"tree": "best-first", "nodes": 12})
    )
    assert sum(out.stats.rounds for out in tree) < sum(out.stats.rounds for out in chain)


def test_seeded_text_is_that_without_a_draft() -> None:
    values = params(temperature=1.0, seed=3, n=2, top_k=20, repetition_penalty=1.3)
    expected = llm_of("none").generate(PROMPTS, values)
    found = llm_of("early-exit:2").generate(PROMPTS, values)
    for group, other in zip(found, expected, strict=True):
        assert [out.token_ids for out in group] == [out.token_ids for out in other]
    assert sum(out.stats.accepted for group in found for out in group) > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", ["ratio", "block", "traversal"])
def test_drawn_chains_of_early_exit(rule: Any) -> None:
    """At temperature 1 the rules read the rows: the draft must have been drawn from what it tells."""
    done = llm_of("early-exit:2").generate(PROMPTS, params(temperature=1.0, acceptance=rule, max_new_tokens=80))
    assert 0 < sum(out.stats.accepted for out in done) < sum(out.stats.drafted for out in done)


def test_early_exit_does_not_disturb_exact_numbers() -> None:
    """bf16, traced, bit-equal text with and without."""
    model = tiny_llama(vocab=VOCAB, layers=2, dim=64).to(torch.bfloat16)
    plain = LLM((model, TOKENIZER), "none", exact=True)
    drafted = LLM((model, TOKENIZER), "early-exit:1", exact=True, strict=True)
    values = params(max_new_tokens=40)
    expected = [out.token_ids for out in plain.generate(PROMPTS, values)]
    done = drafted.generate(PROMPTS, values)
    assert [out.token_ids for out in done] == expected
    assert all(out.stats.drafted for out in done)
    view = drafted.draft.model  # type: ignore[union-attr]
    assert isinstance(view, FirstLayers) and not view.exact and drafted.target.exact
    drafted.wait()
    assert view.recorded()
    assert [out.token_ids for out in drafted.generate(PROMPTS, values)] == expected


def test_early_exit_has_no_cache_and_no_weights_of_its_own() -> None:
    llm = llm_of("early-exit:1")
    view = llm.draft.model  # type: ignore[union-attr]
    assert view.cache is llm.target.cache and view.backend is llm.target.backend
    own = {id(p) for p in llm.target.module.parameters()} | {id(b) for b in llm.target.module.buffers()}
    assert {id(p) for p in view.module.parameters()} | {id(b) for b in view.module.buffers()} <= own
    (out,) = llm.generate(PROMPTS[:1], params())
    stats = out.stats
    assert stats.draft_seconds > 0
    parts = stats.prefill_seconds + stats.draft_seconds + stats.score_seconds
    assert parts <= stats.seconds


def test_early_exit_follows_the_target_to_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built in the background at a machine's first use, and taken into use between requests."""
    at_hand = [False]
    for place in ("session", "build"):
        monkeypatch.setattr(f"sakiyomi.model_executor.{place}.native_at_hand", lambda: at_hand[0])
    llm = llm_of("early-exit:2", compile="auto")
    view = llm.draft.model  # type: ignore[union-attr]
    assert view.weights.unsettled and view.backend is llm.target.backend
    expected = references("llama", PROMPTS, NEW)
    assert [out.token_ids for out in llm.generate(PROMPTS, params())] == expected
    before = view.forward_seconds
    at_hand[0] = True
    done = llm.generate(PROMPTS, params())
    assert not view.weights.unsettled and view.backend is llm.target.backend
    assert [out.token_ids for out in done] == expected
    assert view.forward_seconds > before and all(out.stats.drafted for out in done)


def test_without_memory_for_the_drafts_columns_text_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from sakiyomi.cache.slots import SlotCache
    from sakiyomi.core.errors import MemoryLimitError

    llm = llm_of("early-exit:1")
    reserve = SlotCache.reserve

    def tight(cache: SlotCache, slot: int, columns: int) -> None:
        if columns > len(PROMPTS[0]) + NEW // 2 and tight_now[0]:
            raise MemoryLimitError("no more")
        reserve(cache, slot, columns)

    tight_now = [True]
    propose = llm.draft.propose  # type: ignore[union-attr]

    def watching(contexts: Any, gammas: Any) -> Any:
        tight_now[0] = True
        try:
            return propose(contexts, gammas)
        finally:
            tight_now[0] = False

    tight_now[0] = False
    monkeypatch.setattr(SlotCache, "reserve", tight)
    monkeypatch.setattr(llm.draft, "propose", watching)
    (out,) = llm.generate(PROMPTS[:1], params())
    assert out.token_ids == greedy(model_of("llama"), PROMPTS[0], NEW)
    assert 0 < out.stats.drafted < 2 * NEW


@pytest.mark.parametrize(
    ("spec", "message"),
    [("early-exit", "names no layer"), ("early-exit:x", "names no layer"), ("early-exit:0", "1 to 2"),
     ("early-exit:3", "1 to 2"), ("self-int8:4", "behind a colon")],
)  # fmt: skip
def test_specs(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        llm_of(spec)


def test_layers_in_no_list_are_refused() -> None:
    packed = build_runner(model_of("llama"), compile=False)
    packed.module.more = nn.ModuleList(nn.Identity() for _ in range(3))
    with pytest.raises(UnsupportedError, match="2 lists of 3 layers"):
        FirstLayers(packed, 1)


@pytest.mark.thorough
@needs_kernels
@pytest.mark.parametrize(("spec", "right"), [("self-int8", 0.4), ("self-int4", 0.2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_self_quantized(dtype: str, spec: str, right: float, tmp_path: Any) -> None:
    """From a folder and from a loaded pair; often right, its weights a fraction of the target's."""
    model = tiny_llama(vocab=VOCAB, layers=2, dim=64)
    folder = save_model(tmp_path, model, TOKENIZER)
    for target in (str(folder), (copy.deepcopy(model), TOKENIZER)):
        options: dict[str, Any] = {"compile": False, "dtype": dtype} if isinstance(target, str) else {"compile": False}
        if dtype == "bfloat16" and not isinstance(target, str):
            target = (target[0].to(torch.bfloat16), target[1])
        llm = LLM(target, spec, exact=True, strict=True, **options)
        plain = LLM(target, "none", exact=True, **options)
        done = llm.generate(PROMPTS, params())
        assert [out.token_ids for out in done] == [out.token_ids for out in plain.generate(PROMPTS, params())]
        assert sum(out.stats.accepted for out in done) > right * sum(out.stats.drafted for out in done)
        own = llm.draft.model  # type: ignore[union-attr]
        assert own.weights.quantization is not None and llm.target.weights.quantization is None
        assert own.weights.bytes < (0.62 if dtype == "bfloat16" else 0.4) * llm.target.weights.bytes
        assert {entry.source for out in done for entry in out.trace} == {spec, "target"}


@needs_kernels
@pytest.mark.parametrize("spec", ["self-int8", "self-int4"])
def test_a_quantized_copy_of_rounded_weights_is_refused(spec: str) -> None:
    with pytest.raises(InputError, match="would not be faster"):
        llm_of(spec, quantize="int8")

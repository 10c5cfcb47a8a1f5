"""The whole engine's samples have the target's own distribution: a real draft model, batches, warpers on both sides.

The rules themselves are tested on tables (``test_losslessness``). Here it is what the tables take for granted: that
the rows which the draft model tells are those which it drew from, after the same temperature, top-k and top-p; that
draft and verifier never share a random number; that each request of a batch is judged by its own rows. A test rejects a
right engine once in a million choices of the seed; the seed is fixed. Broken drafters stand beside it and are found.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from numpy.typing import NDArray

from architectures import make
from assistant_toys import assistant_folder, new_assistant, new_target
from block_toys import deepspec_folder, new_block
from block_toys import speculators_folder as block_folder
from eagle_toys import first_folder, new_head, speculators_folder
from medusa_toys import new_heads
from mtp_toys import new_toy, target_folder
from sakiyomi import LLM, SamplingParams
from sakiyomi.cache.recurrent_store import RecurrentStore
from sakiyomi.core.memory import available_bytes
from sakiyomi.core.tree import Draft
from sakiyomi.drafters import Context, merged
from sakiyomi.drafters.block_heads.formats import write_block
from sakiyomi.drafters.learning import HeadLearner
from sakiyomi.drafters.medusa_heads.formats import write_heads
from sakiyomi.drafters.medusa_heads.heads import HeadsShape, MedusaHeads
from sakiyomi.drafters.merged import MergedDrafter
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.build import build_runner
from sakiyomi.sampling.sampler import Sampler
from statistical.harness import LEVEL, p_value
from text_drafters import KINDS, Wide, text_drafter
from toys import character_tokenizer, save_model, tiny_llama

V = 5
LENGTH = 4  # the prefill's token, two drafted ones, and what follows them
SAMPLES = 1200
DRAFT, OTHER = 6, 7
"""Seeds of draft models that are far from the target, and accepted often enough that broken rules show."""
PROMPT = [3, 1, 4]
TOKENIZER = character_tokenizer("abc")
judge = partial(p_value, vocab=V)


@pytest.fixture(scope="module", autouse=True)
def memory_asked_for_once() -> Iterator[None]:
    """Each of thousands of requests would read the machine's figures anew, an eighth of the time."""
    there = available_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sakiyomi.model_executor.build.available_bytes", lambda device: there)
        yield


@cache
def model(seed: int) -> Any:
    return tiny_llama(vocab=V, layers=1, dim=16, seed=seed, initializer_range=0.5)


def exact(params: SamplingParams, target: Any = None) -> NDArray[np.float64]:
    """The target's distribution over texts of ``LENGTH`` tokens, (V ** LENGTH), from transformers' logits."""
    sampler = Sampler(params, V)
    joint = np.ones(1)
    for depth in range(LENGTH):
        texts = [list(text) for text in itertools.product(range(V), repeat=depth)]
        with torch.no_grad():
            logits = (target or model(0))(input_ids=torch.tensor([PROMPT + text for text in texts])).logits[:, -1]
        probs = sampler.probs(sampler.process(logits, texts, PROMPT))
        joint = (joint[:, None] * probs.double().numpy()).reshape(-1)
    return joint / joint.sum()


def sample(
    drafter: Any, params: SamplingParams, least: float = 1.5, target: Any = None, asks: Sequence[str] | None = None
) -> NDArray[np.int64]:
    """Texts by number.

    Args:
        drafter, params, target: of the engine.
        least: draft tokens a text without which this would be a test of plain decoding.
        asks: those of several drafters that requests ask.
    """
    llm = LLM((target or model(0), TOKENIZER), drafter, max_batch=50)
    if asks is None:
        done = llm.generate([PROMPT], params)[0]
    else:
        alone = replace(params, n=1)
        requests = (llm.engine.submit(PROMPT, alone, key=(0, j), live=False, asks=asks) for j in range(params.n))
        done = llm.engine.complete(requests)
        assert {token.source for out in done for token in out.trace if token.status == "accepted"} == {*asks}
    assert not llm.engine._speculation.broken, "the drafter raised"
    if not isinstance(drafter, str):
        assert sum(out.stats.drafted for out in done) > least * len(done)
    seen = np.zeros(V**LENGTH, dtype=np.int64)
    for out in done:
        seen[sum(token * V**i for i, token in enumerate(reversed(out.token_ids)))] += 1
    return seen


def params(**values: Any) -> SamplingParams:
    fixed = {"max_new_tokens": LENGTH, "ignore_eos": True, "temperature": 1.0, "n": SAMPLES, "seed": 24, "gamma": 2}
    return SamplingParams(**(fixed | values))


class Ready(ModelDrafter):
    """Reads the prompt once and gives every request a copy of its keys: else that takes longer than what follows."""

    _first: int | None = None

    def _seat(self, context: Context) -> Any:
        fresh = self.name not in context.memory
        seat = super()._seat(context)
        if fresh:
            if self._first is None:
                self._first = self.model.cache.take()
                self.model.make_room(self._first, len(PROMPT), None)
                self.model.score([SequenceRows(self._first, 0, PROMPT, prompt=True)], last=True)
            self.model.make_room(seat.slot, len(PROMPT), None)
            self.model.cache.copy(seat.slot, 0, len(PROMPT), self.model.cache, self._first)
            seat.held = [*PROMPT]
        return seat


def drafter(
    kind: type[ModelDrafter] = ModelDrafter, seed: int = DRAFT, name: str = "model", mask: int | None = None
) -> ModelDrafter:
    return kind(build_runner(model(seed), max_slots=51), V, name, mask)


WARPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-k": {"temperature": 1.6, "top_k": 4},
    "top-p": {"top_p": 0.8},
    "penalty": {"repetition_penalty": 1.8, "logit_bias": {2: 1.0}},
}


_TINY = {
    "vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
_ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
_DELTA = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "head_dim": 8,
}  # fmt: skip
HYBRIDS: dict[str, Any] = {
    "window": lambda: hf.Lfm2Config(**_TINY, **_ATTENTION, layer_types=["conv", "full_attention"]),
    "delta": lambda: hf.Qwen3_5TextConfig(
        **_TINY, **_ATTENTION, **_DELTA, layer_types=["linear_attention", "full_attention"]
    ),
    "mamba2": lambda: hf.Mamba2Config(**_TINY, state_size=8, num_heads=4, head_dim=8, n_groups=1, chunk_size=8),
    "mamba": lambda: hf.MambaConfig(**_TINY, state_size=4),
}
"""One model of each of the main kinds of recurrent states."""


class Forgetful(RecurrentStore):
    """Broken: rows of refused tokens stay in the state."""

    def commit(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """Nothing moves."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "broken"), [("window", False), ("delta", False), ("mamba2", False), ("mamba", False), ("delta", True)]
)
def test_trees_for_recurrent_targets(kind: str, broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The joint distribution of four tokens, by trees of which a path is kept in the state."""
    target = make(HYBRIDS[kind]())
    if broken:
        monkeypatch.setattr("sakiyomi.model_executor.build.prove", lambda runner: None)
        monkeypatch.setattr("sakiyomi.cache.layer_state.RecurrentStore", Forgetful)
    values = params(acceptance="ratio", tree="static", nodes=6)
    p, distance = judge(sample(drafter(), values, target=target), exact(values, target))
    print(f"{kind}: p = {p:.3g}, TV = {distance:.4f}")
    assert (p < LEVEL) if broken else (p > LEVEL)


def test_the_pair_is_far_apart() -> None:
    """Where p and q are alike, a wrong rule would pass."""
    with torch.no_grad():
        p, q = (model(seed)(input_ids=torch.tensor([PROMPT])).logits[0, -1].softmax(-1) for seed in (0, DRAFT))
    assert (p - q).abs().sum() / 2 > 0.3


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rule", "warp"),
    [("ratio", "plain"), ("ratio", "top-p"), ("ratio", "penalty"), ("block", "plain"), ("traversal", "top-p")],
)
def test_rules_with_a_draft_model(rule: str, warp: str) -> None:
    """The joint distribution of four tokens: whole rounds in the kernels, and once Python's, where a drafter is another
    class.
    """
    values = params(acceptance=rule, **WARPS[warp])
    kind = Ready if (rule, warp) == ("ratio", "plain") else ModelDrafter
    p, distance = judge(sample(drafter(kind), values), exact(values))
    print(f"{rule} {warp}: p = {p:.3g}, TV = {distance:.4f}")
    assert p > LEVEL


@pytest.mark.thorough
@pytest.mark.parametrize(
    "values",
    [
        params(acceptance="ratio", tree="static", nodes=6),
        params(acceptance="traversal", tree="static", nodes=6),
        params(acceptance="ratio", tree="best-first", nodes=5),
        params(acceptance="coupled", tree="dynamic", nodes=6),
    ],
    ids=lambda values: f"{values.acceptance} {values.tree}",
)
def test_early_exit_tells_what_it_draws_from(values: SamplingParams) -> None:
    """Its rows come from passes of the first of two layers, on the target's own cache; chains and trees."""
    check_heads("early-exit:1", values, tiny_llama(vocab=V, layers=2, dim=16, seed=0, initializer_range=0.5))


def check_heads(draft: str, values: SamplingParams, target: Any = None, folder: Path | None = None) -> None:
    """Texts have the target's distribution, and some of what the heads draft is accepted, not all.

    Coupled texts are those without a draft, whose distribution is tested below: equality needs fewer samples.
    """
    loaded: Any = (target or model(0), TOKENIZER) if folder is None else str(folder)
    coupled = values.acceptance == "coupled"
    values = replace(values, n=400) if coupled else values
    llm = LLM(loaded, draft, max_batch=50, strict=True)
    done = llm.generate([PROMPT], values)[0]
    assert 0.1 < sum(out.stats.accepted for out in done) / sum(out.stats.drafted for out in done) < 0.9
    assert sum(out.stats.drafted for out in done) > 1.2 * len(done)
    if coupled:
        plain = LLM(loaded, "none", max_batch=50).generate([PROMPT], values)[0]
        assert [out.token_ids for out in done] == [out.token_ids for out in plain]
        return
    seen = np.zeros(V**LENGTH, dtype=np.int64)
    for out in done:
        seen[sum(token * V**i for i, token in enumerate(reversed(out.token_ids)))] += 1
    p, distance = judge(seen, exact(values) if target is None else exact(values, target))
    print(f"{draft.partition(':')[0]}: p = {p:.3g}, TV = {distance:.4f}")
    assert p > LEVEL


class Late(Ready):
    """Broken: draws from the head as it has become, and tells what the head gave when it saw such a text first."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._told: dict[int, torch.Tensor] = {}

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        drafts = super().propose(contexts, gammas)
        for context, draft in zip(contexts, drafts, strict=True):
            if draft.probs is not None and len(context.tokens) == len(PROMPT) + 1:
                draft.probs[0] = self._told.setdefault(context.tokens[-1], draft.probs[0].clone())
        return drafts


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Ready, params(acceptance="ratio")),
        (Ready, params(acceptance="ratio", tree="static", nodes=6)),
        (Ready, params(acceptance="coupled", tree="best-first", nodes=6)),
        (Late, params(acceptance="ratio")),
    ],
    ids=lambda value: f"{value.acceptance} {value.tree}" if isinstance(value, SamplingParams) else value.__name__,
)
def test_a_draft_that_goes_on_learning(kind: type[Ready], values: SamplingParams, tmp_path: Path) -> None:
    """Its distributions change from text to text; each is told as it was when tokens were drawn from it."""
    runner = build_runner(model(DRAFT), max_slots=51)
    learner = HeadLearner(runner, str(tmp_path / "learnt"))
    first = learner._rows.read(torch.arange(V))
    own = kind(runner, V, learner=learner)
    p, distance = judge(sample(own, values), exact(values))
    print(f"learning, {values.acceptance}, {kind.__name__}: p = {p:.3g}, TV = {distance:.4f}")
    assert (learner._rows.read(torch.arange(V)) - first).abs().max() > 0.1, "it has learnt"
    assert (p < LEVEL) if kind is Late else (p > LEVEL)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "values",
    [
        params(acceptance="ratio"),
        params(acceptance="ratio", tree="static", nodes=6),
        params(acceptance="traversal", tree=[1, 3, 2], gamma="auto"),
        params(acceptance="ratio", tree="best-first", nodes=5, **WARPS["top-p"]),
        params(acceptance="coupled", tree="best-first", nodes=6),
    ],
    ids=lambda values: f"{values.acceptance} {values.tree} {values.top_p} {values.repetition_penalty}",
)
def test_medusa_heads_tell_what_they_draw_from(values: SamplingParams, tmp_path: Path) -> None:
    """Chains and trees drawn from the heads' distributions, which are the same behind every guess of a level."""
    write_heads(new_heads(model(0), heads=2, scale=0.3), tmp_path)
    check_heads(f"medusa:{tmp_path}", values)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "values",
    [
        params(acceptance="ratio"),
        params(acceptance="ratio", tree="static", nodes=6),
        params(acceptance="ratio", tree="best-first", nodes=5, **WARPS["top-p"]),
        params(acceptance="traversal", tree=[1, 3, 2], gamma="auto"),
        params(acceptance="coupled", tree="best-first", nodes=6),
    ],
    ids=lambda values: f"{values.acceptance} {values.tree} {values.top_p}",
)
def test_eagle_heads_tell_what_they_draw_from(values: SamplingParams, tmp_path: Path) -> None:
    """Chains and trees drawn from the head's distributions, over the tokens that it knows; it lacks one."""
    speculators_folder(tmp_path, new_head(model(0), tokens=[0, 1, 2, 4], layers=(0, 0, 0), sharp=0.1))
    check_heads(f"eagle:{tmp_path}", values)


@pytest.mark.thorough
@pytest.mark.parametrize("values", [params(acceptance="ratio"), params(acceptance="traversal", tree="static", nodes=6)])
def test_eagle_heads_of_one_pass(values: SamplingParams, tmp_path: Path) -> None:
    """The same behind masks, which read learnt features."""
    speculators_folder(tmp_path, new_head(model(0), layers=(0, 0, 0), sharp=0.1, mask=4))
    check_heads(f"eagle:{tmp_path}", values)


@pytest.mark.thorough
@pytest.mark.parametrize("values", [params(acceptance="ratio"), params(acceptance="traversal", tree="static", nodes=6)])
def test_heads_that_share_the_targets_own(values: SamplingParams, tmp_path: Path) -> None:
    """The same of EAGLE-1 and 2, whose logits come from the target's head."""
    first_folder(tmp_path, new_head(model(0), first=True, layers=(0,)))
    check_heads(f"eagle:{tmp_path}", values)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("markov", "values"),
    [
        ("", params(acceptance="ratio")),
        ("rnn", params(acceptance="block")),
        ("gated", params(acceptance="ratio", tree="static", nodes=6)),
        ("", params(acceptance="ratio", tree="ddtree", nodes=5, **WARPS["top-p"])),
        ("vanilla", params(acceptance="traversal", tree=[1, 3, 2], gamma="auto")),
        ("", params(acceptance="coupled", tree="ddtree", nodes=6)),
    ],
    ids=lambda values: values if isinstance(values, str) else f"{values.acceptance} {values.tree} {values.top_p}",
)
def test_block_drafters_tell_what_they_draw_from(markov: str, values: SamplingParams, tmp_path: Path) -> None:
    """Chains and trees of one pass, whose slots know the tokens before them by a Markov head alone."""
    options = {"layers": (0, 0), "size": 3, "anchored": True, "markov": markov, "confident": bool(markov)}
    deepspec_folder(tmp_path, new_block(model(0), sharp=0.3, seed=7, **options))
    check_heads(f"block:{tmp_path}", values)


@pytest.mark.thorough
@pytest.mark.parametrize("values", [params(acceptance="ratio"), params(acceptance="traversal", tree="static", nodes=6)])
@pytest.mark.parametrize("kind", ["block", "medusa"])
def test_cut_vocabularies(kind: str, values: SamplingParams, tmp_path: Path) -> None:
    """The same of drafters that know all tokens but one, in the files that their recipes write."""
    known = torch.tensor([0, 1, 2, 4])
    if kind == "block":
        options = {"layers": (0, 0), "size": 3, "anchored": True, "markov": "gated"}
        write_block(tmp_path, new_block(model(0), tokens=known.tolist(), sharp=0.3, seed=7, **options), "", 1)
    else:
        whole = new_heads(model(0), heads=2, scale=0.3)
        rows = model(0).get_output_embeddings().weight[known].detach()
        heads = MedusaHeads(HeadsShape(2, 1, rows.shape[1], len(known), 1))
        heads.load_state_dict({"own": rows[None]} | whole.state_dict())
        heads.token_map = known
        write_heads(heads, tmp_path, "vllm")
    check_heads(f"{kind}:{tmp_path}", values)


@pytest.mark.thorough
@pytest.mark.parametrize("values", [params(acceptance="ratio"), params(acceptance="traversal", tree="static", nodes=6)])
def test_selectors_leave_tokens_out(values: SamplingParams, tmp_path: Path) -> None:
    """The same behind convolutions, of the tokens that a selector ranks."""
    options = {"layers": (0, 0), "size": 3, "kernel": 2, "group": 8, "selected": 3}
    block_folder(tmp_path, new_block(model(0), sharp=0.3, seed=7, **options))
    check_heads(f"block:{tmp_path}", values)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "values",
    [params(acceptance="ratio"), params(acceptance="traversal", tree="static", nodes=6)],
    ids=lambda values: f"{values.acceptance} {values.tree}",
)
def test_mtp_layers_tell_what_they_draw_from(values: SamplingParams, tmp_path: Path) -> None:
    """Chains and trees drawn from the distributions of a layer in the target's own files."""
    toy = new_toy("mimo", vocab_size=V, num_hidden_layers=1, hidden_size=16, num_attention_heads=2)
    toy.model.lm_head.weight.data *= 0.3
    target_folder(tmp_path, toy, TOKENIZER)
    check_heads("mtp", values, toy.model, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "values",
    [
        params(acceptance="ratio"),
        params(acceptance="traversal", tree="static", nodes=6),
        params(acceptance="coupled", tree="best-first", nodes=6),
    ],
    ids=lambda values: f"{values.acceptance} {values.tree}",
)
def test_assistants_tell_what_they_draw_from(values: SamplingParams, tmp_path: Path) -> None:
    """Chains and trees drawn from distributions over some of the tokens, on the target's own keys and values."""
    target = new_target(vocab_size=V)
    target.lm_head.weight.data *= 0.3
    folder = assistant_folder(tmp_path / "assistant", new_assistant(target))
    save_model(tmp_path, target, TOKENIZER)
    check_heads(f"assistant:{folder}", values, target, tmp_path)


def test_typical_acceptance_is_found_out(tmp_path: Path) -> None:
    """The lossy rule fails the test that the others pass: the test can fail, and the mark "lossy" is deserved."""
    write_heads(new_heads(model(0), heads=2, scale=0.3), tmp_path)
    values = params(acceptance="typical", tree="best-first", nodes=5, n=SAMPLES // 2)
    llm = LLM((model(0), TOKENIZER), f"medusa:{tmp_path}", max_batch=50, strict=True)
    seen = np.zeros(V**LENGTH, dtype=np.int64)
    for out in llm.generate([PROMPT], values)[0]:
        seen[sum(token * V**i for i, token in enumerate(reversed(out.token_ids)))] += 1
    p, distance = judge(seen, exact(values))
    print(f"typical: p = {p:.3g}, TV = {distance:.4f}")
    assert p < LEVEL
    assert distance > 0.1


@pytest.mark.thorough
def test_coupled_with_a_draft_model() -> None:
    """With and without a draft: the very same samples, and the right distribution."""
    values = params(acceptance="coupled", **WARPS["top-k"])
    seen = sample(drafter(), values)
    p, distance = judge(seen, exact(values))
    print(f"coupled: p = {p:.3g}, TV = {distance:.4f}")
    assert p > LEVEL
    assert np.array_equal(seen, sample("none", values))


TREES: dict[str, dict[str, Any]] = {
    "static": {"tree": "static", "nodes": 6},  # drawn without replacement
    "best-first": {"tree": "best-first", "nodes": 5},  # chosen: point masses
    "chain of what pays": {"gamma": "auto"},
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "values",
    [params(acceptance="ratio"), params(acceptance="traversal", tree="static", nodes=6)],
    ids=lambda values: f"{values.acceptance} {values.tree}",
)
def test_drafts_of_one_pass_tell_what_they_draw_from(values: SamplingParams) -> None:
    """Behind the first guess stand masks, whose distributions depend on the text alone."""
    p, distance = judge(sample(drafter(mask=4), values), exact(values))
    print(f"parallel {values.acceptance}: p = {p:.3g}, TV = {distance:.4f}")
    assert p > LEVEL


@pytest.mark.thorough
@pytest.mark.parametrize("name", TREES)
def test_ratio_with_trees_of_a_draft_model(name: str) -> None:
    values = params(acceptance="ratio", **TREES[name])
    p, distance = judge(sample(drafter(), values, 0.0 if name == "chain of what pays" else 1.5), exact(values))
    print(f"ratio {name}: p = {p:.3g}, TV = {distance:.4f}")
    assert p > LEVEL


@pytest.mark.thorough
@pytest.mark.parametrize("more", [{}, {"tree": "static", "nodes": 6}, {"tree": "best-first", "nodes": 3}], ids=str)
def test_ratio_with_merged_models(more: dict[str, Any]) -> None:
    """Two drafts of one target, drawn and chosen: draws of both at one node, and of one at its sibling."""
    values = params(acceptance="ratio", n=2 * SAMPLES, **more)  # as many as show that a tree was pruned, see below
    both = MergedDrafter([drafter(), drafter(seed=OTHER, name="other")])
    p, distance = judge(sample(both, values), exact(values))
    print(f"ratio merged {more}: p = {p:.3g}, TV = {distance:.4f}")
    assert p > LEVEL


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["ratio", "coupled"])
def test_one_of_merged_drafters_that_requests_ask(rule: str) -> None:
    values = params(acceptance=rule)
    both = MergedDrafter([drafter(), drafter(seed=OTHER, name="other")])
    p, distance = judge(sample(both, values, asks=["other"]), exact(values))
    print(f"{rule}, one of two: p = {p:.3g}, TV = {distance:.4f}")
    assert p > LEVEL


def best_of_all(parents: Sequence[int], values: Sequence[float], *_: Any) -> list[int]:
    """Broken: of the drawn nodes the most valuable one is kept, as may be done with chosen ones."""
    return [min(range(len(parents)), key=lambda i: (parents[i] >= 0, -values[i]))]


@pytest.mark.thorough
def test_a_merged_tree_that_is_pruned_after_drawing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged, "_kept", best_of_all)
    values = params(acceptance="ratio", gamma=1, n=2 * SAMPLES)
    both = MergedDrafter([drafter(), drafter(seed=OTHER, name="other")])
    p, distance = judge(sample(both, values, 0.5), exact(values))
    print(f"pruned after drawing: p = {p:.3g}, TV = {distance:.4f}")
    assert p < LEVEL


REPEATING = [3, 1, 4, 1, 3, 1, 2, 4, 3, 1, 4, 4, 3, 1]
"""Of which something is always found, with several continuations."""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_without_a_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of point masses: each refusal takes its token out of p."""
    monkeypatch.setitem(globals(), "PROMPT", REPEATING)
    values = params(acceptance="ratio")
    drafter = Wide(text_drafter(kind, V, [REPEATING * 2]))
    p, distance = judge(sample(drafter, values, 0.4), exact(values))
    print(f"{kind}: p = {p:.3g}, TV = {distance:.4f}")
    assert p > LEVEL


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_coupled_drafts_without_a_model(kind: str) -> None:
    """N-grams choose by the target's own noise, and yet every text is the one without a draft. Equality needs fewer
    samples than a distribution, and that of the texts without a draft is tested above.
    """
    values = params(acceptance="coupled", n=400)
    done, plain = (
        LLM((model(0), TOKENIZER), draft, max_batch=50, strict=True).generate([REPEATING], values)[0]
        for draft in (Wide(text_drafter(kind, V, [REPEATING * 2])), "none")
    )
    assert [out.token_ids for out in done] == [out.token_ids for out in plain]
    assert len({tuple(out.token_ids) for out in plain}) > 50
    assert sum(out.stats.drafted for out in done) > 0.4 * len(done)
    assert 0 < sum(out.stats.accepted for out in done) < sum(out.stats.drafted for out in done)


class Overconfident(Ready):
    """Broken: draws at temperature 1 and tells another distribution, as if it had drawn at temperature 2."""

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        drafts = super().propose(contexts, gammas)
        return [_retold(draft, lambda probs: probs.sqrt()) for draft in drafts]


class Shifted(Ready):
    """Broken: each token is told with the row of another depth."""

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        return [_retold(draft, lambda probs: probs.roll(1, 0)) for draft in super().propose(contexts, gammas)]


class Choosy(Ready):
    """Broken: withdraws a draft after it has seen it ("prune after drawing")."""

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        drafts = super().propose(contexts, gammas)
        return [Draft.empty() if draft.tree.tokens[0] > 1 else draft for draft in drafts]


def _retold(draft: Draft, how: Any) -> Draft:
    if draft.probs is None:
        return draft
    probs = how(draft.probs)
    return Draft(draft.tree, draft.kind, draft.draws, probs / probs.sum(-1, keepdim=True))


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["ratio", "block"])
@pytest.mark.parametrize("broken", [Overconfident, Shifted, Choosy])
def test_broken_drafters_are_found(broken: type[ModelDrafter], rule: str) -> None:
    """Each would pass every test of equality: nothing but the distribution shows it, in no more samples than the right
    ones pass with.
    """
    values = params(acceptance=rule)
    p, distance = judge(sample(drafter(broken), values), exact(values))
    print(f"{broken.__name__}, {rule}: p = {p:.3g}, TV = {distance:.4f}")
    assert p < 1e-9

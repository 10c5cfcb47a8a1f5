"""Caches within a budget: reading ahead changes nothing of what stays, and what stays is what attention sees.

The oracle is transformers with a mask: a row sees the pairs that stayed at the last border before it, and those since.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import sakiyomi.engine.speculation
from architectures import CONFIGS, VOCAB, greedy, model_of, prompt, settled
from drafters import Branching, Fading, texts_of
from sakiyomi import LLM, SamplingParams
from sakiyomi.cache.observations import RowObservations
from sakiyomi.cache.policies import POLICIES, View
from sakiyomi.cache.policies.h2o import H2O
from sakiyomi.cache.policies.merging.convolutions import Convolutions, MergingShape
from sakiyomi.cache.policies.merging.formats import write_merging
from sakiyomi.cache.policies.retaining.formats import read_heads, write_heads
from sakiyomi.cache.policies.retaining.heads import RetainingHeads, RetainingShape
from sakiyomi.cache.policies.retaining.raw import Raw
from sakiyomi.cache.policies.specs import SPARSE
from sakiyomi.core.cache_specs import CACHE_FORMS
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.outputs import Generation
from sakiyomi.evaluation.audit.audit import audit
from sakiyomi.evaluation.audit.config import AuditConfig
from sakiyomi.kernels.native import PackedWeights
from toys import character_tokenizer, places_of, save_model, tiny_llama, tiny_tokenizer

WITHOUT_FILES = [name for name in POLICIES if name != "locret"]
TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
NEW, CHUNK, BUDGET = 80, 16, 24
PROMPTS = [prompt(70, 1), prompt(5, 2), prompt(39, 3)]
"""Longer than the budget, shorter than it, and one that ends within a chunk."""
SMALL = {
    "infllm": "[block=4,sinks=4,local=4,representatives=2]",
    "snapkv": "[window=8,local=0]",
    "pyramidkv": "[window=4,local=0,pyramid=4]",
    "minference": "[vertical=4,slash=4,block=4]",
}


def spec(name: str, **options: object) -> str:
    """A policy whose window fits into the budget."""
    given = [SMALL[name][1:-1]] if name in SMALL else ["local=4"]
    given += [f"{key}={value}" for key, value in options.items()]
    return f"{name}[{','.join(given)}]"


def budget_of(policy: str) -> int | None:
    """None for one that keeps everything."""
    return None if policy.partition("[")[0] in SPARSE else BUDGET


@cache
def llm_of(name: str, policy: str, draft: Any = "none", **options: Any) -> LLM:
    limits = {"kv_budget": budget_of(policy), "chunk_size": CHUNK}
    return LLM((model_of(name), TOKENIZER), draft, cache=policy, compile=False, **limits, **options)


@cache
def plain(name: str, policy: str) -> list[list[int]]:
    """The text of each prompt, nothing drafted."""
    return [out.token_ids for out in llm_of(name, policy).generate(PROMPTS, params())]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NEW, "ignore_eos": True} | values))


def drafted(name: str, policy: str, skill: Any, **values: Any) -> list[list[int]]:
    """The same by a drafter that is right now and then."""
    drafter = skill(texts_of(PROMPTS, plain(name, policy)), "sometimes", VOCAB)
    limits = {"kv_budget": budget_of(policy), "chunk_size": CHUNK}
    llm = LLM((model_of(name), TOKENIZER), drafter, cache=policy, compile=False, **limits)
    done = llm.generate(PROMPTS, params(**values))
    assert not llm.engine._speculation.broken, "the drafter raised"
    assert sum(out.stats.accepted for out in done) > 20, "nothing was read ahead"
    return [out.token_ids for out in done]


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", [*WITHOUT_FILES, *SPARSE])
def test_reading_ahead_changes_nothing(policy: str) -> None:
    """Every policy, trees and a batch of unequal lengths, against each prompt alone."""
    llm = llm_of("llama", spec(policy))
    alone = [llm.generate([tokens], params())[0].token_ids for tokens in PROMPTS]
    assert drafted("llama", spec(policy), Branching, gamma=5) == plain("llama", spec(policy)) == alone


@cache
def heads_of(name: str) -> str:
    """A folder with heads of random weights for this architecture."""
    shape = RetainingShape(
        Raw(model_of(name)).widths, tuple(layer.heads for layer in llm_of(name, "recency").target.cache.shapes), 24
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        heads = RetainingHeads(shape)
    folder = Path(tempfile.mkdtemp()) / name
    write_heads(heads, folder)
    return str(folder)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["locret", "infllm"])
def test_any_policy_may_have_a_pyramid(name: str) -> None:
    """Budgets fall from layer to layer, a head has 24 on average, and reading ahead changes nothing of that either."""
    pyramid = spec("infllm", pyramid=4) if name == "infllm" else f"locret:{heads_of('llama')}[local=4,pyramid=4]"
    assert drafted("llama", pyramid, Branching, gamma=5) == plain("llama", pyramid)
    llm = llm_of.__wrapped__("llama", pyramid)
    llm.generate(PROMPTS[2:], params())
    target = llm.target
    last = len(PROMPTS[2]) + (NEW - 1) // target.eviction.interval * target.eviction.interval
    held = [last - int(gone) for gone in target.cache.dropped[0, :, 0]]
    assert held[0] > held[1] == BUDGET > held[2] and sum(held) == 3 * BUDGET


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "gpt_neox", "gemma2", "granite", "stablelm"])
def test_reading_ahead_with_retaining_heads(name: str) -> None:
    policy = f"locret:{heads_of(name)}[local=4]"
    assert drafted(name, policy, Branching, gamma=4) == plain(name, policy)


@pytest.mark.thorough
def test_last_tokens_beside_the_budget() -> None:
    """What is before them is brought down to the budget, whole chunks or not; they and what is written stay, also where
    another request has read the beginning.
    """
    policy = f"locret:{heads_of('llama')}[local=0,sinks=0,ends=0,where=prompt,beside=10]"
    assert drafted("llama", policy, Branching, gamma=5) == plain("llama", policy)
    for tokens in (PROMPTS[0], PROMPTS[2]):
        llm = llm_of("llama", policy)
        with llm.conversation() as conversation:
            conversation.generate(tokens, params())
            before, end = len(tokens) - 10, len(tokens) + 64
            for head in itertools.chain(*places_of(llm.target.eviction, 0)):
                assert len(head) == BUDGET + end - before
                assert head[BUDGET:].tolist() == list(range(before, end))
    # The shorter prompt ends so that a chunk's end lies among the last pairs of it that are reserved.
    reserving = f"locret:{heads_of('llama')}[local=0,sinks=0,ends=0.5,stabilizers=0,where=prompt,beside=10]"
    longer = [[*prompt(90, 4), *prompt(count, 5)] for count in (2, 23)]
    for shared in (policy, reserving):
        alone = [llm_of.__wrapped__("llama", shared).generate([tokens], params())[0].token_ids for tokens in longer]
        together = llm_of.__wrapped__("llama", shared).generate(longer, params())
        assert [out.token_ids for out in together] == alone
        assert any(out.stats.reused for out in together)


@cache
def merging_of(name: str) -> str:
    """A folder with convolutions of random weights for this architecture."""
    shapes = llm_of(name, "recency").target.cache.shapes
    dims = tuple((layer.key_dim, layer.value_dim) for layer in shapes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = Convolutions(MergingShape(dims, tuple(layer.heads for layer in shapes), 6))
    folder = Path(tempfile.mkdtemp()) / name
    write_merging(made, folder)
    return str(folder)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("policy", ["h2o", "locret", "h2o where positions move"])
def test_reading_ahead_where_what_goes_is_merged(policy: str, name: str) -> None:
    before = {
        "h2o": spec("h2o"),
        "locret": f"locret:{heads_of(name)}[local=4]",
        "h2o where positions move": spec("h2o", positions="reassigned"),
    }[policy]
    if name == "gpt2" and "move" in policy:
        pytest.skip("its positions do not move")
    merged = f"{before}+lococo:{merging_of(name)}"
    assert drafted(name, merged, Branching, gamma=4) == plain(name, merged) != plain(name, before)


def test_scores_of_heads_are_those_of_the_module() -> None:
    """What passes of chunks, trees and single tokens leave behind, against one pass of transformers' model."""
    model, heads = model_of("llama"), read_heads(heads_of("llama")).heads
    texts = texts_of(PROMPTS[:1], [greedy(model, PROMPTS[0], NEW)])
    drafter = Branching(texts, "sometimes", VOCAB)
    policy = f"locret:{heads_of('llama')}[local=4]"
    llm = LLM((model, TOKENIZER), drafter, cache=policy, kv_budget=250, chunk_size=CHUNK, compile=False)
    with llm.conversation() as conversation:
        out = conversation.generate(PROMPTS[0], params(gamma=5))
        assert out.stats.accepted
        found = llm.target.eviction._slots[0].scores
        tokens = [*PROMPTS[0], *out.token_ids]
        with torch.no_grad(), Raw(model) as raw:
            model(torch.tensor([tokens]))
            for layer, of_layer in enumerate(found):
                scores = heads(layer, raw.read[layer])[: len(of_layer[0])].T
                assert len(of_layer[0]) == len(PROMPTS[0]) + 64
                torch.testing.assert_close(torch.stack(of_layer), scores, atol=1e-4, rtol=1e-4)


def _keep_the_pairs_alone(notes: RowObservations, slot: int, length: int, rows: Sequence[int]) -> None:
    """Broken: what rows of refused tokens left behind is taken for that of the accepted ones."""


def _reach_beyond(request: Any) -> int:
    """Broken: a round may pass a border, so that where pairs are dropped depends on what was accepted."""
    return int(request.last - len(request.tokens) - 1)


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [(RowObservations, "commit", _keep_the_pairs_alone), (sakiyomi.engine.speculation, "_room", _reach_beyond)],
    ids=["statistics of refused rows", "rounds beyond borders"],
)
def test_broken_rules_are_found(owner: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = plain("llama", spec("h2o"))
    monkeypatch.setattr(owner, name, broken)
    assert drafted("llama", spec("h2o"), Branching, gamma=5) != wanted


@pytest.mark.thorough
def test_the_audit_judges_by_the_same_cache(tmp_path: Path) -> None:
    """Texts over several borders, and a defect that only they show."""
    folder = save_model(tmp_path, tiny_llama(dim=64, max_position_embeddings=512), tiny_tokenizer())
    text = "Once upon a time there was a little fox who lived in a wood. " * 20
    config = AuditConfig(prompt_tokens=150, max_new_tokens=80, gammas=(3,), seeds=(0,))
    options = {"cache": spec("h2o"), "kv_budget": BUDGET, "chunk_size": CHUNK, "compile": False}
    report = audit(str(folder), f"model:{folder}", prompts=[text], config=config, options=options)
    assert report.reference == "own plain" and not report.defects
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sakiyomi.engine.speculation, "_room", _reach_beyond)
        report = audit(str(folder), f"model:{folder}", prompts=[text], config=config, options=options)
        assert report.defects


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["h2o", "pyramidkv", "streaming", "sirllm", "infllm"])
def test_reading_ahead_where_positions_move(policy: str) -> None:
    assert drafted("qwen3", spec(policy, positions="reassigned"), Fading, gamma=4) == plain(
        "qwen3", spec(policy, positions="reassigned")
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["h2o", "minference"])
@pytest.mark.parametrize("name", [*CONFIGS, "gemma", "mixtral", "deepseek_v3"])
def test_every_architecture(name: str, policy: str) -> None:
    assert drafted(name, spec(policy), Branching, gamma=3) == plain(name, spec(policy))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_neox", "granite", "stablelm"])
def test_expected_attention_of_other_architectures(name: str) -> None:
    assert drafted(name, spec("expected"), Branching, gamma=3) == plain(name, spec("expected"))


def test_what_keeps_its_own_attention_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"GPTNeoXJapanese.*keeps its own attention.*cache='full'"):
        llm_of("gpt_neox_japanese", spec("h2o"))


def kept_after(places: list[int], length: int) -> list[int]:
    """What streaming keeps of these: four sinks and the last ones."""
    return places if len(places) <= BUDGET else places[:4] + places[-(BUDGET - 4) :]


def seen(length: int, prompt_tokens: int) -> Tensor:
    """(length, length) bool: what each row sees under streaming, borders after every chunk and 64 new tokens."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    borders = [*range(CHUNK, prompt_tokens, CHUNK), prompt_tokens]
    borders += range(prompt_tokens + 64, length + 64, 64)
    held: list[int] = []
    first = 0
    for border in borders:
        for row in range(first, min(border, length)):
            mask[row, held] = True
            mask[row, first : row + 1] = True
        held = kept_after([*held, *range(first, border)], border)
        first = border
    return mask


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "olmo2", "granite", "gpt_neox"])
def test_what_stays_is_what_attention_sees(name: str) -> None:
    """Streaming, by transformers with a mask over the whole text: the text and its probabilities."""
    llm = llm_of(name, "streaming[sinks=4,local=4]")
    (out,) = llm.generate([PROMPTS[0]], params())
    is_of(name, out, seen(len(PROMPTS[0]) + NEW, len(PROMPTS[0])))


def seen_in_part(length: int, prompt_tokens: int) -> Tensor:
    """(length, length) bool: what each row sees of the first 3 columns and the nearest 5 diagonals of blocks of 4 rows,
    which begin with every chunk; rows behind the prompt see everything.
    """
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    for chunk in range(0, prompt_tokens, CHUNK):
        end = min(chunk + CHUNK, prompt_tokens)
        for block in range(chunk, end, 4):
            mask[block : min(block + 4, end), 3 : max(3, block - 4)] = False
    return mask


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "olmo2", "granite", "gpt_neox"])
def test_what_prompts_look_at_is_what_attention_sees(name: str) -> None:
    """The same of a pattern that is the same for all texts."""
    llm = llm_of(name, "minference[pattern=a-shape,vertical=3,slash=5,block=4]")
    (out,) = llm.generate([PROMPTS[0]], params())
    is_of(name, out, seen_in_part(len(PROMPTS[0]) + NEW, len(PROMPTS[0])))


def is_of(name: str, out: Generation, mask: Tensor) -> None:
    """Whether transformers writes this text, with these probabilities, where rows see that; and another one else."""
    model, tokens = model_of(name), [*PROMPTS[0], *out.token_ids]
    added = torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), attention_mask=added).logits[0]
    rows = logits[len(PROMPTS[0]) - 1 : -1].softmax(-1)
    assert rows.argmax(-1).tolist() == out.token_ids
    for row, entry in zip(rows, out.trace, strict=True):
        assert float(row.max()) == pytest.approx(entry.target_prob, abs=2e-4)
    assert greedy(model, PROMPTS[0], NEW) != out.token_ids, "what was not seen did not matter"


def test_expected_attention_is_a_mean_over_queries() -> None:
    """Against queries that are drawn: normal, before their rotation, then turned to each of the next positions."""
    torch.manual_seed(0)
    llm = llm_of("llama", "expected[local=4,ahead=8,floor=0.0]")
    eviction: Any = llm.target.eviction
    turn, dim, rows = eviction.policy._turn, 8, 40
    raw = torch.randn(2, rows, dim) * 0.3 + torch.randn(2, 1, dim)  # two query heads of one key head
    positions = torch.arange(10, 10 + rows)
    queries = turn(0, raw, positions.expand(2, -1))
    keys, values = torch.randn(1, 50, dim), torch.ones(1, 50, dim)
    notes = torch.zeros(rows, 2, 2, dim)
    notes[:, 1] = queries.transpose(0, 1)
    view = View(
        layer=0,
        heads=slice(1, 2),
        all_heads=2,
        prompt=50,
        length=50,
        budget=24,
        new_count=rows,
        moved=0,
        places=torch.arange(50)[None],
        keys=keys,
        values=values,
        observations=notes.flatten(1),
        neg_log_prob=None,
        previous_scores=torch.zeros(1, 10),
    )
    found = eviction.policy.score(view)[0]
    rotation = torch.stack([turn(0, torch.eye(dim)[None], torch.full((1, dim), p))[0] for p in range(50, 58)]).mean(0)
    away = raw - raw.mean(1, keepdim=True)
    total = torch.zeros(50)
    for head in range(2):
        spread = (away[head].T @ away[head]) / rows
        drawn = raw[head].mean(0) + torch.randn(200_000, dim) @ torch.linalg.cholesky(spread + 1e-9 * torch.eye(dim)).T
        logs = (drawn @ rotation @ keys[0].T).exp().mean(0).log()
        total += logs.softmax(-1) / 2
    torch.testing.assert_close(found, total * dim**0.5, atol=0.01, rtol=0.05)


def test_sums_of_attention_are_the_models_own() -> None:
    """H2O's scores, where nothing was dropped yet, are columns of transformers' attention, summed over rows."""
    model, tokens = model_of("llama"), PROMPTS[0]
    llm = LLM((model, TOKENIZER), "none", cache="h2o[local=4]", kv_budget=200, chunk_size=CHUNK, compile=False)
    with llm.conversation() as conversation:
        conversation.generate(tokens, params(max_new_tokens=2))
        found = llm.target.eviction._slots[0].scores
        with torch.no_grad():
            eager = model_of("llama")
            before = eager.config._attn_implementation
            eager.set_attn_implementation("eager")
            attentions = eager(torch.tensor([tokens]), output_attentions=True).attentions
            eager.set_attn_implementation(before)
        for layer, of_layer in enumerate(attentions):
            sums = of_layer[0].sum(1).view(2, 2, -1).sum(1)
            torch.testing.assert_close(torch.stack(found[layer]), sums, atol=1e-4, rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"exact": True}, {"compile": "auto"}], ids=str)
def test_recorded_and_exact_passes_leave_the_same_behind(options: dict[str, Any]) -> None:
    drafter = Branching(texts_of(PROMPTS, plain("llama", spec("h2o"))), "sometimes", VOCAB)
    both = [
        LLM((model_of("llama"), TOKENIZER), draft, cache=spec("h2o"), kv_budget=BUDGET, chunk_size=CHUNK, **options)
        for draft in ("none", drafter)
    ]
    if options.get("compile"):
        both = [settled(llm) for llm in both]
    first, second = ([out.token_ids for out in llm.generate(PROMPTS, params(gamma=4))] for llm in both)
    assert first == second == plain("llama", spec("h2o"))


def test_a_text_longer_than_the_models_positions() -> None:
    """Positions that move together never pass the budget's; those that are kept end where the model's end."""
    llm = llm_of("llama", spec("streaming", positions="reassigned"))
    (out,) = llm.generate([prompt(400, 4)], params(max_new_tokens=200))
    assert len(out.token_ids) == 200
    assert llm.target.cache.room <= 512


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "phi3", "stablelm", "gemma2", "llama3-rope", "granite"])
def test_positions_move(name: str) -> None:
    """Keys that are turned are those of a text that stands at its new place: of a window that moves on, as if the text
    had begun there, as far as each layer's rows saw nothing that is gone.
    """
    llm = llm_of(name, "recency[local=4,positions=reassigned]")
    assert llm.target.eviction._mover is not None  # proven on this model when it was made
    assert len(llm.generate([prompt(300, 2)], params())[0].token_ids) == NEW


def test_gpt2s_positions_do_not_move() -> None:
    with pytest.raises(UnsupportedError, match=r"reassigned.*GPT2"):
        llm_of("gpt2", "recency[local=4,positions=reassigned]")


def test_what_is_recalled_is_what_was_there() -> None:
    """InfLLM: pairs of the cache are, bit for bit, those of their places; and blocks come back that had gone."""
    llm = llm_of("llama", spec("infllm"))
    eviction: Any = llm.target.eviction
    chosen: list[set[int]] = []
    excerpt = eviction.cache.excerpt

    def watched(slot: int, length: int, source: Any, other: int, columns: list[Tensor]) -> None:
        excerpt(slot, length, source, other, columns)
        chosen.append(set(columns[0][0].tolist()))
        for layer, of_layer in enumerate(columns):
            for head, places in enumerate(of_layer):
                now = llm.target.cache.keys[layer][slot, head, : len(places)]
                assert torch.equal(now, source.keys[layer][other, head, places])

    eviction.cache.excerpt = watched
    try:
        out = llm.generate([PROMPTS[0]], params())[0]
    finally:
        del eviction.cache.excerpt
    assert len(out.token_ids) == NEW and len(chosen) > 5
    assert any((later - sooner) & set(range(60)) for sooner, later in itertools.pairwise(chosen)), "none came back"


@pytest.mark.thorough
def test_memory_is_flat() -> None:
    """Bytes do not grow with the text, and a pyramid's upper layers have less."""
    flat = llm_of("llama", "streaming[local=4,positions=reassigned]")
    sizes = []
    for length in (300, 900, 2700):
        flat.generate([prompt(length, 5)], params(max_new_tokens=130))
        sizes.append(flat.target.cache.bytes)
    assert sizes[0] == sizes[1] == sizes[2]
    pyramid = LLM(
        (model_of("llama"), TOKENIZER),
        "none",
        cache="pyramidkv[window=8,local=0,positions=reassigned]",
        kv_budget=400,
        chunk_size=200,
        compile=False,
        max_batch=1,
    )
    pyramid.generate([prompt(1500, 6)], params(max_new_tokens=2))
    rooms = [layer.shape[2] for layer in pyramid.target.cache.keys]
    assert rooms[0] > rooms[1] > rooms[2]
    assert pyramid.target.cache.bytes == sum(rooms) * 2 * (8 + 8) * 4


@dataclass(kw_only=True, eq=False)
class Uneven(H2O):
    """Heads of one layer with budgets of their own."""

    name: ClassVar[str] = "uneven"

    def budgets(self, budget: int, heads: Sequence[int]) -> list[list[int]]:
        more = (-12, 12)
        return [[budget + more[(head + i) % 2] for head in range(count)] for i, count in enumerate(heads)]


@pytest.mark.thorough
@pytest.mark.parametrize("native", [True, False])
def test_heads_with_budgets_of_their_own(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their storage is as large as each needs, and both ways of attention read it."""
    monkeypatch.setitem(POLICIES, "uneven", Uneven)
    monkeypatch.setitem(CACHE_FORMS, "uneven", CACHE_FORMS["h2o"])
    tokens = prompt(900, 7)

    def make(draft: Any) -> LLM:
        policy = "uneven[local=4,positions=reassigned]"
        return LLM((model_of("llama"), TOKENIZER), draft, cache=policy, kv_budget=60, chunk_size=300, compile=False)

    wanted = make("none").generate([tokens], params())[0].token_ids
    if not native:
        monkeypatch.setattr(PackedWeights, "create", lambda: None)
    llm = make("none")
    with llm.conversation() as conversation:
        out = conversation.generate(tokens, params())
        held = places_of(llm.target.eviction, 0)
        assert [[len(head) for head in layer] for layer in held] == [[48, 72], [72, 48], [48, 72]]
    assert [store.ndim for store in llm.target.cache.keys] == [3] * 3, "the storage is even"
    rooms = [48 + 320, 72 + 320]
    assert llm.target.cache.starts[0] == [0, rooms[0], sum(rooms)]
    drafter = Branching(texts_of([tokens], [out.token_ids]), "sometimes", VOCAB)
    (second,) = make(drafter).generate([tokens], params(gamma=5))
    assert second.token_ids == out.token_ids == wanted
    assert second.stats.accepted > 20

"""``exact=True`` with every member of every registry: caches, drafters, builders of trees, rules, rounded weights.

A row of the table runs each prompt alone without a draft, and all at once with one, and compares tokens and the bits of
the best log probabilities. Every member stands in one row or two; whoever is added to a registry has a row by that, and
whoever needs a file of its own says here how one is made.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sakiyomi
from architectures import VOCAB, model_of, prompt
from block_toys import dflash_folder, new_block
from drafters import Branching, Fading, Noisy, texts_of
from eagle_toys import new_head, speculators_folder
from medusa_toys import heads_folder
from mtp_toys import target_folder, with_layer
from sakiyomi import LLM, SamplingParams
from sakiyomi.cache.layout import LayerShape
from sakiyomi.cache.policies import POLICIES
from sakiyomi.cache.policies.merging.convolutions import Convolutions, MergingShape
from sakiyomi.cache.policies.merging.formats import write_merging
from sakiyomi.cache.policies.retaining.formats import write_heads
from sakiyomi.cache.policies.retaining.heads import RetainingHeads, RetainingShape
from sakiyomi.cache.policies.retaining.raw import Raw
from sakiyomi.cache.policies.specs import SPARSE
from sakiyomi.core.cache_specs import CACHE_FORMS
from sakiyomi.core.outputs import Generation
from sakiyomi.core.params import QUANTIZATIONS
from sakiyomi.drafters import DRAFTERS
from sakiyomi.drafters.trees import BUILDERS
from sakiyomi.model_executor.build import build_runner
from sakiyomi.sampling.verifiers import VERIFIERS, Verifier
from toys import character_tokenizer, save_model

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
NEW, CHUNK, BUDGET = 40, 32, 72
PROMPTS = [prompt(100, 1), prompt(5, 2), [*prompt(100, 1)[:97], *prompt(5, 3)]]
"""Past borders of prompt and text, shorter than the budget, and one that begins as the first and ends in a chunk."""
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=4, gamma=4)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=1)

# ------------------------------------------------------------ the table

SMALL = {"local": 8, "window": 8, "block": 4, "sinks": 4, "representatives": 2, "vertical": 8, "slash": 8}
"""Options of caches, small enough for these texts."""
ARGUMENTS = {"self-evicted": "64", "early-exit": "1", "oracle": "0.7"}
"""What stands behind the colon of a drafter that needs something there, and no file."""
FULL_ONLY = {"self-evicted", "oracle"}
"""Drafters that refuse other caches, or that do not foresee their borders."""


def member(name: str, make: Any) -> str:
    """One part of a cache spec, its options small."""
    fields = {field.name for field in dataclasses.fields(make) if field.init}
    chosen = ",".join(f"{option}={value}" for option, value in SMALL.items() if option in fields)
    return f"{name}{':?' if name in FILES else ''}[{chosen}]"


def caches() -> Iterator[str]:
    yield from (member(name, make) for name, make in POLICIES.items())
    others = {"merger": "h2o[local=8]+{}:?", "packing": "{}[residual=16]", "offloaded": "{}"}
    yield from (others[form.kind].format(name) for name, form in CACHE_FORMS.items() if form.kind in others)
    yield from (member(name, make) for name, make in SPARSE.items())
    # Several at once: what is dropped and packed, what is packed and read in part, what moves.
    yield from ("locret:?[local=8]+quant-4[residual=16]", "streaming[local=8,positions=reassigned]")
    yield f"kvquant-4[residual=16]+{member('minference', SPARSE['minference'])}"


def drafts() -> list[Any]:
    """Every drafter that any target has, one that is merged, and scripted ones that are wrong in their own ways."""
    named = [f"{name}:{ARGUMENTS[name]}" if name in ARGUMENTS else name for name in DRAFTERS if name != "assistant"]
    named = [f"{name}:?" if name in FILES else name for name in named]
    return [*named, "suffix+model:?", Branching, Noisy, Fading]


def follows_draft(rule: Verifier) -> bool:
    """Whether a rule's text depends on what was proposed, and not on target and seed alone."""
    return rule.rule == "ratio" or not rule.lossless


def rules() -> list[SamplingParams]:
    """Every rule whose text is a function of target and seed."""
    able = [name for name, rule in VERIFIERS.items() if not follows_draft(rule)]
    return [replace(SAMPLED, acceptance=name) if name in ("coupled",) else GREEDY for name in able]


def trees() -> Iterator[dict[str, Any]]:
    fixed: dict[str, dict[str, Any]] = {"choices": {"tree": [1, 2, 2], "gamma": "auto"}, "chain": {"tree": "chain"}}
    yield from (fixed.get(name, {"tree": name, "nodes": 7}) for name in BUILDERS)


@dataclasses.dataclass(frozen=True)
class Case:
    cache: str
    draft: Any
    params: SamplingParams
    weights: tuple[tuple[str, str], ...] = ()
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        rule = "sampled" if self.params.temperature else "greedy"
        weights = "".join(f" {value}" for _, value in self.weights)
        return f"{self.cache} {getattr(self.draft, '__name__', self.draft)} {rule} {self.params.tree}{weights}"


def table() -> list[Case]:
    """Every member once, in turn with the others."""
    every = drafts()
    full = [draft for draft in every if isinstance(draft, str) and draft.partition(":")[0] in FULL_ONLY]
    turn = itertools.cycle([draft for draft in every if draft not in full])
    rule, tree = itertools.cycle(rules()), itertools.cycle(trees())
    kinds = [*[(("quantize", kind),) for kind in QUANTIZATIONS], (("offload", "disk"),)]
    dtype = itertools.cycle([torch.bfloat16, torch.bfloat16, torch.float32])

    def case(cache: str, draft: Any, weights: tuple[tuple[str, str], ...] = ()) -> Case:
        return Case(cache, draft, replace(next(rule), **next(tree)), weights, next(dtype))

    cases = [case("full", draft) for draft in full] + [case(cache, next(turn)) for cache in caches()]
    cases += [case(cache, draft, kind) for kind, (cache, draft) in zip([*kinds, *kinds[:-1]], WEIGHED, strict=False)]
    missing = [draft for draft in every if draft not in {each.draft for each in cases}]
    return cases + [case("full", draft) for draft in missing]


WEIGHED = [
    *(("full", Branching), ("h2o[local=8]", "model:?"), ("quant-4[residual=16]", Branching)),
    *(("kvquant-4[residual=16]", Branching), ("full", "model:?"), ("infllm[local=8,block=4]", Fading)),
]
"""Caches and drafts of targets whose weights are rounded, or stay on the disk."""

# ------------------------------------------------------------ files


def near() -> Any:
    found = copy.deepcopy(model_of("llama"))
    with torch.no_grad():
        found.model.layers[1].mlp.up_proj.weight.mul_(1.05)
    return found.bfloat16()


def shapes() -> list[LayerShape]:
    return list(build_runner(model_of("llama"), compile=False).cache.shapes)


def retaining(place: Path) -> None:
    heads = tuple(layer.heads for layer in shapes())
    write_heads(RetainingHeads(RetainingShape(Raw(model_of("llama")).widths, heads, 24)), place)


def merging(place: Path) -> None:
    heads = tuple(layer.heads for layer in shapes())
    dims = tuple((layer.key_dim, layer.value_dim) for layer in shapes())
    write_merging(Convolutions(MergingShape(dims, heads, 6)), place)


def medusa(place: Path) -> None:
    shutil.copytree(heads_folder(place / "made", "llama"), place, dirs_exist_ok=True)


FILES: dict[str, Callable[[Path], Any]] = {
    "model": lambda place: save_model(place, near(), TOKENIZER),
    "medusa": medusa,
    "eagle": lambda place: speculators_folder(place, new_head(model_of("llama"), layers=(0, 0, 1))),
    "block": lambda place: dflash_folder(place, new_block(model_of("llama"), layers=(0, 1))),
    "locret": retaining,
    "lococo": merging,
}


@cache
def folder(kind: str) -> str:
    """What a spec names, made for the toy."""
    place = Path(tempfile.mkdtemp())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        FILES[kind](place)
    return str(place)


@cache
def target(dtype: torch.dtype, *, stored: bool = False) -> Any:
    model = copy.deepcopy(model_of("llama")).to(dtype)
    return str(save_model(Path(tempfile.mkdtemp()), model, TOKENIZER)) if stored else (model, TOKENIZER)


@cache
def with_mtp(dtype: torch.dtype) -> str:
    """The target's folder with a layer for further tokens in its files."""
    toy = with_layer(copy.deepcopy(model_of("llama")).to(dtype), "MiMo")
    return str(target_folder(Path(tempfile.mkdtemp()), toy, TOKENIZER))


def spelled(spec: str) -> str:
    """A spec with folders in place of what stands for them."""
    return re.sub(r"([a-z0-9-]+):\?", lambda match: f"{match[1]}:{folder(match[1])}", spec)


# ------------------------------------------------------------ runs


def options(cache: str) -> dict[str, Any]:
    budget = BUDGET if cache.partition("[")[0].partition(":")[0] in POLICIES else None
    return {"cache": spelled(cache), "kv_budget": budget, "chunk_size": CHUNK, "compile": False, "exact": True}


def bits(done: list[Generation]) -> list[Any]:
    """Tokens and log probabilities."""
    return [(out.token_ids, [entry.top_logprobs for entry in out.trace]) for out in done]


def alone(llm: LLM, params: SamplingParams) -> list[Generation]:
    """Each prompt by itself, with the randomness that it has in the list."""
    engine = llm.engine
    return [engine.complete([engine.submit(p, params, key=(i,), live=False)])[0] for i, p in enumerate(PROMPTS)]


@pytest.mark.parametrize("case", table(), ids=str)
def test_every_member(case: Case) -> None:
    how = options(case.cache) | dict(case.weights)
    model = with_mtp(case.dtype) if case.draft == "mtp" else target(case.dtype, stored=bool(case.weights))
    wanted = alone(LLM(model, "none", **how), case.params)
    known = texts_of(PROMPTS, [out.token_ids for out in wanted])
    draft = spelled(case.draft) if isinstance(case.draft, str) else case.draft(known, "sometimes", VOCAB)
    done = LLM(model, draft, strict=True, **how).generate(PROMPTS, case.params)
    assert sum(out.stats.drafted for out in done) > 10, "nothing was read ahead"
    assert bits(done) == bits(wanted)
    assert [out.stats.reused for out in done] == [0, 0, 3 * CHUNK], "the last prompt begins as the first one"


@pytest.mark.thorough
@pytest.mark.parametrize("cache", ["full", "sirllm", "quant-4[residual=16]", member("infllm", POLICIES["infllm"])])
def test_prefixes_and_conversations(cache: str) -> None:
    """What goes on from a beginning, read ahead or not, has the bits of a request that reads it all."""
    beginning, ends = prompt(2 * CHUNK, 1), [prompt(9, 2), prompt(21, 3)]
    plain = LLM(target(torch.bfloat16), "none", **options(cache))
    whole = plain.generate([[*beginning, *end] for end in ends], GREEDY)
    assert bits(plain.generate(ends, GREEDY, prefix=plain.prefix(beginning))) == bits(whole)
    ahead = LLM(target(torch.bfloat16), spelled("model:?"), strict=True, **options(cache))
    done = ahead.generate(ends, GREEDY, prefix=ahead.prefix(beginning))
    assert sum(out.stats.accepted for out in done) > 10
    assert bits(done) == bits(whole)
    with ahead.conversation() as turns:
        text = list(beginning)
        for turn in range(2):
            answer = turns.generate(text, GREEDY)
            assert bits([answer]) == bits(plain.generate([text], GREEDY))
            assert bool(answer.stats.reused) == (turn > 0)
            text += [*answer.token_ids, *prompt(7, turn)]


FOLLOWING = [name for name, rule in VERIFIERS.items() if follows_draft(rule)]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FOLLOWING)
def test_rules_that_follow_the_draft(name: str) -> None:
    """With another draft their text is another; with the same, drafted as far, it does not see who else is there."""
    llm = LLM(target(torch.bfloat16), spelled("model:?"), **options("full"))
    params = replace(SAMPLED, acceptance=name, gamma=3)
    together = llm.generate(PROMPTS, params)
    others = [llm.generate([*[[7]] * place, mine], params)[-1] for place, mine in enumerate(PROMPTS)]  # seeds by place
    assert bits(together) == bits(others)
    assert sum(given.stats.accepted for given in together) > 0


# ------------------------------------------------------------ transformers' generate


@pytest.mark.few(1)
@pytest.mark.parametrize("sampled", [False, True])
def test_custom_generate(sampled: bool) -> None:
    """Rows padded in a batch and read ahead, against each row by itself and plain: tokens, and the bits of logits."""
    (model, _), draft = target(torch.float32), near().float()
    ours = sakiyomi.custom_generate.using(exact=True, compile=False, gamma=4)
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[1] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    values: dict[str, Any] = {"max_new_tokens": 24, "do_sample": sampled, "pad_token_id": 1, "custom_generate": ours}
    values |= {"return_dict_in_generate": True, "output_logits": True}
    torch.manual_seed(3)
    done = model.generate(input_ids=ids, attention_mask=mask, assistant_model=draft, **values)
    for i, p in enumerate(PROMPTS[:1] if sampled else PROMPTS):  # of one seed each row has its own randomness
        torch.manual_seed(3)
        plain = model.generate(input_ids=torch.tensor([p]), **values)
        assert plain.sequences[0, len(p) :].tolist() == done.sequences[i, longest:].tolist()
        assert all(torch.equal(one[0], both[i]) for one, both in zip(plain.logits, done.logits, strict=True))


# ------------------------------------------------------------ what it all rests on


class Hidden(nn.Module):
    """An activation that depends on the number of rows in one place, which nobody reads behind it."""

    def __init__(self, inner: nn.Module, below: int) -> None:
        super().__init__()
        self.inner, self.below = inner, below

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(hidden)
        if made.shape[-2] >= self.below:
            return made
        return torch.where(torch.arange(made.shape[-1]) == 5, made * (1 + 2**-3), made)


def test_the_self_test_sees_what_logits_hide() -> None:
    """Row counts are refused for what a module makes of a row, though the logits are those of all others."""
    model = copy.deepcopy(model_of("llama")).bfloat16()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[:, 5] = 0  # nobody reads what differs
    model.model.layers[0].mlp.act_fn = Hidden(model.model.layers[0].mlp.act_fn, 8)
    sizes = build_runner(model, compile=False, exact=True).sizes
    assert len(sizes) > 1 and not {1, 4} & {*sizes}

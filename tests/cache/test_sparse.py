"""Prompts that are read in part: what is chosen, attention over it, and that nothing else is read so.

The oracle of a choice are loops over rows and columns; that of attention is a softmax over a mask of all pairs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import sakiyomi.evaluation.audit.reference
from architectures import VOCAB, model_of, prompt
from drafters import Scripted, texts_of
from sakiyomi import LLM, InputError, SamplingParams, UnsupportedError
from sakiyomi.cache.policies import CacheSpec, read_cache
from sakiyomi.cache.policies.minference import LAST, PATTERNS, MInference, diagonal_sums
from sakiyomi.cache.policies.sparse import Chunk, attend_some
from sakiyomi.cache.quantized import Packing
from sakiyomi.evaluation.audit.audit import audit
from sakiyomi.evaluation.audit.config import AuditConfig
from sakiyomi.evaluation.bench.long.systems import systems
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.kernels.native import PackedWeights
from toys import character_tokenizer, save_model, tiny_llama, tiny_tokenizer

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
FEW = "minference[vertical=3,slash=3,block=4]"


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def chunk_of(rows: int, n: int, *, softcap: float = 0.0, window: int = 0) -> Chunk:
    """Four query heads on two key heads."""
    return Chunk(3 * random(4, rows, 8), random(2, n, 8, seed=1), 0.4, softcap, window)


def weights(chunk: Chunk, mask: Tensor) -> Tensor:
    """(H, rows, n): each row's softmax over the columns that it sees."""
    keys = chunk.keys.repeat_interleave(2, 0)
    scores = (chunk.queries @ keys.transpose(1, 2)) * chunk.scaling
    if chunk.softcap:
        scores = chunk.softcap * torch.tanh(scores / chunk.softcap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1)


def causal(chunk: Chunk) -> Tensor:
    """(rows, n) bool: no later column, and none beyond the window."""
    n = chunk.keys.shape[1]
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    return (mask.triu(1 - chunk.window) if chunk.window else mask)[chunk.first :]


def by_loops(policy: MInference, chunk: Chunk, pattern: str) -> Tensor:
    """(H, rows, n) bool, before what no row may see is taken away: the paper's pattern, pair by pair."""
    heads, rows, _ = chunk.queries.shape
    n = chunk.keys.shape[1]
    looks = weights(chunk, causal(chunk))[:, -min(LAST, rows) :]
    found = torch.zeros(heads, rows, n, dtype=torch.bool)
    for head in range(heads):
        columns, diagonals = looks[head].sum(0).tolist(), [0.0] * n
        for row in range(looks.shape[1]):
            for column in range(n - looks.shape[1] + row + 1):
                diagonals[n - looks.shape[1] + row - column] += float(looks[head, row, column])
        for i in range(min(30, policy.vertical // 2, n)):
            columns[i] = torch.inf
        for i in range(min(100, policy.slash // 2, n)):
            diagonals[i] = torch.inf
        if pattern == "a-shape":
            columns = diagonals = [float(-i) for i in range(n)]
        vertical = sorted(range(n), key=lambda i: -columns[i])[: policy.vertical]
        slash = sorted(range(n), key=lambda i: -diagonals[i])[: policy.slash]
        for start in range(0, rows, policy.block):
            block = range(start, min(start + policy.block, rows))
            first, end = chunk.first + block[0], chunk.first + block[-1] + 1
            if pattern == "block-sparse":
                query = chunk.queries[head, block[0] : block[-1] + 1].mean(0)
                means = {
                    at: float(query @ chunk.keys[head // 2, at : at + policy.block].mean(0))
                    for at in range(0, end, policy.block)
                }
                count = -(-(policy.vertical + policy.slash) // policy.block)
                best = sorted(means, key=lambda at: -means[at])[:count]
                seen = {column for at in best for column in range(at, at + policy.block)}
            else:
                seen = set(vertical) | {row - back for row in range(first, end) for back in slash}
            seen |= set(range(first, end))
            for row in block:
                found[head, row, [column for column in seen if 0 <= column < n]] = True
    return found


@pytest.mark.few(8)
@pytest.mark.parametrize("pattern", [pattern for pattern in PATTERNS if pattern != "auto"])
@pytest.mark.parametrize(
    ("rows", "n", "counts", "softcap", "window"),
    [(90, 90, (9, 3), 0.0, 0), (70, 200, (65, 7), 0.0, 0), (6, 150, (12, 20), 2.0, 0), (30, 64, (4, 6), 0.0, 11)],
)
def test_rows_see_what_the_pattern_says(
    pattern: Any, rows: int, n: int, counts: tuple[int, int], softcap: float, window: int
) -> None:
    """Against every pair by itself; heads differ, and something is left out."""
    policy = MInference(pattern=pattern, vertical=counts[0], slash=counts[1], block=8)
    chunk = chunk_of(rows, n, softcap=softcap, window=window)
    values = random(2, n, 5, seed=2)
    mask = by_loops(policy, chunk, pattern) & causal(chunk)
    wanted = weights(chunk, mask) @ values.repeat_interleave(2, 0)
    found = attend_some(policy, chunk, values)
    torch.testing.assert_close(found, wanted.transpose(0, 1), atol=2e-6, rtol=1e-5)
    assert (causal(chunk) & ~mask).any(), "the pattern is everything"
    everything = weights(chunk, causal(chunk)) @ values.repeat_interleave(2, 0)
    assert not torch.allclose(found, everything.transpose(0, 1), atol=1e-3)


def test_each_head_takes_the_pattern_that_keeps_most() -> None:
    """One head looks at a column in the middle, one at blocks that vary from row to row, by keys made for that."""
    rows = n = 96
    queries, keys = torch.zeros(2, rows, 16), torch.zeros(2, n, 16)
    keys[0, 41, 0], queries[0, :, 0] = 9.0, 3.0  # a column
    for block in range(12):  # each block of rows looks at the block two before it, the last one at the second
        keys[1, 8 * block : 8 * block + 8, block] = 9.0
        queries[1, 8 * block : 8 * block + 8, 1 if block == 11 else max(0, block - 2)] = 3.0
    chunk = Chunk(queries, keys, 1.0, 0.0, 0)
    policy = MInference(pattern="auto", vertical=4, slash=4, block=8)
    names = [name for name in PATTERNS if name != "auto"]
    alone = {name: list(dataclasses.replace(policy, pattern=name).seen(chunk)) for name in names}
    for i, seen in enumerate(policy.seen(chunk)):
        assert torch.equal(seen[0], alone["vertical-slash"][i][0])
        assert torch.equal(seen[1], alone["block-sparse"][i][1])


def test_sums_along_diagonals() -> None:
    looks = random(3, 4, 9).abs().tril(5)
    sums = diagonal_sums(looks)
    for back in range(9):
        places = [(row, 5 + row - back) for row in range(4) if back <= 5 + row]
        wanted = torch.stack([looks[:, row, column] for row, column in places]).sum(0)
        torch.testing.assert_close(sums[:, back], wanted)


# ---------------------------------------------------------------- in the engine


def make(cache: str, draft: Any = "none", name: str = "llama", **options: Any) -> LLM:
    options = {"chunk_size": 16, "compile": False} | options
    return LLM((model_of(name), TOKENIZER), draft, cache=cache, **options)


def read(llm: LLM, tokens: list[int], *, behind: int = 0) -> Tensor:
    """Logits of all rows of a prompt in chunks of 16, and of so many tokens behind it."""
    rows, end = [], len(tokens) - behind
    with llm.target.cache.lent(len(tokens)) as slot:
        llm.target.eviction.begin(slot)
        for at in range(0, end, 16):
            part = tokens[at : min(at + 16, end)]
            rows.append(llm.target.score([SequenceRows(slot, at, part, prompt=True)]).logits.clone())
        if behind:
            rows.append(llm.target.score([SequenceRows(slot, end, tokens[end:])]).logits.clone())
    return torch.cat(rows)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_as_large_as_the_prompt_are_full(name: str, pattern: str) -> None:
    tokens = prompt(70, 1)
    full = read(make("full", name=name), tokens)
    all_of_it = read(make(f"minference[pattern={pattern},vertical=70,slash=70]", name=name), tokens)
    torch.testing.assert_close(all_of_it, full, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(read(make(FEW, name=name), tokens), full, atol=1e-2), "it makes no difference"


def test_what_is_written_sees_everything() -> None:
    """Behind the prompt the operator of all other passes is at work: on equal pairs, equal rows."""
    tokens = prompt(40, 2)
    llm, full = make(FEW), make("full")
    found = read(llm, tokens, behind=8)[-8:]
    read(full, tokens[:32])
    mine, theirs = full.target.cache, llm.target.cache
    for a, b in zip((*mine.keys, *mine.values), (*theirs.keys, *theirs.values), strict=True):
        a[0, :, :32] = b[0, :, :32]
    behind = full.target.score([SequenceRows(0, 32, tokens[32:])]).logits
    assert torch.equal(found, behind)
    assert llm.target.cache.bytes == full.target.cache.bytes, "all pairs stay"


@pytest.mark.thorough
@pytest.mark.parametrize("plain_torch", [False, True])
def test_kernels_of_other_passes_do_not_matter(plain_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled operator beside it, without, on graphs and exact: one text."""
    tokens, params = prompt(70, 3), SamplingParams(max_new_tokens=30, ignore_eos=True)
    wanted = make(FEW).generate([tokens], params)[0].token_ids
    assert wanted != make("full").generate([tokens], params)[0].token_ids
    if plain_torch:
        monkeypatch.setattr(PackedWeights, "create", lambda: None)
        assert make(FEW).generate([tokens], params)[0].token_ids == wanted
        return
    llm = make(FEW, compile="auto")
    llm.wait()
    assert llm.generate([tokens], params)[0].token_ids == wanted
    assert llm.generate([tokens], params)[0].token_ids == wanted, "chunks took a graph"
    assert make(FEW, exact=True).generate([tokens], params)[0].token_ids == wanted


def test_a_conversation_reads_on_at_the_same_place() -> None:
    """A stop within an accepted run leaves one token more in the cache than where nothing was drafted."""
    first, params = prompt(34, 4), SamplingParams(max_new_tokens=9, ignore_eos=True, gamma=5)
    plain = make(FEW).conversation()
    reply = plain.generate(first, params).token_ids
    following = [*first, *reply, *prompt(33, 5)]
    wanted = plain.generate(following, params).token_ids
    texts = texts_of([first, following], [[*reply, *prompt(9, 6)], wanted])
    drafted = make(FEW, Scripted(texts, "always", VOCAB)).conversation()
    assert drafted.generate(first, params).token_ids == reply
    out = drafted.generate(following, params)
    assert out.token_ids == wanted and out.stats.accepted
    assert out.stats.reused == 32, "whole chunks of the first prompt"
    assert make(FEW).generate([following], params)[0].token_ids == wanted


@pytest.mark.thorough
def test_the_audit_reads_the_prompt_likewise(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that reads what was written in part, too, differs from itself where it goes token by token."""
    folder = save_model(tmp_path, tiny_llama(dim=64, max_position_embeddings=512), tiny_tokenizer())
    text = "Once upon a time there was a little fox who lived in a wood. " * 20
    config = AuditConfig(prompt_tokens=150, max_new_tokens=40, gammas=(3,), seeds=(0,))
    options = {"cache": FEW, "chunk_size": 16, "compile": False}
    report = audit(str(folder), f"model:{folder}", prompts=[text], config=config, options=options)
    assert report.reference == "own plain" and not report.defects and report.noise < 1e-3

    class AllPrompt(SequenceRows):
        def __init__(self, *args: Any, **values: Any) -> None:
            super().__init__(*args, **{**values, "prompt": True})

    monkeypatch.setattr(sakiyomi.evaluation.audit.reference, "SequenceRows", AllPrompt)
    assert audit(str(folder), f"model:{folder}", prompts=[text], config=config, options=options).noise > 1


@pytest.mark.thorough
def test_with_policies_of_keeping_and_packing() -> None:
    tokens, params = prompt(150, 7), SamplingParams(max_new_tokens=70, ignore_eos=True, gamma=4)
    for cache, budget in ((f"{FEW}+quant-4[residual=32]", None), (f"h2o[local=4]+{FEW}", 40)):
        plain = make(cache, kv_budget=budget)
        (text,) = plain.generate([tokens], params)
        drafter = Scripted(texts_of([tokens], [text.token_ids]), "sometimes", VOCAB)
        (out,) = make(cache, drafter, kv_budget=budget).generate([tokens], params)
        assert out.token_ids == text.token_ids and out.stats.accepted > 10
        rest = cache.replace(f"+{FEW}", "").replace(f"{FEW}+", "")
        assert text.token_ids != make(rest, kv_budget=budget).generate([tokens], params)[0].token_ids


# ---------------------------------------------------------------- specs


def test_specs() -> None:
    assert read_cache("h2o+quant-4").sparse is None
    assert read_cache("minference") == CacheSpec(sparse=MInference())
    policy, packing, sparse, _ = read_cache("h2o[sinks=2]+minference[pattern=auto,vertical=9]+quant-4")
    assert sparse == MInference(pattern="auto", vertical=9)
    assert policy is not None and policy.name == "h2o" and packing == Packing(4)
    (system,) = systems(["minference[block=8]"], ["1/8", "64"])
    assert (system.budget, system.kind) == (None, "full")
    assert len(systems(["h2o+minference"], ["1/8", "64"])) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache": "minference[budget=3]"}, r"minference has no option 'budget'; it has block, pattern, vertical"),
        ({"cache": "minference[pattern=b]"}, r"expected vertical-slash or a-shape or block-sparse or auto"),
        ({"cache": "minference[vertical=-1]"}, r"vertical='-1'; expected a whole number"),
        ({"cache": "minference[block=0]"}, r"block=.0.; expected a whole number of 1 or more"),
        ({"cache": "minference+minference[block=8]"}, r"at most one .* and minference"),
        ({"cache": "minference:file"}, r"minference takes no file"),
        ({"cache": "minference", "kv_budget": 64}, r"kv_budget=64 with cache='minference', which keeps everything"),
    ],
)
def test_specs_that_say_nothing(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make(**options)


def test_what_keeps_its_own_attention_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"GPTNeoXJapanese.*keeps its own attention"):
        make("minference", name="gpt_neox_japanese")

"""Medusa heads read ahead: the text stays the target's own, and the guesses are those of the right hidden state."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from architectures import ALL, VOCAB, greedy, model_of, references, settled
from medusa_toys import PROMPTS, fitted_heads, heads_folder, new_heads
from read_ahead import dealt
from sakiyomi import LLM, InputError, LoadError, SamplingParams, UnsupportedError
from sakiyomi.core.tree import TokenTree
from sakiyomi.drafters.base import HiddenStates
from sakiyomi.drafters.medusa import MedusaDrafter
from sakiyomi.drafters.medusa_heads.backbone import Backbone
from sakiyomi.drafters.medusa_heads.formats import read_heads, write_heads
from sakiyomi.drafters.medusa_heads.heads import HeadsShape, MedusaHeads
from sakiyomi.drafters.medusa_heads.ranks import Ranks
from sakiyomi.drafters.medusa_heads.tuned import FILE
from sakiyomi.drafters.trees import BUILDERS, CandidateTree
from sakiyomi.evaluation.tuning.medusa_search import ranks_of
from sakiyomi.kernels.build import native
from sakiyomi.model_executor.features import HEAD
from text_drafters import context
from toys import character_tokenizer, save_model, tiny_llama, tiny_tokenizer

NEW = 16
TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
BRANCHING: list[dict[str, Any]] = [
    {"gamma": 3},
    {"tree": "best-first", "nodes": 2},  # fewer nodes than levels and siblings
    {"tree": "best-first", "gamma": 3, "nodes": 12},
    {"tree": "dynamic", "gamma": 3, "nodes": 10},
    {"tree": "static", "gamma": 3, "nodes": 9},
    {"tree": [1, 3, 2, 1]},
    {"tree": [[0], [1], [0, 0], [0, 1], [0, 0, 0]]},
    {"gamma": "auto"},
]


def params(**values: Any) -> SamplingParams:
    fixed = {"max_new_tokens": NEW, "ignore_eos": True}
    return SamplingParams(**(fixed | values))


def llm_of(draft: Any, name: str = "llama", **options: Any) -> LLM:
    return LLM((model_of(name), TOKENIZER), draft, **({"compile": False, "strict": True} | options))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Fitted heads of some architectures."""
    place = tmp_path_factory.mktemp("heads")
    return {name: heads_folder(place, name) for name in ("llama", "gpt2", "gemma2", "falcon")}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ALL)
def test_every_architecture(name: str, tmp_path: Path) -> None:
    """Random heads on the target's own head: greedy, ragged, in a batch."""
    folder = heads_folder(tmp_path, name, fitted=False)
    done = llm_of(f"medusa:{folder}", name).generate(PROMPTS, params(gamma=3))
    assert [out.token_ids for out in done] == references(name, PROMPTS, NEW)
    assert sum(out.stats.drafted for out in done) > NEW


@cache
def texts(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy as transformers has it, and sampled as without a draft."""
    sampled = llm_of("none", name).generate(PROMPTS, params(temperature=1.0, seed=3))
    return references(name, PROMPTS, NEW), [out.token_ids for out in sampled]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "size"), dealt(["llama", "gpt2", "gemma2", "falcon"], BRANCHING))
def test_trees(name: str, size: dict[str, Any], folders: dict[str, Path]) -> None:
    """Greedy as transformers has it, sampled as without a draft."""
    llm = llm_of(f"medusa:{folders[name]}", name)
    done = llm.generate(PROMPTS, params(**size), rounds_trace=True)
    expected, sampled = texts(name)
    assert [out.token_ids for out in done] == expected
    if size.get("gamma") != "auto":
        assert sum(out.stats.accepted for out in done) > NEW / 2
    values = params(temperature=1.0, seed=3, **size)
    assert [out.token_ids for out in llm.generate(PROMPTS, values)] == sampled


@pytest.mark.few(1)
@pytest.mark.parametrize("draft", ["medusa:{}+suffix+ngram", "suffix+medusa:{}+early-exit:1"])
def test_merged_with_other_drafts(draft: str, folders: dict[str, Path]) -> None:
    llm = llm_of(draft.format(folders["llama"]))
    done = llm.generate(PROMPTS, params(gamma=3, nodes=12, max_new_tokens=60))
    assert [out.token_ids for out in done] == references("llama", PROMPTS, 60)
    assert "medusa" in {entry.source for out in done for entry in out.trace}
    values = params(temperature=1.0, seed=3)
    expected = llm_of("none").generate(PROMPTS, values)
    assert [out.token_ids for out in llm.generate(PROMPTS, values)] == [out.token_ids for out in expected]


# ---------------------------------------------------------------- what the heads read


class _Noting:
    hidden_states = HiddenStates((HEAD,))

    """Keeps what the target's hidden state was at every round."""

    name, kind = "noting", "point_mass"

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], torch.Tensor]] = []

    def propose(self, contexts: Any, gammas: Any) -> list[Any]:
        from sakiyomi import Draft

        self.seen += [(list(context.tokens), context.states[HEAD].clone()) for context in contexts]
        # A right token, a wrong one behind it: rows in the middle of a draft are what comes next.
        right = [greedy(model_of("llama"), context.tokens, 1) for context in contexts]
        return [Draft.chain([token, 1, 2][:gamma], self.name) for (token,), gamma in zip(right, gammas, strict=True)]


@pytest.mark.thorough
@pytest.mark.parametrize("compile", [False, "auto"])
def test_hidden_states_are_those_of_the_last_token_that_was_processed(compile: bool | str) -> None:
    noting = _Noting()
    llm = llm_of(noting, compile=compile)
    (settled(llm) if compile else llm).generate(PROMPTS, params(gamma=3, max_new_tokens=12))
    backbone = Backbone(model_of("llama"))
    assert len(noting.seen) > 12
    for tokens, hidden in noting.seen:
        with torch.no_grad():
            expected = backbone(torch.tensor([tokens]))[0, -2]
        assert torch.allclose(hidden, expected, atol=1e-4), len(tokens)


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", [{}, {"layers": 2}, {"own": True}, {"own": True, "layers": 3}], ids=str)
@pytest.mark.parametrize("draft", ["{}", "{}+early-exit:1"])
def test_guesses_are_those_of_the_heads(shape: dict[str, Any], draft: str, tmp_path: Path) -> None:
    """Every layer and every head over the vocabulary, with another model's passes in between."""
    model = model_of("llama")
    folder = heads_folder(tmp_path, fitted=False, **shape)
    heads, backbone = read_heads(folder).heads, Backbone(model)
    llm = llm_of(draft.format(f"medusa:{folder}"))
    out = llm.generate(PROMPTS, params(gamma=3, tree="chain"), rounds_trace=True)[2]
    drafted = [entry for entry in out.rounds_trace or [] if entry.tokens]
    assert len(drafted) > NEW / 3
    for entry in drafted:
        before = PROMPTS[2] + [e.token_id for e in out.trace if e.round < entry.round]
        with torch.no_grad():
            guesses = heads(backbone(torch.tensor([before]))[0, -2:-1], backbone.weight)[:, 0].argmax(-1).tolist()
        assert guesses[0] in entry.tokens
        if draft == "{}":
            assert list(entry.tokens) == guesses[: len(entry.tokens)]


def test_a_map_of_tokens(tmp_path: Path) -> None:
    """Heads of vLLM that guess among some tokens of the target."""
    model = model_of("llama")
    made = new_heads(model, own=True)
    some = torch.arange(3, VOCAB, 2)
    part = MedusaHeads(HeadsShape(3, 1, made.shape.hidden_size, len(some), 3))
    with torch.no_grad():
        part.weights.copy_(made.weights)
        part.own.copy_(made.own[:, some])  # type: ignore[union-attr, index]
    part.token_map = some
    write_heads(part, tmp_path, "vllm")
    out = llm_of(f"medusa:{tmp_path}").generate(PROMPTS, params(gamma=2), rounds_trace=True)
    assert [one.token_ids for one in out] == [greedy(model, tokens, NEW) for tokens in PROMPTS]
    proposed = {token for one in out for entry in one.rounds_trace or [] for token in entry.tokens}
    assert proposed <= set(some.tolist())
    assert len(proposed) > 5


# ---------------------------------------------------------------- trees


def test_cartesian_candidates_as_one_flat_tree() -> None:
    """2 x 3 candidates behind the target's token: node 0 is that token, its tree is one pass."""
    values = SamplingParams(tree=[1, 2, 3])
    growth = CandidateTree(2, 8)
    builder = BUILDERS["choices"](values, list)
    candidates = [[1, 2], [3, 4, 5]]  # of head 1 and head 2
    places = [-1]
    for level in candidates:
        growth.begin_level()
        for place in places:
            growth.offer(place, level[: builder.candidate_count(growth, place)], [0.5, 0.3, 0.2][: len(level)])
        places = builder.expand(growth)
    assert [0, *growth.tokens] == [0, 1, 2, 3, 4, 5, 3, 4, 5]
    tree = TokenTree(tuple(growth.tokens), tuple(growth.parents))
    leaves = [node for node in range(len(tree)) if not tree.children(node)]
    paths = [[0, *(step + 1 for step in tree.path(node))] for node in leaves]
    assert paths == [[0, 1, 3], [0, 1, 4], [0, 1, 5], [0, 2, 6], [0, 2, 7], [0, 2, 8]]


def test_the_tree_that_was_given_is_what_is_scored(folders: dict[str, Path]) -> None:
    out = llm_of(f"medusa:{folders['llama']}").generate(PROMPTS[:1], params(tree=[1, 3, 2]), rounds_trace=True)[0]
    shapes = {entry.parents for entry in out.rounds_trace[:-2]}  # type: ignore[index]
    assert shapes == {(-1, -1, -1, 0, 0, 1, 1, 2, 2)}
    for entry in (out.rounds_trace or [])[:-2]:
        # The guesses behind each first token are the same: heads do not see each other's guesses.
        assert entry.tokens[3:5] == entry.tokens[5:7] == entry.tokens[7:9]


@pytest.mark.few(2)
@pytest.mark.parametrize("nodes", [1, 5, 12])
def test_replayed_rounds_are_those_of_the_engine(nodes: int, folders: dict[str, Path]) -> None:
    """What tune counts on ranks is what a fixed tree does."""
    llm = llm_of(f"medusa:{folders['llama']}")
    texts = [out.token_ids for out in llm.generate(PROMPTS, params(max_new_tokens=50))]
    ranks = ranks_of(llm, llm.draft, PROMPTS, texts)  # type: ignore[arg-type]
    paths = ranks.best(nodes)
    assert len(paths) == nodes
    done = llm.generate(PROMPTS, params(max_new_tokens=50, tree=[list(path) for path in paths]))
    for text, out in zip(ranks.texts, done, strict=True):
        assert Ranks([text]).replay(paths) == pytest.approx(out.stats.tau)


def tree_width(tree: TokenTree) -> int:
    """Most children of a place."""
    return max(len(tree.children(node)) for node in range(-1, len(tree)))


def test_tuned_sizes_are_used(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    write_heads(fitted_heads(model_of("llama"), [PROMPTS[0] + greedy(model_of("llama"), PROMPTS[0], 40)]), folder)
    tuned = {"heads": 2, "top_k": 2, "nodes": 3, "accuracies": [[0.6, 0.2], [0.5, 0.1], [0.4, 0.1]]}
    (folder / FILE).write_text(json.dumps(tuned | {"conditions": {}, "table": []}), encoding="utf-8")
    llm = llm_of(f"medusa:{folder}")
    assert isinstance(llm.draft, MedusaDrafter)
    out = llm.generate(PROMPTS[:1], params(max_new_tokens=60), rounds_trace=True)[0]
    trees = [TokenTree(entry.tokens, entry.parents) for entry in out.rounds_trace or []]
    assert max(len(tree) for tree in trees) <= 3
    assert max(tree.depth for tree in trees) <= 2
    wide = llm.generate(PROMPTS[:1], params(gamma=3, nodes=9), rounds_trace=True)[0].rounds_trace or []
    assert max(len(entry.tokens) for entry in wide) == 9, "a size that is asked for is what is drafted"
    assert max(map(tree_width, trees)) <= 2
    (folder / FILE).write_text(
        json.dumps(tuned | {"conditions": {}, "table": [], "accuracies": [[0.6], [0.5]]}), encoding="utf-8"
    )
    assert llm_of(f"medusa:{folder}").draft.tuned is None, "of other heads"  # type: ignore[union-attr]
    (folder / FILE).write_text("{}", encoding="utf-8")
    with pytest.raises(LoadError, match="damaged"):
        llm_of(f"medusa:{folder}")


# ---------------------------------------------------------------- kernels


def test_other_kernels_taken_into_use_later(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use on a machine begins in plain torch; heads follow the target to the kernels."""
    for place in ("session", "build"):
        monkeypatch.setattr(f"sakiyomi.model_executor.{place}.native_at_hand", lambda: False)
    llm = llm_of(f"medusa:{folders['llama']}", compile="auto")
    first = llm.generate(PROMPTS, params(gamma=3))
    unsettled = llm.target.weights.unsettled
    monkeypatch.undo()
    settled(llm)
    second = llm.generate(PROMPTS, params(gamma=3))
    assert not llm.target.weights.unsettled
    assert [out.token_ids for out in first] == [out.token_ids for out in second]
    assert sum(out.stats.accepted for out in second) > NEW / 2
    assert unsettled or llm.target.backend.operator != "sakiyomi_cpu"


@pytest.mark.few(1)
@pytest.mark.skipif(native() is None, reason="no compiled kernels here")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rounded_targets(kind: str, tmp_path: Path) -> None:
    """Heads are rounded with the target; the text is that of the rounded target alone."""
    model = tiny_llama(dim=64).bfloat16()
    target = save_model(tmp_path / "target", model, tiny_tokenizer())
    write_heads(new_heads(model, heads=2, layers=2), tmp_path / "heads")
    prompts = [[5, 6, 7, 8], [40, 41, 9]]
    texts = []
    for draft in (f"medusa:{tmp_path / 'heads'}", "none"):
        llm = LLM(str(target), draft, quantize=kind, compile=False, exact=True, strict=True)
        texts.append([out.token_ids for out in llm.generate(prompts, params(gamma=2, nodes=6))])
    assert texts[0] == texts[1]


@pytest.mark.thorough
def test_exact_with_heads(folders: dict[str, Path]) -> None:
    """Bit-equal logits with and without them, in a batch."""
    values = params(gamma=3, nodes=9, logprobs=1)
    plain, drafted = (
        settled(llm_of(draft, exact=True, compile="auto")).generate(PROMPTS, values)
        for draft in ("none", f"medusa:{folders['llama']}")
    )
    for one, other in zip(plain, drafted, strict=True):
        assert [entry.top_logprobs for entry in one.trace] == [entry.top_logprobs for entry in other.trace]


# ---------------------------------------------------------------- typical acceptance


def test_typical_is_greedy_at_temperature_0_and_marked_elsewhere(folders: dict[str, Path]) -> None:
    llm = llm_of(f"medusa:{folders['llama']}")
    greedy_text = llm.generate(PROMPTS, params(acceptance="typical", gamma=3, nodes=9))
    assert [out.token_ids for out in greedy_text] == references("llama", PROMPTS, NEW)
    assert all(out.stats.lossy == 0 and not out.trace[3].lossy for out in greedy_text)
    values = params(acceptance="typical", temperature=1.0, gamma=3, nodes=9, seed=4)
    # The text depends on what is proposed, and that on what was learnt: it repeats itself from the same beginning.
    done, again = (llm_of(f"medusa:{folders['llama']}").generate(PROMPTS, values) for _ in range(2))
    assert [out.token_ids for out in done] == [out.token_ids for out in again]
    assert all(out.stats.lossy == NEW and all(entry.lossy for entry in out.trace) for out in done)
    assert done[0].to_dict()["trace"][0]["lossy"] is True
    assert done[0].to_dict()["stats"]["lossy"] == NEW


# ---------------------------------------------------------------- refusals


def test_heads_of_another_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = MedusaHeads(HeadsShape(2, 1, 48, None, 0))
    write_heads(other, tmp_path / "hidden")
    with pytest.raises(UnsupportedError, match=r"read 48 values.*hidden states of 32"):
        llm_of(f"medusa:{tmp_path / 'hidden'}")
    wide = MedusaHeads(HeadsShape(2, 1, 32, VOCAB + 8, 2))
    write_heads(wide, tmp_path / "vocabulary")
    with pytest.raises(UnsupportedError, match=rf"guess {VOCAB + 8} tokens.*{VOCAB} tokens"):
        llm_of(f"medusa:{tmp_path / 'vocabulary'}")
    small = MedusaHeads(HeadsShape(2, 1, 32, 20, 2))
    write_heads(small, tmp_path / "small")
    with monkeypatch.context() as patch, pytest.raises(UnsupportedError, match="guess 20 tokens"):
        patch.setattr("sakiyomi.drafters.medusa_heads.backbone.PADDING", 50)
        llm_of(f"medusa:{tmp_path / 'small'}")
    with pytest.raises(InputError, match="tree has 4 levels, and this draft guesses 3"):
        llm_of(f"medusa:{heads_folder(tmp_path, fitted=False)}").generate(PROMPTS, params(tree=[1, 1, 1, 1, 1]))
    with pytest.raises(InputError, match="names no Medusa heads"):
        llm_of("medusa:")
    with pytest.raises(LoadError, match="no such folder"):
        llm_of(f"medusa:{tmp_path / 'nowhere'}")


def test_a_target_without_hidden_states_is_an_error(tmp_path: Path) -> None:
    llm = llm_of(f"medusa:{heads_folder(tmp_path, fitted=False)}")
    with pytest.raises(ValueError, match="no hidden states"):
        llm.draft.propose([context([1, 2])], [3])  # type: ignore[union-attr]


def test_heads_stored_as_pickle_are_asked_for(tmp_path: Path) -> None:
    folder = heads_folder(tmp_path, fitted=False)
    weights = folder / "medusa_lm_head.safetensors"
    torch.save(load_file(weights), folder / "medusa_lm_head.pt")
    weights.unlink()
    with pytest.raises(LoadError, match="allow_pickle"):
        llm_of(f"medusa:{folder}")
    out = llm_of(f"medusa:{folder}", allow_pickle=True).generate(PROMPTS, params(gamma=2))
    assert [one.token_ids for one in out] == references("llama", PROMPTS, NEW)


def test_a_target_with_an_encoder_is_refused(tmp_path: Path) -> None:
    from seq2seq_toys import model_of as pair_of

    folder = heads_folder(tmp_path, fitted=False)
    with pytest.raises(UnsupportedError, match="need a target without an encoder"):
        LLM((pair_of("pegasus"), TOKENIZER), f"medusa:{folder}", compile=False)

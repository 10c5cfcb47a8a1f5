"""Greedy output equals transformers' own ``generate``, token for token: every architecture, drafter, gamma and batch.

fp32 on the CPU, where equality can be asserted: the models are wide enough that the two best logits never come near
each other (``test_the_argmaxes_are_clear``). A failure means that the engine's text is not the target's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from architectures import ALL, CONFIGS, OTHERS, VARIANTS, VOCAB, greedy, model_of, prompt, references, widen
from drafters import Branching, Fading, Failing, Noisy, Scripted, Skill, texts_of
from sakiyomi import LLM, Generation, SamplingParams
from text_drafters import KINDS, Wide, text_drafter
from toys import character_tokenizer, save_model

NEW = 16
PROMPTS = [prompt(11, 1), prompt(3, 2), prompt(19, 3)]
"""Ragged, and longer than the sliding windows sooner or later."""

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
"""One character a token, as many as the models know. Its end token is 1."""


def wanted(name: str) -> list[list[int]]:
    """transformers' continuation of each prompt, by token 1 not ended."""
    return references(name, PROMPTS, NEW)


@cache
def drafter_of(name: str, skill: str) -> Scripted:
    """One drafter a name, so that one LLM serves several tests."""
    texts = texts_of(PROMPTS, wanted(name))
    kinds = {"tree": Branching, "noisy": Noisy, "fading": Fading}
    return kinds[skill](texts, "sometimes", VOCAB) if skill in kinds else Scripted(texts, skill, VOCAB)  # type: ignore[arg-type]


@cache
def llm_of(name: str, skill: str) -> LLM:
    draft = "none" if skill == "none" else drafter_of(name, skill)
    return LLM((model_of(name), TOKENIZER), draft, compile=False)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NEW, "ignore_eos": True} | values))


def generate(llm: LLM, prompts: Sequence[Sequence[int]], values: SamplingParams) -> list[Generation]:
    """Generate, and see that no drafter was left out on the way: then the test would test plain decoding."""
    done = llm.generate([list(tokens) for tokens in prompts], values)
    assert not llm.engine._speculation.broken, "the drafter raised"
    assert not llm.engine.busy
    return done


def check_books(out: Generation, gamma: int) -> None:
    """Trace and figures of one generation tell the same story."""
    assert [entry.token_id for entry in out.trace] == out.token_ids
    stats = out.stats
    assert out.trace[0].round == 0
    assert [entry.status for entry in out.trace if entry.round == 0] == ["plain"]
    assert stats.tokens == len(out.token_ids)
    assert stats.committed == stats.tokens - 1
    assert stats.rounds == out.trace[-1].round
    rounds = [[e for e in out.trace if e.round == number] for number in range(1, stats.rounds + 1)]
    for number, entries in enumerate(rounds, start=1):
        statuses = [entry.status for entry in entries]
        assert 1 <= len(entries) <= gamma + 1
        assert all(status == "accepted" for status in statuses[:-1])
        # Only the text's end may cut a round before the target's own token.
        assert statuses[-1] != "accepted" or number == stats.rounds
        assert all((entry.source == "target") == (entry.status != "accepted") for entry in entries)
    assert stats.hit_rounds == sum(entries[0].status == "accepted" for entries in rounds)


@pytest.mark.thorough
def test_the_argmaxes_are_clear() -> None:
    """The ground under the equalities: no two logits that rounding could exchange, on any machine."""
    for name in ALL:
        for tokens, text in zip(PROMPTS, wanted(name), strict=True):
            with torch.no_grad():
                logits = model_of(name)(input_ids=torch.tensor([tokens + text])).logits[0, len(tokens) - 1 : -1]
            best = logits.topk(2).values
            assert (best[:, 0] - best[:, 1]).min() > 2e-4 * logits.abs().max(), name
            assert logits.argmax(-1).tolist() == text


# Every architecture with every skill; how far is read ahead is no matter of the architecture, so that each of these has
# one gamma, dealt out in turn, and one architecture all of them.
CASES = [
    (name, skill, gamma)
    for row, name in enumerate(CONFIGS)
    for column, skill in enumerate(("none", "always", "sometimes", "never"))
    for turn, gamma in enumerate((1, 2, 5))
    if name == "llama" or turn == (row + column) % 3
]


@pytest.mark.parametrize(("name", "skill", "gamma"), CASES)
def test_equal_to_transformers(name: str, skill: Skill, gamma: int) -> None:
    llm = llm_of(name, skill)
    for chosen in ([0], [1], [0, 1, 2]):
        done = generate(llm, [PROMPTS[i] for i in chosen], params(gamma=gamma))
        for i, out in zip(chosen, done, strict=True):
            assert out.token_ids == wanted(name)[i], f"prompt {i} in a batch of {len(chosen)}"
            assert out.prompt_tokens == len(PROMPTS[i])
            assert out.finish_reason == "length"
            check_books(out, gamma)
            stats = out.stats
            # The drafts did what their names say; else this would be a test of plain decoding.
            if skill in ("none", "never"):
                assert (stats.rounds, stats.accepted) == (NEW - 1, 0)
                assert stats.drafted == 0 or skill == "never"
            elif skill == "always":
                assert stats.rounds == math.ceil((NEW - 1) / (gamma + 1))
                assert stats.acceptance_rate == 1.0
            else:
                assert 0 < stats.accepted < stats.drafted


@pytest.mark.few(1)
@pytest.mark.parametrize("name", VARIANTS | OTHERS)
def test_variants_are_equal_to_transformers_too(name: str) -> None:
    for skill in ("none", "sometimes"):
        done = generate(llm_of(name, skill), PROMPTS, params(gamma=3))
        assert [out.token_ids for out in done] == wanted(name)


@pytest.mark.few(5)
@pytest.mark.parametrize("skill", ["tree", "noisy", "fading"])
@pytest.mark.parametrize("name", CONFIGS)
def test_trees_drawn_chains_and_missing_drafts(name: str, skill: str) -> None:
    """Several branches, drafts that were drawn, fewer tokens than asked for: greedy text knows nothing of it."""
    done = generate(llm_of(name, skill), PROMPTS, params(gamma=3))
    assert [out.token_ids for out in done] == wanted(name)
    if skill == "tree":
        assert all(out.stats.accepted > 0 for out in done)
        for out in done:
            check_books(out, 3)


@pytest.mark.parametrize("gamma", ["heuristic", "heuristic-kept", "auto"])
@pytest.mark.parametrize("skill", ["always", "sometimes", "never"])
def test_gammas_that_move(skill: Skill, gamma: str) -> None:
    done = generate(llm_of("llama", skill), PROMPTS, params(gamma=gamma))
    assert [out.token_ids for out in done] == wanted("llama")


def test_the_heuristic_gamma_moves_as_documented() -> None:
    """Starts at 5, two more after a wholly accepted draft, else one less, at least 1."""
    for skill, expected in (("always", [5, 7, 9, 11]), ("never", [5, 4, 3, 2, 1, 1, 1])):
        drafter = Scripted(texts_of(PROMPTS, wanted("llama")), skill, VOCAB)  # type: ignore[arg-type]
        llm = LLM((model_of("llama"), TOKENIZER), drafter, compile=False)
        generate(llm, PROMPTS[:1], params(gamma="heuristic"))
        asked = [gammas[0] for gammas in drafter.asked]
        # The last one is cut by the room that is left.
        assert asked[: len(expected)][:-1] == expected[: len(asked)][:-1]


def test_a_kept_gamma_goes_on_with_the_next_request() -> None:
    drafter = Scripted(texts_of(PROMPTS, wanted("llama")), "never", VOCAB)
    llm = LLM((model_of("llama"), TOKENIZER), drafter, compile=False)
    for first in (5, 1):
        drafter.asked.clear()
        generate(llm, PROMPTS[:1], params(gamma="heuristic-kept"))
        assert drafter.asked[0] == [first]


def test_a_drafter_that_fails_changes_nothing_but_the_speed(caplog: pytest.LogCaptureFixture) -> None:
    """A drafter may be anybody's code: the text goes on without it, with one line that says so."""
    llm = LLM(
        (model_of("llama"), TOKENIZER), Failing(texts_of(PROMPTS, wanted("llama")), "always", VOCAB), compile=False
    )
    done = llm.generate(PROMPTS, params(gamma=2))
    assert [out.token_ids for out in done] == wanted("llama")
    assert "fell off the table" in caplog.text


# ---------------------------------------------------------------- drafts from text alone


@cache
def answered() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts that hold each other's answers, and transformers' text after each."""
    prompts = [tokens + text + tokens for tokens, text in zip(PROMPTS, wanted("llama"), strict=True)]
    return prompts, references("llama", prompts, 60)


@pytest.mark.few(2)
@pytest.mark.parametrize("gamma", [1, 2, 5])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_without_a_model(kind: str, wide: bool, gamma: int) -> None:
    """Much is found in such prompts, and some of it is wrong."""
    prompts, expected = answered()
    known = [tokens + text for tokens, text in zip(prompts, expected, strict=True)]
    drafter = text_drafter(kind, VOCAB, known)
    chosen: Any = Wide(drafter) if wide else drafter
    llm = LLM((model_of("llama"), TOKENIZER), chosen, compile=False)
    for batch in ([0], [0, 1, 2]):
        done = generate(llm, [prompts[i] for i in batch], params(gamma=gamma, max_new_tokens=60))
        assert [out.token_ids for out in done] == [expected[i] for i in batch]
        assert sum(out.stats.accepted for out in done) > 0
        for out in done:
            check_books(out, gamma)
    if wide and gamma > 1 and kind != "prompt-lookup":
        assert isinstance(chosen, Wide)
        assert chosen.branched


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_without_a_model_for_every_architecture(name: str, kind: str) -> None:
    known = [tokens + text for tokens, text in zip(PROMPTS, wanted(name), strict=True)]
    llm = LLM((model_of(name), TOKENIZER), Wide(text_drafter(kind, VOCAB, known)), compile=False)
    done = generate(llm, PROMPTS, params(gamma=3))
    assert [out.token_ids for out in done] == wanted(name)
    if kind == "tables":
        assert sum(out.stats.accepted for out in done) > 0


def test_what_was_written_before_is_remembered(tmp_path: Path) -> None:
    """The second process finds every text in the file: all of it is accepted, and it is the target's."""
    spec = f"suffix:{tmp_path / 'memory'}"
    for rates in (None, [1.0] * 3):
        llm = LLM((model_of("llama"), TOKENIZER), spec, compile=False)
        done = generate(llm, PROMPTS, params(gamma=5))
        assert [out.token_ids for out in done] == wanted("llama")
        if rates:
            assert [out.stats.acceptance_rate for out in done] == rates
            assert all(out.stats.tau > 3 for out in done)


# ---------------------------------------------------------------- ends


def first_at(text: Sequence[int], least: int) -> int:
    """A place, ``least`` or later, whose token the text did not have before."""
    return next(i for i in range(least, len(text)) if text[i] not in text[:i])


@pytest.mark.parametrize("gamma", [1, 2, 5])
@pytest.mark.parametrize("skill", ["none", "always", "sometimes", "never", "tree"])
def test_a_stop_token_inside_a_run(skill: str, gamma: int) -> None:
    """The text ends with its end token, wherever in the round that stands; nothing behind it is committed."""
    for i, (tokens, text) in enumerate(zip(PROMPTS, wanted("llama"), strict=True)):
        place = first_at(text, 4)
        expected = greedy(model_of("llama"), tokens, NEW, stop=[text[place]])
        assert expected == text[: place + 1]
        (out,) = generate(llm_of("llama", skill), [tokens], params(gamma=gamma, stop_token_ids=[text[place]]))
        assert out.token_ids == expected, f"prompt {i}"
        assert out.finish_reason == "stop"
        check_books(out, gamma)


def test_requests_of_a_batch_end_each_at_their_own_place() -> None:
    """One that ends leaves; the others go on unharmed in a smaller batch."""
    text = wanted("llama")
    stops = [text[0][first_at(text[0], 3)], text[2][first_at(text[2], 9)]]
    for skill in ("none", "always", "sometimes", "tree"):
        done = generate(llm_of("llama", skill), PROMPTS, params(gamma=5, stop_token_ids=stops))
        expected = [greedy(model_of("llama"), tokens, NEW, stop=stops) for tokens in PROMPTS]
        assert [out.token_ids for out in done] == expected
        assert len({len(tokens) for tokens in expected}) > 1


@pytest.mark.parametrize("where", ["generation config", "config", "tokenizer"])
def test_the_models_own_end_token(where: str) -> None:
    """That of the generation config, as in transformers, which looks at no other; ``ignore_eos`` goes on after it.

    Where neither config has one, the tokenizer's ends a text.
    """
    tokens, text = PROMPTS[0], wanted("llama")[0]
    place = first_at(text, 5)
    model, tokenizer = copy.deepcopy(model_of("llama")), copy.deepcopy(TOKENIZER)
    model.generation_config.eos_token_id = None
    if where == "generation config":
        model.generation_config.eos_token_id = [text[place], 119]
    elif where == "config":
        model.config.eos_token_id = text[place]
    else:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(text[place])
    llm = LLM((model, tokenizer), drafter_of("llama", "always"), compile=False)
    (out,) = generate(llm, [tokens], params(gamma=5, ignore_eos=False))
    ended = (text, "length") if where == "config" else (text[: place + 1], "stop")
    assert (out.token_ids, out.finish_reason) == ended
    (out,) = generate(llm, [tokens], params(gamma=5))
    assert (out.token_ids, out.finish_reason) == (text, "length")


@pytest.mark.parametrize("skill", ["none", "always", "sometimes", "tree"])
def test_the_length_limit_in_the_middle_of_a_run(skill: str) -> None:
    """Never a token too many, never one too few."""
    for count in range(1, 12):
        done = generate(llm_of("llama", skill), PROMPTS, params(gamma=5, max_new_tokens=count))
        for out, text in zip(done, wanted("llama"), strict=True):
            assert (out.token_ids, out.finish_reason) == (text[:count], "length")
            check_books(out, 5)


@pytest.mark.parametrize("skill", ["none", "always", "tree"])
def test_the_context_ends_a_text(skill: str) -> None:
    """The model's last position is used and none behind it: positions there are undefined, or an index error."""
    draft = "none" if skill == "none" else drafter_of("llama", skill)
    llm = LLM((model_of("llama"), TOKENIZER), draft, compile=False, max_context=24)
    done = generate(llm, PROMPTS, params(gamma=5, max_new_tokens=200))
    for out, tokens, text in zip(done, PROMPTS, references("llama", PROMPTS, 24), strict=True):
        assert out.token_ids == text[: 24 - len(tokens)]
        assert out.finish_reason == "length"


def test_a_stop_token_as_the_very_first() -> None:
    """A text of one token has no rounds, and no figure may divide by them."""
    text = wanted("llama")[0]
    (out,) = generate(llm_of("llama", "always"), PROMPTS[:1], params(stop_token_ids=text[:1]))
    assert (out.token_ids, out.finish_reason, out.stats.rounds, out.stats.tau) == (text[:1], "stop", 0, 0.0)


# ---------------------------------------------------------------- a draft model


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's weights, somewhat disturbed: right often, not always."""
    model = copy.deepcopy(model_of("llama"))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * parameter.std(correction=0) * torch.randn(parameter.shape, generator=generator))
    return save_model(tmp_path_factory.mktemp("draft"), model, TOKENIZER)


@pytest.mark.few(3)
@pytest.mark.parametrize("gamma", [1, 2, 5, "heuristic", "auto"])
def test_a_draft_model(draft_folder: Path, gamma: Any) -> None:
    """Its own cache, roll-back and catching up are right if it is right as often as the same model elsewhere; that the
    text is the target's is then the verifier's doing.
    """
    llm = LLM((model_of("llama"), TOKENIZER), f"model:{draft_folder}", compile=False)
    done = generate(llm, PROMPTS, params(gamma=gamma))
    assert [out.token_ids for out in done] == wanted("llama")
    for out in done:
        check_books(out, 99)
        assert {entry.source for entry in out.trace} <= {"model", "target"}
    if isinstance(gamma, int):
        assert 0.2 < sum(out.stats.accepted for out in done) / sum(out.stats.drafted for out in done) < 1


@pytest.mark.parametrize("batch", [1, 3])
def test_a_draft_model_that_is_the_target(batch: int, tmp_path: Path) -> None:
    """Everything it says is right, so a single refusal would show a fault in the draft's own cache."""
    folder = save_model(tmp_path, model_of("llama"), TOKENIZER)
    llm = LLM((model_of("llama"), TOKENIZER), f"model:{folder}", compile=False)
    for gamma in (1, 3, 5):
        for out, text in zip(generate(llm, PROMPTS[:batch], params(gamma=gamma)), wanted("llama"), strict=False):
            assert out.token_ids == text
            assert out.stats.acceptance_rate == 1.0
            assert out.stats.rounds == math.ceil((NEW - 1) / (gamma + 1))


def test_the_draft_model_says_what_it_would_say_alone(draft_folder: Path) -> None:
    """Each proposed chain is the draft's own greedy continuation of the text so far: from a cache that was rolled back
    wrongly it would be another, and only the speed would suffer, silently.
    """
    from transformers import AutoModelForCausalLM

    draft = AutoModelForCausalLM.from_pretrained(draft_folder).eval()
    llm = LLM((model_of("llama"), TOKENIZER), f"model:{draft_folder}", compile=False)
    done = llm.generate(PROMPTS, params(gamma=3), rounds_trace=True)
    for tokens, out in zip(PROMPTS, done, strict=True):
        assert out.rounds_trace is not None
        assert len(out.rounds_trace) == out.stats.rounds
        for entry in out.rounds_trace:
            before = tokens + [e.token_id for e in out.trace if e.round < entry.round]
            assert list(entry.tokens) == (greedy(draft, before, len(entry.tokens)) if entry.tokens else [])


def test_a_draft_of_another_architecture_and_padded_vocabulary(tmp_path: Path) -> None:
    """Target and draft share the tokenizer only; the rows beyond it are padding and never proposed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draft = GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCAB + 8, n_embd=16, n_layer=1, n_head=2, n_positions=128, bos_token_id=None)
        ).eval()
    widen(draft)
    with torch.no_grad():
        draft.transformer.wte.weight[VOCAB:] *= 50  # they would win
    folder = save_model(tmp_path, draft, TOKENIZER)
    llm = LLM((model_of("llama"), TOKENIZER), f"model:{folder}", compile=False)
    done = generate(llm, PROMPTS, params(gamma=3))
    assert [out.token_ids for out in done] == wanted("llama")


def test_a_draft_with_a_shorter_context(tmp_path: Path) -> None:
    """Where the draft's positions end, the target goes on alone."""
    from architectures import make

    config = CONFIGS["llama"]()
    config.max_position_embeddings = 20
    folder = save_model(tmp_path, make(config), TOKENIZER)
    llm = LLM((model_of("llama"), TOKENIZER), f"model:{folder}", compile=False)
    done = generate(llm, PROMPTS, params(gamma=5))
    assert [out.token_ids for out in done] == wanted("llama")
    last = done[0].trace[-1]
    assert (last.source, last.status) == ("target", "plain")

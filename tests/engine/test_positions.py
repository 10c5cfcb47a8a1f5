"""How far texts go by a model's positions: stretched rotary embeddings, and models that have very few."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import sakiyomi
from architectures import greedy, prompt
from sakiyomi import LLM, InputError, SamplingParams, UnsupportedError
from sakiyomi.model_executor.positions import ENDLESS, position_count, rope_limit
from toys import tiny_llama, tiny_tokenizer

OWN = 32
TOKENIZER = tiny_tokenizer()
ROPES: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4.0, "original_max_position_embeddings": OWN},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": OWN},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "longrope": {"factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
                 "original_max_position_embeddings": OWN},
}  # fmt: skip


def stretched(kind: str, seed: int = 0, declared: int = OWN, **more: Any) -> Any:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind], **more}
    return tiny_llama(max_position_embeddings=declared, rope_parameters=rope, eos_token_id=None, seed=seed)


def written(model: Any, tokens: list[int], count: int, draft: Any = "none", **options: Any) -> list[int]:
    llm = LLM((model, TOKENIZER), draft, compile=False, **options)
    (out,) = llm.generate([tokens], SamplingParams(max_new_tokens=count, ignore_eos=True))
    assert out.finish_reason == "length"
    return out.token_ids


def by_custom_generate(model: Any, tokens: list[int], count: int, **options: Any) -> list[int]:
    ids = torch.tensor([tokens])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, eos_token_id=None,
        custom_generate=sakiyomi.custom_generate, **options,
    )  # fmt: skip
    return list(found[0, len(tokens) :].tolist())


@pytest.mark.parametrize(
    "kind", ["linear", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("yarn", "llama3"))]
)
def test_a_stretched_context_is_reached(kind: str, tmp_path: Any) -> None:
    """With max_position_embeddings left at the original; a linear one has to be asked for, which names no original."""
    model, draft = stretched(kind), stretched(kind, seed=1)
    asked = {"max_context": 4 * OWN} if kind == "linear" else {}
    draft.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    tokens = prompt(60)  # behind the original context; one that crosses it is half a text
    wanted = greedy(model, tokens, 4 * OWN - 60)
    assert written(model, tokens, 200, f"model:{tmp_path}", **asked) == wanted
    assert written(model, tokens[:20], 20, **asked) == greedy(model, tokens[:20], 20)
    assert by_custom_generate(model, tokens, 10, assistant_model=draft) == wanted[:10]
    most = LLM((model, TOKENIZER), "none", compile=False).max_context
    assert most == (OWN if kind == "linear" else 4 * OWN)
    with pytest.raises(InputError, match=f"exceeds the model's {4 * OWN} positions"):
        LLM((model, TOKENIZER), "none", compile=False, max_context=4 * OWN + 1)


def test_a_declared_context_is_kept_until_more_is_asked_for() -> None:
    """As Llama 3.2 has it: 32 times 8192 could be reached, and 131,072 are declared."""
    model = stretched("llama3")
    model.config.max_position_embeddings = 2 * OWN
    assert LLM((model, TOKENIZER), "none", compile=False).max_context == 2 * OWN
    assert LLM((model, TOKENIZER), "none", compile=False, max_context=4 * OWN).max_context == 4 * OWN


def test_what_may_be_asked_for_is_told() -> None:
    llm = LLM((stretched("linear"), TOKENIZER), "none", compile=False)
    with pytest.raises(InputError, match=r"supports 128 positions: pass max_context=128"):
        llm.generate([prompt(OWN)])


def test_a_dynamic_embedding_ends_where_it_begins_to_change() -> None:
    """Keys in the cache would be those of other frequencies, and those of transformers depend on earlier texts."""
    model = stretched("dynamic")
    assert written(model, prompt(20), 50) == greedy(stretched("dynamic"), prompt(20), OWN - 20)
    llm = LLM((model, TOKENIZER), "none", compile=False)
    for ask in (
        lambda: llm.generate([prompt(OWN)]),
        lambda: LLM((model, TOKENIZER), "none", compile=False, max_context=4 * OWN),
        lambda: by_custom_generate(model, prompt(OWN), 4),
    ):
        with pytest.raises(InputError, match=r"rotary embedding \(dynamic\) changes all positions"):
            ask()


def test_longrope_is_crossed_by_classes_that_read_a_text_anew() -> None:
    """A Llama keeps keys of the short factors in its cache; for Phi 3, which does not, see test_engine_faults."""
    model = stretched("longrope")
    assert written(model, prompt(20), 50) == greedy(model, prompt(20), OWN - 20)
    with pytest.raises(UnsupportedError, match="does not read a text anew when it grows beyond 32 tokens"):
        LLM((model, TOKENIZER), "none", compile=False, max_context=4 * OWN)


def test_positions_by_a_configuration() -> None:
    for kind, declared, more, most, asked in (
        ("yarn", OWN, {}, 128, 128),
        ("yarn", 128, {}, 128, 128),
        ("yarn", 256, {}, 256, 256),
        ("linear", OWN, {}, OWN, 128),
        ("linear", OWN, {"original_max_position_embeddings": 16}, OWN, 64),
        ("dynamic", OWN, {}, OWN, OWN),
        ("longrope", 96, {}, 96, 128),
    ):
        config = stretched(kind, declared=declared, **more).config
        assert (position_count(config), position_count(config, ENDLESS)) == (most, asked)
        assert rope_limit(config) == (OWN if kind == "longrope" else ENDLESS)
    same = stretched("longrope", long_factor=[1.0] * 4).config
    assert rope_limit(same) == ENDLESS  # short and long texts have the same frequencies


# ---------------------------------------------------------------- few positions


def learned(kind: str, positions: int, seed: int = 0) -> Any:
    common: dict[str, Any] = {"vocab_size": 320, "eos_token_id": 0, "bos_token_id": 0, "initializer_range": 0.2}
    torch.manual_seed(seed)
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(n_positions=positions, n_embd=32, n_layer=2, n_head=4, **common)
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.GPTNeoConfig(
        max_position_embeddings=positions, hidden_size=32, num_layers=2, num_heads=4, window_size=8,
        attention_types=[[["global", "local"], 1]], **common,
    )  # fmt: skip
    return transformers.GPTNeoForCausalLM(config).eval()


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo"])  # on our cache, and by its own forward
@pytest.mark.parametrize("positions", [3, 24])
def test_models_with_few_positions(kind: str, positions: int, tmp_path: Any) -> None:
    """Passes have up to 64 rows, trials of what they cost as well; a draft model may have fewer positions still."""
    model = learned(kind, positions)
    short = learned(kind, max(2, positions // 2), seed=1)
    short.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    wanted = greedy(model, prompt(1), positions - 1)
    assert written(model, prompt(1), 100, f"model:{tmp_path}") == wanted
    assert written(model, prompt(1) + wanted[:-1], 100) == wanted[-1:]
    llm = LLM((model, TOKENIZER), "ngram", compile=False)
    assert llm.target.pass_seconds(64) > 0
    with pytest.raises(InputError, match=f"the context holds {positions}"):
        llm.generate([prompt(positions)])


def test_no_draft_is_none() -> None:
    model, tokens = tiny_llama(), prompt(5)
    llm = LLM((model, TOKENIZER), draft=None, compile=False)
    assert llm.draft is None and llm.drafter(None) is None
    plain = by_custom_generate(model, tokens, 5)
    assert by_custom_generate(model, tokens, 5, assistant_model=None) == plain == greedy(model, tokens, 5)

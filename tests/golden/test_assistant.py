"""A Gemma 4 assistant reads the target's own keys and values: the text stays the target's, the guesses are its own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from architectures import KINDS, VOCAB, WINDOW, make
from assistant_toys import assistant_folder, guessed, new_assistant, new_target, read_text
from read_ahead import TOKENIZER, Guess, check_trees, drafted, llm_over, others
from sakiyomi import LLM, LoadError, UnsupportedError
from sakiyomi.drafters.assistant import AssistantModel
from sakiyomi.kernels.build import native
from toys import tiny_llama

NEW = 16
SIZES: list[dict[str, Any]] = [
    {"gamma": 4, "tree": "best-first", "nodes": 12},
    {"gamma": 3, "tree": "static", "nodes": 9},
    {"gamma": "auto"},
]


@cache
def target() -> Any:
    return new_target()


@cache
def assistant(centroids: int = 0) -> Any:
    return new_assistant(target(), centroids=centroids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assistant_folder(tmp_path_factory.mktemp("assistant"), assistant())


@pytest.fixture(scope="module")
def rounds(folder: Path) -> list[tuple[list[int], list[int]]]:
    return drafted(llm_over(target(), f"assistant:{folder}"), max_new_tokens=NEW)


def expected(**wrong: Any) -> Guess:
    """What the assistant guesses; ``wrong``: misread so."""
    return lambda text, count: guessed(target(), assistant(), text, count, **wrong)


@pytest.mark.parametrize("centroids", [0, 4])
def test_logits_are_those_of_the_class(centroids: int, tmp_path: Path) -> None:
    """Rows of texts shorter and longer than the window; none of the tokens that centroids leave out is proposed."""
    own = assistant(centroids)
    llm = llm_over(target(), "none")
    model = AssistantModel.load(assistant_folder(tmp_path, own), llm.target)
    cache = llm.target.cache
    states = torch.randn(3, target().config.hidden_size, generator=torch.Generator().manual_seed(2))
    for count in (2, WINDOW, WINDOW + 1, WINDOW + 2, 40):
        text = [(7 * i + 3) % VOCAB for i in range(count)]
        pairs = read_text(target(), text).shared_kv_states
        with cache.lent(count) as slot, torch.no_grad():
            for kind, layer in (("sliding_attention", 2), ("full_attention", 3)):
                cache.keys[layer][slot, :, :count], cache.values[layer][slot, :, :count] = (p[0] for p in pairs[kind])
            logits, further = model(slot, count, [5, 9, 60], states)
            for row, token in enumerate((5, 9, 60)):
                joined = torch.cat(
                    [target().get_input_embeddings()(torch.tensor([[token]])), states[row, None, None]], -1
                )
                out = own(inputs_embeds=joined, position_ids=torch.tensor([[count]]), shared_kv_states=dict(pairs))
                wanted = out.logits[0, 0]
                known = logits[row].isfinite()
                assert int(known.sum()) == (2 * VOCAB // centroids if centroids else VOCAB)
                assert (wanted[~known] < wanted[known].min()).all()
                assert torch.allclose(logits[row][known], wanted[known], atol=1e-5)
                assert torch.allclose(further[row], out.last_hidden_state[0, 0], atol=1e-5)


@pytest.mark.thorough
def test_guesses_are_those_of_the_class(rounds: list[tuple[list[int], list[int]]]) -> None:
    assert len(rounds) > NEW
    assert not others(rounds, expected())


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", ["moved", "further", "plain", "raw", "own", "narrow"])
def test_what_is_misread_easily_is_noticed(wrong: str, rounds: list[tuple[list[int], list[int]]]) -> None:
    """Positions, the embedding's scale, hidden states and columns that are others give other guesses."""
    done = rounds[::2]
    assert others(done, expected(**{wrong: True})) > len(done) / 4


@pytest.mark.thorough
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_trees(size: dict[str, Any], folder: Path) -> None:
    """Greedy as transformers has it, sampled as without a draft."""
    check_trees(llm_over(target(), str(folder)), target(), size)


@pytest.mark.thorough
def test_a_target_that_shares_layers_itself(tmp_path: Path) -> None:
    """The layers that are read are those that store; with embeddings by layer, beside suffixes."""
    other = make(KINDS["gemma4"]())
    llm = llm_over(other, f"assistant:{assistant_folder(tmp_path, new_assistant(other))}+suffix")
    check_trees(llm, other, SIZES[0])


@pytest.mark.thorough
@pytest.mark.skipif(native() is None, reason="traced passes and quantized weights are of the compiled kernels")
@pytest.mark.parametrize("options", [{"compile": "auto"}, {"quantize": "int8"}], ids=str)
def test_other_paths(options: dict[str, Any], folder: Path) -> None:
    done = drafted(llm_over(target(), f"assistant:{folder}", **options), max_new_tokens=NEW)
    assert len(done) > NEW


@pytest.mark.thorough
def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    draft = f"assistant:{folder}"
    with pytest.raises(UnsupportedError, match="values of sliding_attention layers, and the target has one kind"):
        llm_over(tiny_llama(vocab=VOCAB), draft)
    with pytest.raises(UnsupportedError, match="cache='full'"):
        llm_over(target(), draft, cache="h2o", kv_budget=64)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"backbone_hidden_size": 40}, "hidden states of 40 values, and the target has 32"),
        ({"head_dim": 16}, r"keys \(sliding_attention\) of 16 values, and the target has 8"),
        ({"num_key_value_heads": 1}, r"heads of keys \(sliding_attention\) of 1 heads, and the target has 2"),
        ({"vocab_size": VOCAB + 1}, f"a vocabulary of {VOCAB + 1} tokens, and the target has {VOCAB}"),
    ]
    for number, (sizes, said) in enumerate(wrong):
        place = assistant_folder(tmp_path / str(number), new_assistant(target(), **sizes))
        with pytest.raises(UnsupportedError, match=said):
            llm_over(target(), f"assistant:{place}")
    (tmp_path / "0" / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(LoadError, match="get it again"):
        llm_over(target(), f"assistant:{tmp_path / '0'}")
    with pytest.raises(LoadError, match="no Gemma assistant in 'nowhere'"):
        llm_over(target(), "assistant:nowhere")
    with pytest.raises(UnsupportedError, match="is a draft that reads"):
        LLM((assistant(), TOKENIZER), "none")

"""Heads against the code of those who made them, where it is installed (extra ``reference``)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from architectures import VOCAB, prompt
from block_toys import RANK, deepspec_folder, dflash_folder, new_block
from block_toys import speculators_folder as block_folder
from eagle_toys import guessed, new_head, original_folder, speculators_folder
from read_ahead import TOKENIZER
from sakiyomi.cli.common import JsonOption
from sakiyomi.cli.export import SpeculatorsOptions, speculators
from sakiyomi.drafters import DrafterContext
from sakiyomi.drafters.block import BlockDrafter
from sakiyomi.drafters.block_heads.correction import Corrections, Selector
from sakiyomi.drafters.block_heads.formats import read_block
from sakiyomi.drafters.block_heads.module import Convolution
from sakiyomi.drafters.eagle import EagleDrafter
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.runner import ModelRunner
from toys import save_model, tiny_llama

BOUND = 1e-5  # of the largest logit
# Both packages call attention as it was called before transformers 5.24.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
TEXT = prompt(37, 5)


@cache
def target() -> Any:
    return tiny_llama(vocab=VOCAB, layers=8, seed=3)


def around(runner: ModelRunner) -> DrafterContext:
    return DrafterContext(
        None, runner, VOCAB, pack=lambda loaded, *_: build_runner(loaded.model, owned=True, compile=False)
    )


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_are_those_of_dflash(causal: bool, tmp_path: Path) -> None:
    model = pytest.importorskip("dflash.model")
    file = new_block(target(), causal=causal, logit_scale=0.7, softcap=9.0)
    options = file.options
    with torch.no_grad():
        states = target()(input_ids=torch.tensor([TEXT]), output_hidden_states=True).hidden_states
        ids = torch.tensor([[TEXT[-1]] + [options.mask] * (options.size - 1)])
        made = Qwen3Config(
            **file.config, is_causal=causal, block_size=options.size, num_target_layers=8,
            dflash_config={
                "target_layer_ids": list(options.layers), "mask_token_id": options.mask,
                "output_multiplier": 0.7, "final_logit_softcapping": 9.0,
            },
        )  # fmt: skip
        reference = model.DFlashDraftModel(made).eval()
        reference.load_state_dict(file.tensors)
        hidden = reference(
            target_hidden=model.extract_context_feature(states, reference.target_layer_ids)[:, :-1],
            noise_embedding=target().get_input_embeddings()(ids),
            position_ids=torch.arange(len(TEXT) - 1 + options.size)[None],
        )
        wanted = reference.compute_logits(hidden[0, 1:], target().get_output_embeddings())
    runner = build_runner(target(), compile=False)
    folder = str(dflash_folder(tmp_path, file))
    own = BlockDrafter.make(folder, around(runner)).runner
    slot = own.model.cache.take()
    own.model.cache.reserve(slot, len(TEXT) + options.size)
    own.write(slot, 0, {layer: states[layer + 1][0, :-1] for layer in options.layers})
    logits, _ = own.guess([(slot, len(TEXT) - 1, TEXT[-1])], options.guesses)
    assert (logits[0] - wanted).abs().max() < BOUND * wanted.abs().max()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"norm_before_residual": True, "depth": 2}], ids=str)
def test_eagle_layers_are_those_of_speculators(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    definitions = pytest.importorskip("speculators.models.eagle3.model_definitions", exc_type=ImportError)
    file = new_head(target(), kind=kind, **options)
    parts, made = definitions.model_classes[kind], {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**file.config)
    made._attn_implementation = "eager"
    layers = [parts.first_layer_class(made, 0, norm_before_residual=file.options.norm_before_residual)]
    layers += [parts.decoder_layer_class(made, i) for i in range(1, made.num_hidden_layers)]
    for i, layer in enumerate(layers):
        own = {n.removeprefix(f"layers.{i}."): t for n, t in file.tensors.items() if n.startswith(f"layers.{i}.")}
        layer.load_state_dict(own)
    runner = build_runner(target(), compile=False)
    folder = str(speculators_folder(tmp_path, file))
    head = EagleDrafter.make(folder, around(runner))._head
    with torch.no_grad():
        states = target()(input_ids=torch.tensor([TEXT]), output_hidden_states=True).hidden_states
        features = head.project({layer: states[layer + 1][0, :-1] for layer in file.options.layers})
        rows = len(features)
        x = torch.cat([target().get_input_embeddings()(torch.tensor([TEXT[1:]])), features[None]], -1)
        turned = parts.rotary_emb_class(made)(features[None], torch.arange(1, rows + 1)[None])
        mask = torch.full((rows, rows), -torch.inf).triu(1)[None, None]
        for layer in layers:
            x = layer(x, attention_mask=mask, position_embeddings=turned)
            x = x[0] if isinstance(x, tuple) else x
        norm = parts.norm_class(made.hidden_size, eps=made.rms_norm_eps)
        norm.weight.data = file.tensors["norm.weight"]
        wanted = norm(x[0]) @ file.tensors["lm_head.weight"].T
    slot = head.model.cache.take()
    head.model.cache.reserve(slot, rows)
    logits, fed = head.read([SequenceRows(slot, 0, TEXT[1:])], features)
    assert (logits - wanted).abs().max() < BOUND * wanted.abs().max()
    assert (fed - x[0]).abs().max() < BOUND * x.abs().max()


def _exported(place: Path, head: Path, target_folder: Path) -> Any:
    """A folder as `sakiyomi export speculators` writes it, and speculators loads it."""
    core = pytest.importorskip("speculators.model", exc_type=ImportError)
    speculators(SpeculatorsOptions(head=str(head), out=str(place), target=str(target_folder)), JsonOption())
    config = pytest.importorskip("speculators.config").SpeculatorModelConfig.from_pretrained(str(place))
    config.transformer_layer_config._attn_implementation = "eager"
    return core.SpeculatorModel.from_pretrained(str(place), config=config).eval()


def test_exported_heads_guess_the_same_in_speculators(tmp_path: Path) -> None:
    file = new_head(target(), tokens=range(3, VOCAB, 2), kind="llama")
    folder = original_folder(tmp_path / "head", file)
    loaded = _exported(tmp_path / "exported", folder, save_model(tmp_path / "target", target(), TOKENIZER))
    states = target()(input_ids=torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    given = torch.cat([states[layer] for layer in loaded.target_layer_ids], -1)[:, :-1]
    with torch.no_grad():
        found = loaded(given, torch.tensor([TEXT[1:]]), torch.zeros(1, len(TEXT) - 1, dtype=torch.int64), ttt_steps=1)
    guess = int(found[0][0, -1] + loaded.d2t[found[0][0, -1]])
    assert [guess] == guessed(target(), file, TEXT, 1)


@pytest.mark.parametrize(
    "options", [{"tokens": range(2, VOCAB)}, {"anchored": True, "markov": "gated", "confident": True}], ids=str
)
def test_exported_block_drafters_load_in_speculators(options: dict[str, Any], tmp_path: Path) -> None:
    file = new_block(target(), **options)
    write = deepspec_folder if options.get("anchored") else block_folder
    folder = write(tmp_path / "drafter", file)
    loaded = _exported(tmp_path / "exported", folder, save_model(tmp_path / "target", target(), TOKENIZER))
    state = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in file.tensors.items())
    assert not any(tensor.isnan().any() for tensor in state.values() if tensor.is_floating_point())
    assert loaded.target_layer_ids == [layer + 1 for layer in file.options.layers]
    again = read_block(tmp_path / "exported", 8)
    assert again.options == file.options


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_corrections_are_those_of_speculators(kind: str) -> None:
    definitions = pytest.importorskip("speculators.models.dspark.model_definitions", exc_type=ImportError)
    file = new_block(target(), anchored=True, markov=kind, confident=True)
    width = file.config["hidden_size"]
    markov = definitions.MarkovHead(
        verifier_vocab_size=VOCAB, draft_vocab_size=VOCAB, markov_rank=RANK, hidden_size=width, head_type=kind
    )
    named = {n.removeprefix("markov_head."): t for n, t in file.tensors.items() if n.startswith("markov_head.")}
    markov.load_state_dict(named)
    trust = definitions.ConfidenceHead(width + RANK)
    trust.load_state_dict({n: file.tensors[f"confidence_head.{n}"] for n in ("proj.weight", "proj.bias")})
    hidden, logits = torch.randn(5, width), torch.randn(5, VOCAB)
    correct = Corrections(file, logits.shape[-1], torch.device("cpu"), torch.float32).begin(logits, hidden)
    parents = [-1, 0, 1, 2]
    with torch.no_grad():
        found = [correct(level, [level - 1], torch.tensor([TEXT[level]]), parents) for level in range(5)]
        before = markov.prev_embeddings(torch.tensor([TEXT[:5]]))
        bias = markov.block_bias(prev_token_ids=torch.tensor([TEXT[:5]]), hidden_states=hidden[None])
        wanted = torch.sigmoid(trust(torch.cat([hidden[None], before], -1)))
    assert torch.allclose(torch.cat([row for row, _ in found]), logits + bias[0], atol=1e-5)
    assert [sure for _, (sure,) in found] == pytest.approx(wanted.flatten().tolist(), abs=1e-5)  # type: ignore[misc]


@torch.no_grad()
def test_convolutions_and_selectors_are_those_of_speculators() -> None:
    """Of several blocks in one pass, and of a slot behind several tokens."""
    definitions = pytest.importorskip("speculators.models.dflash2.model_definitions", exc_type=ImportError)
    file = new_block(target(), kernel=2, group=8, selected=4)
    options, width = file.options, file.config["hidden_size"]
    prefix = "layers.0.attention_conv."
    named = {n.removeprefix(prefix): t for n, t in file.tensors.items() if n.startswith(prefix)}
    reference = definitions.GroupedDynamicCausalConv(width, block_size=options.size, kernel_size=2, group_size=8)
    own = Convolution(options, width)
    reference.load_state_dict(named)
    own.load_state_dict(named)
    rows, out = torch.randn(2, 1, 3 * options.size, width)
    before, behind = reference.prepare(rows)
    weights = own.weights(rows)
    assert torch.allclose(own(rows, weights, 0), before, atol=1e-5)
    assert torch.allclose(own(out, weights, 1), reference.finish(out, behind), atol=1e-5)
    chooser = definitions.CandidateSelector(vocab_size=VOCAB, hidden_size=width, rank=RANK, top_k=4)
    prefix = "candidate_selector."
    chooser.load_state_dict({n.removeprefix(prefix): t for n, t in file.tensors.items() if n.startswith(prefix)})
    logits, hidden, tokens = torch.randn(VOCAB), torch.randn(width), torch.tensor(TEXT[:3])
    found = Selector(file, torch.device("cpu"), torch.float32).ranked(logits, hidden, tokens)
    chosen, scores = chooser.select(logits.expand(3, -1), hidden.expand(3, -1), tokens)
    assert torch.allclose(found.gather(1, chosen), scores, atol=1e-5)
    assert found.isfinite().sum(1).tolist() == [4, 4, 4]

"""ModelRunner against transformers' own logits: every architecture, in every shape of pass that the engine makes.

The oracle is the user's own model, called as anybody would call it, on each row's whole path. A failure here means that
the engine scores other text than it commits: its output would be neither the target's nor reproducible.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sakiyomi.kernels.native
from architectures import ALL, REFUSED, VOCAB, WINDOW, logits_after, make, model_of, prompt, refused_model
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.kernels.native import PackedLinear, PackedWeights
from sakiyomi.kernels.pack import Watch
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.loading.families import check_states
from sakiyomi.model_executor.own_forward import OwnForward
from sakiyomi.model_executor.runner import ModelRunner

TREE = (-1, 0, 0, 1, 2, 2, 3, 0, 6)
"""Parents by row: row 0 is the last committed token, the others a tree with several branches."""


@pytest.fixture(params=["compiled kernels", "plain torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernels the models of a test run on."""
    if request.param == "plain torch":
        monkeypatch.setattr(sakiyomi.kernels.native, "native", lambda: None)
    elif PackedWeights.create() is None:
        pytest.skip("the C++ kernels cannot be compiled here")
    return str(request.param)


def packed(model: Any, **options: Any) -> ModelRunner:
    return build_runner(model, compile=False, **options)


def fill(target: ModelRunner, tokens: Sequence[int], chunks: Sequence[int] = ()) -> tuple[int, list[Tensor]]:
    """Take a slot and put the tokens into it, in chunks of these sizes and a rest; the slot and every row's logits."""
    slot = target.cache.take()
    target.cache.reserve(slot, len(tokens) + 16)
    rows: list[Tensor] = []
    for size in (*chunks, len(tokens)):
        start = len(rows)
        chunk = list(tokens[start : start + size])
        if chunk:
            rows += list(target.score([SequenceRows(slot, start, chunk, prompt=True)]).logits)
            target.cache.commit(slot, start, range(len(chunk)))
    return slot, rows


def row_path(tokens: Sequence[int], parents: Sequence[int], row: int) -> list[int]:
    """Tokens from the first row down to this one."""
    found: list[int] = []
    while row >= 0:
        found.insert(0, tokens[row])
        row = parents[row]
    return found


def assert_near(got: Tensor, wanted: Tensor, what: str, tolerance: float = 1e-4) -> None:
    """Equal up to the rounding of sums in another order: fp32 with a safety factor of about 50."""
    difference = (got.float() - wanted).abs().max()
    assert difference <= tolerance * wanted.abs().max(), f"{what}: {difference:.2g} of {wanted.abs().max():.2g}"


def assert_rows(
    model: Any,
    rows: Tensor,
    prefix: Sequence[int],
    tokens: Sequence[int],
    parents: Sequence[int],
    tolerance: float = 1e-4,
) -> None:
    """Each row's logits are what the model says after the prefix and the row's own path."""
    assert len(rows) == len(tokens)
    for row in range(len(tokens)):
        wanted = logits_after(model, [*prefix, *row_path(tokens, parents, row)])
        assert_near(rows[row], wanted, f"row {row} of {len(tokens)}")


@pytest.mark.few(8)
@pytest.mark.parametrize("name", ALL)
def test_a_prompt_in_chunks(name: str, path: str) -> None:
    """A chunk must see everything before it and nothing after it, in windows too, whatever the borders."""
    model, tokens = model_of(name), prompt(3 * WINDOW)
    target = packed(model)
    _, rows = fill(target, tokens, (1, WINDOW + 2, 4))
    for length in (1, 2, WINDOW, WINDOW + 1, WINDOW + 3, 14, 15, len(tokens)):
        assert_near(rows[length - 1], logits_after(model, tokens[:length]), f"after {length} tokens")


@pytest.mark.few(10)
@pytest.mark.parametrize("name", ALL)
def test_the_last_row_alone_of_several_prompts(name: str, path: str) -> None:
    """With ``last`` only each prompt's final row is asked for: a mix-up gives one request another's first token."""
    model, target = model_of(name), packed(model_of(name))
    prompts = [prompt(5, 1), prompt(2 * WINDOW, 2), prompt(1, 3)]
    segments = []
    for tokens in prompts:
        slot = target.cache.take()
        target.cache.reserve(slot, 32)
        segments.append(SequenceRows(slot, 0, tokens, prompt=True))
    rows = target.score(segments, last=True).logits
    assert rows.shape == (3, VOCAB)
    for row, tokens in zip(rows, prompts, strict=True):
        assert_near(row, logits_after(model, tokens), f"prompt of {len(tokens)}")


@pytest.mark.few(5)
@pytest.mark.parametrize("name", ALL)
def test_trees_with_junk_branches_in_a_ragged_batch(name: str, path: str) -> None:
    """A row sees its own request and its own ancestors only. Leaks between branches would accept what plain decoding
    would not write; leaks between requests would make the text depend on the company.
    """
    model, target = model_of(name), packed(model_of(name))
    prefixes = [prompt(3, 1), prompt(2 * WINDOW + 3, 2), prompt(3 * WINDOW, 3)]
    slots = [fill(target, prefix)[0] for prefix in prefixes]
    parents = [TREE, (-1,), (-1, 0, 1, 2)]
    tokens = [prompt(len(tree), 10 + i) for i, tree in enumerate(parents)]
    segments = [
        SequenceRows(slot, len(prefix), row, None if tree == (-1, 0, 1, 2) else tree)
        for slot, prefix, row, tree in zip(slots, prefixes, tokens, parents, strict=True)
    ]
    rows = target.score(segments).logits
    start = 0
    for prefix, row, tree in zip(prefixes, tokens, parents, strict=True):
        assert_rows(model, rows[start : start + len(tree)], prefix, row, tree)
        start += len(tree)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", ALL)
def test_a_tree_level_by_level(name: str, path: str) -> None:
    """A draft model reads its tree a level a pass: rows see those above them in passes before, and no others."""
    model, target = model_of(name), packed(model_of(name))
    prefix, company = prompt(3 * WINDOW, 1), prompt(5, 2)
    slot, _ = fill(target, prefix)
    other, _ = fill(target, company)
    tokens = prompt(len(TREE), 4)
    got = []
    for first, last in ((0, 1), (1, 4), (4, len(TREE))):
        fresh = SequenceRows(slot, len(prefix) + first, tokens[first:last], TREE[:last], done=first)
        beside = SequenceRows(other, len(company) + first, tokens[first:last], TREE[:last], done=first)
        got.append(target.score([beside, fresh]).logits[last - first :])
    assert_rows(model, torch.cat(got), prefix, tokens, TREE)
    target.cache.commit(slot, len(prefix), (0, 1, 3, 6))
    committed = prefix + [tokens[row] for row in (0, 1, 3, 6)]
    assert_rows(
        model, target.score([SequenceRows(slot, len(committed), prompt(2, 3))]).logits, committed, prompt(2, 3), (-1, 0)
    )


@pytest.mark.few(6)
@pytest.mark.parametrize("name", ALL)
def test_keep_a_path_then_go_on(name: str, path: str) -> None:
    """After a round the kept path, which was scattered over the pass, is the cache; everything refused is gone."""
    model, target = model_of(name), packed(model_of(name))
    prefix = prompt(2 * WINDOW, 1)
    slot, _ = fill(target, prefix, (9,))
    tokens = prompt(len(TREE), 2)
    target.score([SequenceRows(slot, len(prefix), tokens, TREE)])
    target.cache.commit(slot, len(prefix), (0, 1, 3, 6))
    committed = prefix + [tokens[row] for row in (0, 1, 3, 6)]
    follow = prompt(3, 3)
    rows = target.score([SequenceRows(slot, len(committed), follow, (-1, 0, 0))]).logits
    assert_rows(model, rows, committed, follow, (-1, 0, 0))
    target.cache.commit(slot, len(committed), (0,))
    committed.append(follow[0])
    last = prompt(1, 4)
    assert_rows(model, target.score([SequenceRows(slot, len(committed), last)]).logits, committed, last, (-1,))


def test_a_prompt_chunk_and_a_tree_in_one_pass(path: str) -> None:
    """Requests join while others decode: both kinds of rows may share a pass."""
    model, target = model_of("mistral"), packed(model_of("mistral"))
    prefix, late = prompt(12, 1), prompt(15, 2)
    first, _ = fill(target, prefix)
    second, _ = fill(target, late[:6])
    tokens = prompt(len(TREE), 3)
    rows = target.score(
        [SequenceRows(second, 6, late[6:], prompt=True), SequenceRows(first, len(prefix), tokens, TREE)]
    ).logits
    for i in range(6, 15):
        assert_near(rows[i - 6], logits_after(model, late[: i + 1]), f"prompt token {i}")
    assert_rows(model, rows[9:], prefix, tokens, TREE)


@pytest.mark.few(6)
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 8, 9, 33, 64, 65, 130])
def test_any_number_of_rows(rows: int, path: str) -> None:
    """Row counts between the sizes are filled up, and above the largest one a multiple of it is taken."""
    model, target = model_of("gemma2"), packed(model_of("gemma2"))
    prefix = prompt(9)
    slot, _ = fill(target, prefix)
    target.cache.reserve(slot, 200)
    tokens = prompt(rows, 5)
    got = target.score([SequenceRows(slot, len(prefix), tokens)]).logits
    assert got.shape == (rows, VOCAB)
    for row in {0, rows // 2, rows - 1}:
        assert_near(got[row], logits_after(model, prefix + tokens[: row + 1]), f"row {row}")


@pytest.mark.few(5)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "llama-multi-query", "opt"])
def test_compiled_kernels_and_plain_torch_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path without a compiler is the oracle of the fast one; a difference beyond rounding is a kernel's mistake."""
    if PackedWeights.create() is None:
        pytest.skip("the C++ kernels cannot be compiled here")
    prefix, tokens = prompt(40, 1), prompt(len(TREE), 2)

    def run() -> Tensor:
        target = packed(model_of(name))
        slot, _ = fill(target, prefix)
        return target.score([SequenceRows(slot, len(prefix), tokens, TREE)]).logits

    fast = run()
    monkeypatch.setattr(sakiyomi.kernels.native, "native", lambda: None)
    assert_near(fast, run(), name, 1e-5)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gpt2", "falcon", "opt", "phi3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name: str, path: str) -> None:
    """In bf16 nothing is equal; but our error against fp32 weights must not exceed transformers' own by much."""
    half = copy.deepcopy(model_of(name)).to(torch.bfloat16)
    exact = copy.deepcopy(half).float()
    prefix, tokens = prompt(20, 1), prompt(len(TREE), 2)
    target = packed(half)
    slot, _ = fill(target, prefix, (7,))
    rows = target.score([SequenceRows(slot, len(prefix), tokens, TREE)]).logits
    ours, theirs = [], []
    for row in range(len(TREE)):
        history = [*prefix, *row_path(tokens, TREE, row)]
        truth = logits_after(exact, history)
        ours.append((rows[row].float() - truth).pow(2).mean())
        theirs.append((logits_after(half, history) - truth).pow(2).mean())
    assert torch.stack(ours).mean().sqrt() <= 1.5 * torch.stack(theirs).mean().sqrt()


# ---------------------------------------------------------------- the user's own model


def state(model: nn.Module) -> dict[str, tuple[int, Tensor]]:
    return {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "gemma3"])
def test_the_users_model_stays_as_it_was(name: str, path: str) -> None:
    """Its weights, attention, modules, hooks and settings are the user's: he may go on using or training it."""
    model = make(ALL[name]())
    model.train()
    before, attention, kinds = state(model), model.config._attn_implementation, [type(m) for m in model.modules()]
    modules, config, count = list(model.modules()), model.config.to_dict(), hooks(model)
    model.eval()
    logits = logits_after(model, prompt(20))
    model.train()
    target = packed(model)
    slot, _ = fill(target, prompt(20))
    target.score([SequenceRows(slot, 20, prompt(len(TREE)), TREE)])
    assert model.training
    assert model.config._attn_implementation == attention
    assert model.config.to_dict() == config
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert [type(m) for m in model.modules()] == kinds
    assert hooks(model) == count
    for key, (place, value) in state(model).items():
        assert (place, True) == (before[key][0], torch.equal(value, before[key][1])), key
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(logits_after(model.eval(), prompt(20)), logits)
    assert not any(isinstance(m, PackedLinear) for m in model.modules())


def test_the_copy_shares_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second set of weights would double the memory. (The compiled kernels hold theirs in an order of their own.)"""
    monkeypatch.setattr(sakiyomi.kernels.native, "native", lambda: None)
    model = make(ALL["llama"]())
    target = packed(model)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in target.module.parameters()} == own


def test_a_users_hook_is_honoured(path: str) -> None:
    """Adapters and probes work through hooks: a layer that has one must not be replaced by a kernel that ignores it."""
    model = make(ALL["llama"]())
    model.model.layers[1].mlp.down_proj.register_forward_hook(lambda module, args, output: 0.5 * output)
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    plain = logits_after(model_of("llama"), prompt(9))
    tokens = prompt(9)
    assert (logits_after(model, tokens) - plain).abs().max() > 0.1
    _, rows = fill(packed(model), tokens)
    assert_near(rows[-1], logits_after(model, tokens), "with hooks")


@pytest.mark.few(5)
@pytest.mark.parametrize("name", ALL)
def test_the_last_layer_of_a_prompt_is_computed_for_its_last_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit-equal logits of that row, and the same keys and values of all rows: texts go on as behind whole passes."""
    tokens = [prompt(WINDOW + 5, 1), prompt(3, 2)]
    found = []
    for whole in (False, True):
        target = packed(model_of(name))
        if whole:
            monkeypatch.setattr(type(target), "want", lambda self, rows: None)
        slots = [target.cache.take() for _ in tokens]
        for slot in slots:
            target.cache.reserve(slot, 32)
        segments = [SequenceRows(slot, 0, each, prompt=True) for slot, each in zip(slots, tokens, strict=True)]
        rows = [target.score(segments, last=True).logits]
        for slot, each in zip(slots, tokens, strict=True):
            target.cache.commit(slot, 0, range(len(each)))
        segments = [SequenceRows(slot, len(each), [7, 8]) for slot, each in zip(slots, tokens, strict=True)]
        found.append([*rows, target.score(segments).logits])
    assert all(map(torch.equal, *found))


def test_hooks_see_all_rows_of_a_prompt(path: str) -> None:
    """Whoever listens to the last layer gets what the model's own forward would give him, not zeros."""
    model, tokens, seen = make(ALL["llama"]()), prompt(20), []
    target = packed(model)
    target.module.model.layers[-1].mlp.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    slot = target.cache.take()
    target.cache.reserve(slot, 32)
    target.score([SequenceRows(slot, 0, tokens, prompt=True)], last=True)
    assert seen[0].abs().sum(-1).min() > 0


def test_a_subclass_of_linear_keeps_its_own_forward(path: str) -> None:
    """Quantized and adapted layers are subclasses of ``nn.Linear`` with a forward of their own."""

    class Rounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, (self.weight * 8).round() / 8, self.bias)

    model = make(ALL["llama"]())
    for layer in model.model.layers:
        old = layer.mlp.up_proj
        layer.mlp.up_proj = Rounded(old.in_features, old.out_features, bias=False)
        layer.mlp.up_proj.weight = old.weight
    tokens = prompt(9)
    _, rows = fill(packed(model), tokens)
    assert_near(rows[-1], logits_after(model, tokens), "with rounded layers")
    assert (logits_after(model, tokens) - logits_after(model_of("llama"), tokens)).abs().max() > 0.1


class Reversed(nn.Module):
    """Like experts of a mixture that gather their rows: as many as there are, in an order of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.view(-1, x.shape[-1]).flip(0)).flip(0).view(x.shape)  # type: ignore[no-any-return]


def test_a_layer_that_gets_the_rows_in_another_order(path: str) -> None:
    """Which rows only fill a pass up is known where they stand in order, and nowhere else."""
    model = make(ALL["llama"]())
    for layer in model.model.layers:
        layer.mlp = Reversed(layer.mlp)
    target = packed(model)
    slot, _ = fill(target, prompt(9))
    tokens = prompt(5, 2)  # three rows short of a size
    rows = target.score([SequenceRows(slot, 9, tokens)]).logits
    assert_rows(model, rows, prompt(9), tokens, (-1, 0, 1, 2, 3))


def test_a_trial_of_a_mixture_chooses_many_experts(path: str) -> None:
    """Rows of one token would all go to the same few: a pass would seem to cost what one row does."""
    model, chosen = make(ALL["qwen3_moe"]()), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda gate, rows, found: chosen.append(found[2].unique().numel()))
    target = packed(model)
    target.cache.reserve(target.cache.take(), 9)
    chosen.clear()
    target.pass_seconds(4)
    assert min(chosen) > 2  # of which each row has


def test_a_model_in_training_mode_is_run_without_dropout(path: str) -> None:
    """Dropout in a pass would make every row random."""
    model = make(ALL["gpt2"]())
    tokens = prompt(9)
    wanted = logits_after(model, tokens)
    _, rows = fill(packed(model.train()), tokens)
    assert_near(rows[-1], wanted, "training mode")


# ---------------------------------------------------------------- proofs and refusals


@pytest.mark.few(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rolled_back_runs_by_itself(name: str) -> None:
    """A recurrent state of another kind, or a bias by column, would give wrong text without a word on our cache."""
    runner = packed(refused_model(name))
    assert isinstance(runner.module, OwnForward)
    assert not runner.cache.shapes


@pytest.mark.parametrize(
    ("name", "what"),
    [("rwkv", "a recurrent state"), ("minimax", "type linear_attention"), ("zaya", "type hybrid")],
)
def test_unknown_states_are_known_by_their_configuration(name: str, what: str) -> None:
    """Before layers are packed: their weights are gone then."""
    model = refused_model(name)
    with pytest.raises(UnsupportedError, match=f"{what}, computed in a way that is not known here"):
        check_states(model.config, type(model))


class Averaging(nn.Module):
    """Stands in for an attention that keeps keys and values to itself."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        steps = torch.arange(1, hidden_states.shape[1] + 1, device=hidden_states.device)[:, None]
        return hidden_states.cumsum(1) / steps, None


@pytest.mark.few(3)
@pytest.mark.parametrize("layers", [(1,), (0, 1, 2)])
def test_a_layer_that_does_not_come_to_our_attention_is_noticed(layers: Sequence[int], path: str) -> None:
    """Switching is not believed: a class may accept another attention with a log line and keep its own.

    This one keeps nothing in a cache of transformers either, which the proof finds.
    """
    model = make(ALL["llama"]())
    for layer in layers:
        model.model.layers[layer].self_attn = Averaging()
    runner = packed(model)
    assert isinstance(runner.module, OwnForward) and runner.module.reader.way == "whole"


class Detour(nn.Module):
    """An attention that stops coming to ours after the probes: the proof of the first real pass must find it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        self.calls += 1
        return self.inner(hidden_states, **kwargs) if self.calls <= 2 else (hidden_states, None)


def test_every_layer_is_proven_to_have_been_called(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sakiyomi.model_executor.own_forward.WAYS", ())
    model = make(ALL["llama"]())
    model.model.layers[1].self_attn = Detour(model.model.layers[1].self_attn)
    with pytest.raises(UnsupportedError, match="2 of 3"):
        fill(packed(model), prompt(5))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers logs what it thinks of classes that keep their own attention."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(verbosity)


def test_siblings_are_found_by_what_they_read() -> None:
    model = model_of("llama")
    with Watch(model) as watch:
        model(input_ids=torch.tensor([[1, 2]]))
    names = {id(module): name.rsplit(".", 1)[-1] for name, module in model.named_modules()}
    found = [[names[id(layer)] for layer in group] for group in watch.siblings()]
    layers = model.config.num_hidden_layers
    assert sorted(found) == [["gate_proj", "up_proj"]] * layers + [["q_proj", "k_proj", "v_proj"]] * layers
    assert not any(module._forward_pre_hooks for module in model.modules())

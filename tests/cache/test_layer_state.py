"""A layer that keeps no keys and values: a causal convolution over the last three tokens, registered from here.

The oracle is the model's own forward over the whole text, without any cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from drafters import Branching, Scripted, texts_of
from sakiyomi import LLM, SamplingParams
from sakiyomi.cache.layer_state import LAYER_STATES
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.model_executor.build import build_runner
from toys import character_tokenizer, tiny_llama

VOCAB, WINDOW, NEW, CHUNK = 64, 3, 24, 16
TAIL = 40  # inputs of committed tokens that are kept: a slot rolls back that far
STEP = 8  # tokens between two copies, to which it rolls back beyond that
TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True, gamma=4)


def lineage(plan: BatchPlan, segment: int) -> torch.Tensor:
    """Columns of the last tokens on the way to each row, itself last, (rows, WINDOW); negative ones before the text."""
    part, found = plan.parts[segment], []
    for row in range(len(part.tokens)):
        before = part.length if part.parents is None else part.length - part.done
        found.append([*range(-WINDOW, before), *plan.path(segment, row).tolist()][-WINDOW:])
    return torch.tensor(found)


class WindowMixer(nn.Module):
    """A gate, a convolution of each channel over the last three tokens, and a projection."""

    def __init__(self, dim: int, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.into = nn.Linear(dim, 2 * dim, bias=False)
        self.kernel = nn.Parameter(torch.randn(WINDOW, dim))
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, inputs = self.into(hidden_states).chunk(2, -1)
        windows = F.pad(inputs, (0, 0, WINDOW - 1, 0)).unfold(1, WINDOW, 1)  # (batch, rows, dim, window)
        return self.mix(gate, windows.transpose(2, 3))

    def mix(self, gate: Tensor, windows: Tensor) -> Tensor:
        mixed: Tensor = self.out(F.silu(gate) * (windows * self.kernel).sum(-2))
        return mixed


class MixerLayer(nn.Module):
    """A layer of a Llama with such a mixer in the place of attention."""

    def __init__(self, layer: Any, dim: int, layer_idx: int) -> None:
        super().__init__()
        self.mixer, self.norm, self.mlp = WindowMixer(dim, layer_idx), layer.input_layernorm, layer.mlp
        self.mlp_norm = layer.post_attention_layernorm

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        hidden_states = hidden_states + self.mixer(self.norm(hidden_states))
        mixed: Tensor = hidden_states + self.mlp(self.mlp_norm(hidden_states))
        return mixed


class WindowState:
    """Inputs of a slot's last tokens by column, and copies of the window at every eighth token before those."""

    def __init__(self, module: Any, slots: int) -> None:
        self.module = module
        self.inputs = [torch.zeros(0) for _ in range(slots)]
        self.first = [0] * slots  # column of the first of them
        self.copies: list[dict[int, Tensor]] = [{} for _ in range(slots)]

    @property
    def bytes(self) -> int:
        held = [*self.inputs, *(copy for copies in self.copies for copy in copies.values())]
        return sum(tensor.nbytes for tensor in held)

    def clear(self, slot: int) -> None:
        self.inputs[slot], self.first[slot], self.copies[slot] = torch.zeros(0), 0, {}

    def reserve(self, slot: int, columns: int) -> None:
        """It grows with what is written."""

    def begin(self, plan: BatchPlan) -> None:
        """Nothing has to be done."""

    def forward(self, rows: Sequence[Tensor], fixed: Sequence[Tensor], plan: BatchPlan) -> Tensor:
        gate, inputs = self.module.into(rows[0]).chunk(2, -1)
        windows = inputs.new_zeros(*inputs.shape[:2], WINDOW, inputs.shape[2])
        for i, (slot, first, count, length, _) in enumerate(plan.table):
            self._trim(slot, length - plan.parts[i].done)
            held = self.inputs[slot][: length - self.first[slot]].to(inputs)
            new = inputs[0, first : first + count]
            self.inputs[slot] = held = torch.cat([held.view(-1, new.shape[1]), new])
            columns = lineage(plan, i)
            found = held[(columns - self.first[slot]).clamp_min(0)]
            windows[0, first : first + count] = found.masked_fill((columns < 0)[..., None], 0.0)
        mixed: Tensor = self.module.mix(gate, windows)
        return mixed

    def _trim(self, slot: int, length: int) -> None:
        """Of the first tokens nothing but copies stays."""
        first = max(self.first[slot], length - TAIL)
        for at in range(STEP, first + 1, STEP):
            if at - WINDOW + 1 >= self.first[slot] and at not in self.copies[slot]:
                self.copies[slot][at] = self._window(slot, at)
        self.inputs[slot] = self.inputs[slot][first - self.first[slot] :]
        self.first[slot] = first

    def _window(self, slot: int, length: int) -> Tensor:
        """The last inputs before a length."""
        end = length - self.first[slot]
        return self.inputs[slot][max(0, end - WINDOW + 1) : end].clone()

    def commit(self, slot: int, length: int, rows: Sequence[int]) -> None:
        at = length - self.first[slot]
        self.inputs[slot] = torch.cat([self.inputs[slot][:at], self.inputs[slot][[at + row for row in rows]]])

    def resumable(self, slot: int, length: int) -> int:
        if not self.first[slot] or length - WINDOW + 1 >= self.first[slot]:
            return length
        return max((at for at in self.copies[slot] if at <= length), default=0)

    def roll_back(self, slot: int, length: int) -> None:
        if not length:
            self.clear(slot)
        elif self.first[slot] and length - WINDOW + 1 < self.first[slot]:
            self.inputs[slot], self.first[slot] = self.copies[slot][length], length - WINDOW + 1
        self.copies[slot] = {at: copy for at, copy in self.copies[slot].items() if at <= length}

    def fork(self, slot: int, other: int, first: int, length: int) -> None:
        self.inputs[slot], self.first[slot] = self.inputs[other].clone(), self.first[other]
        self.copies[slot] = dict(self.copies[other])
        self.roll_back(slot, length)

    def snapshot(self, slot: int, length: int) -> dict[str, Tensor]:
        return {"window": self._window(slot, length)}

    def restore(self, slot: int, length: int, known: Mapping[str, Tensor]) -> None:
        self.inputs[slot] = known["window"].clone()
        self.first[slot] = length - len(known["window"])


class ForgettingState(WindowState):
    """Broken: rows of refused tokens stay in the window."""

    def commit(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """Nothing moves."""


@lru_cache
def model_of(seed: int = 0) -> LlamaForCausalLM:
    model = tiny_llama(vocab=VOCAB, layers=3, seed=seed, eos_token_id=None, pad_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.model.layers[1] = MixerLayer(model.model.layers[1], model.config.hidden_size, 1).eval()
        for name in ("into", "out"):
            nn.init.normal_(getattr(model.model.layers[1].mixer, name).weight, std=0.3)
    return model


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(LAYER_STATES, "WindowMixer", WindowState)
    yield


def prompt(count: int, seed: int) -> list[int]:
    return torch.randint(1, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def logits_of(tokens: Sequence[int]) -> Tensor:
    """(len(tokens), V) by the model's own forward."""
    own: Tensor = model_of()(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return own


def greedy(tokens: Sequence[int], new: int = NEW) -> list[int]:
    text = list(tokens)
    for _ in range(new):
        text.append(int(logits_of(text)[-1].argmax()))
    return text[len(tokens) :]


PROMPTS = [prompt(37, 1), prompt(5, 2), prompt(90, 3), prompt(1, 4)]


def llm_with(draft: Any = "none", **options: Any) -> LLM:
    return LLM((model_of(), TOKENIZER), draft, chunk_size=CHUNK, **({"compile": False} | options))


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("native", [True, False])
def test_chains_trees_and_levels_of_a_tree(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests in one pass; a tree at once, the same in two passes, and what follows the path that is kept."""
    if not native:
        monkeypatch.setattr("sakiyomi.kernels.native.native", lambda: None)
    runner = build_runner(model_of(), compile=False, max_slots=3)
    first, second = prompt(20, 5), prompt(7, 6)
    one, two = runner.cache.take(), runner.cache.take()
    runner.cache.reserve(two, 60)
    segments = [SequenceRows(one, 0, first, prompt=True), SequenceRows(two, 0, second, prompt=True)]
    close(runner.score(segments).logits, torch.cat([logits_of(first), logits_of(second)]))
    tree, parents = [11, 12, 13, 14, 15, 16], (-1, 0, 0, 1, 2, 3)
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5]]
    wanted = [logits_of([*first, *(tree[i] for i in path)])[-1] for path in paths]
    whole = runner.score([SequenceRows(one, 20, tree, parents), SequenceRows(two, 7, [3, 4])]).logits
    close(whole[:6], torch.stack(wanted))
    close(whole[6:], logits_of([*second, 3, 4])[-2:])
    runner.cache.roll_back(one, 20)
    begun = runner.score([SequenceRows(one, 20, tree[:3], parents[:3])]).logits
    rest = runner.score([SequenceRows(one, 23, tree[3:], parents, done=3)]).logits
    close(torch.cat([begun, rest]), torch.stack(wanted))
    runner.cache.commit(one, 20, (0, 2, 4))
    close(runner.score([SequenceRows(one, 23, [9])]).logits, logits_of([*first, 11, 13, 15, 9])[-1:])


@pytest.mark.few(1)
@pytest.mark.parametrize("draft", ["none", "chain", "tree", "traced", "model"])
def test_greedy_text_alone_and_in_a_batch(draft: str) -> None:
    """Prompts of several chunks and of one token; a draft model whose own layers keep such windows, too."""
    texts = [greedy(tokens) for tokens in PROMPTS]
    drafter: Any = "none"
    if draft in ("chain", "tree", "traced"):
        kind = Scripted if draft == "chain" else Branching
        drafter = kind(texts_of(PROMPTS, texts), "sometimes", VOCAB)
    elif draft == "model":
        near = build_runner(model_of(), compile=False)
        from sakiyomi.drafters.model import ModelDrafter

        drafter = ModelDrafter(near, VOCAB)
    llm = llm_with(drafter, compile="auto" if draft == "traced" else False)
    llm.wait()
    found = llm.generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in found] == texts
    assert draft == "none" or sum(out.stats.accepted for out in found) > 10
    assert [llm.generate([tokens], GREEDY)[0].token_ids for tokens in PROMPTS] == texts
    assert any(map(llm.target.recorder.has, llm.target.sizes)) if draft == "traced" else llm.target.recorder is None
    assert llm.target.cache.bytes > sum(store.nbytes for store in (*llm.target.cache.keys, *llm.target.cache.values))


def test_a_state_that_keeps_refused_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYER_STATES, "WindowMixer", ForgettingState)
    texts = [greedy(tokens) for tokens in PROMPTS]
    with pytest.raises(UnsupportedError, match="other logits through our cache"):
        llm_with()
    monkeypatch.setattr("sakiyomi.model_executor.build.prove", lambda runner: None)
    llm = llm_with(Branching(texts_of(PROMPTS, texts), "sometimes", VOCAB))
    assert [out.token_ids for out in llm.generate(PROMPTS, GREEDY)] != texts


def test_a_prefix_from_its_file(tmp_path: Path) -> None:
    beginning, ends = prompt(48, 7), [prompt(9, 8), prompt(1, 9)]
    llm_with().prefix(beginning).save(tmp_path / "beginning.safetensors")
    llm = llm_with()
    prefix = llm.load_prefix(tmp_path / "beginning.safetensors")
    found = llm.generate(ends, GREEDY, prefix=prefix)
    assert [out.token_ids for out in found] == [greedy([*beginning, *end]) for end in ends]
    assert [out.stats.reused for out in found] == [48, 48]


def test_a_conversation_goes_back_as_far_as_its_layers_can() -> None:
    """Within the tail to any token, before it to a copy, and to the beginning where there is none."""
    llm = llm_with()
    tokens = prompt(90, 10)
    with llm.conversation() as conversation:

        def say(text: list[int]) -> int:
            out = conversation.generate(text, GREEDY)
            assert out.token_ids == greedy(text)
            return out.stats.reused

        assert say(tokens) == 0
        assert say([*tokens[:83], 1, 2]) == 83
        assert say([*tokens[:30], 3, 4, 5]) == 24, "a copy lies at every eighth token"
        assert say([*tokens[:7], 6]) == 0


def test_requests_that_begin_alike_share_what_one_has_read() -> None:
    begin = prompt(70, 11)
    prompts = [[*begin, *prompt(6, seed)] for seed in (12, 13, 14)]
    found = llm_with().generate(prompts, GREEDY)
    assert [out.token_ids for out in found] == [greedy(tokens) for tokens in prompts]
    assert sum(out.stats.reused for out in found) >= 2 * 64


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options", [{"cache": "h2o[local=4]", "kv_budget": 200}, {"cache": "quant-8[residual=200]"}, {"exact": True}]
)
def test_with_other_options_of_the_cache(options: dict[str, Any]) -> None:
    """Budgets that everything fits in: eviction boundaries come, and nothing is lost."""
    texts = [greedy(tokens) for tokens in PROMPTS]
    llm = llm_with(Branching(texts_of(PROMPTS, texts), "sometimes", VOCAB), **options)
    assert [out.token_ids for out in llm.generate(PROMPTS, GREEDY)] == texts


def test_a_loaded_folder_is_not_needed(tmp_path: Path) -> None:
    """The user's own model still runs by its own forward, and has no state of ours."""
    model = model_of()
    before = logits_of(PROMPTS[0])
    llm_with().generate(PROMPTS[:1], GREEDY)
    assert "forward" not in vars(model.model.layers[1].mixer) and model.model.layers[2].self_attn.layer_idx == 2
    assert torch.equal(logits_of(PROMPTS[0]), before)

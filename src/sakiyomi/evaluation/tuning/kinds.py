"""Chooses what to train for a target: the kind of drafter and its draft vocabulary, by predicted speed on this machine.

The rule. Of every kind, vocabulary and chain length the speed-up is predicted (`theory.round_speedup`) from

- acceptance by place, as `LEARNT` has it of each kind, times the share of the target's own answers that the draft
  vocabulary covers;
- the target's passes by rows, as measured here;
- the time of a draft step: its weights at the speed at which the target's plain pass reads its own, and `LAUNCH`.

The best prediction is chosen. With 49k to 262k tokens the head over the vocabulary is most of a draft step. That of
an EAGLE head, a block drafter or Medusa heads can be cut; a draft model has all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sakiyomi import theory
from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.tuning.lines import between
from sakiyomi.train.commands import TrainBlock, TrainMedusa
from sakiyomi.train.data import Ids

LEARNT = {
    "eagle": (0.66, 0.64, 0.62, 0.60, 0.58, 0.56, 0.54),
    "block": (0.62, 0.44, 0.34, 0.28, 0.24, 0.21, 0.19),
    "medusa": (0.52, 0.33, 0.22, 0.16),
    "draft": (0.52, 0.52, 0.52, 0.52, 0.52, 0.52, 0.52),
}
"""Chance that the k-th draft token is right if those before it are, after some 300,000 tokens of training: smoothed
figures of benchmarks/log/heads-eagle-block-mtp.md and training.md."""
CUT = ("eagle", "block", "medusa")
"""Kinds whose vocabulary can be cut."""
VOCABULARIES = (2048, 4096, 8192, 16384, 32768, 65536)
LAUNCH, REST = 0.0004, 0.0006
"""Seconds of a draft step, and of a round outside the passes, that depend on no weights: measured on two cores."""
ROWS = (1, 2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class Costs:
    """What a round costs here, in plain target passes.

    Attributes:
        plain: seconds of a plain pass.
        passes: by rows.
        weight: seconds for one weight of a plain pass.
    """

    plain: float
    passes: Mapping[int, float]
    weight: float

    @classmethod
    def of(cls, seconds: Mapping[int, float], weights: float) -> Costs:
        """From seconds of passes by rows, and the weights that each reads."""
        plain = seconds[1]
        return cls(plain, {rows: some / plain for rows, some in seconds.items()}, plain / weights)

    def verify(self, rows: int) -> float:
        """A pass over so many rows; never less than one over one."""
        return max(between(sorted(self.passes.items()), rows), 1.0)

    def best(self, alphas: Sequence[float], draft: Callable[[int], float]) -> tuple[float, int]:
        """The largest speed-up and its chain length; 0: no draft is faster.

        Args:
            alphas: acceptance by place.
            draft: seconds of drafting a chain of so many tokens.
        """
        found = [(1.0, 0)]
        for gamma in range(1, len(alphas) + 1):
            tokens = theory.expected_chain_tokens(alphas, gamma)
            rest = REST / self.plain
            found.append((theory.round_speedup(tokens, draft(gamma) / self.plain, self.verify(gamma + 1), rest), gamma))
        return max(found)


@dataclass(frozen=True)
class Choice:
    """What is trained.

    Attributes:
        kind: see `LEARNT`.
        draft_vocab: tokens that it proposes; 0: all.
        covered: share of the target's answers that these are.
        step: seconds of a draft step; of kinds with one pass for all tokens, of that pass.
        gamma, speedup: the best prediction.
        parallel: all tokens come from one pass.
    """

    kind: str
    draft_vocab: int
    covered: float
    step: float
    gamma: int
    speedup: float
    parallel: bool

    def seconds(self, gamma: int) -> float:
        """Time of drafting a chain of so many tokens."""
        return self.step * (1 if self.parallel else gamma)


def weights_of(config: Any, vocab: int) -> float:
    """Weights that a plain pass of a target reads, about: layers like Llama's, and the head over the vocabulary."""
    return float(config.num_hidden_layers) * _layer(config) + float(config.hidden_size) * vocab


def _layer(config: Any, reads: int = 1) -> float:
    """Weights of a decoder layer whose attention reads so many hidden states side by side."""
    wide, heads = int(config.hidden_size), int(getattr(config, "num_attention_heads", None) or 1)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head = int(getattr(config, "head_dim", None) or wide // heads)
    middle = int(getattr(config, "intermediate_size", None) or 4 * wide)
    return reads * wide * head * (heads + 2 * kv_heads) + wide * head * heads + 3 * wide * middle


def step_weights(kind: str, config: Any, vocab: int) -> float:
    """Weights that a draft step reads.

    Args:
        kind: see `LEARNT`.
        config: of the target.
        vocab: tokens that are proposed.
    """
    wide, whole = int(config.hidden_size), float(config.num_hidden_layers) * _layer(config)
    if kind == "eagle":
        return _layer(config, 2) + wide * vocab
    if kind == "block":
        return TrainBlock.layers * _layer(config) + wide * vocab
    if kind == "medusa":
        return TrainMedusa.heads * wide * wide + wide * vocab
    return min((whole + wide * vocab) / 6, whole / 6 + min(wide / 2, 192.0) * vocab)


def coverage(answers: Sequence[Ids], vocab: int, sizes: Sequence[int]) -> dict[int, float]:
    """Share of the last fifth of the answers' tokens that the most frequent tokens of the others cover, by size.

    Of tokens that occur equally often, or never, the lower ids come first: vocabularies made of pairs (BPE) number
    tokens by the frequency in the text that they were made of. `train.draft_vocab` chooses in the same order.
    """
    at = max(1, len(answers) - len(answers) // 5)
    known, asked = np.concatenate(answers[:at]), np.concatenate(answers[at:] or answers)
    order = np.argsort(-np.bincount(known, minlength=vocab), kind="stable")
    return {size: float(np.isin(asked, order[:size]).mean()) for size in sizes}


def choose(costs: Costs, config: Any, vocab: int, answers: Sequence[Ids], kind: str = "auto") -> list[Choice]:
    """What to train, the best prediction first, one entry a kind.

    Args:
        costs: measured here.
        config: of the target.
        vocab: its tokens.
        answers: token ids of texts that it wrote.
        kind: the only one that is considered; "auto": all.

    Raises:
        InputError: there are no answers.
    """
    if not answers:
        raise InputError("the target has written nothing to learn from; give more --train minutes")
    covered = coverage(answers, vocab, [size for size in VOCABULARIES if size < vocab]) | {0: 1.0}
    found = [
        _predicted(one, size, share, costs, config, vocab)
        for one in (LEARNT if kind == "auto" else (kind,))
        for size, share in covered.items()
        if one in CUT or not size
    ]
    found.sort(key=lambda one: one.speedup, reverse=True)
    best: dict[str, Choice] = {}
    for one in found:
        best.setdefault(one.kind, one)
    return list(best.values())


def _predicted(kind: str, size: int, covered: float, costs: Costs, config: Any, vocab: int) -> Choice:
    parallel = kind in ("block", "medusa")
    step = LAUNCH + costs.weight * step_weights(kind, config, size or vocab)
    choice = Choice(kind, size, covered, step, 0, 1.0, parallel)
    speedup, gamma = costs.best([covered * alpha for alpha in LEARNT[kind]], choice.seconds)
    return replace(choice, gamma=gamma, speedup=speedup)


def told(choices: Sequence[Choice], costs: Costs) -> str:
    """In one line what was chosen, and why."""
    best, others = choices[0], choices[1:]
    what = {"eagle": "an EAGLE head", "block": "a block drafter", "medusa": "Medusa heads", "draft": "a small model"}
    name = what[best.kind]
    if best.draft_vocab:
        name += f" that proposes {best.draft_vocab} tokens ({best.covered:.1%} of the answers)"
    line = f"training {name}: a step costs {best.step / costs.plain:.2f} of a pass, predicted {best.speedup:.2f}x"
    if others:
        line += " (" + ", ".join(f"{what[one.kind].split(' ', 1)[-1]} {one.speedup:.2f}x" for one in others) + ")"
    return line

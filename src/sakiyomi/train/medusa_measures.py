"""What a run of Medusa heads is measured by: losses by head, ranks of the target's tokens, trees, time and memory."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sakiyomi.core.memory import readable
from sakiyomi.drafters.medusa_heads.backbone import Backbone
from sakiyomi.drafters.medusa_heads.heads import MedusaHeads
from sakiyomi.drafters.medusa_heads.ranks import Ranks, rank_texts
from sakiyomi.theory import expected_tree_tokens
from sakiyomi.train.acceptance import Continuations
from sakiyomi.train.checkpoint import writing
from sakiyomi.train.commands import TrainMedusa
from sakiyomi.train.samples import whole_lines

BUDGETS = (4, 8, 16, 32, 64)
"""Nodes of the trees in the report."""
SHOWN = 5  # first guesses whose accuracy is reported


class HeadLog:
    """The means of each head at every step, a line each in a file that a resumed run continues.

    A line has ``step``, ``loss`` (K) in nats and, where it is known, ``top`` (K, 5): the share of places whose token
    was among a head's first 1, 2, ... 5 guesses.

    Args:
        path: of the file.
        resume: continue it.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self._path = path
        self._fresh: list[list[float]] = []
        with writing(path):
            if resume:
                whole_lines(path)  # a last line that was cut off is removed
            self._file = path.open("a" if resume else "w", encoding="utf-8", buffering=1)

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # of a full disk, which was said when the line was written
            self._file.close()

    def add(self, step: int, means: Tensor) -> None:
        """The next step's: (K) losses, or (K, 1 + 5) with the shares behind them."""
        rounded = [[round(value, 5) for value in each] for each in means.reshape(len(means), -1).tolist()]
        self._fresh.append([loss for loss, *_ in rounded])
        line: dict[str, Any] = {"step": step, "loss": self._fresh[-1]}
        if means.dim() > 1:
            line["top"] = [tops for _, *tops in rounded]
        with writing(self._path):
            self._file.write(json.dumps(line) + "\n")

    def recent(self) -> list[float]:
        """Mean losses over the steps since this was asked last."""
        found = np.mean(self._fresh, axis=0).tolist() if self._fresh else []
        self._fresh = []
        return list(found)

    def curve(self, key: str = "loss", most: int = 200) -> list[tuple[int, list[Any]]]:
        """Means over so many steps that a curve has few points; ``key``: loss or top."""
        lines = self._path.read_text(encoding="utf-8").splitlines()
        # Steps behind the checkpoint that a run was resumed from were made again: the later line counts.
        steps = {entry["step"]: entry[key] for entry in map(json.loads, lines) if key in entry}
        means = sorted(steps.items())
        size = max(1, -(-len(means) // most))
        pieces = [means[at : at + size] for at in range(0, len(means), size)]
        return [(piece[-1][0] + 1, np.mean([each for _, each in piece], axis=0).tolist()) for piece in pieces]


def rank_answers(heads: MedusaHeads, backbone: Backbone, texts: Continuations) -> Ranks:
    """Where the target's own tokens stand among the heads' guesses."""
    weight = backbone.weight.to(heads.weights.dtype)

    def hidden_of(ids: Sequence[int]) -> Tensor:
        return backbone(torch.tensor([list(ids)], device=weight.device))[0].to(weight.dtype)

    return rank_texts(hidden_of, lambda hidden: heads(hidden, weight), texts.prompts, texts.greedy)


def measured(ranks: Ranks) -> dict[str, float]:
    """Accuracies of each head, and what its best tree of 16 nodes brings."""
    found: dict[str, float] = {}
    for head, chances in enumerate(ranks.accuracies(), start=1):
        for top in range(1, SHOWN + 1):
            found[f"head_{head}_top_{top}"] = sum(chances[:top])
    found["tau_16_nodes"] = ranks.replay(ranks.best(16))
    found["tokens"] = ranks.places
    return found


def best_trees(ranks: Ranks) -> list[dict[str, Any]]:
    """The best tree of each budget: what the accuracies say of it, and what these texts do."""
    return [
        {
            "nodes": nodes,
            "expected_tau": expected_tree_tokens(ranks.accuracies(), paths),
            "replayed_tau": ranks.replay(paths),
            "choices": [list(path) for path in paths],
        }
        for nodes in BUDGETS
        for paths in [ranks.best(nodes)]
    ]


def memory(
    config: TrainMedusa, target: nn.Module, heads: MedusaHeads, adapters: int, device: torch.device
) -> dict[str, Any]:
    """What the run held at most, and what of it must be."""
    frozen = sum(weight.nbytes for weight in target.parameters())
    trained = sum(weight.numel() * 4 for weight in heads.parameters())
    row = next(target.parameters()).element_size() * int(heads.shape.hidden_size)
    states = config.loop.step_tokens * row
    kept = int(config.loop.step_tokens * config.positions) * row * heads.shape.heads
    peak = (
        torch.cuda.max_memory_allocated(device)
        if device.type == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    )
    parts = {
        "target": frozen,
        "heads": trained,
        "adapters": adapters,
        "gradients": trained + adapters,
        "optimizer": 2 * (trained + adapters),
        "hidden_states": states,
        "head_activations": 4 * kept,
    }
    where = "on the device" if device.type == "cuda" else "of the process, torch itself and its compiler included"
    own = f"adapters with both {readable(4 * adapters)} beside what their passes keep for gradients, " * bool(adapters)
    explained = (
        f"memory: {readable(peak)} at most {where}; of these the target {readable(frozen)}, without gradients or "
        f"optimizer state, heads with both {readable(4 * trained)}, {own}a batch's hidden states {readable(states)} "
        f"and what heads make of them about {readable(4 * kept)}"
    )
    return {"peak": peak, "parts": parts, "explained": explained}

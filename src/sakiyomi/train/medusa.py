"""Train Medusa heads on a frozen target, or together with low-rank adapters of it.

Cai et al. 2024, arXiv 2401.10774, section 2.2. Head k, counted from 0, reads the hidden state of token t and learns
token t + k + 2; the one in between is the target's own.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from sakiyomi.core.errors import InputError
from sakiyomi.core.memory import readable
from sakiyomi.drafters.head_model import over_vocabulary
from sakiyomi.drafters.medusa_heads.backbone import Backbone
from sakiyomi.drafters.medusa_heads.formats import write_heads
from sakiyomi.drafters.medusa_heads.heads import HeadsShape, MedusaHeads
from sakiyomi.drafters.medusa_heads.ranks import Ranks, rank_texts
from sakiyomi.drafters.medusa_heads.tuned import FILE as TUNED
from sakiyomi.engine.llm import LLM
from sakiyomi.theory import expected_tree_tokens
from sakiyomi.train.acceptance import NEW_TOKENS, PROMPT_TOKENS, Continuations, continuations
from sakiyomi.train.checkpoint import writing
from sakiyomi.train.commands import TrainMedusa
from sakiyomi.train.counted import Library
from sakiyomi.train.data import TextSpec, parse_texts
from sakiyomi.train.draft_vocab import check_draft_vocab, frequent, proposing
from sakiyomi.train.export import Result, model_folder
from sakiyomi.train.hidden import HiddenStates, vocabulary
from sakiyomi.train.loop import Watch, compile_layers, place
from sakiyomi.train.medusa_joint import Joint, guess_loss, save_tuned
from sakiyomi.train.optim import with_peaks
from sakiyomi.train.plot import plot_heads
from sakiyomi.train.progress import HeadLog
from sakiyomi.train.recipe import Recipe, train
from sakiyomi.train.rows import FixedRows, mixture_of
from sakiyomi.train.taught import held_out_prompts, load_target

BUDGETS = (4, 8, 16, 32, 64)
"""Nodes of the trees in the report."""
SHOWN = 5  # first guesses whose accuracy is reported
SHORTEST_VALID = 8
"""Tokens of the shortest held-out text of a file; it is a prompt as a whole."""


def train_medusa(config: TrainMedusa, command: str = "", watch: Watch | None = None) -> dict[str, Any]:
    """Run `sakiyomi train medusa`, see `recipe.train`."""
    return train(_Medusa(config), command, watch)


class _Medusa(Recipe[TrainMedusa]):
    """Heads learn the tokens after the target's own, from the target's hidden states."""

    def files(self) -> list[TextSpec]:
        """See `Recipe`."""
        return parse_texts("--data", self.config.data)

    def check(self) -> None:
        """See `Recipe`."""
        super().check()
        self.device, self.passes = place(self.config.machine)

    def read(self) -> None:
        """See `Recipe`; the target answers the held-out prompts."""
        config = self.config
        self.target, self.tokenizer = load_target(config.target, self.passes, self.device)
        vocab = vocabulary(self.target)
        check_draft_vocab(config.draft_vocab, config.target, vocab)
        library = Library(self.tokenizer, vocab, marked=True)
        paths = [spec.path for spec in self.specs]
        longer_than = SHORTEST_VALID - 1 if self.valid else PROMPT_TOKENS
        held = library.held_out(self.valid, paths, config.eval_prompts, longer_than, config.loop.seed)
        texts = [library.documents(path) for path in paths]
        for path, documents in zip(paths, texts, strict=True):
            counted = sum(int((document >= 0).sum()) for document in documents)
            if counted <= config.heads + 1:
                raise InputError(
                    f"{path} has {counted} tokens that count; {config.heads} heads learn from texts of more than "
                    f"{config.heads + 1}: give more text, or fewer --heads"
                )
        self.held_back = 0 if self.valid else sum(map(len, held.values()))
        self.reporter.note(f"{config.target} answers {sum(map(len, held.values()))} held-out prompts")
        self.held = held
        self.texts = self._answers() if self.workers.leads else {}
        self.known = frequent(config.draft_vocab, self.specs, texts, vocab)
        self.mixture = mixture_of(self.specs, texts, partial(FixedRows, length=config.loop.row), config.loop.seed)

    def _answers(self) -> dict[str, Continuations]:
        """What the target writes after held-out prompts, greedily."""
        llm = LLM((self.target, self.tokenizer), "none", compile=False, max_batch=16)
        prompts = held_out_prompts(self.held, llm.max_context)
        return {name: continuations(llm, some, new_tokens=NEW_TOKENS, sampled=False) for name, some in prompts.items()}

    def make(self) -> nn.Module:
        """See `Recipe`."""
        config, target, out = self.config, self.target, Path(self.config.loop.out)
        self.backbone = backbone = Backbone(target)
        rows = backbone.weight if self.known is None else backbone.weight[self.known.to(self.device)]
        # Of a cut vocabulary the heads share the target's rows, unless each has its own.
        own_heads = config.heads if config.own_head else int(self.known is not None)
        shape = HeadsShape(config.heads, config.layers, rows.shape[1], len(rows), own_heads)
        self.heads = MedusaHeads(shape).to(self.device)
        self.heads.begin_from(rows)
        self.heads.token_map = None if self.known is None else self.known.to(self.device)
        if self.heads.own is not None:
            self.heads.own.requires_grad_(config.own_head)
        if not config.joint.joint:
            compile_layers(target, config.loop.compile)
        self.joint = Joint(config, target, self.heads) if config.joint.joint else None
        self.hidden = HiddenStates(backbone, out, int(config.cache_gib * 2**30))
        self.log = HeadLog(self.workers.log(out / "heads.jsonl"), config.loop.resume)
        return self.joint or self.heads

    def loss(self, model: Any, rows: Tensor) -> Tensor:
        """See `Recipe`."""
        config, step = self.config, self.loop.progress.step
        if self.joint is not None and self.loop.share >= config.joint.heads_first:
            loss, each = self.joint.loss(rows, step, self.workers)
        else:
            hidden = self.hidden(torch.where(rows < 0, ~rows, rows)[:, :-1])
            loss, each = guess_loss(config, self.heads, hidden, rows, self.backbone.weight, step, self.workers)
        self.log.add(step, self.workers.mean(each))
        return loss

    def optimizers(self, model: nn.Module) -> list[Optimizer]:
        """See `Recipe`; heads may learn faster than the target."""
        config, own = self.config, [weight for weight in self.heads.parameters() if weight.requires_grad]
        others = [weight for weight in model.parameters() if weight.requires_grad and all(weight is not w for w in own)]
        times = config.joint.head_lr_times if config.joint.joint else 1.0
        groups: list[dict[str, Any]] = [{"params": own, "lr": config.lr * times}]
        if others:
            groups.append({"params": others, "lr": config.lr})
        return with_peaks([AdamW(groups, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True)])

    def measures(self, model: Any) -> dict[str, dict[str, float]]:
        """See `Recipe`."""
        losses = {f"head_{head}_loss": loss for head, loss in enumerate(self.log.recent(), start=1)}
        ranks = self._ranks()
        if self.workers.leads:
            self._draw(ranks, Path(self.config.loop.out) / "heads.png")
        return {name: losses | measured(found) for name, found in ranks.items()}

    def _ranks(self) -> dict[str, Ranks]:
        return {name: rank_answers(self.heads, self.backbone, some) for name, some in self.texts.items()}

    def _draw(self, ranks: Mapping[str, Ranks], path: Path) -> bool:
        """The curves up to here; False without matplotlib."""
        accuracies = {name: found.accuracies() for name, found in ranks.items()}
        with writing(path):
            return plot_heads(self.log.curve(), accuracies, path, tops=self.log.curve("top"))

    def hooks(self) -> AbstractContextManager[object]:
        """See `Recipe`."""
        stack = ExitStack()
        stack.enter_context(closing(self.hidden))
        stack.enter_context(closing(self.log))
        return stack

    def finish(self) -> Result:
        """See `Recipe`."""
        config, heads, base = self.config, self.heads, self.config.target
        adapters = 0
        if self.joint is not None:
            base = str(Path(config.loop.out) / "target")
            adapters = self.joint.adapter_bytes
            self.target = self.joint.merged().eval()
            self.backbone = Backbone(self.target)
            save_tuned(self.target, self.tokenizer, Path(base))
            self.texts = self._answers()
        folder = model_folder(config)
        with writing(folder):
            write_heads(heads.bfloat16(), folder, "medusa" if self.known is None else "vllm", base=base)
            (folder / TUNED).unlink(missing_ok=True)  # of heads that are no longer there
            ranks = self._ranks()
            drawn = self._draw(ranks, folder / "accuracy.png")
        held = memory(config, self.target, heads, adapters, self.device)
        self.reporter.note(held["explained"])
        whose = base + proposing(self.known)
        kind = "with heads over the vocabulary of their own" if config.own_head else "on the target's own head"
        blocks = "residual block" + "s" * (config.layers > 1)
        more = {
            "about": f"{config.heads} Medusa heads of {config.layers} {blocks} {kind}, for {whose}",
            "measured_on": f"On what {base} answers to held-out prompts, greedily: head k is right where its guess is "
            "what the target writes k tokens after its own.",
            "held_back": self.held_back,
            "base": base,
            "trees": {name: best_trees(found) for name, found in ranks.items()},
            "accuracies": {name: found.accuracies() for name, found in ranks.items()},
            "accuracy_curve": "accuracy.png" if drawn else None,
            "memory": held,
            "rows_from_disk": self.hidden.found,
        }
        measures = {name: measured(found) for name, found in ranks.items()}
        return Result(heads, config.layers, measures, self.loop.epochs(self.specs), more)


# ---------------------------------------------------------------- measures


def rank_answers(heads: MedusaHeads, backbone: Backbone, texts: Continuations) -> Ranks:
    """Where the target's own tokens stand among the heads' guesses."""
    weight = backbone.weight.to(heads.weights.dtype)

    def hidden_of(ids: Sequence[int]) -> Tensor:
        return backbone(torch.tensor([list(ids)], device=weight.device))[0].to(weight.dtype)

    def guess(hidden: Tensor) -> Tensor:
        return over_vocabulary(heads(hidden, weight), heads.token_map, len(weight))

    return rank_texts(hidden_of, guess, texts.prompts, texts.greedy)


def measured(ranks: Ranks) -> dict[str, float]:
    """Accuracies of each head, and tau of the best tree of 16 nodes."""
    found: dict[str, float] = {}
    for head, chances in enumerate(ranks.accuracies(), start=1):
        for top in range(1, SHOWN + 1):
            found[f"head_{head}_top_{top}"] = sum(chances[:top])
    found["tau_16_nodes"] = ranks.replay(ranks.best(16))
    found["tokens"] = ranks.places
    return found


def best_trees(ranks: Ranks) -> list[dict[str, Any]]:
    """The best tree of each budget, with tau expected from the accuracies and tau replayed on these texts."""
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
    """Peak memory of the run, and the sizes of its parts, in bytes."""
    frozen = sum(weight.nbytes for weight in target.parameters())
    own = sum(weight.numel() * 4 for weight in heads.parameters())
    trained = sum(weight.numel() * 4 for weight in heads.parameters() if weight.requires_grad)
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
        "heads": own,
        "adapters": adapters,
        "gradients": trained + adapters,
        "optimizer": 2 * (trained + adapters),
        "hidden_states": states,
        "head_activations": 4 * kept,
    }
    where = "on the device" if device.type == "cuda" else "of the process, torch itself and its compiler included"
    shown = ", ".join(f"{name.replace('_', ' ')} {readable(size)}" for name, size in parts.items() if size)
    explained = f"memory: {readable(peak)} at most {where}; of these by count: {shown}"
    return {"peak": peak, "parts": parts, "explained": explained}

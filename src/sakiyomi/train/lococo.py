"""`sakiyomi train lococo`: convolutions that merge what a cache drops, beside a frozen target.

Cai et al. 2024, arXiv 2406.05317, section 4: the language model's own loss on what comes behind chunks whose keys and
values were merged; nothing but the convolutions is trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from sakiyomi.cache.policies.merging.convolutions import Convolutions, MergingShape
from sakiyomi.cache.policies.merging.formats import rounded, write_merging
from sakiyomi.cache.policies.retaining.formats import fingerprint
from sakiyomi.model_executor.loading.model import parse_device
from sakiyomi.train.answered import split_rows
from sakiyomi.train.compressed import Compressed, policy_of
from sakiyomi.train.config import LococoConfig
from sakiyomi.train.data import parse_text
from sakiyomi.train.draft import load_target
from sakiyomi.train.export import model_folder, write_card
from sakiyomi.train.loop import Loop, accelerator, compiled_loss, on_device
from sakiyomi.train.optim import with_peaks
from sakiyomi.train.prompts import check_prompts, read_prompts
from sakiyomi.train.report import Reporter
from sakiyomi.train.writing import writing

__all__ = ["MergingLoss", "train_lococo"]


def train_lococo(config: LococoConfig, command: str = "") -> dict[str, Any]:
    """Run `sakiyomi train lococo`.

    Args:
        config: the settings.
        command: the command line, for the card.

    Returns:
        The summary that `--json` prints; `finished` is False after SIGINT.

    Raises:
        InputError, LoadError, UnsupportedError: before any work is done, where that is possible.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    parse_device(config.device)
    policy = policy_of(config.scores, config.kv_budget, config.merged)
    check_prompts(config)
    device = accelerator(config.device, config.precision).device
    target, tokenizer = load_target(config.target)
    nn.Module.to(target, device, torch.float32 if config.precision == "no" else target.dtype)
    reporter = Reporter(config.log_seconds)
    given = read_prompts(config, target, tokenizer, reporter, marked=True)
    questions = given.questions
    checked = {name: on_device(batch, device) for name, batch in given.held_out.items()}
    torch.manual_seed(config.seed)
    compressed = Compressed(target, policy, config.kv_budget, config.chunk_size)
    shape = MergingShape(
        tuple((layer.key_dim, layer.value_dim) for layer in compressed.shapes),
        tuple(layer.heads for layer in compressed.shapes),
        config.merged,
        config.kernel,
        config.again,
    )
    convolutions = Convolutions(shape, norm=config.norm).to(device)
    loss = MergingLoss(config, compressed, convolutions)
    whole = MergingLoss(config, Compressed(target, policy, 0, config.chunk_size), None)
    with compressed.listening():
        beside = {name: {"dropped": loss.measure(batch, None)} for name, batch in checked.items()}
    with whole.passes.listening():
        for name, batch in checked.items():
            beside[name]["full"] = whole.measure(batch, None)

    def measures(_: Any = None) -> dict[str, dict[str, float]]:
        return {
            name: {"nats_per_token": loss.measure(batch, convolutions)} | beside[name]
            for name, batch in checked.items()
        }

    loop = Loop(
        config,
        convolutions,
        lambda _, batch: loss(batch),
        questions,
        measures,
        optimizers=_optimizers(config),
        device=str(device),
        precision=config.precision,
        warmup_share=config.warmup_share,
    )
    folder = model_folder(config)
    with compressed.listening():
        if not loop.run():
            return {"finished": False, "out": config.out, "step": loop.progress.step, "tokens": questions.tokens}
        with writing(folder):
            write_merging(
                rounded(convolutions),
                folder,
                base=config.target,
                recipe=_recipe(config),
                fingerprint=fingerprint(target, tokenizer),
            )
        found = measures()
    return write_card(
        config,
        convolutions,
        dataclasses.replace(loop.progress, tokens=questions.tokens),
        found,
        command,
        given.epochs(),
        about=f"Convolutions (LoCoCo) that merge what a cache of {config.target} drops into {config.merged} pairs of "
        f"each head in its {len(shape.dims)} layers",
        measured_on=f"Losses of held-out answers behind a prompt of which {config.kv_budget} pairs stay, chosen by "
        f"`{policy.name}`: with {config.merged} of them merged, with what goes `dropped`, and with everything kept "
        "(`full`).",
        tasks=given.tasks,
        held_back=given.held_back,
        base=config.target,
    )


def _recipe(config: LococoConfig) -> dict[str, Any]:
    """What a user of the convolutions may have to know of their training."""
    names = ("scores", "kv_budget", "chunk_size", "norm", "tasks", "text_weight", "seed")
    data = [Path(parse_text(spec).path).name for spec in config.data]
    return {name: getattr(config, name) for name in names} | {"data": data, "row_tokens": list(config.row_tokens)}


def _optimizers(config: LococoConfig) -> Callable[[nn.Module], list[Optimizer]]:
    def make(model: nn.Module) -> list[Optimizer]:
        betas = (config.beta1, config.beta2)
        return with_peaks(
            [AdamW(model.parameters(), lr=config.lr, betas=betas, weight_decay=config.weight_decay, fused=True)]
        )

    return make


class MergingLoss:
    """The target's loss on rows whose beginning was merged.

    Args:
        config: of the run.
        passes: of the target.
        convolutions: being trained; None: nothing is merged.
    """

    def __init__(self, config: LococoConfig, passes: Compressed, convolutions: Convolutions | None) -> None:
        self._text_weight, self._first = config.text_weight, config.chunk_size
        self.passes, self._convolutions = passes, convolutions
        self._nats = compiled_loss(_nats, config.compile, dynamic=True)

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean loss of a batch's rows, without gradient: that is in the convolutions already, row by row.

        Args:
            batch: rows as `Questions` gives them, with marks.
        """
        rows = split_rows(batch)
        total = torch.zeros((), device=batch["ids"].device)
        for ids, prompt in rows:
            loss = self._row(ids, prompt, self._convolutions) / len(rows)
            if loss.requires_grad:  # not where a prompt fits into the budget
                loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def measure(self, batch: dict[str, Tensor], convolutions: Convolutions | None) -> float:
        """Mean loss of a batch's rows, in nats per token."""
        rows = split_rows(batch)
        return sum(float(self._row(ids, prompt, convolutions)) for ids, prompt in rows) / len(rows)

    def _row(self, marked: Tensor, prompt: int, convolutions: Convolutions | None) -> Tensor:
        ids = torch.where(marked < 0, ~marked, marked)
        places = torch.arange(len(ids), device=ids.device)
        weights = torch.where(places < prompt, self._text_weight, 1.0) * (marked >= 0) * (places > self._first)
        losses, counted = [], weights.sum().clamp(min=1e-6)
        for first, hidden in self.passes(ids, prompt, convolutions):
            following = slice(first + 1, first + 1 + len(hidden))
            own, wanted = weights[following], ids[following]
            asked = own.nonzero()[:, 0]  # logits of other rows are nobody's concern
            losses.append((self._nats(hidden[asked], self.passes.head, wanted[asked]) * own[asked]).sum())
        return torch.stack(losses).sum() / counted


def _nats(hidden: Tensor, head: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head.to(hidden.dtype)).float(), wanted, reduction="none")

"""Train Medusa heads on a frozen target, or together with low-rank adapters of it.

Cai et al. 2024, arXiv 2401.10774, section 2.2. Head k, counted from 0, reads the hidden state of token t and learns
token t + k + 2; the one in between is the target's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from sakiyomi.core.errors import InputError
from sakiyomi.drafters.medusa_heads.backbone import Backbone
from sakiyomi.drafters.medusa_heads.formats import write_heads
from sakiyomi.drafters.medusa_heads.heads import HeadsShape, MedusaHeads
from sakiyomi.drafters.medusa_heads.ranks import Ranks
from sakiyomi.drafters.medusa_heads.tuned import FILE as TUNED
from sakiyomi.engine.llm import LLM
from sakiyomi.model_executor.loading.model import parse_device
from sakiyomi.train.acceptance import NEW_TOKENS, PROMPT_TOKENS
from sakiyomi.train.commands import TrainMedusa
from sakiyomi.train.config import passes_on
from sakiyomi.train.counted import read_counted
from sakiyomi.train.data import Ids, hold_back, parse_texts
from sakiyomi.train.evaluate import parse_valid
from sakiyomi.train.export import Result, model_folder
from sakiyomi.train.hidden import HiddenStates
from sakiyomi.train.labels import vocabulary
from sakiyomi.train.loop import Loop, accelerator, compile_layers
from sakiyomi.train.medusa_joint import Joint, guess_loss, save_tuned
from sakiyomi.train.medusa_measures import Answers, HeadLog, best_trees, measured, memory, rank_answers, throughput
from sakiyomi.train.optim import with_peaks
from sakiyomi.train.plot import plot_heads
from sakiyomi.train.preflight import check_run
from sakiyomi.train.recipe import Recipe, train
from sakiyomi.train.rows import FixedRows, mixture_of
from sakiyomi.train.samples import prompt_of, sample_continuations
from sakiyomi.train.taught import load_target
from sakiyomi.train.writing import writing

__all__ = ["guess_loss", "train_medusa"]


def train_medusa(config: TrainMedusa, command: str = "") -> dict[str, Any]:
    """Run `sakiyomi train medusa`, see `recipe.train`."""
    return train(_Medusa(config), command)


class _Medusa(Recipe[TrainMedusa]):
    """Heads learn the tokens behind the target's own, from the target's hidden states."""

    def check(self) -> None:
        """See `Recipe`."""
        config = self.config
        self.specs, self.valid = parse_texts("--data", config.data), parse_valid(config.loop.valid)
        check_run(config, [])
        self.device, self.passes = _device(config)

    def read(self) -> None:
        """See `Recipe`; the target answers the held-out prompts."""
        config = self.config
        self.target, self.tokenizer = load_target(config.target, self.passes)
        vocab = vocabulary(self.target)
        self.files = {spec.path: read_counted(spec.path, self.tokenizer, vocab) for spec in self.specs}
        valid = {name: read_counted(path, self.tokenizer, vocab) for name, path in self.valid.items()}
        self.prompts = _held_out(config, self.files, valid)
        for path, documents in self.files.items():
            _check_length(config, path, documents)
        self.reporter.note(f"{config.target} answers {sum(map(len, self.prompts.values()))} held-out prompts")
        nn.Module.to(self.target, self.device)
        self.texts = _answers(self.target, self.tokenizer, self.prompts) if self.workers.leads else {}

    def loop(self) -> Loop:
        """See `Recipe`."""
        config, target, out = self.config, self.target, Path(self.config.loop.out)
        self.backbone = backbone = Backbone(target)
        own_heads = config.heads * config.own_head
        shape = HeadsShape(config.heads, config.layers, backbone.weight.shape[1], vocabulary(target), own_heads)
        self.heads = heads = MedusaHeads(shape).to(self.device)
        heads.begin_from(backbone.weight)
        if not config.joint.joint:
            compile_layers(target, config.loop.compile)
        self.joint = Joint(config, target, heads) if config.joint.joint else None
        self.hidden = HiddenStates(backbone, out, int(config.cache_gib * 2**30))
        rows = partial(FixedRows, length=config.loop.row)
        self.log = HeadLog(self.workers.log(out / "heads.jsonl"), config.loop.resume)

        def batch_loss(_: nn.Module, rows: Tensor) -> Tensor:
            step = loop.progress.step
            if self.joint is not None and loop.share >= config.joint.heads_first:
                loss, each = self.joint.loss(rows, step, self.workers)
            else:
                ids = torch.where(rows < 0, ~rows, rows)
                hidden = self.hidden(ids[:, :-1])
                loss, each = guess_loss(config, heads, hidden, rows, backbone.weight, step, self.workers)
            self.log.add(step, self.workers.mean(each))
            return loss

        loop = Loop(
            config,
            heads if self.joint is None else self.joint,
            batch_loss,
            mixture_of(self.specs, [self.files[spec.path] for spec in self.specs], rows, config.loop.seed),
            self._measures,
            optimizers=_optimizers(config, heads),
            device=str(self.device),
            precision=self.passes,
        )
        return loop

    def _measures(self, _: nn.Module) -> dict[str, dict[str, float]]:
        losses = {f"head_{head}_loss": loss for head, loss in enumerate(self.log.recent(), start=1)}
        ranks = {name: rank_answers(self.heads, self.backbone, some) for name, some in self.texts.items()}
        if self.workers.leads:
            self._draw(ranks, Path(self.config.loop.out) / "heads.png")
        return {name: losses | measured(found) for name, found in ranks.items()}

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

    def finish(self, loop: Loop) -> Result:
        """See `Recipe`."""
        config, heads, base = self.config, self.heads, self.config.target
        adapters = 0
        if self.joint is not None:
            base = str(Path(config.loop.out) / "target")
            adapters = self.joint.adapter_bytes
            self.target = self.joint.merged().eval()
            self.backbone = Backbone(self.target)
            save_tuned(self.target, self.tokenizer, Path(base))
            self.texts = _answers(self.target, self.tokenizer, self.prompts)
        folder = model_folder(config)
        with writing(folder):
            write_heads(heads.bfloat16(), folder, base=base)
            (folder / TUNED).unlink(missing_ok=True)  # of heads that are no longer there
            ranks = {name: rank_answers(heads, self.backbone, some) for name, some in self.texts.items()}
            drawn = self._draw(ranks, folder / "accuracy.png")
        held = memory(config, self.target, heads, adapters, self.device)
        self.reporter.note(held["explained"])
        more = {
            "about": _about(config, base),
            "measured_on": f"On what {base} answers to held-out prompts, greedily: head k is right where its guess is "
            "what the target writes k tokens behind its own.",
            "held_back": 0 if self.valid else sum(map(len, self.prompts.values())),
            "base": base,
            "trees": {name: best_trees(found) for name, found in ranks.items()},
            "accuracies": {name: found.accuracies() for name, found in ranks.items()},
            "accuracy_curve": "accuracy.png" if drawn else None,
            "memory": held,
            "rows_from_disk": self.hidden.found,
            "throughput": throughput(config, loop.progress, self.hidden),
        }
        measures = {name: measured(found) for name, found in ranks.items()}
        return Result(heads, config.layers, measures, loop.epochs(self.specs), more)


def _device(config: TrainMedusa) -> tuple[torch.device, str]:
    """Where the run takes place, and the precision of its passes.

    Raises:
        InputError: there is no such device, or the precision is none of its own.
    """
    device = parse_device(config.machine.device)
    if device.type == "cpu" and config.machine.precision == "fp16":
        raise InputError("precision is 'fp16', for which a CPU has no passes; set --precision bf16, or no for float32")
    passes = passes_on(device.type, config.machine.precision)
    return accelerator(str(device), passes).device, passes


def _about(config: TrainMedusa, base: str) -> str:
    kind = "with heads over the vocabulary of their own" if config.own_head else "on the target's own head"
    blocks = "residual block" + "s" * (config.layers > 1)
    return f"{config.heads} Medusa heads of {config.layers} {blocks} {kind}, for {base}"


def _held_out(
    config: TrainMedusa, files: dict[Path, list[Ids]], valid: dict[str, list[Ids]]
) -> dict[str, list[list[int]]]:
    """Prompts by name: of held-out files, or of documents that the training data then lacks."""
    if not valid:
        held: list[Ids] = []
        for key, documents in enumerate(files.values()):
            long = [i for i, document in enumerate(documents) if len(document) > PROMPT_TOKENS or document[0] < 0]
            held += hold_back(documents, long, -(-config.eval_prompts // len(files)), (config.loop.seed, key))
        valid = {"held_back": held}
    found = {}
    for name, documents in valid.items():
        prompts = [prompt_of(document, PROMPT_TOKENS) for document in documents]
        prompts = [prompt for prompt in prompts if len(prompt) >= min(PROMPT_TOKENS, 8)][: config.eval_prompts]
        if not prompts:
            raise InputError(
                f"there is no held-out prompt for {name!r}: the data has too few documents of more than "
                f"{PROMPT_TOKENS} tokens, or of chats; give more, or held-out data with --valid NAME=FILE"
            )
        found[name] = prompts
    return found


def _check_length(config: TrainMedusa, path: Path, documents: Sequence[Ids]) -> None:
    counted = sum(int((document >= 0).sum()) for document in documents)
    if counted <= config.heads + 1:
        raise InputError(
            f"{path} has {counted} tokens that count; {config.heads} heads learn from texts of more than "
            f"{config.heads + 1}: give more text, or fewer --heads"
        )


def _answers(target: Any, tokenizer: Any, prompts: dict[str, list[list[int]]]) -> dict[str, Answers]:
    llm = LLM((target, tokenizer), "none", compile=False, max_batch=16)
    found = {}
    for name, some in prompts.items():
        room = llm.max_context - max(map(len, some))
        if room < 8:
            raise InputError(
                f"a held-out prompt of {name!r} leaves no room in the target's {llm.max_context} positions"
            )
        texts = sample_continuations(llm, some, new_tokens=min(NEW_TOKENS, room), temperature=0.0)
        found[name] = Answers(some, texts)
    return found


def _optimizers(config: TrainMedusa, heads: MedusaHeads) -> Callable[[nn.Module], list[Optimizer]]:
    def make(model: nn.Module) -> list[Optimizer]:
        own = {id(parameter) for parameter in heads.parameters()}
        others = [weight for weight in model.parameters() if weight.requires_grad and id(weight) not in own]
        times = config.joint.head_lr_times if config.joint.joint else 1.0
        groups: list[dict[str, Any]] = [{"params": list(heads.parameters()), "lr": config.lr * times}]
        if others:
            groups.append({"params": others, "lr": config.lr})
        return with_peaks([AdamW(groups, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True)])

    return make

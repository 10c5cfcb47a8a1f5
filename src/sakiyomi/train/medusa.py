"""Train Medusa heads on a frozen target, or together with low-rank adapters of it.

Cai et al. 2024, arXiv 2401.10774, section 2.2. Head k, counted from 0, reads the hidden state of token t and learns
token t + k + 2; the one in between is the target's own.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.core.memory import readable
from sakiyomi.drafters.medusa_heads.backbone import Backbone
from sakiyomi.drafters.medusa_heads.formats import write_heads
from sakiyomi.drafters.medusa_heads.heads import HeadsShape, MedusaHeads
from sakiyomi.drafters.medusa_heads.ranks import Ranks, rank_texts
from sakiyomi.drafters.medusa_heads.tuned import FILE as TUNED
from sakiyomi.engine.llm import LLM
from sakiyomi.model_executor.loading.model import parse_device
from sakiyomi.theory import expected_tree_tokens
from sakiyomi.train.acceptance import NEW_TOKENS, PROMPT_TOKENS
from sakiyomi.train.config import MedusaConfig
from sakiyomi.train.counted import read_counted
from sakiyomi.train.data import Ids, check_shares, parse_text
from sakiyomi.train.draft import load_target
from sakiyomi.train.evaluate import parse_valid
from sakiyomi.train.export import model_folder, write_card
from sakiyomi.train.hidden import HiddenStates
from sakiyomi.train.labels import vocabulary
from sakiyomi.train.loop import Loop, accelerator, compile_layers
from sakiyomi.train.losses import heads_loss
from sakiyomi.train.optim import with_peaks
from sakiyomi.train.plot import plot_heads
from sakiyomi.train.preflight import check_run
from sakiyomi.train.progress import Progress
from sakiyomi.train.report import Reporter
from sakiyomi.train.rows import FixedRows, Mixture
from sakiyomi.train.samples import prompt_of, sample_continuations, whole_lines
from sakiyomi.train.writing import writing

__all__ = ["train_medusa"]

BUDGETS = (4, 8, 16, 32, 64)
"""Nodes of the trees in the report."""
PIECE = 512  # positions whose logits over the vocabulary are held at a time
SHOWN = 5  # first guesses whose accuracy is reported


def train_medusa(config: MedusaConfig, command: str = "") -> dict[str, Any]:
    """Run `sakiyomi train medusa`.

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
    specs, valid = [parse_text(spec) for spec in config.data], parse_valid(config.valid)
    check_shares("--data", specs)
    check_run(config, [])
    device = _device(config)
    target, tokenizer = load_target(config.target)
    vocab = vocabulary(target)
    files = {spec.path: read_counted(spec.path, tokenizer, vocab) for spec in specs}
    held_out = _held_out(config, files, {name: read_counted(path, tokenizer, vocab) for name, path in valid.items()})
    for path, documents in files.items():
        _check_length(config, path, documents)
    reporter = Reporter(config.log_seconds)
    reporter.note(f"{config.target} answers {sum(map(len, held_out.values()))} held-out prompts")
    nn.Module.to(target, device)
    texts = _answers(target, tokenizer, held_out)
    torch.manual_seed(config.seed)
    backbone = Backbone(target)
    heads = MedusaHeads(
        HeadsShape(config.heads, config.layers, backbone.weight.shape[1], vocab, config.heads * config.own_head)
    ).to(device)
    heads.begin_from(backbone.weight)
    if not config.joint:
        compile_layers(target, config.compile)
    mixture = Mixture(
        [
            FixedRows(files[spec.path], config.row_tokens[0], seed=config.seed, key=key)
            for key, spec in enumerate(specs)
        ],
        [spec.stable for spec in specs],
        [spec.decay for spec in specs],
        config.seed,
    )
    learner = _Joint(config, target, heads) if config.joint else heads
    hidden = HiddenStates(backbone, Path(config.out), int(config.cache_gib * 2**30))
    log = _HeadLog(Path(config.out) / "heads.jsonl", config.resume)

    def batch_loss(model: nn.Module, rows: Tensor) -> Tensor:
        if isinstance(model, _Joint) and loop.share >= config.heads_first:
            loss, each = model.loss(rows, loop.progress.step)
        else:
            ids = torch.where(rows < 0, ~rows, rows)
            states = hidden(ids[:, :-1])
            loss, each = guess_loss(config, heads, states, rows, backbone.weight, loop.progress.step)
        log.add(loop.progress.step, each)
        return loss

    def evaluate(model: nn.Module) -> dict[str, dict[str, float]]:
        losses = {f"head_{head}_loss": loss for head, loss in enumerate(log.recent(), start=1)}
        return {name: losses | _measures(heads, backbone, some) for name, some in texts.items()}

    loop = Loop(
        config,
        learner,
        batch_loss,
        mixture,
        evaluate,
        optimizers=_optimizers(config, heads),
        device=str(device),
        precision=config.precision,
    )
    adapters = sum(4 * weight.numel() for weight in learner.parameters() if weight.requires_grad)
    adapters -= sum(4 * weight.numel() for weight in heads.parameters())
    with closing(hidden), log:
        finished = loop.run()
    if not finished:
        progress = loop.progress
        return {"finished": False, "out": config.out, "step": progress.step, "tokens": progress.tokens}
    if isinstance(learner, _Joint):
        target = learner.merged().eval()
        backbone = Backbone(target)
        save_tuned(target, tokenizer, Path(config.out) / "target")
        texts = _answers(target, tokenizer, held_out)
    folder = model_folder(config)
    base = str(Path(config.out) / "target") if config.joint else config.target
    with writing(folder):
        write_heads(heads.bfloat16(), folder, base=base)
        (folder / TUNED).unlink(missing_ok=True)  # of heads that are no longer there
        ranks = {name: _ranks(heads, backbone, some) for name, some in texts.items()}
        accuracies = {name: found.accuracies() for name, found in ranks.items()}
        drawn = plot_heads(log.curve(), accuracies, folder / "accuracy.png")
    memory = _memory(config, target, heads, adapters, device)
    reporter.note(memory["explained"])
    return write_card(
        config,
        heads,
        loop.progress,
        {name: _measured(found) for name, found in ranks.items()},
        command,
        loop.epochs([spec.path.name for spec in specs]),
        about=_about(config, base),
        measured_on=f"On what {base} answers to held-out prompts, greedily: head k is right where its guess is what "
        "the target writes k tokens behind its own.",
        held_back=0 if valid else sum(map(len, held_out.values())),
        base=base,
        trees={name: _trees(found) for name, found in ranks.items()},
        accuracies=accuracies,
        accuracy_curve="accuracy.png" if drawn else None,
        memory=memory,
        rows_from_disk=hidden.found,
        throughput=_throughput(config, loop.progress, hidden),
    )


def _device(config: MedusaConfig) -> torch.device:
    """Where the run takes place.

    Raises:
        InputError: there is no such device, or the precision is none of its own.
    """
    device = parse_device(config.device)
    if device.type == "cpu" and config.precision == "fp16":
        raise InputError("precision is 'fp16', for which a CPU has no passes; set --precision bf16, or no for float32")
    found: torch.device = accelerator(str(device), config.precision).device
    return found


def _about(config: MedusaConfig, base: str) -> str:
    kind = "with heads over the vocabulary of their own" if config.own_head else "on the target's own head"
    blocks = "residual block" + "s" * (config.layers > 1)
    return f"{config.heads} Medusa heads of {config.layers} {blocks} {kind}, for {base}"


class _HeadLog:
    """The loss of each head at every step, in nats, a line each in a file that a resumed run goes on with.

    Args:
        path: of the file.
        resume: go on with it.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self._path = path
        self._fresh: list[list[float]] = []
        with writing(path):
            if resume:
                whole_lines(path)  # a last one that was cut off goes
            self._file = path.open("a" if resume else "w", encoding="utf-8", buffering=1)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # of a full disk, which was said when the line was written
            self._file.close()

    def add(self, step: int, means: Tensor) -> None:
        """The next step's."""
        self._fresh.append([round(loss, 5) for loss in means.tolist()])
        with writing(self._path):
            self._file.write(json.dumps({"step": step, "loss": self._fresh[-1]}) + "\n")

    def recent(self) -> list[float]:
        """Means over the steps since this was asked last."""
        found = np.mean(self._fresh, axis=0).tolist() if self._fresh else []
        self._fresh = []
        return list(found)

    def curve(self, most: int = 200) -> list[tuple[int, list[float]]]:
        """Means over so many steps that a curve has few points."""
        lines = self._path.read_text(encoding="utf-8").splitlines()
        # Steps behind the checkpoint that a run was resumed from were made again: the later line counts.
        steps = {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}
        means = sorted(steps.items())
        size = max(1, -(-len(means) // most))
        pieces = [means[at : at + size] for at in range(0, len(means), size)]
        return [(piece[-1][0] + 1, np.mean([each for _, each in piece], axis=0).tolist()) for piece in pieces]


# ---------------------------------------------------------------- data


@dataclass(frozen=True)
class _Answered:
    """Held-out prompts and what the target writes behind them, greedily."""

    prompts: list[list[int]]
    texts: list[list[int]]


def _held_out(
    config: MedusaConfig, files: dict[Path, list[Ids]], valid: dict[str, list[Ids]]
) -> dict[str, list[list[int]]]:
    """Prompts by name: of held-out files, or of documents that the training data then lacks."""
    if not valid:
        held: list[Ids] = []
        for key, documents in enumerate(files.values()):
            long = [
                index for index, document in enumerate(documents) if len(document) > PROMPT_TOKENS or document[0] < 0
            ]
            most = min(-(-config.eval_prompts // len(files)), len(documents) // 10, len(long))
            chosen = (
                set(np.random.default_rng((config.seed, key)).choice(long, most, replace=False).tolist())
                if most
                else set()
            )
            held += [documents[index] for index in sorted(chosen)]
            documents[:] = [document for index, document in enumerate(documents) if index not in chosen]
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


def _check_length(config: MedusaConfig, path: Path, documents: Sequence[Ids]) -> None:
    counted = sum(int((document >= 0).sum()) for document in documents)
    if counted <= config.heads + 1:
        raise InputError(
            f"{path} has {counted} tokens that count; {config.heads} heads learn from texts of more than "
            f"{config.heads + 1}: give more text, or fewer --heads"
        )


def _answers(target: Any, tokenizer: Any, prompts: dict[str, list[list[int]]]) -> dict[str, _Answered]:
    llm = LLM((target, tokenizer), "none", compile=False, max_batch=16)
    found = {}
    for name, some in prompts.items():
        room = llm.max_context - max(map(len, some))
        if room < 8:
            raise InputError(
                f"a held-out prompt of {name!r} leaves no room in the target's {llm.max_context} positions"
            )
        texts = sample_continuations(llm, some, new_tokens=min(NEW_TOKENS, room), temperature=0.0)
        found[name] = _Answered(some, texts)
    return found


# ---------------------------------------------------------------- learning


def guess_loss(
    config: MedusaConfig, heads: MedusaHeads, hidden: Tensor, rows: Tensor, weight: Tensor, step: int
) -> tuple[Tensor, Tensor]:
    """Loss of the heads on a batch, and each head's own mean in nats.

    Args:
        config: of the run.
        heads: being trained.
        hidden: (B, T, hidden) of the target.
        rows: (B, T + 1) token ids, complements of those that do not count.
        weight: of the target's head.
        step: chooses the positions.
    """
    length = rows.shape[1] - 1 - heads.shape.heads  # a place for which every head has a label
    labels = torch.stack([rows[:, 2 + k : 2 + k + length] for k in range(heads.shape.heads)])
    labels = labels.flatten(1)
    places = _places(labels, config.positions, (config.seed, step))
    labels = labels[:, places]
    states = hidden[:, :length].flatten(0, 1)[places]
    if not torch.is_autocast_enabled(states.device.type):
        states = states.to(heads.weights.dtype)
    decay = torch.tensor([config.head_decay**k for k in range(len(labels))], device=rows.device)
    weights = (labels >= 0) * decay[:, None]
    head = weight if heads.own is None else heads.own
    return heads_loss(heads.features(states), head, labels.clamp_min(0), weights)


def _places(labels: Tensor, share: float, seed: tuple[int, int]) -> Tensor:
    """Positions to learn from: so many in every batch, those that count before the others."""
    count = labels.shape[1]
    if share >= 1.0:
        return torch.arange(count, device=labels.device)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(count)).to(labels.device)
    counts = (labels >= 0).any(0)[order]
    order = torch.cat([order[counts], order[~counts]])
    return order[: max(1, round(share * count))]


class _Joint(nn.Module):
    """Heads and target together: the target keeps to what it was by the divergence from itself without adapters."""

    def __init__(self, config: MedusaConfig, target: Any, heads: MedusaHeads) -> None:
        super().__init__()
        peft = _peft()
        self.heads, self._config = heads, config
        settings = peft.LoraConfig(
            r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that it will lose
            self.model = peft.get_peft_model(target, settings)
        self._backbone = Backbone(target)

    def train(self, mode: bool = True) -> _Joint:
        """The target writes without dropout, whoever trains: what it said before is what it is compared with."""
        super().train(mode)
        self.model.eval()
        return self

    def loss(self, rows: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Loss of both on a batch, and each head's own mean in nats."""
        config, weight = self._config, self._backbone.weight
        ids = torch.where(rows < 0, ~rows, rows)[:, :-1]
        hidden = self._backbone(ids)
        with torch.no_grad(), self.model.disable_adapter():
            before = self._backbone(ids)
        loss, each = guess_loss(config, self.heads, hidden, rows, weight, step)
        counted = (rows[:, 1:] >= 0).flatten().nonzero()[:, 0]
        divergence = self._divergence(before.flatten(0, 1)[counted], hidden.flatten(0, 1)[counted], weight)
        return divergence + config.heads_weight * loss, each

    @staticmethod
    def _divergence(before: Tensor, after: Tensor, weight: Tensor) -> Tensor:
        """Mean KL(before || after) of the next token; a piece of the positions at a time."""
        total = after.new_zeros((), dtype=torch.float32)
        for old, new in zip(before.split(PIECE), after.split(PIECE), strict=True):
            total = total + checkpoint(_kl, old, new, weight, use_reentrant=False)
        return total / max(len(before), 1)

    def merged(self) -> Any:
        """The target with its adapters in it."""
        return self.model.merge_and_unload()


def _kl(before: Tensor, after: Tensor, weight: Tensor) -> Tensor:
    old, new = ((hidden.to(weight.dtype) @ weight.T).float().log_softmax(-1) for hidden in (before, after))
    return torch.nn.functional.kl_div(new, old, log_target=True, reduction="sum")


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UnsupportedError(
            "training the target too needs peft: pip install 'sakiyomi[train]', or leave --joint out"
        ) from error
    return peft


def save_tuned(target: Any, tokenizer: Any, folder: Path) -> None:
    """Write the tuned target and its tokenizer, a folder in Hugging Face format."""
    with writing(folder):
        target.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _optimizers(config: MedusaConfig, heads: MedusaHeads) -> Callable[[nn.Module], list[Optimizer]]:
    def make(model: nn.Module) -> list[Optimizer]:
        own = {id(parameter) for parameter in heads.parameters()}
        others = [weight for weight in model.parameters() if weight.requires_grad and id(weight) not in own]
        groups: list[dict[str, Any]] = [
            {"params": list(heads.parameters()), "lr": config.lr * (config.head_lr_times if config.joint else 1.0)}
        ]
        if others:
            groups.append({"params": others, "lr": config.lr})
        return with_peaks([AdamW(groups, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True)])

    return make


# ---------------------------------------------------------------- measures


def _ranks(heads: MedusaHeads, backbone: Backbone, texts: _Answered) -> Ranks:
    weight = backbone.weight.to(heads.weights.dtype)

    def hidden_of(ids: Sequence[int]) -> Tensor:
        return backbone(torch.tensor([list(ids)], device=weight.device))[0].to(weight.dtype)

    return rank_texts(hidden_of, lambda hidden: heads(hidden, weight), texts.prompts, texts.texts)


def _measures(heads: MedusaHeads, backbone: Backbone, texts: _Answered) -> dict[str, float]:
    return _measured(_ranks(heads, backbone, texts))


def _measured(ranks: Ranks) -> dict[str, float]:
    """Accuracies of each head, and what its best tree of 16 nodes brings."""
    found: dict[str, float] = {}
    for head, chances in enumerate(ranks.accuracies(), start=1):
        for top in range(1, SHOWN + 1):
            found[f"head_{head}_top_{top}"] = sum(chances[:top])
    found["tau_16_nodes"] = ranks.replay(ranks.best(16))
    found["tokens"] = ranks.places
    return found


def _trees(ranks: Ranks) -> list[dict[str, Any]]:
    """The best tree of each budget: what the accuracies say of it, and what these texts do."""
    levels = ranks.accuracies()
    found = []
    for nodes in BUDGETS:
        paths = ranks.best(nodes)
        found.append(
            {
                "nodes": nodes,
                "expected_tau": expected_tree_tokens(levels, paths),
                "replayed_tau": ranks.replay(paths),
                "choices": [list(path) for path in paths],
            }
        )
    return found


def _throughput(config: MedusaConfig, progress: Progress, hidden: HiddenStates) -> dict[str, float] | None:
    """Median milliseconds of a step and of the frozen target's part of it, where no row came from disk."""
    times = [after[2] - before[2] for before, after in itertools.pairwise(progress.losses)]
    rows = config.step_tokens // config.row_tokens[0]
    whole = [seconds for count, seconds in hidden.calls if count == rows]
    if config.joint or hidden.found or not times or not whole:
        return None
    step, forward = statistics.median(times), statistics.median(whole)
    return {"step_ms": 1000 * step, "forward_ms": 1000 * forward, "ratio": step / forward}


def _memory(
    config: MedusaConfig, target: nn.Module, heads: MedusaHeads, adapters: int, device: torch.device
) -> dict[str, Any]:
    """What the run held at most, and what of it must be."""
    frozen = sum(weight.nbytes for weight in target.parameters())
    trained = sum(weight.numel() * 4 for weight in heads.parameters())
    states = config.step_tokens * int(heads.shape.hidden_size) * 2
    kept = int(config.step_tokens * config.positions) * int(heads.shape.hidden_size) * heads.shape.heads * 2
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
    explained = (
        f"memory: {readable(peak)} at most {where}; of these the target {readable(frozen)}, without gradients or "
        f"optimizer state, heads with both {readable(4 * trained)}, "
        + (
            f"adapters with both {readable(4 * adapters)} beside what their passes keep for gradients, "
            if adapters
            else ""
        )
        + f"a batch's hidden states {readable(states)} and "
        f"what heads make of them about {readable(4 * kept)}"
    )
    return {"peak": peak, "parts": parts, "explained": explained}

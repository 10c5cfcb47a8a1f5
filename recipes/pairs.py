"""Encoder-decoder pairs: a target trained on a task, and a smaller draft distilled from it. Knows no task."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import GenerationConfig

from held_out import Example, write_examples
from sakiyomi.core.checkpoint import read_json
from sakiyomi.train.checkpoint import checkpoints, writing
from sakiyomi.train.config import LoopOptions, RunConfig, TextOptions, check_sizes
from sakiyomi.train.data import Ids
from sakiyomi.train.export import Result, model_folder, write_card
from sakiyomi.train.loop import Learner, Loop, compiled_loss, on_device
from sakiyomi.train.losses import distillation_loss, next_token_loss
from sakiyomi.train.optim import text_optimizers
from sakiyomi.train.recipe import check_run
from sakiyomi.train.settings import Group, require, setting
from scores import exact_match, word_error_rate
from texts import read_texts, text_files

__all__ = ["Task", "answers", "padded", "states", "train_pair"]

ANSWERED = 32
"""Examples of each kind that a finished model answers for its card, and that are answered together."""

Batch = dict[str, Any]


PAIR_LOOP = LoopOptions(
    minutes=12.0, decay_share=0.5, row_tokens=(16, 32, 64), step_tokens=2048, eval_minutes=2.0, compile=False
)


@dataclass(frozen=True, kw_only=True)
class PairSizes(Group):
    """Sizes of target and draft.

    Attributes:
        hidden: Width of the target's hidden states.
        layers: Layers of the target's decoder.
        encoder_layers: Layers of the target's encoder.
        heads: Attention heads of the target.
        intermediate: Width of the target's MLP.
        draft_hidden: Width of the draft's hidden states.
        draft_layers: Layers of the draft's decoder.
        draft_encoder_layers: Layers of the draft's encoder, which runs once a text.
        draft_heads: Attention heads of the draft.
        draft_intermediate: Width of the draft's MLP.
    """

    hidden: int = setting(192, least=1)
    layers: int = setting(2, least=1)
    encoder_layers: int = setting(3, least=1)
    heads: int = setting(6, least=1)
    intermediate: int = setting(512, least=1)
    draft_hidden: int = setting(96, least=1)
    draft_layers: int = setting(1, least=1)
    draft_encoder_layers: int = setting(2, least=1)
    draft_heads: int = setting(3, least=1)
    draft_intermediate: int = setting(256, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self.hidden, self.heads, self.heads)
        check_sizes(self.draft_hidden, self.draft_heads, self.draft_heads)

    def of_part(self, part: str) -> dict[str, Any]:
        """Those of the "target" or the "draft", by the names that transformers' configurations have."""
        prefix = "" if part == "target" else "draft_"
        hidden, layers, encoder_layers, heads, intermediate = (
            getattr(self, prefix + name) for name in ("hidden", "layers", "encoder_layers", "heads", "intermediate")
        )
        return {
            "d_model": hidden,
            "encoder_layers": encoder_layers,
            "decoder_layers": layers,
            "encoder_attention_heads": heads,
            "decoder_attention_heads": heads,
            "encoder_ffn_dim": intermediate,
            "decoder_ffn_dim": intermediate,
        }


@dataclass(frozen=True, kw_only=True)
class PairConfig(RunConfig):
    """What both encoder-decoder pairs share: a target, and a draft distilled from it on the same task.

    Attributes:
        valid: Held-out file, NAME=FILE; without it every twentieth document of the training text is held out.
        minutes: Training time of the target in minutes of wall clock.
        row_tokens: Longest answers in tokens; step s uses the (s mod n)-th; 2 at least.
        step_tokens: Tokens of the answers of one optimizer step; a multiple of every row length.
        draft_minutes: Training time of the draft, behind the target's.
        draft_tokens: Training budget of the draft in tokens; above 0 it replaces `draft_minutes`.
        top: The target's likeliest tokens that the draft learns; one bucket holds the rest.
        greedy_weight: Weight of -log q(the target's likeliest token) beside the KL divergence.
        examples: Held-out examples kept beside the models for measurements.
    """

    loop: LoopOptions = PAIR_LOOP
    text: TextOptions = field(default=TextOptions())
    sizes: PairSizes = PairSizes()
    draft_minutes: float = setting(6.0, above=0)
    draft_tokens: int = setting(0, least=0)
    top: int = setting(16, least=1)
    greedy_weight: float = setting(0.5, least=0)
    examples: int = setting(64, least=1, resume=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(min(self.loop.row_tokens) >= 2, "row_tokens", self.loop.row_tokens, "2 or more")
        require(self.loop.workers == 1, "workers", self.loop.workers, "1: this recipe trains in one process")


class Task(Protocol):
    """What a pair is trained on.

    Attributes:
        processor: tokenizer or processor, saved beside the models.
        tokenizer: of the answers.
        rows: batches to train on: what the encoder reads, by its names, and (rows, T) `inputs` of the decoder, `labels`
            and `known`, which is 1 where a label counts.
        held_out: such batches of other texts, by name.
        examples: questions for the finished models.
        most_tokens: the longest answer.
    """

    processor: Any
    tokenizer: Any
    rows: Any
    held_out: dict[str, Batch]
    examples: list[Example]
    most_tokens: int

    def new_model(self, part: str) -> Any:
        """The "target" or the "draft" with random weights."""

    def questions(self, examples: Sequence[Example]) -> Batch:
        """What the encoder reads of these examples, by its names."""


def train_pair(config: PairConfig, make_task: Callable[[list[str], list[str]], Task], command: str) -> dict[str, Any]:
    """Train a target, then a draft that is distilled from it, into OUT/target/model and OUT/draft/model.

    Args:
        config: the settings.
        make_task: what they learn, from texts to train on, and others.
        command: the command line, for the cards.

    Returns:
        The summary that `--json` prints; `finished` is False after SIGINT.
    """
    if config.loop.threads:
        torch.set_num_threads(config.loop.threads)
    files = text_files(config)
    for name in ("target", "draft"):  # what could not be done, or would spoil an earlier run, is refused
        check_run(_part(config, name), files)
    task = make_task(*read_texts(config))
    found: dict[str, Any] = {"finished": True, "out": config.loop.out}
    held_out: dict[str, Any] = {}
    target = None
    for name in ("target", "draft"):
        part = _part(config, name)
        folder = model_folder(part)
        if not (config.loop.resume and (folder / "card.json").exists()):
            loop = Loop(_Learner(part, task, target), _new(config, task, name))
            if not loop.run():
                progress = loop.progress
                stopped = {"finished": False, "out": config.loop.out, "part": name}
                return stopped | {"step": progress.step, "tokens": progress.tokens}
            with writing(folder), _whole(folder) as fresh:
                _save(fresh, loop.model, task)
                measures = _measures(_load(task, name, fresh), task, target)
                result = Result(loop.model, loop.model.config.num_hidden_layers, measures, {})
                write_card(part, result, loop.progress, command, folder=fresh)
        card = read_json(folder / "card.json")
        found |= {name: str(folder), f"{name}_parameters": card["parameters"], f"{name}_minutes": card["minutes"]}
        held_out |= {f"{name}, {key}": values for key, values in card["held_out"].items()}
        target = _load(task, name, folder) if target is None else target
    return found | {"held_out": held_out}


def _part(config: PairConfig, name: str) -> PairConfig:
    """The settings of one of the two runs."""
    out = str(Path(config.loop.out) / name) if config.loop.out else ""
    named = f"{config.loop.name or Path(config.loop.out).name}-{name}"
    if name == "target":
        return config.changed(out=out, name=named)
    resume = config.loop.resume and bool(checkpoints(Path(out) / "checkpoints"))
    return config.changed(out=out, name=named, resume=resume, minutes=config.draft_minutes, tokens=config.draft_tokens)


def _new(config: PairConfig, task: Task, name: str) -> Any:
    torch.manual_seed(config.loop.seed)
    return task.new_model(name)


# ---------------------------------------------------------------- losses


def padded(rows: Sequence[Sequence[int]], length: int, fill: int) -> tuple[Ids, Ids]:
    """Token ids of several lengths as (rows, length), and 1 where they are theirs and not `fill`."""
    ids, own = np.full((len(rows), length), fill, dtype=np.int64), np.zeros((len(rows), length), dtype=np.int64)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)], own[row, : len(tokens)] = tokens, 1
    return ids, own


def states(model: Any, batch: Batch) -> Tensor:
    """(1, N, H): what the head reads at every place of the answers that counts, one behind the other."""
    decoded = {"inputs", "labels", "known"}
    read = model.get_encoder()(**{name: part for name, part in batch.items() if name not in decoded})
    mask = {"encoder_attention_mask": batch["attention_mask"]} if "attention_mask" in batch else {}
    hidden = model.get_decoder()(
        input_ids=batch["inputs"], encoder_hidden_states=read.last_hidden_state, use_cache=False, **mask
    ).last_hidden_state
    found: Tensor = hidden[batch["known"].bool()][None]
    return found


def _labels(batch: Batch) -> Tensor:
    found: Tensor = batch["labels"][batch["known"].bool()][None]
    return found


def _head(model: Any) -> Tensor:
    weight: Tensor = model.get_output_embeddings().weight
    return weight


class _Learner(Learner):
    """The target learns the right answers, the draft the target's probabilities for them."""

    config: PairConfig

    def __init__(self, config: PairConfig, task: Task, target: Any) -> None:
        self.config, self.mixture, self.passes = config, task.rows, config.text.passes
        self._top, self._greedy_weight, self._task, self._target = config.top, config.greedy_weight, task, target
        self._nats = compiled_loss(next_token_loss if target is None else distillation_loss, config.loop.compile)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """See `Learner`."""
        if self._target is None:
            return self._nats(states(model, batch), _head(model), _labels(batch))
        with torch.no_grad():
            wanted = torch.softmax((states(self._target, batch) @ _head(self._target).T).float(), dim=-1)
        probs, ids = wanted.topk(min(self._top, wanted.shape[-1]))
        return self._nats(states(model, batch), _head(model), ids, probs, self._greedy_weight)

    def optimizers(self, model: Any) -> list[Optimizer]:
        """See `Learner`."""
        return text_optimizers(self.config.text, model)

    def measures(self, model: Any) -> dict[str, dict[str, float]]:
        """See `Learner`."""
        return _losses(model, self._task, None)


# ---------------------------------------------------------------- measures


@torch.inference_mode()
def _losses(model: Any, task: Task, target: Any) -> dict[str, dict[str, float]]:
    """Loss and share of right tokens on the held-out batches, each token behind the right answer."""
    model.eval()
    found = {}
    for name, arrays in task.held_out.items():
        batch = on_device(arrays, model.device)
        hidden, labels = states(model, batch), _labels(batch)
        best = (hidden @ _head(model).T).argmax(-1)
        found[name] = {
            "nats_per_token": float(next_token_loss(hidden, _head(model), labels)),
            "right_tokens": float((best == labels).float().mean()),
        }
        if target is not None:
            theirs = (states(target, batch) @ _head(target).T).argmax(-1)
            found[name]["agreement"] = float((best == theirs).float().mean())
    model.train()
    return found


def _measures(model: Any, task: Task, target: Any) -> dict[str, dict[str, float]]:
    """The losses of a finished model, and how right the answers are that it gives by itself."""
    found = _losses(model, task, target)
    model.eval()
    for kind in dict.fromkeys(example.task for example in task.examples if example.grounded):
        some = [example for example in task.examples if example.task == kind][:ANSWERED]
        right, got = [example.target for example in some], answers(model, task, some)
        found.setdefault(kind, {})
        found[kind] |= {"exact_match": exact_match(right, got), "word_error_rate": word_error_rate(right, got)}
        found[kind]["answers"] = len(some)
    return found


@torch.inference_mode()
def answers(model: Any, task: Task, examples: Sequence[Example]) -> list[str]:
    """What a model answers by itself, greedily, with transformers' own loop."""
    read = on_device(task.questions(examples), model.device)
    done = model.generate(**read, max_new_tokens=task.most_tokens - 1, do_sample=False)
    return list(task.tokenizer.batch_decode(done, skip_special_tokens=True))


# ---------------------------------------------------------------- files


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder that becomes `folder` when the block is over, and is removed if it raises."""
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        fresh.mkdir(parents=True)
        yield fresh
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _save(folder: Path, model: Any, task: Task) -> None:
    """Weights in bf16, settings, tokenizer or processor, and the held-out examples."""
    plain = type(model)(copy.deepcopy(model.config)).to(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = GenerationConfig.from_model_config(model.config)
    plain.generation_config.max_length = None
    plain.generation_config.max_new_tokens = task.most_tokens - 1  # the first is the decoder's own
    plain.generation_config._from_model_config = False  # the folder says how to generate
    plain.save_pretrained(folder)
    task.processor.save_pretrained(folder)
    write_examples(folder, task.examples)
    # The weights are written through a private temporary file; a model folder is there to be read by others.
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)


def _load(task: Task, part: str, folder: Path) -> Any:
    """A finished model as it was rounded, in float32."""
    model = type(task.new_model(part)).from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval().requires_grad_(False)

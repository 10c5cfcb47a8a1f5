"""Train a small Llama that finds facts in long texts, on the tasks of `sakiyomi.train.long_tasks` and on text.

The embedded model `retriever` was made by this recipe.

python recipes/retriever.py --out my-retriever --text stories.jsonl --minutes 60
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from retrieval_rows import ANSWER, KNOWN, OTHER, WANTED, RetrievalRows
from retrieval_start import start_looking_back
from sakiyomi.cli.train import script
from sakiyomi.train.config import LoopOptions, RunConfig, TextOptions, WholeSizes
from sakiyomi.train.data import read_texts
from sakiyomi.train.export import Result, save
from sakiyomi.train.llama import new_llama
from sakiyomi.train.long_tasks import TASKS, named
from sakiyomi.train.long_tasks.example import NOISE, Filler, Texts
from sakiyomi.train.long_tasks.made import ADJECTIVES, NOUNS, locker, needle, pair
from sakiyomi.train.loop import compiled_loss
from sakiyomi.train.recipe import TextRecipe, train
from sakiyomi.train.settings import require, setting
from sakiyomi.train.target import bits_per_character, encode_held_out
from sakiyomi.train.tokenizer import own_tokenizer, train_tokenizer

FINAL_TOKENS = 65536
SHORT_ROWS = 257
SHORTEST = 256
NOTE_SCALE = 16.0
TOKENIZER_DOCUMENTS = 600


@dataclass(frozen=True, kw_only=True)
class RetrieverConfig(RunConfig):
    """Train a small Llama that finds pass keys, numbers and values of keys in long texts.

    Attributes:
        text: Training file FILE for filler between the facts and for text. Repeatable.
        valid: Held-out file, NAME=FILE: its loss, and the longest tasks with it as their filler, are measured.
            Repeatable.
        row_tokens: Row lengths in tokens, one a stage; 32 at least.
        stage_shares: Share of the budget of each stage, in the order of the row lengths.
        text_weight: Weight of the loss of all text beside that of the answers.
        note_weight: Weight of the loss that has hidden states of values say whether a question in front asks for them.
        eval_prompts: Prompts of each task for the accuracies during the run, at the length of the stage.
        final_prompts: Prompts of each task, length and form for the accuracies on the card.
        eval_lengths: Lengths in tokens of the prompts for the accuracies on the card.
    """

    loop: LoopOptions = field(
        default=LoopOptions(minutes=60.0, decay_share=0.3, row_tokens=(64, 128, 256, 1024, 4096), step_tokens=4096)
    )
    text: TextOptions = field(default=TextOptions())
    sizes: WholeSizes = field(
        default=WholeSizes(
            vocab=1024, hidden=128, layers=4, heads=4, intermediate=384, max_positions=8192, rope_theta=500000.0
        )
    )
    stage_shares: tuple[float, ...] = setting((0.15, 0.25, 0.25, 0.2, 0.15), above=0)
    text_weight: float = setting(0.05, least=0)
    note_weight: float = setting(0.3, least=0)
    eval_prompts: int = setting(16, least=1, resume=True)
    final_prompts: int = setting(50, least=1, resume=True)
    eval_lengths: tuple[int, ...] = setting((1024, 2048, 4096), least=256, resume=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        rows, most = self.loop.row_tokens, self.sizes.max_positions
        require(min(rows) >= 32, "row_tokens", rows, "32 or more")
        expected = f"{len(rows)} shares, one for each of row_tokens"
        require(len(self.stage_shares) == len(rows), "stage_shares", self.stage_shares, expected)
        longest = max(*rows, *self.eval_lengths)
        require(longest <= most, "max_positions", most, f"{longest} or more")


def train_retriever(config: RetrieverConfig, command: str = "") -> dict[str, Any]:
    """Train a retriever, see `recipe.train`."""
    return train(_Retriever(config), command)


class _Retriever(TextRecipe[RetrieverConfig]):
    """A small Llama learns to answer questions about facts in filler, and a little text beside them."""

    def read(self) -> None:
        """See `Recipe`."""
        documents = [text for spec in self.specs for text in read_texts(spec.path)]
        config, sizes = self.config, self.config.sizes
        self.tokenizer = own_tokenizer(
            config.loop.out, sizes.vocab, lambda: retrieval_tokenizer(documents, sizes.vocab, sizes.max_positions)
        )
        self.texts = {name: read_texts(path) for name, path in self.valid.items()}
        self.held_out = [encode_held_out(name, some, self.tokenizer) for name, some in self.texts.items()]
        self.mixture = RetrievalRows(documents, self.tokenizer, seed=config.loop.seed)

    def make(self) -> LlamaForCausalLM:
        """See `Recipe`."""
        config, sizes, tokenizer = self.config, self.config.sizes, self.tokenizer
        self._nats = compiled_loss(partial(answers_and_text, config.text_weight), config.loop.compile)
        model = new_llama(sizes, tokenizer, vocab=len(tokenizer), max_positions=sizes.max_positions)
        start_looking_back(model, config.loop.seed)
        return model

    def row_length(self, step: int, share: float) -> int:
        """See `Recipe`; one length after the other."""
        lengths, ends = self.config.loop.row_tokens, list(accumulate(self.config.stage_shares))
        stage = bisect_right(ends, min(share, 1.0) * ends[-1])
        return lengths[min(stage, len(lengths) - 1)]

    def loss(self, model: LlamaForCausalLM, batch: dict[str, Tensor]) -> Tensor:
        """See `Recipe`."""
        ids, roles = batch["ids"], batch["roles"]
        counted = [(roles[:, 1:] == ANSWER).sum(), (roles[:, 1:] >= KNOWN).sum()]
        counted += [(roles[:, :-1] == role).sum() for role in (OTHER, WANTED)]
        divisors = self.workers.divisor(torch.stack(counted))
        noted: Tensor | float = 0.0
        if "end" in batch:
            hidden, before = parted_pass(model, ids[:, :-1], int(batch["end"]))
            noted = self.config.note_weight * notes(before, roles[:, :-1], divisors[2:])
        else:
            # The backward pass of the fused attention is slow for many short rows.
            attend_by(model, "eager" if ids.shape[1] <= SHORT_ROWS else "sdpa")
            hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        return self._nats(hidden, model.lm_head.weight, ids[:, 1:], roles[:, 1:], divisors[:2]) + noted

    def measures(self, model: LlamaForCausalLM) -> dict[str, dict[str, float]]:
        """See `Recipe`; at the length of the stage."""
        length = max(SHORTEST, self.row_length(0, self.loop.share))
        found = self._accuracies(model, length, self.config.eval_prompts, NOISE)
        return {"tasks": {"accuracy": sum(found.values()) / len(found), "length": length} | found}

    def finish(self) -> Result:
        """See `Recipe`."""
        config, model, layers = self.config, self.loop.model, self.config.sizes.layers
        with torch.compiler.set_stance("force_eager"):
            measures: dict[str, Any] = {
                item.name: bits_per_character(model, item, FINAL_TOKENS) for item in self.held_out
            }
        fillers: dict[str, Filler] = {"noise": NOISE} | {name: Texts(some) for name, some in self.texts.items()}
        for name, filler in fillers.items():
            for length in config.eval_lengths if filler is NOISE else (max(config.eval_lengths),):
                some = self._accuracies(model, length, config.final_prompts, filler)
                measures[f"accuracy at {length} tokens, filler: {name}"] = some
        save(config, model, self.tokenizer)
        about = f"A Llama model of {layers} layers that finds facts in long texts (`sakiyomi.train.long_tasks`)"
        return Result(model, layers, measures, {}, {"about": about, "measured_on": explained(config)})

    def _accuracies(self, model: LlamaForCausalLM, length: int, prompts: int, filler: Filler) -> dict[str, float]:
        """Accuracy of each task, plain and with the question in front, too."""
        found = {}
        attend_by(model, "sdpa")
        # Prompts have many lengths, each of which would be compiled.
        with torch.compiler.set_stance("force_eager"):
            for first in (False, True):
                for task in ASKED:
                    found[task + (", question in front" if first else "")] = accuracy(
                        model,
                        self.tokenizer,
                        task,
                        length,
                        prompts=prompts,
                        query_first=first,
                        filler=filler,
                        seed=self.config.loop.seed,
                    )
        return found


def explained(config: RetrieverConfig) -> str:
    """What the accuracies of the card are."""
    return (
        f"Accuracies are shares of {config.final_prompts} prompts, at depths spread evenly from the beginning to the "
        "end, whose greedy answer begins with the right one. The training began with heads that look back "
        "(`recipes/retrieval_start.py`), and ran over "
        + ", ".join(str(length) for length in config.loop.row_tokens)
        + " tokens a row, one length after the other."
    )


def parted_pass(model: LlamaForCausalLM, ids: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """States of rows whose questions see the text in the last layer alone.

    Without such rows a small model finds its answers in the second layer, where nothing in a key or value can tell yet
    what a question in front of the text has asked for: a method that decides while it reads could not know.

    Args:
        model: in training.
        ids: (B, T) see `RetrievalRows.parted`.
        end: where the questions begin.

    Returns:
        Last hidden states, and what the last layer reads, both (B, T, H).
    """
    attend_by(model, "sdpa")
    inner: Any = model.model
    hidden = inner.embed_tokens(ids)
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    cos, sin = inner.rotary_emb(hidden, position_ids=places)

    def layer(module: Any, hidden: Tensor, begin: int, end: int) -> Tensor:
        turned = cos[:, begin:end], sin[:, begin:end]
        states: Tensor = module(
            hidden[:, begin:end], attention_mask=None, position_ids=places[:, begin:end], position_embeddings=turned
        )
        return states

    for module in inner.layers[:-1]:
        hidden = torch.cat((layer(module, hidden, 0, end), layer(module, hidden, end, ids.shape[1])), 1)
    return inner.norm(layer(inner.layers[-1], hidden, 0, ids.shape[1])), hidden


def notes(hidden: Tensor, roles: Tensor, divisors: Tensor) -> Tensor:
    """How well a token of a value says whether a question in front has asked for it; a loss in nats.

    It says so along a fixed direction, the alternating one, so that a method that reads the states can learn it.

    Args:
        hidden: (B, T, H) what the last layer reads.
        roles: (B, T) see `retrieval_rows`.
        divisors: (2,) tokens with the roles of values, OTHER and WANTED, by which their sums are divided.
    """
    sign = 1.0 - 2.0 * (torch.arange(hidden.shape[-1], device=hidden.device) % 2)
    hidden = hidden.float()
    said = NOTE_SCALE * (hidden * sign).mean(-1) / hidden.square().mean(-1).add(1e-6).sqrt()
    found = torch.zeros((), device=hidden.device)
    for role, target, divisor in ((OTHER, -said, divisors[0]), (WANTED, said, divisors[1])):
        found = found + (F.softplus(-target) * (roles == role)).sum() / divisor
    return found


def answers_and_text(
    text_weight: float, hidden: Tensor, head: Tensor, labels: Tensor, roles: Tensor, divisors: Tensor
) -> Tensor:
    """Cross-entropy of the answers, and with a small weight that of all that is no padding.

    Args:
        text_weight: of the second mean.
        hidden: (B, T, H) last hidden states.
        head: (V, H) output embedding.
        labels: (B, T) token ids.
        roles: (B, T) what the labels are, see `retrieval_rows`.
        divisors: (2,) tokens of answers, and tokens that are no padding, by which their sums are divided.
    """
    logits = F.linear(hidden, head).flatten(0, 1)
    each = F.cross_entropy(logits.float(), labels.flatten(), reduction="none").view(labels.shape)
    answers, known = (roles == ANSWER).float(), (roles >= KNOWN).float()
    return (each * answers).sum() / divisors[0] + text_weight * (each * known).sum() / divisors[1]


def attend_by(model: LlamaForCausalLM, name: str) -> None:
    """Switch between two implementations of attention that transformers has."""
    if model.config._attn_implementation != name:
        model.set_attn_implementation(name)


def retrieval_tokenizer(documents: Sequence[str], pieces: int, max_length: int) -> PreTrainedTokenizerBase:
    """A tokenizer in which every digit is a piece, and with about 1,000 pieces every word of a key, too.

    Raises:
        InputError: see `train_tokenizer`.
    """
    words = [make(f"{adjective} {noun}", "") for make in (pair, locker) for adjective in ADJECTIVES for noun in NOUNS]
    facts = [*words, *(needle(task, "") for task in ("passkey", "number"))]
    texts = [f"{fact.text} {fact.asked} {fact.cue}" for fact in facts]
    chosen = np.random.default_rng(0).permutation(len(documents))[:TOKENIZER_DOCUMENTS]
    return train_tokenizer(
        [*(documents[index] for index in chosen), *texts],
        pieces,
        max_length,
        split=[pre_tokenizers.Digits(individual_digits=True)],
    )


# ---------------------------------------------------------------- accuracy


ASKED = ("passkey", "number", "kv", "kv-dense", "multikey")
"""Tasks of one answer that stands in the text as it is."""

PASS_TOKENS = 16384
"""Tokens of one pass at most, but for a single prompt that is longer."""


@torch.inference_mode()
def accuracy(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    length: int,
    *,
    prompts: int,
    query_first: bool = False,
    filler: Filler = NOISE,
    seed: int = 0,
) -> float:
    """Share of the prompts whose greedy answer begins with the right one.

    The greedy answer is right where each of its tokens is the likeliest behind the right ones before it: so the answer
    is read with the prompt, in one pass.

    Args:
        model, tokenizer: what answers.
        task: one of `ASKED`.
        length: most tokens of a prompt.
        prompts: how many; their depths are spread evenly from 0 to 1.
        query_first: see `Example.prompt`.
        filler: of the tasks that have one.
        seed: of the prompts.
    """
    made = TASKS[task] if TASKS[task].filler is None else named(task, filler)
    rows: list[tuple[list[int], int]] = []
    for number in range(prompts):
        depth = (number + 0.5) / prompts
        example = made.make(np.random.default_rng((seed, number)), length, tokenizer, depth)
        prompt = example.prompt(query_first)
        text = prompt + ("" if prompt.endswith('"') else " ") + example.answers[0]
        before = len(tokenizer(prompt)["input_ids"])
        rows.append((list(tokenizer(text)["input_ids"]), before))
    training = model.training
    model.eval()
    right = 0
    at_once = max(1, PASS_TOKENS // length)
    for begin in range(0, prompts, at_once):
        right += _right(model, rows[begin : begin + at_once])
    model.train(training)
    return right / prompts


def _right(model: Any, rows: list[tuple[list[int], int]]) -> int:
    longest = max(len(ids) for ids, _ in rows)
    # Padding stands behind the answers, where no causal model sees it.
    inputs = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows], device=model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
        count = 0
        for number, (ids, before) in enumerate(rows):
            guessed = model.lm_head(hidden[number, before - 1 : len(ids) - 1]).argmax(-1).tolist()
            count += guessed == ids[before:]
    return count


if __name__ == "__main__":
    script(
        RetrieverConfig,
        train_retriever,
        "Train a small Llama that finds pass keys, numbers and values of keys in long texts.",
    )

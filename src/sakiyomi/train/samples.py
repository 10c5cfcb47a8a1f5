"""The target's own continuations as training text of a draft: kept in a file, extended when a run is repeated.

During speculation a draft predicts text that the target writes, so this is the training text that matters most.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sakiyomi.core.checkpoint import read_json
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.pieces import Pieces
from sakiyomi.engine.llm import LLM
from sakiyomi.train.checkpoint import whole_lines, writing
from sakiyomi.train.counted import LONGEST_PROMPT, token_ids
from sakiyomi.train.data import Ids, TextSpec
from sakiyomi.train.progress import LONGEST_STEP_SECONDS

DIGEST_VALUES = 64


def sample_continuations(
    llm: LLM, prompts: Sequence[Sequence[int]], *, new_tokens: int, temperature: float, seed: int = 0
) -> list[list[int]]:
    """Continue each prompt with the model alone, as many at once as the engine takes.

    Args:
        llm: the target.
        prompts: token ids, any lengths.
        new_tokens: at most so many new tokens each.
        temperature: 0 is greedy.
        seed: of the sampling.

    Returns:
        New tokens of each prompt, the end token included where one was reached.
    """
    params = SamplingParams(max_new_tokens=new_tokens, temperature=temperature, seed=seed)
    return [done.token_ids for done in llm.generate([list(prompt) for prompt in prompts], params)]


@dataclass(frozen=True)
class Plan:
    """What to have written, and into which file.

    Attributes:
        path: the ``.jsonl`` file; a ``.json`` beside it says what wrote it.
        count: answers wanted.
        minutes: at most so many minutes of writing.
        tokens: new tokens of each.
        batch: written at a time.
        temperatures: of the batches in turn.
        seed: of prompts and samples.
        keep: take the file as it is, because a run that was trained on it is resumed.
    """

    path: Path
    count: int
    minutes: float
    tokens: int
    batch: int
    temperatures: tuple[float, ...]
    seed: int
    keep: bool = False


@dataclass(frozen=True)
class Asked:
    """A batch that the target is to write.

    Attributes:
        prompts: token ids.
        new_tokens, temperature, seed: of ``sample_continuations``.
    """

    prompts: list[list[int]]
    new_tokens: int
    temperature: float
    seed: int


Write = Callable[[Iterable[Asked]], Generator[tuple[Asked, Sequence[Sequence[int]]], None, None]]
"""Writes batches, in any order."""


def by(llm: LLM) -> Write:
    """Batches written by an engine here, one after the other."""
    return lambda batches: ((asked, sample_continuations(llm, **vars(asked))) for asked in batches)


class Samples(Pieces):
    """A file of what a target writes, and the record beside it of what wrote it and how.

    Its batches are its pieces. Each goes under its number first, and at the file's end when all before it are
    there: a file that is read meanwhile holds whole batches, in order.

    Args:
        plan: see there.
        target: ``weights_digest`` of it, for the record.
        tokenizer: of the target.
        prompts: files that the prompts come from, for the record; `held_back` documents of theirs are left out.

    Attributes:
        count: answers that the file holds.

    Raises:
        InputError: the file is another target's, or was written with other settings.
        LoadError: a run that is resumed has lost it.
    """

    def __init__(
        self,
        plan: Plan,
        target: str,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[TextSpec],
        held_back: int = 0,
    ) -> None:
        self.plan, self.out = plan, plan.path
        self._shares = np.array([spec.decay for spec in prompts], dtype=float)
        self._origin = {
            "target": target,
            "tokenizer": _digest(json.dumps(sorted(tokenizer.get_vocab().items())).encode()),
            "prompts": [f"{spec.path.name}@{spec.decay:g}" for spec in prompts],
            "held_back": held_back,
            "sample_tokens": plan.tokens,
            "sample_batch": plan.batch,
            "temperatures": list(plan.temperatures),
            "seed": plan.seed,
        }
        if plan.keep:
            self.count = self._open()
        else:
            with self._alone():
                self.count = self._open()

    def _open(self) -> int:
        """Rows that the file holds, when it is this run's."""
        record = self.out.with_suffix(".json")
        if self.plan.keep and not self.out.exists():
            raise LoadError(f"{self.out} is gone, and the run to resume was trained on it; put it back, or begin anew")
        with writing(self.out):
            if not whole_lines(self.out) and not self._parts():
                record.write_text(json.dumps(self._origin, indent=2) + "\n", encoding="utf-8")
        if not record.exists():
            raise InputError(
                f"{self.out} has no {record.name} beside it that says what wrote it; delete it to begin anew"
            )
        before = read_json(record)
        for name, value in self._origin.items():
            if before.get(name) != value:
                raise InputError(
                    f"{self.out} was written with {name} {before.get(name)!r}, and this run has {value!r}; delete the "
                    f"file and {self.folder.name} to have others written, or choose another --out"
                )
        with writing(self.out):
            count = whole_lines(self.out, 1 if self.plan.keep else self.plan.batch)
            if not self.plan.keep:
                for path in self._parts():
                    if int(path.stem) < count // self.plan.batch:  # killed between the file and here
                        path.unlink()
        return count

    def asked(self, number: int, pools: Sequence[Sequence[Ids]]) -> Asked:
        """What is to be written for a batch: it depends on the seed and the number alone.

        Args:
            number: of the batch, from 0.
            pools: see ``extend``.
        """
        plan = self.plan
        rng = np.random.default_rng((plan.seed, number))
        prompts = draw_prompts(pools, self._shares / self._shares.sum(), plan.batch, rng)
        return Asked(prompts, plan.tokens, plan.temperatures[number % len(plan.temperatures)], number)

    def add(self, asked: Asked, texts: Sequence[Sequence[int]]) -> None:
        """Take a batch in; it may be before its turn.

        Raises:
            LoadError: it cannot be written.
        """
        records = (
            {"tokens": [*prompt, *text], "prompt": len(prompt), "temperature": asked.temperature}
            for prompt, text in zip(asked.prompts, texts, strict=True)
        )
        self.keep(asked.seed, list(records))
        self._join()

    def _join(self) -> None:
        """Append the batches whose turn it is to the file."""
        with writing(self.out), self.out.open("ab") as file:
            while (path := self.path(self.count // self.plan.batch)).exists():
                file.write(path.read_bytes())
                file.flush()
                os.fsync(file.fileno())  # or a power cut could take the batch from both places
                self.count += self.plan.batch
                path.unlink()

    def extend(self, write: Write, pools: Sequence[Sequence[Ids]], note: Callable[[str], None]) -> None:
        """Have the target write until the file holds as many as were wanted, or the time is spent.

        Each line holds `tokens` (prompt and continuation), `prompt` (its length) and `temperature`. A run that is
        resumed has its rows: more of them would be other rows than those of its first part.

        Args:
            write: who writes, see ``by``.
            pools: documents whose beginnings are the prompts, of each file; of one with tokens that do not count
                (``train.counted``) these are the prompt.
            note: told after each batch.
        """
        plan = self.plan
        if plan.keep or self.count >= plan.count:
            return
        with self._alone():
            self.count = self._open()  # another run may have written meanwhile
            self._join()
            self._extend(write, pools, note)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other run opens or writes the file meanwhile."""
        with self.lock():
            try:
                yield
            finally:
                if not self._parts():
                    self.remove()

    def _parts(self) -> list[Path]:
        return list(self.folder.glob("*.jsonl"))

    def _extend(self, write: Write, pools: Sequence[Sequence[Ids]], note: Callable[[str], None]) -> None:
        plan, spent, began = self.plan, 0.0, time.monotonic()
        numbers = range(self.count // plan.batch, -(-plan.count // plan.batch))
        missing = [number for number in numbers if not self.path(number).exists()]

        def batches() -> Iterator[Asked]:
            for number in missing:
                if spent >= plan.minutes * 60:
                    return
                yield self.asked(number, pools)

        with contextlib.closing(write(batches())) as written:
            for asked, texts in written:
                self.add(asked, texts)
                now = time.monotonic()
                spent, began = spent + min(now - began, LONGEST_STEP_SECONDS), now
                note(f"samples: {self.count} of {plan.count}, {spent / 60:.1f} min")


def weights_digest(model: PreTrainedModel) -> str:
    """A short name of a model's function: its settings, end tokens, and some values of every weight."""
    settings = model.config.to_diff_dict()
    for name in ("_name_or_path", "transformers_version"):
        settings.pop(name, None)
    parts = [json.dumps([settings, model.generation_config.eos_token_id], sort_keys=True, default=str).encode()]
    for name, weight in model.named_parameters():
        values = weight.detach().flatten()
        some = values[:: max(len(values) // DIGEST_VALUES, 1)][:DIGEST_VALUES]
        parts += [f"{name} {tuple(weight.shape)}".encode(), some.float().cpu().numpy().tobytes()]
    return _digest(b"\n".join(parts))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def draw_prompts(
    pools: Sequence[Sequence[Ids]], shares: np.ndarray, count: int, rng: np.random.Generator
) -> list[list[int]]:
    """Beginnings of documents, all of one length from 8 to `LONGEST_PROMPT`; of a chat its whole prompt."""
    length = int(rng.integers(8, LONGEST_PROMPT + 1))
    found: list[list[int]] = []
    for pool in rng.choice(len(pools), size=count, p=shares):
        documents = pools[pool]
        document = documents[int(rng.integers(len(documents)))]
        for _ in range(100):
            if len(document) > length or document[0] < 0:
                break
            document = documents[int(rng.integers(len(documents)))]
        found.append(prompt_of(document, length))
    return found


def prompt_of(document: Ids, length: int) -> list[int]:
    """The first tokens of a text; of a document that begins with tokens that do not count, these."""
    if document[0] < 0:
        counted = np.flatnonzero(document >= 0)
        length = int(counted[0]) if len(counted) else len(document)
    found: list[int] = token_ids(document[:length]).tolist()
    return found

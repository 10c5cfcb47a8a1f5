"""The target's own continuations as training text of a draft: kept in a file, extended when a run is repeated.

A draft is asked about text that the target writes, not about text that people wrote; what it learns here counts.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sakiyomi.core.checkpoint import read_json
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.llm import LLM
from sakiyomi.train.counted import token_ids
from sakiyomi.train.data import Ids, TextSpec
from sakiyomi.train.report import Reporter
from sakiyomi.train.schedule import LONGEST_STEP_SECONDS
from sakiyomi.train.writing import writing

# The longest prompt of a sample.
LONGEST_PROMPT = 96
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
        keep: take the file as it is: what was trained on it goes on.
    """

    path: Path
    count: int
    minutes: float
    tokens: int
    batch: int
    temperatures: tuple[float, ...]
    seed: int
    keep: bool = False


class Samples:
    """A file of what a target writes, and the record beside it of what wrote it and how.

    Args:
        plan: see there.
        target: for the record.
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
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[TextSpec],
        held_back: int = 0,
    ) -> None:
        self.plan, self.path = plan, plan.path
        self._shares = np.array([spec.decay for spec in prompts], dtype=float)
        self._origin = {
            "target": weights_digest(target),
            "tokenizer": _digest(json.dumps(sorted(tokenizer.get_vocab().items())).encode()),
            "prompts": [f"{spec.path.name}@{spec.decay:g}" for spec in prompts],
            "held_back": held_back,
            "sample_tokens": plan.tokens,
            "sample_batch": plan.batch,
            "temperatures": list(plan.temperatures),
            "seed": plan.seed,
        }
        self.count = self._open()

    def _open(self) -> int:
        """Rows that the file holds, when it is this run's."""
        record = self.path.with_suffix(".json")
        if self.plan.keep and not self.path.exists():
            raise LoadError(f"{self.path} is gone, and the run to resume was trained on it; put it back, or begin anew")
        with writing(self.path):
            count = whole_lines(self.path)
            if not count:
                record.write_text(json.dumps(self._origin, indent=2) + "\n", encoding="utf-8")
                return 0
        if not record.exists():
            raise InputError(
                f"{self.path} has no {record.name} beside it that says what wrote it; delete it to begin anew"
            )
        before = read_json(record)
        for name, value in self._origin.items():
            if before.get(name) != value:
                raise InputError(
                    f"{self.path} was written with {name} {before.get(name)!r}, and this run has {value!r}; delete the "
                    "file to have others written, or choose another --out"
                )
        return count

    def extend(self, llm: LLM, pools: Sequence[Sequence[Ids]], reporter: Reporter) -> None:
        """Have the target write until the file holds as many as were wanted, or the time is spent.

        Each line holds `tokens` (prompt and continuation), `prompt` (its length) and `temperature`. Batch b depends on
        the seed and b alone, so that a run that was stopped goes on where it was. A run that is resumed has its rows:
        more of them would be other rows than those of its first part.

        Args:
            llm: the target, which writes.
            pools: documents whose beginnings are the prompts, of each file; of one with tokens that do not count
                (``train.counted``) these are the prompt.
            reporter: told after each batch.
        """
        plan = self.plan
        if plan.keep:
            return
        spent = 0.0
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            while self.count < plan.count and spent < plan.minutes * 60:
                began = time.monotonic()
                batch = self.count // plan.batch
                rng = np.random.default_rng((plan.seed, batch))
                chosen = draw_prompts(pools, self._shares / self._shares.sum(), plan.batch, rng)
                temperature = plan.temperatures[batch % len(plan.temperatures)]
                texts = sample_continuations(llm, chosen, new_tokens=plan.tokens, temperature=temperature, seed=batch)
                for prompt, text in zip(chosen, texts, strict=True):
                    record = {"tokens": prompt + text, "prompt": len(prompt), "temperature": temperature}
                    file.write(json.dumps(record) + "\n")
                file.flush()
                self.count += len(texts)
                spent += min(time.monotonic() - began, LONGEST_STEP_SECONDS)
                reporter.note(f"samples: {self.count} of {plan.count}, {spent / 60:.1f} min")


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


def whole_lines(path: Path) -> int:
    """Lines in the file after a last half-written one, if any, was cut off."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    return content.count(b"\n")

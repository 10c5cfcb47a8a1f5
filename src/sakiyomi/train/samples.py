"""The target's own continuations as training text of a draft: kept in a file, extended when a run is repeated.

A draft is asked about text that the target writes, not about text that people wrote; what it learns here counts.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sakiyomi.errors import InputError, LoadError
from sakiyomi.llm import LLM
from sakiyomi.loading.checkpoint import read_json
from sakiyomi.params import SamplingParams
from sakiyomi.train.config import DraftConfig
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


class Samples:
    """The file `samples.jsonl` of a run, and `samples.json` beside it, which says what wrote it and how.

    Args:
        config: of the run.
        target: for the record.
        tokenizer: of the target.
        prompts: files that the prompts come from, for the record; `held_back` documents of theirs are left out.

    Raises:
        InputError: the file is another target's, or was written with other settings.
        LoadError: a run that is resumed has lost it.
    """

    def __init__(
        self,
        config: DraftConfig,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[TextSpec],
        held_back: int = 0,
    ) -> None:
        self.path = Path(config.out) / "samples.jsonl"
        self._config = config
        self._shares = np.array([spec.decay for spec in prompts], dtype=float)
        self._origin = {
            "target": weights_digest(target),
            "tokenizer": _digest(json.dumps(sorted(tokenizer.get_vocab().items())).encode()),
            "prompts": [f"{spec.path.name}@{spec.decay:g}" for spec in prompts],
            "held_back": held_back,
            "sample_tokens": config.sample_tokens,
            "sample_batch": config.sample_batch,
            "temperatures": list(config.temperatures),
            "seed": config.seed,
        }
        self.count = self._open()

    def _open(self) -> int:
        """Rows that the file holds, when it is this run's."""
        record = self.path.with_suffix(".json")
        if self._config.resume and not self.path.exists():
            raise LoadError(f"{self.path} is gone, and the run to resume was trained on it; put it back, or begin anew")
        with writing(self.path):
            count = _whole_lines(self.path)
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
        """Have the target write until the file holds `samples`, or `sample_minutes` are spent.

        Each line holds `tokens` (prompt and continuation), `prompt` (its length) and `temperature`. Batch b depends on
        the seed and b alone, so that a run that was stopped goes on where it was. A run that is resumed has its rows:
        more of them would be other rows than those of its first part.

        Args:
            llm: the target, which writes.
            pools: documents whose beginnings are the prompts, of each file.
            reporter: told after each batch.
        """
        config = self._config
        if config.resume:
            return
        spent = 0.0
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            while self.count < config.samples and spent < config.sample_minutes * 60:
                began = time.monotonic()
                batch = self.count // config.sample_batch
                rng = np.random.default_rng((config.seed, batch))
                chosen = draw_prompts(pools, self._shares / self._shares.sum(), config.sample_batch, rng)
                temperature = config.temperatures[batch % len(config.temperatures)]
                texts = sample_continuations(
                    llm, chosen, new_tokens=config.sample_tokens, temperature=temperature, seed=batch
                )
                for prompt, text in zip(chosen, texts, strict=True):
                    record = {"tokens": prompt + text, "prompt": len(prompt), "temperature": temperature}
                    file.write(json.dumps(record) + "\n")
                file.flush()
                self.count += len(texts)
                spent += min(time.monotonic() - began, LONGEST_STEP_SECONDS)
                reporter.note(f"samples: {self.count} of {config.samples}, {spent / 60:.1f} min")


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
    """Beginnings of documents, all of one length from 8 to `LONGEST_PROMPT` so that a batch needs no padding."""
    length = int(rng.integers(8, LONGEST_PROMPT + 1))
    found: list[list[int]] = []
    for pool in rng.choice(len(pools), size=count, p=shares):
        documents = pools[pool]
        document = documents[int(rng.integers(len(documents)))]
        for _ in range(100):
            if len(document) > length:
                break
            document = documents[int(rng.integers(len(documents)))]
        found.append(document[:length].tolist())
    return found


def _whole_lines(path: Path) -> int:
    """Lines in the file after a last half-written one, if any, was cut off."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    return content.count(b"\n")

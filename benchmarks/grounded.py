"""Tasks whose answer stands in what the model is given, beside one whose answer does not: encoder-decoder pairs.

The questions are the held-out examples in the target's folder. A text to be corrected is nearly all copied, a recording
fixes every letter, and of a story to be continued nothing is known: what a draft is worth goes down in that order.

python recipes/edits.py --out edits --text stories.jsonl
python benchmarks/grounded.py --target edits/target/model --draft model:edits/draft/model
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer

from forward_clock import ForwardClock
from inflate_seq import positions
from sakiyomi.cli.common import JsonOption, add_command
from sakiyomi.cli.output import emit_json, progress, quiet
from sakiyomi.cli.rows import show
from sakiyomi.core.errors import LoadError, SakiyomiError
from sakiyomi.core.outputs import Stats
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine import machine
from sakiyomi.evaluation.bench.config import BenchConfig, Note
from sakiyomi.evaluation.bench.models import Pair, inflated
from sakiyomi.evaluation.bench.peers import generation_settings
from sakiyomi.evaluation.bench.report import Row, of_race
from sakiyomi.evaluation.bench.runner import Agreement, Contender, Judge, Outputs, TimedRun, race, same_tokens, timed
from sakiyomi.model_executor.loading.model import parse_device, parse_dtype

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))

from held_out import Example, read_examples
from scores import exact_match, word_error_rate
from sounds import RATE, recording

__all__ = ["grounded"]

TITLE = "greedy, one at a time, tokens/s"
NEAR_TIE = 4.0
"""Two tokens are a near-tie if their logits are apart by so many steps of the dtype at the largest logit."""


def grounded(config: BenchConfig, note: Note) -> Row:
    """Plain, a draft model and drafts from text alone, ours and transformers', for each task of the target's folder.

    What cannot run this target is left out with a note.

    Raises:
        LoadError: the target's folder has no held-out examples, or a model cannot be read.
    """
    examples = read_examples(Path(config.target).expanduser())
    models = [_load(name, config) for name in (config.target, config.draft_model)]
    target = models[0]
    pair = Pair(config)
    engines: dict[str, Any] = {}
    left_out = []
    for name, spec in (("plain", "none"), ("draft model", None), ("prompt-lookup", "prompt-lookup")):
        try:
            note(f"grounded: {name}")
            engines[name] = pair.llm(spec)
        except SakiyomiError as error:
            left_out.append(f"sakiyomi {name} is left out: {error}")
    named: list[tuple[str, Row]] = []
    for task in dict.fromkeys(example.task for example in examples):
        some = [example for example in examples if example.task == task][: config.count]
        contenders = []
        if config.peers:
            contenders.append(_contender("transformers plain", _theirs(target, None, some, config), some, target))
            contenders.append(
                _contender("transformers assisted", _theirs(target, models[1], some, config), some, target)
            )
        for name, llm in engines.items():
            if name == "prompt-lookup" and not some[0].source:
                continue  # a recording has no text to look into
            contenders.append(_contender(f"sakiyomi {name}", _ours(llm, target, some, config), some, target))
            if name == "draft model":
                free = _ours(llm, target, some, config, gamma="auto")
                contenders.append(_contender("sakiyomi draft model, auto", free, some, target))
        if not contenders:
            raise LoadError(f"nobody can run {config.target!r}: {'; '.join(left_out) or 'peers is off'}")

        def tell(text: str, task: str = task) -> None:
            note(f"{task}: {text}")

        named.append((task, of_race("grounded", TITLE, race(contenders, repeats=config.repeats, note=tell))))
    lines = [dict(line) | {"name": f"{task}: {line['name']}"} for task, row in named for line in row.lines]
    notes = [f"{task}: {text}" for task, row in named for text in row.notes] + left_out
    conditions: dict[str, Any] = {
        "target": config.target,
        "draft": config.draft_model,
        "inflated": inflated(*(one.model.config for one in models)),
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "gamma": config.gamma,
        "laps": config.repeats,
        "texts": min(config.count, len(examples)),
    }
    conditions |= {f"{task} A/A": row.conditions["A/A"] for task, row in named}
    return Row("grounded", TITLE, lines, conditions, notes)


# ---------------------------------------------------------------- models and questions


@dataclass(frozen=True)
class _Loaded:
    """A model as transformers runs it.

    Attributes:
        model: with generation settings of its own.
        tokenizer: of the answers.
        extractor: of sounds; None: it reads text.
    """

    model: Any
    tokenizer: Any
    extractor: Any

    def question(self, example: Example) -> dict[str, Any]:
        """What transformers' ``generate`` is given."""
        if self.extractor is None:
            found = dict(self.tokenizer([example.source], return_tensors="pt"))
            return {name: found[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
        sound = recording(example.target, example.seed)
        features = self.extractor(sound, sampling_rate=RATE, return_tensors="pt")["input_features"]
        return {"input_features": features.to(self.model.device, self.model.dtype)}

    def answer(self, tokens: Sequence[int]) -> list[int]:
        """The answer's own tokens: without the one that starts the decoder, and from the end token on nothing."""
        tokens = list(tokens)
        start, end = self.model.config.decoder_start_token_id, self.model.config.eos_token_id
        if tokens[:1] == [start]:
            tokens = tokens[1:]
        return tokens[: tokens.index(end)] if end in tokens else tokens


def _load(name: str, config: BenchConfig) -> _Loaded:
    import transformers

    folder = Path(name).expanduser()
    dtype = "auto" if config.dtype == "auto" else parse_dtype(config.dtype)
    try:
        hears = hasattr(transformers.AutoConfig.from_pretrained(folder, local_files_only=True), "num_mel_bins")
        auto = transformers.AutoModelForSpeechSeq2Seq if hears else transformers.AutoModelForSeq2SeqLM
        model: Any = auto.from_pretrained(folder, dtype=dtype, local_files_only=True)
        model = model.to(parse_device(config.device)).eval()
        if hears:
            processor: Any = transformers.AutoProcessor.from_pretrained(folder, local_files_only=True)
            return _Loaded(model, processor.tokenizer, processor.feature_extractor)
        return _Loaded(model, transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True), None)
    except (OSError, ValueError) as error:
        raise LoadError(
            f"cannot load {name!r} as an encoder-decoder model: {error}; give the folders of a pair with "
            "--target and --draft model:FOLDER"
        ) from error


# ---------------------------------------------------------------- contenders


def _contender(name: str, lap: Callable[[], TimedRun], examples: Sequence[Example], target: _Loaded) -> Contender:
    """A lap with the scores of its answers."""

    def scored() -> TimedRun:
        found = lap()
        if not examples[0].grounded:
            return found
        right = [example.target for example in examples]
        got = target.tokenizer.batch_decode([list(text) for text in found.outputs], skip_special_tokens=True)
        scores = {"exact_match": exact_match(right, got), "word_error_rate": word_error_rate(right, got)}
        return replace(found, figures=found.figures | scores)

    return Contender(name, scored, _judge(target, examples))


def _ours(
    llm: Any, target: _Loaded, examples: Sequence[Example], config: BenchConfig, gamma: int | str | None = None
) -> Callable[[], TimedRun]:
    """Through ``LLM.generate``: texts as they are, recordings as ``sakiyomi.Audio``."""
    import sakiyomi

    params = SamplingParams(max_new_tokens=_most(target, config), gamma=gamma or config.gamma)

    def prompt(example: Example) -> Any:
        if target.extractor is None:
            return example.source
        audio: Any = sakiyomi.Audio  # type: ignore[attr-defined,unused-ignore]
        return audio(recording(example.target, example.seed), RATE)

    def lap() -> TimedRun:
        done: list[Any] = []

        def work() -> list[list[int]]:
            for example in examples:
                done.extend(llm.generate([prompt(example)], params))
            return [target.answer(one.token_ids) for one in done]

        found = timed(work)
        return replace(found, figures={"tau": Stats.total(one.stats for one in done).tau})

    return lap


def _theirs(
    target: _Loaded, draft: _Loaded | None, examples: Sequence[Example], config: BenchConfig
) -> Callable[[], TimedRun]:
    """Transformers' own loop, with a constant number of draft tokens as ours."""
    start = target.model.config.decoder_start_token_id

    def lap() -> TimedRun:
        made = 0  # tokens, end tokens included

        def answer(example: Example) -> list[int]:
            nonlocal made
            extra = {} if draft is None else {"assistant_model": draft.model}
            with torch.no_grad():
                tokens = target.model.generate(**target.question(example), **extra)[0].tolist()
            made += len(tokens) - (tokens[0] == start)
            return target.answer(tokens)

        with generation_settings(target.model, _settings(target, config)):
            if draft is None:
                with ForwardClock([target.model]) as clock:
                    found = timed(lambda: [answer(example) for example in examples])
            else:
                assistant = _settings(draft, config)
                assistant.num_assistant_tokens = config.gamma
                assistant.num_assistant_tokens_schedule = "constant"
                assistant.assistant_confidence_threshold = 0.0
                with generation_settings(draft.model, assistant), ForwardClock([target.model]) as clock:
                    found = timed(lambda: [answer(example) for example in examples])
        # As with ours, the first token of an answer is the prompt's.
        rounds = clock.calls[0] - len(examples)
        return replace(found, figures={"tau": (made - len(examples)) / max(rounds, 1)})

    return lap


def _settings(loaded: _Loaded, config: BenchConfig) -> Any:
    settings = copy.deepcopy(loaded.model.generation_config)
    settings.max_length, settings.max_new_tokens, settings.do_sample = None, _most(loaded, config), False
    return settings


def _most(loaded: _Loaded, config: BenchConfig) -> int:
    """New tokens of an answer at most: a decoder's table of positions may be shorter than what was asked for."""
    return min(config.max_new_tokens, positions(loaded.model.config) - 1)


def _judge(target: _Loaded, examples: Sequence[Example]) -> Judge:
    """Equal, or different where the target's two likeliest tokens are a near-tie in its dtype."""

    def judge(expected: Outputs, got: Outputs) -> Agreement:
        found = same_tokens(expected, got)
        if found.equal or len(expected) != len(got):
            return found
        apart = []
        for example, right, text in zip(examples, expected, got, strict=True):
            if right != text:
                gap, limit = _gap(target, example, right, text)
                apart.append((gap - limit, gap, limit))
        defects = [one for one in apart if one[0] > 0]
        _, gap, limit = max(defects or apart)
        what = "no near-tie" if defects else "near-ties"
        note = f"{len(apart)} of {len(got)} texts part ({what}): gap {gap:.2g}, explained up to {limit:.2g}"
        return Agreement(False, not defects, note)

    return judge


@torch.no_grad()
def _gap(target: _Loaded, example: Example, right: Sequence[int], text: Sequence[int]) -> tuple[float, float]:
    """How much likelier the target finds the expected token where two answers part, in logits, and what rounding is."""
    config = target.model.config
    end = [config.eos_token_id]
    one, other = [*right, *end], [*text, *end]
    place = next(i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    tokens = torch.tensor([[config.decoder_start_token_id, *one[:place]]], device=target.model.device)
    logits = target.model(**target.question(example), decoder_input_ids=tokens, use_cache=False).logits[0, -1].float()
    step = float(logits.abs().max()) * torch.finfo(target.model.dtype).eps
    return abs(float(logits[one[place]] - logits[other[place]])), NEAR_TIE * step


# ---------------------------------------------------------------- command line


def bench(config: BenchConfig, output: JsonOption) -> None:
    """Measure an encoder-decoder pair on its own tasks.

    Plain, a draft model and drafts from text alone, beside transformers, on the questions in the target's folder.
    """
    try:
        config.check_pair()
        with progress("loading") as status:
            quiet()
            conditions = machine.conditions()
            done = show([grounded(config, status.update)], conditions, status)
    except SakiyomiError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    if output.json:
        emit_json({"conditions": conditions, "rows": [row.to_dict() for row in done]})


app = typer.Typer(rich_markup_mode=None, add_completion=False)
add_command(app, bench, name=None)

if __name__ == "__main__":
    app()

"""Trains a drafter for a target on the target's own answers, before ``tune`` measures it against all others.

Everything lies in a folder of the target beside the profiles, since the folder of the target may be shared, read-only
or a single file. The same command continues a stopped run there.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sakiyomi.cache.policies.retaining.formats import fingerprint
from sakiyomi.core.chats import Chat
from sakiyomi.core.checkpoint import read_json
from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.core.files import whole_file
from sakiyomi.core.prompts import read_prompts
from sakiyomi.engine import machine
from sakiyomi.engine.chat_template import has_template
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.tuned_profile import profiles_folder
from sakiyomi.evaluation.loading import load
from sakiyomi.evaluation.tuning.beginnings import beginnings
from sakiyomi.evaluation.tuning.config import PairConfig
from sakiyomi.evaluation.tuning.forecast import forecast
from sakiyomi.evaluation.tuning.kinds import CUT, ROWS, Choice, Costs, choose, told, weights_of
from sakiyomi.train.answers import HELD_OUT, INSTRUCTIONS, Answers, as_asked, instructions
from sakiyomi.train.checkpoint import checkpoints
from sakiyomi.train.commands import COMMANDS
from sakiyomi.train.counted import read_counted
from sakiyomi.train.progress import LONGEST_STEP_SECONDS, Progress, Reporter
from sakiyomi.train.samples import Plan, by

OWN = "instructions"
ANSWERING = 0.25
"""Share of the minutes in which the target answers; the training has the others."""
NEW_TOKENS, MOST = 256, 16384
"""New tokens of an answer, most answers."""
LEAST, BATCH, AT_A_TIME = 32, 192, 20.0
"""Fewest and most answers that are asked for at a time, and about how many seconds they should take: a stopped run
loses those of one time, and a time is charged as no more than ``LONGEST_STEP_SECONDS``."""
SLOTS = 64
"""Answers that are written beside each other: with fewer, a pass writes fewer tokens a second."""
ROW, STEP, UNROLL = 512, 1024, 4
"""Tokens of a row of text and of a step of the optimizer; draft steps of each place that an EAGLE head learns."""
MEASURED_TEXTS, FIRST_FORECAST = 12, 2.0
"""Held-out answers, and minutes from one measurement on them to the next."""
MOST_KEPT = 64
KEPT_GIB = 8.0
"""Of the target's hidden states on disk: those of some two million tokens of a small model."""
Note = Callable[[str], None]
Ask = Callable[[str], bool]


@dataclass
class State:
    """How far a run has come; kept in its folder.

    Attributes:
        answered: seconds that the target has answered.
        agreed: the question after the first forecast was answered with yes.
        choice: what is trained.
        costs: by which it was chosen.
    """

    answered: float = 0.0
    agreed: bool = False
    choice: dict[str, Any] = field(default_factory=dict)
    costs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> State:
        """That of a folder, or a new one; other versions may have written other keys."""
        found = read_json(path) if path.is_file() else {}
        return cls(**{name: value for name, value in found.items() if name in cls.__dataclass_fields__})

    def write(self, path: Path) -> None:
        """Keep it."""
        with whole_file(path, "make room there, or set SAKIYOMI_PROFILES to another folder") as fresh:
            fresh.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def train_drafter(config: PairConfig, note: Note, ask: Ask, quiet: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Have the target answer, choose a drafter, train it.

    Args:
        config: with `train`.
        note: told what is being done.
        ask: the question after the first forecast; False: stop.
        quiet: called before the training, which shows its own progress.

    Returns:
        `finished`; when it is, `draft` (a spec), `kind`, `folder`, `answers`, `held_out` and `prompts`, the file of
        prompts that nothing was trained on; else `why`.

    Raises:
        InputError, LoadError, UnsupportedError: before the target answers, where that is possible.
    """
    source, measured = _read(config)
    note(f"loading {config.target}")
    llm = load(config, "none", max_batch=SLOTS, strict=True)
    given, held = _split(config, llm, source, measured)
    own = fingerprint(llm.target.module, llm.tokenizer)
    folder = _folder(config, own)
    folder.mkdir(parents=True, exist_ok=True)
    kept = _keep(folder / "measured.jsonl", held)
    state = State.read(folder / "state.json")
    answers = _answer(config, llm, own.get("weights", config.target), given, folder, state, note)
    run = folder / f"{config.train:g}-minutes"
    choices, costs = _choose(config, llm, answers, state, note)
    row = min(ROW, llm.max_context)
    del llm
    gc.collect()
    quiet()
    for choice in choices:
        state.choice = asdict(choice)
        state.write(folder / "state.json")
        try:
            settings = _settings(config, choice, costs, answers, run / choice.kind, row)
            found = _train(config, choice, costs, settings, state, ask)
        except (UnsupportedError, InputError) as error:  # of a kind that this target cannot have
            if choice is choices[-1]:
                raise
            Reporter(0).note(f"{choice.kind}: {error}")
            continue
        return found | {"folder": str(folder), "prompts": kept, "answers": str(answers)}
    raise AssertionError("there is a choice")


def _read(config: PairConfig) -> tuple[Sequence[Any] | None, Sequence[Any] | None]:
    """Prompts to train on and prompts to measure with, as far as files are given."""
    if config.train_prompts is None:
        return None if config.prompts is None else read_prompts(config.prompts), None
    own = config.texts()
    if own is not None and len(own) < 2:
        raise InputError("there is one prompt to measure with; give two or more with --prompts")
    return (instructions(held_out=False) if config.train_prompts == OWN else read_prompts(config.train_prompts)), own


def _split(
    config: PairConfig, llm: LLM, source: Sequence[Any] | None, measured: Sequence[Any] | None
) -> tuple[list[list[int]], Sequence[str | Chat] | None]:
    """Token ids of the prompts to train on, and prompts to measure with; None: those of the package."""
    chats = has_template(llm.tokenizer)
    if source is None:
        source = instructions(held_out=False) if chats else beginnings(2 * config.count)[config.count :]
    elif measured is None and config.train_prompts is None:
        measured = source[::HELD_OUT][:MOST_KEPT]
        source = [text for number, text in enumerate(source) if number % HELD_OUT or number >= HELD_OUT * MOST_KEPT]
        if len(measured) < 2 or not source:
            raise InputError(
                f"prompts has {len(source) + len(measured)} prompts, and every {HELD_OUT}th is kept for measuring; "
                f"give more than {HELD_OUT}, or other ones to learn from with --train-prompts"
            )
    given = [as_asked(llm.tokenizer, text, config.prompt_tokens) for text in source]
    room = llm.max_context - _new_tokens(llm)
    fitting = [ids for ids in given if 0 < len(ids) <= room]
    if not fitting:
        raise InputError(f"no prompt leaves room for an answer in the target's {llm.max_context} positions")
    return fitting, measured


def _new_tokens(llm: LLM) -> int:
    return min(NEW_TOKENS, llm.max_context // 2)


def _batch(llm: LLM) -> int:
    """Answers to ask for at a time, by what a pass costs here."""
    answer = _new_tokens(llm) * llm.target.pass_seconds(SLOTS) / SLOTS
    return min(BATCH, max(LEAST, int(AT_A_TIME / answer) // LEAST * LEAST))


def _folder(config: PairConfig, own: dict[str, str]) -> Path:
    """Of a target, with these prompts and this temperature; dtypes share it, since a head is trained in bfloat16."""
    prompts = config.train_prompts or config.prompts or OWN
    key = own | {
        "prompts": prompts if prompts == OWN else str(Path(prompts).resolve()),
        "temperature": str(config.temperature),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    return profiles_folder() / "trained" / f"{Path(config.target).name}-{digest}"


def _keep(path: Path, prompts: Sequence[str | Chat] | None) -> str | None:
    """Write prompts to a file."""
    if prompts is None:
        return None
    lines = [json.dumps({"text": one} if isinstance(one, str) else {"messages": list(one)}) for one in prompts]
    with whole_file(path, "make room there") as fresh:
        fresh.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def _answer(
    config: PairConfig, llm: LLM, name: str, given: list[list[int]], folder: Path, state: State, note: Note
) -> Path:
    """The file of the target's answers, written for its share of the minutes."""
    seconds, path = config.train * 60 * ANSWERING, folder / "answers.jsonl"
    left = seconds - state.answered
    origin = (
        INSTRUCTIONS
        if config.train_prompts in (None, OWN) and config.prompts is None
        else Path(config.train_prompts or config.prompts or OWN)
    )
    record = path.with_suffix(".json")  # a run that goes on asks for as many at a time as its first part
    batch = int(read_json(record)["sample_batch"]) if record.is_file() else _batch(llm)
    plan = Plan(path, MOST, left / 60, _new_tokens(llm), batch, (config.temperature,), 1)
    answers = Answers(plan, name, llm, given, origin)
    if left > 0 or not answers.count:
        note("the target answers")
        began = [time.monotonic()]

        def told(_: str) -> None:
            now = time.monotonic()
            state.answered += min(now - began[0], LONGEST_STEP_SECONDS)
            state.write(folder / "state.json")
            began[0] = now
            note(f"the target answers: {answers.count} answers, {state.answered / 60:.1f} of {seconds / 60:.1f} min")

        answers.extend(by(llm), (), told)
    return path


def _choose(config: PairConfig, llm: LLM, answers: Path, state: State, note: Note) -> tuple[list[Choice], Costs]:
    """What to train, the best first; as it was chosen where a run continues."""
    if state.choice and config.kind in ("auto", state.choice["kind"]):
        passes = {int(rows): share for rows, share in state.costs["passes"].items()}
        return [Choice(**state.choice)], Costs(**state.costs | {"passes": passes})
    note("timing passes")
    llm.wait()
    model = llm.target.config.get_text_config()
    vocab = llm.target.vocab_size
    costs = Costs.of(machine.pass_seconds(llm.target, ROWS, repeats=7), weights_of(model, vocab))
    texts = [ids[ids >= 0] for ids in read_counted(answers, llm.tokenizer, vocab)]
    choices = choose(costs, model, vocab, texts, config.kind)
    Reporter(0).note(told(choices, costs))
    state.costs = asdict(costs)
    return choices, costs


def _train(
    config: PairConfig, choice: Choice, costs: Costs, settings: dict[str, Any], state: State, ask: Ask
) -> dict[str, Any]:
    """Run the recipe, from its checkpoint where it has one; a finished one is taken as it is."""
    out = Path(settings["out"])
    card, kind = out / "model" / "card.json", {"draft": "model"}.get(choice.kind, choice.kind)
    done = {"finished": True, "draft": f"{kind}:{out / 'model'}", "kind": choice.kind}
    if card.is_file():
        return done | {"held_out": read_json(card)["held_out"]}
    watch = _watch(config, choice, costs, out, state, ask)
    run = getattr(importlib.import_module(f"sakiyomi.train.{choice.kind}"), f"train_{choice.kind}")
    found = run(COMMANDS[choice.kind].of(**settings), "", watch)
    if not found["finished"]:
        return {"finished": False, "kind": choice.kind, "step": found["step"], "tokens": found["tokens"]}
    return done | {"held_out": found["held_out"], "tokens": found["tokens"], "minutes": found["minutes"]}


def _settings(config: PairConfig, choice: Choice, costs: Costs, answers: Path, out: Path, row: int) -> dict[str, Any]:
    """Settings of the recipe."""
    minutes = config.train * (1 - ANSWERING)
    common: dict[str, Any] = {
        "target": config.target,
        "out": str(out),
        "minutes": minutes,
        "row_tokens": (row,),
        "step_tokens": max(STEP // row, 1) * row,
        "eval_minutes": min(FIRST_FORECAST, minutes / 4),
        "warmup_steps": 10,
        "decay_share": 0.7,
        "compile": False,
        "resume": bool(checkpoints(out / "checkpoints")),
    }
    if choice.kind in CUT:
        common["draft_vocab"] = choice.draft_vocab
    if choice.kind == "medusa":
        return common | {"data": (str(answers),), "eval_prompts": MEASURED_TEXTS}
    common |= {"text": (str(answers),), "samples": 0, "eval_prompts": MEASURED_TEXTS}
    if choice.kind == "draft":
        return common | {"cost": f"{choice.step / costs.plain:g}"}
    own = {"unroll": UNROLL} if choice.kind == "eagle" else {}
    return common | own | {"speed": False, "cache_gib": KEPT_GIB}


def _watch(
    config: PairConfig, choice: Choice, costs: Costs, out: Path, state: State, ask: Ask
) -> Callable[[Progress, float], bool]:
    """Tells the forecast after every measurement, and asks after the first one."""
    end = config.train * 60 * (1 - ANSWERING)

    def watch(progress: Progress, share: float) -> bool:
        found = forecast(progress.held_out, end, choice, costs)
        line = f"{progress.seconds / 60:.0f} of {end / 60:.0f} min: {found}"
        Reporter(0).note(line)
        if not state.agreed:
            state.agreed = ask(line)
            state.write(out.parents[1] / "state.json")
            return state.agreed
        return True

    return watch


def measured_config(config: PairConfig, trained: dict[str, Any]) -> PairConfig:
    """What ``tune`` measures when the drafter is there."""
    return replace(
        config,
        train=0.0,
        train_prompts=None,
        kind="auto",
        yes=False,
        draft=(*config.draft, trained["draft"]),
        prompts=trained["prompts"] or config.prompts,
    )

"""``sakiyomi bench tasks``: plain and drafted generation, ours and transformers', on the user's own tasks."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from sakiyomi.core.chats import question
from sakiyomi.core.errors import LoadError, MemoryLimitError, UnsupportedError
from sakiyomi.core.outputs import Stats
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.chat_template import prompt_ids
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.config import Note, silent
from sakiyomi.evaluation.bench.pictures import Theme, drawing, grouped
from sakiyomi.evaluation.bench.report import Row, race_notes
from sakiyomi.evaluation.bench.runner import Contender, Standing, TimedRun, race, timed
from sakiyomi.evaluation.bench.study import attempted
from sakiyomi.evaluation.bench.tasks.config import WAYS, TasksConfig
from sakiyomi.evaluation.bench.tasks.data import Question, Score, read_questions, scorer
from sakiyomi.evaluation.bench.tasks.peer import Peer, judged
from sakiyomi.model_executor.loading import Loaded, load_model, stop_tokens
from sakiyomi.model_executor.runner import first_logits
from sakiyomi.model_executor.weights import quantizes

Write = Callable[[Any, SamplingParams], tuple[Sequence[int], Stats | None]]
"""Answers a prompt: its tokens, and what our engine counted."""
TITLE = "seconds an answer and tokens/s, one at a time; answers of equal weights compared"
ASSISTED = "transformers assisted"
HEARD = 30.0  # seconds of a part of a sound, while questions are only checked and no model is loaded


def run(config: TasksConfig, note: Note = silent) -> Iterator[Row]:
    """Yield a row for each kind of task, with a line for each way, temperature and contender.

    Raises:
        SakiyomiError: what is asked for cannot be; before any work.
    """
    scores = {kind: scorer(kind) for kind in config.files()}
    draft = config.draft_model
    for kind, path in config.files().items():
        if not path.exists():
            raise LoadError(f"there is no file or folder {str(path)!r} with questions; check the path")
        _questions(config, kind, HEARD)
    pairs = {way: _Pair(config, draft, way) for way in config.ways}
    return (attempted(kind, TITLE, partial(_row, config, note, kind, scores[kind], pairs)) for kind in scores)


class _Pair:
    """Target and draft for us and for transformers, with the weights held in one way.

    Args:
        config: names the target.
        draft: the draft model.
        way: of ``WAYS``.
    """

    def __init__(self, config: TasksConfig, draft: str, way: str) -> None:
        self._config, self._draft, self._way = config, draft, WAYS[way]

    @cached_property
    def llm(self) -> LLM:
        """Ours."""
        llm = LLM(self._config.target, f"model:{self._draft}", device=self._config.device, **self._way)  # type: ignore[arg-type]
        llm.wait()
        return llm

    @cached_property
    def target(self) -> Loaded:
        """Transformers', where nothing is quantized: the weights are those of the dtype."""
        found = self._load(self._config.target)
        if "offload" not in self._way:
            return found
        read = type(found.model).from_pretrained
        with warnings.catch_warnings():  # accelerate asks for every tensor, and then warns that it is no module
            warnings.filterwarnings("ignore", "The following device_map keys do not match")
            return replace(found, model=read(found.folder, device_map=_on_disk(found.model), dtype=found.model.dtype))

    @cached_property
    def assistant(self) -> Any:
        """The draft model."""
        return self._load(self._draft).model

    def _load(self, name: str) -> Loaded:
        return load_model(name, dtype=self._way["dtype"], device=self._config.device, encoder_decoder=True)


def _questions(config: TasksConfig, kind: str, seconds: float | None) -> list[Question]:
    path, names = config.files()[kind], config.names()
    return read_questions(kind, path, names, config.count, language=config.language, seconds=seconds)


def _row(
    config: TasksConfig, note: Note, kind: str, score: tuple[str, Score] | None, pairs: Mapping[str, _Pair]
) -> Row:
    """Measure every way at every temperature."""
    lines: list[dict[str, Any]] = []
    notes: list[str] = []
    for way, pair in pairs.items():
        try:
            asked = _Asked(config, kind, pair)
        except (UnsupportedError, MemoryLimitError) as refusal:
            notes.append(f"{way} is left out: {refusal}")
            continue
        for heat in config.temperatures:
            where = f"{way}, temperature {heat:g}"
            standings = race(asked.contenders(heat), repeats=config.repeats, note=partial(_tell, note, kind, where))
            assisted = next((standing for standing in standings if standing.name == ASSISTED), None)
            lines += [asked.line(standing, assisted, way, heat, score) for standing in standings]
            notes += [f"{where}: {text}" for text in race_notes(standings)]
    error = None if lines else f"no way of holding the weights is possible: {'; '.join(notes)}"
    names = ("target", "draft_model", "count", "gamma", "max_new_tokens", "repeats")
    shown = {"draft_model": "draft", "count": "texts", "repeats": "runs"}
    conditions = {shown.get(name, name): getattr(config, name) for name in names}
    return Row(kind, TITLE, lines, conditions | {"data": config.files()[kind].name}, notes, error)


def _tell(note: Note, kind: str, where: str, text: str) -> None:
    note(f"{kind}, {where}: {text}")


class _Asked:
    """The questions of a task as prompts for a pair, and the contenders that answer them.

    Args:
        config: the settings.
        kind: of ``config.KINDS``.
        pair: answers.
    """

    def __init__(self, config: TasksConfig, kind: str, pair: _Pair) -> None:
        llm, seconds = pair.llm, None
        encoder, extractor = llm.target.weights.encoder, llm.processor
        if encoder is not None and encoder.limit is not None and hasattr(extractor, "hop_length"):
            seconds = 2 * encoder.limit * extractor.hop_length / extractor.sampling_rate
        self._config, self._pair, self._llm = config, pair, llm
        self._questions = _questions(config, kind, seconds)
        chat = kind == "chat" and getattr(llm.tokenizer, "chat_template", None)
        parts = [part for one in self._questions for part in one.prompts]
        self._prompts = [
            prompt_ids(llm.tokenizer, question(part)) if chat and isinstance(part, str) else part for part in parts
        ]

    def contenders(self, heat: float) -> list[Contender]:
        """The contenders at a temperature: transformers, then ours. Greedy answers are compared."""
        pair, llm, config, prompts = self._pair, self._llm, self._config, self._prompts
        begins = [llm.engine.process(prompt).tokens for prompt in prompts]
        most = min(config.max_new_tokens, llm.max_context - max(map(len, begins)))
        params = SamplingParams(max_new_tokens=most, temperature=heat, gamma=config.gamma)
        quantized = quantizes(llm.target.weights)
        peer = Peer(pair.target)
        end = next(iter(stop_tokens(pair.target.model, llm.tokenizer)), 0)

        def row(number: int, answer: Sequence[int]) -> Any:
            if not quantized:
                return peer.row(prompts[number], begins[number], answer)
            source = llm.engine.process(prompts[number]).source
            return first_logits(llm.target, source, [*begins[number], *answer])

        judge = judged(row, llm.target.dtype, end, len(prompts)) if heat == 0 else None
        theirs: dict[str, Write] = {}
        if config.peers:
            assisted = Peer(pair.target, pair.assistant, config.gamma)
            theirs = {"transformers plain": partial(_theirs, peer), ASSISTED: partial(_theirs, assisted)}
        plain, drafted = partial(_ours, EngineView(llm), llm), partial(_ours, llm, llm)
        ours: dict[str, tuple[Write, int | str]] = {
            "sakiyomi plain": (plain, config.gamma),
            f"sakiyomi draft, gamma {config.gamma}": (drafted, config.gamma),
            "sakiyomi draft, auto": (drafted, "auto"),
        }
        against = "sakiyomi plain" if quantized and heat == 0 else None
        return [Contender(name, partial(self._run, write, params), judge) for name, write in theirs.items()] + [
            Contender(name, partial(self._run, write, replace(params, gamma=gamma)), judge, against)
            for name, (write, gamma) in ours.items()
        ]

    def line(
        self, standing: Standing, assisted: Standing | None, way: str, heat: float, score: tuple[str, Score] | None
    ) -> dict[str, Any]:
        """A line of the table: speed, ratio to transformers' assisted generation, score of the answers."""
        shown = standing.to_dict()
        speed = shown["tokens_per_second"]
        return {
            "name": standing.name,
            "way": way,
            "temperature": heat,
            "seconds_per_answer": shown["tokens"] / speed / len(self._questions) if speed else None,
            "tokens_per_second": speed,
            "over_assisted": standing.ratio_to(assisted) if assisted is not None and speed else None,
            "ratio": shown["ratio"],
            "tau": shown.get("tau"),
            **({} if score is None else {score[0]: score[1](*self._answered(standing.runs[0].outputs))}),
            "equal": shown["equal"],
        }

    def _run(self, write: Write, params: SamplingParams) -> TimedRun:
        """Answer all prompts, one after the other. Special tokens are removed, so that answers can be compared."""
        done: list[tuple[Sequence[int], Stats | None]] = []
        special = set(self._llm.tokenizer.all_special_ids)

        def work() -> list[list[int]]:
            done.extend(write(prompt, replace(params, seed=seed)) for seed, prompt in enumerate(self._prompts))
            return [[token for token in tokens if token not in special] for tokens, _ in done]

        run = timed(work)
        counted = [stats for _, stats in done if stats is not None]
        return run.more(tau=Stats.total(counted).tau) if counted else run

    def _answered(self, outputs: Sequence[Sequence[int]]) -> tuple[list[str], list[Sequence[str]]]:
        """Texts of the answers, with the parts of a sound joined, and the references."""
        decode = self._llm.tokenizer.batch_decode
        texts = iter(decode([list(tokens) for tokens in outputs], skip_special_tokens=True))
        questions = self._questions
        joined = [" ".join(text.strip() for text in itertools.islice(texts, len(one.prompts))) for one in questions]
        return joined, [question.references for question in questions]


def _ours(view: Any, llm: LLM, prompt: Any, params: SamplingParams) -> tuple[Sequence[int], Stats]:
    (done,) = view.generate([llm.engine.process(prompt, params)], params)
    return done.token_ids, done.stats


def _theirs(peer: Peer, prompt: Any, params: SamplingParams) -> tuple[Sequence[int], None]:
    return peer(prompt, params), None


def _on_disk(model: Any) -> dict[str, str]:
    """A device map with all but the embeddings on the disk: transformers' assistants fail where everything is."""
    names = {id(module): name for name, module in model.named_modules()}
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    found = {names[id(module)]: "cpu" for module in ends if module is not None}
    parts, above = names[id(ends[0])].split("."), model
    for depth, part in enumerate(parts):
        own = (*above.named_parameters(recurse=False), *above.named_buffers(recurse=False))
        found |= {".".join([*parts[:depth], name]): "cpu" for name, _ in own}
        for name, _ in above.named_children():
            if name != part:
                found.setdefault(".".join([*parts[:depth], name]), "disk")
        above = getattr(above, part)
    return found


def draw(rows: Sequence[Row], path: str, conditions: Mapping[str, Any]) -> None:
    """Draw every row that has lines.

    Raises:
        LoadError: the file cannot be written.
    """
    if shown := [row for row in rows if row.lines]:
        drawing(path, [(seconds, row, 3.2) for row in shown], {**shown[0].conditions, **conditions}, legend=True)


def seconds(axes: Any, row: Row, theme: Theme) -> None:
    """A panel: seconds an answer by how the weights lie and by temperature; its score stands in the table."""
    places = list(dict.fromkeys(map(_place, row.lines)))
    found = {(line["name"], _place(line)): line["seconds_per_answer"] for line in row.lines}
    names = dict.fromkeys(line["name"] for line in row.lines)
    grouped(axes, places, {name: [found.get((name, place)) for place in places] for name in names}, theme.colours)
    axes.set(ylabel="seconds an answer", title=row.name)


def _place(line: Mapping[str, Any]) -> str:
    heat = line["temperature"]
    return f"{line['way']}, T {heat:g}" if heat else line["way"]

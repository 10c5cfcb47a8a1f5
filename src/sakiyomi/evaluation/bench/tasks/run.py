"""``sakiyomi bench tasks``: plain and drafted, ours and transformers', on the reader's own tasks and their answers."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from sakiyomi.core.audio import Audio
from sakiyomi.core.errors import LoadError, MemoryLimitError, UnsupportedError
from sakiyomi.core.outputs import Stats
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.config import Note, silent
from sakiyomi.evaluation.bench.pictures import Theme, drawing, grouped
from sakiyomi.evaluation.bench.report import Row, race_notes
from sakiyomi.evaluation.bench.runner import Contender, Lap, Standing, race, timed
from sakiyomi.evaluation.bench.study import attempted
from sakiyomi.evaluation.bench.tasks.config import WAYS, TasksConfig
from sakiyomi.evaluation.bench.tasks.data import Question, Score, read_questions, scorer
from sakiyomi.evaluation.bench.tasks.peer import Peer, judged
from sakiyomi.model_executor.loading import Loaded, load_model, stop_tokens
from sakiyomi.model_executor.runner import first_logits

Write = Callable[[Any, SamplingParams], tuple[Sequence[int], Stats | None]]
"""Answers a prompt: its tokens, and what our engine counted."""
TITLE = "seconds an answer and tokens/s, one at a time; answers of equal weights compared"
SEED = 0
HEARD = 30.0  # seconds at once, where the model is not known yet and questions are only looked at


def run(config: TasksConfig, note: Note = silent) -> Iterator[Row]:
    """Give the row of each kind of task when it is done: its ways, temperatures and contenders are the lines.

    Raises:
        SakiyomiError: what is asked for cannot be; before any work.
    """
    scores = {kind: scorer(kind) for kind in config.files()}
    draft = config.draft_model
    for kind, path in config.files().items():
        if not path.exists():
            raise LoadError(f"there is no file or folder {str(path)!r} with questions; check the path")
        read_questions(kind, path, config.names(), config.count, language=config.language, seconds=HEARD)
    pairs = {way: _Pair(config, draft, way) for way in config.ways}

    return (
        attempted(kind, TITLE, _Task(config, note, kind, path, scores[kind], pairs).row)
        for kind, path in config.files().items()
    )


class _Pair:
    """Target and draft, as we and transformers hold them, with the weights in one way.

    Args:
        config: names the target.
        draft: the draft model.
        way: of ``WAYS``.
    """

    def __init__(self, config: TasksConfig, draft: str, way: str) -> None:
        self._config, self._draft, self.way = config, draft, way

    @cached_property
    def llm(self) -> LLM:
        """Ours."""
        llm = LLM(self._config.target, f"model:{self._draft}", device=self._config.device, **WAYS[self.way])  # type: ignore[arg-type]
        llm.wait()
        return llm

    @cached_property
    def target(self) -> Loaded:
        """Transformers', where nothing is quantized: the weights are those of the dtype."""
        found = self._load(self._config.target)
        if not WAYS[self.way].get("offload"):
            return found
        read = type(found.model).from_pretrained
        with warnings.catch_warnings():  # accelerate asks for a place of every tensor, and then takes it for a module
            warnings.filterwarnings("ignore", "The following device_map keys do not match")
            return replace(found, model=read(found.folder, device_map=_on_disk(found.model), dtype=found.model.dtype))

    @cached_property
    def assistant(self) -> Any:
        """The draft model."""
        return self._load(self._draft).model

    def _load(self, name: str) -> Loaded:
        dtype = WAYS[self.way]["dtype"]
        return load_model(name, dtype=dtype, device=self._config.device, encoder_decoder=True)


@dataclass
class _Task:
    """A kind of task while it is measured.

    Attributes:
        config: how much.
        note: is told what is going on.
        kind: of ``config.KINDS``.
        path: of the questions.
        score: of the answers, with its name; None: they have none.
        pairs: by the way the weights lie.
    """

    config: TasksConfig
    note: Note
    kind: str
    path: Path
    score: tuple[str, Score] | None
    pairs: Mapping[str, _Pair]

    def row(self) -> Row:
        """Every way at every temperature, with their conditions."""
        lines: list[dict[str, Any]] = []
        notes: list[str] = []
        for way, pair in self.pairs.items():
            try:
                questions = self._questions(pair.llm)
            except (UnsupportedError, MemoryLimitError) as refusal:
                notes.append(f"{way} is left out: {refusal}")
                continue
            for heat in self.config.temperatures:
                where = f"{way}, temperature {heat:g}"
                standings = self._race(pair, questions, heat, where)
                lines += [self._line(way, heat, standing, standings, len(questions)) for standing in standings]
                notes += [f"{where}: {text}" for text in race_notes(standings)]
        error = None if lines else f"no way of holding the weights is possible: {'; '.join(notes)}"
        conditions = {
            "target": self.config.target,
            "draft": self.config.draft_model,
            "data": self.path.name,
            "texts": self.config.count,
            "gamma": self.config.gamma,
            "max_new_tokens": self.config.max_new_tokens,
            "laps": self.config.repeats,
        }
        return Row(self.kind, TITLE, lines, conditions, notes, error)

    def _questions(self, llm: LLM) -> list[Question]:
        encoder, extractor, seconds = llm.target.weights.encoder, llm.processor, None
        if encoder is not None and encoder.limit is not None and hasattr(extractor, "hop_length"):
            seconds = 2 * encoder.limit * extractor.hop_length / extractor.sampling_rate
        config = self.config
        return read_questions(
            self.kind, self.path, config.names(), config.count, language=config.language, seconds=seconds
        )

    def _race(self, pair: _Pair, questions: Sequence[Question], heat: float, where: str) -> list[Standing]:
        llm, config = pair.llm, self.config
        prompts = [self._prompt(llm, part) for question in questions for part in question.prompts]
        begins = [llm.engine.process(prompt).tokens for prompt in prompts]
        encoder = llm.target.weights.encoder is not None
        room = llm.max_context - max(map(len, begins))
        params = SamplingParams(
            max_new_tokens=min(config.max_new_tokens, room), temperature=heat, seed=SEED, gamma=config.gamma
        )
        quantized = llm.target.weights.quantization is not None
        peer = Peer(pair.target)
        end = next(iter(stop_tokens(pair.target.model, llm.tokenizer)), 0)

        def row(number: int, answer: Sequence[int]) -> Any:
            if not quantized:
                return peer.row(prompts[number], begins[number] if encoder else [], answer)
            source = llm.engine.process(prompts[number]).source
            return first_logits(llm.target, source, [*begins[number], *answer])

        judge = judged(row, llm.target.dtype, end) if heat == 0 else None

        def lap(write: Write, own: SamplingParams) -> Callable[[], Lap]:
            return partial(self._lap, write, prompts, questions, own, llm)

        contenders = []
        if config.peers:
            theirs = {"plain": peer, "assisted": Peer(pair.target, pair.assistant, config.gamma)}
            contenders = [
                Contender(f"transformers {name}", lap(partial(_theirs, way), params), judge)
                for name, way in theirs.items()
            ]
        ours: dict[str, tuple[Any, SamplingParams]] = {
            "plain": (EngineView(llm), params),
            f"draft, gamma {config.gamma}": (llm, params),
            "draft, auto": (llm, replace(params, gamma="auto")),
        }
        against = "sakiyomi plain" if quantized and heat == 0 else None
        contenders += [
            Contender(f"sakiyomi {name}", lap(partial(_ours, view, llm), own), judge, against)
            for name, (view, own) in ours.items()
        ]

        def tell(text: str) -> None:
            self.note(f"{self.kind}, {where}: {text}")

        return race(contenders, repeats=config.repeats, note=tell)

    def _prompt(self, llm: LLM, part: str | Audio) -> str | Audio | list[int]:
        """A question of a chat in the model's own form, where it has one."""
        if self.kind != "chat" or isinstance(part, Audio) or not getattr(llm.tokenizer, "chat_template", None):
            return part
        said = [{"role": "user", "content": part}]
        found = llm.tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=True, return_dict=True)
        return list(found["input_ids"])

    def _lap(
        self, write: Write, prompts: Sequence[Any], questions: Sequence[Question], params: SamplingParams, llm: LLM
    ) -> Lap:
        """All prompts, one after the other, with the score of the answers; those to the parts of a sound are joined."""
        done: list[tuple[Sequence[int], Stats | None]] = []

        def work() -> list[list[int]]:
            done.extend(write(prompt, replace(params, seed=SEED + number)) for number, prompt in enumerate(prompts))
            return [_plain(tokens, llm.tokenizer) for tokens, _ in done]

        lap = timed(work)
        if counted := [stats for _, stats in done if stats is not None]:
            lap = lap.more(tau=Stats.total(counted).tau)
        if self.score is None:
            return lap
        texts = iter(llm.tokenizer.batch_decode([list(tokens) for tokens in lap.outputs], skip_special_tokens=True))
        answers = [" ".join(text.strip() for text in itertools.islice(texts, len(q.prompts))) for q in questions]
        name, score = self.score
        return lap.more(**{name: score(answers, [q.references for q in questions])})

    def _line(
        self, way: str, heat: float, standing: Standing, standings: Sequence[Standing], questions: int
    ) -> dict[str, Any]:
        shown = standing.to_dict()
        speed = shown["tokens_per_second"]
        assisted = next((one for one in standings if one.name == "transformers assisted"), None)
        names = ("ratio", "tau", *([self.score[0]] if self.score else ()), "equal")
        return {
            "name": standing.name,
            "way": way,
            "temperature": heat,
            "seconds_per_answer": shown["tokens"] / speed / questions if speed else None,
            "tokens_per_second": speed,
            "over_assisted": standing.ratio_to(assisted) if assisted is not None and speed else None,
            **{name: shown.get(name) for name in names},
        }


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


def _plain(tokens: Sequence[int], tokenizer: Any) -> list[int]:
    """An answer's own tokens, without those that begin and end it."""
    special = set(tokenizer.all_special_ids)
    return [token for token in tokens if token not in special]


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

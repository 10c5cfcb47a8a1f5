"""Alpha as it is defined, the mean over the places of a text of the sum of min(p, q), and what drafts are worth.

What an engine counts comes near alpha where the draft draws its tokens. A draft that proposes its first guess (n-grams,
or any draft at temperature 0) is accepted with p of that guess, which is another number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.drafters.ngram import NgramDrafter, Tables
from sakiyomi.drafters.ngram_file import FileTables
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.audit.reference import HFReference
from sakiyomi.evaluation.bench.figures.work import Logits, Work, lap, line_of, runner_rows
from sakiyomi.evaluation.bench.models import NearTies
from sakiyomi.evaluation.bench.pictures import Figures, Theme, heat, stack
from sakiyomi.evaluation.bench.report import Row, race_notes
from sakiyomi.evaluation.bench.runner import Spread
from sakiyomi.evaluation.bench.tasks.peer import Peer
from sakiyomi.evaluation.loading import load
from sakiyomi.evaluation.tuning.candidates import made
from sakiyomi.model_executor.loading import load_model
from sakiyomi.train.ngram import count_tables

TEMPERATURES = (0.0, 1.0)
ORDERS = {"bigram": 2, "unigram": 1}
COUNTED = 4  # texts behind each prompt that n-grams are counted in
EXITS = (4, 2)  # a target's first layers: a half, a quarter


@dataclass(frozen=True)
class Minima:
    """Of one target with one draft at one temperature, means over the places of some texts.

    Attributes:
        alpha: of the sum of min(p, q), the acceptance of a token that is drawn from q.
        guess: of p of the likeliest token of q, the acceptance of a draft that proposes that one.
        places: how many.
    """

    alpha: float
    guess: float
    places: int


def minima(
    target: Logits, draft: Logits, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], temperature: float
) -> Minima:
    """Section 3.2 of arXiv 2211.17192: beta at each place of texts, and its mean alpha.

    Args:
        target, draft: of one vocabulary.
        prompts, texts: token ids; each text was written behind its prompt.
        temperature: of both; 0: all of the mass on the likeliest token.
    """
    alphas, guesses = [], []
    for prompt, text in zip(prompts, texts, strict=True):
        p, q = (_probs(model(prompt, text).cpu(), temperature) for model in (target, draft))
        size = min(p.shape[1], q.shape[1])  # rows of padding at the end of a vocabulary
        p, q = p[:, :size], q[:, :size]
        alphas.append(torch.minimum(p, q).sum(1))
        guesses.append(p.gather(1, q.argmax(1, keepdim=True))[:, 0])
    alpha, guess = torch.cat(alphas), torch.cat(guesses)
    return Minima(float(alpha.mean()), float(guess.mean()), alpha.numel())


def _probs(logits: Tensor, temperature: float) -> Tensor:
    rows = logits.double()
    if temperature:
        return (rows / temperature).softmax(-1)
    return torch.nn.functional.one_hot(rows.argmax(-1), rows.shape[-1]).double()


def model_rows(model: Any) -> Logits:
    """What a model expects as transformers runs it; of an encoder-decoder the prompt is the encoder's."""
    if not model.config.is_encoder_decoder:
        return HFReference(model).logits

    @torch.no_grad()
    def rows(prompt: Sequence[int], text: Sequence[int]) -> Tensor:
        ids = ([*prompt], [model.config.decoder_start_token_id, *text[:-1]])
        given, begun = (torch.tensor([one], device=model.device) for one in ids)
        found: Tensor = model(input_ids=given, decoder_input_ids=begun).logits[0].float()
        return found

    return rows


def ngram_rows(tables: Tables, vocab_size: int) -> Logits:
    """Of n-grams, interpolated over all runs of last tokens as ``drafters.ngram`` does, every token of the vocabulary.

    A bigram knows one token before, a unigram none.
    """

    def row(last: Sequence[int]) -> Tensor:
        longest = tables.order - 1
        chance = torch.full((vocab_size,), 1.0 / vocab_size, dtype=torch.float64)
        for length in range(longest + 1):
            seen = tables.after(tuple(last[len(last) - length :]) if length else ())
            if seen is None:
                break
            total, kinds, _, counts = seen
            chance *= kinds / (total + kinds)
            chance[list(counts)] += torch.tensor(list(counts.values()), dtype=torch.float64) / (total + kinds)
        return chance.log()

    return lambda prompt, text: torch.stack([row([*prompt, *text[:at]]) for at in range(len(text))])


def tables_of(texts: Sequence[Any], vocab_size: int) -> dict[str, FileTables]:
    """Bigrams and unigrams counted in texts."""
    import numpy as np

    arrays = [np.array(text, np.int64) for text in texts]
    return {name: FileTables(order, count_tables(arrays, order, vocab_size)) for name, order in ORDERS.items()}


def family(name: str) -> list[Path]:
    """Folders of models, the largest first.

    Raises:
        InputError: there are less than two.
    """
    folder = Path(name).expanduser()
    found = [part.parent for part in sorted(folder.glob("*/config.json"))]
    if len(found) < 2:
        raise InputError(f"models is {name!r}, which holds {len(found)} models; expected a folder of two or more")
    return sorted(found, key=lambda part: sum(file.stat().st_size for file in part.glob("*.safetensors")), reverse=True)


def alphas(work: Work) -> Row:
    """Every smaller model, bigrams and unigrams as drafts of every model, by the definition."""
    config = work.config
    names = [config.target, work.draft.removeprefix("model:")]
    if config.models is not None:
        names += [str(folder) for folder in family(config.models)]
    models = {}
    for name in names:
        work.note(f"alphas: loading {name}")
        models[Path(name).name] = load_model(name, dtype=config.dtype, device=config.device, encoder_decoder=True)
    order = sorted(models, key=lambda name: -models[name].model.num_parameters())
    lines: list[dict[str, Any]] = []
    notes: list[str] = []
    for place, name in enumerate(order):
        loaded = models[name]
        smaller = {other: models[other] for other in order[place + 1 :]}
        apart = [other for other, one in smaller.items() if not _alike(loaded, one)]
        notes += [f"{other} has another tokenizer than {name}: that pair is left out" for other in apart]
        found = _of_target(work, loaded, {other: one for other, one in smaller.items() if other not in apart})
        lines += [{"target": name, "draft": draft} | line for draft, line in found.items()]
    conditions = work.laps() | {"dtype": config.dtype, "n-grams": f"of {COUNTED} sampled texts a prompt"}
    return Row("alphas", "alpha, the mean of the sum of min(p, q), by target and draft", lines, conditions, notes)


def _alike(one: Any, other: Any) -> bool:
    kind = one.model.config.is_encoder_decoder == other.model.config.is_encoder_decoder
    return bool(kind and one.tokenizer.get_vocab() == other.tokenizer.get_vocab())


def _of_target(work: Work, loaded: Any, smaller: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A line each draft: at each temperature, on texts that the target wrote at that temperature."""
    config = work.config
    prompts = [loaded.tokenizer(text).input_ids[: config.prompt_tokens] for text in config.bench().texts()]
    samples = [text for seed in range(COUNTED) for text in _written(loaded, prompts, 1.0, seed + 100, config)]
    vocab_size = int(loaded.model.get_output_embeddings().weight.shape[0])
    drafts = {name: model_rows(one.model) for name, one in smaller.items()}
    drafts |= {name: ngram_rows(table, vocab_size) for name, table in tables_of(samples, vocab_size).items()}
    found: dict[str, dict[str, Any]] = {name: {} for name in drafts}
    target = model_rows(loaded.model)
    for temperature in TEMPERATURES:
        texts = _written(loaded, prompts, temperature, 7, config)
        for name, draft in drafts.items():
            work.note(f"alphas: {name} for {Path(loaded.name).name}, temperature {temperature:g}")
            known = minima(target, draft, prompts, texts, temperature)
            t = f"T={temperature:g}"
            found[name] |= {t: known.alpha, f"its first guess, {t}": known.guess, f"places, {t}": known.places}
    return found


def _written(loaded: Any, prompts: Sequence[list[int]], temperature: float, seed: int, config: Any) -> list[list[int]]:
    """What transformers makes of a model of any kind."""
    params = SamplingParams(max_new_tokens=config.max_new_tokens, temperature=temperature, top_k=0, seed=seed)
    with torch.random.fork_rng():
        return [Peer(loaded)(prompt, replace(params, seed=seed + at)) for at, prompt in enumerate(prompts)]


def _panel_alphas(temperature: float) -> Any:
    def panel(axes: Any, row: Row, theme: Theme) -> None:
        from matplotlib.colors import LinearSegmentedColormap

        targets, drafts = (list(dict.fromkeys(line[name] for line in row.lines)) for name in ("target", "draft"))
        shades = LinearSegmentedColormap.from_list("alpha", [theme.paper, theme.colours[0]])
        known = {(line["target"], line["draft"]): line[f"T={temperature:g}"] for line in row.lines}
        cells = [[known.get((target, draft), float("nan")) for draft in drafts] for target in targets]
        heat(axes, cells, targets, drafts, cmap=shades, vmin=0, vmax=1, edgecolors=theme.faint)
        axes.tick_params(axis="x", rotation=20)
        axes.set(title=f"alpha at temperature {temperature:g}", ylabel="target", xlabel="draft")
        for (target, draft), value in known.items():
            x, y = drafts.index(draft) + 0.5, targets.index(target) + 0.5
            ink = theme.paper if value > 0.5 else theme.ink
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=9, color=ink)

    return panel


def drafts(work: Work) -> Row:
    """The configured target with its drafts, and a folder of models that share a tokenizer, if one is given."""
    config = work.config
    lines: list[dict[str, Any]] = []
    layers = int(work.llm.target.config.num_hidden_layers)
    own: dict[str, Any] = {Path(work.draft.removeprefix("model:")).name: work.drafter(work.draft)}
    exits = {
        f"its first {layers // part} layers": f"early-exit:{layers // part}" for part in EXITS if layers >= 2 * part
    }
    own |= {name: work.drafter(spec) for name, spec in exits.items()}
    notes: list[str] = []
    lines += _compared(work, work.llm, work.pair.target, Path(config.target).name, own, notes)
    if config.models is None:
        notes.append("No folder of further checkpoints was given (--models): those lines are left out.")
    else:
        models = family(config.models)
        target, others = models[0], models[1:]
        llm = load(config.bench(target=str(target)), "none")
        found, why = made([f"model:{folder}" for folder in others], llm.drafter, (), work.note)
        notes += [f"{Path(spec).name} is left out: {message}" for spec, message in why.items()]
        loaded = load_model(str(target), dtype=config.dtype, device=config.device)
        lines += _compared(work, llm, loaded, target.name, {Path(k).name: d for k, d in found.items()}, notes)
    conditions = {"gamma": config.gamma, "acceptance": "ratio", "n-grams": f"of {COUNTED} sampled texts a prompt"}
    return Row("drafts", "alpha and speed-up by draft", lines, work.laps() | conditions, notes)


def _compared(
    work: Work, llm: LLM, loaded: Any, target: str, drafters: dict[str, Any], notes: list[str]
) -> list[dict[str, Any]]:
    """A line each drafter, n-grams of the target's own text among them; ``notes`` takes what has to be said of it."""
    prompts = [loaded.tokenizer(text).input_ids[: work.config.prompt_tokens] for text in work.config.bench().texts()]
    sizes = {name: drafter.model.weights.bytes for name, drafter in drafters.items()}
    work.note(f"drafts: {target} writes texts to count")
    tables = _counted(work, llm, prompts)
    rows = {name: runner_rows(drafter.model) for name, drafter in drafters.items()}
    rows |= {name: ngram_rows(table, llm.vocab_size) for name, table in tables.items()}
    drafters = drafters | {name: NgramDrafter(llm.vocab_size, table) for name, table in tables.items()}
    llm.wait()
    judge = NearTies(loaded.model, prompts)
    engines = {"plain": EngineView(llm), **{name: EngineView(llm, one, strict=True) for name, one in drafters.items()}}
    found: dict[float, Any] = {}
    texts: dict[float, list[list[int]]] = {}
    for temperature in TEMPERATURES:
        params = work.params(temperature=temperature, seed=7, acceptance="ratio", tree="chain")
        texts[temperature] = [EngineView(llm).generate([prompt], params)[0].token_ids for prompt in prompts]
        runs = {name: partial(lap, engine, prompts, params) for name, engine in engines.items()}
        what = f"drafts of {target}, T={temperature:g}"
        found[temperature] = work.row(what).race(runs, None if temperature else judge)
        notes += [f"{target}, T={temperature:g}: {text}" for text in race_notes(found[temperature])]
    lines = []
    for at, name in enumerate(drafters, start=1):
        guessed = name in tables
        line: dict[str, Any] = {"name": name, "target": target, "weight_bytes": sizes.get(name), "guesses": guessed}
        for temperature, standings in found.items():
            plain, own = standings[0], standings[at]
            step = plain.median("score_ms") + plain.median("overhead_ms")
            t = f"{temperature:g}"
            known = minima(runner_rows(llm.target), rows[name], prompts, texts[temperature], temperature)
            line |= {f"alpha, T={t}": known.alpha, f"first guess, T={t}": known.guess}
            line |= {f"counted, T={t}": own.median("alpha"), f"tau, T={t}": own.median("tau")}
            line |= {f"speed-up, T={t}": line_of(own)["ratio"], f"A/A, T={t}": Spread.shown(standings)}
            if not temperature:
                line["c"] = own.median("draft_ms") / work.config.gamma / step
        lines.append(line)
    return lines


def _counted(work: Work, llm: LLM, prompts: Sequence[list[int]]) -> dict[str, FileTables]:
    """Tables of what the target says at temperature 1 with other seeds than those that are measured."""
    engine = EngineView(llm)
    texts = [
        engine.generate([prompt], work.params(temperature=1.0, seed=100 + sample))[0].token_ids
        for sample in range(COUNTED)
        for prompt in prompts
    ]
    return tables_of(texts, llm.vocab_size)


def _places(row: Row) -> tuple[list[float], dict[str, float]]:
    """Where each bar stands, in groups by target, and where the name of each target stands above its group."""
    places: list[float] = []
    heads: dict[str, float] = {}
    for line in row.lines:
        below = places[-1] + 1 if places else 0.0
        if line["target"] not in heads:
            heads[line["target"]] = below
            below += 0.8
        places.append(below)
    return places, heads


def _panel_drafts(key: str, label: str, *, counted: bool = False) -> Any:
    def panel(axes: Any, row: Row, theme: Theme) -> None:
        places, heads = _places(row)
        for at, temperature in enumerate(TEMPERATURES):
            values = [line[f"{key}, T={temperature:g}"] or 0.0 for line in row.lines]
            beside = [place + 0.38 * (at - 0.5) for place in places]
            axes.barh(beside, values, height=0.36, color=theme.colours[at], label=f"T={temperature:g}")
            marks = [line[f"counted, T={temperature:g}"] for line in row.lines] if counted else values
            for place, value, mark in zip(beside, values, marks, strict=True):
                # Offset, not spaces in front of the number: SVG drops those, and the diamond would hide it.
                where = {"xytext": (7, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
                told = f"{value:.2f}" + (f", counted {mark:.2f}" if counted and mark is not None else "")
                axes.annotate(told, (max(value, mark or 0.0), place), **where)
            if counted:
                axes.plot(marks, beside, "D", color=theme.ink, markersize=4, label=None if at else "counted")
            else:
                axes.axvline(1.0, color=theme.faint, linewidth=1)
        for target, place in heads.items():
            axes.text(0, place, f" target {target}", va="center", fontsize=9, style="italic")
        axes.set_yticks(places, [line["name"] for line in row.lines])
        axes.set(ylim=(places[-1] + 0.6, -0.5), xlabel=label)
        axes.margins(x=0.12)
        axes.grid(visible=False, axis="y")

    return panel


FIGURES: Figures = {
    "alphas": (
        alphas,
        stack(
            *map(_panel_alphas, TEMPERATURES),
            height=lambda row: 1.3 + 0.4 * len({line["target"] for line in row.lines}),
        ),
    ),
    "drafts": (
        drafts,
        stack(
            _panel_drafts("alpha", "alpha", counted=True),
            _panel_drafts("speed-up", "speed-up over plain"),
            height=lambda row: 0.9 + 0.3 * _places(row)[0][-1],
            below=True,
        ),
    ),
}

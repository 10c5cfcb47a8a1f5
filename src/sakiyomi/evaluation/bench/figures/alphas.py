"""Alpha as it is defined: the mean, over the places of a text, of the sum of min(p, q); of every draft.

What an engine counts comes near it where the draft draws its tokens. A draft that proposes its first guess (n-grams, or
any draft at temperature 0) is accepted with p of that guess, which is another number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sakiyomi.core.errors import InputError
from sakiyomi.drafters.ngram import Tables
from sakiyomi.drafters.ngram_file import FileTables
from sakiyomi.evaluation.bench.figures.section import Section, Theme
from sakiyomi.evaluation.bench.figures.trees import panels_of
from sakiyomi.evaluation.bench.figures.work import Work
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.loading import load_model
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.train.ngram import count_tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ALPHAS", "ORDERS", "Minima", "family", "minima", "model_rows", "ngram_rows", "runner_rows", "tables_of"]

TEMPERATURES = (0.0, 1.0)
ORDERS = {"bigram": 2, "unigram": 1}
COUNTED = 4  # texts behind each prompt that n-grams are counted in

Logits = Callable[[Sequence[int], Sequence[int]], Tensor]
"""(prompt, text) -> (tokens of the text, V): what a model expects at each token of the text, before it came."""


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
        p, q = (_probs(model(prompt, text), temperature) for model in (target, draft))
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


def runner_rows(model: ModelRunner) -> Logits:
    """Of a model as our engine runs it."""

    def rows(prompt: Sequence[int], text: Sequence[int]) -> Tensor:
        ids = [*prompt, *text]
        with torch.no_grad(), model.cache.lent(len(ids)) as slot:
            return model.score([SequenceRows(slot, 0, ids)]).logits[len(prompt) - 1 : -1].float().cpu()

    return rows


def model_rows(model: Any) -> Logits:
    """Of a model as transformers runs it; of an encoder-decoder the prompt is the encoder's."""

    def rows(prompt: Sequence[int], text: Sequence[int]) -> Tensor:
        with torch.no_grad():
            if model.config.is_encoder_decoder:
                start = [model.config.decoder_start_token_id]
                asked = {"input_ids": prompt, "decoder_input_ids": [*start, *text[:-1]]}
                first = 0
            else:
                asked, first = {"input_ids": [*prompt, *text[:-1]]}, len(prompt) - 1
            tensors = {name: torch.tensor([ids], device=model.device) for name, ids in asked.items()}
            found: Tensor = model(**tensors).logits[0, first:].float().cpu()
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
    model, texts = loaded.model, []
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for prompt in prompts:
            ids = torch.tensor([prompt], device=model.device)
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=config.max_new_tokens, pad_token_id=0, **how
            )[0].tolist()
            texts.append(made[1:] if model.config.is_encoder_decoder else made[len(prompt) :])
    return texts


def _paint_alphas(row: Row, theme: Theme) -> Figure:
    from matplotlib.colors import LinearSegmentedColormap

    targets = list(dict.fromkeys(line["target"] for line in row.lines))
    drafts = list(dict.fromkeys(line["draft"] for line in row.lines))
    shades = LinearSegmentedColormap.from_list("alpha", [theme.paper, theme.colours[0]])
    figure, both = panels_of([1.3 + 0.4 * len(targets)] * len(TEMPERATURES))
    for axes, temperature in zip(both, TEMPERATURES, strict=True):
        name = f"T={temperature:g}"
        known = {(line["target"], line["draft"]): line[name] for line in row.lines}
        cells = [[known.get((target, draft), float("nan")) for draft in drafts] for target in targets]
        axes.pcolormesh(cells, cmap=shades, vmin=0, vmax=1, edgecolors=theme.faint, linewidth=0.4)
        for y, line in enumerate(cells):
            for x, value in enumerate(line):
                if value == value:
                    ink = theme.paper if value > 0.5 else theme.ink
                    axes.text(x + 0.5, y + 0.5, f"{value:.2f}", ha="center", va="center", fontsize=9, color=ink)
        axes.set_xticks([at + 0.5 for at in range(len(drafts))], drafts, rotation=20, fontsize=8)
        axes.set_yticks([at + 0.5 for at in range(len(targets))], targets, fontsize=8)
        axes.set(ylim=(len(targets), 0), title=f"alpha at temperature {temperature:g}", ylabel="target", xlabel="draft")
        axes.grid(visible=False)
    return figure


def _alt_alphas(row: Row) -> str:
    said = [f"{line['draft']} for {line['target']} {line['T=0']:.2f} and {line['T=1']:.2f}" for line in row.lines]
    return f"Tables of targets by drafts, alpha at temperature 0 and at 1: {'; '.join(said)}."


ALPHAS = Section(
    "Alpha of every draft for every target",
    "By the definition: the mean over the places of a text of the sum of min(p, q) (corollary 3.6 of arXiv "
    "2211.17192), on texts that the target writes at that temperature, with target and draft both at it. Every smaller "
    "model of one tokenizer is a draft; encoder-decoders (T5) too. n-grams are counted in texts of the target, with "
    "their own probabilities. In the numbers: acceptance of a draft that proposes its first guess, p of that guess.",
    alphas,
    _paint_alphas,
    _alt_alphas,
    ("models",),
)

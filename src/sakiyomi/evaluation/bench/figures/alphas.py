"""Alpha as it is defined, the mean over the places of a text of the sum of min(p, q), and what drafts are worth.

What an engine counts comes near alpha where the draft draws its tokens. A draft that proposes its first guess (n-grams,
or any draft at temperature 0) is accepted with p of that guess, which is another number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.drafters.ngram import NgramDrafter, Tables
from sakiyomi.drafters.ngram_file import FileTables
from sakiyomi.engine.chat_template import prompt_ids
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.audit.reference import HFReference
from sakiyomi.evaluation.bench.figures.work import Logits, Work, line_of, runner_rows
from sakiyomi.evaluation.bench.models import NearTies
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.runner import Spread
from sakiyomi.evaluation.bench.tasks.peer import Peer
from sakiyomi.evaluation.loading import load
from sakiyomi.evaluation.tuning.candidates import made
from sakiyomi.model_executor.loading import load_model
from sakiyomi.train.ngram import count_tables

TEMPERATURES = (0.0, 1.0)
ORDERS = {"bigram": 2, "unigram": 1}
COUNTED = 4  # texts after each prompt that n-grams are counted in
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
        prompts, texts: token ids; each text was written after its prompt.
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
    names = [config.target, config.draft_model, *map(str, family(work.report.models) if work.report.models else ())]
    models = {}
    for name in names:
        work.note(f"loading {name}")
        models[Path(name).name] = load_model(name, dtype=config.dtype, device=config.device, encoder_decoder=True)
    order = sorted(models, key=lambda name: -models[name].model.num_parameters())
    lines: list[dict[str, Any]] = []
    for place, name in enumerate(order):
        loaded = models[name]
        smaller = {other: models[other] for other in order[place + 1 :]}
        apart = [other for other, one in smaller.items() if not _alike(loaded, one)]
        work.notes += [f"{other} has another tokenizer than {name}: that pair is left out" for other in apart]
        found = _of_target(work, loaded, {other: one for other, one in smaller.items() if other not in apart})
        lines += [{"target": name, "draft": draft} | line for draft, line in found.items()]
    conditions = work.amount() | {"dtype": config.dtype, "n-grams": f"of {COUNTED} sampled texts a prompt"}
    return Row(work.name, "", lines, conditions, work.notes)


def _alike(one: Any, other: Any) -> bool:
    kind = one.model.config.is_encoder_decoder == other.model.config.is_encoder_decoder
    return bool(kind and one.tokenizer.get_vocab() == other.tokenizer.get_vocab())


def _prompts(work: Work, loaded: Any) -> list[list[int]]:
    return [prompt_ids(loaded.tokenizer, text, work.config.prompt_tokens) for text in work.config.texts()]


def _of_target(work: Work, loaded: Any, smaller: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A line each draft: at each temperature, on texts that the target wrote at that temperature."""
    prompts, writer = _prompts(work, loaded), Peer(loaded)

    def written(temperature: float, seed: int) -> list[list[int]]:
        """What transformers makes of a model of any kind."""
        params = SamplingParams(max_new_tokens=work.config.max_new_tokens, temperature=temperature, top_k=0)
        with torch.random.fork_rng():
            return [writer(prompt, replace(params, seed=seed + at)) for at, prompt in enumerate(prompts)]

    samples = [text for seed in range(COUNTED) for text in written(1.0, seed + 100)]
    vocab_size = int(loaded.model.get_output_embeddings().weight.shape[0])
    drafts = {name: model_rows(one.model) for name, one in smaller.items()}
    drafts |= {name: ngram_rows(table, vocab_size) for name, table in tables_of(samples, vocab_size).items()}
    found: dict[str, dict[str, Any]] = {name: {} for name in drafts}
    target = model_rows(loaded.model)
    for temperature in TEMPERATURES:
        texts, t = written(temperature, 7), f"T={temperature:g}"
        for name, draft in drafts.items():
            work.note(f"{name} for {Path(loaded.name).name}, {t}")
            known = minima(target, draft, prompts, texts, temperature)
            found[name] |= {t: known.alpha, f"its first guess, {t}": known.guess, f"places, {t}": known.places}
    return found


def drafts(work: Work) -> Row:
    """The configured target with its drafts, and a folder of models that share a tokenizer, if one is given."""
    config, models = work.config, work.report.models
    layers = int(work.alone.target.config.num_hidden_layers)
    own: dict[str, Any] = {Path(config.draft_model).name: work.drafter(work.draft)}
    for count in (layers // part for part in EXITS if layers >= 2 * part):
        own[f"its first {count} layers"] = work.drafter(f"early-exit:{count}")
    lines = _compared(work, work.alone, work.pair.target, Path(config.target).name, own)
    if models is None:
        work.notes.append("No folder of further checkpoints was given (--models): those lines are left out.")
    else:
        target, *others = family(models)
        llm = load(replace(config, target=str(target)), "none")
        found, why = made([f"model:{folder}" for folder in others], llm.drafter, (), work.note)
        work.notes += [f"{Path(spec).name} is left out: {message}" for spec, message in why.items()]
        loaded = load_model(str(target), dtype=config.dtype, device=config.device)
        lines += _compared(work, llm, loaded, target.name, {Path(k).name: d for k, d in found.items()})
    known = {"gamma": config.gamma, "acceptance": "ratio", "n-grams": f"of {COUNTED} sampled texts a prompt"}
    return Row(work.name, "", lines, work.amount() | known, work.notes)


def _compared(work: Work, llm: LLM, loaded: Any, target: str, drafters: dict[str, Any]) -> list[dict[str, Any]]:
    """A line each drafter, n-grams of the target's own text among them."""
    prompts, undrafted = _prompts(work, loaded), EngineView(llm)

    def written(**more: Any) -> list[list[int]]:
        return [undrafted.generate([prompt], work.params(**more))[0].token_ids for prompt in prompts]

    work.note(f"{target} writes texts to count")
    # With other seeds than those that are measured.
    samples = [text for sample in range(COUNTED) for text in written(temperature=1.0, seed=100 + sample)]
    tables = tables_of(samples, llm.vocab_size)
    sizes = {name: drafter.model.weights.bytes for name, drafter in drafters.items()}
    rows = {name: runner_rows(drafter.model) for name, drafter in drafters.items()}
    rows |= {name: ngram_rows(table, llm.vocab_size) for name, table in tables.items()}
    drafters = drafters | {name: NgramDrafter(llm.vocab_size, table) for name, table in tables.items()}
    llm.wait()
    judge = NearTies(loaded.model, prompts)
    engines = {"plain": undrafted, **{name: EngineView(llm, one, strict=True) for name, one in drafters.items()}}
    lines = [
        {"name": name, "target": target, "weight_bytes": sizes.get(name), "guesses": name in tables}
        for name in drafters
    ]
    for temperature in TEMPERATURES:
        t = f"T={temperature:g}"
        more: dict[str, Any] = {"temperature": temperature, "seed": 7, "acceptance": "ratio", "tree": "chain"}
        texts = written(**more)
        runs = {name: work.run(engine, prompts=prompts, **more) for name, engine in engines.items()}
        plain, *others = standings = work.raced(runs, None if temperature else judge, f"{target}, {t}")
        step = plain.median("score_ms") + plain.median("overhead_ms")
        for line, own in zip(lines, others, strict=True):
            known = minima(runner_rows(llm.target), rows[own.name], prompts, texts, temperature)
            line |= {f"alpha, {t}": known.alpha, f"first guess, {t}": known.guess}
            line |= {f"counted, {t}": own.median("alpha"), f"tau, {t}": own.median("tau")}
            line |= {f"speed-up, {t}": line_of(own)["ratio"], f"A/A, {t}": Spread.shown(standings)}
            if not temperature:
                line["c"] = own.median("draft_ms") / work.config.gamma / step
    return lines

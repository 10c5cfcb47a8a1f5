"""A draft of another tokenizer beside one of the target's own, and transformers' universal assisted generation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from sakiyomi.core.errors import InputError
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, Run, counted_lap
from sakiyomi.evaluation.bench.models import Pair
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.runner import Contender, Lap
from sakiyomi.model_executor.loading import same_tokenizer

__all__ = ["cross"]

NODES = 15  # of a tree as deep as the chains


def cross(row: PairRow) -> Row:
    """The same text drafted by both models, plain, and by transformers with the draft of another tokenizer.

    transformers takes as many tokens of that draft a round as say ``gamma`` tokens of the target.

    Raises:
        InputError: neither draft has a tokenizer of its own.
    """
    config = row.config
    rows = [row] if config.cross is None else [row, row.changed(draft=config.cross)]
    kinds = [same_tokenizer(row.pair.target.tokenizer, row.pair.draft.tokenizer) for row in rows]
    if all(kinds):
        raise InputError(
            f"row cross needs a draft of another tokenizer than {config.target}'s; give one with --cross model:FOLDER"
        )
    row = rows[kinds.index(False)]
    pair = row.pair
    engines = {kind: each.llm() for kind, each in zip(kinds, rows, strict=True)}
    one = next(iter(engines.values()))
    runs: dict[str, Run] = {"sakiyomi plain": row.run(EngineView(one))}
    for same, llm in sorted(engines.items()):
        name = f"sakiyomi, draft of {'its own' if same else 'another'} tokenizer"
        runs[name] = row.run(llm)
        if not same:
            ways = {name: runs[name], f"{name}, {NODES} nodes": row.run(llm, tree="best-first", nodes=NODES)}
            runs |= {way: partial(_aligned, llm.draft, run, len(pair.prompts)) for way, run in ways.items()}
    steps = _steps(pair, config.gamma)
    sizes = {loaded.model.config.get_text_config().vocab_size for loaded in (pair.target, pair.draft)}
    theirs: dict[str, Run] = {}
    # With vocabularies of one size transformers takes the tokenizers for the same, and refuses two.
    if config.peers and one.target.weights.quantization is None and len(sizes) == 2:
        tokenizers = (pair.target.tokenizer, pair.draft.tokenizer)
        peers = {
            "plain": Transformers(pair.target.model, None, stop=pair.stop),
            "universal assisted": Transformers(
                pair.target.model, pair.draft.model, steps, pair.stop, tokenizers=tokenizers
            ),
        }
        calls = [(prompt, row.params()) for prompt in pair.prompts]
        theirs = {f"transformers {name}": partial(counted_lap, peer, calls) for name, peer in peers.items()}
    decode = partial(pair.target.tokenizer.decode, skip_special_tokens=True)
    standings = row.race(
        [
            Contender(name, partial(_in_characters, run, decode), judge)
            for judge, some in ((pair.judge(one), runs), (pair.judge(), theirs))
            for name, run in some.items()
        ]
    )
    conditions = row.conditions(engines[False], assistant_tokens=steps)
    if True in engines:
        conditions["draft_of_its_own_tokenizer"] = rows[kinds.index(True)].config.draft_model
    return row.row("greedy across tokenizers, one prompt at a time", standings, **conditions)


def _steps(pair: Pair, gamma: int) -> int:
    """Tokens of the draft that say as much as ``gamma`` of the target, by the prompts."""
    texts = pair.config.texts()
    counts = [sum(len(loaded.tokenizer(text).input_ids) for text in texts) for loaded in (pair.draft, pair.target)]
    return math.ceil(gamma * counts[0] / counts[1])


def _aligned(drafter: Any, run: Run, prompts: int) -> Lap:
    """With the milliseconds a round that a drafter across tokenizers takes to bring both texts together."""
    before = drafter.alignment_seconds
    lap = run()
    rounds = (lap.tokens - prompts) / lap.figures["tau"]
    return lap.more(alignment_ms=1000 * (drafter.alignment_seconds - before) / max(rounds, 1))


def _in_characters(run: Run, decode: Callable[[Any], str]) -> Lap:
    lap = run()
    characters = sum(len(decode(list(text))) for text in lap.outputs)
    return replace(lap, figures={"characters_per_second": characters / lap.seconds} | lap.figures)

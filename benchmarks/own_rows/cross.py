"""A draft of another tokenizer beside one of the target's own, and transformers' universal assisted generation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from own_rows.common import OwnConfig, run_counted
from sakiyomi.core.errors import InputError
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, Run, declared
from sakiyomi.evaluation.bench.models import Pair
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.runner import Contender, TimedRun, figured
from sakiyomi.model_executor.loading import same_tokenizer

__all__ = ["cross"]

NODES = 15  # of a tree as deep as the chains


@declared("greedy across tokenizers, one prompt at a time")
def cross(row: PairRow) -> Races:
    """The same text drafted by both models, plain, and by transformers with the draft of another tokenizer.

    transformers drafts as many tokens a round as hold the text of ``gamma`` tokens of the target.

    Raises:
        InputError: neither draft has a tokenizer of its own.
    """
    config = row.config
    assert isinstance(config, OwnConfig)
    rows = [row] if config.cross is None else [row, row.changed(draft=config.cross)]
    kinds = [same_tokenizer(row.pair.target.tokenizer, each.pair.draft.tokenizer) for each in rows]
    if all(kinds):
        raise InputError(
            f"row cross needs a draft of another tokenizer than {config.target}'s; give one with --cross model:FOLDER"
        )
    other = rows[kinds.index(False)]
    pair = other.pair
    engines = {kind: each.llm() for kind, each in zip(kinds, rows, strict=True)}
    llm = engines[False]
    another = "sakiyomi, draft of another tokenizer"
    ways = {another: other.run(llm), f"{another}, {NODES} nodes": other.run(llm, tree="best-first", nodes=NODES)}
    runs: dict[str, Run] = {"sakiyomi plain": other.run(EngineView(llm))}
    runs |= {name: partial(_aligned, llm.draft, run, len(pair.prompts)) for name, run in ways.items()}
    if True in engines:
        runs["sakiyomi, draft of its own tokenizer"] = other.run(engines[True])
    steps = _steps(pair, config.gamma)
    sizes = {loaded.model.config.get_text_config().vocab_size for loaded in (pair.target, pair.draft)}
    theirs: dict[str, Run] = {}
    # If both vocabularies have one size, transformers assumes one tokenizer and refuses two.
    if config.peers and llm.target.weights.quantization is None and len(sizes) == 2:
        both, calls = (pair.target.tokenizer, pair.draft.tokenizer), [(prompt, row.params()) for prompt in pair.prompts]
        peers = {
            "plain": pair.peer("plain"),
            "universal assisted": Transformers(pair.target.model, pair.draft.model, steps, pair.stop, tokenizers=both),
        }
        theirs = {f"transformers {name}": partial(run_counted, peer, calls) for name, peer in peers.items()}
    decode = partial(pair.target.tokenizer.decode, skip_special_tokens=True)
    yield Race([
        Contender(name, figured(run, partial(_characters, decode)), judge)
        for judge, some in ((pair.judge(llm), runs), (pair.judge(), theirs))
        for name, run in some.items()
    ])  # fmt: skip
    own = rows[kinds.index(True)].config.draft_model if True in engines else None
    return other.conditions(llm, assistant_tokens=steps, draft_of_its_own_tokenizer=own)


def _steps(pair: Pair, gamma: int) -> int:
    """Tokens of the draft for as much text as ``gamma`` tokens of the target, measured on the prompts."""
    texts = pair.config.texts()
    counts = [sum(len(loaded.tokenizer(text).input_ids) for text in texts) for loaded in (pair.draft, pair.target)]
    return math.ceil(gamma * counts[0] / counts[1])


def _aligned(drafter: Any, run: Run, prompts: int) -> TimedRun:
    """With the milliseconds a round in which a drafter across tokenizers aligns the two tokenizations."""
    before = drafter.alignment_seconds
    timed = run()
    rounds = (timed.tokens - prompts) / timed.figures["tau"]
    return timed.more(alignment_ms=1000 * (drafter.alignment_seconds - before) / max(rounds, 1))


def _characters(decode: Callable[[Any], str], run: TimedRun) -> dict[str, float]:
    return {"characters_per_second": sum(len(decode(list(text))) for text in run.outputs) / run.seconds}

"""A draft of another tokenizer beside one of the target's own, and transformers' universal assisted generation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.config import BenchConfig, Note
from sakiyomi.evaluation.bench.models import Pair
from sakiyomi.evaluation.bench.peers import ForwardClock, Transformers
from sakiyomi.evaluation.bench.report import Row, of_race
from sakiyomi.evaluation.bench.runner import Contender, Lap, race
from sakiyomi.evaluation.bench.speed import our_lap, pair_conditions, peer_lap
from sakiyomi.model_executor.loading import same_tokenizer

if TYPE_CHECKING:
    from sakiyomi.engine.llm import LLM

__all__ = ["cross"]

NODES = 15  # of a tree as deep as the chains


def cross(config: BenchConfig, note: Note) -> Row:
    """The same text drafted by both models, plain, and by transformers with the draft of another tokenizer.

    transformers takes as many tokens of that draft a round as say ``gamma`` tokens of the target.

    Raises:
        InputError: neither draft has a tokenizer of its own.
    """
    pairs = [Pair(config)]
    if config.cross is not None:
        pairs.append(Pair(replace(config, draft=config.cross)))
    kinds = [same_tokenizer(pair.target.tokenizer, pair.draft.tokenizer) for pair in pairs]
    if all(kinds):
        raise InputError(
            f"row cross needs a draft of another tokenizer than {config.target}'s; give one with --cross model:FOLDER"
        )
    other = pairs[kinds.index(False)]
    params = SamplingParams(max_new_tokens=config.max_new_tokens, gamma=config.gamma)
    note("cross: compiling")
    engines = {kind: pair.llm() for kind, pair in zip(kinds, pairs, strict=True)}
    decode = partial(other.target.tokenizer.decode, skip_special_tokens=True)

    def contender(name: str, lap: Callable[[], Lap], judge: Any) -> Contender:
        return Contender(name, lambda: _in_characters(lap(), decode), judge)

    one = next(iter(engines.values()))
    ours = other.judge(one)
    plain = EngineView(one)
    contenders = [contender("sakiyomi plain", lambda: our_lap(plain, other.prompts, params), ours)]
    for same, llm in sorted(engines.items()):
        name = f"sakiyomi, draft of {'its own' if same else 'another'} tokenizer"
        contenders.append(contender(name, partial(_our_lap, llm, other, params), ours))
        if not same:
            wide = replace(params, tree="best-first", nodes=NODES)
            contenders.append(contender(f"{name}, {NODES} nodes", partial(_our_lap, llm, other, wide), ours))
    steps = _steps(other, config.gamma)
    sizes = {loaded.model.config.get_text_config().vocab_size for loaded in (other.target, other.draft)}
    # With vocabularies of one size transformers takes the tokenizers for the same, and refuses two.
    if config.peers and one.target.weights.quantization is None and len(sizes) == 2:
        alone = Transformers(other.target.model, None, stop=other.stop)
        tokenizers = (other.target.tokenizer, other.draft.tokenizer)
        assisted = Transformers(other.target.model, other.draft.model, steps, other.stop, tokenizers=tokenizers)
        for name, peer in (("plain", alone), ("universal assisted", assisted)):
            lap = partial(_their_lap, peer, other, params)
            contenders.append(contender(f"transformers {name}", lap, other.judge()))
    standings = race(contenders, repeats=config.repeats, note=note)
    conditions = pair_conditions(other, engines[False]) | {"assistant_tokens": steps}
    if True in engines:
        conditions["draft_of_its_own_tokenizer"] = pairs[kinds.index(True)].config.draft_model
    return of_race("cross", "greedy across tokenizers, one prompt at a time", standings, **conditions)


def _steps(pair: Pair, gamma: int) -> int:
    """Tokens of the draft that say as much as ``gamma`` of the target, by the prompts."""
    texts = pair.config.texts()
    counts = [sum(len(loaded.tokenizer(text).input_ids) for text in texts) for loaded in (pair.draft, pair.target)]
    return math.ceil(gamma * counts[0] / counts[1])


def _our_lap(llm: LLM, pair: Pair, params: SamplingParams) -> Lap:
    """With the milliseconds a round that bringing both texts together takes."""
    before = getattr(llm.draft, "alignment_seconds", None)
    lap = our_lap(llm, pair.prompts, params)
    if before is None:
        return lap
    rounds = (lap.tokens - len(pair.prompts)) / lap.figures["tau"]
    spent = 1000 * (llm.draft.alignment_seconds - before)  # type: ignore[union-attr]
    return replace(lap, figures=lap.figures | {"alignment_ms": spent / max(rounds, 1)})


def _their_lap(peer: Transformers, pair: Pair, params: SamplingParams) -> Lap:
    """With tau, by a count of the target's forwards; the first of each text is the prompt's."""
    with ForwardClock([peer.model]) as clock:
        lap = peer_lap(peer, pair.prompts, params)
    prompts = len(pair.prompts)
    # Drafted, the first forward over the prompt takes a draft along, so that no forward stands apart.
    passes, tokens = (clock.calls[0], lap.tokens) if peer.assistant is not None else (clock.calls[0] - prompts, 0)
    tokens = tokens or lap.tokens - prompts
    return replace(lap, figures={"tau": tokens / max(passes, 1)})


def _in_characters(lap: Lap, decode: Callable[[Any], str]) -> Lap:
    characters = sum(len(decode(list(text))) for text in lap.outputs)
    return replace(lap, figures={"characters_per_second": characters / lap.seconds} | lap.figures)

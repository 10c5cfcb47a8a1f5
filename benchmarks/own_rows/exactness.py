"""What ``exact=True`` costs, and whether all texts are equal with it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import Draft, DraftKind, Draw, TokenTree
from sakiyomi.drafters import Context
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.config import BenchConfig
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, declared
from sakiyomi.evaluation.bench.models import Pair
from sakiyomi.evaluation.bench.runner import Spread, Standing

__all__ = ["RandomTrees", "exact"]

Texts = list[list[int]]
COMPARED = (1, 2, 4, 7)  # gammas


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to run the pair: a line of the row.

    Attributes:
        name: in the table.
        dtype: of target and draft.
        drafted: with the draft model, or plain.
        options: of ``LLM``.
    """

    name: str
    dtype: str
    drafted: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def ways(config: BenchConfig) -> list[Way]:
    """Plain, with a draft model, with quantized weights, with an evicting cache and with quantized keys and values.

    The budget is half of the longest texts, so that much of each text is evicted.
    """
    longest = config.prompt_tokens + config.max_new_tokens
    half = {"cache": "h2o", "kv_budget": max(32, longest // 2), "chunk_size": max(16, config.prompt_tokens // 2)}
    rounded = [] if config.quantize else [Way("quantize int8", "bfloat16", options={"quantize": "int8"})]
    return [
        *(Way("plain", dtype, False) for dtype in ("float32", "bfloat16")),
        *(Way("draft model", dtype) for dtype in ("float32", "bfloat16")),
        *rounded,
        Way(f"cache h2o, {half['kv_budget']} pairs", "bfloat16", options=half),
        Way("cache quant-4", "bfloat16", options={"cache": "quant-4"}),
    ]


@declared("exact=True against exact=False, tokens/s")
def exact(pairs: PairRow) -> Races:
    """Speed with and without; equality of all texts over drafters, gammas, trees and batch; greedy and coupled."""
    config = pairs.config
    for way in ways(config):
        where = f"{way.name} in {way.dtype}"
        row = pairs.changed(f"exact, {where}", dtype=way.dtype)
        draft = None if way.drafted else "none"
        free, bound = row.llm(draft, **way.options), row.llm(draft, exact=True, **way.options)
        yield Race({"free": row.run(free), "exact": row.run(bound)}, where=where, lines=partial(_line, way, row, bound))
        del free, bound
    return {
        **pairs.pair.names,
        "quantize": config.quantize,
        "gamma": config.gamma,
        "prompts": config.count,
        "max_new_tokens": config.max_new_tokens,
        "compared": "no draft, the draft model and random trees; gamma 1, 2, 4 and 7; batch 1 and all; greedy, coupled",
    }


def _line(way: Way, row: PairRow, bound: LLM, standings: Sequence[Standing]) -> list[dict[str, Any]]:
    row.note("comparing texts")
    equal, different = _word_kept(row.pair, bound, way)
    free, held = (standing.to_dict() for standing in standings)
    ratio = held["ratio"]
    line = {
        "name": way.name,
        "dtype": way.dtype,
        "free": free["tokens_per_second"],
        "exact": held["tokens_per_second"] if not different else None,
        "cost_percent": 100 * (1 / ratio - 1) if ratio and not different else None,
        "A/A": Spread.shown(standings),
        "row_counts": " ".join(map(str, bound.target.sizes)),
        "runs_compared": equal + len(different),
        "equal_tokens": not different,
        "different": "; ".join(different),
    }
    return [line]


def _word_kept(pair: Pair, bound: Any, way: Way) -> tuple[int, list[str]]:
    """How many runs gave the plain texts to the last token, and which did not."""
    plain = EngineView(bound)
    equal, different = 0, []
    for rule, options in (("greedy", {}), ("coupled", {"temperature": 1.0, "seed": 3, "acceptance": "coupled"})):
        params = SamplingParams(max_new_tokens=pair.config.max_new_tokens, **options)  # type: ignore[arg-type]
        # One list: request i draws from (seed, i) however the requests are run.
        expected = _texts(plain, pair.prompts, params)
        runs = {f"{rule}, no draft, one at a time": _one_by_one(plain, pair.prompts, params)}
        trees = EngineView(bound, _oracle(pair, expected))
        for gamma in COMPARED if way.drafted else ():
            shape = dataclasses.replace(params, gamma=gamma)
            runs[f"{rule}, draft model, gamma {gamma}"] = _texts(bound, pair.prompts, shape)
            runs[f"{rule}, trees, gamma {gamma}"] = _texts(trees, pair.prompts, shape)
            runs[f"{rule}, draft model, gamma {gamma}, one at a time"] = _one_by_one(bound, pair.prompts, shape)
        different += [name for name, texts in runs.items() if texts != expected]
        equal += sum(texts == expected for texts in runs.values())
    return equal, different


def _oracle(pair: Pair, texts: Texts) -> RandomTrees:
    known = {tuple(prompt): text for prompt, text in zip(pair.prompts, texts, strict=True)}
    return RandomTrees(known, pair.target.model.config.get_text_config().vocab_size)


def _texts(llm: Any, prompts: Texts, params: SamplingParams) -> Texts:
    return [list(result.token_ids) for result in llm.generate(prompts, params)]


def _one_by_one(llm: Any, prompts: Texts, params: SamplingParams) -> Texts:
    """Each request alone, with the randomness that is its own in the list."""
    requests = (llm.engine.submit(prompt, params, key=(i,), live=False) for i, prompt in enumerate(prompts))
    return [llm.engine.complete([request])[0].token_ids for request in requests]


class RandomTrees:
    """Proposes trees of several branches; each token of a known text is in its place with probability ``rate``.

    Args:
        texts: new tokens by prompt.
        vocab_size: random tokens are below it.
        rate: how often the right token is among the children.
        width: children of a node on the right path.
        seed: of the trees; they do not depend on anything else.
    """

    name = "random-trees"
    kind: DraftKind = "point_mass"

    def __init__(
        self,
        texts: Mapping[tuple[int, ...], Sequence[int]],
        vocab_size: int,
        rate: float = 0.8,
        width: int = 3,
        seed: int = 0,
    ) -> None:
        self._texts, self._vocab_size, self._rate, self._width = dict(texts), vocab_size, rate, width
        self._random = random.Random(seed)

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``."""
        return [self._tree(context.tokens, gamma) for context, gamma in zip(contexts, gammas, strict=True)]

    def _tree(self, tokens: Sequence[int], gamma: int) -> Draft:
        rest = self._rest(tokens)
        nodes: list[int] = []
        parents: list[int] = []
        parent = -1
        for depth in range(gamma):
            known = depth < len(rest) and self._random.random() < self._rate
            children = [self._random.randrange(self._vocab_size) for _ in range(self._width)]
            if known:
                children[self._random.randrange(self._width)] = rest[depth]
            children = list(dict.fromkeys(children))
            first = len(nodes)
            nodes += children
            parents += [parent] * len(children)
            # The next level hangs from the right branch where it is known, else from any.
            parent = first + (children.index(rest[depth]) if known else self._random.randrange(len(children)))
        draws = tuple(Draw(node, self.name, None) for node in range(len(nodes)))
        return Draft(TokenTree(tuple(nodes), tuple(parents)), "point_mass", draws, None)

    def _rest(self, tokens: Sequence[int]) -> Sequence[int]:
        for prompt, text in self._texts.items():
            if tuple(tokens[: len(prompt)]) == prompt:
                return text[len(tokens) - len(prompt) :]
        return ()

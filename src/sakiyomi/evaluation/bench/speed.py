"""Tokens per second: plain and speculative, against transformers and against ourselves, alone and in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

from sakiyomi.core.errors import MemoryLimitError
from sakiyomi.engine.hf_generate import custom_generate
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, Run, declared, lengths, run_peer
from sakiyomi.evaluation.bench.models import WAYS
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.runner import Contender, Spread, Standing


def everybody(row: PairRow, llm: LLM, *, peers: Sequence[str] = (), auto: bool = False) -> list[Contender]:
    """The same greedy work: transformers in some of its ``WAYS``, ours plain and speculative.

    With ``auto`` also ours with gamma "auto".
    """
    pair = row.pair
    theirs = {f"transformers {way}": partial(run_peer, pair.peer(way), pair.prompts, row.params()) for way in peers}
    ours = {"sakiyomi plain": row.run(EngineView(llm)), "sakiyomi speculative": row.run(llm)}
    if auto:
        ours["sakiyomi, gamma auto"] = row.run(llm, gamma="auto")
    return row.contenders(llm, ours, theirs)


@declared("greedy, one prompt at a time, tokens/s")
def speculative(row: PairRow) -> Races:
    """Our speculation against transformers' assisted generation: same pair, dtype and gamma."""
    llm = row.llm()
    contenders = everybody(row, llm, peers=WAYS if row.config.peers else ())
    # The baseline is what the row is about: assisted generation, if peers are measured.
    yield Race(sorted(contenders, key=lambda contender: contender.name != "transformers assisted"))
    return row.conditions(llm)


@declared("greedy against own plain, tokens/s")
def stories(row: PairRow) -> Races:
    """Our speculation against our own plain decoding."""
    llm = row.llm()
    yield Race(everybody(row, llm, auto=True))
    return row.conditions(llm)


@declared("total tokens/s and seconds a request, by requests at once")
def sweep(row: PairRow) -> Races:
    """Plain and speculative generation at each batch size, interleaved, on one target.

    ``pays``: speculation has more total tokens/s than plain generation, and the difference exceeds the noise.
    Latency is the median over requests of the time from a request's start to its last token.
    """
    config, sizes = row.config, sorted(set(row.config.batch_sizes))
    llm = row.llm(max_batch=sizes[-1])
    ways = {"plain": EngineView(llm), "speculative": llm}
    everyone = list(islice(cycle(row.pair.prompts), sizes[-1]))
    judge = row.pair.judge(llm, everyone)
    for size in fitting(sizes, llm, max(map(len, everyone)) + config.max_new_tokens, row.notes):
        runs = {
            name: row.run(way, prompts=everyone[:size], together=True, ignore_eos=True) for name, way in ways.items()
        }
        yield Race(runs, judge, f"batch of {size}", partial(_line, size))
    row.notes.append(_mark(row.lines))
    return row.conditions(llm, graphs_up_to_rows=llm.target.sizes[-1])


def fitting(sizes: Sequence[int], llm: LLM, tokens: int, notes: list[str]) -> Iterator[int]:
    """Batch sizes for which there is memory, ascending; a note names the first that does not fit.

    Args:
        sizes: to be tried, ascending.
        llm: whose cache it is.
        tokens: of each text, with its prompt.
        notes: of the row.
    """
    for size in sizes:
        try:
            llm.target.cache.needs(size, tokens)
        except MemoryLimitError as error:
            notes.append(f"batch of {size} and above: {error}")
            return
        yield size


def _line(size: int, standings: Sequence[Standing]) -> list[dict[str, Any]]:
    plain, speculative = (standing.to_dict() for standing in standings)
    spread, ratio = Spread.of(standings), speculative["ratio"]
    pays = None
    if ratio is not None:
        pays = "even" if spread is not None and ratio in spread else "yes" if ratio > 1 else "no"
    line: dict[str, Any] = {"batch": size}
    for figure in ("tokens_per_second", "low", "high", "latency_seconds"):
        line |= {f"plain_{figure}": plain[figure], f"speculative_{figure}": speculative[figure]}
    line |= {"ratio": ratio, "A/A": spread and str(spread)} | {name: speculative[name] for name in ("tau", "kv_bytes")}
    return [line | {"pays": pays, "stops": False, "equal": speculative["equal"]}]


def _mark(lines: Sequence[dict[str, Any]]) -> str:
    """Mark the first size at which speculation is slower than plain generation, and describe it in a sentence."""
    stop = next((i for i, line in enumerate(lines) if line["pays"] == "no"), len(lines))
    paid = max((line["batch"] for line in lines[:stop] if line["pays"] == "yes"), default=None)
    before = "" if paid is None else f"faster up to a batch of {paid} and "
    if stop == len(lines):
        return f"speculation is {before}slower at no size"
    lines[stop]["stops"] = True
    return f"speculation is {before}slower at {lines[stop]['batch']} (ratio {lines[stop]['ratio']:.2f})"


@declared("greedy, model.generate with one loop and another, tokens/s")
def dropin(row: PairRow) -> Races:
    """Greedy, one draft model: transformers assisted with our gamma and with its own settings, plain, and our loop."""
    pair, config = row.pair, row.config
    model, draft = pair.target.model, pair.draft.model
    loop = custom_generate.using(compile="auto" if config.compile else False)
    row.note("recording passes")
    loop.prepare(model, draft)
    params = row.params()
    peer = partial(Transformers, model, stop=pair.stop)
    ours = peer(draft, None, loop=loop)
    ways = {f"transformers assisted, {config.gamma} tokens": peer(draft, config.gamma)}
    ways |= {"transformers assisted": peer(draft, None), "transformers plain": peer(None)} if config.peers else {}
    ways |= {
        f"custom_generate, gamma {config.gamma}": peer(draft, None, loop=loop.using(gamma=config.gamma)),
        "custom_generate": ours,
    }
    runs: dict[str, Run] = {name: partial(run_peer, way, pair.prompts, params) for name, way in ways.items()}
    runs[f"custom_generate, batch of {len(pair.prompts)}"] = partial(
        run_peer, ours, pair.prompts, params, together=True
    )
    yield Race(runs, pair.judge())
    graphs = {"gamma": config.gamma, "graphs": "recorded" if config.compile else "eager"}
    return pair.names | pair.dtypes | graphs | lengths(config, pair.prompts)

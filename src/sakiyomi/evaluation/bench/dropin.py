"""``generate`` of transformers with its own loop and with ours: the same model objects, the same arguments."""

from __future__ import annotations

from functools import partial

from sakiyomi.engine.hf_generate import custom_generate
from sakiyomi.evaluation.bench.frame import PairRow, Run, peer_lap
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.runner import timed

__all__ = ["dropin"]


def dropin(row: PairRow) -> Row:
    """Greedy, with the same draft model: assisted generation by our gamma and by its own settings, plain, our loop."""
    pair, config = row.pair, row.config
    model, draft = pair.target.model, pair.draft.model
    loop = custom_generate.using(compile="auto" if config.compile else False)
    row.note("compiling")
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
    runs: dict[str, Run] = {name: partial(peer_lap, way, pair.prompts, params) for name, way in ways.items()}
    together = f"custom_generate, batch of {len(pair.prompts)}"
    runs[together] = lambda: timed(lambda: ours.generate_batch(pair.prompts, params))
    standings = row.race(runs, pair.judge())
    conditions = {
        **pair.names,
        **pair.dtypes,
        "gamma": config.gamma,
        "graphs": "compiled" if config.compile else "eager",
        "prompts": len(pair.prompts),
        "max_new_tokens": config.max_new_tokens,
    }
    return row.row("greedy, model.generate with one loop and another, tokens/s", standings, **conditions)

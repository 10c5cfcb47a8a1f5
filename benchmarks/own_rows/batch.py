"""Eight requests at once against one at a time."""

from __future__ import annotations

from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, declared

__all__ = ["batch"]

BATCH = 8


@declared("speculative, total tokens/s")
def batch(row: PairRow) -> Races:
    """Eight requests at once against one at a time, all tokens counted.

    24 requests are submitted, so that the eight slots stay busy nearly to the end although texts need different numbers
    of rounds.
    """
    prompts, llm = (row.pair.prompts * (3 * BATCH))[: 3 * BATCH], row.llm(max_batch=BATCH)
    sizes = {"batch of 1": False, f"batch of {BATCH}": True}
    runs = {name: row.run(llm, prompts=prompts, together=many, ignore_eos=True) for name, many in sizes.items()}
    yield Race(row.contenders(llm, runs, prompts=prompts))
    return row.conditions(llm, prompts)

"""One conversation that grows turn by turn: are the answers right, and does memory stay flat?

Every turn is a whole question of a made task, so that right answers are known; the model's own replies stay in the
conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sakiyomi.core.memory import resident_bytes
from sakiyomi.core.params import SamplingParams
from sakiyomi.evaluation.bench.long.failures import caught
from sakiyomi.evaluation.bench.long.loader import Loader
from sakiyomi.evaluation.bench.long.systems import System

__all__ = ["turns"]


def turns(job: Mapping[str, Any], make: Loader) -> Iterator[dict[str, Any]]:
    """Texts, tokens and bytes after each turn of one conversation a batch, as far as it goes."""
    system = System(**job["system"])
    for batch in job["batches"]:
        record: dict[str, Any] = {"length": batch["length"], "texts": [], "tokens": [], "kv": [], "resident": []}
        with caught(batch["length"]) as failed:
            make.release()  # what the conversation before had allocated would be there from the first turn on
            llm: Any = make(system, batch["length"]).llm  # type: ignore[attr-defined]
            held: list[int] = []
            with llm.conversation() as conversation:
                for turn in batch["turns"]:
                    held += turn["tokens"]
                    done = conversation.generate(held, SamplingParams(max_new_tokens=turn["answer_tokens"]))
                    held += done.token_ids
                    record["texts"].append(done.text)
                    record["tokens"].append(len(held))
                    record["kv"].append(llm.target.cache.bytes)
                    record["resident"].append(resident_bytes())
        yield record | (failed.record or {})

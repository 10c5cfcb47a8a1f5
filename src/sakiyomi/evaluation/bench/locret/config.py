"""What `sakiyomi bench locret` measures: the only home of these defaults. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench.long.config import LongConfig, LongSettings

__all__ = ["OFFICIAL", "LocretConfig"]

OFFICIAL = {
    "phi-3-mini": "hyx21/Locret-phi-3-mini-128K",
    "llama-3.1-8b": "hyx21/Locret-llama-3.1-8B-instruct",
}
"""The heads that were published, by a part of the target's name."""
EMBEDDED = {"retriever": "retriever-retaining", "tales": "tales-retaining"}
OURS = "own"


@dataclass(frozen=True, kw_only=True)
class LocretConfig(LongSettings):
    """Which model, with which heads, on what.

    Attributes:
        heads: retaining heads of the target: a folder, an embedded name, or official: those that were published for
            Phi-3-mini-128K or Llama-3.1-8B-instruct. Those of embedded models are known.
        lococo: folder of convolutions (`sakiyomi train lococo`) for the table of the combination; none without it.
        settings: paper, each system as published; or own, this package's defaults.
        budget: KV pairs (6000), or a share of the context (1/8), of systems that have one.
        chunk_size: tokens of a prompt that are processed at once; as published 3072 (Phi-3) and 1024 (Llama-3.1).
    """

    heads: str | None = None
    lococo: str | None = None
    settings: str = "paper"
    budget: str = "1/8"
    tasks: tuple[str, ...] = ("passkey", "number", "kv", "multikey")
    lengths: tuple[str, ...] = ("4096",)
    count: int = 4
    seeds: tuple[str, ...] = ("0", "1")

    def __post_init__(self) -> None:
        if self.settings not in ("paper", OURS):
            raise InputError(f"settings is {self.settings!r}; expected paper or {OURS}")
        self.long()

    def long(self) -> LongConfig:
        """The settings as ``bench long`` takes them, with every system of the tables."""
        shared = {field.name: getattr(self, field.name) for field in fields(LongSettings)}
        return LongConfig(**shared, systems=tuple(dict.fromkeys(self.systems().values())), budgets=(self.budget,))

    def systems(self) -> dict[str, str]:
        """What the article calls each system, and its spec."""
        option = "[paper]" if self.settings == "paper" else ""
        locret = f"locret:{self.heads_name}{option}"
        found = {
            "FullAttn": "full",
            "InfLLM": f"infllm{option}",
            "HF-2bits": f"quant-2{option}",
            "SirLLM": f"sirllm{option}",
            "MInference": f"minference{option}",
            "Locret": locret,
            "FullAttn-4bits": "quant-4",
            "Locret-4bits": f"{locret}+quant-4",
        }
        if self.lococo is not None:
            merger = f"lococo:{self.lococo}"
            found |= {"LoCoCo": f"h2o+{merger}", "Combination": f"{locret}+{merger}"}
        return found

    @property
    def heads_name(self) -> str:
        """Folder, embedded name or hub id of the heads.

        Raises:
            InputError: none are known.
        """
        if self.heads == "official":
            name = self.target.lower()
            for part, hub in OFFICIAL.items():
                if part in name:
                    return hub
            raise InputError(
                f"heads is official, and none were published for {self.target!r}; they were for Phi-3-mini-128K and "
                "Llama-3.1-8B-instruct: give a folder of heads"
            )
        heads = self.heads or EMBEDDED.get(self.target)
        if heads is None:
            raise InputError(f"no retaining heads are known for {self.target!r}; give their folder with --heads")
        return heads

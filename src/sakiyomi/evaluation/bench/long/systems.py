"""The systems that are compared: their names, budgets and classes, and how each is loaded.

Two kinds have the same methods: our engine with any cache, and transformers with the whole prompt in one pass.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sakiyomi.cache.eviction import EvictingCache
from sakiyomi.cache.policies import read_cache
from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.core.hf_names import cache_argument
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.bench.long.config import budget_pairs
from sakiyomi.model_executor.loading import Loaded, load_model, stop_tokens

ONE_SHOT = "one-shot"
QUERY_FIRST = "query-first"
PLACED = ("dtype", "device")
UNBOUNDED = ("full", ONE_SHOT, "quant", "offload", "minference", "kvquant")
"""Systems whose attention reads every pair; they have no budget."""


@dataclass(frozen=True)
class Answer:
    """One answer and its timings.

    Attributes:
        text: new text.
        tokens: new tokens.
        prefill_seconds: wall clock up to the first token; eviction between chunks is in it.
        decode_seconds: wall clock from there to the last token.
        kept: positions of the prompt's tokens that were not evicted, by layer and key head; None if nothing was evicted
            or it was not requested.
    """

    text: str
    tokens: int
    prefill_seconds: float
    decode_seconds: float
    kept: list[list[list[int]]] | None = None


@dataclass(frozen=True)
class System:
    """One entry of the comparison.

    Attributes:
        spec: as ``LLM(cache=...)`` takes it, or ``one-shot``; with "+query-first" its prompts have the question in
            front of the text too.
        budget: as it was asked for; None: it has none.
    """

    spec: str
    budget: str | None

    @property
    def name(self) -> str:
        """For tables; of heads the folder's last part."""
        return re.sub(r"(?<=:)[^+\[]*/(?=[^/+\[])", "", re.sub(r"/+(?=\+|\[|$)", "", self.spec))

    @property
    def cache(self) -> str:
        """As ``LLM(cache=...)`` takes it."""
        return "+".join(part for part in self.spec.split("+") if part != QUERY_FIRST)

    @property
    def query_first(self) -> bool:
        """Whether its prompts have the question in front of the text too."""
        return QUERY_FIRST in self.spec.split("+")

    @property
    def kind(self) -> str:
        """Its class of memory: "one-shot", "full", "reduced" (all pairs, smaller or elsewhere) or "bounded";
        "unknown" if there is no such system.
        """
        if self.cache in (ONE_SHOT, "full"):
            return self.cache
        try:
            policy, packing, _, offloaded = read_cache(self.cache)
        except InputError:
            return "unknown"  # its lines say why it is refused
        if policy is None and packing is None and offloaded is None:
            return "full"
        # A policy that recalls keeps all pairs in main memory; its budget bounds what attention reads.
        return "reduced" if policy is None or policy.recalls else "bounded"

    @property
    def label(self) -> str:
        """Name and budget."""
        return " ".join(filter(None, (self.name, self.budget)))

    def pairs(self, length: int) -> int | None:
        """KV pairs at a context of so many tokens."""
        return None if self.budget is None else budget_pairs(self.budget, length)

    def line(self, length: int) -> dict[str, Any]:
        """The beginning of its line at a context of so many tokens."""
        about = {"name": self.name, "spec": self.spec, "kind": self.kind, "budget": self.budget}
        return about | {"pairs": self.pairs(length), "length": length, "starred": False}


def systems(specs: Sequence[str], budgets: Sequence[str]) -> list[System]:
    """Every system once with each budget, those without one once."""
    found = []
    for spec in specs:
        has_budget = any(not part.startswith((*UNBOUNDED, QUERY_FIRST)) for part in spec.split("+"))
        found += [System(spec, budget) for budget in (budgets if has_budget else (None,))]
    return found


class Ours:
    """Our engine with some cache.

    Args:
        llm: for one request at a time.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        llm.wait()

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values allocated where attention reads them, the most so far."""
        return self.llm.target.cache.bytes

    @property
    def far_bytes(self) -> int:
        """Bytes of those that are kept elsewhere."""
        return self.llm.target.eviction.far_bytes

    def predicted_bytes(self, columns: int) -> int:
        """Bytes that a prompt and its answer of so many tokens take beyond those held now."""
        cache = self.llm.target.cache
        return max(0, cache.needs(1, columns) - cache.bytes)

    def answer(self, tokens: Sequence[int], most: int, *, kept: bool = False) -> Answer:
        """Greedy answer of at most ``most`` new tokens; ``kept``: also report which pairs of the prompt stayed.

        Prompts share nothing: no prefix is reused.
        """
        began = time.perf_counter()
        first = last = began
        text, count, stayed = "", 0, None
        for step in self.llm.stream(list(tokens), SamplingParams(max_new_tokens=most)):
            last = time.perf_counter()
            if not count:
                first = last
                stayed = self._kept() if kept else None
            text += step.text
            count += len(step.token_ids)
        return Answer(text, count, first - began, last - first, stayed)

    def _kept(self) -> list[list[list[int]]] | None:
        """Called between two rounds; the end of the prompt is an eviction boundary."""
        eviction = self.llm.target.eviction
        if not isinstance(eviction, EvictingCache):
            return None
        # There is one slot, and the request has it.
        return [[own.tolist() for own in layer] for layer in eviction.places(0)]


class OneShot:
    """Transformers' own forward over the whole prompt, attention as one matrix, then token by token: O(n^2) memory.

    Args:
        loaded: a causal language model, which runs with eager attention from now on.

    Raises:
        UnsupportedError: it cannot.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._model, self._tokenizer = loaded.model, loaded.tokenizer
        self._model.set_attn_implementation("eager")
        if (runs := self._model.config._attn_implementation) != "eager":
            raise UnsupportedError(
                f"one-shot needs attention as a matrix, and {type(self._model).__name__} runs {runs}; leave the system "
                "out"
            )
        self._stop = frozenset(stop_tokens(self._model, self._tokenizer))
        self.kv_bytes = self.far_bytes = 0

    def predicted_bytes(self, columns: int) -> int:
        """One layer's matrix of scores and its softmax, the least that there is at once."""
        config = self._model.config.get_text_config()
        return int(2 * config.num_attention_heads * columns**2 * self._model.dtype.itemsize)

    def answer(self, tokens: Sequence[int], most: int, *, kept: bool = False) -> Answer:
        """See ``Ours``; nothing is evicted."""
        from transformers import DynamicCache

        model, cache = self._model, DynamicCache(config=self._model.config)
        given: dict[str, Any] = {cache_argument(model): cache}
        began = time.perf_counter()
        ids = torch.tensor([list(tokens)], device=model.device)
        output: list[int] = []
        first = began
        with torch.no_grad():
            while len(output) < most and not self._stop.intersection(output[-1:]):
                logits = model(input_ids=ids, **given, use_cache=True, logits_to_keep=1).logits
                output.append(int(logits[0, -1].argmax()))
                ids = ids.new_tensor([output[-1:]])
                first = time.perf_counter() if len(output) == 1 else first
        ended = time.perf_counter()
        layers: list[Any] = list(cache.layers)
        held = sum(int(layer.keys.nbytes) + int(layer.values.nbytes) for layer in layers)
        self.kv_bytes = max(self.kv_bytes, held)
        text = self._tokenizer.decode(output, skip_special_tokens=True)
        return Answer(text, len(output), first - began, ended - first)


class Loader:
    """Makes systems, one at a time: the one before is freed first.

    Args:
        options: arguments of ``LLM``, beside those that make a system; target, dtype and device are among them. A
            target that is loaded already is shared by all systems; else each reads the files anew.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._key: tuple[str, int | None] | None = None
        self._running: Ours | OneShot | None = None

    def __call__(self, system: System, length: int) -> Ours | OneShot:
        """The system for contexts of so many tokens; the same object as before where nothing differs.

        Raises:
            SakiyomiError: it cannot be.
        """
        spec, budget = key = (system.cache, system.pairs(length))
        if key != self._key or self._running is None:
            self.release()
            if spec == ONE_SHOT:
                self._running = OneShot(load_model(**{name: self._options[name] for name in ("target", *PLACED)}))
            else:
                self._running = Ours(LLM(**self._options, draft="none", cache=spec, kv_budget=budget, max_batch=1))
            self._key = key
        return self._running

    def release(self) -> None:
        """Free the system."""
        self._running = self._key = None
        gc.collect()

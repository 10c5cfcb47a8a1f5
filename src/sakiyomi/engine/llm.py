"""`LLM`: a target, a drafter and an engine behind a few methods."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from sakiyomi.cache.eviction_plan import EvictionPlan
from sakiyomi.cache.policies import CacheSpec, read_cache
from sakiyomi.cache.prefix import Prefix
from sakiyomi.core.audio import Audio
from sakiyomi.core.cache_specs import budget_of, parse_cache
from sakiyomi.core.dtypes import dtype_name
from sakiyomi.core.errors import InputError
from sakiyomi.core.images import ImagePrompt
from sakiyomi.core.outputs import Step
from sakiyomi.core.params import QUANTIZATIONS, SamplingParams, as_params
from sakiyomi.core.threads import govern_threads
from sakiyomi.drafters import Drafter, Proposer, make_drafter, parse_drafters
from sakiyomi.engine.conversation import Conversation
from sakiyomi.engine.engine import CHUNK, Engine
from sakiyomi.engine.model_pool import ModelPool, answer, wait
from sakiyomi.engine.prefixes import Prefixes
from sakiyomi.engine.request import RetainedSlot
from sakiyomi.engine.tuned_profile import find_profile
from sakiyomi.model_executor.build import build_runner, check_compile
from sakiyomi.model_executor.loading import load_model, stop_tokens
from sakiyomi.model_executor.weights import is_shared, rounding_of

Prompt = str | Sequence[int] | Audio | Tensor | ImagePrompt


class LLM:
    """A language model with speculative decoding.

    Args:
        target: name of an embedded model, a folder in Hugging Face format, a GGUF file, a hub id, or a loaded
            ``(model, tokenizer)`` pair; of a speech model (whisper) ``(model, processor)``.
        draft: "none" (or None), "auto", "model:<path or id>", "medusa:<heads>" (a folder, or ``tales-medusa``),
            "eagle:<head>", "block:<block drafter>", "mtp:<layer>", "assistant:..." (folders), "mtp", "self-int8"
            (the target once more, with weights of 8 bits), "self-evicted" (the target on an excerpt of its cache, for
            long contexts), "early-exit:<layers>" (its own first layers), "oracle" or "oracle:<rate>" (the known answer,
            to measure what a draft could bring), drafts from text ("prompt-lookup", "suffix", "ngram"), a Drafter
            object, or several: joined by "+", or in a list. A folder alone says by its files what it holds. "auto" uses
            what ``sakiyomi tune`` found for this target on this machine (``profile``), else ``tales-draft`` for
            ``tales``, else a head in its folder (`eagle`, `block`, `mtp`, `medusa`), else suffix+prompt-lookup.
        cache: which keys and values the cache keeps: "full", or the name of a policy (see ``docs/policies.md``), with
            options as ``"h2o[sinks=4,local=32]"``; or in how many bits they are stored: "quant-8", "quant-4", "quant-2"
            (all but the last tokens; ``"quant-4[residual=64]"``), with levels fitted to the model: "kvquant-4",
            "kvquant-3", "kvquant-2"; or both, as ``"h2o+quant-4"``. With ``"h2o+lococo:FOLDER"`` what a policy
            evicts is merged into some of what stays. "minference", alone or joined to those, computes the attention of
            prompts in part and evicts nothing. "offload" and "offload:FOLDER" keep everything in mapped files, on a
            CPU: the system can take their memory back.
        kv_budget: with a policy, pairs of a head that stay, or the bytes of a request's cache ("2GiB").
        kv_memory: the same in bytes, a number or "2GiB"; only one of the two.
        chunk_size: prompt tokens in one pass; None: 512.
        dtype: "auto" (as stored), "float32", "bfloat16", "float16".
        device: "auto", "cpu", "cuda", "cuda:N".
        quantize: "int8" or "int4" quantizes the target's weights (and rows to 8 bits); a packed copy is kept beside
            the model for the next time. ``target.weights.quantization`` says what it changed. On a GPU: torchao's.
        offload: where the target's weights stay between passes, for a model that does not fit: "disk" (in its own
            files), "cpu" (in main memory, for a GPU), "auto" (as much as fits on the device, then in main memory, the
            rest on disk), or a folder: as "disk", and weights that cannot be used as they are stored are written
            there for as long as the model lives. Every pass then reads them, so that long drafts gain most.
            Passes are eager. A pair that was loaded with a ``device_map`` runs as it is. None: all in memory.
        compile: "auto" records decoding passes that come often, with the numbers of eager ones; False runs all passes
            eagerly.
        max_context: most tokens of prompt and output, of which nothing is allocated in advance; None: the model's own
            limit (what yarn and llama3 stretch it to, the first part of longrope); linear and longrope go beyond it.
        max_batch: requests that run at once; more wait.
        exact: a row's numbers do not depend on the other rows of its pass. Greedy text, and text with a seed under the
            coupled rule, is then bit-equal for every drafter, gamma, tree and batch, at a cost (``docs/exact.md``).
        strict: a drafter that raises, or proposes what is no draft, ends the request with a ``DraftError``; otherwise
            the request continues without it, and the log says so once.
        allow_pickle: open pickle weights.
        trust_remote_code: run code that comes with a model.

    Attributes:
        profile: what ``sakiyomi tune`` found, if draft "auto" uses it; None: it found nothing, or ``draft`` is another.
        processor: makes tokens and numbers of images or sound; None: the model has none.

    Raises:
        InputError, LoadError, UnsupportedError, MemoryLimitError: see ``errors``.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | tuple[Any, Any],
        draft: str | Drafter | Proposer | Sequence[str | Drafter | Proposer] | None = "auto",
        *,
        cache: str = "full",
        kv_budget: int | str | None = None,
        kv_memory: int | str | None = None,
        chunk_size: int | None = None,
        dtype: str = "auto",
        device: str = "auto",
        quantize: str | None = None,
        offload: str | os.PathLike[str] | None = None,
        compile: str | bool = "auto",
        max_context: int | None = None,
        max_batch: int = 8,
        exact: bool = False,
        strict: bool = False,
        allow_pickle: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        govern_threads()
        budget = budget_of(cache, parse_cache(cache), kv_budget, kv_memory)
        spec = read_cache(cache)
        eviction = _eviction(spec, budget, chunk_size or CHUNK)
        _check_options(quantize, compile, max_batch=max_batch, chunk_size=chunk_size, max_context=max_context)
        drafters = parse_drafters(draft)
        if spec.offloaded is not None:
            spec.offloaded.prepare()
        self._pool = ModelPool(
            target,
            functools.partial(
                load_model,
                packed=True,
                encoder_decoder=True,
                recorded=eviction is None and spec.offloaded is None and compile == "auto" and not exact,
                dtype=dtype,
                device=device,
                trust_remote_code=trust_remote_code,
                allow_pickle=allow_pickle,
            ),
            functools.partial(build_runner, max_slots=max_batch, compile=_recording(target, compile)),
            quantize=quantize,
            offload=offload,
            eviction=eviction,
            offloaded=spec.offloaded,
            exact=exact,
            max_context=max_context,
        )
        loaded, self.target = self._pool.loaded, self._pool.target
        self.name, self.tokenizer, self.vocab_size = loaded.name, loaded.tokenizer, self.target.vocab_size
        self.processor = loaded.extractor
        self.profile = find_profile(self.target, self.tokenizer) if drafters == ["auto"] else None
        self._context = self._pool.context(lambda context: answer(self.engine, context), allow_pickle=allow_pickle)
        self._strict = strict
        self.draft = self.drafter(self.profile.draft if self.profile is not None else drafters)
        own = self.target.max_context
        if max_context is not None and max_context > own:
            note = self.target.weights.context_note
            raise InputError(
                f"max_context={max_context} exceeds the model's {own} positions; leave it out or lower it{note}"
            )
        self.max_context = max_context or own
        self.engine = Engine(
            self.target,
            self.draft,
            self.tokenizer,
            inputs=self._pool.input_processor(self.max_context),
            stop_ids=stop_tokens(loaded.model, loaded.tokenizer),
            max_context=self.max_context,
            chunk_size=chunk_size or CHUNK,
            exact=exact,
            strict=strict,
            settle=self._pool.settle,
            depth=self.profile.depth if self.profile is not None else None,
        )
        self._prefixes = Prefixes(self.engine, cache, budget)

    def __repr__(self) -> str:
        target, draft = self.target, None if self.draft is None else self.draft.name
        kind = rounding_of(target.weights) or dtype_name(target.dtype)
        return f"LLM({self.name!r}, draft={draft!r}, {kind} on {target.device}, context {self.max_context})"

    # ------------------------------------------------------------ generation

    def generate(
        self,
        prompts: str | Audio | ImagePrompt | Tensor | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        rounds_trace: bool = False,
        prefix: Prefix | None = None,
    ) -> Any:
        """Generate for one prompt or for a list; a list gives a list back, in order.

        Args:
            prompts: text, or a list of texts or of token-id lists. Where the target has an encoder, what it reads: a
                source text or its tokens, or, of a speech model, an ``Audio`` or a tensor of its input features.
            params: for all of them; None for the defaults.
            rounds_trace: keep every round's tree in ``Generation.rounds_trace``.
            prefix: comes before each prompt and is not computed again, see ``prefix``.

        Returns:
            A ``Generation`` for each prompt; with ``params.n`` above 1 a list of n in the place of each.

        Raises:
            InputError, MemoryLimitError: before any work is done.
        """
        params = as_params(params)
        alone = isinstance(prompts, str | Audio | ImagePrompt) or (
            isinstance(prompts, Tensor) and prompts.is_floating_point()
        )
        if not alone and not isinstance(prompts, Iterable):
            raise InputError(f"prompts is {prompts!r:.80}; expected a text, or a list of texts or of token-id lists")
        given: list[Any] = [prompts] if alone else list(prompts)  # type: ignore[arg-type]
        if given and all(isinstance(token, int) for token in given):
            raise InputError("prompts is a list of numbers; one prompt of token ids goes into a list: [[1, 2, 3]]")
        if prefix is not None:
            given = self._prefixes.prepend(prefix, given)
        keys = [(i, j) if params.n > 1 else (i,) for i in range(len(given)) for j in range(params.n)]
        places = [RetainedSlot(prefix=prefix) if prefix is not None else None for _ in keys]
        try:
            done = self.engine.complete(
                self.engine.submit(given[key[0]], params, key=key, rounds_trace=rounds_trace, live=False, place=place)
                for key, place in zip(keys, places, strict=True)
            )
        finally:
            for place in places:
                if place is not None:
                    self.engine.release(place)
        found: list[Any] = done
        if params.n > 1:
            found = [done[i : i + params.n] for i in range(0, len(done), params.n)]
        return found[0] if alone else found

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, index: int = 0) -> Iterator[Step]:
        """Generate for one prompt and give every round's tokens and text as they come.

        Joined ``step.text`` is the generation's text. Leaving the loop early ends the request.

        Args:
            prompt: one of what ``generate`` takes.
            params: None for the defaults.
            index: of the prompt in a list: with a seed it has the text that ``generate`` gives it there.

        Raises:
            InputError, MemoryLimitError: at the first step, before any work is done.
        """
        with self.conversation() as alone:
            yield from alone.stream(prompt, params, index=index)

    def prefix(self, text: str | Sequence[int]) -> Prefix:
        """Compute a beginning once, to continue it many times: a document, a system prompt.

        ::

            prefix = llm.prefix(document)
            prefix.save("document.safetensors")
            answer = llm.generate("Who wrote it?", prefix=llm.load_prefix("document.safetensors"))

        A prompt's tokens follow those of the prefix: no word spans the two.

        Args:
            text: or token ids.

        Raises:
            InputError: it is empty, or longer than the context.
            MemoryLimitError: it does not fit.
        """
        return self._prefixes.make(text)

    def load_prefix(self, path: str | os.PathLike[str]) -> Prefix:
        """A prefix from its file.

        Raises:
            LoadError: it is no such file, or damaged.
            InputError: it was made by another model, or its cache is kept in another way.
        """
        return self._prefixes.load(path)

    def recipe(self) -> dict[str, str]:
        """What has to be equal for a prefix to be used again: the model, and how its cache is kept."""
        return self._prefixes.recipe()

    def conversation(self, prefix: Prefix | None = None) -> Conversation:
        """Successive requests: only the new part of each prompt is computed.

        ::

            with llm.conversation() as conversation:
                for text in ("Once upon a time", "Once upon a time, in a wood"):
                    print(conversation.generate(text).text)

        Args:
            prefix: used for the first prompt, if that begins with the same tokens.
        """
        if prefix is not None:
            prefix.check(self.recipe())
        return Conversation(self.engine, prefix)

    # ------------------------------------------------------------ models

    def record(self) -> bool:
        """Keep on disk what the next start with the same models needs in the place of their classes: it is faster then.

        A recording is some kilobytes in the cache folder; weights stay where they are. The commands do this behind
        their first text.

        Returns:
            Whether all models are recorded now.
        """
        return self._pool.record()

    def drafter(self, draft: str | Drafter | Proposer | Sequence[str | Drafter | Proposer] | None) -> Drafter | None:
        """A drafter for this target, for an engine of one's own; the LLM's own drafter stays.

        Args:
            draft: as of ``LLM``.

        Returns:
            None for "none".

        Raises:
            InputError, LoadError, UnsupportedError: its model or file cannot be used beside this target.
        """
        made = make_drafter(parse_drafters(draft), self._context, strict=self._strict)
        if made is not None and made.model is not None and made.model not in self._pool.models:
            self._pool.models.append(made.model)  # passes of a drafter that the caller made are recorded too
        return made

    def compiled(self) -> bool:
        """Whether the passes of a request that begins now are recorded, and need no Python."""
        return all(model.recorded() for model in self._pool.models)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for kernels that are compiled in the background, and record the passes that any request needs.

        Without this, kernels are swapped in when they are there, and passes are recorded as they come.

        Args:
            timeout: so many seconds at most; None: as long as it takes.

        Returns:
            Whether the passes of a request that begins now are recorded.
        """
        wait(self.engine, self._pool.models, timeout)
        return self.compiled()


def _check_options(quantize: object, compile: object, **counts: object) -> None:
    """Refuse values that make no sense."""
    if quantize not in (None, *QUANTIZATIONS):
        raise InputError(f"quantize={quantize!r}; expected None, {' or '.join(map(repr, QUANTIZATIONS))}")
    check_compile(compile)
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise InputError(f"{name}={value!r}; expected a whole number of at least 1")


def _eviction(spec: CacheSpec, budget: int | str | None, chunk_size: int) -> EvictionPlan | None:
    """What keeps the cache within the budget, quantizes it, or computes prompts in part; None: nothing does."""
    policy, packing, sparse, _ = spec
    if policy is None and packing is None and sparse is None:
        return None
    return EvictionPlan(policy, budget, chunk_size, packing=packing, sparse=sparse)


def _recording(target: Any, compile: str | bool) -> str | bool:
    """Processes that share a target record nothing: they are not ready for other passes at the same moment."""
    return False if isinstance(target, tuple) and is_shared(target[0]) else compile

"""`LLM`: a target, a drafter and an engine behind a few methods."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from sakiyomi.cache.eviction_plan import EvictionPlan
from sakiyomi.cache.policies import CacheSpec, read_cache, without_place
from sakiyomi.cache.prefix import Prefix, read_prefix
from sakiyomi.core.audio import Audio
from sakiyomi.core.errors import InputError
from sakiyomi.core.memory import parse_bytes, readable, returned_when_freed
from sakiyomi.core.outputs import Step
from sakiyomi.core.params import QUANTIZATIONS, SamplingParams, as_params
from sakiyomi.core.progress import progress
from sakiyomi.core.prompts import judging_text
from sakiyomi.drafters import Context, Drafter, DrafterContext, make_drafter, parse_drafters
from sakiyomi.engine.conversation import Conversation
from sakiyomi.engine.engine import CHUNK, Engine
from sakiyomi.engine.inputs import InputProcessor, TokenizedPrompt
from sakiyomi.engine.request import RetainedSlot
from sakiyomi.engine.tuned_profile import find_profile
from sakiyomi.kernels.build import builder
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.loading import Loaded, check_family, has_encoder, load_model, stop_tokens
from sakiyomi.model_executor.runner import DRAFT_SIZES, ModelRunner

__all__ = ["LLM"]

logger = logging.getLogger("sakiyomi")
Prompt = str | Sequence[int] | Audio | Tensor


class LLM:
    """A language model that reads ahead.

    Args:
        target: name of an embedded model, a folder in Hugging Face format, a GGUF file, a hub id, or a loaded
            ``(model, tokenizer)`` pair; of a model that hears (whisper) ``(model, processor)``.
        draft: "none", "auto", "model:<path or id>", "medusa:<heads>" (a folder, or ``tales-medusa``), "self-int8" (the
            target once more, with weights of 8 bits), "self-evicted" (the target on an excerpt of its cache, for long
            contexts), "early-exit:<layers>" (its own first layers), "oracle" or
            "oracle:<rate>" (the known answer, to measure what a draft could bring), drafts from text
            ("prompt-lookup", "suffix", "ngram"), a Drafter object, or several: joined by "+", or in a list. "auto" uses
            what ``sakiyomi tune`` found for this target on this machine (``profile``), else ``tales-draft`` for
            ``tales``.
        cache: which keys and values stay: "full", or the name of a policy (see ``docs/policies.md``), with options as
            ``"h2o[sinks=4,local=32]"``; or in how many bits they are stored: "quant-8", "quant-4", "quant-2" (all but
            the last tokens; ``"quant-4[residual=64]"``), with levels fitted to the model: "kvquant-4", "kvquant-3",
            "kvquant-2"; or both, as ``"h2o+quant-4"``. With ``"h2o+lococo:FOLDER"`` what a policy drops is merged into
            some of what stays. "minference", alone or joined to those, has prompts read in part, while all that would
            stay stays. "offload" and "offload:FOLDER" keep everything in mapped files, on a CPU: the system takes
            their memory back when it is short.
        kv_budget: with a policy, pairs of a head that stay, or the bytes of a request's cache ("2GiB").
        kv_memory: the same in bytes, a number or "2GiB"; only one of the two.
        chunk_size: prompt tokens in one pass; None for a default.
        dtype: "auto" (as stored), "float32", "bfloat16", "float16".
        device: "auto", "cpu", "cuda", "cuda:N".
        quantize: "int8" or "int4" rounds the target's weights to so many bits and, on the CPU, rows to 8; then
            ``target.rounding`` says what that changed, and a packed copy is kept beside the model, from which it is
            loaded the next time. On a GPU torchao rounds. None: nothing is rounded.
        offload: where the target's weights stay between passes, for a model that does not fit: "disk" (in its own
            files), "cpu" (in main memory, for a GPU), "auto" (as much as fits on the device, then in main memory, the
            rest on disk), or a folder: as "disk", and weights that cannot be used as they are stored are written
            there for as long as the model lives. Every pass then reads them, so that reading far ahead pays most.
            Passes are eager. A pair that was loaded with a ``device_map`` runs as it is. None: all in memory.
        compile: "auto" compiles in the background and uses it when it is ready, True waits for it, False never does.
        max_context: most tokens of prompt and output; None for the model's own limit. Nothing is allocated in advance.
        max_batch: requests that run at once; more wait.
        exact: bit-equal output for every drafter, gamma, tree and batch.
        strict: a drafter that raises, or proposes what is no draft, ends the request with a ``DraftError``; otherwise
            the request goes on without it, and the log says so once.
        allow_pickle: open pickle weights.
        trust_remote_code: run code that comes with a model.

    Attributes:
        profile: what was tuned, where draft "auto" follows it; None: nothing was, or another draft was asked for.

    Raises:
        InputError, LoadError, UnsupportedError, MemoryLimitError: see ``errors``.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | tuple[Any, Any],
        draft: str | Drafter | Sequence[str | Drafter] = "auto",
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
        if kv_memory is not None:
            if kv_budget is not None:
                raise InputError(f"kv_memory={kv_memory!r} and kv_budget={kv_budget!r} say the same; give one of them")
            parse_bytes(str(kv_memory), "kv_memory")
            kv_budget = f"{kv_memory}b" if str(kv_memory).isdigit() else kv_memory
        self._cache = cache, kv_budget
        said = read_cache(cache)
        eviction = _eviction(cache, said, kv_budget, chunk_size or CHUNK)
        if quantize not in (None, *QUANTIZATIONS):
            raise InputError(f"quantize={quantize!r}; expected None, {' or '.join(map(repr, QUANTIZATIONS))}")
        if compile != "auto" and not isinstance(compile, bool):
            raise InputError(f"compile={compile!r}; expected 'auto', True or False")
        for name, value in (("max_batch", max_batch), ("chunk_size", chunk_size), ("max_context", max_context)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InputError(f"{name}={value!r}; expected a whole number of at least 1")
        drafters = parse_drafters(draft)
        if said.offloaded is not None:
            said.offloaded.prepare()
        self._options: dict[str, Any] = {
            "dtype": dtype,
            "device": device,
            "trust_remote_code": trust_remote_code,
            "allow_pickle": allow_pickle,
        }
        self._pack_options: dict[str, Any] = {"max_slots": max_batch, "compile": compile, "exact": exact}
        loaded = load_model(
            target, quantize=quantize, offload=offload, packed=True, encoder_decoder=True, **self._options
        )
        self._config = loaded.model.config
        self.name, self.tokenizer = loaded.name, loaded.tokenizer
        watched = eviction is None and any(str(part).partition(":")[0] == "self-evicted" for part in drafters)
        self.target = self._pack_target(loaded, quantize, eviction=eviction, watched=watched, offloaded=said.offloaded)
        self._models = [self.target]
        self.profile = find_profile(self.target, self.tokenizer) if drafters == ["auto"] else None
        self._around = DrafterContext(
            loaded,
            self.target.vocab_size,
            self._load_beside,
            self._pack_beside,
            self.target,
            functools.partial(self._rounded, target),
            self._answer,
            allow_pickle,
        )
        self._strict = strict
        self.draft = self.drafter(self.profile.draft if self.profile is not None else drafters)
        self.vocab_size = self.target.vocab_size
        own = self.target.max_context
        if max_context is not None and max_context > own:
            raise InputError(f"max_context={max_context} exceeds the model's {own} positions; leave it out or lower it")
        self.max_context = max_context or own
        self.engine = Engine(
            self.target,
            self.draft,
            self.tokenizer,
            intake=self._intake(loaded),
            stop_ids=stop_tokens(loaded.model, loaded.tokenizer),
            max_context=self.max_context,
            chunk_size=chunk_size or CHUNK,
            exact=exact,
            strict=strict,
            settle=self._settle,
            depth=self.profile.depth if self.profile is not None else None,
        )

    # ------------------------------------------------------------ generation

    def generate(
        self,
        prompts: str | Audio | Tensor | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        rounds_trace: bool = False,
        prefix: Prefix | None = None,
    ) -> Any:
        """Generate for one prompt or for a list; a list gives a list back, in order.

        Args:
            prompts: text, or a list of texts or of token-id lists. Where the target has an encoder, what it reads: a
                source text or its tokens, or, of a model that hears, an ``Audio`` or a tensor of its input features.
            params: for all of them; None for the defaults.
            rounds_trace: keep every round's tree in ``Generation.rounds_trace``.
            prefix: what each prompt goes on from, see ``prefix``; it is not read again.

        Returns:
            A ``Generation`` for each prompt; with ``params.n`` above 1 a list of n in the place of each.

        Raises:
            InputError, MemoryLimitError: before any work is done.
        """
        params = as_params(params)
        if isinstance(prompts, str | Audio) or (isinstance(prompts, Tensor) and prompts.is_floating_point()):
            return self.generate([prompts], params, rounds_trace=rounds_trace, prefix=prefix)[0]
        if not isinstance(prompts, Iterable):
            raise InputError(f"prompts is {prompts!r:.80}; expected a text, or a list of texts or of token-id lists")
        prompts = list(prompts)
        if prompts and all(isinstance(token, int) for token in prompts):
            raise InputError("prompts is a list of numbers; one prompt of token ids goes into a list: [[1, 2, 3]]")
        if prefix is not None:
            prefix.check(self.recipe())
            prompts = [[*prefix.tokens, *self._ids(prompt)] for prompt in prompts]
        places: list[RetainedSlot] = []

        def place() -> RetainedSlot | None:
            if prefix is not None:
                places.append(RetainedSlot(prefix=prefix))
            return places[-1] if places else None

        try:
            done = self.engine.complete(
                self.engine.submit(
                    *(prompt, params),
                    key=(i, j) if params.n > 1 else (i,),
                    rounds_trace=rounds_trace,
                    live=False,
                    place=place(),
                )
                for i, prompt in enumerate(prompts)
                for j in range(params.n)
            )
        finally:
            for made in places:
                self.engine.release(made)
        if params.n == 1:
            return done
        return [done[i : i + params.n] for i in range(0, len(done), params.n)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, index: int = 0) -> Iterator[Step]:
        """Generate for one prompt and give every round's tokens and text as they come.

        Joined ``step.text`` is the generation's text. Leaving the loop early ends the request.

        Args:
            prompt: one of what ``generate`` takes.
            params: None for the defaults.
            index: place of the prompt in a list of prompts that are streamed one by one: with a seed each then has
                the text that ``generate`` gives it in that list.

        Raises:
            InputError, MemoryLimitError: at the first step, before any work is done.
        """
        with self.conversation() as alone:
            yield from alone.stream(prompt, params, index=index)

    def prefix(self, text: str | Sequence[int]) -> Prefix:
        """Read a beginning once, to go on from it many times: a document, a system prompt.

        ::

            prefix = llm.prefix(document)
            prefix.save("document.safetensors")
            answer = llm.generate("Who wrote it?", prefix=llm.load_prefix("document.safetensors"))

        A prompt's tokens come behind those of the prefix as they are: where a word ends at the border, it ends.

        Args:
            text: or token ids.

        Raises:
            InputError: it is empty, or longer than the context.
            MemoryLimitError: it does not fit.
        """
        said = text if isinstance(text, str) else ""
        with Conversation(self.engine, beginning=True) as conversation:
            ids = self._ids(text, begin=True)
            conversation.generate(ids, SamplingParams(max_new_tokens=1, ignore_eos=True))
            return conversation.snapshot(said, self.recipe())

    def load_prefix(self, path: str | os.PathLike[str]) -> Prefix:
        """A prefix from its file.

        Raises:
            LoadError: it is no such file, or damaged.
            InputError: it was made by another model, or its cache is kept in another way.
        """
        prefix = read_prefix(path)
        prefix.check(self.recipe(), str(path))
        return prefix

    def recipe(self) -> dict[str, str]:
        """What must be equal where a prefix is used again: the model, and how its cache is kept."""
        from sakiyomi.cache.policies.retaining.formats import fingerprint

        rounding = self.target.weights.quantization
        return {
            **fingerprint(self.target.module, self.tokenizer),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "quantize": str(rounding.kind if rounding is not None else None),
            "cache": without_place(self._cache[0]),
            "kv_budget": str(self._cache[1]),
            "chunk_size": str(self.engine.chunk_size),
        }

    def _ids(self, prompt: Any, *, begin: bool = False) -> list[int]:
        """Token ids of a text; behind a prefix without what a text begins with."""
        if not isinstance(prompt, str):
            return list(prompt)
        return list(self.tokenizer(prompt, add_special_tokens=begin).input_ids)

    def conversation(self, prefix: Prefix | None = None) -> Conversation:
        """Requests that follow one another: of each prompt only what is new is computed.

        ::

            with llm.conversation() as conversation:
                for text in ("Once upon a time", "Once upon a time, in a wood"):
                    print(conversation.generate(text).text)

        Args:
            prefix: what its first prompt goes on from, if it begins with the same tokens.
        """
        if prefix is not None:
            prefix.check(self.recipe())
        return Conversation(self.engine, prefix)

    # ------------------------------------------------------------ models

    def drafter(self, draft: str | Drafter | Sequence[str | Drafter]) -> Drafter | None:
        """A drafter beside this target, for an engine of one's own; the LLM keeps the one that it has.

        Args:
            draft: as of ``LLM``.

        Returns:
            None for "none".

        Raises:
            InputError, LoadError, UnsupportedError: its model or file cannot be used beside this target.
        """
        made = make_drafter(parse_drafters(draft), self._around, strict=self._strict)
        given = getattr(made, "model", None)  # a drafter that the caller made has its graphs waited for too
        if isinstance(given, ModelRunner) and given not in self._models:
            self._models.append(given)
        return made

    def compiled(self) -> bool:
        """Whether the passes of a request that begins now are recorded, traced or compiled, and need no Python."""
        return all(model.recorded() for model in self._models)

    def wait(self, timeout: float | None = None, *, batches: bool = False) -> bool:
        """Wait for kernels that are compiled in the background, and record the passes that any request needs.

        Without this, kernels are taken into use when they are there, and passes are recorded as they come.

        Args:
            timeout: so many seconds at most; None: as long as it takes.
            batches: also record the larger passes of many requests at once.

        Returns:
            Whether the passes of a request that begins now are recorded.
        """
        end = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if end is None else max(0.0, end - time.monotonic())

        if any(model.weights.unsettled for model in self._models):
            builder().join(left())
            self.engine.settle()
        for model in self._models:
            for size in model.sizes if batches else model.first_sizes:
                if left() == 0.0:
                    break
                model.record((size,))
        return self.compiled()

    def _intake(self, loaded: Loaded) -> InputProcessor | None:
        """Where the target has an encoder: what makes sources for it."""
        if not has_encoder(self._config):
            return None
        from sakiyomi.engine.encoder_inputs import SourceInputProcessor

        model = self.target
        return SourceInputProcessor(
            loaded.model, loaded.tokenizer, loaded.extractor, model.vocab_size, self.max_context, model.first_logits
        )

    def _settle(self) -> None:
        for model in self._models:
            model.settle()

    def _pack_target(self, loaded: Loaded, quantize: str | None, **how: Any) -> ModelRunner:
        if loaded.prepared is not None or loaded.model.device.type == "cuda":  # rounded already, or by torchao
            quantize = None
        size = sum(parameter.nbytes for parameter in loaded.model.parameters()) if quantize else 0
        eviction: EvictionPlan | None = how.get("eviction")
        wants_text = quantize or (eviction is not None and eviction.packing is not None and eviction.packing.fitted)
        with returned_when_freed(), progress(f"rounding {loaded.name} ({readable(size)}) to {quantize}", size=size):
            packed = build_runner(
                loaded.model,
                owned=loaded.owned,
                quantize=quantize,
                text=judging_text(loaded.model, loaded.tokenizer) if wants_text else (),
                prepared=loaded.prepared,
                **{**self._pack_options, **how},
            )
            if loaded.save is not None:
                loaded.save(packed)
        return packed

    def _rounded(self, target: Any, kind: str) -> ModelRunner:
        """The target once more, its weights rounded, to run beside itself."""
        loaded = load_model(target, quantize=kind, packed=True, encoder_decoder=True, **self._options)
        packed = self._pack_target(loaded, kind, first_sizes=DRAFT_SIZES, exact=False)
        self._models.append(packed)
        return packed

    def _answer(self, context: Context) -> tuple[list[int], float] | None:
        """What the target says to a request by itself, and the seconds it took; None while every slot is taken."""
        if not self.target.cache.free:
            return None
        own = self.engine
        limits: dict[str, Any] = {"max_context": own.max_context, "chunk_size": own.chunk_size, "exact": own.exact}

        def intake(prompt: Any, params: SamplingParams) -> TokenizedPrompt:
            return TokenizedPrompt(list(context.tokens), params, context.source)

        plain = Engine(self.target, None, self.tokenizer, intake=intake, **limits)
        before = self.target.forward_seconds
        params = replace(context.params, n=1, logprobs=None, stop_token_ids=sorted(context.stop_ids))
        request = plain.submit(context.tokens, params, live=False)
        request.context.noise = context.noise
        (done,) = plain.complete([request])
        spent = self.target.forward_seconds - before
        self.target.forward_seconds = before  # it is not the target's own work for this request
        return done.token_ids, spent

    def _load_beside(self, name: str) -> Loaded:
        def fits(config: Any) -> None:
            check_family(self._config, config, name)

        return load_model(name, packed=True, encoder_decoder=True, fits=fits, **self._options)

    def _pack_beside(self, loaded: Loaded) -> ModelRunner:
        packed = build_runner(
            loaded.model,
            owned=loaded.owned,
            first_sizes=DRAFT_SIZES,
            prepared=loaded.prepared,
            **{**self._pack_options, "exact": False},
        )
        self._models.append(packed)
        return packed


def _eviction(cache: str, said: CacheSpec, budget: int | str | None, chunk_size: int) -> EvictionPlan | None:
    """What keeps the cache within the budget, packs it, or has prompts read in part; None: nothing does."""
    policy, packing, sparse, _ = said
    if policy is None:
        if budget is not None:
            raise InputError(
                f"kv_budget={budget!r} with cache={cache!r}, which keeps everything; name a policy, or leave it out"
            )
        full = packing is None and sparse is None
        return None if full else EvictionPlan(None, None, chunk_size, packing=packing, sparse=sparse)
    if budget is None:
        raise InputError(f"cache={cache!r} without a budget; give kv_budget, pairs of a head, or kv_memory as '2GiB'")
    return EvictionPlan(policy, budget, chunk_size, packing=packing, sparse=sparse)

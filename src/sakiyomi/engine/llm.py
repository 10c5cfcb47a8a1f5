"""`LLM`: a target, a drafter and an engine behind a few methods."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from sakiyomi.cache.eviction_plan import EvictionPlan
from sakiyomi.cache.policies import CacheSpec, read_cache
from sakiyomi.cache.prefix import Prefix
from sakiyomi.core.audio import Audio
from sakiyomi.core.cache_specs import budget_of, parse_cache
from sakiyomi.core.chats import Chat, is_chat
from sakiyomi.core.dtypes import dtype_name
from sakiyomi.core.errors import InputError
from sakiyomi.core.images import ImagePrompt
from sakiyomi.core.outputs import Step
from sakiyomi.core.params import QUANTIZATIONS, SamplingParams, as_params
from sakiyomi.core.threads import govern_threads
from sakiyomi.core.transcripts import TranscriptionParams
from sakiyomi.drafters import Drafter, Proposer, make_drafter, parse_drafters
from sakiyomi.engine.chat_template import Dialogue
from sakiyomi.engine.conversation import Conversation
from sakiyomi.engine.engine import CHUNK, Engine
from sakiyomi.engine.model_pool import ModelPool, answer, wait
from sakiyomi.engine.prefixes import Prefixes
from sakiyomi.engine.rendering import Rendering
from sakiyomi.engine.request import RetainedSlot
from sakiyomi.engine.tuned_profile import find_profile
from sakiyomi.model_executor.build import build_runner, check_compile
from sakiyomi.model_executor.loading import load_model, stop_tokens
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.weights import is_shared, rounding_of

Prompt = str | Sequence[int] | Chat | Audio | Tensor | ImagePrompt
Sound = Audio | str | os.PathLike[str]


_alive: weakref.WeakSet[LLM] = weakref.WeakSet()


class LLM:
    """A language model with speculative decoding.

    Args:
        target: name of an embedded model, a folder in Hugging Face format, a GGUF file, a hub id, or a loaded
            ``(model, tokenizer)`` pair; of a speech model (whisper) ``(model, processor)``.
        draft: "none" (or None), "auto", a folder or file with a model or heads, any form of ``docs/drafters.md``
            ("suffix", "early-exit:4"), a Drafter object, or several: joined by "+", or in a list. "auto" uses what
            ``sakiyomi tune`` found for this target on this machine (``profile``), else ``tales-draft`` for ``tales``,
            else a head in its folder (`eagle`, `block`, `mtp`, `medusa`), else recycle+suffix+prompt-lookup.
        cache: which keys and values are kept, and how: "full", a policy with options (``"h2o[sinks=4,local=32]"``),
            a number of bits ("quant-4", "kvquant-3"), both (``"h2o+quant-4"``), or mapped files ("offload:FOLDER");
            see ``docs/policies.md``.
        kv_budget, kv_memory: with a policy, pairs of a head that stay, or bytes of a request's cache ("2GiB").
        chunk_size: prompt tokens in one pass; None: 512.
        dtype: "auto" (as stored), "float32", "bfloat16", "float16".
        device: "auto", "cpu", "cuda", "cuda:N".
        quantize: "int8" or "int4" quantizes the target's weights (and rows to 8 bits); a packed copy is kept beside
            the model for the next time. ``target.weights.quantization`` says what it changed. On a GPU: torchao's.
        offload: where the target's weights stay between passes, for a model that does not fit: "disk", "cpu", "auto"
            or a folder, see ``docs/offload.md``. A pair that was loaded with a ``device_map`` runs as it is.
            None: all in memory.
        compile: "auto" records decoding passes that come often, with the numbers of eager ones; False runs all passes
            eagerly.
        max_context: most tokens of prompt and output; nothing is allocated in advance. None: the model's own limit.
        max_batch: requests that run at once; more wait.
        exact: greedy text, and text with a seed under the coupled rule, is bit-equal for every drafter, gamma, tree and
            batch, at a cost (``docs/exact.md``).
        strict: a drafter that fails ends the request with a ``DraftError``; otherwise the request continues without it.
        allow_pickle: open pickle weights.
        trust_remote_code: run code that comes with a model.

    Attributes:
        profile: what ``sakiyomi tune`` found, if draft "auto" uses it; None: it found nothing, or ``draft`` is another.
        processor: makes tokens and numbers of images or sound; None: the model has none.
        inputs: makes token ids, or sources of an encoder, of prompts.

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
        self.max_context = _context(max_context, self.target)
        self.inputs = self._pool.input_processor(self.max_context)
        self.engine = Engine(
            self.target,
            self.draft,
            self.tokenizer,
            inputs=self.inputs,
            stop_ids=stop_tokens(loaded.model, loaded.tokenizer),
            max_context=self.max_context,
            chunk_size=chunk_size or CHUNK,
            exact=exact,
            strict=strict,
            settle=self._pool.settle,
            depth=self.profile.depth if self.profile is not None else None,
        )
        self._prefixes = Prefixes(self.engine, cache, budget)
        _alive.add(self)

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
            prompts: text, or a list of texts, of token-id lists or of chats. A chat is a list of messages, objects with
                ``role`` and ``content``, and is written by the model's chat template. Where the target has an encoder,
                what it reads: a source text or its tokens, or, of a speech model, an ``Audio`` or a tensor of its
                input features.
            params: for all of them; None for the defaults.
            rounds_trace: keep every round's tree in ``Generation.rounds_trace``.
            prefix: comes before each prompt and is not computed again, see ``prefix``.

        Returns:
            A ``Generation`` for each prompt; with ``params.n`` above 1 a list of n in the place of each.

        Raises:
            InputError, MemoryLimitError: before any work is done.
        """
        params = as_params(params)
        given, alone = _listed(prompts)
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

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        params: SamplingParams | None = None,
        *,
        chat_template: str = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_final_message: bool = False,
    ) -> Any:
        """Reply to a chat, or to each of a list of chats; returns and raises what ``generate`` does.

        Args:
            messages: objects with ``role`` and ``content``: a text, or a list of ``{"type": "text", "text": ...}`` and
                ``{"type": "image", "path": ...}``.
            params: for all of them; None for the defaults.
            chat_template: a Jinja text; "auto" for the model's own; "none": messages form one continuing text.
            chat_template_kwargs: further values for the template, by name.
            tools: JSON schemas of tools that the template describes to the model.
            continue_final_message: the last message is the assistant's, and its text goes on.
        """
        alone = is_chat(messages)
        dialogue = Dialogue(self.tokenizer, chat_template, processor=self.processor)
        how = Rendering(tools, chat_template_kwargs or {}, "begun" if continue_final_message else "new")
        chats: Any = [messages] if alone else messages
        found = self.generate([dialogue.prompt(chat, how) for chat in chats], params)
        return found[0] if alone else found

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, index: int = 0) -> Iterator[Step]:
        """Generate for one prompt and give every round's tokens and text as they come.

        Leaving the loop early ends the request.

        Args:
            prompt: one of what ``generate`` takes.
            params: None for the defaults.
            index: of the prompt in a list: with a seed it has the text that ``generate`` gives it there.

        Raises:
            InputError, MemoryLimitError: at the first step, before any work is done.
        """
        with self.conversation() as alone:
            yield from alone.stream(prompt, params, index=index)

    def transcribe(self, sounds: Sound | Sequence[Sound], params: TranscriptionParams | None = None) -> Any:
        """Transcribe a sound of any length, or a list, with a speech model; a list gives a list of transcripts back.

        Args:
            sounds: each an ``Audio``, or the path of a file.
            params: for all of them; None for the defaults.

        Raises:
            UnsupportedError, LoadError, InputError: see ``Transcriber``.
        """
        from sakiyomi.engine.transcription import Transcriber

        alone = isinstance(sounds, Audio | str | os.PathLike)
        given: Any = [sounds] if alone else list(sounds)  # type: ignore[arg-type]
        found = Transcriber(self).transcribe_all(given, params)
        return found[0] if alone else found

    def prefix(self, text: str | Sequence[int]) -> Prefix:
        """Compute a beginning once, to save it and continue it many times: a document, a system prompt.

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
        """Successive requests, of which only the new part of each prompt is computed; a context manager.

        Args:
            prefix: used for the first prompt, if that begins with the same tokens.
        """
        if prefix is not None:
            prefix.check(self.recipe())
        return Conversation(self.engine, prefix)

    # ------------------------------------------------------------ models

    def record(self) -> bool:
        """Keep some kilobytes in the cache folder with which the next start needs no classes of the models.

        A program does this by itself when it ends, for each ``LLM`` that has generated something, unless the
        environment has ``SAKIYOMI_RECORD=off``. Returns whether all models are recorded now.
        """
        return os.environ.get("SAKIYOMI_RECORD") != "off" and self._pool.record()

    def drafter(self, draft: str | Drafter | Proposer | Sequence[str | Drafter | Proposer] | None) -> Drafter | None:
        """A drafter for this target, for an engine of one's own; None for "none". The LLM's own drafter stays.

        Args:
            draft: as of ``LLM``.

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
        """Wait, for so many seconds at most, for kernels that are compiled in the background, and record the passes
        that any request needs; returns what ``compiled`` does.
        """
        wait(self.engine, self._pool.models, timeout)
        return self.compiled()


def _record_at_the_end() -> None:
    """Record what a program has used; not behind an error, after which nobody wants to wait."""
    if getattr(sys, "last_type", None) is None:
        for llm in list(_alive):
            if llm.engine.requests:
                llm.record()


# Recording reads files in threads of an executor, and those end before the functions of atexit run.
getattr(threading, "_register_atexit", atexit.register)(_record_at_the_end)


def _listed(prompts: Any) -> tuple[list[Any], bool]:
    """Prompts as a list, and whether there was one alone."""
    alone = isinstance(prompts, str | Audio | ImagePrompt) or is_chat(prompts)
    if alone or (isinstance(prompts, Tensor) and prompts.is_floating_point()):
        return [prompts], True
    if not isinstance(prompts, Iterable):
        raise InputError(
            f"prompts is {prompts!r:.80}; expected a text, or a list of texts, of messages or of token-id lists"
        )
    given = list(prompts)
    if given and all(isinstance(token, int) for token in given):
        raise InputError("prompts is a list of numbers; one prompt of token ids goes into a list: [[1, 2, 3]]")
    return given, False


def _check_options(quantize: object, compile: object, **counts: object) -> None:
    """Refuse values that make no sense."""
    if quantize not in (None, *QUANTIZATIONS):
        raise InputError(f"quantize={quantize!r}; expected None, {' or '.join(map(repr, QUANTIZATIONS))}")
    check_compile(compile)
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise InputError(f"{name}={value!r}; expected a whole number of at least 1")


def _context(wanted: int | None, target: ModelRunner) -> int:
    """Most tokens of a text."""
    own = target.max_context
    if wanted is not None and wanted > own:
        note = target.weights.context_note
        raise InputError(f"max_context={wanted} exceeds the model's {own} positions; leave it out or lower it{note}")
    return wanted or own


def _eviction(spec: CacheSpec, budget: int | str | None, chunk_size: int) -> EvictionPlan | None:
    """What keeps the cache within the budget, quantizes it, or computes prompts in part; None: nothing does."""
    policy, packing, sparse, _ = spec
    if policy is None and packing is None and sparse is None:
        return None
    return EvictionPlan(policy, budget, chunk_size, packing=packing, sparse=sparse)


def _recording(target: Any, compile: str | bool) -> str | bool:
    """Processes that share a target record nothing: they are not ready for other passes at the same moment."""
    return False if isinstance(target, tuple) and is_shared(target[0]) else compile

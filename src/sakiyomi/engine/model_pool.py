"""The models of an `LLM`: its target, and what drafters load and run beside it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sakiyomi.cache.eviction_plan import EvictionPlan
from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.memory import readable, returned_when_freed
from sakiyomi.core.progress import progress
from sakiyomi.core.prompts import judging_text
from sakiyomi.drafters import Context, DrafterContext
from sakiyomi.engine.engine import Engine
from sakiyomi.engine.inputs import InputProcessor, TextInputProcessor, TokenizedPrompt
from sakiyomi.kernels.build import builder
from sakiyomi.model_executor.loading import Loaded, check_family, has_encoder
from sakiyomi.model_executor.positions import rope_limit
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.stages import is_cut


class ModelPool:
    """Loads models with the options of one `LLM` and makes them ready to run.

    Args:
        target: as of ``LLM``.
        load: ``load_model`` with the options that all models share.
        run: ``build_runner`` with the options that all models share.
        quantize, offload: of the target, as of ``LLM``.
        **options: of ``build_runner`` for the target alone.

    Attributes:
        loaded: the target as it was loaded.
        target: the target as it runs.
        models: all models that run here, the target first.

    Raises:
        LoadError, UnsupportedError, MemoryLimitError: the target cannot be used.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | tuple[Any, Any],
        load: partial[Loaded],
        run: partial[ModelRunner],
        *,
        quantize: str | None,
        offload: str | os.PathLike[str] | None,
        **options: Any,
    ) -> None:
        self._name, self._load, self._run = target, load, run
        self._max_context: int | None = options.get("max_context")
        self._unrecorded: list[tuple[ModelRunner, Callable[[ModelRunner], bool]]] = []
        if is_cut(target):
            if quantize or offload or any(options[name] for name in ("eviction", "exact", "offloaded")):
                raise UnsupportedError(
                    f"{target} is a model in stages, which runs with cache='full', without exact, and as it was cut: "
                    "leave quantize and offload out; cut the packed copy of a quantized model"
                )
            from sakiyomi.model_executor.stages.pipeline import lead

            self.loaded, self.target = lead(Path(str(target)), load, run)  # its context is fixed
        else:
            self.loaded = load(target, quantize=quantize, offload=offload)
            self.target = self._pack(self.loaded, quantize, **options)
        self.models = [self.target]

    def context(self, answer: Callable[[Context], object], *, allow_pickle: bool) -> DrafterContext:
        """What drafters are made from.

        Args:
            answer: asks the target, see ``drafters.oracle``.
            allow_pickle: as of ``LLM``.
        """
        return DrafterContext(
            target=self.loaded,
            packed=self.target,
            vocab_size=self.target.vocab_size,
            load=self.load,
            pack=self.pack,
            quantized=self.quantized,
            answer=answer,
            allow_pickle=allow_pickle,
        )

    def load(self, name: str, device: str | None = None) -> Loaded:
        """Load another model, of a family that can draft for the target; by default onto the target's device."""

        def fits(config: Any) -> None:
            check_family(self.loaded.model.config, config, name)

        return self._load(name, fits=fits, packed=True, **({} if device is None else {"device": device}))

    def pack(self, loaded: Loaded, quantize: str | None = None) -> ModelRunner:
        """Make a loaded model ready to run beside the target."""
        limit = rope_limit(loaded.model.config.get_text_config())  # beyond it a draft model proposes nothing
        wanted = None if self._max_context is None else min(self._max_context, limit)
        packed = self._pack(loaded, quantize, max_context=wanted)
        self.models.append(packed)
        return packed

    def quantized(self, kind: str) -> ModelRunner:
        """A second copy of the target with quantized weights, as a draft model."""
        return self.pack(self._load(self._name, quantize=kind), kind)

    def settle(self) -> None:
        """Swap in what has finished building in the background; to be called while no request runs."""
        for model in self.models:
            model.settle()

    def input_processor(self, max_context: int) -> InputProcessor:
        """The input processor of the target: for text, for text and images, or for sources of an encoder."""
        if self.target.weights.multimodal:
            from sakiyomi.engine.image_inputs import ImageInputProcessor

            return ImageInputProcessor(self.loaded, self.target, max_context)
        if not has_encoder(self.loaded.model.config):
            note = self.target.weights.context_note
            return TextInputProcessor(self.loaded.tokenizer, self.target.vocab_size, max_context, note)
        from sakiyomi.engine.encoder_inputs import SourceInputProcessor

        return SourceInputProcessor(self.loaded, self.target, max_context)

    def _pack(
        self, loaded: Loaded, quantize: str | None, *, eviction: EvictionPlan | None = None, **options: Any
    ) -> ModelRunner:
        if loaded.prepared is not None or loaded.model.device.type == "cuda":  # quantized already, or by torchao
            quantize = None
        size = sum(parameter.nbytes for parameter in loaded.model.parameters()) if quantize else 0
        wants_text = quantize or (eviction is not None and eviction.packing is not None and eviction.packing.fitted)
        what = f"quantizing {loaded.name} ({readable(size)}) to {quantize}"
        with returned_when_freed(), _named(loaded.name), progress(what, size=size):
            packed = self._run(
                loaded.model,
                owned=loaded.owned,
                quantize=quantize,
                text=judging_text(loaded.model, loaded.tokenizer) if wants_text else (),
                prepared=loaded.prepared,
                stream=loaded.stream,
                eviction=eviction,
                **options,
            )
            if loaded.save is not None:
                loaded.save(packed)
        if loaded.record is not None:
            self._unrecorded.append((packed, loaded.record))
        return packed

    def record(self) -> bool:
        """Save recordings of the models that can have one and have none. Returns whether all of them are recorded."""
        for packed, record in list(self._unrecorded):
            packed.record()
            if packed.weights.packed is not None and packed.recorded() and record(packed):
                self._unrecorded.remove((packed, record))
        return not self._unrecorded


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Say of which model it is that a LoadError speaks."""
    try:
        yield
    except LoadError as error:
        raise LoadError(f"{name}: {error.message}") from error


def wait(engine: Engine, models: Sequence[ModelRunner], timeout: float | None = None) -> None:
    """Wait for kernels that are compiled in the background, and record passes in advance.

    Args:
        engine: runs the models.
        models: whose passes are recorded.
        timeout: seconds at most; None: as long as it takes.
    """
    end = None if timeout is None else time.monotonic() + timeout
    if any(model.weights.unsettled for model in models):
        builder().join(timeout)
        engine.settle()
    for model in models:
        if end is None or time.monotonic() < end:
            model.record()


def answer(own: Engine, context: Context) -> tuple[list[int], float] | None:
    """The target's own answer to a request, without a drafter, and the seconds that it took.

    Args:
        own: runs the request, which waits meanwhile.
        context: of the request.

    Returns:
        None while every slot is taken.
    """
    target = own.target
    if not target.cache.free:
        return None
    plain = Engine(target, None, own.tokenizer, max_context=own.max_context, chunk_size=own.chunk_size, exact=own.exact)
    before = target.forward_seconds
    params = replace(context.params, n=1, logprobs=None, prompt_logprobs=None, stop_token_ids=sorted(context.stop_ids))
    request = plain.submit(TokenizedPrompt(list(context.tokens), params, context.source), live=False)
    request.context.noise = context.noise
    (done,) = plain.complete([request])
    spent = target.forward_seconds - before
    target.forward_seconds = before  # it is not the target's own work for this request
    return done.token_ids, spent

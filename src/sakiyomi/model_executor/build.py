"""`build_runner`: a loaded transformers model as a `ModelRunner`, with its cache, its kernels and its self-tests."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

from sakiyomi.cache.cross_attention import SourceCache
from sakiyomi.cache.eviction import EvictingCache
from sakiyomi.cache.eviction_plan import Capacity, EvictionPlan
from sakiyomi.cache.layer_state import make_states
from sakiyomi.cache.mapped_files import MappedFiles
from sakiyomi.cache.slots import SlotCache
from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.core.memory import available_bytes
from sakiyomi.core.process import share_processors
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.kernels.build import native_at_hand
from sakiyomi.model_executor.attention import choose_backend
from sakiyomi.model_executor.loading.families import check_states, has_encoder
from sakiyomi.model_executor.loading.packed_stream import PackedStream
from sakiyomi.model_executor.loading.prepared import Prepared
from sakiyomi.model_executor.own_forward import ways_of
from sakiyomi.model_executor.positions import rope_limit
from sakiyomi.model_executor.probe import FixedAttentionError
from sakiyomi.model_executor.proof import prove
from sakiyomi.model_executor.recorded_model import RecordedModel
from sakiyomi.model_executor.row_invariance import TRIAL, invariant_sizes
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.session import ALL_SIZES, SIZES
from sakiyomi.model_executor.weights import ModelWeights, on_cpu, on_gpu

logger = logging.getLogger("sakiyomi")
ROWS_EACH = 4  # rows of a request where many share a pass: a further row costs more than it saves


class RunnerOptions(TypedDict, total=False):
    """Options of a session; all are optional.

    Attributes:
        max_slots: most requests at once; 8 by default.
        exact: see ``Session``.
        owned, prepared, quantize, stream: see ``ModelWeights``.
        text: token ids on which quantization is measured and the levels of a quantized cache are fitted.
        eviction: keeps the cache within a budget; None: all pairs stay.
        offloaded: files that hold the cache; None: it lies in memory.
        max_context: most tokens of a text; None: as many as our cache supports.
        make_cache: class of the cache; takes the arguments of ``SlotCache``.
    """

    max_slots: int
    exact: bool
    owned: bool
    prepared: Prepared | None
    quantize: str | None
    stream: PackedStream | None
    text: Sequence[int]
    eviction: EvictionPlan | None
    offloaded: MappedFiles | None
    max_context: int | None
    make_cache: Callable[..., SlotCache]


def build_runner(model: Any, *, compile: bool | str = "auto", **options: Unpack[RunnerOptions]) -> ModelRunner:
    """Make a session of a model.

    A model that cannot be served on our cache runs text by text through its own forward (``own_forward.py``).

    Args:
        model: see ``ModelWeights``.
        compile: "auto": frequent passes are recorded; False: all passes are eager.
        **options: see ``RunnerOptions``.

    Raises:
        InputError: see ``check_compile``.
        UnsupportedError: the model's attention is not supported, quantized weights are not, or its cache cannot lie in
            files.
    """
    check_compile(compile)
    build = functools.partial(_build, model, records=bool(compile), **options)
    max_context = options.get("max_context")
    _check_crossing(model, max_context)
    apart = any(options.get(name) for name in ("exact", "quantize", "prepared", "eviction", "offloaded"))
    try:
        check_states(model.config, type(model))
        _check_context(model.config, max_context)
        return build()
    except UnsupportedError as error:
        if apart and isinstance(error, FixedAttentionError):
            raise UnsupportedError(
                f"{error.message}; use cache='full', and leave quantize at None and exact at False, so that each text "
                "can go through its own forward by itself"
            ) from error
        if apart or has_encoder(model.config) or not all(weight.numel() for weight in model.parameters()):
            raise
        refusal = error
    for way in ways_of(model):
        try:
            runner = build(way=way)
        except UnsupportedError as error:
            refusal.add_note(f"{way}: {error}")
            continue
        name, runner.module.why = type(model).__name__, refusal.message
        logger.warning("%s: %s; each text goes through its own forward by itself, which is slower", name, refusal)
        return runner
    raise UnsupportedError(
        f"{refusal.message}; and its own forward does not give again what it gives without a cache"
    ) from refusal


def _build(model: Any, *, records: bool, way: str | None = None, **options: Unpack[RunnerOptions]) -> ModelRunner:
    """See ``build_runner``; ``way``: see ``ModelWeights``."""
    max_slots, exact = options.get("max_slots", 8), options.get("exact", False)
    prepared, quantize = options.get("prepared"), options.get("quantize")
    eviction, offloaded = options.get("eviction"), options.get("offloaded")
    # Latents exclude three options. Policies read the keys of each head. Products with latents depend on the other rows
    # of a pass. Quantization is measured in the model's own forward, which has no latents.
    latents = eviction is None and not exact and quantize is None
    read = functools.partial(ModelWeights, model, prepared=prepared, quantize=quantize, way=way, latents=latents)
    owned, text, max_context = options.get("owned", False), options.get("text", ()), options.get("max_context")
    weights = read(owned=owned, text=text, max_context=max_context, stream=options.get("stream"))
    if offloaded is not None:
        _check_files(weights)
    # The first use on a machine starts in plain torch, while the kernels are being built.
    waits = records and not exact and not quantize and prepared is None
    weights.unsettled = waits and (on_gpu(weights) or on_cpu(weights)) and not native_at_hand()
    if weights.unsettled:
        share_processors(True)
    else:
        weights.pack()
        if weights.quantizing is not None:
            weights.quantizing.check(weights.module, weights.packed)
        weights.expect(bool(weights.stateful))
    capacity = Capacity()
    if eviction is not None:  # the self-tests below read their text in one pass
        alone = max(len(weights.text) if quantize else 0, TRIAL if exact else 0)
        slots = max_slots + int(weights.encoder is not None)
        capacity = eviction.capacity(weights.shapes, weights.dtype.itemsize, slots, alone=alone)
    # States of recurrent layers are computed in Python, which a captured pass would not replay.
    evicts = eviction is not None or bool(weights.stateful)
    spare = choose_backend(weights.needs(exact=exact, evicts=evicts)).spare
    make_cache = options.get("make_cache", SlotCache)
    cache, sources = _caches(weights, max_slots, capacity, offloaded, spare, make_cache)
    sizes: tuple[int, ...] = SIZES
    if spare:  # a capture is cheap, so there are larger sizes too
        sizes = (*SIZES, 128, 256)
    elif isinstance(weights.module, RecordedModel) and not exact:
        sizes = ALL_SIZES
    elif max_slots * ROWS_EACH > SIZES[-1] and not exact:  # the drafts of many requests need a larger pass
        sizes = (*SIZES, 128)
    runner = ModelRunner(
        weights,
        cache,
        sources=sources,
        observer=eviction.observer if eviction is not None else None,
        records=records,
        exact=exact,
        sizes=sizes,
        evicts=evicts,
    )
    cache.on_move = runner.moved
    if sources is not None:
        sources.on_move = lambda moved: runner.backend.attach_sources(sources)
    runner.take_backend()
    if weights.quantizing is not None:
        with cache.lent(len(weights.text)) as slot:
            judged = weights.encoder.judged if weights.encoder is not None else None
            runner.make_room(slot, len(weights.text), judged.source if judged is not None else None)
            logits = runner.score([SequenceRows(slot, 0, weights.text, prompt=True)]).logits
            weights.quantization = weights.quantizing.report(weights.module, logits)
    prove(runner)
    if exact:
        _make_exact(runner)
    if eviction is not None:
        name = type(weights.module).__name__
        eviction.check_model(name, weights.shapes, has_encoder=sources is not None)
        runner.evict_by(eviction, EvictingCache(eviction, capacity, cache, runner))
    return runner


def check_compile(compile: object) -> None:
    """Check the option ``compile``.

    Raises:
        InputError: it is neither "auto" nor False.
    """
    if compile is True:
        raise InputError("compile=True: recorded passes are as fast or faster than compiled ones; use compile='auto'")
    if compile != "auto" and compile is not False:
        raise InputError(f"compile={compile!r}; expected 'auto' or False")


def _check_context(config: Any, wanted: int | None) -> None:
    """Refuse contexts on our cache in which all positions change when a text grows."""
    limit = rope_limit(config.get_text_config())
    if wanted is not None and wanted > limit:
        raise UnsupportedError(
            f"with max_context={wanted} texts grow beyond {limit} tokens, where the rotary embedding (longrope) "
            f"changes all positions; exact, quantize and cache policies need max_context={limit} or less"
        )


def _check_crossing(model: Any, wanted: int | None) -> None:
    """Refuse classes whose ``generate`` keeps its cache when a text grows beyond the limit where its factors change.

    Their texts depend on where the prompt ended, which is not known here when a text is read again.
    """
    limit = rope_limit(model.config.get_text_config())
    if wanted is None or wanted <= limit:
        return
    from transformers import GenerationMixin  # not imported for models that start from a recording

    own: Any = getattr(type(model), "prepare_inputs_for_generation", None)
    if own is GenerationMixin.prepare_inputs_for_generation:
        raise UnsupportedError(
            f"max_context={wanted}: {type(model).__name__} does not read a text anew when it grows beyond {limit} "
            "tokens, where its rotary embedding (longrope) changes all positions; use max_context="
            f"{limit} or less"
        )


def _caches(
    weights: ModelWeights,
    max_slots: int,
    capacity: Capacity,
    offloaded: MappedFiles | None,
    spare: int,
    make_cache: Callable[..., SlotCache],
) -> tuple[SlotCache, SourceCache | None]:
    """The cache of a session, and, of a model with an encoder, the cache of its sources."""
    encoder, shapes = weights.encoder, weights.shapes
    extra = int(encoder is not None)

    def left() -> int:
        return int(available_bytes(str(weights.device)) * 0.9)

    cache = make_cache(
        shapes,
        dtype=weights.dtype,
        max_slots=max_slots,
        spare=spare,
        extra=extra,
        available=left if offloaded is None else offloaded.available,
        limits=capacity.limits,
        packed=capacity.packed,
        states=make_states(weights.stateful, max_slots + extra, left),
        offloaded=offloaded,
    )
    if encoder is None:
        return cache, None
    return cache, SourceCache(encoder.shapes, dtype=weights.dtype, max_slots=max_slots, extra=1, available=left)


def _check_files(weights: ModelWeights) -> None:
    """Refuse a cache in files where attention cannot read them, or where they would not hold all of it."""
    devices = {shape.device.type for shape in weights.shapes}
    if devices != {"cpu"}:
        raise UnsupportedError(
            f"cache='offload' on {', '.join(sorted(devices))}: mapped files are main memory; use cache='quant-4' "
            "or a policy, or device='cpu'"
        )
    if weights.encoder is not None:
        raise UnsupportedError(
            f"{type(weights.module).__name__} has an encoder: the keys and values of its sources stay in memory; use "
            "cache='full'"
        )


def _make_exact(runner: ModelRunner) -> None:
    """Keep only row counts at which a self-test finds each row independent of the others."""
    name = type(runner.module).__name__
    if runner.weights.has_experts and not runner.weights.packed_experts:
        raise UnsupportedError(
            f"exact=True: {name} gathers rows by expert in code of its own, so that sums depend on the other rows "
            "of a pass; use exact=False"
        )
    runner.sizes = invariant_sizes(runner)
    if not runner.sizes:
        raise UnsupportedError(
            f"exact=True: with no row count of {SIZES} are rows independent of the others on this machine in "
            f"{runner.dtype}; use exact=False, or dtype='float32'"
        )

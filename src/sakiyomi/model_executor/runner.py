"""A Hugging Face causal language model as the engine runs it: packed rows, our cache, our attention, its own weights.

`ModelRunner` works on a structural copy of the user's model which shares its parameters: the user's object keeps its
attention setting and its modules. Target and draft model are both one of these. It knows rows, slots and logits; it
knows no drafts and no sampling.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sakiyomi.cache.cross_attention import Source, SourceCache
from sakiyomi.cache.eviction import ENDLESS, EvictingCache, FullCache, QueryTrackingCache
from sakiyomi.cache.mapped_files import MappedFiles
from sakiyomi.cache.policies.looking import note_queries
from sakiyomi.cache.slots import LayerShape, SlotCache
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.memory import available_bytes, readable
from sakiyomi.core.running_mean import running_mean
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.kernels.build import native_at_hand
from sakiyomi.kernels.native import PackedLinear, PackedWeights
from sakiyomi.kernels.pack import PACKED, Prepared, Watch, pack_linears
from sakiyomi.kernels.quantization import QuantizationReport, check_quantization, choose_bits, compare, layer_errors
from sakiyomi.model_executor.attention import observe
from sakiyomi.model_executor.attention import op as attention
from sakiyomi.model_executor.attention.cuda import CudaBackend, CudaGraphs
from sakiyomi.model_executor.attention.hf_cache import HFCacheBackend
from sakiyomi.model_executor.attention.torch import TorchBackend, take_over
from sakiyomi.model_executor.compiled import Graphs, State
from sakiyomi.model_executor.encoder_decoder.decoder import Encoder, split
from sakiyomi.model_executor.features import HiddenStateCapture
from sakiyomi.model_executor.loading.families import has_experts
from sakiyomi.model_executor.loading.stream import attach, is_offloaded
from sakiyomi.model_executor.row_invariance import listening
from sakiyomi.model_executor.structural_copy import structural_copy

logger = logging.getLogger("sakiyomi")
SIZES = (1, 4, 8, 16, 32, 64)
ROWS_EACH = 4  # of a request, where many share a pass: beyond that a row costs more than it brings
SMALL_HEAD = 0.1  # share of the weights, up to which the logits of all rows of a prompt cost next to nothing
TRIAL = 80  # tokens of the self-test
LARGE = 1 << 24  # bytes of weights, from which on fewer of its tokens will do
SLOW = 0.05  # seconds of a trial pass from which on one is enough
# What one request needs, the likeliest first; the others are compiled when they are met.
TARGET_SIZES, DRAFT_SIZES = (8, 1), (1, 4)


def _weights(module: nn.Module) -> int:
    """Number of a module's own weights, packed ones too."""
    if isinstance(module, PackedLinear):
        return module.in_features * module.out_features
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))


def _stored_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor as it lies in memory: one of torchao's says what it would take unrounded."""
    parts = getattr(type(tensor), "__tensor_flatten__", None)
    if parts is None:
        return tensor.nbytes
    return sum(getattr(tensor, name).nbytes for name in parts(tensor)[0] if getattr(tensor, name) is not None)


def _rope_limit(config: Any) -> int:
    """Context up to which a position's rotary embedding depends on the position alone.

    "longrope" takes other frequencies for all positions as soon as one lies beyond the original context: keys in the
    cache would be wrong from there on, and requests of one pass would change each other's numbers.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return 1 << 30
    own = rope.get("original_max_position_embeddings")
    limit = int(own or getattr(config, "original_max_position_embeddings", None) or 0)
    if 0 < limit < config.max_position_embeddings:
        logger.warning(
            "longrope changes all positions beyond %d tokens: the context is limited to them instead of %d",
            limit,
            config.max_position_embeddings,
        )
    return limit or 1 << 30


class ModelRunner:
    """Scores packed rows of several requests in one pass.

    Of an encoder-decoder model the decoder is what runs; `make_room` has the encoder read a request's source, and its
    keys and values for cross-attention stay beside the request's own.

    Args:
        model: a loaded causal LM, or an encoder-decoder one of a known family; not changed.
        max_slots: requests at once at most.
        compile: "auto" compiles graphs in the background where a compiler is, True waits for them, False never does.
        exact: every pass has a row count at which a self-test found each row independent of the others.
        owned: the model was loaded for this alone: its weights are freed when packed, and it cannot run any more.
        first_sizes: row counts whose graphs are compiled first.
        quantize: "int8" or "int4" rounds weights to so many bits, and rows to 8, where a layer bears it; None leaves
            them.
        text: token ids on which the rounding is judged, and the levels of a packed cache are fitted.
        prepared: what is known of a model whose layers are packed already; nothing is rounded then.
        keeping: keeps the cache within a budget; None: all pairs stay.
        watched: where all pairs stay, the queries of each slot's last row are kept beside them.
        offloaded: where the cache's files lie; None: it lies in memory.

    Attributes:
        keeping: what stays of the cache, for the engine.
        quantization: what the rounding changed; None where nothing was rounded.
        siblings: names of linear layers that are computed together.
        offloaded: weights come by accelerate's hooks and go after their layer; passes are eager, and cost about the
            same whatever the number of rows.
        stream: where those come from that lie in files; None: no weights do.
        watchers: told of every pass when it is done: its plan, and its seconds.
        hidden: (rows, hidden) what the head over the vocabulary read for the logits that ``score`` gave last; None
            where an encoder is.

    Raises:
        UnsupportedError: the model's attention cannot be served, or nothing here can compute with 8 bits; or its cache
            cannot lie in files.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_slots: int = 8,
        compile: bool | str = "auto",
        exact: bool = False,
        owned: bool = False,
        first_sizes: Sequence[int] = TARGET_SIZES,
        quantize: str | None = None,
        text: Sequence[int] = (),
        prepared: Prepared | None = None,
        eviction: EvictingCache | None = None,
        watched: bool = False,
        offloaded: MappedFiles | None = None,
    ) -> None:
        if quantize and not owned:  # of what was loaded for it, this was known before weights were read
            check_quantization(f"quantize={quantize!r}", model.dtype)
        self._model = structural_copy(model).eval()
        self._encoder: Encoder | None = None
        if getattr(model.config, "is_encoder_decoder", False):
            self._model, self._encoder = split(self._model)
        self.config = self._model.config.get_text_config()
        head = model.get_output_embeddings()
        self.vocab_size = int(getattr(head, "out_features", None) or head.weight.shape[0])
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        if self.device.type == "meta":  # offloaded as a whole: hooks bring the weights to where they are needed
            self.device = torch.device(getattr(getattr(model, "_hf_hook", None), "execution_device", None) or "cpu")
        self._on_cpu = self.device.type == "cpu"
        self.max_context = int(getattr(self.config, "max_position_embeddings", 0) or 1 << 30)
        if "chunked_attention" in (
            getattr(self.config, "layer_types", None) or ()
        ):  # llama4: chunks are in the mask only
            self.max_context = min(self.max_context, int(self.config.attention_chunk_size or self.max_context))
        self.max_context = min(self.max_context, _rope_limit(self.config))
        self.exact, self.first_sizes = exact, tuple(first_sizes)
        self._prepared, self._quantize = prepared, quantize
        self.quantization: QuantizationReport | None = prepared.report if prepared is not None else None
        self.siblings: list[list[str]] = prepared.siblings if prepared is not None else []
        self.text = list(text)
        self.lock = threading.RLock()
        self._reassigned = eviction is not None and eviction.reassigned
        self.forward_seconds = 0.0
        self.watchers: list[Callable[[BatchPlan, float], None]] = []
        self.hidden: Tensor | None = None
        self.tap = HiddenStateCapture()
        self._small_head = _weights(head) < SMALL_HEAD * sum(map(_weights, model.modules()))
        self._seconds: dict[tuple[int, bool], float] = {}
        self._warm: set[tuple[int, bool]] = set()
        self._buffers: dict[int, tuple[NDArray[np.int64], Tensor, Tensor]] = {}
        # Of what was loaded to be packed here, hooks bring each layer once, and are gone then.
        self.offloaded = not owned and is_offloaded(self._model)
        self.stream = attach(self._model, int(self.config.num_hidden_layers)) if self.offloaded else None
        for module in self._model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False
        parameters = inspect.signature(self._model.forward).parameters
        self._keeps = "logits_to_keep" in parameters
        self.passes_here = True
        known = prepared.shapes if prepared is not None else None
        shapes = known or self._layer_shapes(int(self.config.num_hidden_layers))
        self._layers = len(shapes)
        if offloaded is not None:
            self._check_files(shapes)
        self._one_place = {shape.device for shape in shapes} == {self.device}
        self._owned, self._compile = owned, compile
        here = self._one_place and not self.offloaded  # weights that come by hooks come in no graph
        accelerated = self.device.type == "cuda" and here and self.passes_here and not exact
        accelerated = accelerated and self._encoder is None and eviction is None and not watched
        if eviction is not None:  # what is tried out below is read at once
            eviction.slack = max(eviction.slack, len(self.text) if quantize else 0, TRIAL if exact else 0)
        self.cache = SlotCache(
            shapes,
            dtype=self.dtype,
            max_slots=max_slots,
            spare=int(accelerated),
            extra=int(self._encoder is not None),
            on_move=self._moved,
            available=self._memory_left if offloaded is None else offloaded.available,
            limits=eviction.limits(shapes, self.dtype.itemsize) if eviction is not None else None,
            packed=eviction.packed(shapes, max_slots + int(self._encoder is not None))
            if eviction is not None
            else None,
            offloaded=offloaded,
        )
        self.sources = self._source_cache(max_slots)
        self.eviction: EvictingCache | FullCache = QueryTrackingCache(self.cache) if watched else FullCache(self.cache)
        self._noted = eviction.noted if eviction is not None else None
        self._note = note_queries if watched else self._noted.note if self._noted is not None else None
        self.state: State
        self.graphs: Graphs | None = None
        self._captured: CudaGraphs | None = None
        # The first use on a machine builds the kernels meanwhile, and begins in plain torch.
        waits = compile == "auto" and not exact and not quantize and prepared is None
        self.unsettled = waits and self._packable() and not native_at_hand()
        # What many requests draft together has no place in the common sizes. A capture costs no compiler's seconds:
        # there all have larger ones.
        many = max_slots * ROWS_EACH > SIZES[-1] and not exact
        self.sizes: tuple[int, ...] = (*SIZES, 128, 256) if accelerated else (*SIZES, 128) if many else SIZES
        if not self.passes_here:
            self._take(HFCacheBackend(self.cache))
        elif accelerated:
            state = CudaBackend(self.cache)
            self._take(state)
            self._captured = CudaGraphs(self._plain, state) if compile else None
        else:
            self._take((None if self.unsettled else self._native()) or self._dense())
        self._proven = False
        self._prompts: TorchBackend | None = None  # what is tried out below sees everything
        if quantize:
            self._judge_rounding()
        if exact:
            self._make_exact()
        if eviction is not None:
            eviction.attach(self)
            self.eviction = eviction
            self._prompts = TorchBackend(self.cache, sparse=eviction.sparse) if eviction.sparse is not None else None
            if eviction.reassigned:
                self.max_context = ENDLESS

    @property
    def module(self) -> nn.Module:
        """The transformers model as it runs here, its linear layers packed."""
        model: nn.Module = self._model
        return model

    @property
    def head(self) -> nn.Module:
        """The head over the vocabulary, as it runs here: (..., hidden) to (..., V)."""
        head: nn.Module = self._model.get_output_embeddings()
        return head

    def settle(self) -> None:
        """Take kernels into use that were being built when the model was loaded. Only while no request runs."""
        if self.unsettled and native_at_hand():
            self.unsettled = False
            with self.lock:
                self.tap.leave()  # a layer with hooks is not packed
                self._leave_notes()
                self._take(self._native() or self.state)

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of weights that one pass reads: all but embeddings, of which it reads a few rows.

        None for a mixture of experts, where it depends on the tokens. What reads a source is no part of a pass.
        """
        if self._has_experts:
            return None
        elsewhere = self._encoder.projections if self._encoder is not None else []
        modules = [
            module
            for module in self._model.modules()
            if not isinstance(module, nn.Embedding) and all(module is not other for other in elsewhere)
        ]
        packed = [
            tensor for module in modules if isinstance(module, PackedLinear) for tensor in module.tensors().values()
        ]
        others = [weight for module in modules for weight in module.parameters(recurse=False)]
        return sum(map(_stored_bytes, (*packed, *others)))

    @property
    def _has_experts(self) -> bool:
        return has_experts(self.config)

    @property
    def ready(self) -> frozenset[int]:
        """Row counts whose passes run on graphs now. A request keeps to those of its beginning (see `score`)."""
        if self._captured is not None and not self._captured.failed:  # captured at first use
            return frozenset(self.sizes)
        return self.graphs.ready if self.graphs is not None else frozenset()

    def compiled(self, rows: int | None = None) -> bool:
        """Whether passes over so many rows run on graphs; None: those that any request needs."""
        sizes = self.first_sizes if rows is None else (self._size(rows),)
        return self.ready.issuperset(sizes)

    def _take(self, state: State) -> None:
        """Run on this attention from now on, and have its graphs compiled where that is possible."""
        attention.register()
        self.state = state
        self._model.set_attn_implementation(state.attention)
        if self._encoder is None:
            self.tap.listen(self.head)
        if self._noted is not None:
            self._noted.listen(self)
        if self._note is not None:
            for module in self._model.modules():
                if hasattr(module, "layer_idx"):
                    setattr(module, attention.NOTE, self._note)
        if isinstance(state, PackedWeights):
            state.set_distances(self._distances)
            if self.cache.room:
                state.attach(self.cache)
            if self.sources is not None and self.sources.room:
                state.attach_sources(self.sources)
        eager = self.offloaded or self.unsettled or not self.passes_here
        if self._compile and self.device.type == "cpu" and not eager:
            self.graphs = Graphs(self._model, self.tap, state, self.device, self.sizes, self.first_sizes)
            if self._compile is True or self.exact:  # exact: no pass may take another path than the next one
                self.graphs.make(self.sizes)

    def track_queries(self) -> QueryTrackingCache:
        """Keep the queries of each slot's last row from now on, if ``watched`` has not asked for that already.

        Running requests go on; their queries are known once their slots hold the next text. Graphs are made anew.

        Raises:
            UnsupportedError: the cache does not hold all keys and values, or the model keeps its own.
        """
        with self.lock:
            if isinstance(self.eviction, QueryTrackingCache):
                return self.eviction
            if isinstance(self.eviction, EvictingCache) or not self.passes_here or self.sources is not None:
                raise UnsupportedError(
                    f"the cache of {type(self.module).__name__} does not hold all keys and values that the model "
                    "attends to, or the model keeps them itself; use cache='full'"
                )
            self.eviction = QueryTrackingCache(self.cache)
            self._note, self._captured = note_queries, None
            self._take(self.state if self.device.type == "cpu" else self._dense())
            return self.eviction

    def _leave_notes(self) -> None:
        if self._noted is not None:
            self._noted.leave()

    def _dense(self) -> TorchBackend:
        return TorchBackend(self.cache, by_row=self.exact, sources=self.sources, distances=self._distances)

    @property
    def _distances(self) -> Tensor | None:
        found: Tensor | None = getattr(self._model, "distances", None)
        return found

    def _source_cache(self, max_slots: int) -> SourceCache | None:
        """For what cross-attention reads; None where there is no encoder."""
        if self._encoder is None:
            return None
        return SourceCache(
            self._encoder.shapes,
            dtype=self.dtype,
            max_slots=max_slots,
            extra=1,
            on_move=self._sources_moved,
            available=self._memory_left,
        )

    def _sources_moved(self, _: SlotCache) -> None:
        if isinstance(self.state, PackedWeights) and self.sources is not None:
            self.state.attach_sources(self.sources)

    def _moved(self, cache: SlotCache) -> None:
        """The cache's tensors are new ones."""
        if isinstance(self.state, PackedWeights):
            self.state.attach(cache)
        if self._captured is not None:
            self._captured.clear()

    # ------------------------------------------------------------ preparation

    def _layer_shapes(self, layers: int) -> list[LayerShape]:
        ids = torch.tensor([[1, 2]], device=self.device) % self.vocab_size
        positions = torch.tensor([[0, 1]], device=self.device)
        with torch.no_grad():
            try:
                with Watch(self._model) as watch:
                    shapes = attention.layer_shapes(
                        self._model,
                        lambda: self._model(
                            input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False
                        ),
                        layers,
                    )
                self._siblings = watch.siblings()
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
                raise UnsupportedError(
                    f"{type(self._model).__name__} does not run on a cache of ours ({type(error).__name__}: {error}); "
                    "use transformers for this model"
                ) from error
            self.passes_here = shapes is not None
            if shapes is not None:
                return shapes
            return self._own_shapes(ids, layers)

    def _own_shapes(self, ids: Tensor, layers: int) -> list[LayerShape]:
        """Layer shapes of a model that keeps its own attention, and the proof that a cache of ours serves it."""
        name = type(self._model).__name__
        if (
            getattr(self.config, "alibi", False)
            or "position_ids" not in inspect.signature(self._model.forward).parameters
        ):
            raise UnsupportedError(
                f"{name} derives positions from the column of the cache (ALiBi); such models are not supported"
            )
        if "local" in (getattr(self.config, "attention_layers", None) or ()) or getattr(
            self.config, "sliding_window", None
        ):
            raise UnsupportedError(
                f"{name} cuts its sliding window by the column of the cache; such models are not supported"
            )
        self._model.set_attn_implementation("eager")
        done = self._model(input_ids=ids, use_cache=True)
        stored = getattr(getattr(done, "past_key_values", None), "layers", [])
        if len(stored) != layers or any(getattr(layer, "keys", None) is None for layer in stored):
            raise UnsupportedError(
                f"{name} keeps something else than keys and values of {layers} layers; such models are not supported"
            )
        shapes = [
            LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], layer.keys.device)
            for layer in stored
        ]
        trial = SlotCache(shapes, dtype=self.dtype, max_slots=1)
        trial.reserve(0, 2)
        state, rows = HFCacheBackend(trial), []
        for i in range(2):  # one token after the other through our cache must give what one pass gave
            state.begin(BatchPlan([SequenceRows(0, i, [int(ids[0, i])])]), 1)
            rows.append(self._call_own(state, ids[:, i : i + 1], torch.tensor([[i]], device=self.device))[0])
        difference = (torch.stack(rows) - done.logits[0].float()).abs().max()
        scale = done.logits.float().abs().max()
        if not bool(difference <= (1e-3 if self.dtype == torch.float32 else 0.1) * scale):
            raise UnsupportedError(
                f"{name} gives other logits through our cache (difference {float(difference):.2g}); it is not supported"
            )
        return shapes

    def _memory_left(self) -> int:
        return int(available_bytes(str(self.device)) * 0.9)

    def _check_files(self, shapes: Sequence[LayerShape]) -> None:
        """Refuse a cache in files where attention cannot read them, or where they would not hold all of it."""
        devices = {shape.device.type for shape in shapes}
        if devices != {"cpu"}:
            raise UnsupportedError(
                f"cache='offload' on {', '.join(sorted(devices))}: mapped files are main memory; use cache='quant-4' "
                "or a policy, or device='cpu'"
            )
        if self._encoder is not None:
            raise UnsupportedError(
                f"{type(self._model).__name__} has an encoder: the keys and values of its sources stay in memory; use "
                "cache='full'"
            )

    def _packable(self) -> bool:
        """Whether the compiled kernels could serve this model."""
        # What we loaded ourselves may be on disk until it is packed.
        places = {"cpu", "meta"} if self._owned else {"cpu"}
        here = self._one_place and {p.device.type for p in self._model.parameters()} <= places
        return self.passes_here and here and self.dtype in (torch.float32, torch.bfloat16)

    def _native(self) -> PackedWeights | None:
        """The compiled kernels' side of this model, its linear layers packed; None where they do not serve it."""
        if self._prepared is not None:
            return self._prepared.native
        native = PackedWeights.create() if self._packable() else None
        if native is None:
            return None
        if not self._owned:  # the user's own weights stay beside the packed ones
            need = sum(m.weight.nbytes for m in self._model.modules() if type(m) in PACKED)
            if need > available_bytes(str(self.device)):
                logger.warning(
                    "%s of memory for a packed copy of the loaded model are not available: it runs on plain torch, "
                    "slower; pass its folder instead of the model, so that no copy is needed",
                    readable(need),
                )
                return None
        bits = self._bear_rounding(self._quantize) if self._quantize else None
        names = {id(module): name for name, module in self._model.named_modules()}
        self.siblings = [[names[id(layer)] for layer in group] for group in self._siblings]
        pack_linears(self._model, native, self._siblings, free=self._owned, bits=bits)
        self._siblings = []
        return native

    def _bear_rounding(self, kind: str) -> dict[int, int]:
        """Bits of the linear layers' weights, by their id; the model's logits on the text are kept."""
        self._model.set_attn_implementation("eager")
        errors, self._before = layer_errors(self._model, torch.tensor([self.text]), {kind, "int8"})
        return choose_bits(kind, errors, self._model.get_output_embeddings())

    def _judge_rounding(self) -> None:
        if not isinstance(self.state, PackedWeights):
            raise UnsupportedError(
                f"quantize={self._quantize!r}: the compiled CPU kernels do not serve {type(self._model).__name__}, "
                "which keeps its own attention, or whose weights are not all on the CPU; leave quantize at None"
            )
        with self.cache.lent(len(self.text)) as slot:
            after = self.score([SequenceRows(slot, 0, self.text, prompt=True)])
        agreement, divergence = compare(self._before, after)
        layers = {name: layer for name, layer in self._model.named_modules() if isinstance(layer, PackedLinear)}
        kept = tuple(name for name, layer in layers.items() if layer.bits == 16)
        self.quantization = QuantizationReport(
            str(self._quantize), len(layers) - len(kept), kept, agreement, divergence, len(self.text)
        )
        del self._before

    def _make_exact(self) -> None:
        """Keep only row counts at which rows are independent, found by a self-test on the path that will run."""
        if not self.passes_here:
            raise UnsupportedError(
                f"exact=True: {type(self._model).__name__} keeps its own attention, whose sums depend on the other "
                "requests of a pass; use exact=False"
            )
        if self._has_experts:
            raise UnsupportedError(
                f"exact=True: {type(self._model).__name__} gathers rows by expert, so that sums depend on the other "
                "rows of a pass; use exact=False"
            )
        self.sizes = self.invariant_sizes()
        if not self.sizes:
            raise UnsupportedError(
                f"exact=True: with no row count of {SIZES} are rows independent of the others on this machine in "
                f"{self.dtype}; use exact=False, or dtype='float32'"
            )

    def invariant_sizes(self) -> tuple[int, ...]:
        """Row counts whose rows, in any place and number of a pass, are bit for bit those of any other.

        The same 64 tokens are scored in one pass and in passes of each size. Many rows are compared, not one: a kernel
        that computes a few elements of some rows another way (the end of a vector loop) often rounds them alike. And
        what every module makes of them, not the logits alone: where values are rounded on the way (to bfloat16, or to
        8 bits before a product), most last bits that differ are gone there, and the few that are not come later.
        """
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocab_size, (TRIAL,), generator=generator).tolist()
        # A small model's rows are narrow, and show less each; its passes cost next to nothing.
        least, each = (24, 64) if (self.weight_bytes or LARGE) < LARGE else (8, 4)
        # Hooks are for eager passes; graphs that heard of some might be compiled anew.
        heard: AbstractContextManager[dict[str, Tensor]]
        heard = listening(self._model) if self.graphs is None else nullcontext({})
        with self.cache.lent(TRIAL) as slot, heard as made:
            self._pretend_source(slot)
            self.score([SequenceRows(slot, 0, ids[:16], prompt=True)])

            def rows(start: int, end: int, size: int) -> dict[str, Tensor]:
                """What a pass of this size makes of some tokens behind the first 16."""
                made.clear()
                segment = SequenceRows(slot, 16 + start, ids[16 + start : 16 + end])
                found = {"logits": self._run(BatchPlan([segment]), size)[0, : end - start].clone()}
                found |= {name: out[: end - start] for name, out in made.items() if len(out) == size}
                return found | self._written(slot, 16 + start, 16 + end)

            reference, good = rows(0, 64, 64), []
            for size in SIZES:
                count = min(64, max(least, each * size)) if size > 1 else least
                starts = [0, *range((size + 1) // 2, count, size)]  # the first pass has fewer rows
                if all(
                    torch.equal(out, reference[name][start:end])
                    for start, end in itertools.pairwise([*starts, count])
                    for name, out in rows(start, end, size).items()
                ):
                    good.append(size)
            return tuple(good) if len(good) > 1 else ()

    def _written(self, slot: int, start: int, end: int) -> dict[str, Tensor]:
        """Keys and values of these tokens, by layer and heads, (tokens, width)."""
        found: dict[str, Tensor] = {}
        for layer in range(self._layers):
            for part in self.cache.parts(layer, slot):
                own = slice(start - part.dropped, end - part.dropped)
                for kind, pairs in (("keys", part.keys), ("values", part.values)):
                    found[f"{kind} {layer} {part.heads}"] = pairs[:, own].transpose(0, 1).flatten(1).clone()
        return found

    def _pretend_source(self, slot: int) -> None:
        """Give a slot something for cross-attention to look at."""
        if self.sources is not None and self._encoder is not None:
            self.sources.reserve(slot, 40)
            self.sources.fill(slot, Source({}, 40), self._encoder.noise(40))

    # ------------------------------------------------------------ passes

    def takes(self, source: Source | None) -> bool:
        """Whether the encoder has so many places; without a source there is nothing to be read."""
        limit = self._encoder.limit if self._encoder is not None else None
        return source is None or limit is None or source.length <= limit

    def make_room(self, slot: int, columns: int, source: Source | None = None) -> None:
        """Room for so many tokens in a slot; the request's source is read, if that was not done.

        Args:
            slot: the request's.
            columns: its tokens.
            source: what its rows attend to beside their own text; None: nothing.

        Raises:
            MemoryLimitError: there is no memory for it.
        """
        self.cache.reserve(slot, columns)
        if source is None or self.sources is None or self._encoder is None or self.sources.holds(slot, source):
            return
        with torch.no_grad(), self.lock:
            began = time.perf_counter()
            self.sources.reserve(slot, source.length)
            hidden = self._encoder.read(source)
            self.state.begin(BatchPlan([]), hidden.shape[1])
            self.sources.fill(slot, source, self._encoder.pairs(hidden))
            self.forward_seconds += time.perf_counter() - began

    def first_logits(self, source: Source, tokens: Sequence[int]) -> Tensor:
        """Logits (V,) of what follows these tokens where nothing was written yet."""
        with self.lock, self.cache.lent(len(tokens)) as slot:
            self.make_room(slot, len(tokens), source)
            return self.score([SequenceRows(slot, 0, tokens, prompt=True)], last=True)[0]

    def read_alone(self, slot: int, token: int, position: int) -> None:
        """Read one token in an empty slot as if it stood at this position."""
        plan = BatchPlan([SequenceRows(slot, 0, [token])])
        plan.positions = [position]
        self._run(plan, self._size(1))

    def score(
        self, segments: Sequence[SequenceRows], *, last: bool = False, graphs: Collection[int] | None = None
    ) -> Tensor:
        """One pass over the rows of these segments.

        The rows' keys and values are written behind each slot's pairs (`SlotCache.keep` decides which stay); slots
        must have room.

        Args:
            segments: of different slots.
            last: only the last row of each segment is wanted.
            graphs: row counts that may run on graphs, an earlier value of `ready`; None: all that are ready by now.

        Returns:
            (rows, V) logits, one row for each row of the segments in order, or (segments, V) with `last`.
        """
        if self.exact and len(segments) > 1 and sum(len(segment.tokens) for segment in segments) > self.sizes[-1]:
            # Beyond the largest graph a pass would run eagerly, and round otherwise.
            half = len(segments) // 2
            parts = (segments[:half], segments[half:])
            scored = [(self.score(part, last=last, graphs=graphs), self.hidden) for part in parts]
            self.hidden = torch.cat([read for _, read in scored]) if self.hidden is not None else None  # type: ignore[misc]
            return torch.cat([logits for logits, _ in scored])
        plan = BatchPlan(segments)
        rows = plan.rows
        if last and any(segment.prompt for segment in segments):
            ends = torch.tensor([first + count - 1 for _, first, count, _, _ in plan.table], device=self.device)
            if self._prompt_on_graph(rows, graphs):
                logits = self._run(plan, self._size(rows), graphs=graphs)[0, ends]
                self.hidden = self.hidden[ends] if self.hidden is not None else None
                return logits
            return self._run(plan, rows, keep=ends)[0]
        size = rows if self.offloaded and not self.exact else self._size(rows)
        logits = self._run(plan, size, graphs=graphs)[0]
        if rows == logits.shape[0]:
            return logits
        self.hidden = self.hidden[:rows] if self.hidden is not None else None
        return logits[:rows]

    def _prompt_on_graph(self, rows: int, graphs: Collection[int] | None) -> bool:
        """Whether a chunk of a prompt may take the graph of a decoding pass, which computes the logits of all its rows.

        Only one that is there already is taken: a prompt has any length, and each would have its own compiled.
        """
        if self.graphs is None or rows > self.sizes[-1] or not self._small_head:
            return False
        return self._size(rows) in (self.ready if graphs is None else graphs)

    def pass_seconds(self, rows: int, graphs: Collection[int] | None = None) -> float:
        """What a decoding pass over so many rows costs now: a running mean, or a trial pass if none was made yet.

        Args:
            rows: at least 1.
            graphs: as in `score`.
        """
        size, graphs = self._size(rows), self.ready if graphs is None else graphs
        key = (size, size in graphs)
        if key not in self._seconds and self.offloaded and size > self.sizes[0]:
            # What reads all weights is not tried out: rows come next to free, until a round has shown otherwise.
            return self.pass_seconds(self.sizes[bisect_left(self.sizes, min(size, self.sizes[-1] + 1)) - 1], graphs)
        if key not in self._seconds:
            empty = BatchPlan([])
            if self._captured is not None:
                self.cache.reserve(0, 1)  # else there is nothing to capture
            for _ in range(4):  # the first one warms up; without requests nothing is written
                self._run(empty, size, graphs=graphs)
                if self._seconds.get(key, 0.0) > SLOW:
                    break
        # A reading taken while other work went on is not believed for long: half the rows twice would do as well, and
        # a larger pass does what a smaller one does.
        others = [
            self._seconds.get((self._size(count), self._size(count) in graphs)) for count in (size // 2, 2 * size)
        ]
        half, double = others if size > 1 else (None, others[1])
        bounds = [self._seconds[key], *([2 * half] if half else []), *([double] if double else [])]
        return min(bounds)

    def known_seconds(self, rows: int, graphs: Collection[int] | None = None) -> float | None:
        """`pass_seconds` if a pass of this size was made before; makes none."""
        size = self._size(rows)
        return self._seconds.get((size, size in (self.ready if graphs is None else graphs)))

    def padded(self, rows: int) -> int:
        """Rows that a decoding pass over so many really has: passes come in few sizes."""
        return self._size(rows)

    def _size(self, rows: int) -> int:
        most = self.sizes[-1]
        return self.sizes[bisect_left(self.sizes, rows)] if rows <= most else -(-rows // most) * most

    def _run(
        self, plan: BatchPlan, size: int, *, keep: Tensor | None = None, graphs: Collection[int] | None = None
    ) -> Tensor:
        if torch.is_grad_enabled():  # the engine has switched it off for the whole round
            with torch.no_grad():
                return self._run(plan, size, keep=keep, graphs=graphs)
        with self.lock:
            ids, positions = self._inputs(plan, size)
            self.state.begin(plan, size)
            prompts = self._prompts if plan.prompts else None
            take_over(prompts, plan, size)
            observe.listen(self.eviction.notes, plan)
            # Asked for by every decoding pass, also of requests that began without: the next ones will want it.
            on_graph = keep is None and prompts is None
            graph = self.graphs.get(size) if self.graphs is not None and on_graph else None
            allowed = keep is None and (graphs is None or size in graphs)
            captured = self._captured if allowed and self._capturable(plan, size) else None
            began = time.perf_counter()
            if graph is not None and allowed:
                logits, hidden = graph(ids, positions)
            elif captured is not None:
                logits, hidden = captured.run(ids, positions)
            elif isinstance(self.state, HFCacheBackend):
                logits, hidden = self._call_own(self.state, ids, positions)[None], self.tap.read
                logits = logits if keep is None else logits[:, keep]
            else:
                logits, hidden = self._plain(ids, positions, keep)
            if hidden is not None:
                hidden = hidden[0] if keep is None or len(keep) == hidden.shape[1] else hidden[0, keep]
            # A captured pass writes to the same place the next time.
            self.hidden = hidden.clone() if hidden is not None and captured is not None else hidden
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            spent = time.perf_counter() - began
            if keep is None:
                key = (self._size(size), allowed and (graph is not None or captured is not None))
                if (key in self._warm or self.offloaded) and not (captured is not None and captured.fresh):
                    self._seconds[key] = running_mean(self._seconds.get(key), spent)
                self._warm.add(key)  # the first pass of a graph takes as long as hundreds
            self.forward_seconds += spent
            for watcher in self.watchers:
                watcher(plan, spent)
            if not self._proven and plan.rows:
                self._prove(prompts or self.state)
            return logits

    def _capturable(self, plan: BatchPlan, size: int) -> bool:
        """Whether a pass has one of few shapes, which come again."""
        return not plan.prompts and size <= self.sizes[-1] and bool(self.cache.room)

    def _inputs(self, plan: BatchPlan, size: int) -> tuple[Tensor, Tensor]:
        """Token ids and positions of a pass, (1, size) each; rows that only fill it up are zeros."""
        buffer = self._buffers.get(size)
        if buffer is None:
            both = torch.zeros(2, size, dtype=torch.int64)
            buffer = both.numpy(), both[:1], both[1:]
            if size <= SIZES[-1]:  # a chunk of a prompt may have any length
                self._buffers[size] = buffer
        rows, (numbers, ids, positions) = plan.rows, buffer
        numbers[0, :rows] = plan.tokens
        numbers[1, :rows] = plan.positions
        if self._reassigned:
            for slot, first, count, _, _ in plan.table:
                numbers[1, first : first + count] -= self.cache.least(slot)
        numbers[:, rows:] = 0
        return (ids, positions) if self._on_cpu else (ids.to(self.device), positions.to(self.device))

    def _plain(self, ids: Tensor, positions: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The model's own forward, eager: logits (1, rows, V), or of the rows in `keep`, and what the head has read."""
        wanted = {} if keep is None or not self._keeps else {"logits_to_keep": keep}
        self.tap.read = None  # what an earlier pass has left is nobody's hidden state
        logits: Tensor = self._model(
            input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False, **wanted
        ).logits
        return logits if keep is None or self._keeps else logits[:, keep], self.tap.read

    def _call_own(self, state: HFCacheBackend, ids: Tensor, positions: Tensor) -> Tensor:
        mask = state.mask(self.dtype, ids.shape[1])
        self.tap.read = None
        logits: Tensor = self._model(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=state, use_cache=True
        ).logits
        return logits[0]

    def _prove(self, state: State) -> None:
        """After the first pass: every layer must have come to our cache, or the logits are not to be trusted."""
        calls, layers = state.calls(), self._layers
        if calls != layers:
            raise UnsupportedError(
                f"{type(self._model).__name__}: {calls} of {layers} attention layers reached the cache; "
                "it is not supported"
            )
        self._proven = True

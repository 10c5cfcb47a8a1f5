"""A Hugging Face model's weights as sessions run them: a structural copy, its linear layers packed, its kernels.

The user's object keeps its attention setting and its modules, and shares its parameters. Several sessions (`runner.py`)
may use the same weights: the whole model, its first layers, the model on an excerpt of its cache.
"""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sakiyomi.cache.layer_state import Served, serve_modules
from sakiyomi.cache.layout import LayerShape
from sakiyomi.cache.recurrent import Site
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.memory import available_bytes, readable
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.kernels.blocks import FORMATS
from sakiyomi.kernels.device import gpu_kernels
from sakiyomi.kernels.elementwise import serve_gates, serve_rotary
from sakiyomi.kernels.experts import expert_bytes, pack_experts
from sakiyomi.kernels.joined import join_linears
from sakiyomi.kernels.native import PackedLayer, PackedLinear, PackedWeights
from sakiyomi.kernels.norms import serve_norms
from sakiyomi.kernels.pack import is_linear, join_siblings, pack_linears
from sakiyomi.kernels.quantization import QuantizationReport, check_quantization
from sakiyomi.model_executor.attention import BackendNeeds, op
from sakiyomi.model_executor.attention.latent import serve_latents
from sakiyomi.model_executor.attention.own import serve_own
from sakiyomi.model_executor.encoder_decoder.decoder import Encoder, split
from sakiyomi.model_executor.encoder_decoder.judged import judge_whole
from sakiyomi.model_executor.features import HiddenStateCapture
from sakiyomi.model_executor.loading.families import has_experts
from sakiyomi.model_executor.loading.packed_stream import PackedStream
from sakiyomi.model_executor.loading.prepared import Prepared
from sakiyomi.model_executor.loading.stream import WeightStream, attach, is_offloaded
from sakiyomi.model_executor.model_state import ModelState
from sakiyomi.model_executor.multimodal import set_aside
from sakiyomi.model_executor.own_forward import expect_own, run_by_text
from sakiyomi.model_executor.positions import context_note, position_count, rope_limit, take_positions
from sakiyomi.model_executor.probe import PROOF, Expectation, Probed, expect, probe
from sakiyomi.model_executor.quantizing import Quantizing
from sakiyomi.model_executor.recorded_model import RecordedEncoderDecoder, RecordedModel
from sakiyomi.model_executor.recurrences import serve_functions, stateful_modules
from sakiyomi.model_executor.structural_copy import (
    distinct_layers,
    layer_list,
    settings_of,
    some_layers,
    structural_copy,
)

logger = logging.getLogger("sakiyomi")
LARGE = 1 << 27  # bytes of weights; the proof at load runs only some layers of a larger model
SMALL_HEAD = 0.1  # a head with a smaller share of the weights is small


class _Given(NamedTuple):
    """Options for packing the weights, see ``ModelWeights``."""

    owned: bool
    prepared: Prepared | None
    text: list[int]
    latents: bool
    theirs: weakref.ref[Any]  # the user's model
    state: ModelState | None  # a record of it; None: the user has no reference to it


def is_shared(model: Any) -> bool:
    """Whether the model's layers are distributed over several processes."""
    return isinstance(model, nn.Module) and any(type(weight).__name__ == "DTensor" for weight in model.parameters())


class ModelWeights:
    """The modules and weights of one model.

    Args:
        model: a loaded causal LM, or an encoder-decoder one of a known family; not changed.
        owned: the caller has no other use for the model: its weights are freed when packed, and it cannot run any more.
        prepared: metadata of a model whose layers are packed already; nothing is quantized then.
        quantize: "int8" or "int4" quantizes weights to so many bits, and rows to 8, in layers whose error stays small.
        text: token ids on which quantization is measured.
        stream: reads the packed layers in every pass; None: they stay in memory.
        way: one of ``own_forward.WAYS``: how texts go through the class's own forward; None: the rows of a pass run
            together on our cache.

    Attributes:
        module: the transformers model as it runs here.
        encoder: of an encoder-decoder model, whose decoder is the module.
        multimodal: the class reads more than text; its encoders stay as they are.
        max_context: number of positions of the model.
        small_head: the logits of all rows of a prompt are cheap.
        offloaded: hooks load and free the weights of each layer; passes are eager, and cost about the same for any
            number of rows.
        stream: reads the weights that lie in files; None: there are none.
        shapes: of the cache, by layer.
        stateful: layers that keep a state beside keys and values, see ``cache/layer_state.py``.
        expected: results of the model's own forward, for the proof at load; None: there is no proof.
        own_attention: texts go through the class's own forward, see ``way``.
        packed: linear layers in the compiled kernels; None: there are none.
        unsettled: kernels are being built; ``ModelRunner.settle`` swaps them in.
        generation: grows when modules are replaced.
        quantizing: the quantization that the caller asks for; None: there is none.
        quantization: the effect of quantization; None if nothing was quantized.
        siblings: names of linear layers that are computed together.
        capture: hidden states of passes.
        lock: held during a pass.

    Raises:
        UnsupportedError: the model's attention is not supported, or quantized weights are not.
    """

    def __init__(
        self,
        model: Any,
        *,
        owned: bool = False,
        prepared: Prepared | None = None,
        quantize: str | None = None,
        text: Sequence[int] = (),
        stream: PackedStream | None = None,
        way: str | None = None,
        latents: bool = True,
        max_context: int | None = None,
    ) -> None:
        if quantize and not owned:  # else it was checked before weights were read
            check_quantization(f"quantize={quantize!r}", model.dtype)
        recorded = isinstance(model, RecordedModel | RecordedEncoderDecoder)
        if not recorded:
            _scale_for_inference(model)
        self.module: Any = model if recorded else structural_copy(model, owned=owned).eval()
        self.encoder: Encoder | None = None
        self.multimodal, before = False, 0
        if getattr(model.config, "is_encoder_decoder", False):
            judged = judge_whole(self.module, text, quantize) if quantize and prepared is None else None
            self.module, self.encoder = split(self.module, _device(model))
            self.encoder.judged = judged
        elif not recorded and way is None:
            self.multimodal = set_aside(self.module, model)
            before = take_positions(self.module)
        self.config = self.module.config.get_text_config()
        head = model.get_output_embeddings()
        self.vocab_size = int(getattr(head, "out_features", None) or head.weight.shape[0])
        self.dtype = _dtype(model)
        self.device = _device(model)
        positions = position_count(self.config, max_context)
        self.max_context = (positions if way is not None else min(positions, rope_limit(self.config))) - before
        if self.max_context + before < positions:
            logger.warning("the context is limited to %d tokens%s", self.max_context, self.context_note)
        self.small_head = _count(head) < SMALL_HEAD * sum(map(_count, model.modules()))
        hooked = not owned and is_offloaded(self.module)  # hooks of an owned model load each layer once, for packing
        self.offloaded = hooked or stream is not None
        self.stream = _attached(self) if hooked else stream
        _stream_layers(self)
        for module in self.module.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False
        state = None if owned or recorded else ModelState(model)
        self._given = _Given(owned, prepared, list(text), latents, weakref.ref(model), state)
        self.quantizing = Quantizing(quantize) if quantize else None
        self.quantization: QuantizationReport | None = prepared.report if prepared is not None else None
        self.siblings: list[list[str]] = prepared.siblings if prepared is not None else []
        self.packed: PackedWeights | None = None
        self.generation, self.unsettled = 0, False
        self.lock, self.capture = threading.RLock(), HiddenStateCapture()
        self._probed: Probed | None = None  # until it is packed
        self.expected: Expectation | None = None
        self.shapes: list[LayerShape] = []
        self.stateful: dict[int, Served] = {}
        self.own_attention = way is not None
        if way is None:
            self._learn()
        else:
            if self.max_context >= PROOF + 2:
                self.expected = expect_own(self.module, self.vocab_size)
            self.module = run_by_text(self.module, way, self.capture)
            self.stateful.update(serve_modules(self.module))

    def _learn(self) -> None:
        """Find what the layers store, and have recurrent ones keep their states in our cache."""
        prepared, recorded = self._given.prepared, isinstance(self.module, RecordedModel)
        callers = stateful_modules(self.module)
        if self.quantizing is None and (prepared is None or prepared.report is None):  # else its logits differ
            self.expect(bool(callers))
        shapes = prepared.shapes if prepared is not None else None
        if shapes is not None and not self._given.latents and any(shape.tied for shape in shapes):
            shapes = None  # they were made with latents
        if not recorded:
            serve_own(self.module)
            if self._given.latents and self.device.type == "cpu" and (shapes is None or any(s.tied for s in shapes)):
                serve_latents(self.module)
        modules = serve_modules(self.module)
        callers = [module for module in callers if all(module is not other for other in modules.values())]
        calls = serve_functions(callers)
        if shapes is not None and not (callers or modules):
            self.shapes = shapes
        else:
            if prepared is not None and prepared.native is not None:
                prepared.native.begin(BatchPlan([]), 0)
            layers = None if callers or modules else int(self.config.num_hidden_layers)
            self._probed = probe(self.module, self.vocab_size, layers, self.device)
            self.shapes = self._probed.shapes
        if not recorded:
            self.set_windows()
        self.stateful = {**modules, **calls}

    def set_windows(self) -> None:
        """Give the attention layers the windows of their shapes."""
        op.set_windows(self.module, [shape.reach for shape in self.shapes])

    @property
    def head(self) -> nn.Module:
        """The head over the vocabulary, as it runs here: (..., hidden) to (..., V)."""
        head: nn.Module = self.module.get_output_embeddings()
        return head

    @property
    def text(self) -> list[int]:
        """Token ids on which quantization is measured."""
        judged = self.encoder.judged if self.encoder is not None else None
        return self._given.text if judged is None else judged.text

    @property
    def context_note(self) -> str:
        """For messages: why a text may have fewer tokens than the model has positions; "": it may have as many."""
        return context_note(self.config, self.max_context)

    @property
    def packed_experts(self) -> bool:
        """Whether the kernels have all experts of a mixture, so that a row's sums do not depend on other rows."""
        return self.packed is not None and self.packed.experts

    def unfold(self) -> None:
        """Replace a recorded model by the transformers model, for its modules; sessions switch when they settle."""
        if isinstance(self.module, RecordedModel):
            self.module = self.module.whole(self.module)
            self.capture.wanted = layers_of(self, self.capture.wanted)
            self.set_windows()
            _serve_elementwise(self.module)
            self.generation += 1

    def expect(self, stateful: bool) -> None:
        """Run the model's own forward for the proof at load; its attention is left switched.

        Not for recorded models (proven before), encoder-decoders (no own forward) and offloaded weights (slow passes).
        """
        apart = isinstance(self.module, RecordedModel) or self.encoder is not None or self.offloaded
        if self.expected is not None or apart or self.max_context < PROOF + 2:
            return
        prepared = self._given.prepared
        if (table := self.packed if prepared is None else prepared.native) is not None:
            table.begin(BatchPlan([]), 0)
        found = None if stateful else _of_some(self.module, self.config, self.vocab_size, self.device)
        self.expected = found or expect(self.module, self.vocab_size, self.device, stateful=stateful)

    def capture_layers(self, layers: Sequence[int]) -> None:
        """Also capture the outputs of these decoder layers in every pass (see ``PassOutput``), once sessions settle.

        Args:
            layers: counted from 0.

        Raises:
            UnsupportedError: the model has an encoder, or no such layers, or its list of layers is not found.
        """
        if isinstance(self.module, RecordedModel) and not self.module.outputs:
            self.unfold()
        name, count = type(self.module).__name__, int(self.config.num_hidden_layers)
        if self.encoder is not None:
            raise UnsupportedError(f"{name} has an encoder: its hidden states are not captured")
        if not all(0 <= layer < count for layer in layers):
            raise UnsupportedError(
                f"hidden states of layers {', '.join(map(str, layers))} are wanted, counted from 0; {name} has {count}"
            )
        wanted = layers_of(self, {*self.capture.wanted, *layers})
        if wanted.keys() != self.capture.wanted.keys():
            if isinstance(self.module, RecordedModel):
                self.module.capture(list(wanted))
            self.capture.wanted = wanted
            self.generation += 1

    @property
    def keeps_logits(self) -> bool:
        """Whether the model's forward can return the logits of some rows only."""
        return "logits_to_keep" in inspect.signature(self.module.forward).parameters

    @property
    def one_device(self) -> bool:
        """Whether all layers lie on the model's device."""
        return all(shape.device == self.device for shape in self.shapes)

    @property
    def has_experts(self) -> bool:
        """Whether rows are gathered by expert."""
        return has_experts(self.config)

    @property
    def bytes(self) -> int | None:
        """Bytes of weights that one pass reads: all except embeddings, of which it reads a few rows.

        None for a mixture of experts, where it depends on the tokens. Projections of a source are not part of a pass.
        """
        if self.has_experts:
            return None
        apart = set(map(id, self.encoder.projections)) if self.encoder is not None else set()
        modules = [m for m in self.module.modules() if not isinstance(m, nn.Embedding) and id(m) not in apart]
        packed = [part for m in modules if isinstance(m, PackedLinear) for part in m.tensors().values()]
        return sum(map(_stored_bytes, (*packed, *(weight for m in modules for weight in m.parameters(recurse=False)))))

    def needs(self, *, exact: bool, evicts: bool) -> BackendNeeds:
        """The requirements of a session's attention backend."""
        return BackendNeeds(
            device=self.device,
            one_device=self.one_device,
            packed=self.packed,
            exact=exact,
            evicts=evicts or bool(self.stateful),
            offloaded=self.offloaded,
            encoder=self.encoder is not None,
            distances=getattr(self.module, "distances", None),
            plain=all(shape.plain for shape in self.shapes),
        )

    # ------------------------------------------------------------ packing

    @property
    def packable(self) -> bool:
        """Whether the compiled kernels could serve this model."""
        # What we loaded ourselves may be on disk until it is packed.
        places = {"cpu", "meta"} if self._given.owned else {"cpu"}
        here = self.one_device and {p.device.type for p in self.module.parameters()} <= places
        return not self.own_attention and here and self.dtype in (torch.float32, torch.bfloat16)

    def pack(self) -> None:
        """Switch to the device's kernels, if they support the model; quantize linear layers on the CPU if asked to."""
        prepared = self._given.prepared
        self.packed = prepared.native if prepared is not None else self._pack_own()
        if self.packed is not None and not self.siblings and self._probed is not None:
            self.siblings = _joined(self.module, self.packed, self._probed.siblings)
        if self.packed is not None and not isinstance(self.module, RecordedModel):
            _serve_elementwise(self.module)
        if on_gpu(self) and gpu_kernels(self.device) is not None:
            if (probed := self._probed) is not None:
                apart = (group for group in probed.siblings if not probed.read & set(map(id, group)))
                join_linears(self.module, list(apart))
            _serve_elementwise(self.module)
        for site in self.stateful.values():
            if isinstance(site, Site):
                site.compiled = self.packed is not None
        self.generation += 1

    def _pack_own(self) -> PackedWeights | None:
        """The linear layers in the kernels; None: the kernels do not support them, or there is no memory for copies."""
        given, table = self._given, PackedWeights.create() if self.packable else None
        if table is None or not (given.owned or _has_room(self.module, self.device)):
            return None
        rounds = self.quantizing
        bits = rounds.choose(self.module, self.encoder, self.text) if rounds is not None else None
        probed, self._probed = self._probed, None
        assert probed is not None
        names = {id(part): name for name, part in self.module.named_modules()}
        self.siblings = [[names[id(layer)] for layer in group] for group in probed.siblings]
        with table.packing_into(self.stream.memory if isinstance(self.stream, PackedStream) else None):
            pack_linears(self.module, table, probed.siblings, read=probed.read, free=given.owned, bits=bits)
            table.experts = pack_experts(self.module, table, free=given.owned, bits=bits)
            if self.encoder is not None and self.stream is None:
                self.encoder.pack(table, bits, free=given.owned)
        _stream_layers(self)
        return table

    def changed(self) -> str | None:
        """What changed in the user's model since it was packed, in words; None: nothing changed."""
        model, state = self._given.theirs(), self._given.state
        return None if model is None or state is None else state.changed(model)


def _joined(model: nn.Module, table: PackedWeights, groups: Sequence[Sequence[nn.Module]]) -> list[list[str]]:
    """Have layers that were packed before the model was probed computed together; their names."""
    names = {id(part): name for name, part in model.named_modules()}
    packed = [[layer for layer in group if isinstance(layer, PackedLinear)] for group in groups]
    for group in packed:
        join_siblings(table, group)
    return [[names[id(layer)] for layer in group] for group in packed if len(group) > 1]


def _attached(weights: ModelWeights) -> WeightStream | PackedStream | None:
    """What reads the weights of a model that accelerate's hooks load; None: none of them are in files."""
    encoder, module = weights.encoder, weights.module
    parts = module if encoder is None else nn.ModuleList([module, encoder.module])
    return attach(parts, int(module.config.num_hidden_layers))


def _stream_layers(weights: ModelWeights) -> None:
    """Have the layers that are packed by now read from files and dropped in every pass, if that is wanted."""
    if isinstance(weights.stream, PackedStream):
        weights.stream.attach(weights.module, int(weights.config.num_hidden_layers))


def layers_of(weights: ModelWeights, numbers: Collection[int]) -> dict[int, nn.Module]:
    """Decoder layers of a model by their numbers, or what stands for them in a recorded one.

    Raises:
        UnsupportedError: its list of layers is not found.
    """
    if not numbers:
        return {}
    module = weights.module
    if isinstance(module, RecordedModel):
        found = module.outputs
    else:
        found = module.get_submodule(
            layer_list(module, int(weights.config.num_hidden_layers), "hidden states of layers")
        )
    return {layer: found[layer] for layer in sorted(numbers)}


def rounding_of(weights: ModelWeights) -> str | None:
    """How weights are stored: "int8", "int4", or "Q4_1 and Q6_K blocks", the type of most bytes first; None: neither.

    Blocks of plain numbers (F32, F16, BF16) are named only beside others.
    """
    if weights.quantization is not None:
        return weights.quantization.kind
    sizes: Counter[str] = Counter()
    held: set[int] = set()  # an embedding may have the numbers of the head
    for layer in weights.module.modules():
        if isinstance(layer, PackedLayer) and layer.blocks is not None:
            data = layer.tensors()["data"]
            sizes[layer.blocks.name] += data.nbytes if data.data_ptr() not in held else 0
            held.add(data.data_ptr())
    if all(FORMATS[name].bits > 8 for name in sizes):
        return None
    return f"{' and '.join(name for name, _ in sizes.most_common())} blocks"


def quantizes(weights: ModelWeights) -> bool:
    """Whether weights were quantized here, or layers in block formats quantize their rows."""
    layers = (module for module in weights.module.modules() if isinstance(module, PackedLayer))
    return weights.quantization is not None or any(each.blocks is not None and each.blocks.rounded for each in layers)


def _scale_for_inference(model: nn.Module) -> None:
    """Rescale the weights of RWKV now: its class does so in the first forward, and copies share the weights."""
    for module in model.modules():
        rescale: Any = getattr(module, "_rescale_layers", None)
        if rescale is not None and not is_offloaded(model):
            training, module.training = module.training, False
            rescale()
            module.training = training


def _serve_elementwise(model: nn.Module) -> None:
    """Have norms, gates and rotary embeddings of a model call the kernels."""
    serve_norms(model)
    serve_gates(model)
    serve_rotary(model)


def on_gpu(weights: ModelWeights) -> bool:
    """Whether all of a model lies on one GPU, and its passes run our attention."""
    return weights.device.type == "cuda" and weights.one_device and not (weights.offloaded or weights.own_attention)


def on_cpu(weights: ModelWeights) -> bool:
    """Whether the compiled kernels run passes of a model; they also run recorded passes without packed weights."""
    return weights.device.type == "cpu" and not (weights.offloaded or weights.own_attention)


def _of_some(model: nn.Module, config: Any, vocab_size: int, device: torch.device) -> Expectation | None:
    """What one layer of every kind of a large model gives; None: a small model, or these layers need others."""
    count = int(config.num_hidden_layers)
    if (layers := _enough(model, count)) is None:
        return None
    with settings_of(model, layers, count):
        found = expect(some_layers(model, layers, count, head=False), vocab_size, device, stateful=False)
    return found and found._replace(layers=layers)


def _enough(model: nn.Module, count: int) -> list[int] | None:
    """One layer of every kind, for a quick proof of a large model; None: all layers."""
    size = sum(map(_stored_bytes, (*model.parameters(), *model.buffers())))
    if size < LARGE:
        return None
    try:
        layers = model.get_submodule(layer_list(model, count, "the proof"))
    except UnsupportedError:
        return None
    assert isinstance(layers, nn.ModuleList)
    found = distinct_layers(layers)
    return found if len(found) < count else None


def _dtype(model: Any) -> torch.dtype:
    """Of a model's rows; of one whose weights are all packed (OLMo has norms without any) that of its layers."""
    layers = (part.dtype for part in model.modules() if isinstance(part, PackedLayer))
    return next(layers) if _is_all_packed(model) else model.dtype


def _device(model: Any) -> torch.device:
    """The device that computes a model. Hooks load a model that is offloaded as a whole to it."""
    if _is_all_packed(model):
        return torch.device("cpu")
    device: torch.device = model.device
    if device.type != "meta":
        return device
    return torch.device(getattr(getattr(model, "_hf_hook", None), "execution_device", None) or "cpu")


def _is_all_packed(model: Any) -> bool:
    """Whether a model has no tensor that could say its dtype and device."""
    return not isinstance(model, RecordedModel) and next(model.parameters(), None) is None


def _count(module: nn.Module) -> int:
    """Number of a module's own weights, packed ones too."""
    if isinstance(module, PackedLayer):
        return module.in_features * module.out_features * (module.count or 1)
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))


def _has_room(model: Any, device: torch.device) -> bool:
    """Whether there is memory for packed weights beside the user's own, which stay."""
    need = sum(m.weight.nbytes for m in model.modules() if is_linear(m)) + expert_bytes(model)
    if need <= available_bytes(str(device)):
        return True
    logger.warning(
        "%s of memory for a packed copy of the loaded model are not available: it runs on plain torch, slower; pass "
        "its folder instead of the model, so that no copy is needed",
        readable(need),
    )
    return False


def _stored_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor in memory: ``nbytes`` of a torchao tensor is the size without quantization."""
    parts = getattr(type(tensor), "__tensor_flatten__", None)
    if parts is None:
        return tensor.nbytes
    held = [getattr(tensor, name) for name in parts(tensor)[0]]
    return sum(part.nbytes for part in held if isinstance(part, Tensor))

"""Makes recordings (see ``recording.py``), and proves them.

Packed weights that the recording alone makes from the checkpoint, or those of the packed copy, must equal those in use.
Passes of up to four row counts (``TRIED``) must give the exact logits of the model.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile, ZipInfo

import torch
from torch import Tensor, nn

from sakiyomi.core.checkpoint import read_checkpoint
from sakiyomi.core.digests import save_tensors
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.files import whole_file
from sakiyomi.core.messages import one_line
from sakiyomi.core.progress import progress
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.kernels.native import PackedLayer, packed_tensors
from sakiyomi.model_executor.encoder_decoder.decoder import split
from sakiyomi.model_executor.features import HiddenStateCapture
from sakiyomi.model_executor.loading.packed import is_packed, packed_files, same_layers, source_key
from sakiyomi.model_executor.loading.recorded_encoder import (
    check_encoder,
    given_name,
    parts_of,
    prove_encoder,
    traced_encoder,
    whole,
)
from sakiyomi.model_executor.loading.recorded_extractor import recorded_extractor
from sakiyomi.model_executor.loading.recorded_tokenizer import recorded_tokenizer
from sakiyomi.model_executor.loading.recording import (
    ENCODER,
    FILTERS,
    SCRIPT,
    TOKENIZER,
    TensorSource,
    assemble,
    place_of,
    recording_key,
    shipped_key,
    undeprecated,
)
from sakiyomi.model_executor.program_steps import leaves
from sakiyomi.model_executor.recorded_model import RecordedModel
from sakiyomi.model_executor.trace import trace

if TYPE_CHECKING:
    from sakiyomi.model_executor.runner import ModelRunner

logger = logging.getLogger("sakiyomi")
MOST = 2 << 30  # bytes of a recorded model: loading the class is a small part of the start of a larger one,
MOST_PACKED = 16 << 30  # unless its weights are packed already
LARGEST = 1 << 16  # most values of a tensor that is part of a recording
TRIED = (1, 4, 33, 129)  # rows of passes at which a recording is proven; beyond MOST without the largest


def save_recording(
    folder: Path,
    dtype: torch.dtype | None,
    quantize: str | None,
    copy: Path | None,
    tokenizer: Any,
    runner: ModelRunner,
    place: Path | None = None,
    *,
    extractor: Any = None,
) -> bool:
    """Write a recording of a model; whether it was written.

    Args:
        folder, dtype, quantize: as the caller of ``load_model`` gave them.
        copy: the packed copy of a quantized model, which may be the folder itself; None: it is not quantized.
        tokenizer: of the model.
        runner: runs the model in recorded passes; between requests.
        place: file of a recording that is distributed with the model; None: a file in the cache folder.
        extractor: of a speech model.
    """
    if copy is not None and not is_packed(copy):
        return False  # it could not be written, which the log says already
    key_of = recording_key if place is None else shipped_key
    place = place or place_of(folder, dtype, quantize)
    try:
        with runner.lock, torch.no_grad():
            checkpoint = read_checkpoint(folder)
            held, size = (checkpoint, checkpoint.stored_bytes) if copy is None else packed_files(copy)
            weights = runner.weights
            apart = weights.stateful or weights.packed_experts
            if size > (MOST if copy is None else MOST_PACKED) or apart or any(shape.tied for shape in weights.shapes):
                raise UnsupportedError("it is too large, or has packed experts, latents or other states")
            check_encoder(runner, quantize)
            about, parts, read = _record(runner, TensorSource(held), copy)
            known, backend = recorded_tokenizer(tokenizer, folder)
            about |= {"key": key_of(folder, checkpoint), "tokenizer": known}
            del about["config"]["_name_or_path"], known["name_or_path"]  # a recording may move with its folder
            about["copy"] = copy and [str(copy), source_key(folder, checkpoint) if copy != folder else None]
            with progress(f"recording passes of {folder.name} for the next start", size=size):
                _prove(runner, about, parts, read, TRIED if size <= MOST else TRIED[:-1])
        if extractor is not None:
            about["extractor"], parts[FILTERS] = recorded_extractor(extractor)
        parts |= {} if backend is None else {TOKENIZER: backend}
        tensors = {name: torch.frombuffer(bytearray(part), dtype=torch.uint8) for name, part in parts.items()}
        with whole_file(place, "the next start takes longer") as fresh:
            save_tensors(fresh, tensors, {"about": json.dumps(about, default=str)})
    except UnsupportedError as error:
        logger.debug("%s is not recorded: %s", folder, error.message)
        return False
    except Exception as error:  # of any kind: the model runs, only the next start takes longer
        logger.info("%s is not recorded: %s", folder, one_line(error))
        return False
    return True


def _record(
    runner: ModelRunner, source: TensorSource, copy: Path | None
) -> tuple[dict[str, Any], dict[str, bytes], dict[str, Tensor]]:
    """The metadata of a model, the graphs of its pass and of its encoder, and the weights that these read."""
    weights, modules, parameters = runner.weights, *parts_of(runner)
    names = {parameter.data_ptr(): name for name, parameter in parameters.items() if parameter.numel()}
    packed = {name: child for name, child in modules.items() if isinstance(child, PackedLayer)}
    layers = dict(sorted(packed.items(), key=lambda item: item[1].index))  # by which the graph calls them
    if [layer.index for layer in layers.values()] != list(range(len(layers))):
        raise UnsupportedError("its layers are not the first ones in the kernels' tables")
    script, read, outputs = _script(runner, names)
    parts, encoder = {SCRIPT: script}, None
    if weights.encoder is not None:
        graph, encoder = traced_encoder(runner)
        encoder["weights"] = _with_weights(graph, names)
        parts[ENCODER] = _saved(graph)
    found: dict[str, Tensor] = {name: parameters[name] for name in (*read, *(encoder["weights"] if encoder else ()))}
    for name, tensor in found.items():
        if name not in source or not torch.equal(source(name, tensor.dtype), tensor):
            raise UnsupportedError(f"{name} is not in the checkpoint as the model has it")
    embeddings = [name for name, child in modules.items() if isinstance(child, nn.Embedding)]
    rows = [f"{name}.weight" for name in embeddings]
    if copy is not None and not same_layers(copy, layers):
        raise UnsupportedError(f"{copy} holds other layers")
    module = whole(runner)
    config = module.config.to_dict()
    aliases = getattr(module.config, "attribute_map", {})
    embedding = module.get_input_embeddings()
    about = {
        "kind": type(module).__name__,
        "config": config | {alias: getattr(module.config, own) for alias, own in aliases.items()},
        "generation_config": module.generation_config.to_dict(),
        "dtype": str(runner.dtype).removeprefix("torch."),
        "weights": read,
        "embeddings": [name for name in embeddings if f"{name}.weight" in found],
        "layers": [
            {"name": name} if copy is not None else _place(name, layer, source, rows) for name, layer in layers.items()
        ],
        "embedding": next((name for name, child in modules.items() if child is embedding), ""),
        "outputs": outputs,
        "head": next(name for name, layer in layers.items() if layer is weights.head),
        "siblings": [[given_name(runner, name) for name in group] for group in weights.siblings],
        "cache": [shape.as_json() for shape in weights.shapes],
    }
    if encoder is not None:
        about |= {"encoder": encoder, "decoder": runner.config.to_dict()}
    return about, parts, found


@contextmanager
def _captured(runner: ModelRunner, module: Any, outputs: bool = True) -> Iterator[HiddenStateCapture]:
    """Captures what the head of a model or of its recording reads, and the outputs of its decoder layers, if any are
    found and wanted.
    """
    capture = HiddenStateCapture()
    if isinstance(module, RecordedModel):
        capture.wanted = dict(enumerate(module.outputs)) if outputs else {}
        module.capture(list(capture.wanted))
    elif outputs and runner.weights.encoder is not None:
        capture.wanted = {cross.layer_idx: cross.q for cross in runner.weights.encoder.crosses}
    elif outputs:
        from sakiyomi.model_executor.weights import layers_of  # which imports this folder

        with suppress(UnsupportedError):
            capture.wanted = layers_of(runner.weights, range(int(runner.config.num_hidden_layers)))
    capture.listen(runner.weights.head)  # a recording has it, too
    try:
        yield capture
    finally:
        capture.leave()


def _script(runner: ModelRunner, names: Mapping[int, str]) -> tuple[bytes, list[str], int]:
    """A traced pass whose weights are further inputs, the names of these weights in order, and how many layers' outputs
    it gives behind logits and what the head reads.
    """
    with _captured(runner, runner.module) as capture:

        def forward(ids: Tensor, positions: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
            capture.begin()
            given = {"input_ids": ids, "position_ids": positions, "attention_mask": None, "use_cache": False}
            with _keeping(runner, keep) as wanted:
                logits = runner.module(**given, **wanted).logits
            read, *outputs = capture.take()
            alike = all(each.shape == (*ids.shape, read.shape[-1]) and each.dtype == read.dtype for each in outputs)
            return (logits, read, *(outputs if alike and len(outputs) == len(capture.wanted) else ()))

        runner.begin(BatchPlan([]), 8)
        ids = torch.zeros(1, 8, dtype=torch.int64)
        graph = trace(forward, ids, ids.clone(), torch.tensor([0, 5])).graph.copy()
    read = _with_weights(graph, names)
    return _saved(graph), read, sum(len(leaves(value)) for value in graph.outputs()) - 2


@contextmanager
def _keeping(runner: ModelRunner, keep: Tensor) -> Iterator[dict[str, Tensor]]:
    """Have the head read these rows only; gives the arguments of the forward that say so."""
    if runner.weights.keeps_logits:
        yield {"logits_to_keep": keep}
        return
    hook = runner.weights.head.register_forward_pre_hook(lambda _, args: (args[0][:, keep],), prepend=True)
    try:
        yield {}
    finally:
        hook.remove()


def _with_weights(graph: Any, names: Mapping[int, str]) -> list[str]:
    """Make the weights that a graph reads further inputs; their names in order."""
    torch._C._jit_pass_dce(graph)
    read: list[str] = []
    for node in list(graph.nodes()):
        if node.kind() != "prim::Constant" or node.output().type().kind() != "TensorType":
            continue
        value = node.t("value")
        if value.data_ptr() in names:
            given = graph.addInput()
            given.setType(node.output().type())
            node.output().replaceAllUsesWith(given)
            node.destroy()
            read.append(names[value.data_ptr()])
        elif value.numel() > LARGEST:
            raise UnsupportedError(f"a tensor of {value.numel()} values belongs to no layer")
    if len(set(read)) < len(read):
        raise UnsupportedError("a weight is read in two places")
    return read


def _saved(graph: Any) -> bytes:
    """A graph as a TorchScript file, without the lines of code of its operators, which name folders of this machine."""
    graph.lint()
    whole, bare = io.BytesIO(), io.BytesIO()
    with undeprecated():
        torch.jit.save(torch._C._create_function_from_graph("forward", graph), whole)
    with ZipFile(whole) as given, ZipFile(bare, "w") as kept:
        for name in given.namelist():
            if not name.endswith(".debug_pkl"):
                kept.writestr(ZipInfo(name), given.read(name))
    return bare.getvalue()


def _place(name: str, layer: PackedLayer, source: TensorSource, embeddings: list[str]) -> dict[str, Any]:
    """The names of a packed layer's weight and bias in the checkpoint, which may be those of an embedding, or others.

    Raises:
        UnsupportedError: no tensor there gives the packed weights.
    """
    held = layer.tensors()
    for weight in dict.fromkeys((f"{name}.weight", *embeddings, *source.names(layer.out_features, layer.in_features))):
        for turned in (False, True):
            bias = next(filter(source.__contains__, (f"{name}.bias", f"{weight.removesuffix('.weight')}.bias")), None)
            place = {"name": name, "weight": weight, "turned": turned, "bias": bias if "bias" in held else None}
            if weight in source:
                given, added = source.linear(place, layer.weight.dtype)
                if given.shape != (layer.out_features, layer.in_features):
                    continue
                made = packed_tensors(given, added, 16)
                if made.keys() == held.keys() and all(torch.equal(made[part], held[part]) for part in made):
                    return place
    raise UnsupportedError(f"{name} is not in the checkpoint as the model has it")


def _prove(
    runner: ModelRunner,
    about: Mapping[str, Any],
    scripts: Mapping[str, bytes],
    weights: Mapping[str, Tensor],
    tried: Sequence[int],
) -> None:
    """Compare passes of so many rows of the recorded model, with the same packed layers, with those of the model.

    Raises:
        UnsupportedError: their logits differ, or the outputs of layers, or those of the encoder.
    """
    layers = {name: child for name, child in parts_of(runner)[0].items() if isinstance(child, PackedLayer)}
    recorded: Any = assemble(about, scripts, weights, layers, whole=lambda model: model)
    source = None
    if runner.weights.encoder is not None:
        recorded, encoder = split(recorded, runner.device)
        source = prove_encoder(runner, encoder)
    own = runner.module
    last = [(rows, torch.tensor([rows - 1])) for rows in tried if rows < TRIED[-1]]
    for rows, keep in [*((rows, None) for rows in tried), *last]:
        if rows > runner.max_context:
            continue
        tokens = [1 + (7 * i) % (runner.vocab_size - 1) for i in range(rows)]
        found: list[tuple[Tensor, ...]] = []
        for module in (own, recorded):
            with runner.cache.lent(rows) as slot, runner.eagerly(), _captured(runner, module, keep is None) as capture:
                runner.make_room(slot, rows, source)
                runner.module = module
                try:
                    plan = BatchPlan([SequenceRows(slot, 0, tokens)])
                    logits = runner.run(plan, rows, keep=keep).logits.clone()
                    found.append((logits, *(capture.take()[: 1 + about["outputs"]] if keep is None else ())))
                finally:
                    runner.module = own
        if not all(torch.equal(*pair) for pair in zip(*found, strict=True)):
            raise UnsupportedError(f"its recorded pass of {rows} rows gives other logits")

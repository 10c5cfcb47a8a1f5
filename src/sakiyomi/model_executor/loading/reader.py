"""Reads weights by transformers: whole, quantized by torchao on a GPU, or left on disk until each layer is packed."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sakiyomi.core.checkpoint import LAYER, Checkpoint
from sakiyomi.core.errors import LoadError, MemoryLimitError
from sakiyomi.core.gguf import GgufFile
from sakiyomi.core.memory import readable
from sakiyomi.core.messages import one_line
from sakiyomi.core.process import TORCH_STATE
from sakiyomi.core.progress import progress
from sakiyomi.kernels.pack import is_linear
from sakiyomi.model_executor.gguf.layers import check_shapes, named_weights
from sakiyomi.model_executor.loading.families import auto_class, causal_class
from sakiyomi.model_executor.multimodal import names_aside

logger = logging.getLogger("sakiyomi")


def layer_count(config: Any) -> int:
    """Layers of a model's longest stack, as its configuration has them; 0: it does not say."""
    text = config.get_text_config()
    names = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
    found = [getattr(part, name, None) for part in (config, text) for name in names]
    return max((count for count in found if isinstance(count, int)), default=0)


@dataclass(frozen=True)
class Reader:
    """Reads the weights of a folder, or of one GGUF file in it.

    Attributes:
        name: what the user called the model.
        folder, checkpoint: where its weights are.
        dtype: they are to have.
        device: where torchao is to quantize them.
        gguf: the file, where it is one.
        config: of the model; None: that of a causal language model.
    """

    name: str
    folder: Path
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    trust_remote_code: bool = False
    allow_pickle: bool = False
    gguf: GgufFile | None = None
    config: Any = None

    @property
    def place(self) -> Path:
        """The folder, or the file."""
        return self.folder if self.gguf is None else self.gguf.paths[0]

    def read(self, quantization: Any = None, tensors: Mapping[str, torch.Tensor] | None = None, **options: Any) -> Any:
        """The model, in main memory; on its device if torchao is to quantize it there.

        Args:
            quantization: of torchao.
            tensors: of the model, by name; None: they are read from its files.
            options: for ``from_pretrained``.

        Raises:
            LoadError: tensors are missing or cannot be read.
            MemoryLimitError: memory ran out all the same.
        """
        import transformers

        if quantization is not None:
            options |= {"quantization_config": quantization, "device_map": {"": self.device}}
        place: Path | None = self.folder
        if self.gguf is None:
            options["use_safetensors"] = None if self.allow_pickle else True
        else:
            tensors = self._unpacked() if tensors is None else tensors
            place, options = None, {"config": copy.deepcopy(self.config), **options, "state_dict": dict(tensors)}
        # Any: its signature knows nothing of output_loading_info.
        reader: Any = getattr(transformers, auto_class(self.config))
        reader = reader if self.gguf is None else causal_class(self.config)
        size, files = self.checkpoint.stored_bytes, self.place
        try:
            with (
                TORCH_STATE,
                quiet(),
                progress(f"loading {self.name} ({readable(size)})", size=size),
            ):
                model, report = reader.from_pretrained(
                    place,
                    dtype=self.dtype,
                    trust_remote_code=self.trust_remote_code,
                    local_files_only=True,
                    output_loading_info=True,
                    **options,
                )
        except MemoryError as error:
            raise MemoryLimitError(f"memory ran out while {self.name!r} was read; choose a smaller model") from error
        except Exception as error:  # every model class and quantizer raises its own kinds
            raise LoadError(f"the weights in {files} cannot be loaded ({one_line(error)})") from error
        if self.gguf is not None:
            model.generation_config = transformers.GenerationConfig.from_pretrained(self.folder)
        self._check_unused(model, sorted(report["unexpected_keys"]))
        missing = sorted(report["missing_keys"])
        if missing:
            # transformers only warns and leaves these at random.
            raise LoadError(
                f"the weights in {files} lack {len(missing)} tensors of {type(model).__name__} ({missing[0]}, "
                "...): they would be random; the files belong to another kind of model"
            )
        return model

    def _unpacked(self) -> dict[str, torch.Tensor]:
        """The tensors of a GGUF file by their names in the model, as numbers."""
        assert self.gguf is not None
        weights = named_weights(self.gguf, self.config, self.name)
        found = {weight.name: weight.numbers(self.config, self.dtype) for weight in weights}
        check_shapes(weights, found, without_weights(self.config, self.dtype))
        return found

    def _check_unused(self, model: Any, names: list[str]) -> None:
        """Refuse files with more layers than the configuration, and name other tensors that are not read.

        Raises:
            LoadError: the text would be that of a part of the model.
        """
        said = layer_count(model.config)
        further = int(getattr(model.config.get_text_config(), "num_nextn_predict_layers", None) or 0)  # draft "mtp"
        ahead = range(said, said + further)
        names = [name for name in names if not (found := LAYER.search(name)) or int(found[1]) not in ahead]
        if not names:
            return
        held = max(said, self.checkpoint.layers - further)
        beyond = [name for name in names if (found := LAYER.search(name)) and int(found[1]) >= said]
        if beyond and held > said:
            raise LoadError(
                f"config.json in {self.folder} speaks of {said} layers, and the weights beside it have {held} "
                f"({beyond[0]}, ...): the text would be that of a part of the model; get both from the same source"
            )
        shown = ", ".join([*names[:3], *(["..."] if names[3:] else [])])
        logger.warning("%s: %d tensors are not used by %s: %s", self.name, len(names), type(model).__name__, shown)

    def read_later(self) -> Any:
        """The model with the linear layers of its text part on disk: accelerate's hooks bring each when it is needed.

        So a model can run, and be packed layer by layer, in the memory of its packed copy and one layer.

        Raises:
            LoadError, MemoryLimitError: as ``read``.
        """
        from accelerate.hooks import remove_hook_from_module

        with tempfile.TemporaryDirectory(prefix="sakiyomi-") as offload:  # stays empty where weights are used as stored
            model = self.read(device_map={"": "disk"}, offload_folder=offload)
            if any(Path(offload).iterdir()):  # weights that transformers had to convert; they are gone with the folder
                return self.read()
        aside = {id(part) for name in names_aside(model) for part in model.get_submodule(name).modules()}
        for module in model.modules():
            hook = getattr(module, "_hf_hook", None)
            if hook is None or (is_linear(module) and id(module) not in aside):
                continue
            hook.pre_forward(module)
            remove_hook_from_module(module)
            vars(module).pop("forward", None)  # the class's own again, which a compiler and a copy understand
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.clone()  # what was read is the file itself, mapped
        return model


@contextmanager
def quiet() -> Iterator[None]:
    """Without progress bars and warnings of transformers and accelerate; their settings are restored afterwards."""
    from transformers.utils import logging as notes

    verbosity, bars = notes.get_verbosity(), notes.is_progress_bar_enabled()
    accelerate = logging.getLogger("accelerate")
    level = accelerate.level
    notes.set_verbosity_error()
    notes.disable_progress_bar()
    accelerate.setLevel(logging.ERROR)
    try:
        yield
    finally:
        notes.set_verbosity(verbosity)
        accelerate.setLevel(level)
        if bars:
            notes.enable_progress_bar()


def without_weights(config: Any, dtype: torch.dtype | None = None, *, trust_remote_code: bool = False) -> Any:
    """A model of a configuration, whose tensors have sizes and no values."""
    import transformers

    with TORCH_STATE, torch.device("meta"), quiet():
        return getattr(transformers, auto_class(config)).from_config(
            copy.deepcopy(config), dtype=dtype, trust_remote_code=trust_remote_code
        )

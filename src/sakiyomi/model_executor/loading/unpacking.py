"""Has transformers unpack a GGUF file, in silence but for what it leaves out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sakiyomi.model_executor.loading.gguf_metadata import ROPE_TENSORS

logger = logging.getLogger("sakiyomi")


@contextmanager
def unpacking(name: str, file: Path | None) -> Iterator[None]:
    """Have transformers read a GGUF file without its bar, and name the tensors that it leaves out; None: no such file.

    Args:
        name: what the user called the model.
    """
    if file is None:
        yield
        return
    from transformers import modeling_gguf_pytorch_utils as module

    own = {key: getattr(module, key, None) for key in ("tqdm", "get_gguf_hf_weights_map")}
    held, taken = list[str](), set(ROPE_TENSORS)

    def bar(tensors: Any, **_: Any) -> Any:
        held.extend(tensor.name for tensor in tensors)
        return tensors

    def names(*args: Any, **kwargs: Any) -> Any:
        found = own["get_gguf_hf_weights_map"](*args, **kwargs)  # type: ignore[misc]
        taken.update(found)
        return found

    vars(module).update(tqdm=bar, get_gguf_hf_weights_map=names)
    try:
        yield
    finally:
        vars(module).update(own)
    if left := [each for each in held if each not in taken]:
        shown = ", ".join([*left[:3], *(["..."] if left[3:] else [])])
        logger.warning("%s: %d tensors of the file are not used: %s", name, len(left), shown)


def as_numbers() -> dict[str, Any]:
    """Have transformers unpack a GGUF file, whose blocks it would otherwise keep where it finds kernels for them."""
    try:
        from transformers import GgufConfig
    except ImportError:  # versions that always unpack it
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}

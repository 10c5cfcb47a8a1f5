"""Copies of GGUF files with other metadata and other tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

MISSING = object()
"""In the place of a value or a tensor: the copy has none."""


def changed(sound: Path, path: Path, keys: Mapping[str, Any], tensors: Mapping[str, Any] = {}) -> Path:
    """A copy of a file with other metadata, and other tensors."""
    import gguf

    read, writer = gguf.GGUFReader(sound), gguf.GGUFWriter(path, "llama")
    held = {field.name: field.contents() for field in read.fields.values() if not field.name.startswith("GGUF.")}
    for key, value in ({**held, "general.architecture": MISSING} | dict(keys)).items():
        if value is MISSING:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            form = gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if type(value) is int else form)
    given = {each.name: np.array(each.data) for each in read.tensors}
    for name, tensor in (given | dict(tensors)).items():
        if tensor is not MISSING:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

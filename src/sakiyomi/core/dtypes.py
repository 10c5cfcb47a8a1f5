"""Names of torch's dtypes, and of those in safetensors files. Imports no torch."""

from __future__ import annotations

from sakiyomi.core.errors import InputError

DTYPES = ("float32", "bfloat16", "float16")
"""Those that models run in."""
STORED = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""torch's names by those of safetensors files."""


def dtype_name(dtype: object) -> str:
    """The name of a ``torch.dtype`` as configurations and reports spell it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def check_dtype(value: object) -> str:
    """The name of a dtype that models run in, or "auto".

    Raises:
        InputError: there is no such dtype.
    """
    name = dtype_name(value)
    if name != "auto" and name not in DTYPES:
        raise InputError(f"dtype is {value!r}; expected 'auto', {', '.join(map(repr, DTYPES))}")
    return name

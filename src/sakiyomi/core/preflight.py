"""Checks of names, paths and words in settings before torch is imported: an error comes seconds earlier.

Commands and servers call ``check_settings`` with all their settings. It loads nothing. What it accepts may still be
refused, in the same words, where models are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sakiyomi.core.cache_specs import check_cache
from sakiyomi.core.draft_specs import FORMS, ModelSpec, head_names, read_argument, split_spec
from sakiyomi.core.dtypes import check_dtype
from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.gguf_files import gguf_file
from sakiyomi.core.hub import check_known
from sakiyomi.core.model_folder import check_folder, local_folder
from sakiyomi.core.params import QUANTIZATIONS

PUBLISHED = "official"
"""A word for the heads that were published for a target, instead of a folder."""
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse an invalid target, draft, cache, dtype, device or quantization, and heads that are missing.

    Args:
        settings: of a command, by name; other names are ignored.

    Raises:
        InputError: a setting has an unknown value.
        LoadError: a file or folder that is missing or damaged, or an unknown hub id.
    """
    check_dtype(settings.get("dtype", "auto"))
    if not _DEVICE.fullmatch(device := str(settings.get("device", "auto"))):
        raise InputError(f"device is {device!r}; expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if (quantize := settings.get("quantize")) is not None and quantize not in QUANTIZATIONS:
        raise InputError(f"quantize={quantize!r}; expected None, {' or '.join(map(repr, QUANTIZATIONS))}")
    if isinstance(cache := settings.get("cache"), str):
        check_cache(cache, settings.get("kv_budget"), settings.get("kv_memory"))
    trust = {name: bool(settings.get(name)) for name in ("allow_pickle", "trust_remote_code")}
    check_drafts(settings.get("draft"), **trust)
    if not isinstance(several := settings.get("drafts"), str):
        check_drafts(several, **trust)
    if isinstance(target := settings.get("target"), str) and target:
        check_target(target, **trust)
    for size in settings.get("sizes", ()):  # a number of parameters can be a hub id
        local_folder(size)
    if (answering := settings.get("memory_target")) is not None:
        check_target(answering, **trust)
    heads = settings.get("heads")
    for name in head_names(heads) if isinstance(heads, str) and heads != PUBLISHED else ():
        if not folder_of(name).is_dir():
            raise LoadError(f"there is no folder {name!r} with heads; check the path")


def check_target(name: str, *, allow_pickle: bool = False, trust_remote_code: bool = False) -> None:
    """Refuse a name that no model has, and a folder that is no whole model.

    Raises:
        InputError, LoadError: see there.
    """
    if gguf_file(name) is not None:
        return
    folder = local_folder(name)
    if folder is None:
        check_known(name)
    else:
        check_folder(folder, allow_pickle=allow_pickle, remote_code=trust_remote_code)


def check_drafts(draft: str | Sequence[Any] | None, **trust: bool) -> None:
    """Refuse unknown drafters and specs with paths that do not exist; drafter objects are not checked.

    Raises:
        InputError, LoadError: see there.
    """
    for spec in [draft] if isinstance(draft, str) else draft or ():
        for part in split_spec(spec) if isinstance(spec, str) else ():
            kind, _, argument = part.partition(":")
            found = read_argument(kind, argument) if kind in FORMS else None
            if isinstance(found, ModelSpec):
                check_target(found.name, **trust)


def check_prompts(prompts: Sequence[str]) -> None:
    """Refuse empty prompts.

    Raises:
        InputError: says which one it is.
    """
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            place = f" (number {number} of {len(prompts)})" if len(prompts) > 1 else ""
            raise InputError(f"the prompt {prompt!r} is empty{place}; give at least one word")

"""Which drafters a target could have here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import InputError
from sakiyomi.drafters import parse_drafters
from sakiyomi.evaluation.tuning.config import PairConfig

if TYPE_CHECKING:
    from sakiyomi.engine.llm import LLM

__all__ = ["available", "named"]

TEXT = ("prompt-lookup", "suffix", "ngram")


def named(config: PairConfig) -> list[str]:
    """Specs that the user gave, and those of the folder; refused before anything is loaded.

    Raises:
        InputError: a spec that is none, or a folder that is not there or holds no model.
    """
    for spec in config.draft:
        parse_drafters(spec)
    return [*config.draft, *_folder(config.drafts)]


def available(llm: LLM, config: PairConfig) -> list[str]:
    """Specs that need nothing but the target, and what lies beside it."""
    found = [*TEXT]
    if config.target == "tales":
        found.append("model:tales-draft")
    heads = "tales-medusa" if config.target == "tales" else str(folder_of(config.target) / "medusa")
    if (folder_of(heads) / "config.json").is_file():
        found.append(f"medusa:{heads}")
    layers = int(getattr(llm.target.config, "num_hidden_layers", 0))
    if layers >= 4:
        found.append(f"early-exit:{layers // 2}")
    if llm.target.weights.quantization is None and llm.target.device.type == "cpu" and not llm.target.offloaded:
        found.append("self-int8")
    return found


def _folder(name: str | None) -> list[str]:
    if name is None:
        return []
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise InputError(f"drafts is {name!r}, which is no folder; give one whose folders are small models")
    found = sorted(str(part.parent) for part in folder.glob("*/config.json"))
    if not found:
        raise InputError(f"drafts is {name!r}, and none of its folders has a config.json; expected folders of models")
    return [f"model:{part}" for part in found]

"""Lists the drafters that a target could use on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from sakiyomi.core.embedded import BLOCK_DRAFTERS, DRAFTS, EAGLE_HEADS, FREE_DRAFT, MEDUSA_HEADS, folder_of
from sakiyomi.core.errors import InputError, SakiyomiError
from sakiyomi.drafters import heads_beside, parse_drafters
from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.tuning.config import PairConfig

Made = TypeVar("Made")
TEXT = ("prompt-lookup", "suffix", "ngram", FREE_DRAFT)


def named(config: PairConfig) -> list[str]:
    """Specs that the user gave, and those of the folder; refused before anything is loaded.

    Raises:
        InputError: a spec that is none, or a folder that is not there or holds no model.
    """
    for spec in config.draft:
        parse_drafters(spec)
    return [*config.draft, *_folder(config.drafts)]


def available(llm: LLM, target: str) -> list[str]:
    """Specs of drafters that need nothing but the target and its folder; ``target``: its name, as the user gave it."""
    found = [*TEXT]
    if target in DRAFTS:
        found.append(f"model:{DRAFTS[target]}")
    own = {"medusa": MEDUSA_HEADS, "eagle": EAGLE_HEADS, "block": BLOCK_DRAFTERS}
    found += [f"{kind}:{heads[target]}" for kind, heads in own.items() if target in heads]
    found += heads_beside(folder_of(target))
    layers = int(getattr(llm.target.config, "num_hidden_layers", 0))
    if layers >= 4:
        found.append(f"early-exit:{layers // 2}")
    if llm.target.weights.quantization is None and llm.target.device.type == "cpu" and not llm.target.offloaded:
        found += ["self-int8", "self-int4"]
    return found


def made(
    specs: Iterable[str], make: Callable[[str], Made], needed: Sequence[str], note: Callable[[str], None]
) -> tuple[dict[str, Made], dict[str, str]]:
    """Make something of every spec once.

    Args:
        specs: of drafters.
        make: is called with each.
        needed: specs that have to work.
        note: receives progress messages.

    Returns:
        What was made, and messages of the others, both by spec.

    Raises:
        SakiyomiError: a needed one cannot be made.
    """
    found: dict[str, Made] = {}
    refused: dict[str, str] = {}
    for spec in dict.fromkeys(specs):
        note(f"making {spec} ready")
        try:
            found[spec] = make(spec)
        except SakiyomiError as error:
            if spec in needed:
                raise
            refused[spec] = error.message
    return found, refused


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

"""What `sakiyomi tune` found for a target; kept in the cache folder by machine, model, dtype and threads."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sakiyomi.cache.policies.retaining.formats import fingerprint
from sakiyomi.core.digests import sealed, unsealed
from sakiyomi.core.drops import Tau
from sakiyomi.core.embedded import is_embedded_name
from sakiyomi.core.errors import LoadError, SakiyomiError
from sakiyomi.core.files import cache_folder, whole_file
from sakiyomi.drafters import parse_drafters
from sakiyomi.engine import machine
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.weights import rounding_of

logger = logging.getLogger("sakiyomi")


@dataclass(frozen=True)
class Profile:
    """The fastest configuration of a target on a machine.

    Attributes:
        draft: spec of its drafter; "none": speculation is not faster here.
        gamma: length of its chains; "auto": a tree whose size is chosen every round from measured costs.
        speedup: over plain decoding, as it was measured; 1 where no draft is faster.
        tau: tokens per target pass, as it was measured; 0: not known.
        tau_error: its standard error, as a share of it.
        conditions: machine, target and settings under which it was found.
        table: everything that was compared.
    """

    draft: str
    gamma: int | str
    speedup: float
    conditions: dict[str, Any] = field(default_factory=dict)
    table: list[dict[str, Any]] = field(default_factory=list)
    tau: float = 0.0
    tau_error: float = 0.0

    @property
    def depth(self) -> int | None:
        """Length of the chains, if it is a number."""
        return self.gamma if isinstance(self.gamma, int) else None

    @property
    def chosen(self) -> Tau | None:
        """Tau when the draft was chosen; None: there is no draft, or the profile is of a version that did not say."""
        return Tau(self.tau, self.tau_error) if self.tau and self.draft != "none" else None


def profile_path(target: ModelRunner, tokenizer: Any) -> Path:
    """Where the profile of a target lies, as it runs here: another dtype or number of threads has another one.

    In the folder ``$SAKIYOMI_PROFILES``, else beside the compiled kernels.
    """
    return profiles_folder() / f"{_setting(target)}-{_digest(fingerprint(target.module, tokenizer))}.json"


def profiles_folder() -> Path:
    """``$SAKIYOMI_PROFILES``, else a folder in the cache folder."""
    own = os.environ.get("SAKIYOMI_PROFILES")
    return Path(own) if own else cache_folder() / "profiles"


def _setting(target: ModelRunner) -> str:
    """Digest of a target's settings, without its weights and its vocabulary."""
    device = target.device
    return _digest(
        {
            "processor": machine.processor() if device.type == "cpu" else torch.cuda.get_device_name(device),
            "threads": torch.get_num_threads(),
            "dtype": str(target.dtype),
            "quantize": rounding_of(target.weights),
            "exact": target.exact,
            "offloaded": target.offloaded,
            "vocabulary": target.vocab_size,
        }
    )


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def read_profile(path: Path) -> Profile | None:
    """What is kept there; None: nothing.

    Raises:
        LoadError: it is damaged.
    """
    if not path.is_file():
        return None
    try:
        found = Profile(**unsealed(json.loads(path.read_text(encoding="utf-8"))))
        parse_drafters(found.draft)
        if found.gamma != "auto" and not (type(found.gamma) is int and found.gamma > 0):
            raise ValueError(f"gamma {found.gamma!r}")
    except (OSError, TypeError, ValueError, AttributeError, RecursionError, SakiyomiError) as error:
        raise LoadError(f"{path} is damaged ({error}); delete it, or run sakiyomi tune again") from None
    return found


def find_profile(target: ModelRunner, tokenizer: Any) -> Profile | None:
    """The profile of a target; None: there is none, or what it names is gone, which the log says."""
    if not any(profiles_folder().glob(f"{_setting(target)}-*.json")):
        return None  # to tell a model from others takes a while: all of its vocabulary is read
    found = read_profile(profile_path(target, tokenizer))
    if found is None:
        return None
    for part in parse_drafters(found.draft):
        place = Path(str(part).partition(":")[2])
        if place.is_absolute() and not place.exists():
            logger.warning("the tuned draft %s is not there any more and not used; run sakiyomi tune again", part)
            return None
    return found


def write_profile(path: Path, profile: Profile) -> None:
    """Write it, whole or not at all.

    Raises:
        LoadError: it cannot be written.
    """
    with whole_file(path, "set SAKIYOMI_PROFILES to a folder of yours") as fresh:
        content = json.loads(json.dumps(dataclasses.asdict(profile), default=str))
        fresh.write_text(json.dumps(sealed(content), indent=1) + "\n", encoding="utf-8")


def lasting(spec: str) -> str:
    """A spec that means the same in every working folder: existing paths become absolute."""
    parts = []
    for part in parse_drafters(spec):
        kind, colon, argument = str(part).partition(":")
        place = Path(argument).expanduser()
        if argument and not is_embedded_name(argument) and place.exists():
            argument = str(place.resolve())
        parts.append(kind + colon + argument)
    return "+".join(parts)

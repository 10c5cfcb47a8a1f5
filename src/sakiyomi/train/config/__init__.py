"""Settings of the training commands: the only home of their defaults.

The command line makes one flag of each setting (same name, `help` from the metadata); nothing here knows of torch.
"""

from __future__ import annotations

from sakiyomi.train.config.base import Flag, LlamaSizes, LoopConfig, RunConfig, Settings, TextConfig
from sakiyomi.train.config.beside import AnsweredConfig, LococoConfig, MedusaConfig, RetainingConfig
from sakiyomi.train.config.data import DistillDataConfig, NgramConfig
from sakiyomi.train.config.language import (
    BlockConfig,
    DraftConfig,
    EagleConfig,
    HeadConfig,
    RetrieverConfig,
    TargetConfig,
    TaughtConfig,
    TextRunConfig,
)

__all__ = [
    "AnsweredConfig",
    "BlockConfig",
    "DistillDataConfig",
    "DraftConfig",
    "EagleConfig",
    "Flag",
    "HeadConfig",
    "LlamaSizes",
    "LococoConfig",
    "LoopConfig",
    "MedusaConfig",
    "NgramConfig",
    "RetainingConfig",
    "RetrieverConfig",
    "RunConfig",
    "Settings",
    "TargetConfig",
    "TaughtConfig",
    "TextConfig",
    "TextRunConfig",
]

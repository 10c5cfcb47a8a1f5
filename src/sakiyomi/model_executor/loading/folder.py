"""Tokenizer and feature extractor of a model's folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import LoadError
from sakiyomi.core.messages import one_line
from sakiyomi.core.model_folder import TOKENIZER_REMEDY, check_tokenizer
from sakiyomi.model_executor.loading.families import has_encoder, text_config
from sakiyomi.model_executor.loading.reader import quiet

logger = logging.getLogger("sakiyomi")

__all__ = ["read_extractor", "read_tokenizer"]


def read_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """The tokenizer of a model folder.

    Raises:
        LoadError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    if not trust_remote_code:
        check_tokenizer(folder)
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # the libraries below raise their own kinds, bare Exception among them
        raise LoadError(f"the tokenizer in {folder} cannot be read ({one_line(error)}); {TOKENIZER_REMEDY}") from error


def read_extractor(folder: Path, config: Any) -> Any:
    """The feature extractor of a speech model, the processor of one that sees; None where the folder has none.

    Raises:
        LoadError: it cannot be read.
    """
    from transformers import AutoFeatureExtractor, AutoProcessor

    if not has_encoder(config) and text_config(config) is config:
        return None
    if not any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        return None
    try:
        with quiet():
            reader: Any = AutoFeatureExtractor if has_encoder(config) else AutoProcessor
            return reader.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        if not has_encoder(config):  # text it reads without
            logger.warning("images cannot be read: the processor in %s does not load (%s)", folder, one_line(error))
            return None
        raise LoadError(
            f"the feature extractor in {folder} cannot be read ({one_line(error)}); copy preprocessor_config.json from "
            "the original model"
        ) from error

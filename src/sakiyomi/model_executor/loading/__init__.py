"""Loads models and tokenizers from folders, files, the hub or loaded pairs, and refuses bad input clearly."""

from sakiyomi.core.checkpoint import read_checkpoint
from sakiyomi.model_executor.loading.families import has_encoder
from sakiyomi.model_executor.loading.folder import check_sees
from sakiyomi.model_executor.loading.model import Loaded, load_model, stop_tokens
from sakiyomi.model_executor.loading.pairs import check_cross_pair, check_family, check_pair, same_tokenizer

__all__ = [
    "Loaded",
    "check_cross_pair",
    "check_family",
    "check_pair",
    "check_sees",
    "has_encoder",
    "load_model",
    "read_checkpoint",
    "same_tokenizer",
    "stop_tokens",
]

"""A byte-level BPE tokenizer trained on the training text; any text round-trips, for every byte is a piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import ByteLevelBPETokenizer, Tokenizer, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.model_executor.loading.folder import read_tokenizer
from sakiyomi.train.checkpoint import writing

END = "<|endoftext|>"
PAD = "<|pad|>"
SMALLEST = 256 + 2


def train_tokenizer(
    texts: Iterable[str], pieces: int, max_length: int, *, split: Sequence[Any] = ()
) -> PreTrainedTokenizerFast:
    """Train a tokenizer whose vocabulary has `pieces` entries, special tokens included.

    `END` begins and ends a document (bos and eos); it is id 0. A prompt is led by it when encoded with special tokens,
    as every document of the training stream is.

    Args:
        texts: training text; pass a text twice to count it twice.
        pieces: size of the vocabulary, at least 258 (256 bytes, 2 special tokens).
        max_length: longest context of the model in tokens, kept as metadata.
        split: what cuts the text first, from `tokenizers.pre_tokenizers`.

    Raises:
        InputError: too few pieces were asked for, or the text is too short to make as many.
    """
    if pieces < SMALLEST:
        raise InputError(f"vocab is {pieces}, expected at least {SMALLEST} (256 bytes and 2 special tokens)")
    made = ByteLevelBPETokenizer()
    made.pre_tokenizer = pre_tokenizers.Sequence([*split, made.pre_tokenizer]) if split else made.pre_tokenizer
    made.train_from_iterator(texts, pieces, min_frequency=0, show_progress=False, special_tokens=[END, PAD])
    tokenizer = Tokenizer.from_str(made.to_str())
    if tokenizer.get_vocab_size() != pieces:
        raise InputError(
            f"the text gives {tokenizer.get_vocab_size()} pieces, expected {pieces}; give more text or lower --vocab"
        )
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, end)]),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def own_tokenizer(out: str, pieces: int, make: Callable[[], PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    """The tokenizer below OUT, which a run that finds none makes and keeps there.

    Raises:
        InputError: the one below OUT has another size than was asked for.
    """
    folder = Path(out) / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        new = make()
        with writing(folder):
            new.save_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    if len(tokenizer) != pieces:
        raise InputError(
            f"vocab is {pieces}, and the tokenizer in {folder} has {len(tokenizer)} pieces; give --vocab "
            f"{len(tokenizer)}, or delete that folder to have another one trained"
        )
    return tokenizer


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer folder.

    Raises:
        LoadError: it is missing or holds no tokenizer with an end token.
    """
    if not folder.is_dir():
        raise LoadError(f"there is no tokenizer folder {str(folder)!r}; check the path")
    tokenizer: PreTrainedTokenizerBase = read_tokenizer(folder, trust_remote_code=False)
    check_end(tokenizer, str(folder))
    return tokenizer


def check_end(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise LoadError unless the tokenizer of the model or folder `name` has an end token."""
    if tokenizer.eos_token_id is None:
        raise LoadError(f"the tokenizer of {name!r} has no end token; set eos_token in its configuration")

"""Whether a target and a draft model fit: by the same token ids, or else by text."""

from __future__ import annotations

import re
from typing import Any

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.model_executor.encoder_decoder.families import family_of
from sakiyomi.model_executor.loading.families import has_encoder
from sakiyomi.model_executor.loading.model import Loaded

_PLACEHOLDER = re.compile(
    r"""[<\[(]?\|?_?(pad|padding|extra|extra_id|extra_token|unused|reserved|reserved_special_token|dummy|empty
        |placeholder|madeupword|filler)[-_ ]?(token|id)?[-_ ]?\d*_?\|?[>\])]?""",
    re.IGNORECASE | re.VERBOSE,
)
"""Names of tokens that only pad a vocabulary: <pad>, [unused7], <|reserved_special_token_3|>, <extra_id_0>."""


def same_tokenizer(a: Any, b: Any) -> bool:
    """Whether two tokenizers give the same tokens the same ids; padding tokens may differ.

    Args:
        a, b: transformers tokenizers.
    """
    if a is b:
        return True
    if a is None or b is None or not hasattr(a, "get_vocab") or not hasattr(b, "get_vocab"):
        return False
    first, second = a.get_vocab(), b.get_vocab()
    if first == second:
        return True
    return all(_is_padding(a, token) for token, i in first.items() if second.get(token) != i) and all(
        _is_padding(b, token) for token, i in second.items() if first.get(token) != i
    )


def check_pair(target: Loaded, draft: Loaded) -> int:
    """Refuse a draft model whose tokens are not the target's.

    Args:
        target: the large model.
        draft: the small one.

    Returns:
        Number of token ids that both models have: the smaller of the two vocabularies. Further rows are padding.

    Raises:
        UnsupportedError: the tokenizers differ, or the draft has no row for some token of theirs.
    """
    sizes = _rows(target.model), _rows(draft.model)
    remedy = (
        "choose a draft with the target's own tokenizer, train one with `sakiyomi train draft --target ...`, or pass "
        "draft='none'"
    )
    if not same_tokenizer(target.tokenizer, draft.tokenizer):
        raise UnsupportedError(
            f"the draft {draft.name!r} does not fit the target {target.name!r}: their tokenizers differ (draft "
            f"{_count(draft.tokenizer)} tokens, target {_count(target.tokenizer)}{_first_difference(target, draft)}); "
            f"{remedy}"
        )
    used = _highest_used(target.tokenizer)
    if sizes[1] <= used:
        raise UnsupportedError(
            f"the draft {draft.name!r} does not fit the target {target.name!r}: the draft has rows for {sizes[1]} "
            f"tokens, the target for {sizes[0]}, and their tokenizer uses numbers up to {used}; {remedy}"
        )
    return min(sizes)


def check_family(target: Any, draft: Any, name: str) -> None:
    """Refuse a draft model that cannot read what the target reads, by the configurations alone.

    Args:
        target, draft: configurations.
        name: the user's name of the draft.

    Raises:
        UnsupportedError: only one of them has an encoder, or their encoders take different inputs.
    """
    remedy = 'choose a draft of the target\'s own family, "prompt-lookup" or "suffix", or pass draft="none"'
    if has_encoder(target) != has_encoder(draft):
        has, none = ("target", "draft") if has_encoder(target) else ("draft", "target")
        raise UnsupportedError(
            f"the draft {name!r} ({draft.model_type}) does not fit the target ({target.model_type}): the {has} has an "
            f"encoder, the {none} has none; {remedy}"
        )
    if not has_encoder(target):
        return
    first, second = family_of(target), family_of(draft, name)
    if first != second:
        raise UnsupportedError(
            f"the draft {name!r} is of the family {second.name}, the target of {first.name}: a draft reads what the "
            f"target's encoder reads; {remedy}"
        )
    for what in ("num_mel_bins", "max_source_positions") if first.takes_audio else ():
        if getattr(target, what) != getattr(draft, what):
            raise UnsupportedError(
                f"the draft {name!r} has {what} {getattr(draft, what)}, the target {getattr(target, what)}: it cannot "
                f"read the target's features; {remedy}"
            )


def check_cross_pair(target: Loaded, draft: Loaded) -> None:
    """Refuse a draft model of another tokenizer if the two cannot be matched by text either.

    Args:
        target: the large model.
        draft: the small one.

    Raises:
        UnsupportedError: a tokenizer does not give the text of its tokens, or the draft has no row for some token.
    """
    for loaded, what in ((target, "target"), (draft, "draft")):
        missing = [
            name for name in ("get_vocab", "decode", "convert_ids_to_tokens") if not hasattr(loaded.tokenizer, name)
        ]
        if missing:
            raise UnsupportedError(
                f"the draft {draft.name!r} does not fit the target {target.name!r}: their tokenizers differ, and that "
                f"of the {what} has no {missing[0]} by which to find the text of its tokens; load it with "
                "transformers.AutoTokenizer, or pass draft='none'"
            )
    used, rows = _highest_used(draft.tokenizer), _rows(draft.model)
    if rows <= used:
        raise UnsupportedError(
            f"the draft {draft.name!r} has rows for {rows} tokens, and its tokenizer uses numbers up to {used}; give "
            "it the tokenizer that it was trained with, or pass draft='none'"
        )


def _is_padding(tokenizer: Any, token: str) -> bool:
    if _PLACEHOLDER.fullmatch(token):
        return True
    # Many tokenizers also use their end or unknown token for padding; these have a meaning.
    meant = (tokenizer.eos_token, tokenizer.bos_token, tokenizer.unk_token)
    return bool(token == tokenizer.pad_token and token not in meant)


def _rows(model: Any) -> int:
    config = model.config
    if has_encoder(config):
        return int(getattr(config, family_of(config).vocabulary, None) or config.vocab_size)
    return int(config.get_text_config(decoder=True).vocab_size)


def _count(tokenizer: Any) -> int:
    return len(tokenizer) if hasattr(tokenizer, "__len__") else 0


def _highest_used(tokenizer: Any) -> int:
    if not hasattr(tokenizer, "get_vocab"):
        return -1
    return max((i for token, i in tokenizer.get_vocab().items() if not _is_padding(tokenizer, token)), default=-1)


def _first_difference(target: Loaded, draft: Loaded) -> str:
    """For the message: an id with different meanings, if there is one."""
    if not hasattr(target.tokenizer, "get_vocab") or not hasattr(draft.tokenizer, "get_vocab"):
        return ""
    theirs = {i: token for token, i in draft.tokenizer.get_vocab().items()}
    for token, i in sorted(target.tokenizer.get_vocab().items(), key=lambda item: int(item[1])):
        if i in theirs and theirs[i] != token:
            return f"; token {i} is {theirs[i]!r} in the draft and {token!r} in the target"
    return ""

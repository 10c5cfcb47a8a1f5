"""Tokenizers of GGUF files, built with the package tokenizers from the file's metadata alone.

A vocabulary is one of three kinds (``tokenizer.ggml.model``): bytes merged by rank ("gpt2", whose words are cut by the
expressions named in ``tokenizer.ggml.pre``), characters merged by rank or by score ("gemma4", "llama", both of
SentencePiece), or the likeliest cut ("t5", a unigram model).
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.gguf import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4  # numbers in tokenizer.ggml.token_type
_SPACE = "▁"
_FOLDER = "use the model's folder in Hugging Face format"
_NAMED = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding",
    "sep_token": "seperator", "mask_token": "mask",
}  # fmt: skip
"""Special tokens: the name in transformers, and in the file (misspelt there)."""
ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
"""Tokens that end a reply, by their text: files name one or two of a model's end tokens."""
_NO_ENDS = (  # where all of the first are tokens, the second does not end a reply
    (("<|return|>", "<|call|>"), "<|end|>"),
    (("<|calls|>", "<|flush|>"), "<|end|>"),
    (("<|tool_response>",), "</s>"),
)


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer and what belongs to it.

    Attributes:
        backend: of the package tokenizers.
        settings: as in tokenizer_config.json: special tokens, the chat template.
        begin: number of the token that begins texts; None: there is none.
        ends: numbers of all tokens that end a text, the model's end token first.
    """

    backend: Tokenizer
    settings: dict[str, Any]
    begin: int | None
    ends: tuple[int, ...]


@dataclass
class _Vocabulary:
    """The tokens of a file.

    Attributes:
        kind: ``tokenizer.ggml.model``.
        tokens: texts by number; every one differs from the others.
        numbers: the other way around.
        types: by number.
        read: gives a value of the metadata below "tokenizer.ggml.", or a default.
    """

    kind: str
    tokens: list[str]
    numbers: dict[str, int]
    types: list[int]
    read: Callable[..., Any]


def build_tokenizer(file: GgufFile) -> GgufTokenizer:
    """The tokenizer of a GGUF file.

    Raises:
        LoadError: it has none, or its lists contradict each other.
        UnsupportedError: a kind, or a way of cutting words, that is not known here.
    """
    try:
        vocabulary = _vocabulary(file)
        if vocabulary.kind not in _KINDS:
            raise UnsupportedError(
                f"{file.paths[0]} has a tokenizer of the kind {vocabulary.kind!r}; expected {', '.join(_KINDS)}; "
                f"{_FOLDER}"
            )
        backend, begun, ended = _KINDS[vocabulary.kind](vocabulary, file.paths[0])
        return _with_special_tokens(backend, vocabulary, file, begun, ended)
    except (LoadError, UnsupportedError):
        raise
    except Exception as error:  # the package tokenizers raises bare Exception
        raise LoadError(f"the tokenizer in {file.paths[0]} cannot be read ({error}); {_FOLDER}") from error


def _vocabulary(file: GgufFile) -> _Vocabulary:
    path, held = file.paths[0], file.metadata

    def read(name: str, default: Any = None) -> Any:
        value = held.get(f"tokenizer.ggml.{name}", default)
        if default is not None and type(value) is not type(default) and not (isinstance(default, list)):
            raise LoadError(f"{path} is no intact GGUF file (tokenizer.ggml.{name} is {value!r}); download it again")
        return value

    given, kind = read("tokens"), read("model")
    if not isinstance(given, list | None) or not all(isinstance(text, str) for text in given or ()):
        raise LoadError(f"{path} is no intact GGUF file (tokenizer.ggml.tokens is no list of texts); download it again")
    if not given or not isinstance(kind, str):
        raise LoadError(
            f"{path} holds no tokenizer; {_FOLDER}, or load the file with transformers and pass (model, tokenizer)"
        )
    numbers: dict[str, int] = {text: number for number, text in enumerate(given)}
    if len(numbers) < len(given) or "" in numbers:
        given = [text if text and numbers[text] == n else f"[EMPTY_{n}]" for n, text in enumerate(given)]
        numbers = {text: number for number, text in enumerate(given)}
    types = list(map(int, read("token_type", [_NORMAL] * len(given))))
    if len(types) != len(given):
        raise LoadError(f"{path} has {len(given)} tokens and {len(types)} types of tokens; download it again")
    return _Vocabulary(kind, given, numbers, types, read)


# ---------------------------------------------------------------- the kinds


def _byte_level(vocabulary: _Vocabulary, path: Path) -> tuple[Tokenizer, bool, bool]:
    """Bytes, written as printable characters, merged by rank within words. Also whether texts are begun and ended."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

    table = _pre_tokenizers()
    name = vocabulary.read("pre", "default")
    found = next((each for each in table.values() if isinstance(each, dict) and name in each["names"]), None)
    if found is None:
        raise UnsupportedError(
            f"{path} cuts words by {name!r} (tokenizer.ggml.pre), which is not known here; {_FOLDER}"
        )
    merges = _merges(vocabulary, path)
    whole = name in table["whole_words"]
    tokenizer = Tokenizer(_bpe(vocabulary, merges, ignore_merges=whole))
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in found["expressions"]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        *cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, name in table["begun"], False


@functools.cache
def _pre_tokenizers() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("pre_tokenizers.toml").read_text(encoding="utf-8"))


def pre_tokenizer_names() -> list[str]:
    """One name of each way of cutting words, the most usual first."""
    return [each["names"][0] for each in _pre_tokenizers().values() if isinstance(each, dict)]


def _merges(vocabulary: _Vocabulary, path: Path) -> list[tuple[str, str]]:
    """Pairs of tokens in the order in which they are merged; a first part may begin with a space."""
    given = vocabulary.read("merges")
    if not given:
        raise LoadError(f"{path} has a vocabulary without its merges; get another file, or {_FOLDER}")
    pairs = [(pair[: (place := pair.find(" ", 1))], pair[place + 1 :]) for pair in given]
    known = vocabulary.numbers
    if not any(one in known and other in known and one + other in known for one, other in pairs):
        raise LoadError(f"{path} has {len(pairs)} merges, and none of them joins two of its tokens; download it again")
    return pairs


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **how: Any) -> Any:
    """A model of merges. Those with a token that the vocabulary does not have are left out; most files have none."""
    from tokenizers import models

    known = vocabulary.numbers
    try:
        return models.BPE(known, merges, **how)
    except Exception:  # bare, and for any reason: a further one is raised again
        merges = [pair for pair in merges if pair[0] in known and pair[1] in known and pair[0] + pair[1] in known]
        return models.BPE(known, merges, **how)


def _characters(vocabulary: _Vocabulary, path: Path) -> tuple[Tokenizer, bool, bool]:
    """Characters merged by rank over the whole text, as Gemma 4 does: spaces are tokens' own."""
    return _sentence_piece(vocabulary, _merges(vocabulary, path), prefix=False), True, False


def _scored(vocabulary: _Vocabulary, path: Path) -> tuple[Tokenizer, bool, bool]:
    """Characters merged by score: SentencePiece's BPE. Of two pairs the one with the likelier result is merged first,
    so the pairs that give a token take the rank of its score.
    """
    scores = [float(each) for each in vocabulary.read("scores", [])]
    if len(scores) != len(vocabulary.tokens):
        raise LoadError(f"{path} has {len(vocabulary.tokens)} tokens and {len(scores)} scores; download it again")
    numbers, types = vocabulary.numbers, vocabulary.types
    found: list[tuple[float, int, int, str, str]] = []
    for number, text in enumerate(vocabulary.tokens):
        if types[number] not in (_NORMAL, _USER):
            continue
        for place in range(1, len(text)):
            left, right = text[:place], text[place:]
            if left in numbers and right in numbers:
                found.append((-scores[number], numbers[left], numbers[right], left, right))
    found.sort()
    merges = [(left, right) for *_, left, right in found]
    return _sentence_piece(vocabulary, merges, prefix=vocabulary.read("add_space_prefix", True)), True, False


def _sentence_piece(vocabulary: _Vocabulary, merges: list[tuple[str, str]], *, prefix: bool) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, normalizers

    unknown = vocabulary.read("unknown_token_id", 0)
    how = {"unk_token": vocabulary.tokens[unknown], "fuse_unk": True, "byte_fallback": True}
    tokenizer = Tokenizer(_bpe(vocabulary, merges, **how))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return tokenizer


def _unigram(vocabulary: _Vocabulary, path: Path) -> tuple[Tokenizer, bool, bool]:
    """The likeliest cut by SentencePiece's unigram model, over a text that its table of characters has normalized."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    scores = [float(each) for each in vocabulary.read("scores", [])]
    if len(scores) != len(vocabulary.tokens):
        raise LoadError(f"{path} has {len(vocabulary.tokens)} tokens and {len(scores)} scores; download it again")
    bytes_in = "<0x00>" in vocabulary.numbers
    pieces = list(zip(vocabulary.tokens, scores, strict=True))
    tokenizer = Tokenizer(models.Unigram(pieces, vocabulary.read("unknown_token_id", 2), bytes_in))
    table = vocabulary.read("precompiled_charsmap")
    steps: list[Any] = [] if table is None else [normalizers.Precompiled(table.tobytes())]
    if vocabulary.read("remove_extra_whitespaces", True):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if vocabulary.read("add_space_prefix", True) else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, scheme)
    tokenizer.decoder = decoders.Metaspace(_SPACE, scheme)
    return tokenizer, False, True


_KINDS: dict[str, Callable[[_Vocabulary, Path], tuple[Tokenizer, bool, bool]]] = {
    "gpt2": _byte_level,
    "llama": _scored,
    "gemma4": _characters,
    "t5": _unigram,
}
"""How a tokenizer is built, by ``tokenizer.ggml.model``; also whether texts are begun and ended by default."""


# ---------------------------------------------------------------- special tokens


def _with_special_tokens(
    backend: Tokenizer, vocabulary: _Vocabulary, file: GgufFile, begun: bool, ended: bool
) -> GgufTokenizer:
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    ends = _ends(vocabulary)
    tokens, types = vocabulary.tokens, vocabulary.types
    named = _named(vocabulary)
    marked = {n for n, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL)}
    special = marked | {*ends, *(vocabulary.numbers[text] for text in named.values())}
    user = [n for n, kind in enumerate(types) if kind == _USER and n not in special]
    backend.add_special_tokens([AddedToken(tokens[n], special=True, normalized=False) for n in sorted(special)])
    backend.add_tokens([AddedToken(tokens[n], normalized=False) for n in user])

    begun = vocabulary.read("add_bos_token", begun) or vocabulary.kind == "gemma4"
    ended = vocabulary.read("add_eos_token", ended)
    bos, eos = named.get("bos_token"), named.get("eos_token")
    around = [bos if begun else None, "$A", eos if ended else None]
    if around != [None, "$A", None]:
        used = [(each, vocabulary.numbers[each]) for each in (around[0], around[2]) if each]
        backend.post_processor = TemplateProcessing(
            single=[each for each in around if each],
            pair=[each for each in (*around, around[0], "$B:1", around[2]) if each],
            special_tokens=used,
        )
    settings: dict[str, Any] = named | {"clean_up_tokenization_spaces": False}
    settings |= _templates(file)
    return GgufTokenizer(backend, settings, vocabulary.numbers.get(bos) if bos else None, ends)


def _named(vocabulary: _Vocabulary) -> dict[str, str]:
    """Special tokens that have a name; transformers takes each for one, whatever its type says."""
    named: dict[str, str] = {}
    for name, key in _NAMED.items():
        number = vocabulary.read(f"{key}_token_id")
        if number is not None and 0 <= number < len(vocabulary.tokens):
            named[name] = vocabulary.tokens[number]
    if vocabulary.kind == "llama":  # whose files may leave out what SentencePiece always has
        for name, number in (("unk_token", 0), ("bos_token", 1), ("eos_token", 2)):
            named.setdefault(name, vocabulary.tokens[number])
    return named


def _ends(vocabulary: _Vocabulary) -> tuple[int, ...]:
    """Numbers of the tokens that end a text: those that the file names, then those with the text of one."""
    numbers = vocabulary.numbers
    named = [vocabulary.read(f"{key}_token_id") for key in ("eos", "eot", "eom")]
    found = [number for number in named if number is not None and 0 <= number < len(vocabulary.tokens)]
    if vocabulary.kind == "llama" and vocabulary.read("eos_token_id") is None:
        found.insert(0, 2)
    found += [n for text in ENDS if (n := numbers.get(text)) is not None and _marks(text, vocabulary.types[n])]
    for marks, text in _NO_ENDS:
        if all(mark in numbers for mark in marks) and vocabulary.read("eos_token_id") != numbers.get(text):
            found = [number for number in found if number != numbers.get(text)]
    return tuple(dict.fromkeys(found))


def _marks(text: str, kind: int) -> bool:
    """Whether a token stands for more than its text: old files call some of these normal."""
    return kind != _NORMAL or text.startswith(("<|", "<｜"))


def _templates(file: GgufFile) -> dict[str, Any]:
    """The chat template; where the file has several, a list of them by name, as transformers keeps it."""
    prefix = "tokenizer.chat_template"
    found = {
        key.removeprefix(f"{prefix}."): file.metadata[key] for key in file.metadata if key.startswith(f"{prefix}.")
    }
    default = file.metadata.get(prefix)
    if default is None and not found:
        return {}
    if not found:
        return {"chat_template": default}
    named = ({"default": default} if default is not None else {}) | found
    return {"chat_template": [{"name": name, "template": text} for name, text in named.items()]}

"""The tokenizer of a recorded model, without transformers, whose import takes a third of a small model's start."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.prompts import STORIES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KNOWN = (
    "all_special_ids", "bos_token", "bos_token_id", "chat_template", "clean_up_tokenization_spaces", "eos_token",
    "eos_token_id", "model_max_length", "name_or_path", "pad_token", "pad_token_id", "padding_side", "unk_token",
    "unk_token_id", "vocab_size",
)  # fmt: skip
_SPECIAL_TOKENS = "special_tokens_map"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TEMPLATES = ("apply_chat_template", "get_chat_template")
_TEXTS = (
    *STORIES,
    "",
    " ",
    "Well , I do n't .",
    "x  y\n\n\tz ",
    "naïve 先読み 🙂\u200d🙂 e\u0301",
    "</s> <s><unk><|endoftext|><0x0A>",
)


class _Encoding(dict[str, list[int]]):
    """A text's tokens, by name."""

    @property
    def input_ids(self) -> list[int]:
        """Their numbers."""
        return self["input_ids"]


class RecordedTokenizer:
    """Encodes a text and decodes tokens by the package tokenizers, as transformers' tokenizer does.

    For any other call it reads transformers' tokenizer, which answers all calls from then on.

    Args:
        backend: backend of the tokenizer.
        known: attributes of the tokenizer.
        whole: reads transformers' tokenizer.
    """

    def __init__(self, backend: Tokenizer, known: Mapping[str, Any], whole: Callable[[], Any]) -> None:
        backend.no_truncation()
        backend.no_padding()
        vars(self).update(known, _backend=backend, _known=tuple(known), _read=whole, _whole=None)

    def _all(self) -> Any:
        """Transformers' tokenizer. The caller may change it, so it answers all calls from now on."""
        own = vars(self)
        if own["_whole"] is None:
            own["_whole"] = self._read()
            for name in self._known:
                del own[name]
        return own["_whole"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_whole" not in vars(self):
            raise AttributeError(name)
        return getattr(self._all(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._all(), name, value)

    def __len__(self) -> int:
        return int(self._backend.get_vocab_size()) if self._whole is None else len(self._whole)

    def __call__(self, text: Any, add_special_tokens: bool = True, **how: Any) -> Any:
        """Encode a text."""
        if self._whole is not None or how or not isinstance(text, str):
            return self._all()(text, add_special_tokens=add_special_tokens, **how)
        found = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return _Encoding(input_ids=found.ids, attention_mask=found.attention_mask)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **how: Any) -> Any:
        """The text of tokens."""
        if self._whole is not None or how or not isinstance(token_ids, list):
            return self._all().decode(token_ids, skip_special_tokens=skip_special_tokens, **how)
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        """Numbers of all tokens, the added ones included."""
        vocabulary: dict[str, int] = (self._backend if self._whole is None else self._whole).get_vocab()
        return vocabulary

    def convert_ids_to_tokens(self, ids: Any, **how: Any) -> Any:
        """The token of a number, or of each of a list."""
        if self._whole is not None or how or not isinstance(ids, int | list):
            return self._all().convert_ids_to_tokens(ids, **how)
        return self._backend.id_to_token(ids) if isinstance(ids, int) else list(map(self._backend.id_to_token, ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or of each of a list; an unknown token has the id of the unknown token."""
        if self._whole is not None or not isinstance(tokens, str | list):
            return self._all().convert_tokens_to_ids(tokens)
        if isinstance(tokens, list):
            return list(map(self.convert_tokens_to_ids, tokens))
        found = self._backend.token_to_id(tokens)
        return self.unk_token_id if found is None else found

    @property
    def apply_chat_template(self) -> Callable[..., Any]:
        """Transformers' own method. It needs the template and the special tokens, and no class of the tokenizer."""
        return self._method("apply_chat_template")

    @property
    def get_chat_template(self) -> Callable[..., Any]:
        """As ``apply_chat_template``."""
        return self._method("get_chat_template")

    def _method(self, name: str) -> Callable[..., Any]:
        if self._whole is not None or _SPECIAL_TOKENS not in self._known:
            found: Callable[..., Any] = getattr(self._all(), name)
            return found
        from transformers import PreTrainedTokenizerBase

        return functools.partial(getattr(PreTrainedTokenizerBase, name), self)

    @property
    def backend_tokenizer(self) -> Any:
        """Of the package tokenizers; not to be changed."""
        return self._backend if self._whole is None else self._whole.backend_tokenizer

    @property
    def added_tokens_decoder(self) -> Any:
        """Added tokens by number."""
        return self._backend.get_added_tokens_decoder() if self._whole is None else self._whole.added_tokens_decoder


class FileTokenizer(RecordedTokenizer):
    """The tokenizer of a folder made of a GGUF file.

    Transformers' tokenizer of such a folder is made of two files alone, which say all that the calls above ask for.

    Args:
        folder: with tokenizer.json and tokenizer_config.json.
        whole: reads transformers' tokenizer.
        backend: the tokenizer in tokenizer.json; None: it is read.
    """

    def __init__(self, folder: Path, whole: Callable[[], Any], backend: Tokenizer | None = None) -> None:
        from tokenizers import Tokenizer

        backend = Tokenizer.from_file(str(folder / "tokenizer.json")) if backend is None else backend
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        named = {name: settings.get(name) for name in _SPECIAL}
        template = settings.get("chat_template")
        known = {
            "all_special_ids": [backend.token_to_id(text) for text in dict.fromkeys(named.values()) if text],
            "chat_template": {each["name"]: each["template"] for each in template}
            if isinstance(template, list)
            else template,
            "clean_up_tokenization_spaces": settings["clean_up_tokenization_spaces"],
            "model_max_length": int(1e30),
            "name_or_path": str(folder),
            "padding_side": "right",
            "vocab_size": backend.get_vocab_size(with_added_tokens=False),
            _SPECIAL_TOKENS: {name: text for name, text in named.items() if text},
        }
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            known |= {name: named[name], f"{name}_id": named[name] and backend.token_to_id(named[name])}
        super().__init__(backend, known, whole)

    def save_pretrained(self, folder: Path) -> None:
        """Write the files of the tokenizer into a folder."""
        if self._whole is not None:
            self._whole.save_pretrained(folder)
            return
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(self.name_or_path) / name, folder)


def recorded_tokenizer(tokenizer: Any, folder: Path) -> tuple[dict[str, Any], bytes | None]:
    """Attributes of a transformers tokenizer, and its backend where that is not the folder's tokenizer.json.

    Raises:
        UnsupportedError: they do not reproduce this tokenizer.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer, FileTokenizer):
        if tokenizer._whole is None:  # its files are in the folder
            return {name: getattr(tokenizer, name) for name in (*KNOWN, _SPECIAL_TOKENS)}, None
        tokenizer = tokenizer._whole
    kind = type(tokenizer)
    if not kind.__module__.startswith("transformers.") or not hasattr(tokenizer, "backend_tokenizer"):
        raise UnsupportedError(f"its tokenizer {kind.__name__} is none of the package tokenizers")
    known = {name: getattr(tokenizer, name) for name in KNOWN}
    if all(getattr(kind, name) is getattr(PreTrainedTokenizerBase, name) for name in _TEMPLATES):
        known[_SPECIAL_TOKENS] = tokenizer.special_tokens_map
    text = tokenizer.backend_tokenizer.to_str()
    place = folder / "tokenizer.json"
    beside = place.is_file() and _lasting(place.read_text(encoding="utf-8")) == _lasting(text)
    found = RecordedTokenizer(Tokenizer.from_str(text), known, lambda: tokenizer)
    if tokenizer.clean_up_tokenization_spaces and type(tokenizer.backend_tokenizer.model).__name__ != "BPE":
        raise UnsupportedError(f"its tokenizer {kind.__name__} removes spaces from what it has decoded")
    if json.loads(json.dumps(known)) != known or list(_answers(found)) != list(_answers(tokenizer)):
        raise UnsupportedError(f"its tokenizer {kind.__name__} does more than its backend")
    return known, None if beside else text.encode()


def _lasting(text: str) -> dict[str, Any]:
    """The settings of a backend that calls of transformers' tokenizer do not change."""
    held = json.loads(text)
    return {name: value for name, value in held.items() if name not in ("truncation", "padding")}


def _chat(tokenizer: Any) -> str:
    """What the chat template makes of a message, or why it does not take it."""
    try:
        return str(tokenizer.apply_chat_template([{"role": "user", "content": "Who?"}], tokenize=False))
    except Exception as error:  # a template is a program that may raise anything
        return repr(error)


def _answers(tokenizer: Any) -> Iterator[Any]:
    """A tokenizer's answers to samples of all calls that we make."""
    yield len(tokenizer), tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    special = [token for token in (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) if token]
    for text in (*_TEXTS, *special, "a" + "b ".join(special) + "c"):
        for add in (True, False):
            ids = list(tokenizer(text, add_special_tokens=add)["input_ids"])
            yield ids, tokenizer.convert_ids_to_tokens(ids), [tokenizer.convert_ids_to_tokens(i) for i in ids[:3]]
            yield tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=True)
    yield _chat(tokenizer)
    names = ["<0x41>", "no such token", *special]
    yield tokenizer.convert_tokens_to_ids(names), [tokenizer.convert_tokens_to_ids(name) for name in names]

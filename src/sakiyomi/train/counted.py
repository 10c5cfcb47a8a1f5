"""Training files as documents: arrays of token ids, of which some may be read but not learnt.

A token that does not count stands as its complement, ``~id``, a negative number: rows are then cut, shuffled and kept
as those of any other text. In chats the assistant's replies count, in prompts with answers the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sakiyomi.core.chats import Message
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.train.chats import chat_prompts, encode_chat, encoded
from sakiyomi.train.data import Ids, Record, excerpts, read_records, split

LONGEST_PROMPT = 96
"""Tokens of the longest beginning of a text that a target continues."""
T = TypeVar("T")


@dataclass(frozen=True)
class Document:
    """One document of a file.

    Attributes:
        ids: with marks; None: a chat in which the assistant says nothing.
        messages: of a chat; None: it is none.
    """

    ids: Ids | None
    messages: list[Message] | None = None


class Library:
    """Files as documents. Each file is read once; documents that are held back are removed from it.

    Args:
        tokenizer: encodes what is text.
        vocab: tokens that the model knows.
        marked: tokens that do not count have marks; else all count.
    """

    def __init__(self, tokenizer: Any, vocab: int, *, marked: bool = False) -> None:
        self._tokenizer, self._vocab, self._marked = tokenizer, vocab, marked
        self._files: dict[Path, list[Document]] = {}

    def documents(self, path: Path) -> list[Ids]:
        """The documents of a file, without those held back.

        Raises:
            LoadError, InputError: see `read_records`; an id lies outside the vocabulary, or nothing in the file counts.
        """
        found = [document.ids for document in self._read(path) if document.ids is not None]
        if not found or not any((ids >= 0).any() for ids in found):
            raise InputError(
                f"{path} holds chats in which no assistant says anything; expected messages from gpt or assistant"
            )
        return found if self._marked else [token_ids(ids) for ids in found]

    def prompts(self, path: Path, room: int, flag: str, note: Callable[[str], None]) -> list[Ids]:
        """What a target continues: of chats every point where the assistant is to speak, prompts without an answer,
        else the documents.

        Args:
            path: of the file; what is held back is left out.
            room: tokens of the longest prompt; longer ones of chats are left out.
            flag: that sets the tokens of an answer, which the room depends on.
            note: told how many are left out.

        Returns:
            Documents; a prompt of a chat is one whose tokens are all marked.

        Raises:
            InputError: the file holds chats and other records, or no prompt is short enough.
        """
        chats = [document.messages for document in self._read(path) if document.messages is not None]
        questions = (one.ids for one in self._read(path) if one.messages is None and one.ids is not None)
        asked = [ids for ids in questions if not (ids >= 0).any()]
        if not chats and not asked and room >= LONGEST_PROMPT:
            return [token_ids(ids) for ids in self.documents(path)]
        others = len(self._read(path)) - len(chats) - len(asked)
        if (chats or asked) and others:
            raise InputError(
                f"{path} holds {'chats' if chats else 'prompts'} and {others} records of other kinds; put them into "
                "files of their own"
            )
        prompts = [~np.array(ids, np.int64) for messages in chats for ids in chat_prompts(self._tokenizer, messages)]
        prompts += asked
        fitting = [ids for ids in prompts if 0 < len(ids) <= room]
        if not fitting:
            raise InputError(f"the target's positions leave {room} tokens for a prompt of {path}; set {flag} lower")
        if len(fitting) < len(prompts):
            note(f"{path.name}: {len(prompts) - len(fitting)} prompts of more than {room} tokens left out")
        return fitting

    def hold_back(self, paths: Sequence[Path], count: int, longer_than: int, seed: int) -> list[Ids]:
        """Take some documents out, drawn with the seed: `count` in all, but at most every tenth of a file.

        Args:
            paths: the files, which give alike.
            count: documents wanted.
            longer_than: tokens; shorter documents stay, unless they begin with a prompt.
            seed: of the choice.

        Returns:
            Documents, with marks.

        Raises:
            InputError: no file has ten documents and a long one among them.
        """
        held: list[Document] = []
        for key, path in enumerate(paths):
            documents = self._read(path)
            long = [i for i, one in enumerate(documents) if one.ids is not None and is_long(one.ids, longer_than)]
            held += hold_back(documents, long, -(-count // len(paths)), (seed, key))
        if not held:
            raise InputError(
                "the training text has too few documents to hold some back: no file has ten, with one of more than "
                f"{longer_than} tokens; give more text, or held-out text with --valid NAME=FILE"
            )
        return [document.ids for document in held if document.ids is not None]

    def held_out(
        self, valid: dict[str, Path], paths: Sequence[Path], count: int, longer_than: int, seed: int
    ) -> dict[str, list[Ids]]:
        """Long documents of held-out files by name, `count` of each; without such files some of the training text.

        Args:
            valid: held-out files by name.
            paths, count, longer_than, seed: see `hold_back`.

        Returns:
            Documents, with marks.

        Raises:
            InputError: a file has none.
        """
        if not valid:
            return {"held_back": self.hold_back(paths, count, longer_than, seed)}
        found: dict[str, list[Ids]] = {}
        for name, path in valid.items():
            documents = (document.ids for document in self._read(path))
            found[name] = [ids for ids in documents if ids is not None and is_long(ids, longer_than)][:count]
            if not found[name]:
                raise InputError(
                    f"held-out file {path} has no document of more than {longer_than} tokens; "
                    "give longer texts with --valid, or none to have some of the training text held back"
                )
        return found

    def _read(self, path: Path) -> list[Document]:
        place = path.resolve()
        if place not in self._files:
            self._files[place] = _documents(path, self._tokenizer, self._vocab, self._marked)
        return self._files[place]


def read_counted(path: Path, tokenizer: Any, vocab: int) -> list[Ids]:
    """Documents of a file with marks, see `Library.documents`."""
    return Library(tokenizer, vocab, marked=True).documents(path)


def _documents(path: Path, tokenizer: Any, vocab: int, prompts: bool) -> list[Document]:
    """Documents of all records, texts in excerpts after the others; `prompts`: those of token ids are marked."""
    plain = ".txt" in path.suffixes[-2:]
    found, texts = list[Document](), list[str]()
    for record in read_records(path):
        if record.messages is not None:
            found.append(Document(encode_chat(tokenizer, record.messages), record.messages))
        elif record.tokens is not None:
            ids = marked(record, vocab) if prompts else token_ids(marked(record, vocab))
            begin = [] if ids[0] < 0 or ids[0] == tokenizer.eos_token_id else [tokenizer.eos_token_id]
            found.append(Document(np.concatenate([begin, ids]).astype(np.int64)))
        elif record.answer is not None:
            prompt = np.concatenate([[tokenizer.eos_token_id], encoded(tokenizer, record.text)]).astype(np.int64)
            found.append(Document(np.concatenate([~prompt, encoded(tokenizer, record.answer)])))
        else:
            texts += split(record.text) if plain else [record.text]
    return found + [Document(ids) for ids in encode_texts(texts, tokenizer)]


def encode_texts(texts: Sequence[str], tokenizer: Any) -> list[Ids]:
    """Token ids of each excerpt, led by the end token: it says "begin" to the next document and "stop" to the last."""
    parts = [part for text in texts for part in excerpts(text)]
    ids = tokenizer(parts, add_special_tokens=False, verbose=False)["input_ids"] if parts else []
    return [np.array([tokenizer.eos_token_id, *some], dtype=np.int64) for some in ids]


def marked(record: Record, vocab: int) -> Ids:
    """The tokens of a record that has some, those of the prompt marked.

    Raises:
        LoadError: the model does not know one of them.
    """
    ids = np.array(record.tokens, dtype=np.int64)
    if not 0 <= ids.min() <= ids.max() < vocab:
        raise LoadError(
            f"{record.place} holds token ids from {ids.min()} to {ids.max()}, the model knows {vocab} tokens; give "
            "text, or ids of this tokenizer"
        )
    ids[: record.asked] = ~ids[: record.asked]
    return ids


def token_ids(document: Ids) -> Ids:
    """The tokens of a document, those that do not count too."""
    return np.where(document < 0, ~document, document)


def is_long(ids: Ids, longer_than: int) -> bool:
    """Whether a document gives a held-out prompt: of more than so many tokens, or one of its own in front."""
    return len(ids) > longer_than or bool(ids[0] < 0)


def hold_back(documents: list[T], among: Sequence[int], count: int, seed: tuple[int, ...]) -> list[T]:
    """Take documents out of a list, drawn with the seed: `count`, but at most every tenth.

    Args:
        documents: lose them.
        among: places of those that may be taken.
        count: documents wanted.
        seed: of the choice.
    """
    most = min(count, len(documents) // 10, len(among))
    chosen = set(np.random.default_rng(seed).choice(among, most, replace=False).tolist())
    held = [document for index, document in enumerate(documents) if index in chosen]
    documents[:] = [document for index, document in enumerate(documents) if index not in chosen]
    return held

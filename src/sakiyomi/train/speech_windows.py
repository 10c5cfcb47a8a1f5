"""Windows of sounds with the transcripts of a speech model: what a draft of that model learns from.

The target transcribes the sounds as it does for users (``engine.transcription``). A window's file holds the encoder's
output, the decoder's tokens and the target's likeliest tokens at each of them.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import Tensor

from sakiyomi.core.audio import Audio
from sakiyomi.core.checkpoint import read_json
from sakiyomi.core.errors import InputError, LoadError, SakiyomiError
from sakiyomi.core.files import partial, whole_file
from sakiyomi.core.progress import progress
from sakiyomi.core.sound_files import SPEECH_RATE
from sakiyomi.core.transcripts import TranscriptionParams
from sakiyomi.engine.transcription import SoundInWork, Transcriber
from sakiyomi.train.checkpoint import ADVICE, writing
from sakiyomi.train.data import TextSpec
from sakiyomi.train.rows import Mixture, Shuffled

ENDINGS = (
    *(".wav", ".flac", ".mp3", ".m4a", ".m4b", ".aac", ".ogg", ".oga", ".opus", ".webm", ".wma", ".amr", ".au"),
    *(".aif", ".aiff", ".avi", ".mkv", ".mov", ".mp4"),
)
"""Of the files that are read of a folder."""
STRETCH = 4
"""Windows of a stretch: so many are transcribed one after the other, with the text before each as its prompt."""
TOGETHER = 8
"""Stretches that are transcribed in one batch."""
WIDTH_STEP = 32
"""Rows are padded to a multiple of this, see ``Padding``."""
TIMED = TranscriptionParams(temperatures=(0.0,))
UNTIMED = TranscriptionParams(temperatures=(0.0,), timestamps="none")


def sound_files(given: Sequence[str]) -> list[Path]:
    """The sound files among files and folders, those of a folder in the order of their names.

    Raises:
        LoadError: one is not there.
        InputError: a folder has none.
    """
    found: list[Path] = []
    for path in map(Path, given):
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in ENDINGS)
            if not inside:
                raise InputError(f"the folder {str(path)!r} holds no sound file ({' '.join(ENDINGS)})")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise LoadError(f"there is no file or folder {str(path)!r}; check the path (relative to {Path.cwd()})")
    return found


def stretches(files: Iterable[Path], seconds: float, note: Callable[[str], None]) -> Iterator[Audio]:
    """The sounds, cut at silences where they are longer than some windows.

    Args:
        files: those that cannot be read are left out, with a note.
        seconds: of a window.
        note: prints a line.
    """
    for file in files:
        try:
            sound = Audio.read(file, sampling_rate=SPEECH_RATE)
        except SakiyomiError as error:
            note(f"left out: {error.message}")
        else:
            yield from sound.split(STRETCH * seconds, at_silences=True)


@dataclass(frozen=True)
class Heard:
    """What the target says of a window.

    Attributes:
        features: of the sound, (1, mels, frames).
        tokens: of the decoder: those that it began with, then its own.
        begin: number of the former.
    """

    features: Tensor
    tokens: list[int]
    begin: int


def transcribe(transcriber: Transcriber, engine: Any, sounds: Sequence[Audio], *, timed: bool) -> Iterator[Heard]:
    """Transcribe stretches greedily, in one batch.

    Args:
        transcriber: of the target.
        engine: that runs it.
        sounds: the stretches.
        timed: with timestamps and with the text before as prompt; otherwise each window for itself.
    """
    window = window_seconds(transcriber)
    parts = sounds if timed else [part for sound in sounds for part in sound.split(window, at_silences=True)]
    begun = [SoundInWork(engine, transcriber, part, TIMED if timed else UNTIMED) for part in parts]
    while waiting := [each for each in begun if not each.over]:
        requests = [each.submit() for each in waiting]
        for each, request, out in zip(waiting, requests, engine.complete(requests), strict=True):
            each.take(out)
            source, begin = request.context.source, request.prompt_tokens
            assert source is not None, "it has an encoder"
            yield Heard(source.inputs["input_features"], request.context.tokens[:begin] + out.token_ids, begin)


def window_seconds(transcriber: Transcriber) -> float:
    """Seconds of sound that the encoder takes."""
    extractor = transcriber.inputs.extractor
    return float(transcriber.inputs.frames * extractor.hop_length / extractor.sampling_rate)


# ---------------------------------------------------------------- files of windows


@dataclass(frozen=True)
class Labels:
    """What is kept of a window.

    Args:
        model: the target, a transformers model.
        top: likeliest tokens of a place.
        greedy_weight: weight of the transcript's own token beside the target's distribution.
        longest: most tokens of a transcript.
        passes: "bf16", or "no" for float32.
    """

    model: Any
    top: int
    greedy_weight: float
    longest: int
    passes: str

    @torch.no_grad()
    def of(self, heard: Heard) -> dict[str, Tensor]:
        """The file of a window.

        Returns:
            ``encoded`` (places, hidden) float16, the encoder's output; ``tokens`` (n,) int64, of the decoder;
            ``ids`` (m, K) int32 and ``wanted`` (m, K) float16: tokens and probabilities that the draft learns for each
            of the last m tokens. The probabilities are the target's, scaled to a sum of 1, and mixed with 1 for the
            token of the transcript, in the proportion 1 to ``greedy_weight``.
        """
        model, tokens = self.model, torch.tensor(heard.tokens[: heard.begin + self.longest])
        device = model.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.passes == "bf16"):
            encoded = model.get_encoder()(heard.features.to(device, model.dtype)).last_hidden_state
            hidden = model.get_decoder()(
                input_ids=tokens[None, :-1].to(device), encoder_hidden_states=encoded, use_cache=False
            ).last_hidden_state
            logits = model.get_output_embeddings()(hidden[0, heard.begin - 1 :]).float().cpu()
        probs, ids = logits.softmax(-1).topk(min(self.top, logits.shape[-1]))
        own = tokens[heard.begin :, None]
        # A rule of the model's, as for timestamps, may have forced a token that is not among the likeliest.
        missing = ~(ids == own).any(1)
        ids[missing, -1], probs[missing, -1] = own[missing, 0], 0.0
        wanted = probs / probs.sum(1, keepdim=True) + self.greedy_weight * (ids == own)
        return {
            "encoded": encoded[0].to("cpu", torch.float16).contiguous(),
            "tokens": tokens,
            "ids": ids.int(),
            "wanted": (wanted / (1 + self.greedy_weight)).half(),
        }


TRAIN, HELD_OUT = "train", "held_out"
"""Names of sets of windows; held-out files that are given have names of their own."""
EVERY = 8
"""Of the stretches, one in so many is held out."""


def in_sets(valid: Mapping[str, Iterable[Audio]], sounds: Iterable[Audio]) -> Iterator[tuple[str, Audio]]:
    """Stretches with the names of their sets, held-out files first.

    Args:
        valid: stretches of held-out files, by name; without any, every eighth one of the others is held out, from the
            second on.
        sounds: the others.
    """
    for name, some in valid.items():
        yield from ((name, sound) for sound in some)
    for number, sound in enumerate(sounds):
        yield (HELD_OUT if not valid and number % EVERY == 1 else TRAIN), sound


class WindowFolder:
    """Files of windows, in a folder for each set, and in it one for each batch; they stay for a later run.

    Args:
        folder: of the sets.
        limit_bytes: of the files.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self._left = limit_bytes - sum(path.stat().st_size for some in self.sets().values() for path in some)

    def begin(self, origin: Mapping[str, Any]) -> None:
        """Prepare the folder; the batches of an interrupted run stay.

        Args:
            origin: what the windows are made of, and how.

        Raises:
            InputError: the windows that are there are of another origin.
        """
        record, own = self.folder / "origin.json", json.loads(json.dumps(origin))
        if self.sets():
            before = read_json(record) if record.exists() else {}
            if other := [name for name in own if own[name] != before.get(name)]:
                raise InputError(
                    f"{self.folder} holds windows that an earlier run made with another {other[0]}; delete it to have "
                    "others made, or choose another --out"
                )
        with whole_file(record, ADVICE) as fresh:
            fresh.write_text(json.dumps(own) + "\n", encoding="utf-8")
        for left in self.folder.glob("*/.*"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)

    def sets(self) -> dict[str, list[Path]]:
        """Files of each set, in the order of their batches."""
        found: dict[str, list[Path]] = {}
        for path in sorted(self.folder.glob("*/[!.]*/*.safetensors")):
            found.setdefault(path.parent.parent.name, []).append(path)
        return found

    def count(self, name: str) -> int:
        """Windows of a set."""
        return len(self.sets().get(name, ()))

    def has(self, name: str, batch: str) -> bool:
        """Whether a batch is there."""
        return (self.folder / name / batch).exists()

    def add(self, name: str, batch: str, windows: Iterable[dict[str, Tensor]]) -> bool:
        """Write the windows of a batch. An error or Ctrl-C leaves none of them.

        Returns:
            False where there was no room for all.
        """
        folder = partial(self.folder / name / batch)
        try:
            for number, tensors in enumerate(windows):
                path = folder / f"{number:04}.safetensors"
                with writing(self.folder):
                    folder.mkdir(parents=True, exist_ok=True)
                    save_file(tensors, path)
                self._left -= path.stat().st_size
                if self._left < 0:
                    path.unlink()
                    break
            if any(folder.glob("*")):
                folder.replace(self.folder / name / batch)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return self._left >= 0


@dataclass(frozen=True)
class Labelling:
    """Has the target transcribe stretches, and keeps their windows.

    Args:
        transcriber, engine: that transcribe.
        labels: what is kept.
        folder: where.
        minutes: most time for all of it.
        held_out: windows of a held-out set that are enough.
    """

    transcriber: Transcriber
    engine: Any
    labels: Labels
    folder: WindowFolder
    minutes: float
    held_out: int

    def run(self, sounds: Iterable[tuple[str, Audio]]) -> str:
        """Transcribe until the sounds, the time or the room on the disk come to their end; says which.

        Batches that the folder has are not made again.

        Args:
            sounds: stretches with the names of their sets. Of each set, every second one is transcribed with
                timestamps.
        """
        began, numbers, waiting = time.monotonic(), Counter[str](), defaultdict[tuple[str, str], list[Audio]](list)
        ended = ""
        with progress("the target transcribes the sounds") as status:
            for name, sound in sounds:
                number = numbers[name]
                numbers[name] += 1
                key = name, f"{number // (2 * TOGETHER):05}-{(TIMED, UNTIMED)[number % 2].timestamps}"
                enough = name != TRAIN and self.folder.count(name) >= self.held_out
                if enough or self.folder.has(*key):
                    continue
                waiting[key].append(sound)
                if len(waiting[key]) == TOGETHER and not self._keep(*key, waiting.pop(key)):
                    ended = "--cache-gib is used up"
                elif time.monotonic() - began > 60 * self.minutes:
                    ended = "--label-minutes are over"
                if ended:
                    break
                status.update(f"the target transcribes the sounds: {sum(numbers.values())} parts")
            for key, some in waiting.items():
                if not ended or not self.folder.count(key[0]):  # no set stays empty
                    self._keep(*key, some)
        return ended or "all sounds are read"

    def _keep(self, name: str, batch: str, sounds: Sequence[Audio]) -> bool:
        """Transcribe stretches of a set; False where there is no room."""
        timed = not batch.endswith(UNTIMED.timestamps)
        heard = transcribe(self.transcriber, self.engine, sounds, timed=timed)
        return self.folder.add(name, batch, (self.labels.of(each) for each in heard))


# ---------------------------------------------------------------- batches


@dataclass(frozen=True)
class Padding:
    """How rows of a batch get one length, of few lengths in all: each is compiled for itself.

    Attributes:
        token: of the places behind a transcript.
        positions: of the decoder.
    """

    token: int
    positions: int

    def width(self, longest: int) -> int:
        """Places of the rows of a batch."""
        return min(-(-longest // WIDTH_STEP) * WIDTH_STEP, self.positions)


class WindowRows(Mixture):
    """Batches of windows, read from their files when they are needed.

    Args:
        windows: files to learn from.
        pad: see ``Padding``.
        seed: of their order.
    """

    SOURCE = TextSpec(Path("windows"), 1.0, 1.0)

    def __init__(self, windows: Sequence[Path], pad: Padding, seed: int) -> None:
        super().__init__([Shuffled(windows, seed=seed, key=0)], [self.SOURCE], seed)
        self._pad = pad

    def joined(self, rows: list[Any]) -> Any:
        """See ``Mixture`` and ``batch_of``."""
        return batch_of(rows, self._pad)

    def part(self, batch: Any, rows: slice) -> Any:
        """See ``Mixture``; there is one process."""
        return batch


def batch_of(files: Sequence[Path], pad: Padding) -> dict[str, Any]:
    """Windows as a batch of arrays.

    Args:
        files: of the windows.
        pad: see ``Padding``.

    Returns:
        ``encoded`` (B, places, hidden); ``inputs`` (B, T), token ids that the decoder reads; ``known`` (B, T), True
        where the next token is learnt; ``labels`` (N,), these tokens, one window behind the other; ``ids`` and
        ``wanted`` (N, K), see ``Labels``.
    """
    windows = [load_file(file) for file in files]
    width = pad.width(max(len(window["tokens"]) - 1 for window in windows))
    inputs, known = np.full((len(windows), width), pad.token, np.int64), np.zeros((len(windows), width), np.bool_)
    for row, window in enumerate(windows):
        last = len(window["tokens"]) - 1
        inputs[row, :last], known[row, last - len(window["ids"]) : last] = window["tokens"][:-1], True
    return {
        "encoded": np.stack([window["encoded"] for window in windows]),
        "inputs": inputs,
        "known": known,
        "labels": np.concatenate([window["tokens"][-len(window["ids"]) :] for window in windows]),
        "ids": np.concatenate([window["ids"] for window in windows]).astype(np.int64),
        "wanted": np.concatenate([window["wanted"] for window in windows]),
    }

"""``sakiyomi transcribe``: the text of sound files, by a speech model."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from sakiyomi.cli.common import JsonOption, load, samples_of
from sakiyomi.cli.output import progress, stdout, write
from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.config import LLMConfig


@dataclass(frozen=True)
class TranscribeOptions:
    """What to transcribe.

    Attributes:
        files: WAV files.
        language: spoken language, by name or code (en); the model detects it if it is not given.
        task: transcribe, or translate (into English); by default the model's own.
    """

    files: tuple[str, ...] = field(default=(), metadata={"argument": "FILE"})
    language: str | None = None
    task: str | None = None


def transcribe(options: TranscribeOptions, model: LLMConfig, params: SamplingParams, output: JsonOption) -> None:
    """Transcribe sound files.

    The target is a speech model (whisper); the output is its own, and a smaller model as draft makes it faster. Files
    longer than the model's window are refused: split them.

    Example: sakiyomi transcribe talk.wav --model whisper-tiny
    """
    if not options.files:
        raise InputError("no file was given; expected one or more, for instance: sakiyomi transcribe speech.wav")
    from sakiyomi.core.audio import Audio

    # Before the model, which takes longer.
    sounds = [Audio.read(name, language=options.language, task=options.task) for name in options.files]
    llm = load(model)
    with progress(f"transcribing {len(sounds)} files"):
        results = [samples_of(result) for result in llm.generate(sounds, params)]
    files = [
        {"file": name, "seconds": sound.seconds, "generations": [sample.to_dict() for sample in samples]}
        for name, sound, samples in zip(options.files, sounds, results, strict=True)
    ]
    output.emit({"target": model.target, "draft": model.draft, "files": files})
    if not output.json:
        for sample in itertools.chain(*results):
            write(stdout(), sample.text.strip(), end="\n")

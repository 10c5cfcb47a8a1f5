"""``sakiyomi transcribe``: what is said in sound files, by a speech model."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field

import typer

from sakiyomi.cli.common import JsonOption, command, load, samples_of
from sakiyomi.cli.output import progress, stdout, write
from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.config import LLMConfig


@dataclass(frozen=True)
class TranscribeOptions:
    """What to listen to.

    Attributes:
        files: WAV files.
        language: what is spoken, by name or code (en); the model hears which if not given.
        task: transcribe or translate (into English); the model's own choice if not given.
    """

    files: tuple[str, ...] = field(default=(), metadata={"argument": "FILE"})
    language: str | None = None
    task: str | None = None


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        "transcribe",
        TranscribeOptions,
        LLMConfig,
        SamplingParams,
        JsonOption,
        help="Write down what is said in sound files.\n\nThe target is a speech model (whisper); the text is its own, "
        "written faster with a smaller one as draft. Longer sounds than it hears at once are refused: cut them.",
        defaults={"target": dataclasses.MISSING},  # none that is embedded hears
    )(transcribe)


def transcribe(options: TranscribeOptions, model: LLMConfig, params: SamplingParams, output: JsonOption) -> None:
    """Run the command."""
    if not options.files:
        raise InputError("no file was given; expected one or more, for instance: sakiyomi transcribe speech.wav")
    from sakiyomi.core.audio import Audio

    # Before the model, which takes longer.
    sounds = [Audio.read(name, language=options.language, task=options.task) for name in options.files]
    llm = load(model)
    with progress(f"listening to {len(sounds)} files"):
        results = [samples_of(result) for result in llm.generate(sounds, params)]
    files = [
        {"file": name, "seconds": sound.seconds, "generations": [sample.to_dict() for sample in samples]}
        for name, sound, samples in zip(options.files, sounds, results, strict=True)
    ]
    output.emit({"target": model.target, "draft": model.draft, "files": files})
    if not output.json:
        for sample in itertools.chain(*results):
            write(stdout(), sample.text.strip(), end="\n")

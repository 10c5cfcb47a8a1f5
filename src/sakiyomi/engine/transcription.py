"""Transcription of sounds of any length: windows of 30 seconds, timestamps, and further tries where a text is poor.

As transformers' ``WhisperForConditionalGeneration.generate`` does it (Radford et al. 2022, arXiv 2212.04356, section
4.5), with the windows of several sounds in one batch, and drafts.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sakiyomi.cache.cross_attention import Source
from sakiyomi.core.audio import Audio
from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.core.outputs import Generation
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.transcripts import Segment, Transcript, TranscriptionParams, Word
from sakiyomi.engine.encoder_inputs import SourceInputProcessor
from sakiyomi.engine.inputs import InputProcessor, TokenizedPrompt
from sakiyomi.engine.pace import BRIEF
from sakiyomi.engine.request import Request
from sakiyomi.engine.sound_features import features_of
from sakiyomi.engine.transcription_rules import TimestampRules
from sakiyomi.engine.transcription_windows import FRAMES, STEP, compression_ratio, cut
from sakiyomi.engine.transcription_words import token_steps, words_of
from sakiyomi.model_executor.encoder_decoder.alignment import cross_weights
from sakiyomi.model_executor.runner import first_logits

if TYPE_CHECKING:
    from sakiyomi.engine.engine import Engine

_COOL = 0.5
"""A text of this temperature or more is no prompt for the next window."""


class SpeechModel(Protocol):
    """What is used of an ``LLM``."""

    name: str
    engine: Engine
    inputs: InputProcessor


class Transcriber:
    """Transcribes sounds with a speech model.

    Args:
        llm: an ``LLM`` with a speech model (whisper) as its target.

    Raises:
        UnsupportedError: its target is another model, or has no feature extractor.
    """

    def __init__(self, llm: SpeechModel) -> None:
        self._engine, self.target = llm.engine, llm.engine.target
        inputs = llm.inputs
        if not isinstance(inputs, SourceInputProcessor) or not inputs.takes_audio:
            raise UnsupportedError(f"{llm.name!r} reads text; load a speech model (whisper) to transcribe sounds")
        if inputs.extractor is None:
            raise UnsupportedError(
                f"{llm.name!r} has no feature extractor (preprocessor_config.json), so that nothing can be made of a "
                "sound; copy the file from the original model"
            )
        self.inputs, self.max_context = inputs, llm.engine.max_context

    def transcribe(
        self, sound: Audio | str | os.PathLike[str], params: TranscriptionParams | None = None
    ) -> Transcript:
        """What is said in a sound.

        Args:
            sound: of any length, or the path of a file (``Audio.read``).
            params: None for the defaults.

        Raises:
            LoadError: the file cannot be read.
            InputError: the model does not know the language or the task.
        """
        return self.transcribe_all([sound], params)[0]

    def transcribe_all(
        self, sounds: Sequence[Audio | str | os.PathLike[str]], params: TranscriptionParams | None = None
    ) -> list[Transcript]:
        """What is said in several sounds, whose windows share passes; arguments and errors as of ``transcribe``."""
        begun = [self.begin(sound, params) for sound in sounds]
        found: list[list[Segment]] = [[] for _ in begun]
        running: dict[int, Request] = {}
        waiting = iter(range(len(begun)))
        try:
            while True:
                for number in itertools.islice(waiting, self.target.cache.max_slots - len(running)):
                    running[number] = begun[number].submit()
                if not running:
                    return [each.transcript(parts) for each, parts in zip(begun, found, strict=True)]
                self._engine.step(BRIEF)
                for number in [number for number, request in running.items() if request.over]:
                    found[number] += begun[number].take(running.pop(number).generation())
                    if not begun[number].over:
                        running[number] = begun[number].submit()
        finally:
            for request in running.values():
                self._engine.remove(request.id)

    def segments(
        self, sound: Audio | str | os.PathLike[str], params: TranscriptionParams | None = None
    ) -> Iterator[Segment]:
        """The segments of a sound, each as soon as its window is read; arguments and errors as of ``transcribe``."""
        for _, found in self.begin(sound, params).tries():
            yield from found

    def begin(self, sound: Audio | str | os.PathLike[str], params: TranscriptionParams | None = None) -> SoundInWork:
        """A sound of which no window is read yet; arguments and errors as of ``transcribe``."""
        if isinstance(sound, str | os.PathLike):
            sound = Audio.read(sound, sampling_rate=int(self.inputs.extractor.sampling_rate))
        if not isinstance(sound, Audio):
            raise InputError(f"the sound is {sound!r:.60}; expected a sakiyomi.Audio, or the path of a file")
        return SoundInWork(self._engine, self, sound, params or TranscriptionParams())


class SoundInWork:
    """A sound that is transcribed window by window: ``submit``, wait for the request, ``take``, until it is over.

    Attributes:
        language: code; None: the model knows one language, or will detect it with the first window.
        seconds: length of the sound.
        over: all of it is read.
    """

    def __init__(self, engine: Engine, transcriber: Transcriber, sound: Audio, params: TranscriptionParams) -> None:
        self._engine, self._inputs, self._target = engine, transcriber.inputs, transcriber.target
        self._max_context, self._params, self.seconds = transcriber.max_context, params, sound.seconds
        settings = self._inputs.settings
        self._window = int(self._inputs.frames)
        self._features, self._end = features_of(sound, self._inputs.extractor, self._window)
        self._times = params.timestamps != "none" or self._features.shape[-1] > self._window
        silent = getattr(settings, "no_timestamps_token_id", None)
        if silent is None and self._times:
            raise UnsupportedError(
                "the model's generation_config.json has no no_timestamps_token_id, so that it knows no timestamps; "
                "copy the file from the original model, or give timestamps='none' and at most 30 seconds"
            )
        if params.timestamps == "word" and not getattr(settings, "alignment_heads", None):
            raise UnsupportedError(
                "the model's generation_config.json has no alignment_heads, by which words are timed; copy the file "
                "from the original model, or give timestamps='segment'"
            )
        self._silent = self._target.vocab_size if silent is None else int(silent)
        self._hidden = frozenset(self._inputs.tokenizer.all_special_ids)
        self._seek, self._tries, self._windows = 0, 0, 0
        self._conditioned = params.condition_on_previous
        self._prompt = _prompt_tokens(params.prompt, self._inputs.tokenizer, self._hidden)
        self._before = list(self._prompt)
        self._source = self._make_source()
        self.task = sound.task or params.task
        self.language: str | None = None
        self._given = self._checked(sound.language or params.language)
        # A language is detected by a pass of the model: with the first window.
        detected = self._given is None and bool(self._inputs.languages)
        self._opening: list[int] | None = None if detected else self._open()
        self._no_speech = 0.0
        self._request: TokenizedPrompt | None = None

    @property
    def over(self) -> bool:
        """Whether all of the sound is read."""
        return self._seek >= self._end

    @property
    def position(self) -> float:
        """Seconds of the sound that are read."""
        return self._seconds(self._seek, 0)

    def tries(self) -> Iterator[tuple[Generation, list[Segment]]]:
        """Read the sound to its end: the output of each try of a window, and the segments that it brings."""
        while not self.over:
            (out,) = self._engine.complete([self.submit()])
            yield out, self.take(out)

    def submit(self) -> Request:
        """Queue the request for the next window, or for another try of the same."""
        if self._opening is None:
            self._opening = self._open()
        if self._tries == 0:
            self._source = self._source if self._seek == 0 else self._make_source()
            self._request = self._make_request()
        asked = self._request
        assert asked is not None, "made in the first try"
        params = SamplingParams(
            max_new_tokens=asked.params.max_new_tokens,
            logits_processors=asked.params.logits_processors,
            temperature=self._params.temperatures[self._tries],
            seed=self._params.seed,
            logprobs=0,
        )
        prompt = TokenizedPrompt([*asked.tokens], params, asked.source)  # the request appends to its tokens
        return self._engine.submit(prompt, key=(self._windows, self._tries), live=False)

    def take(self, out: Generation) -> list[Segment]:
        """The segments that a window's text brings; none if it is tried again, or if nothing is said in it."""
        params, frames = self._params, min(self._features.shape[-1] - self._seek, self._window)
        tokens, temperature = list(out.token_ids), params.temperatures[self._tries]
        logprob = sum(entry.logprob or 0.0 for entry in out.trace) / max(1, len(out.trace))
        if tokens and tokens[-1] in self._engine.stop_ids:
            tokens.pop()
        ratio = compression_ratio(self._text(tokens))
        unlikely = params.logprob_threshold is not None and logprob < params.logprob_threshold
        repeats = params.compression_ratio_threshold is not None and ratio > params.compression_ratio_threshold
        silent = params.no_speech_threshold is not None and self._no_speech > params.no_speech_threshold
        silent = silent and (unlikely or params.logprob_threshold is None)
        if (unlikely or repeats) and not silent and self._tries + 1 < len(params.temperatures):
            self._tries += 1
            return []
        offset, self._tries, self._windows = self._seek, 0, self._windows + 1
        self._conditioned = params.condition_on_previous and temperature < _COOL
        if silent:
            self._seek += frames
            return []
        parts, step = cut(tokens, self._silent + 1, frames)
        self._seek += step
        places = self._align(tokens, offset) if params.timestamps == "word" else []
        found = []
        for part in parts:
            self._before += part.tokens
            if text := self._text(part.tokens):
                start, end = (self._seconds(offset, at) for at in (part.start, part.end))
                own = [i for i, token in enumerate(part.tokens, part.place) if self._is_text(token)]
                said = tuple(tokens[i] for i in own)
                words: tuple[Word, ...] = ()
                if places:
                    chances = [math.exp(out.trace[i].logprob or 0.0) for i in own]
                    starts = [self._seconds(offset, places[i]) for i in own]
                    words = words_of(said, starts, end, chances, self._inputs.tokenizer, self._language_name)
                judged = temperature, logprob, ratio, self._no_speech
                found.append(Segment(start, end, text, said, *judged, words, offset))
        return found

    def _align(self, tokens: Sequence[int], offset: int) -> list[int]:
        """The place of the window where each token begins."""
        if not tokens:
            return []
        asked = self._request
        assert asked is not None, "its text is known"
        heads = self._inputs.settings.alignment_heads
        weights = cross_weights(self._target, self._source, [*asked.tokens, *tokens], heads)
        places = max(1, min(self._end - offset, self._window) // FRAMES)
        return token_steps(weights[:, len(asked.tokens) :, :places])

    def _seconds(self, offset: int, at: int) -> float:
        """Seconds from the sound's beginning to a step of the window that begins at this frame."""
        return min(self.seconds, (offset / FRAMES + at) * STEP)

    @property
    def _language_name(self) -> str:
        from transformers.models.whisper.tokenization_whisper import LANGUAGES

        return "english" if self.task == "translate" else LANGUAGES.get(self.language or "en", "english")

    def transcript(self, segments: Sequence[Segment]) -> Transcript:
        """The whole, when it is over."""
        return Transcript(tuple(segments), self.seconds, self.language, self.task)

    # ------------------------------------------------------------ the request of a window

    def _make_source(self) -> Source:
        features = self._features[..., self._seek : self._seek + self._window]
        padded = torch.nn.functional.pad(features, (0, self._window - features.shape[-1]))
        return Source({"input_features": padded}, self._window // FRAMES)

    def _checked(self, language: str | None) -> str | None:
        """The language that the model is told; None if it is told none."""
        if self._inputs.multilingual:
            return language
        if self.task != "transcribe" or (language or "en").lower() not in ("en", "english"):
            raise InputError(
                f"language is {language!r} and task is {self.task!r}, and the model transcribes one language; leave "
                "both out, or load a multilingual model"
            )
        return None

    def _open(self) -> list[int]:
        """The tokens that each window's text begins with; says the language."""
        inputs, task = self._inputs, self.task
        told = inputs.multilingual and (task != "transcribe" or getattr(inputs.settings, "task_to_id", None))
        tokens = inputs.opening(self._source, self._given, task if told else None, timestamps=self._times)
        codes = {token: name.strip("<|>") for name, token in inputs.languages.items()}
        self.language = next((codes[token] for token in tokens if token in codes), None)
        return tokens

    def _make_request(self) -> TokenizedPrompt:
        settings, context = self._inputs.settings, self._max_context
        most = context // 2 - 1
        before = self._before if self._conditioned else self._prompt
        marker = getattr(settings, "prev_sot_token_id", None)
        previous = [marker, *before[-most:]] if before and marker is not None else []
        assert self._opening is not None, "the first window was submitted"
        tokens = previous + self._opening
        begin, length = len(tokens), settings.max_length or context
        last = min(context, length + min(most, begin))
        processors: list[Any] = [*self._inputs.processors(begin, last, None, no_end=False)]
        if self._times:
            end = settings.eos_token_id
            first = getattr(settings, "max_initial_timestamp_index", None)
            processors.append(TimestampRules(begin, self._silent, end[0] if isinstance(end, list) else end, first))
        if self._silent <= self._target.vocab_size - 1:
            chances = first_logits(self._target, self._source, tokens[: len(previous) + 1]).float().softmax(-1)
            self._no_speech = float(chances[self._silent - 1])
        params = SamplingParams(max_new_tokens=last - begin, logits_processors=processors)
        return TokenizedPrompt(tokens, params, self._source)

    # ------------------------------------------------------------ tokens and text

    def _is_text(self, token: int) -> bool:
        return token <= self._silent and token not in self._hidden

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self._inputs.tokenizer.decode([token for token in tokens if self._is_text(token)])
        return text


def _prompt_tokens(prompt: str | None, tokenizer: Any, special: frozenset[int]) -> list[int]:
    """Tokens of the text that is taken for what was said before.

    Raises:
        InputError: it holds special tokens.
    """
    if not prompt or not prompt.strip():
        return []
    tokens: list[int] = list(tokenizer(f" {prompt.strip()}", add_special_tokens=False)["input_ids"])
    if wrong := special.intersection(tokens):
        raise InputError(
            f"prompt has the special token {tokenizer.convert_ids_to_tokens(min(wrong))!r} in it; leave it out"
        )
    return tokens

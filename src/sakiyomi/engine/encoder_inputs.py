"""Prompts of encoder-decoder models: a source for the encoder, and the first tokens of the decoder."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sakiyomi.cache.cross_attention import Source
from sakiyomi.core.audio import Audio
from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.inputs import TokenizedPrompt, prompt_tokens, with_ids
from sakiyomi.engine.sound_features import features_of
from sakiyomi.model_executor.encoder_decoder.families import Family, family_of
from sakiyomi.model_executor.loading import Loaded
from sakiyomi.model_executor.runner import ModelRunner, first_logits
from sakiyomi.sampling.suppressed import lighter

if TYPE_CHECKING:
    from transformers import LogitsProcessor


class SourceInputProcessor:
    """Makes sources from texts and token ids, or from sounds and their features, as the encoder takes them.

    Follows the model's generation settings as transformers' ``generate`` does: the first tokens of the decoder, and
    processors for its logits, which come before those of the user.

    Args:
        loaded: the model with its settings, its tokenizer and, of a speech model, its feature extractor; without one,
            only features can be given.
        target: the model as it runs; it detects the language.
        max_context: most tokens of the decoder.

    Attributes:
        settings: the model's generation settings.
        tokenizer, extractor: as loaded.
        takes_audio: it is a speech model.
        frames: of the features that the encoder takes; 0: it takes none.
        languages: the token of each language that a speech model knows; it detects which one is spoken.
        multilingual: a language and a task can be given.
    """

    def __init__(self, loaded: Loaded, target: ModelRunner, max_context: int) -> None:
        self._model, self._config = loaded.model, loaded.model.config
        self.settings = copy.deepcopy(loaded.model.generation_config)
        self._family: Family = family_of(self._config)
        self.takes_audio = self._family.takes_audio
        self._limit = self._family.source_positions(self._config)
        self.frames = 2 * (self._limit or 0) if self.takes_audio else 0  # the second convolution halves them
        self.tokenizer, self.extractor = loaded.tokenizer, loaded.extractor
        self._target, self._max_context = target, max_context
        self._last: tuple[Any, Source] | None = None
        self._begin = self._start_token()
        self.languages: dict[str, int] = getattr(self.settings, "lang_to_id", None) or {}
        self.multilingual = bool(self.languages) and getattr(self.settings, "is_multilingual", True) is not False

    def __call__(self, prompt: Any, params: SamplingParams) -> TokenizedPrompt:
        """See ``InputProcessor``."""
        source = self._source(prompt)
        tokens = [self._begin]
        if self.takes_audio:  # a tensor of features has neither
            tokens = self.opening(source, getattr(prompt, "language", None), getattr(prompt, "task", None))
        if len(tokens) >= self._max_context:
            raise InputError(
                f"the decoder begins with {len(tokens)} tokens, and its context holds {self._max_context} with at "
                "least one new one; raise max_context"
            )
        last = min(len(tokens) + params.max_new_tokens, self._max_context)
        processors = self.processors(len(tokens), last, source.inputs.get("input_ids"), no_end=params.ignore_eos)
        params = with_ids(params, self.tokenizer)
        params = replace(params, logits_processors=(*processors, *params.logits_processors))
        return TokenizedPrompt(tokens, params, source)

    def processors(self, begin: int, last: int, source: Tensor | None, *, no_end: bool) -> list[LogitsProcessor]:
        """Those that transformers' ``generate`` makes of the generation settings, without sampling and guidance.

        Args:
            begin: number of tokens that the decoder begins with.
            last: most tokens of the decoder, those included.
            source: (1, n) the encoder's tokens; None: it has none.
            no_end: end tokens do not end the text, so that none is forced or suppressed.
        """
        settings, end = copy.copy(self.settings), self.settings.eos_token_id
        left_out = ["guidance_scale", "watermarking_config", "renormalize_logits"]
        if source is None:
            left_out += ["encoder_repetition_penalty", "encoder_no_repeat_ngram_size"]
        if no_end:
            left_out += ["min_length", "min_new_tokens", "forced_eos_token_id"]
        if end is None:
            left_out.append("exponential_decay_length_penalty")
        else:
            end = torch.tensor(end if isinstance(end, list) else [end])
        # Not by `update`, which would warn of settings that go together in sampling or beam search only.
        vars(settings).update(dict.fromkeys(left_out), do_sample=False, max_length=last, _eos_token_tensor=end)
        return [lighter(each) for each in self._model._get_logits_processor(settings, begin, source)]

    # ------------------------------------------------------------ sources

    def _source(self, prompt: Any) -> Source:
        # Samples of one prompt come in succession; they share the encoder's output.
        key = tuple(prompt) if isinstance(prompt, list) else prompt
        if self._last is not None:
            known, source = self._last
            if known is key or (isinstance(key, str | tuple) and type(known) is type(key) and known == key):
                return source
        source = self._sound(prompt) if self.takes_audio else self._text(prompt)
        self._last = (key, source)
        return source

    def _text(self, prompt: Any) -> Source:
        if isinstance(prompt, Audio) or (isinstance(prompt, Tensor) and prompt.is_floating_point()):
            raise InputError(
                f"the prompt is a sound, and the model ({self._config.model_type}) reads text; give a text, or a list "
                "of token ids, or load a speech model (whisper)"
            )
        tokens = prompt_tokens(prompt, self.tokenizer, int(self._config.vocab_size), 1 << 30)
        if self._limit is not None and len(tokens) > self._limit:
            raise InputError(
                f"the source has {len(tokens)} tokens, and the model's encoder takes {self._limit} at most; "
                "shorten it, or give its parts one by one"
            )
        return token_source(tokens, self._config, self._target.vocab_size)

    def _sound(self, prompt: Any) -> Source:
        mels, frames = int(self._config.num_mel_bins), self.frames
        if isinstance(prompt, Audio):
            features = self._features(prompt)
        elif isinstance(prompt, Tensor):
            features = prompt[None] if prompt.dim() == 2 else prompt
        else:
            raise InputError(
                f"the prompt is {prompt!r:.60}, and the model ({self._config.model_type}) is a speech model; give a "
                "sakiyomi.Audio (Audio.read('x.wav')) or a tensor of input features"
            )
        if tuple(features.shape) != (1, mels, frames) or not features.is_floating_point():
            raise InputError(
                f"the features have the shape {tuple(features.shape)} ({features.dtype}); the model's encoder takes "
                f"floats of ({mels}, {frames}): make them with its own feature extractor, or give a sakiyomi.Audio"
            )
        return Source({"input_features": features}, frames // 2)

    def _features(self, sound: Audio) -> Tensor:
        """Those of a sound that fits into the encoder's window."""
        if self.extractor is None:
            raise UnsupportedError(
                "the model has no feature extractor (preprocessor_config.json), so that nothing can be made of a "
                "sound; pass (model, processor), or a tensor of input features"
            )
        rate, most = int(self.extractor.sampling_rate), self.frames * int(self.extractor.hop_length)
        sound = sound.resampled(rate)
        if len(sound.samples) > most:
            raise InputError(
                f"the sound is {sound.seconds:.1f} s long, and the model's encoder takes {most / rate:g} s; give its "
                "parts one by one (Audio.split)"
            )
        return features_of(sound, self.extractor, self.frames)[0]

    # ------------------------------------------------------------ the decoder's first tokens

    def _start_token(self) -> int:
        for settings in (self.settings, self._config):
            for name in ("decoder_start_token_id", "bos_token_id"):
                token = getattr(settings, name, None)
                if token is not None:
                    return int(token[0]) if isinstance(token, list) else int(token)
        raise UnsupportedError(
            "the model does not say with which token its decoder begins; set decoder_start_token_id in its "
            "generation_config.json"
        )

    def opening(self, source: Source, language: str | None, task: str | None, *, timestamps: bool = False) -> list[int]:
        """The tokens for start, language, task and no timestamps, in the order of transformers' whisper.

        Args:
            source: the language is detected from, if it is not known.
            language: name or code; None: the model's setting, else the detected one.
            task: "transcribe" or "translate"; None: the model's setting.
            timestamps: may be written.

        Raises:
            InputError: the model does not know the language or the task.
        """
        settings, languages = self.settings, self.languages
        tasks: dict[str, int] = getattr(settings, "task_to_id", None) or {}
        if (language is not None or task is not None) and not self.multilingual:
            raise InputError(
                f"language is {language!r} and task is {task!r}, and the model knows one language and no tasks; leave "
                "both out"
            )
        language = language or getattr(settings, "language", None)
        task = task or getattr(settings, "task", None)
        tokens: list[int | None] = [self._begin]
        if language is None and task is None:
            forced = getattr(settings, "forced_decoder_ids", None) or getattr(self._config, "forced_decoder_ids", None)
            for place, (at, token) in enumerate(forced or (), start=1):
                if at != place:
                    raise UnsupportedError(
                        f"the model's forced_decoder_ids are {forced}; expected one for each place from 1 on"
                    )
                tokens.append(token)
        code: int | None = None
        if language is not None:
            code = _language(language, languages)
        elif languages and (len(tokens) < 2 or tokens[1] is None):
            logits = first_logits(self._target, source, [self._begin])
            known = sorted(languages.values())
            code = known[int(logits[known].argmax())]
        if code is not None:
            tokens[1:2] = [code]
        if task is not None:
            if task not in tasks:
                raise InputError(f"task is {task!r}; expected one of {', '.join(map(repr, tasks))}")
            tokens = [token for token in tokens if token not in tasks.values()] + [tasks[task]]
        elif language is not None and tasks and not any(token in tasks.values() for token in tokens):
            tokens.append(tasks["transcribe"])
        silent = getattr(settings, "no_timestamps_token_id", None)
        if silent is not None:
            tokens = [token for token in tokens if token != silent] + ([] if timestamps else [silent])
        return [token for token in tokens if token is not None]


def token_source(tokens: Sequence[int], config: Any, vocab_size: int) -> Source:
    """The source of an encoder that reads tokens.

    Args:
        tokens: of the source.
        config: of the model.
        vocab_size: width of its logits.
    """
    shared = int(config.vocab_size) == vocab_size and getattr(config, "share_encoder_decoder_embeddings", True)
    return Source({"input_ids": torch.tensor([list(tokens)])}, len(tokens), tuple(tokens) if shared else ())


def _language(language: str, known: dict[str, int]) -> int:
    word = language.lower()
    if (found := known.get(word, known.get(f"<|{word}|>"))) is not None:
        return found
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE  # its import takes 0.8 s

    if (found := known.get(f"<|{TO_LANGUAGE_CODE.get(word, word)}|>")) is not None:
        return found
    codes = ", ".join(sorted(name.strip("<|>") for name in known))
    raise InputError(f"language is {language!r}; the model knows {codes}")

"""Texts of a Whisper model on recordings, here and by transformers, in six settings; and the seconds that both take.

    python benchmarks/speech.py collect clips
    python benchmarks/speech.py compare clips --target whisper-base

`collect` needs apt-get, dpkg-deb and espeak-ng. The recordings are those of the Debian packages asterisk-core-sounds
(telephone announcements of people in English, Spanish, French, Italian and Russian) and pocketsphinx-testdata (people
who read, and commands); espeak-ng speaks in four languages, with noise added. `long.wav` has five minutes of them.

`compare` uses float32, where both compute the same: any difference of a text is an error of one of the two. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sakiyomi import LLM, Audio, TranscriptionParams

RATE, LONG = 16000, 300
VOICES = {"en": "en_US_f_Allison", "es": "es_MX_f_Allison", "fr": "fr_CA_f_June", "it": "it_IT_m_Carlo",
          "ru": "ru_RU_f_IvrvoiceRU"}  # fmt: skip
SOUNDS = ("demo-congrats", "demo-abouttotry", "priv-callee-options", "vm-options")
READ = ("librivox/*.wav", "cards/005.wav", "goforward.raw", "numbers.raw")
SPOKEN = {
    "en": "Good morning. The train to London leaves at half past nine from platform four. Please have your tickets "
    "ready, and do not leave your luggage alone.",
    "de": "Guten Morgen. Der Zug nach Hamburg fährt um halb zehn von Gleis vier ab. Bitte halten Sie Ihre Fahrkarten "
    "bereit, und lassen Sie Ihr Gepäck nicht allein.",
    "es": "Buenos días. El tren a Madrid sale a las nueve y media de la vía cuatro. Tengan preparados sus billetes.",
    "fr": "Bonjour. Le train pour Lyon part à neuf heures et demie de la voie quatre. Préparez vos billets.",
}
NOISE = 0.01
PROMPT = "Asterisk, a telephone exchange. Mr. Comedian Mail."


# ---------------------------------------------------------------- clips


def collect(folder: Path) -> None:
    """Write the clips: mono, 16 kHz, called after their language."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o777)  # apt-get downloads as another user
        packages = [f"asterisk-core-sounds-{language}-wav" for language in VOICES] + ["pocketsphinx-testdata"]
        subprocess.run(["apt-get", "download", "-qq", *packages], cwd=place, check=True)
        for package in place.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, place], check=True)
        for language, voice in VOICES.items():
            for sound in SOUNDS:
                path = place / "usr/share/asterisk/sounds" / voice / f"{sound}.wav"
                if path.exists():
                    _write(folder / f"{language}-{sound}.wav", Audio.read(path))
        for pattern in READ:
            for path in sorted((place / "usr/share/pocketsphinx/test/data").glob(pattern)):
                _write(folder / f"en-{path.stem}.wav", _raw(path) if path.suffix == ".raw" else Audio.read(path))
        generator = np.random.default_rng(0)
        for language, text in SPOKEN.items():
            path = place / "spoken.wav"
            subprocess.run(["espeak-ng", "-v", language, "-w", path, text], check=True)
            sound = Audio.read(path).resampled(RATE)
            noise = generator.normal(0, NOISE, len(sound.samples)).astype(np.float32)
            _write(folder / f"{language}-spoken.wav", replace(sound, samples=sound.samples + noise))
    parts = [Audio.read(path).samples for path in sorted(folder.glob("en-*.wav"))]
    rounds = -(-LONG * RATE // sum(map(len, parts)))
    _write(folder / "long.wav", Audio(np.concatenate(parts * rounds)[: LONG * RATE], RATE))


def _raw(path: Path) -> Audio:
    return Audio(np.fromfile(path, "<i2").astype(np.float32) / 2**15, RATE)


def _write(path: Path, sound: Audio) -> None:
    samples = np.clip(sound.resampled(RATE).samples, -1, 1)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes((samples * (2**15 - 1)).astype("<i2").tobytes())


# ---------------------------------------------------------------- settings


@dataclass(frozen=True)
class Setting:
    """How a clip is transcribed.

    Attributes:
        params: ours, without language.
        told: the language is given.
        long: of the long sound, else of the clips.
    """

    params: TranscriptionParams
    told: bool = True
    long: bool = False


PLAIN = TranscriptionParams(
    timestamps="none",
    temperatures=(0.0,),
    compression_ratio_threshold=None,
    logprob_threshold=None,
    no_speech_threshold=None,
    condition_on_previous=False,
)
SETTINGS = {
    "no timestamps": Setting(PLAIN),
    "timestamps": Setting(replace(PLAIN, timestamps="segment")),
    "language detected": Setting(PLAIN, told=False),
    "translated": Setting(replace(PLAIN, task="translate")),
    "prompt": Setting(replace(PLAIN, prompt=PROMPT)),
    "long": Setting(replace(PLAIN, timestamps="segment"), long=True),
    "long, conditioned": Setting(replace(PLAIN, timestamps="segment", condition_on_previous=True), long=True),
}


class Reference:
    """transformers' own ``generate``, greedily."""

    def __init__(self, target: str) -> None:
        from transformers import AutoProcessor, WhisperForConditionalGeneration

        self._model = WhisperForConditionalGeneration.from_pretrained(target, dtype=torch.float32)
        self._processor: Any = AutoProcessor.from_pretrained(target)
        self.multilingual = bool(self._model.generation_config.is_multilingual)

    def __call__(self, sound: Audio, params: TranscriptionParams) -> str:
        """The text of a sound."""
        long = len(sound.samples) > 30 * RATE
        given: dict[str, Any] = {"return_timestamps": long or params.timestamps != "none"}
        if self.multilingual:
            given |= {"task": params.task, "language": params.language}
        if params.prompt is not None:
            given["prompt_ids"] = self._processor.get_prompt_ids(params.prompt, return_tensors="pt")
        padding = {"truncation": False, "padding": "longest"} if long else {}
        made = self._processor(sound.samples, sampling_rate=RATE, return_tensors="pt", **padding)
        given["condition_on_prev_tokens"] = params.condition_on_previous if long else None
        tokens = self._model.generate(made["input_features"], temperature=0.0, **given)
        text: str = self._processor.batch_decode(tokens, skip_special_tokens=True)[0]
        return text.strip()


# ---------------------------------------------------------------- comparison


def compare(folder: Path, target: str, draft: str, wanted: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each setting."""
    clips = {path.stem: Audio.read(path) for path in sorted(folder.glob("*.wav"))}
    llm, reference = LLM(target, draft, dtype="float32"), Reference(target)
    rows = []
    for name in wanted:
        setting = SETTINGS[name]
        if not reference.multilingual and (not setting.told or setting.params.task == "translate"):
            continue
        own = {clip: sound for clip, sound in clips.items() if (clip == "long") == setting.long}
        if not reference.multilingual:
            own = {clip: sound for clip, sound in own.items() if clip.startswith(("en", "long"))}
        rows.append({"setting": name} | _row(setting, own, llm, reference))
        print(json.dumps(rows[-1], ensure_ascii=False))
    return rows


def _row(setting: Setting, clips: dict[str, Audio], llm: LLM, reference: Reference) -> dict[str, Any]:
    seconds, different = {"ours": 0.0, "transformers": 0.0}, []

    def timed(name: str, run: Callable[[], str]) -> str:
        began = time.process_time()
        text = run()
        seconds[name] += time.process_time() - began
        return text

    for clip, sound in clips.items():
        language = ("en" if clip == "long" else clip[:2]) if setting.told and reference.multilingual else None
        params = replace(setting.params, language=language)
        ours = timed("ours", lambda: llm.transcribe(sound, params).text)  # noqa: B023
        theirs = timed("transformers", lambda: reference(sound, params))  # noqa: B023
        if ours != theirs:
            different.append({"clip": clip, "ours": ours, "transformers": theirs})
    measured = {f"{name}, processor s": round(value, 1) for name, value in seconds.items()}
    return {"clips": len(clips), "equal": len(clips) - len(different), **measured, "different": different}


def main() -> None:
    """Run the chosen part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("collect", "compare"))
    parser.add_argument("clips", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    given = parser.parse_args()
    if given.part == "collect":
        collect(given.clips)
        return
    if given.target is None:
        parser.error("compare needs --target, the folder of a Whisper model")
    rows = compare(given.clips, given.target, given.draft, given.settings)
    for row in rows:
        print("  ".join(f"{value}" for key, value in row.items() if key != "different"))
    print(json.dumps({"target": given.target, "draft": given.draft, "rows": rows}, ensure_ascii=False))


if __name__ == "__main__":
    main()

"""The page of a speech model in a real headless Chromium: a sound is chosen, recorded, shown and saved."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Tab, chromium, tab
from sakiyomi import LLM, Audio, TranscriptionParams
from sakiyomi.core.subtitles import WRITERS
from sakiyomi.core.transcripts import Transcript
from server_toys import running
from speech_toys import noise, speech_llm, wav

PROGRAM = chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here; apt-get install chromium-headless-shell")
# In place of a microphone, and of the download of a file.
TONE = """navigator.mediaDevices.getUserMedia = async () => {
  const context = new AudioContext(), tone = context.createOscillator(), to = context.createMediaStreamDestination();
  tone.connect(to);
  tone.start();
  return to.stream;
}; void 0"""
SAVED = "window.saved = {}; download = (name, kind, words) => { saved[name] = words; }; void 0"


@pytest.fixture(scope="module")
def own() -> LLM:
    return speech_llm()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    assert PROGRAM is not None
    with pytest.MonkeyPatch.context() as patch:
        # Texts of random weights are poor, and would be tried again.
        patch.setattr("sakiyomi.server.transcriptions.FALLBACK", (0.0,))
        with running(speech_llm()) as (_, url), tab(PROGRAM, tmp_path_factory.mktemp("profile")) as found:
            found.size(1100, 700)
            found.open(f"{url}/")
            found.until("card !== null")
            yield found
            assert found.problems == []


def choose(page: Tab, *files: Path) -> None:
    """As in the dialogue of the button."""
    page.run("void ($('turns').replaceChildren())")
    node = page.call("DOM.getDocument")["root"]["nodeId"]
    box = page.call("DOM.querySelector", nodeId=node, selector="#sound")["nodeId"]
    page.call("DOM.setFileInputFiles", nodeId=box, files=[str(path) for path in files])
    page.until("under !== null")
    page.until("under === null && $('turns').querySelector('.acts') !== null", 60)


def wanted(own: LLM, audio: Audio) -> Transcript:
    found: Transcript = own.transcribe(audio, TranscriptionParams(temperatures=(0.0,)))
    assert len(found.segments) > 1
    return found


def shoot(page: Tab, name: str) -> None:
    if folder := os.environ.get("SAKIYOMI_SCREENSHOTS"):
        page.picture(Path(folder) / f"{name}.png")


def test_a_sound_is_shown_by_segments_and_saved(page: Tab, own: LLM, tmp_path: Path) -> None:
    shown = page.run("['listen', 'ask', 'panel'].map((name) => $(name).hidden)")
    assert shown == [False, True, True]
    shoot(page, "speech-open")
    audio = noise(2.4)
    (tmp_path / "talk.wav").write_bytes(wav(audio))
    page.run(SAVED)
    choose(page, tmp_path / "talk.wav")
    shoot(page, "speech")
    rows = page.run("[...$('turns').querySelectorAll('.reply p:not(.note)')].map((row) => row.textContent)")
    transcript = wanted(own, Audio.read(io.BytesIO(wav(audio))))
    assert len(rows) == len(transcript.segments) and rows[0].endswith(transcript.segments[0].text.strip())
    assert page.run("$('turns').querySelector('p.note').textContent").startswith("2.4 s of sound")
    for button in page.run("[...$('turns').querySelectorAll('.acts button')].map((one) => one.textContent)"):
        ending = button.removeprefix("Save as ")
        place = [*WRITERS].index(ending) + 1
        page.click(f"#turns .acts button:nth-child({place})")
        assert page.run("saved")[f"talk.{ending}"] == WRITERS[ending](transcript), ending
    assert len(page.run("saved")) == 3


def test_a_recording_is_decoded_by_the_browser(page: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the server needs no ffmpeg for it."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    page.run("void ($('turns').replaceChildren())")
    page.run(TONE)
    page.click("#record")
    page.until("recorder !== null && recorder.state === 'recording'")
    page.run("new Promise((done) => setTimeout(done, 700))")
    page.click("#record")
    page.until("under !== null")
    page.until("under === null", 60)
    assert page.run("$('error').hidden"), page.run("$('detail').textContent")


def test_what_is_no_sound_is_refused(page: Tab) -> None:
    page.run("void ($('turns').replaceChildren())")
    page.run("void hear(new File(['no sound'], 'a.mp3'), 'a.mp3')")
    page.until("!$('error').hidden")
    assert "is no sound file" in page.run("$('detail').textContent")
    assert page.run("$('turns').querySelectorAll('.reply').length") == 0
    page.problems[:] = [found for found in page.problems if "status of 4" not in found]

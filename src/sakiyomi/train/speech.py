"""Distils a draft for a speech model from sounds alone.

As Distil-Whisper (Gandhi et al. 2023, arXiv 2311.00430): the draft has the target's encoder, embeddings and head, which
are frozen, and few decoder layers, which start as copies of the target's. It learns the target's own transcripts and
its probabilities for them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sakiyomi.core.audio import Audio
from sakiyomi.core.errors import InputError, LoadError, SakiyomiError, UnsupportedError
from sakiyomi.core.outputs import Stats
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.engine.transcription import SoundInWork, Transcriber
from sakiyomi.model_executor.encoder_decoder.families import family_of
from sakiyomi.model_executor.loading import load_model, stop_tokens
from sakiyomi.model_executor.loading.families import has_encoder
from sakiyomi.train.acceptance import CHAIN, CHUNK_ROWS, MEASURING, speculate
from sakiyomi.train.checkpoint import writing
from sakiyomi.train.commands import TrainSpeech
from sakiyomi.train.config import TextOptions
from sakiyomi.train.data import TextSpec, parse_valid
from sakiyomi.train.draft import WORTH
from sakiyomi.train.export import Result, model_folder
from sakiyomi.train.loop import Watch, on_device, place
from sakiyomi.train.losses import soft_loss
from sakiyomi.train.optim import text_optimizers
from sakiyomi.train.recipe import Recipe, check_run, train
from sakiyomi.train.samples import weights_digest
from sakiyomi.train.speech_windows import (
    HELD_OUT,
    TIMED,
    TRAIN,
    Labelling,
    Labels,
    Padding,
    WindowFolder,
    WindowRows,
    batch_of,
    in_sets,
    sound_files,
    stretches,
    window_seconds,
)

MEASURED_SECONDS = 120.0
"""Of held-out sound whose transcription is timed; the last stretch may be longer."""


def train_speech(config: TrainSpeech, command: str = "", watch: Watch | None = None) -> dict[str, Any]:
    """Run `sakiyomi train speech`, see `recipe.train`."""
    return train(_Speech(config), command, watch)


class _Speech(Recipe[TrainSpeech]):
    """Decoder layers learn the target's transcripts of sounds."""

    def files(self) -> list[TextSpec]:
        """See `Recipe`: the windows that are made of the sounds."""
        return [WindowRows.SOURCE]

    def check(self) -> None:
        """See `Recipe`."""
        self.valid, self.sounds = parse_valid(self.config.loop.valid), sound_files(self.config.audio)
        sound_files([*map(str, self.valid.values())])
        if wrong := {TRAIN, HELD_OUT} & self.valid.keys():
            raise InputError(f"valid names {min(wrong)!r}, which is the name of another set; choose another name")
        check_run(self.config, ())
        self.device, self.passes = place(self.config.machine)

    def read(self) -> None:
        """See `Recipe`; the target transcribes the sounds, unless that was done before the run was stopped."""
        config, loop = self.config, self.config.loop
        loaded = load_model(config.target, device="cpu", encoder_decoder=True, fits=partial(_check_kind, config.target))
        self.stored, self.tokenizer, self.extractor = loaded.model.dtype, loaded.tokenizer, loaded.extractor
        self.target = loaded.model.float().to(self.device).requires_grad_(False)
        self.ends = frozenset(stop_tokens(self.target, self.tokenizer))
        layers = int(self.target.config.decoder_layers)
        if config.layers > layers:
            raise InputError(f"layers is {config.layers}, and {config.target} has {layers}; set --layers lower")
        folder = Path(loop.out) / "windows"
        if not loop.resume:
            self._label(folder)
        sets = WindowFolder(folder, 0).sets()
        if loop.resume and not sets:
            raise LoadError(f"{folder} holds no windows any more; begin another run with another --out")
        learnt = sets.pop(TRAIN, [])
        if not learnt or not sets:
            raise InputError(
                "the sounds give too little to learn from and to hold out; give more of them with --audio, at least "
                "two minutes, or held-out ones with --valid NAME=FILE"
            )
        self.held_out = {name: some[: config.eval_windows] for name, some in sets.items()}
        self.pad = Padding(min(self.ends), int(self.target.config.max_target_positions))
        self.mixture = WindowRows(learnt, self.pad, loop.seed)

    def _label(self, folder: Path) -> None:
        """Have the target transcribe the sounds into files of windows; after Ctrl-C, those that are missing."""
        config, began = self.config, time.monotonic()
        windows = WindowFolder(folder, int(config.cache_gib * 2**30))
        windows.begin(self._origin())
        dtype = "bfloat16" if self.passes == "bf16" else "float32"
        llm = LLM(config.target, "none", dtype=dtype, device=str(self.device))
        labelling = Labelling(
            Transcriber(llm),
            llm.engine,
            Labels(self.target, config.top, config.greedy_weight, config.loop.row, self.passes),
            windows,
            config.label_minutes,
            config.eval_windows,
        )
        seconds = window_seconds(labelling.transcriber)
        try:
            ended = labelling.run(self._stretches(seconds, self.reporter.note))
        except KeyboardInterrupt:
            count = sum(map(len, windows.sets().values()))
            self.reporter.note(f"{count} windows are kept in {folder}; the same command continues")
            raise
        counts = {name: len(some) for name, some in windows.sets().items()}
        told = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
        minutes = (time.monotonic() - began) / 60
        self.reporter.note(f"windows of {seconds:g} s: {told}; transcribed in {minutes:.1f} minutes, {ended}")

    def _origin(self) -> dict[str, Any]:
        """What decides on the windows, for the record beside them."""
        config, sounds = self.config, {TRAIN: self.sounds} | {name: [path] for name, path in self.valid.items()}
        return {
            "target": weights_digest(self.target),
            "audio": {name: [[path.name, path.stat().st_size] for path in some] for name, some in sounds.items()},
            "top": config.top,
            "greedy_weight": config.greedy_weight,
            "row_tokens": config.loop.row,
            "precision": self.passes,
        }

    def _stretches(self, seconds: float, note: Callable[[str], None]) -> Iterator[tuple[str, Audio]]:
        """Stretches of all sounds with the names of their sets."""
        valid = {name: stretches([path], seconds, note) for name, path in self.valid.items()}
        return in_sets(valid, stretches(self.sounds, seconds, note))

    def make(self) -> Any:
        """See `Recipe`."""
        draft = new_draft(self.target, self.config.layers)
        del self.target
        own, all_of = (sum(w.numel() for w in draft.parameters() if w.requires_grad or whole) for whole in (0, 1))
        self.reporter.note(f"a draft of {all_of / 1e6:.3g}M parameters, of which {own / 1e6:.3g}M are trained")
        return draft

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """See `Recipe`."""
        hidden = read(model, batch)
        ones = hidden.new_ones(len(hidden), dtype=torch.float32)
        head = model.get_output_embeddings().weight
        return soft_loss(hidden, head, batch["wanted"], ones, tokens=batch["ids"])

    def optimizers(self, model: nn.Module) -> list[Optimizer]:
        """See `Recipe`."""
        config = self.config
        options = TextOptions(
            muon_lr=config.muon_lr,
            adam_lr=config.adam_lr,
            weight_decay=config.weight_decay,
            precision=self.passes,
        )
        return text_optimizers(options, model)

    @torch.inference_mode()
    def measures(self, model: Any) -> dict[str, dict[str, float]]:
        """See `Recipe`: along the target's own transcripts, without the rules of timestamps and suppressed tokens."""
        model.eval()
        found = {name: acceptance(model, windows, self.pad, self.ends) for name, windows in self.held_out.items()}
        model.train()
        return found

    def finish(self) -> Result:
        """See `Recipe`."""
        config, draft = self.config, self.loop.model
        found = self.measures(draft)
        save_draft(model_folder(config), draft, self.stored, self.tokenizer, self.extractor)
        self.reporter.note(MEASURING)
        more = self._speed() | {
            "about": f"A draft of {config.layers} decoder layers for {config.target}, with its encoder, embeddings and "
            "head",
            "measured_on": f"Along {config.target}'s own greedy transcripts of held-out windows: a chain of {CHAIN} "
            "draft tokens a round.",
        }
        return Result(draft, config.layers, found, self.loop.epochs(self.files()), more)

    def _speed(self) -> dict[str, Any]:
        """What the finished draft brings here, for the card: times of held-out stretches, plain and with the draft."""
        config = self.config
        try:
            llm = LLM(config.target, f"model:{model_folder(config)}", device=str(self.device))
        except SakiyomiError as error:
            return {"verdict": f"the pair does not run here: {error}"}
        transcriber, sounds = Transcriber(llm), list[Audio]()
        for name, sound in self._stretches(window_seconds(transcriber), note=lambda line: None):
            if sum(each.seconds for each in sounds) >= MEASURED_SECONDS:
                break
            sounds += [sound] * (name != TRAIN)
        if not sounds:
            return {"verdict": "the speed was not measured: the held-out sounds are no longer there"}
        # Interleaved, and the better of two: the first run of a shape is recorded, and other programs may be running.
        ways = EngineView(llm).engine, llm.engine
        runs = [[[_timed(engine, transcriber, sound) for engine in ways] for _ in range(2)] for sound in sounds]
        plain, drafted = (sum(min(run[way][0] for run in each) for each in runs) for way in (0, 1))
        length = sum(sound.seconds for sound in sounds)
        measured = {
            "seconds_of_sound": length,
            "plain_times_real_time": length / plain,
            "times_real_time": length / drafted,
            "speedup": plain / drafted,
            "tau": Stats.total(run[1][1] for each in runs for run in each).tau,
        }
        return {"measured": measured, "verdict": verdict(config, measured)}


def _check_kind(name: str, config: Any) -> None:
    """Raise UnsupportedError unless a configuration is that of a speech model."""
    if not has_encoder(config) or not family_of(config, name).takes_audio:
        raise UnsupportedError(
            f"target {name!r} ({config.model_type}) is no speech model; give one (whisper), or train a draft of a text "
            "model with `sakiyomi train draft`"
        )


def new_draft(target: Any, layers: int) -> Any:
    """A model with the target's own weights, except a decoder of copies of some layers, which alone are trained.

    Args:
        target: a transformers speech model.
        layers: of the draft's decoder, at most the target's; the first is the target's first, the last its last.
    """
    config, settings = copy.deepcopy(target.config), copy.deepcopy(target.generation_config)
    chosen = np.linspace(0, config.decoder_layers - 1, layers).round().astype(int).tolist()
    config.decoder_layers = layers
    settings.alignment_heads = None  # they name layers of the target
    with torch.device("meta"):
        draft = type(target)(config)
    draft.model.encoder, decoder, own = target.model.encoder, draft.model.decoder, target.model.decoder
    decoder.embed_tokens, decoder.embed_positions = own.embed_tokens, own.embed_positions
    decoder.layers = nn.ModuleList([copy.deepcopy(own.layers[number]) for number in chosen])
    for number, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = layer.encoder_attn.layer_idx = number
    decoder.layer_norm, draft.proj_out = copy.deepcopy(own.layer_norm), target.proj_out
    draft.generation_config = settings
    draft.requires_grad_(False)
    decoder.layers.requires_grad_(True)
    decoder.layer_norm.requires_grad_(True)
    return draft


def read(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """What the head reads at the known places of a batch, (N, hidden)."""
    hidden: Tensor = model.get_decoder()(
        input_ids=batch["inputs"], encoder_hidden_states=batch["encoded"].to(model.dtype), use_cache=False
    ).last_hidden_state
    return hidden[batch["known"]]


def acceptance(model: Any, windows: list[Path], pad: Padding, ends: frozenset[int]) -> dict[str, float]:
    """Measure a draft along the target's transcripts.

    Args:
        model: the draft, in evaluation mode.
        windows: files of held-out windows.
        pad: of the batches.
        ends: end tokens.

    Returns:
        `greedy_agreement`, the share of tokens that are the draft's argmax; `acceptance_rate` and `tau` of a chain of
        four; `tokens` that were looked at.
    """
    agreed = tokens = accepted = drafted = rounds = 0
    head = model.get_output_embeddings()
    for some in (windows[at : at + CHUNK_ROWS] for at in range(0, len(windows), CHUNK_ROWS)):
        batch = on_device(batch_of(some, pad), model.device)
        guesses, labels = head(read(model, batch)).argmax(-1), batch["labels"]
        agreed, tokens = agreed + int((guesses == labels).sum()), tokens + len(labels)
        sizes = batch["known"].sum(1).tolist()
        for guess, text in zip(guesses.split(sizes), labels.split(sizes), strict=True):
            counts = speculate(guess.tolist(), text.tolist(), CHAIN, limit=pad.positions, ends=ends)
            accepted, drafted, rounds = accepted + counts[0], drafted + counts[1], rounds + counts[2]
    return {
        "greedy_agreement": agreed / max(tokens, 1),
        "acceptance_rate": accepted / max(drafted, 1),
        # The first token of each window comes from the prefill, no round commits it.
        "tau": (tokens - len(windows)) / max(rounds, 1),
        "tokens": tokens,
    }


def save_draft(folder: Path, draft: Any, dtype: torch.dtype, tokenizer: Any, extractor: Any) -> None:
    """Write a draft as a whole model, with the weights that it shares with the target in their own dtype.

    Args:
        folder: of the model.
        draft: rounded in place.
        dtype: of the target's files.
        tokenizer, extractor: of the target.
    """
    with writing(folder):
        draft.to(dtype).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        extractor.save_pretrained(folder)
        # The weights are written through a private temporary file; a model folder is there to be read by others.
        for path in folder.glob("*.safetensors"):
            path.chmod(0o644)


def _timed(engine: Any, transcriber: Transcriber, sound: Audio) -> tuple[float, Stats]:
    """Seconds of the transcription of a sound, and its counts."""
    began = time.perf_counter()
    stats = Stats.total(out.stats for out, _ in SoundInWork(engine, transcriber, sound, TIMED).tries())
    return time.perf_counter() - began, stats


def verdict(config: TrainSpeech, measured: dict[str, float]) -> str:
    """What to expect of a draft on this machine, and what to type next."""
    figures = (
        f"{measured['plain_times_real_time']:.3g}x real time plain and {measured['times_real_time']:.3g}x with the "
        f"draft ({measured['speedup']:.2f} times, {measured['tau']:.2f} tokens a pass) on "
        f"{measured['seconds_of_sound']:.0f} s of held-out sound, greedy, on this machine"
    )
    use = f"sakiyomi transcribe FILE --model {config.target} --draft model:{config.loop.out}"
    if measured["speedup"] >= WORTH:
        return f"the draft makes it faster: {figures}\nuse it: {use}"
    return (
        f"the draft is not worth it yet: {figures}\nmore sound of the kind that is to be transcribed and longer "
        f"training (--minutes) help; a draft gains most beside a large target\nto try it all the same: {use}"
    )

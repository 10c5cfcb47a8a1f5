"""The training loop: batches, optimizer steps, schedule, held-out losses, checkpoints and an early finish.

It knows neither what is trained nor by which loss: `target.py`, `draft.py` and others bring model, loss and data.
Devices and precision are accelerate's.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.optim import Optimizer

from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.core.progress import progress
from sakiyomi.model_executor.loading.model import parse_device
from sakiyomi.train.checkpoint import load_checkpoint, save_checkpoint
from sakiyomi.train.config import MachineOptions, RunConfig, passes_on
from sakiyomi.train.data import TextSpec
from sakiyomi.train.llama import grow
from sakiyomi.train.optim import LAYER, copy_state, set_scale
from sakiyomi.train.progress import LONGEST_STEP_SECONDS, Progress, Reporter, Schedule
from sakiyomi.train.rows import Batches, Mixture
from sakiyomi.train.workers import ALONE, Workers

MEASURING = 1 / 20
"""Most of a run's time that held-out measurements take, but the first and the last of them."""
Watch = Callable[[Progress, float], bool]
"""Told the progress and the share of the budget that is spent; False: stop."""


class Learner(ABC):
    """A loss, and everything else that the loop needs, except the module.

    Attributes:
        config: settings of the run; its loop has budget, schedule and checkpoints.
        mixture: where the batches come from.
        device: where the model is.
        passes: precision of the passes: "bf16", "fp16" or "no".
        workers: the processes of the run, of which the first decides, measures and writes.
        grow_to: layers that a shallower model is grown to; Llama models can be.
        grow_at: share of the budget at which it is.
        warmup_share: first share of the budget in which the learning rate rises.
        clip_values: `clip` bounds each entry of the gradient, and not its norm.
        watch: called after every held-out measurement but the last; the run stops with a checkpoint if it gives False.
    """

    config: RunConfig
    mixture: Batches
    device: torch.device = torch.device("cpu")
    passes: str
    workers: Workers = ALONE
    grow_to: int = 0
    grow_at: float = 0.0
    warmup_share: float = 0.0
    clip_values: bool = False
    watch: Watch | None = None

    def row_length(self, step: int, share: float) -> int:
        """Tokens of the rows of a step, when so much of the budget is spent."""
        lengths = self.config.loop.row_tokens
        return lengths[step % len(lengths)]

    @abstractmethod
    def loss(self, model: Any, batch: Any) -> Tensor:
        """Loss of a model on a batch: what the mixture gave, as tensors on the device."""

    @abstractmethod
    def optimizers(self, model: nn.Module) -> list[Optimizer]:
        """Those of the model."""

    @abstractmethod
    def measures(self, model: Any) -> dict[str, dict[str, float]]:
        """Held-out measures by file, taken every `eval_minutes`, or less often if they take long, and at the end."""


class Loop:
    """One training run. Weights without a gradient are neither trained nor kept in checkpoints.

    Args:
        learner: loss, data and settings of the run.
        model: trained in place (replaced when it grows: read `self.model` at the end).
    """

    def __init__(self, learner: Learner, model: Any) -> None:
        self.learner, self.model, self.config = learner, model, learner.config.loop
        config = self.config
        self._out = Path(config.out)
        self._budget = budget = float(config.tokens or config.minutes * 60)
        decay_from, warm_from = budget * (1 - config.decay_share), budget * learner.warmup_share
        self.schedule = Schedule(config.warmup_steps, decay_from, budget, warm_from)
        self.progress = Progress()
        self._stop_asked = self._finish_asked = False
        self._accelerator = accelerator(str(learner.device), learner.passes)
        self._optimizers = self._made_optimizers()

    def run(self) -> bool:
        """Train to the end of the budget.

        Returns:
            True when the budget is spent, False when SIGINT or SIGTERM asked to stop; either way a checkpoint
            is written.

        Raises:
            WorkerError: a process has ended.
        """
        workers = self.learner.workers
        if workers.count > 1 and self._accelerator.device.type != "cpu":
            raise UnsupportedError(
                f"{workers.count} workers train on CPUs in this version, and this run is on "
                f"{self._accelerator.device}; set --device cpu, or leave --workers out"
            )
        if self.config.resume:
            self._restore(load_checkpoint(self._out / "checkpoints"))
        workers.spread(self._weights())
        compile_layers(self.model, self.config.compile)
        self._warm()
        with Reporter(self.config.log_seconds, silent=not workers.leads) as reporter, self._signals():
            self._train(reporter)
        return not self._stop_asked

    def _train(self, reporter: Reporter) -> None:
        leads = self.learner.workers.leads
        saved = measured = self.progress.seconds
        took = 0.0
        self.model.train()
        while self._goes_on(reporter):
            self._maybe_grow(reporter)
            scale = self._step()
            reporter.step(self.progress, self._clock() / self.schedule.end, scale)
            if not leads:
                continue
            if self.progress.seconds - measured >= max(self.config.eval_minutes * 60, took / MEASURING):
                took = self._measure(reporter)
                measured = self.progress.seconds
                if self.learner.watch is not None:
                    with reporter.paused():  # it may ask something
                        self._stop_asked |= not self.learner.watch(self.progress, self.share)
            if self.progress.seconds - saved >= self.config.save_minutes * 60:
                self.save()
                saved = self.progress.seconds
        if not self._stop_asked:
            self._maybe_grow(reporter)
            held_out = self.progress.held_out
            if leads and (not held_out or held_out[-1]["step"] != self.progress.step):
                self._measure(reporter)
        if leads:
            self.save()

    def _goes_on(self, reporter: Reporter) -> bool:
        """Whether there is another step. The first process decides, by its clock and the signals that it received."""
        if self.learner.workers.leads and self._clock() < self.schedule.end and not self._stop_asked:
            self._maybe_finish(reporter)
        progress, schedule = self.progress, self.schedule
        progress.seconds, schedule.decay_from, schedule.end, stop = self.learner.workers.told(
            progress.seconds, schedule.decay_from, schedule.end, float(self._stop_asked)
        )
        self._stop_asked = bool(stop)
        return self._clock() < schedule.end and not self._stop_asked

    def _weights(self) -> list[nn.Parameter]:
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    def _warm(self) -> None:
        """Compile what a step runs before the clock starts; batches and weights are afterwards as before."""
        if not self.config.compile or not compiler_found():
            return
        with progress("compiling, which is no part of --minutes: a minute or more, several on a busy machine"):
            state, random = self.learner.mixture.state(), torch.get_rng_state()
            for place in dict.fromkeys(self.config.row_tokens):
                batch = self._batch(0, place, False)
                self.learner.mixture.restore(state)
                self._gradient(batch)
                for optimizer in self._optimizers:
                    optimizer.zero_grad(set_to_none=True)
            torch.set_rng_state(random)

    @property
    def share(self) -> float:
        """Of the budget that is spent."""
        return self._clock() / self._budget

    def epochs(self, sources: Sequence[TextSpec]) -> dict[str, float]:
        """How often each file of the mixture was read, by name."""
        assert isinstance(self.learner.mixture, Mixture), "other batches have no files"
        return self.learner.mixture.epochs(sources)

    def save(self) -> None:
        """Write a checkpoint."""
        state = {
            "model": _trained(self.model),
            "layers": _depth(self.model),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "mixture": self.learner.mixture.state(),
            "progress": dataclasses.asdict(self.progress),
            "schedule": dataclasses.asdict(self.schedule),
            "torch_rng": torch.get_rng_state(),
            "settings": self.learner.config.flat(),
        }
        save_checkpoint(self._out / "checkpoints", self.progress.step, state)

    def _restore(self, state: dict[str, Any]) -> None:
        if state["layers"] != _depth(self.model):
            self.model, _ = grow(self.model, state["layers"])
            self._optimizers = self._made_optimizers()
        with torch.no_grad():
            for name, weight in _trained(self.model).items():
                weight.copy_(state["model"][name])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.learner.mixture.restore(state["mixture"])
        self.progress = Progress(**state["progress"])
        self.schedule = Schedule(**state["schedule"])
        torch.set_rng_state(state["torch_rng"])

    def _clock(self) -> float:
        return float(self.progress.tokens) if self.config.tokens else self.progress.seconds

    def _step(self) -> float:
        """One optimizer step; returns the factor of the peak learning rate."""
        began = time.monotonic()
        config, progress = self.config, self.progress
        length = self.learner.row_length(progress.step, self.share)
        batch = self._batch(progress.step, length, self.schedule.decaying(self._clock()))
        scale = self.schedule.scale(progress.step, self._clock())
        set_scale(self._optimizers, scale)
        loss = self.learn(batch)
        progress.step += 1
        progress.tokens += config.step_tokens
        progress.seconds += min(time.monotonic() - began, LONGEST_STEP_SECONDS)
        progress.losses.append((progress.step, progress.tokens, progress.seconds, float(loss)))
        return scale

    def _batch(self, step: int, length: int, decaying: bool) -> Any:
        """This process's rows of a step."""
        mixture, rows = self.learner.mixture, self.config.step_tokens // length
        return mixture.part(mixture.batch(step, rows, length, decaying), self.learner.workers.part(rows))

    def _gradient(self, batch: Any) -> Tensor:
        """The loss of a batch, whose gradient is added to that of the weights."""
        with self._accelerator.autocast():
            loss = self.learner.loss(self.model, on_device(batch, self._accelerator.device))
        if loss.requires_grad:  # else its parts have been propagated one by one, so that they need not all be held
            self._accelerator.backward(loss)
        return loss

    def learn(self, batch: Any) -> Tensor:
        """Go one step of the optimizer towards a smaller loss of all processes' batches; the loss before it."""
        loss, weights = self._gradient(batch), self._weights()
        loss = self.learner.workers.collect(weights, loss.detach())
        if self.learner.clip_values:
            self._accelerator.clip_grad_value_(weights, self.config.clip)
        else:
            self._accelerator.clip_grad_norm_(weights, self.config.clip)
        for optimizer in self._optimizers:
            if self.learner.workers.leads:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.learner.workers.spread(weights)
        return loss

    def _measure(self, reporter: Reporter) -> float:
        """Measure, and tell it; the seconds that it took."""
        began = time.monotonic()
        measures = self.learner.measures(self.model)
        progress, took = self.progress, min(time.monotonic() - began, LONGEST_STEP_SECONDS)
        progress.seconds += took
        progress.held_out.append(
            {"step": progress.step, "tokens": progress.tokens, "seconds": progress.seconds, "measures": measures}
        )
        reporter.measures(progress.step, measures)
        return took

    def _maybe_grow(self, reporter: Reporter) -> None:
        if _depth(self.model) >= self.learner.grow_to:
            return
        # An early finish grows at once: the finished model always has the depth that was asked for.
        if self._clock() < self.learner.grow_at * self._budget and not self.schedule.decaying(self._clock()):
            return
        old_model, old_optimizers = self.model, self._optimizers
        self.model, source = grow(old_model, self.learner.grow_to)
        self._optimizers = self._made_optimizers()
        copy_state(old_optimizers, old_model, self._optimizers, self.model, source)
        compile_layers(self.model, self.config.compile)
        self.model.train()
        reporter.note(f"step {self.progress.step}: grown to {self.learner.grow_to} layers")

    def _maybe_finish(self, reporter: Reporter) -> None:
        flag = self._out / "finish"
        if not self._finish_asked and not flag.exists():
            return
        self._finish_asked = False
        flag.unlink(missing_ok=True)
        minutes = self.config.finish_minutes
        length = minutes * 60
        if self.config.tokens:
            length *= self.progress.tokens / max(self.progress.seconds, 1e-9)
        self.schedule.finish(self._clock(), length)
        reporter.note(f"step {self.progress.step}: early finish, decay ends in {minutes:g} minutes")

    def _made_optimizers(self) -> list[Optimizer]:
        return [self._accelerator.prepare_optimizer(made) for made in self.learner.optimizers(self.model)]

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM stop after the step at hand, SIGUSR1 begins the decay; old handlers return at the end."""

        def stop(number: int, frame: FrameType | None) -> None:
            self._stop_asked = True

        def finish(number: int, frame: FrameType | None) -> None:
            self._finish_asked = True

        wanted = {signal.SIGINT: stop, signal.SIGTERM: stop, signal.SIGUSR1: finish}
        if threading.current_thread() is not threading.main_thread():
            wanted = {}  # Python hears them in the main thread alone; Ray's TorchTrainer trains in another
        old = {number: signal.signal(number, handler) for number, handler in wanted.items()}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def accelerator(device: str, precision: str) -> Accelerator:
    """Accelerate's view of a device: "auto", "cpu", "cuda" or "cuda:N". Each run has its own settings."""
    AcceleratorState._reset_state(reset_partial_state=True)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    found = Accelerator(cpu=device == "cpu", mixed_precision=precision)
    if found.num_processes > 1:
        raise InputError(
            f"this is one of {found.num_processes} processes of a launcher that is not known here; start the run with "
            "torchrun, or with --workers"
        )
    return found


def place(options: MachineOptions) -> tuple[torch.device, str]:
    """Where a run takes place, and the precision of its passes.

    Raises:
        InputError: there is no such device, or it has no such passes.
    """
    device = parse_device(options.device)
    if device.type == "cpu" and options.precision == "fp16":
        raise InputError("precision is 'fp16', for which a CPU has no passes; set --precision bf16, or no for float32")
    passes = passes_on(device.type, options.precision)
    return accelerator(str(device), passes).device, passes


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """What is trained of a model, by name."""
    return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}


def _depth(model: nn.Module) -> int:
    """Layers of a transformers model; 0 for other modules, which do not grow."""
    config: Any = getattr(model, "config", None)
    return int(getattr(config, "num_hidden_layers", 0))


def on_device(batch: Any, device: torch.device) -> Any:
    """Arrays as tensors on a device: one, those of a mapping, or those of rows with the lengths of their prompts."""
    if isinstance(batch, dict):
        return {name: on_device(part, device) for name, part in batch.items()}
    if isinstance(batch, list):
        return [(on_device(ids, device), prompt) for ids, prompt in batch]
    return torch.from_numpy(batch).to(device)


def compile_layers(model: nn.Module, wanted: bool) -> None:
    """Compile the layers one by one: they share one graph a shape, so that 12 compile as fast as one."""
    if not wanted or not compiler_found():
        return
    # Row lengths x (training, measuring) make more graphs of the one layer code than the default limit of 8.
    torch._dynamo.config.recompile_limit = 64  # type: ignore[attr-defined,unused-ignore]
    for name, layer in model.named_modules():
        if LAYER.search(name):
            layer.compile(dynamic=False)


def compiled_loss(loss: Callable[..., Tensor], wanted: bool, *, dynamic: bool = False) -> Callable[..., Tensor]:
    """The loss compiled where that is wanted and possible: it passes over the logits once instead of five times.

    With `dynamic` for inputs of any length.
    """
    if not wanted or not compiler_found():
        return loss
    compiled: Callable[..., Tensor] = torch.compile(loss, dynamic=dynamic)
    return compiled


def compiler_found() -> bool:
    """Whether torch.compile finds a C++ compiler on this machine."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError, RuntimeError):
        return False
    return True

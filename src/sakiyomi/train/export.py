"""The finished run as files: the model's folder, its card for people and programs, and the loss curve."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from jinja2 import Template
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sakiyomi.core.checkpoint import read_json
from sakiyomi.train.checkpoint import writing
from sakiyomi.train.config import RunConfig
from sakiyomi.train.llama import save_model
from sakiyomi.train.plot import plot_losses
from sakiyomi.train.progress import Progress

# The final loss of the card is a mean over the last steps: one step's loss depends on the rows it drew.
LAST_STEPS = 50


def model_folder(config: RunConfig) -> Path:
    """OUT/model."""
    return Path(config.loop.out) / "model"


def save(config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the trained model and its tokenizer to OUT/model."""
    with writing(model_folder(config)):
        save_model(model_folder(config), model, tokenizer)


@dataclass(frozen=True)
class Result:
    """What a finished run has made, for its card.

    Attributes:
        model: what was trained.
        layers: of it.
        measures: of the finished model, by held-out file.
        epochs: how often each source was read.
        more: what else belongs into the summary; the template of the card shows some of it.
    """

    model: nn.Module
    layers: int
    measures: dict[str, Any]
    epochs: dict[str, float]
    more: dict[str, Any] = field(default_factory=dict)


def write_card(
    config: RunConfig, result: Result, progress: Progress, command: str, *, folder: Path | None = None
) -> dict[str, Any]:
    """Write the card and the loss curve to OUT/model and return the summary that is also its `card.json`.

    Args:
        config: settings of the run, kept in the card.
        result: of the run.
        progress: steps, tokens, losses.
        command: the command line that rebuilds it.
        folder: which becomes OUT/model, where it is not yet there.
    """
    folder, model = folder or model_folder(config), result.model
    unit = str(result.more.get("unit", "nats"))
    last = [loss for _, _, _, loss in progress.losses[-LAST_STEPS:]]
    with writing(folder):
        drawn = plot_losses(progress, folder / "loss.png", f"{unit} per token" if unit else "")
        summary = {
            "finished": True,
            "name": config.loop.name or Path(config.loop.out).name,
            "model": str(model_folder(config)),
            "architecture": type(model).__name__.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration"),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "layers": result.layers,
            "steps": progress.step,
            "tokens": progress.tokens,
            "minutes": round(progress.seconds / 60, 2),
            "final_loss": round(sum(last) / max(len(last), 1), 4),
            "loss_curve": "loss.png" if drawn else None,
            "epochs": result.epochs,
            "held_out": result.measures,
            "notes": list(config.loop.note),
            "seed": config.loop.seed,
            "command": command,
            "config": config.flat(),
            "versions": {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")},
        } | result.more
        (folder / "card.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(card(summary), encoding="utf-8")
    return summary


def read_card(name: str, folder: Path) -> dict[str, Any]:
    """What `card.json` says of a model that another one starts from; its name alone where there is none."""
    path = folder / "card.json"
    return (read_json(path) if path.is_file() else {}) | {"name": name}


def card(summary: dict[str, Any]) -> str:
    """The card of a model as Markdown, from its summary, by the template `card.md.jinja`."""
    template = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
    made = Template(template, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    text: str = made.render(run=summary, last_steps=LAST_STEPS)
    return text

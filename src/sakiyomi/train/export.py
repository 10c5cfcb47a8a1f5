"""The finished run as files: the model's folder, its card for people and programs, and the loss curve."""

from __future__ import annotations

import dataclasses
import json
from importlib import metadata
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from sakiyomi.train.config import LoopConfig
from sakiyomi.train.llama import save_model
from sakiyomi.train.loop import Progress
from sakiyomi.train.plot import plot_losses

# The final loss of the card is a mean over the last steps: one step's loss depends on the rows it drew.
LAST_STEPS = 50


def export(
    config: LoopConfig,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
    measures: dict[str, Any],
    command: str,
    epochs: dict[str, float],
) -> dict[str, Any]:
    """Write OUT/model and return the summary that is also its `card.json`.

    Args:
        config: settings of the run, kept in the card.
        model: the trained model.
        tokenizer: written beside it.
        progress: steps, tokens, losses.
        measures: held-out measures of the finished model, by file.
        command: the command line that rebuilds it.
        epochs: how often each source was read.
    """
    folder = Path(config.out) / "model"
    save_model(folder, model, tokenizer)
    last = [loss for _, _, _, loss in progress.losses[-LAST_STEPS:]]
    summary = {
        "finished": True,
        "name": config.name or Path(config.out).name,
        "model": str(folder),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": model.config.num_hidden_layers,
        "steps": progress.step,
        "tokens": progress.tokens,
        "minutes": round(progress.seconds / 60, 2),
        "final_loss": round(sum(last) / max(len(last), 1), 4),
        "epochs": epochs,
        "held_out": measures,
        "notes": list(config.note),
        "seed": config.seed,
        "command": command,
        "config": dataclasses.asdict(config),
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")},
    }
    (folder / "card.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card(summary), encoding="utf-8")
    plot_losses(progress, folder / "loss.png")
    return summary


def card(summary: dict[str, Any]) -> str:
    """The card of a model as Markdown, from its summary."""
    lines = [
        f"# {summary['name']}",
        "",
        f"A Llama model of {summary['parameters'] / 1e6:.2f}M parameters and {summary['layers']} layers, trained by "
        f"sakiyomi: {summary['steps']} steps, {summary['tokens'] / 1e6:.2f}M tokens, {summary['minutes']:.0f} minutes, "
        f"seed {summary['seed']}. Mean loss of the last {LAST_STEPS} steps: {summary['final_loss']} nats a token "
        "(`loss.png`).",
        "",
        "## Data",
        "",
        *(f"- {note}" for note in summary["notes"]),
        *(f"- `{name}`: read {count:g} times" for name, count in summary["epochs"].items()),
        "",
        "## Held-out measures",
        "",
    ]
    for name, values in summary["held_out"].items():
        lines += [f"**{name}**", "", "| measure | value |", "|---|---|"]
        lines += [f"| {key.replace('_', ' ')} | {value:.4g} |" for key, value in values.items()]
        lines.append("")
    lines += ["## Command", "", "```", summary["command"], "```", ""]
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    lines += [f"Made with {versions}. All settings are in `card.json`.", ""]
    return "\n".join(lines)

"""The finished run as files: the model's folder, its card for people and programs, and the loss curve."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

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
        more: what else belongs into the summary; `card` knows `held_back`, `cost`, `cost_source`, `init`, `trees`,
            `memory`, `about`, `overlaps`, `use`, `throughput`, `verdict`, and the `unit` of the loss.
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
    """The card of a model as Markdown, from its summary."""
    curve = (
        f"`{summary['loss_curve']}`"
        if summary["loss_curve"]
        else "the curve was not drawn: `pip install 'sakiyomi[train]'`, then the command below with --resume"
    )
    lines = [
        f"# {summary['name']}",
        "",
        f"{_what(summary)}, trained by sakiyomi: {_extent(summary)}. Mean loss of the last {LAST_STEPS} steps: "
        f"{summary['final_loss']}{' nats' if summary.get('unit', 'nats') else ''} ({curve}).",
        "",
        "## Data",
        "",
        *_data(summary),
    ]
    if summary.get("held_back"):
        lines.append(f"- {summary['held_back']} documents of the training text, held back for the measures below")
    lines += ["", "## Held-out measures", "", *([summary["measured_on"], ""] if "measured_on" in summary else [])]
    for name, values in summary["held_out"].items():
        rows = ([key.replace("_", " "), f"{value:.4g}"] for key, value in values.items())
        lines += _table(f"**{name}**", ("measure", "value"), rows)
    for name, trees in summary.get("trees", {}).items():
        rows = ([tree["nodes"], f"{tree['expected_tau']:.3f}", f"{tree['replayed_tau']:.3f}"] for tree in trees)
        columns = ["nodes", "expected tau", "tau on these texts"]
        lines += _table(f"**{name}**: the best tree of each budget", columns, rows)
    for name, layers in summary.get("overlaps", {}).items():
        rows = ([i, " ".join(f"{each:.2f}" for each in layer)] for i, layer in enumerate(layers))
        columns = ["layer", "KV heads from the first on"]
        lines += _table(f"**{name}**: overlap of each layer's KV heads", columns, rows)
    if "memory" in summary:
        lines += [summary["memory"]["explained"], ""]
    if summary.get("throughput"):
        found = summary["throughput"]
        lines += [
            f"A step took {found['step_ms']:.0f} ms, {found['ratio']:.2f} times the frozen target's pass over its rows "
            f"({found['forward_ms']:.0f} ms).",
            "",
            *([f"{found['explained'][:1].upper()}{found['explained'][1:]}.", ""] if "explained" in found else []),
        ]
    if "cost" in summary:
        cost = "unknown" if summary["cost"] is None else f"{summary['cost']:.3g}"
        lines += [f"Draft step / target step (c): {cost}, {summary['cost_source']}.", ""]
    if "verdict" in summary:
        lines += [summary["verdict"], ""]
    if "use" in summary:
        lines += ["## Use", "", "```", summary["use"], "```", ""]
    lines += ["## Command", "", "```", summary["command"], "```", ""]
    if summary.get("init"):
        lines += ["## Start", "", *_origin(summary["init"])]
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    lines += [f"Made with {versions}. All settings are in `card.json`.", ""]
    return "\n".join(lines)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table below its title."""
    written = [f"| {' | '.join(map(str, row))} |" for row in (columns, *rows)]
    return [title, "", written[0], "|---" * len(columns) + "|", *written[1:], ""]


def _what(summary: dict[str, Any]) -> str:
    size = f"{summary['parameters'] / 1e6:.2f}M parameters"
    if "about" in summary:
        return f"{summary['about']}, {size}"
    return f"A {summary['architecture']} model of {size} and {summary['layers']} layers"


def _extent(summary: dict[str, Any]) -> str:
    return (
        f"{summary['steps']} steps, {summary['tokens'] / 1e6:.2f}M tokens, {summary['minutes']:.0f} minutes, "
        f"seed {summary['seed']}"
    )


def _data(summary: dict[str, Any]) -> list[str]:
    return [
        *(f"- {note}" for note in summary["notes"]),
        *(f"- `{name}`: read {count:g} times" for name, count in summary["epochs"].items()),
        *(f"- task `{name}`: prompts made on the way" for name in summary.get("tasks", ())),
    ]


def _origin(start: dict[str, Any]) -> list[str]:
    """How the model was made that this one started from, and the one before it."""
    if "command" not in start:
        return [f"The training began with `{start['name']}`, which has no card of sakiyomi's.", ""]
    lines = [f"The training began with `{start['name']}`, made with {_extent(start)}:", "", "```", start["command"]]
    lines += ["```", "", *_data(start), ""]
    return lines + (_origin(start["init"]) if start.get("init") else [])

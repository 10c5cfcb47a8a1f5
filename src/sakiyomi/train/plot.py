"""Curves of a run as pictures; without matplotlib there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sakiyomi.train.progress import Progress

# Dark and wide enough to be read when the picture is shown small.
STEP_COLOUR, MEAN_COLOUR = "#b8c4d6", "#1f4e8c"
HELD_OUT_COLOURS = ("#c2452d", "#2d8c5a", "#8c5a2d", "#6a3d9a")
WINDOW = 25
COLOURS = (MEAN_COLOUR, *HELD_OUT_COLOURS, STEP_COLOUR)
# Held-out measures: key, what the legend says before the file's name, label and limits of an axis beside the losses.
# Of each file the first one that it has is drawn.
MEASURES: tuple[tuple[str, str, str, tuple[float, float] | None], ...] = (
    ("tau_16_nodes", "tau, 16 nodes,", "tokens per target pass on held-out answers", None),
    ("nats_per_token", "held-out", "", None),
    ("accuracy", "accuracy", "share of right answers", (0, 1.02)),
    ("overlap", "overlap", "overlap of the top 10 % on held-out prompts", (0, 1)),
    ("acceptance_rate", "acceptance", "acceptance rate on held-out prompts", (0, 1)),
)


def _panels(*widths: int) -> tuple[Any, list[Any]]:
    """A picture and its panels, side by side; no panels where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None, []
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    panels[0].grid(alpha=0.3)
    return figure, list(panels)


def plot_heads(
    losses: Sequence[tuple[int, Sequence[float]]],
    accuracies: Mapping[str, Sequence[Sequence[float]]],
    path: Path,
    what: str = "head",
    tops: Sequence[tuple[int, Sequence[Sequence[float]]]] = (),
) -> bool:
    """Draw the loss of each head over the steps, and how often its first guesses hold the token that came.

    Args:
        losses: steps, and the loss of each head in nats.
        accuracies: by held-out file, of each head by rank.
        path: of the picture.
        what: name of the parts that have such a loss.
        tops: steps, and of each head the share of training places whose token was among its first 1, 2, ... guesses.

    Returns:
        False where matplotlib is not installed; nothing is written then.
    """
    figure, panels = _panels(*[1] * (3 if tops else 2))
    if not panels:
        return False

    def draw(axes: Any, curve: Sequence[tuple[int, Any]], head: int, style: str = "-") -> None:
        axes.plot(*zip(*curve, strict=True), style, color=COLOURS[head % 6], linewidth=1.2)

    for head in range(len(losses[0][1]) if losses else 0):
        draw(panels[0], [(step, each[head]) for step, each in losses], head)
    panels[0].set(xlabel="step", ylabel="loss (nats)", title=f"training loss of each {what}")
    if tops:
        most = len(tops[0][1][0])
        for head in range(len(tops[0][1])):
            for at, style in ((0, "-"), (most - 1, ":")):
                draw(panels[1], [(step, each[head][at]) for step, each in tops], head, style)
        panels[1].set(xlabel="step", ylim=(0, 1), title=f"training: first guess, first {most} (dots)")
    right = panels[-1]
    for style, (name, levels) in zip(("-", "--", ":", "-."), accuracies.items(), strict=False):
        for head, chances in enumerate(levels):
            held = [sum(chances[:top]) for top in range(1, 9)]
            right.plot(range(1, 9), held, style, color=COLOURS[head % 6], label=f"{what} {head + 1}, {name}")
    right.set(xlabel="first guesses", ylabel="hold the token that came", ylim=(0, 1), title="held-out answers")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    return True


def plot_overlaps(
    progress: Progress, overlaps: Mapping[str, Sequence[Sequence[float]]], path: Path, most: int = 4
) -> bool:
    """Draw what retaining heads and labels choose alike, over the steps, and at the end for each layer and head.

    Args:
        progress: of the run.
        overlaps: by held-out file, of each layer and KV head.
        path: of the picture.
        most: files whose heads are drawn.

    Returns:
        False where matplotlib is not installed; nothing is written then.
    """
    shown = list(overlaps.items())[:most]
    figure, panels = _panels(4, *[2] * len(shown))
    if not panels:
        return False
    left, *others = panels
    for name, colour in zip(overlaps, (MEAN_COLOUR, *HELD_OUT_COLOURS * len(overlaps)), strict=False):
        points = [(entry["step"], entry["measures"][name]["overlap"]) for entry in progress.held_out]
        left.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3, label=name)
    left.set(xlabel="step", ylabel="overlap of the top 10 %", ylim=(0, 1), title="held-out prompts")
    left.legend(frameon=False, fontsize=8)
    for axes, (name, layers) in zip(others, shown, strict=True):
        widest = max(map(len, layers))
        table = [[*layer, *[float("nan")] * (widest - len(layer))] for layer in layers]
        picture = axes.imshow(table, vmin=0, vmax=1, aspect="auto", cmap="viridis")
        axes.set(xlabel="KV head", ylabel="layer", title=name, xticks=range(widest))
    if shown:
        figure.colorbar(picture, ax=others, label="overlap")
    figure.savefig(path, dpi=120)
    return True


def plot_losses(progress: Progress, path: Path, unit: str = "nats per token") -> bool:
    """Draw training loss and held-out bits per character or acceptance over the tokens seen.

    Returns:
        False where matplotlib is not installed; nothing is written then.
    """
    figure, panels = _panels(1)
    if not panels:
        return False
    axes = panels[0]
    tokens, losses = [entry[1] / 1e6 for entry in progress.losses], [entry[3] for entry in progress.losses]
    windows = [losses[max(0, end - WINDOW) : end] for end in range(1, len(losses) + 1)]
    means = [sum(window) / len(window) for window in windows]
    axes.plot(tokens, losses, color=STEP_COLOUR, linewidth=0.8, label="training, each step")
    axes.plot(tokens, means, color=MEAN_COLOUR, linewidth=1.6, label=f"training, mean of {WINDOW} steps")
    names = list(progress.held_out[-1]["measures"]) if progress.held_out else []
    other: Any = None
    for name, colour in zip(names, HELD_OUT_COLOURS * len(names), strict=False):
        points = [(entry["tokens"] / 1e6, entry["measures"][name]) for entry in progress.held_out]
        key, label, ylabel, limits = next(measure for measure in MEASURES if measure[0] in points[0][1])
        other = other or (axes.twinx() if ylabel else None)
        drawn = other if ylabel else axes
        curve = [(x, measures[key]) for x, measures in points]
        drawn.plot(*zip(*curve, strict=True), "o-", color=colour, markersize=3, label=f"{label} {name}")
        if ylabel:
            drawn.set(ylabel=ylabel)
        if limits:
            drawn.set(ylim=limits)
    axes.set(xlabel="training tokens (millions)", ylabel=f"loss ({unit})" if unit else "loss")
    # Below the picture: inside it, a legend of two axes always lies on one of the curves.
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)
    return True

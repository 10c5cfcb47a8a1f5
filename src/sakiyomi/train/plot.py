"""The loss curve of a run as a picture."""

from __future__ import annotations

from pathlib import Path

from sakiyomi.train.loop import Progress

# Dark and wide enough to be read when the picture is shown small.
STEP_COLOUR, MEAN_COLOUR = "#b8c4d6", "#1f4e8c"
HELD_OUT_COLOURS = ("#c2452d", "#2d8c5a", "#8c5a2d", "#6a3d9a")
WINDOW = 25


def plot_losses(progress: Progress, path: Path) -> bool:
    """Draw training loss and held-out bits per character or acceptance over the tokens seen.

    Returns:
        False where matplotlib is not installed; nothing is written then.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    tokens = [entry[1] / 1e6 for entry in progress.losses]
    losses = [entry[3] for entry in progress.losses]
    windows = [losses[max(0, end - WINDOW) : end] for end in range(1, len(losses) + 1)]
    means = [sum(window) / len(window) for window in windows]
    axes.plot(tokens, losses, color=STEP_COLOUR, linewidth=0.8, label="training, each step")
    axes.plot(tokens, means, color=MEAN_COLOUR, linewidth=1.6, label=f"training, mean of {WINDOW} steps")
    names = list(progress.held_out[-1]["measures"]) if progress.held_out else []
    other = None
    for name, colour in zip(names, HELD_OUT_COLOURS * len(names), strict=False):
        points = [(entry["tokens"] / 1e6, entry["measures"][name]) for entry in progress.held_out]
        if "nats_per_token" in points[0][1]:
            values = [measures["nats_per_token"] for _, measures in points]
            axes.plot([x for x, _ in points], values, "o-", color=colour, markersize=3, label=f"held-out {name}")
        else:
            other = other or axes.twinx()
            values = [measures["acceptance_rate"] for _, measures in points]
            other.plot([x for x, _ in points], values, "o-", color=colour, markersize=3, label=f"acceptance {name}")
    axes.set(xlabel="training tokens (millions)", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    if other is not None:
        other.set(ylabel="acceptance rate on held-out prompts", ylim=(0, 1))
    # Below the picture: inside it, a legend of two axes always lies on one of the curves.
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)
    return True

"""Results as a person reads them: tables in Markdown, plots as PNG."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from csl_hf.files import replacing

logger = logging.getLogger(__name__)

DIAGNOSTICS = ("alignment", "uniformity", "mean_cosine", "effective_rank")


def markdown_table(rows: Mapping[str, Mapping[str, float]], digits: int = 3) -> str:
    """A table with one line for each row name and one column for each metric.

    Args:
        rows: metrics of each row by name, e.g. ``{"before": {...}, "after": {...}}``. A metric that a row lacks is
            shown as a dash.
        digits: decimals.
    """
    columns = list(dict.fromkeys(metric for metrics in rows.values() for metric in metrics))
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for name, metrics in rows.items():
        cells = [f"{metrics[column]:.{digits}f}" if column in metrics else "–" for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot_training_log(log_history: Sequence[Mapping[str, Any]], path: str | Path) -> bool:
    """Losses, evaluation metrics and collapse diagnostics over the steps, as one PNG.

    Args:
        log_history: ``trainer.state.log_history``.
        path: file to write.

    Returns:
        Whether it was drawn; False, with a log line, if matplotlib is not installed or nothing was logged.
    """
    if find_spec("matplotlib") is None:
        logger.warning("No loss plot: matplotlib is not installed (pip install csl_hf[plot]).")
        return False
    names = dict.fromkeys(name for entry in log_history for name in entry)
    losses = [name for name in names if name == "loss" or name.startswith("loss/")]
    metrics = [name for name in names if name.startswith("eval_") and name != "eval_runtime"]
    panels = [("losses", losses), *((name, [name]) for name in (*metrics, *DIAGNOSTICS) if name in names)]
    panels = [(title, series) for title, series in panels if series]
    if not panels:
        logger.warning("No loss plot: nothing was logged.")
        return False

    # The object interface, not pyplot: no global figure, no display needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.5 * columns, 3.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (title, series) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, index + 1)
        for name in series:
            points = [(entry["step"], entry[name]) for entry in log_history if name in entry and "step" in entry]
            axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 12 else None, label=name)
        axes.set_title(title.removeprefix("eval_"))
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if len(series) > 1:
            axes.legend()
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=100)
    return True

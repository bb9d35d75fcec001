"""Picture of batches under memory budgets: tokens a second against memory, a line for each batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotuner.errors import InputError
from autotuner.extras import needed_for

ENDINGS = (".svg", ".png", ".pdf")
GIB, MIB = 1 << 30, 1 << 20
Point = tuple[int, float]
"""Bytes of memory, and tokens a second."""


@dataclass(frozen=True)
class BatchLine:
    """A line of the picture.

    Args:
        label: of the batch.
        points: from the least memory on.
        measured: the one that ran.
    """

    label: str
    points: Sequence[Point]
    measured: Point


def save(lines: Sequence[BatchLine], budget_bytes: int, counted: str, path: Path) -> None:
    """Draw tokens a second against memory.

    Args:
        budget_bytes: of the steps that ran.
        counted: "tokens" or "samples".
        path: of a file that ends in .svg, .png or .pdf.

    Raises:
        InputError: another ending, or no lines.
        MissingError: matplotlib is not installed.
    """
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"{str(path)!r} ends in {path.suffix!r}: a picture ends in {', '.join(ENDINGS)}")
    if not lines:
        raise InputError("no batch can run within the budget, so there is nothing to draw: give it more memory")
    with needed_for("a picture of batches"):
        from matplotlib.figure import Figure
    most = max(budget_bytes, *(memory for line in lines for memory, _ in line.points))
    unit, name = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for line in lines:
        memory, speeds = zip(*line.points, strict=True)
        # A budget between two points gives what the lower one does.
        (drawn,) = axes.plot(
            [each / unit for each in (*memory, most)], [*speeds, speeds[-1]], drawstyle="steps-post", label=line.label
        )  # fmt: skip
        measured, speed = line.measured
        axes.plot([measured / unit], [speed], "o", color=drawn.get_color())
    axes.axvline(budget_bytes / unit, color="0.5", linestyle=":", label="the budget")
    axes.set_xlabel(f"memory of a training step, {name}")
    axes.set_ylabel(f"{counted} a second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(title="batch (dots: measured)", loc="lower right")
    figure.savefig(path)

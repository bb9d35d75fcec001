"""Figures of a plan for papers, by matplotlib: what was measured of each step, roofline, memory, leaner plans."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotuner.errors import InputError
from autotuner.extras import needed_for
from autotuner.ir.records import Measurement
from autotuner.plan.configuration import Configuration
from autotuner.plan.report.candidates import candidates_of
from autotuner.plan.report.picture import DrawnStep, PlanPicture
from autotuner.space import Space

ENDINGS = (".svg", ".png", ".pdf")
STEPS_MAX = 24
"""Of a violin plot, those that take longest."""
LABEL_MAX = 36
COLOURS = {"contraction": "#1f6fb4", "normalisation": "#2a8a4a", "element-wise": "#7b4fa3", "conversion": "#c46210"}
CHOSEN, BEST = "#d1242f", "#1a7f37"
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


@dataclass(frozen=True)
class WorkTimes:
    """All times that were measured for the work of a step.

    Args:
        label: the operators' names joined, or the first of many.
        us: of each candidate that computes just these operators, in any form.
        chosen_us: of the one in the plan.
    """

    label: str
    us: Sequence[float]
    chosen_us: float


def step_times(
    picture: PlanPicture, space: Space, known: Mapping[str, Measurement], configuration: Configuration
) -> list[WorkTimes]:
    """Return the times of the steps that take longest, conversions left out.

    Args:
        space: the search space of the configuration's graph.
        known: measurements by call key, of its environment.
    """
    computing = [step for step in picture.steps if step.members]
    found = []
    for step in sorted(computing, key=lambda each: -each.predicted_us)[:STEPS_MAX]:
        names = {member.name for member in step.members}
        groups = candidates_of(space, known, configuration, step.members[0].name, None).groups
        us = [each.us for group in groups if set(group.operators) == names for each in group.candidates]
        found.append(WorkTimes(_short(step), us or [step.predicted_us], step.predicted_us))
    return found


def _short(step: DrawnStep) -> str:
    """Return the operators of a step as a label has room for them."""
    first, *others = step.members
    return step.label if len(step.label) <= LABEL_MAX else f"{first.name} + {len(others)} more"


def plot(kind: str, picture: PlanPicture, times: Sequence[WorkTimes], path: Path) -> None:
    """Draw a figure.

    Args:
        kind: one of `KINDS`.
        times: for a violin plot.
        path: of a file that ends in .svg, .png or .pdf.

    Raises:
        InputError: another ending; or what is to be drawn is not known.
        MissingError: matplotlib is not installed.
    """
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"{str(path)!r} ends in {path.suffix!r}: a figure ends in {', '.join(ENDINGS)}")
    with needed_for("a figure"):
        from matplotlib.figure import Figure
    height = max(3.0, 1.2 + 0.32 * len(times)) if kind == "violin" else 4.5
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.add_subplot()
    KINDS[kind](axes, picture, times)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _violin(axes: Any, picture: PlanPicture, times: Sequence[WorkTimes]) -> None:
    """Draw for each step how the times of all candidates for its work are distributed, as the paper does."""
    from math import log10

    if not times:
        raise InputError("no candidates are known: a violin plot needs --database, with the measurements of the tuning")
    places = range(len(times), 0, -1)
    for place, step in zip(places, times, strict=True):
        if len(set(step.us)) > 1:
            parts = axes.violinplot([[log10(us) for us in step.us]], [place], vert=False, widths=0.8, showextrema=False)
            for body in parts["bodies"]:
                body.set_facecolor("#8894a3")
        axes.plot([log10(min(step.us))], [place], "^", color=BEST, label="fastest of the same work" * (place == 1))
        axes.plot([log10(step.chosen_us)], [place], "o", color=CHOSEN, label="in the plan" * (place == 1))
    axes.set_yticks(list(places), [step.label for step in times])
    axes.set_ylim(0.4, len(times) + 0.6)
    axes.xaxis.set_major_formatter(lambda value, _: f"{10**value:,.3g}")
    axes.set_xlabel("time of a kernel, us")
    axes.figure.suptitle(f"{picture.reference}, {picture.dtype}: all measured candidates of each step")
    axes.figure.legend(loc="outside lower center", ncols=2)


def _roofline(axes: Any, picture: PlanPicture, times: Sequence[WorkTimes]) -> None:  # noqa: ARG001
    """Draw the rate of each step against its intensity, below the measured ceilings of the device."""
    drawn = [step for step in picture.steps if step.flop and step.moved_bytes]
    if not drawn:
        raise InputError("no step of the plan computes anything: there is no roofline to draw")
    for name, colour in COLOURS.items():
        own = [step for step in drawn if step.step_class == name]
        if own:
            axes.scatter(
                [_intensity(step) for step in own], [step.flop / step.predicted_us / 1e3 for step in own],
                s=[20 + 400 * step.share for step in own], color=colour, alpha=0.7, label=name,
            )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    left, right = axes.get_xlim()
    ceilings, top = picture.ceilings, picture.ceilings.tflop_per_s.get(picture.dtype)
    if ceilings.gb_per_s is not None:
        ends = [each for each in (left, right) if top is None or each * ceilings.gb_per_s < 1e3 * top]
        if top is not None:
            ends.append(min(right, 1e3 * top / ceilings.gb_per_s))
        axes.plot(ends, [each * ceilings.gb_per_s for each in ends], color="0.3", label="bytes moved")
    if top is not None:
        begin = left if ceilings.gb_per_s is None else max(left, 1e3 * top / ceilings.gb_per_s)
        axes.plot([begin, max(right, begin)], [1e3 * top] * 2, color="0.3", linestyle="--", label="products")
    axes.set_xlabel("flop for each byte that is moved")
    axes.set_ylabel("Gflop/s")
    known = "" if ceilings.gb_per_s or top else " (the ceilings of the device are not known: give --database)"
    axes.set_title(f"{picture.reference}, {picture.dtype}: steps, by their share of the time{known}")
    axes.legend(loc="lower right")


def _intensity(step: DrawnStep) -> float:
    return step.flop / step.moved_bytes


def _memory(axes: Any, picture: PlanPicture, times: Sequence[WorkTimes]) -> None:  # noqa: ARG001
    """Draw the bytes that exist at each step, beside parameters and inputs."""
    moments = picture.memory
    most = max(1, *(each.saved_bytes + each.working_bytes + each.output_bytes for each in moments))
    unit, name = next((size, text) for size, text in UNITS if most >= size)
    parts = {
        "saved for backward": [each.saved_bytes / unit for each in moments],
        "in use": [each.working_bytes / unit for each in moments],
        "handed out": [each.output_bytes / unit for each in moments],
    }
    axes.stackplot(range(len(moments)), *parts.values(), labels=list(parts), step="mid", alpha=0.8)
    between = next((place for place, each in enumerate(moments) if not each.step), None)
    if between is not None:
        axes.axvline(between, color="0.3", linestyle=":", label="between forward and backward")
    if picture.budget_bytes is not None:
        axes.axhline(picture.budget_bytes / unit, color=CHOSEN, label="budget")
    axes.set_xlabel("step")
    axes.set_ylabel(f"beside parameters and inputs, {name}")
    axes.set_title(f"{picture.reference}, {picture.dtype}: memory over a training step")
    axes.legend()


def _front(axes: Any, picture: PlanPicture, times: Sequence[WorkTimes]) -> None:  # noqa: ARG001
    """Draw what leaner plans of the same graph take more, and hold less.

    Where the tokens of a step are known, their rate is the axis on the left, and the time that on the right.
    """
    if len(picture.front) < 2:
        raise InputError("the configuration keeps no leaner plans, so there is no front to draw: its tensors are small")
    points, tokens = sorted(picture.front, key=lambda each: each.held_bytes), picture.tokens
    unit, name = next((size, text) for size, text in UNITS if max(each.peak_bytes for each in points) >= size)
    heights = [each.predicted_us if tokens is None else tokens / each.predicted_us for each in points]
    for what, mark in (("held_bytes", "o"), ("peak_bytes", "s")):
        label = "held between forward and backward" if what == "held_bytes" else "peak"
        axes.plot([getattr(each, what) / unit for each in points], heights, mark, linestyle="-", label=label)
    axes.set_xlabel(f"{name} beside parameters and inputs")
    if tokens is None:
        axes.set_ylabel("predicted time, us")
    else:
        axes.set_ylabel("tokens/s, millions")
        beside = axes.secondary_yaxis("right")
        beside.yaxis.set_major_formatter(lambda rate, _: f"{tokens / rate:,.4g}" if rate > 0 else "")
        beside.set_ylabel("predicted time, us")
    of_step = "time" if tokens is None else f"{tokens:,} tokens a step,"
    axes.set_title(f"{picture.reference}, {picture.dtype}: {of_step} against memory")
    axes.legend()


Drawing = Callable[[Any, PlanPicture, Sequence[WorkTimes]], None]
KINDS: Mapping[str, Drawing] = {"violin": _violin, "roofline": _roofline, "memory": _memory, "front": _front}

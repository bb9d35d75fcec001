"""Every step as the page shows it: its times beside what else was measured for the same work, and details in words."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log10

from autotuner.errors import ConfigurationError
from autotuner.ir.cost import Cost
from autotuner.ir.graph import Graph
from autotuner.plan.configuration import Configuration
from autotuner.plan.explanation import Weighed, weigh
from autotuner.plan.phrases import (
    MISSING,
    TIMES,
    binary,
    call_words,
    change,
    duration,
    microseconds,
    percent,
    short_form,
    span,
)
from autotuner.plan.report.compare import StepComparison, TimedCandidate
from autotuner.plan.report.diagram import Box
from autotuner.plan.report.shares import cost_of
from autotuner.plan.step import Step, tensor_of

STOPS = (1, 2, 5)
MOST_TICKS = 5
WIDTH, INSET = 160, 8
"""Of a bar, in pixels; the ends of the scale are `INSET` from the bar's, so that marks have room."""

GB_PER_S = 1e3
"""Bytes per microsecond in a gigabyte per second; flop per microsecond in a gigaflop per second as well."""


@dataclass(frozen=True, slots=True)
class Range:
    """A step's times, in microseconds; None where one is not known."""

    best_us: float | None
    chosen_us: float
    default_us: float | None = None
    worst_us: float | None = None

    @classmethod
    def of(cls, row: StepComparison) -> "Range":
        best_us, worst_us = (timed.us if timed else None for timed in (row.best, row.worst))
        return cls(best_us, row.chosen_us, row.default_us, worst_us)

    @property
    def multiples(self) -> dict[str, float]:
        """Each known time as a multiple of the best; empty where the best is not known or takes no time."""
        if not self.best_us:
            return {}
        times = {"best": self.best_us, "chosen": self.chosen_us, "default": self.default_us, "worst": self.worst_us}
        return {name: us / self.best_us for name, us in times.items() if us}


@dataclass(frozen=True, slots=True)
class Scale:
    """A logarithmic scale from `low` to `high`, multiples of the best."""

    low: float
    high: float

    @classmethod
    def over(cls, ranges: Iterable[Range]) -> "Scale":
        """Return a scale on which every multiple has a place."""
        multiples = [multiple for times in ranges for multiple in times.multiples.values()]
        return cls(min(1.0, *multiples, 1.0), max(2.0, *multiples, 2.0))

    def place(self, multiple: float) -> float:
        """Return where a multiple lies, from 0 to 1."""
        share = (log10(multiple) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return min(1.0, max(0.0, share))

    def x(self, multiple: float) -> float:
        """Return where a multiple lies on a bar of `width` pixels."""
        return round(INSET + (self.width - 2 * INSET) * self.place(multiple), 1)

    @property
    def width(self) -> int:
        return WIDTH

    @property
    def ticks(self) -> tuple[float, ...]:
        """1, 2, 5, 10, 20 ... as far as the scale reaches; powers of ten alone where those are too many to be read."""
        fine = [stop * 10.0**power for power in range(-9, 10) for stop in STOPS]
        found = tuple(value for value in fine if self.low <= value <= self.high)
        return found if len(found) <= MOST_TICKS else tuple(value for value in found if value in fine[:: len(STOPS)])


@dataclass(frozen=True)
class StepView:
    """A step with its number from 1, its share of the predicted time, and what was measured for the same work.

    `row` is None where the measurements are not at hand; the best time is then what the configuration itself knows.
    `other` is the best plan without the step, None where that is not recorded.
    """

    number: int
    label: str
    box: Box
    share: float
    cost: Cost
    row: StepComparison | None
    other: Weighed | None

    @property
    def step(self) -> Step:
        return self.box.step

    @property
    def times(self) -> Range:
        if self.row is not None:
            return Range.of(self.row)
        return Range(self.step.bound_us or None, self.step.predicted_us)

    @property
    def gb_per_s(self) -> float | None:
        us = self.step.predicted_us
        return self.cost.moved_bytes / us / GB_PER_S if us else None

    @property
    def gflop_per_s(self) -> float | None:
        us = self.step.predicted_us
        return self.cost.flop / us / GB_PER_S if us and self.cost.flop else None


def step_views(
    configuration: Configuration, boxes: Sequence[Box], rows: Sequence[StepComparison] | None
) -> tuple[StepView, ...]:
    """Return a view of each step, in running order.

    Raises:
        ConfigurationError: the rows are of another configuration.
    """
    labels = [step.label for step in configuration.steps]
    if rows is not None and [row.label for row in rows] != labels:
        raise ConfigurationError(
            f"{len(rows)} rows for {len(labels)} steps, or rows for other steps: give those that `compare` returns for "
            "this configuration"
        )
    graph = configuration.graph()
    total = sum(box.step.predicted_us for box in boxes)
    return tuple(
        StepView(
            number=box.number + 1,
            label=label,
            box=box,
            share=box.step.predicted_us / total if total else 0.0,
            cost=cost_of(box.step, graph),
            row=rows[box.number] if rows is not None else None,
            other=_other(configuration, box.step),
        )
        for box, label in zip(boxes, labels, strict=True)
    )


def _other(configuration: Configuration, step: Step) -> Weighed | None:
    """Return the best plan without a step; a repetition has none of its own."""
    return None if step.alternative is None or step.again else weigh(configuration, step.alternative)


def excess_us(views: Iterable[StepView]) -> float | None:
    """Return how much longer the steps take than each at its own best, None where the best of one is not known.

    A conversion is its own best where nothing is known of others.
    """
    total = 0.0
    for view in views:
        best_us = view.times.best_us
        if best_us is None and not view.step.is_conversion:
            return None
        total += max(0.0, view.step.predicted_us - best_us) if best_us is not None else 0.0
    return total


def check_tensors(configuration: Configuration) -> Graph:
    """Return the graph of a configuration whose steps name its tensors and operators only.

    Raises:
        ConfigurationError: a step names another one.
    """
    graph = configuration.graph()
    operators = {operator.name for operator in graph.operators}
    for number, step in enumerate(configuration.steps, start=1):
        named = [name for name, _ in step.inputs + step.outputs if tensor_of(name) not in graph.tensors]
        named += [name for name in step.operators + step.recomputed if name not in operators]
        if named or (step.is_conversion and (len(step.inputs), len(step.outputs)) != (1, 1)):
            odd = f"names {named[0]!r}, which its graph lacks" if named else "computes nothing and is no conversion"
            raise ConfigurationError(f"step {number} of the configuration {odd}: tune the model again")
    return graph


def box_words(view: StepView) -> str:
    """Return what hovering over a box says, line by line."""
    step = view.step
    lines = [
        f"Step {view.number}, {step.phase}: {call_words(step.kernel, step.params)}",
        f"{duration(step.predicted_us)}, {percent(view.share)} of the kernels' time",
        f"of the same work: {range_words(view)}",
    ]
    if step.is_conversion:
        lines.append(f"converts {step.inputs[0][0]} from {step.inputs[0][1]} to {step.outputs[0][1]}")
    lines += [f"computes {member.name} ({member.kind})" for member in view.box.members if not member.again]
    lines += [f"computes again {member.name} ({member.kind})" for member in view.box.members if member.again]
    lines += [f"reads {name} as {form}" for name, form in step.inputs]
    lines += [f"writes {name} as {form}" for name, form in step.outputs]
    lines += [f"in one buffer: {', '.join(names)}" for names in step.adjacent]
    lines.append(
        f"{view.cost.flop:,} flop, {binary(view.cost.moved_bytes)} moved"
        + (f", {view.gb_per_s:.3g} GB/s" if view.gb_per_s else "")
    )
    return "\n".join(lines)


def tensor_words(made: tuple[str, str], graph: Graph, steps: Sequence[StepView]) -> str:
    """Return what hovering over a tensor says, line by line."""
    name, form = made
    tensor = graph.tensors[tensor_of(name)]
    lines = [
        f"{name}, {tensor.dtype}, {tensor.role}",
        f"lies as {form}" + (", as declared" if is_declared(made, graph) else f"; declared {tensor.axes}"),
        f" {TIMES} ".join(f"{axis}={graph.extents[axis]}" for axis in tensor.axes),
        *(f"made by step {view.number}: {view.label}" for view in steps if made in view.step.outputs),
        *(f"read by step {view.number}: {view.label}" for view in steps if made in view.step.inputs),
    ]
    return "\n".join(lines)


def is_declared(made: tuple[str, str], graph: Graph) -> bool:
    """Tell whether a form keeps the declared order of axes; a slice of a stack does not."""
    return made[1].partition(":")[0] == graph.tensors[tensor_of(made[0])].axes


def range_words(view: StepView) -> str:
    """Return a range bar in words; what could not be looked up is left out, what was never measured is not known."""
    times = view.times
    named = [("best", times.best_us), ("chosen", times.chosen_us)]
    if view.row is not None:
        named += [("default", times.default_us), ("worst", times.worst_us)]
    return "; ".join(f"{name} {microseconds(us) if us is not None else 'not known'}" for name, us in named) + " µs"


def other_words(other: Weighed) -> str:
    """Return in what another way differs from the plan, and what that costs where."""
    price, own_us = other.alternative, other.alternative.predicted_us
    least = f"at least {change(price.extra_low_us)} µs within the intervals"
    text = f"{other.difference}: {change(price.extra_us)} µs in all, {least}"
    if own_us is None:
        return text
    if other.instead_us is None or other.gained_us is None or other.paid_us is None:
        return f"{text}; it takes {duration(own_us)} itself"
    return (
        f"{text}; it takes {duration(own_us)} itself where {duration(other.instead_us)} are taken now: "
        f"{change(-other.gained_us)} µs here, {change(other.paid_us)} µs elsewhere"
    )


def interval_words(step: Step) -> str:
    """Return the interval of a step's median."""
    return span(step.low_us, step.high_us) if step.low_us < step.high_us else "not known"


def candidate_words(timed: TimedCandidate | None) -> str:
    """Return a candidate in words: kernel, parameters, forms of what it reads and writes."""
    if timed is None:
        return MISSING
    forms = ", ".join(f"{name} {short_form(form)}" for name, form in timed.forms)
    return f"{call_words(timed.kernel, timed.params)}: {forms}"


def failure_words(row: StepComparison) -> Iterator[str]:
    """Yield how many candidates of which kernel failed, in which way, with the sentence stored with them."""
    for failure in row.failures:
        yield f"{failure.candidates} {TIMES} {failure.kernel}, {failure.status}: {failure.message or 'no message'}"


def failed_words(failed: Mapping[str, int]) -> str:
    """Return failures by status: "3 wrong, 1 timeout"."""
    return ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in failed.items())

"""Steps of a solution in running order: each conversion and each repetition right before its first reader."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autotuner.ir.form import STACK_AXIS, Form
from autotuner.ir.graph import Graph
from autotuner.ir.records import Candidate, Measurement
from autotuner.plan.step import AGAIN, Step
from autotuner.solve.problem import Solution
from autotuner.solve.problem.formulate import Formulation
from autotuner.space import Choice, Conversion, Space

Operand = tuple[str, str]
"""An instance of a tensor, and its form."""


def steps_of(formulation: Formulation, solution: Solution, known: Mapping[str, Measurement]) -> tuple[Step, ...]:
    """Return the steps of a solution.

    Args:
        known: what was measured, by call key.

    Raises:
        CircleError: chosen covers depend on each other.
    """
    return tuple(_StepBuilder(formulation, solution, known).steps())


class _StepBuilder:
    def __init__(self, formulation: Formulation, solution: Solution, known: Mapping[str, Measurement]) -> None:
        self._formulation, self._known = formulation, known
        self._graph: Graph = formulation.offered.graph
        self._chosen = formulation.in_order(solution)
        self._repeated = dict(formulation.repeated(solution))
        self._lies, self._held = formulation.lies(solution), formulation.held(solution)
        self._best_us = best_by_cover(formulation.offered.space, formulation.costs_us)
        # What forward and parameters were not converted into yet, and what of that forward reads.
        self._left = {(name, target) for name, lies in self._lies.items() for target in lies.targets}
        self._read = {
            (name, choice.by_tensor[name])
            for choice in self._chosen
            if not formulation.offered.is_backward(choice)
            for name in choice.cover.inputs
        }
        # What backward has of forward, under which name; and every instance that was made.
        self._late: dict[Operand, Operand] = {}
        self._made: set[Operand] = set()

    def steps(self) -> Iterator[Step]:
        offered = self._formulation.offered
        for choice in self._chosen:
            if offered.is_backward(choice):
                yield from self._late_step(choice)
            else:
                operands = [(name, choice.by_tensor[name]) for name in choice.cover.inputs]
                yield from self._converted(operands, "forward")
                yield self._step(choice, operands, "forward")
                for name in choice.cover.outputs:
                    unread = [(n, form) for n, form in self._left if n == name and (n, form) not in self._read]
                    yield from self._converted(sorted(unread), "forward")
        for name in self._graph.outputs:
            phase = self._graph.producers[name].phase
            yield from self._converted(sorted(place for place in self._left if place[0] == name), phase)

    def _converted(self, places: Sequence[Operand], phase: str) -> Iterator[Step]:
        """Yield the conversions into those of these places that are not there yet."""
        for name, form in places:
            if (name, form) not in self._left:
                continue
            self._left.remove((name, form))
            conversion = self._formulation.conversions[name, self._lies[name].form, form]
            yield self._conversion(conversion, (name, conversion.source), (name, form), phase)

    def _late_read(self, name: str, form: str) -> Iterator[Step]:
        """Yield what backward has to do first to read a tensor of forward in this form."""
        if name not in self._held or (name, form) in self._late:
            return
        held = self._held[name]
        if (name, held.form) not in self._late:
            if held.repeated:
                yield from self._repeat(self._graph.producers[name].name)
            else:
                self._late[name, held.form] = (name, held.form)
        if form != held.form:
            conversion = self._formulation.conversions[name, held.form, form]
            source, _ = self._late[name, held.form]
            # Another name only where forward has the same, or is still to have it: most conversions are made once.
            is_other = (source, form) in self._made or (name, form) in self._left
            target = AGAIN + name if is_other else source
            self._late[name, form] = (target, form)
            yield self._conversion(conversion, (source, held.form), (target, form), "backward")

    def _late_step(self, choice: Choice, again: Sequence[Operand] | None = None) -> Iterator[Step]:
        operands = []
        for name in choice.cover.inputs:
            place = (name, choice.by_tensor[name])
            yield from self._late_read(*place)
            yield from self._converted([place], "backward")
            operands.append(self._late.get(place, place))
        yield self._step(choice, operands, "backward", again)
        for name in choice.cover.remade:
            self._late[name, choice.by_tensor[name]] = (AGAIN + name, choice.by_tensor[name])

    def _repeat(self, operator: str) -> Iterator[Step]:
        choice = self._repeated[operator]
        places = [(name, choice.by_tensor[name]) for name in choice.cover.outputs]
        made = [(AGAIN + name, form) for name, form in places]
        yield from self._late_step(choice, made)
        self._late.update(zip(places, made, strict=True))

    def _step(
        self, choice: Choice, inputs: Sequence[Operand], phase: str, again: Sequence[Operand] | None = None
    ) -> Step:
        cover = choice.cover
        outputs: Sequence[Operand] = again or [
            (AGAIN + name if name in cover.remade else name, choice.by_tensor[name]) for name in cover.outputs
        ]
        self._made.update(outputs)
        called = dict(zip(cover.inputs + cover.outputs, (name for name, _ in (*inputs, *outputs)), strict=True))
        return Step(
            operators=cover.operators,
            recomputed=cover.recomputed,
            phase=phase,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            adjacent=tuple(tuple(called[name] for name in names) for names in _adjacent(choice)),
            bound_us=self._best_us[cover.operators],
            again=again is not None,
            **self._costs(choice.candidate, choice.call.key),
        )

    def _conversion(self, conversion: Conversion, source: Operand, target: Operand, phase: str) -> Step:
        self._made.add(target)
        costs = self._costs(conversion.candidate, conversion.call.key)
        return Step(
            operators=(), recomputed=(), phase=phase, inputs=(source,), outputs=(target,), adjacent=(), bound_us=0.0,
            **costs,
        )  # fmt: skip

    def _costs(self, candidate: Candidate, key: str) -> dict[str, Any]:
        low_us, high_us = interval_us(self._known[key])
        return {
            "kernel": candidate.kernel,
            "params": candidate.params,
            "predicted_us": self._formulation.costs_us[key],
            "low_us": low_us,
            "high_us": high_us,
        }


def interval_us(measurement: Measurement) -> tuple[float, float]:
    """Return the interval of a measurement's median; the median itself where only that was recorded."""
    assert measurement.median_us is not None
    low, high = measurement.low_us, measurement.high_us
    return (measurement.median_us if low is None else low), (measurement.median_us if high is None else high)


def best_by_cover(space: Space, costs_us: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    """Return what the cheapest candidate of each cover costs, by the cover's operators."""
    best: dict[tuple[str, ...], float] = {}
    for choice in space.choices:
        cost = costs_us.get(choice.call.key)
        if cost is not None:
            names = choice.cover.operators
            best[names] = min(cost, best.get(names, cost))
    return best


def _adjacent(choice: Choice) -> Iterator[tuple[str, ...]]:
    """Yield the tensors that a stacked kernel wants one behind the other: slices with the stacking axis outermost.

    Slices of several stacks may alternate in the boundary; each joins the first stack of its layout that it continues.
    """
    runs: dict[tuple[str, int], list[list[str]]] = defaultdict(list)
    for name, text in zip(choice.cover.inputs + choice.cover.outputs, choice.candidate.forms, strict=True):
        form = Form.parse(text)
        if form.stack is None or not form.layout.axes.startswith(STACK_AXIS):
            continue
        alike = runs[form.layout.axes, form.stack.count]
        if form.stack.index == 0:
            alike.append([])
        next(run for run in alike if len(run) == form.stack.index).append(name)
    yield from (tuple(run) for alike in runs.values() for run in alike)

"""Differences of two configurations, part by part, with what each is worth."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from autotuner.plan.configuration import Configuration
from autotuner.plan.phrases import call_words, counted, form_words, listed
from autotuner.plan.step import Step, tensor_of

CONVERSIONS = "conversion of "
NOTHING_US = 1e-9


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """A step of one side, by its number from 1."""

    number: int
    label: str
    kernel: str
    params: Mapping[str, Any]
    predicted_us: float


@dataclass(frozen=True, slots=True)
class PartDifference:
    """Steps of both sides that compute the same operators: the smallest such part.

    Args:
        name: its operators joined, or the tensor that is converted.
        operators: () for conversions.
        one_us, other_us: predicted, of its steps; 0 where a side has no such step.
        worth_us: what the other takes more.
        words: in what the sides differ; () where they run the same.
    """

    name: str
    operators: tuple[str, ...]
    phase: str
    one: tuple[ComparedStep, ...]
    other: tuple[ComparedStep, ...]
    one_us: float
    other_us: float
    worth_us: float
    words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ConfigurationDifferences:
    """Two configurations side by side.

    Args:
        parts: the greatest difference of time first.
        facts: (name, one's, the other's) of what was asked for and where it was measured, where they differ.
        comparable: whether both were measured in the same environment for the same graph: then a difference of times
            comes from the plans alone.
        words: the result in sentences.
    """

    parts: tuple[PartDifference, ...]
    facts: tuple[tuple[str, str, str], ...]
    one_us: float
    other_us: float
    one_measured_us: float | None
    other_measured_us: float | None
    comparable: bool
    words: tuple[str, ...]


def differences(one: Configuration, other: Configuration) -> ConfigurationDifferences:
    """Return in what two configurations differ, part by part.

    A part is the least set of operators that both sides compute by whole steps. Where one fuses a bias into a product
    and the other does not, both are one part.
    """
    parts = sorted(_parts(one, other), key=lambda part: (-abs(part.worth_us), part.name))
    same_graph, same_place = one.graph_key == other.graph_key, one.environment_key == other.environment_key
    one_us, other_us = (fsum(step.predicted_us for step in side.steps) for side in (one, other))
    return ConfigurationDifferences(
        parts=tuple(parts),
        facts=tuple(_facts(one, other)),
        one_us=one_us,
        other_us=other_us,
        one_measured_us=one.measured.plan_us if one.measured else None,
        other_measured_us=other.measured.plan_us if other.measured else None,
        comparable=same_graph and same_place,
        words=tuple(_words(parts, one_us, other_us, same_graph=same_graph, same_place=same_place)),
    )


def _parts(one: Configuration, other: Configuration) -> Iterator[PartDifference]:
    """Yield the parts: connected by operators that some step of either side computes together."""
    roots: dict[str, str] = {}

    def root(name: str) -> str:
        while roots.setdefault(name, name) != name:
            name = roots[name]
        return name

    for step in (*one.steps, *other.steps):
        names = _keys(step)
        for name in names[1:]:
            roots[root(name)] = root(names[0])
    sides: tuple[dict[str, list[tuple[int, Step]]], ...] = (defaultdict(list), defaultdict(list))
    for side, configuration in zip(sides, (one, other), strict=True):
        for number, step in enumerate(configuration.steps, start=1):
            side[root(_keys(step)[0])].append((number, step))
    for key in dict.fromkeys((*sides[0], *sides[1])):
        mine, theirs = sides[0].get(key, []), sides[1].get(key, [])
        first = (mine or theirs)[0][1]
        operators = tuple(dict.fromkeys(name for _, step in (*mine, *theirs) for name in step.operators))
        one_us, other_us = (fsum(step.predicted_us for _, step in side) for side in (mine, theirs))
        yield PartDifference(
            name=" + ".join(operators) if operators else key,
            operators=operators,
            phase=first.phase,
            one=_compared(mine),
            other=_compared(theirs),
            one_us=one_us,
            other_us=other_us,
            worth_us=other_us - one_us,
            words=tuple(_part_words([step for _, step in mine], [step for _, step in theirs])),
        )


def _keys(step: Step) -> tuple[str, ...]:
    return step.operators or (f"{CONVERSIONS}{tensor_of(step.inputs[0][0])}",)


def _compared(steps: Sequence[tuple[int, Step]]) -> tuple[ComparedStep, ...]:
    return tuple(
        ComparedStep(number, step.label, step.kernel, dict(step.params), step.predicted_us) for number, step in steps
    )


def _part_words(mine: Sequence[Step], theirs: Sequence[Step]) -> Iterator[str]:
    if not mine or not theirs:
        yield "only the first has it" if mine else "only the second has it"
        return
    if [step.operators for step in mine] != [step.operators for step in theirs]:
        yield f"{_grouping(mine)} in place of {_grouping(theirs)}"
        return
    for a, b in zip(mine, theirs, strict=True):
        if (a.kernel, a.params) != (b.kernel, b.params):
            yield f"{call_words(a.kernel, a.params)} in place of {call_words(b.kernel, b.params)}"
        for mine_side, their_side in ((a.inputs, b.inputs), (a.outputs, b.outputs)):
            forms = dict(their_side)
            for name, form in dict(mine_side).items():
                if name in forms and forms[name] != form:
                    yield f"{name} as {form_words(form)} in place of {form_words(forms[name])}"
        if a.recomputed != b.recomputed:
            yield "other operators of forward are computed again"


def _grouping(steps: Sequence[Step]) -> str:
    return f"{counted(len(steps), 'kernel call')} ({listed([step.kernel for step in steps])})"


def _facts(one: Configuration, other: Configuration) -> Iterator[tuple[str, str, str]]:
    mine, theirs = _told(one), _told(other)
    for name in dict.fromkeys((*mine, *theirs)):
        left, right = mine.get(name, "none"), theirs.get(name, "none")
        if left != right:
            yield name, left, right


def _told(configuration: Configuration) -> dict[str, str]:
    model, environment = configuration.model, configuration.environment
    found = {"model": model.reference, "dtype": model.dtype}
    found |= {f"extent {axis}": f"{extent:,}" for axis, extent in model.extents.items()}
    found |= {f"option {name}": str(value) for name, value in model.options.items()}
    found |= {"device": str(environment["device_name"]), "device type": str(environment["device_type"])}
    for group, title in (("facts", ""), ("policy", "policy: ")):
        found |= {f"{title}{name}": str(value) for name, value in environment.get(group, {}).items()}
    found |= {f"version of {name}": version for name, version in configuration.versions.items()}
    budget = configuration.budget_bytes
    found["memory budget"] = "none" if budget is None else f"{budget:,} bytes"
    found["made"] = configuration.created_at
    return found


def _words(
    parts: Sequence[PartDifference], one_us: float, other_us: float, *, same_graph: bool, same_place: bool
) -> Iterator[str]:
    more = other_us - one_us
    if abs(more) < NOTHING_US:
        yield "By the sums of their kernels' times, both take equally long."
    else:
        faster = "first" if more > 0 else "second"
        yield (
            f"By the sums of their kernels' times, the {faster} is faster: {one_us:,.1f} us against {other_us:,.1f} us."
        )
    differ = [part for part in parts if part.words]
    yield f"{counted(len(differ), 'part')} of {len(parts)} run in another way."
    if not same_graph:
        yield "They are of different graphs: parts with the same names may be of different extents or dtypes."
    if not same_place:
        yield "They were measured in different environments: a part that runs the same may still take another time."

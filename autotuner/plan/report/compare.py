"""Comparison of each step with all that was measured for its work: best, worst, default, failed and unknown."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autotuner.errors import ConfigurationError
from autotuner.ir.records import STATUSES, Measurement, Scalar, Status
from autotuner.plan.configuration import Configuration
from autotuner.plan.step import Step, tensor_of
from autotuner.solve.baselines import alone_as_declared_us
from autotuner.space import Choice, Conversion, Space

SameWork = frozenset[str] | tuple[str, str, str]
"""Operators that a cover computes, or the tensor, source and target of a conversion."""


@dataclass(frozen=True, slots=True)
class TimedCandidate:
    """A candidate with its time.

    Args:
        forms: (tensor, form) pairs in the order of the kernel's boundary.
        us: median, in microseconds.
    """

    kernel: str
    params: tuple[tuple[str, Scalar], ...]
    forms: tuple[tuple[str, str], ...]
    us: float


@dataclass(frozen=True, slots=True)
class Failure:
    """Candidates of one kernel that failed in one way, and the sentence that goes with it."""

    kernel: str
    status: Status
    message: str
    candidates: int


@dataclass(frozen=True)
class StepComparison:
    """A step beside what was measured for its work: the same operators under any kernel, forms and parameters.

    For a conversion, the same work is a copy of the same tensor between the same two forms. Candidates that execute the
    same call are measured once and counted once.

    Args:
        label: the operators' names joined, or the conversion's tensor and forms.
        operators: of the step; () for a conversion.
        chosen_us: the step's time as the configuration states it.
        best, worst: of the candidates with a time; None where none has one.
        default_us: the sum of its operators' times, each alone with every tensor as declared; None where one of them is
            not known, and for a conversion.
        candidates: in the search space.
        measured: those with a time.
        failures: those that failed, most frequent first.
    """

    label: str
    operators: tuple[str, ...]
    chosen_us: float
    best: TimedCandidate | None
    worst: TimedCandidate | None
    default_us: float | None
    candidates: int
    measured: int
    failures: tuple[Failure, ...] = field(default=())

    @property
    def failed(self) -> dict[Status, int]:
        """Candidates that failed, by status."""
        counts: Counter[Status] = Counter()
        for failure in self.failures:
            counts[failure.status] += failure.candidates
        return {status: counts[status] for status in STATUSES if counts[status]}

    @property
    def unknown(self) -> int:
        """Candidates that were never measured: neither best nor worst."""
        return self.candidates - self.measured - sum(self.failed.values())


def compare(space: Space, known: Mapping[str, Measurement], configuration: Configuration) -> tuple[StepComparison, ...]:
    """Return what was measured for each step's work, in the order of the steps.

    Args:
        space: of the configuration's graph.
        known: measurements by call key, of the configuration's environment.

    Raises:
        ConfigurationError: the space is of another graph.
    """
    if space.graph.key != configuration.graph_key:
        raise ConfigurationError(
            f"the configuration is of graph {configuration.graph_key[:12]}, the search space of graph "
            f"{space.graph.key[:12]}: build the space from the configuration's own graph"
        )
    alternatives: dict[SameWork, dict[str, Choice | Conversion]] = defaultdict(dict)
    for choice in space.choices:
        alternatives[frozenset(choice.cover.operators)].setdefault(choice.call.key, choice)
    for conversion in space.conversions:
        work = (conversion.tensor, conversion.source, conversion.target)
        alternatives[work].setdefault(conversion.call.key, conversion)
    alone_us = alone_as_declared_us(space, {key: m.median_us for key, m in known.items() if m.median_us is not None})
    return tuple(_compared(step, alternatives[_work(step)], known, alone_us) for step in configuration.steps)


def tally(space: Space, known: Mapping[str, Measurement]) -> dict[str, int]:
    """Return how many calls of a space have each status, 0 left out, and how many are `unknown`: never measured."""
    counts = Counter(known[key].status for key in space.calls if key in known)
    found: dict[str, int] = {status: counts[status] for status in STATUSES if counts[status]}
    return found | {"unknown": len(space.calls) - counts.total()}


def _work(step: Step) -> SameWork:
    if step.is_conversion:
        (tensor, source), (_, target) = step.inputs[0], step.outputs[0]
        return tensor_of(tensor), source, target
    return frozenset(step.operators)


def _compared(
    step: Step,
    alternatives: Mapping[str, Choice | Conversion],
    known: Mapping[str, Measurement],
    alone_us: Mapping[str, float],
) -> StepComparison:
    timed = sorted(_timed(alternatives, known), key=lambda found: found.us)
    has_default = bool(step.operators) and alone_us.keys() >= set(step.operators)
    return StepComparison(
        label=step.label,
        operators=step.operators,
        chosen_us=step.predicted_us,
        best=timed[0] if timed else None,
        worst=timed[-1] if timed else None,
        default_us=sum(alone_us[name] for name in step.operators) if has_default else None,
        candidates=len(alternatives),
        measured=len(timed),
        failures=_failures(alternatives, known),
    )


def _timed(
    alternatives: Mapping[str, Choice | Conversion], known: Mapping[str, Measurement]
) -> Iterator[TimedCandidate]:
    for key, alternative in alternatives.items():
        us = known[key].median_us if key in known else None
        if us is not None:
            candidate = alternative.candidate
            yield TimedCandidate(candidate.kernel, candidate.params, _forms(alternative), us)


def _forms(alternative: Choice | Conversion) -> tuple[tuple[str, str], ...]:
    if isinstance(alternative, Choice):
        return tuple(alternative.by_tensor.items())
    return (alternative.tensor, alternative.source), (alternative.tensor, alternative.target)


def _failures(alternatives: Mapping[str, Choice | Conversion], known: Mapping[str, Measurement]) -> tuple[Failure, ...]:
    counts = Counter(
        (alternative.candidate.kernel, known[key].status, known[key].message)
        for key, alternative in alternatives.items()
        if key in known and known[key].status != "ok"
    )
    return tuple(Failure(*what, candidates) for what, candidates in counts.most_common())

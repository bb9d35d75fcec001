"""Shares of the time: the predicted time of the steps by class of operator, by kind and by kernel."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from autotuner.ir.cost import Cost, moved_bytes, operator_flop
from autotuner.ir.graph import Graph
from autotuner.plan.configuration import Configuration
from autotuner.plan.report.diagram import STEP_CLASSES, StepClass, step_class
from autotuner.plan.step import Step, tensor_of

CONVERSION = "conversion"


@dataclass(frozen=True, slots=True)
class ClassShare:
    """The steps of one class: a step belongs to the class of its heaviest operator.

    `share`, `flop_share` and `bytes_share` are of the whole training step.
    """

    name: StepClass
    steps: int
    operators: int
    forward_us: float
    backward_us: float
    share: float
    flop_share: float
    bytes_share: float

    @property
    def us(self) -> float:
        return self.forward_us + self.backward_us


@dataclass(frozen=True, slots=True)
class Share:
    """Time that one kind of operator or one kernel takes; `number` is of operators or of steps."""

    name: str
    number: int
    us: float
    share: float


def cost_of(step: Step, graph: Graph) -> Cost:
    """Return the flop of a step, repeated operators included, and the bytes that its tensors have as stored."""
    operators = {operator.name: operator for operator in graph.operators}
    flop = sum(operator_flop(graph, operators[name]) for name in step.recomputed + step.operators)
    operands = [(tensor_of(name), form) for name, form in step.inputs + step.outputs]
    return Cost(flop, moved_bytes(graph, [operands]))


def by_class(configuration: Configuration) -> tuple[ClassShare, ...]:
    """Return the classes that occur, in the order of `STEP_CLASSES`."""
    graph = configuration.graph()
    operators = {operator.name: operator for operator in graph.operators}
    members: dict[StepClass, list[Step]] = defaultdict(list)
    for step in configuration.steps:
        members[step_class(step, operators)].append(step)
    costs = {name: [cost_of(step, graph) for step in steps] for name, steps in members.items()}
    flop = sum(one.flop for found in costs.values() for one in found)
    moved = sum(one.moved_bytes for found in costs.values() for one in found)
    total = sum(step.predicted_us for step in configuration.steps)
    return tuple(
        ClassShare(
            name=name,
            steps=len(members[name]),
            operators=sum(len(step.operators) for step in members[name]),
            forward_us=sum(step.predicted_us for step in members[name] if step.phase == "forward"),
            backward_us=sum(step.predicted_us for step in members[name] if step.phase != "forward"),
            share=_share(sum(step.predicted_us for step in members[name]), total),
            flop_share=_share(sum(one.flop for one in costs[name]), flop),
            bytes_share=_share(sum(one.moved_bytes for one in costs[name]), moved),
        )
        for name in STEP_CLASSES
        if name in members
    )


def by_kind(configuration: Configuration) -> tuple[Share, ...]:
    """Return each kind of operator, the longest first; a step's time is shared evenly by its operators."""
    kinds = {operator.name: operator.kind for operator in configuration.graph().operators}
    return _shares(
        (name, step.predicted_us / len(names))
        for step in configuration.steps
        for names in [[kinds[operator] for operator in step.operators] or [CONVERSION]]
        for name in names
    )


def by_kernel(configuration: Configuration) -> tuple[Share, ...]:
    """Return each kernel, the one that takes longest first."""
    return _shares((step.kernel, step.predicted_us) for step in configuration.steps)


def _shares(times: Iterable[tuple[str, float]]) -> tuple[Share, ...]:
    totals: dict[str, list[float]] = defaultdict(list)
    for name, us in times:
        totals[name].append(us)
    whole = sum(us for found in totals.values() for us in found)
    found = [Share(name, len(us), sum(us), _share(sum(us), whole)) for name, us in totals.items()]
    return tuple(sorted(found, key=lambda share: -share.us))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0

"""Contents of the drawing of a training step, before they have places: boxes, tensors between them, saved tensors."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from autotuner.ir.graph import Graph, Operator
from autotuner.ir.kinds import OperatorClass, kind_of
from autotuner.plan.configuration import Configuration
from autotuner.plan.step import Step, tensor_of

Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "backward")
StepClass = Literal["contraction", "normalisation", "element-wise", "conversion"]
STEP_CLASSES: tuple[StepClass, ...] = ("contraction", "normalisation", "element-wise", "conversion")

Made = tuple[str, str]
"""A tensor in one form, as some step makes it."""


@dataclass(frozen=True, slots=True)
class Member:
    """An operator inside a box; `again` where forward computed it already and the kernel repeats it."""

    name: str
    kind: str
    operator_class: OperatorClass
    again: bool = False

    @property
    def kind_words(self) -> str:
        return f"again: {self.kind}" if self.again else self.kind


@dataclass(frozen=True, slots=True)
class BoxTensor:
    """A tensor named inside a box: nothing leads to or from it within the phase.

    Roles: a `parameter` that is read; a tensor `saved` by forward, where it is read in backward; one `kept` for
    backward, where it is made; a parameter's `gradient`; one that is `unread`.
    """

    tensor: str
    form: str
    role: Literal["parameter", "saved", "kept", "gradient", "unread"]


@dataclass(frozen=True)
class Box:
    """A chosen step with the operators inside; a conversion has none, nor ports: it names its tensor itself."""

    number: int
    step: Step
    step_class: StepClass
    members: tuple[Member, ...]
    reads: tuple[BoxTensor, ...] = field(default=())
    makes: tuple[BoxTensor, ...] = field(default=())

    @property
    def phase(self) -> Phase:
        return "forward" if self.step.phase == "forward" else "backward"


@dataclass(frozen=True)
class Flow:
    """A tensor in one form between boxes of one phase: drawn as an edge that carries its name and form.

    Args:
        source: number of the box that makes it; None where it comes from outside.
        targets: numbers of the boxes of its phase that read it.
        is_output: whether the caller gets it.
    """

    made: Made
    phase: Phase
    source: int | None
    targets: tuple[int, ...]
    is_output: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """A tensor from forward, read in backward by the box `target`; `source` is None where it comes from outside."""

    made: Made
    source: int | None
    target: int


@dataclass(frozen=True)
class Diagram:
    """Boxes in running order, the tensors between those of one phase, and those that lead from forward to backward."""

    boxes: tuple[Box, ...]
    flows: tuple[Flow, ...]
    links: tuple[Link, ...]


def diagram(configuration: Configuration) -> Diagram:
    """Return what there is to draw of a configuration."""
    graph = configuration.graph()
    makers, readers = _makers_and_readers(configuration)
    phases = [step.phase for step in configuration.steps]
    outputs = _outputs(graph, makers)
    flows: list[Flow] = []
    links: list[Link] = []
    reads: dict[int, list[BoxTensor]] = defaultdict(list)
    makes: dict[int, list[BoxTensor]] = defaultdict(list)
    for made, source in makers.items():
        tensor = graph.tensors[tensor_of(made[0])]
        if source is None and tensor.role == "parameter":
            for target in readers[made]:
                reads[target].append(BoxTensor(*made, "parameter"))
            continue
        phase: Phase = "backward" if tensor.role == "gradient" else "forward"
        if source is not None:
            phase = "forward" if phases[source] == "forward" else "backward"
        near = tuple(target for target in readers[made] if phases[target] == phase)
        far = tuple(target for target in readers[made] if phases[target] != phase)
        is_output = made in outputs
        converted = source is not None and configuration.steps[source].is_conversion
        for_parameter = is_output and _is_of_parameter(graph, made[0]) and not converted
        if near or (is_output and not for_parameter) or (source is None and far):
            flows.append(Flow(made, phase, source, near, is_output))
        elif source is not None:
            makes[source].append(BoxTensor(*made, "gradient" if for_parameter else "kept" if far else "unread"))
        for target in far:
            links.append(Link(made, source, target))
            reads[target].append(BoxTensor(*made, "saved"))
    operators = {operator.name: operator for operator in graph.operators}
    boxes = tuple(
        _box(number, step, operators, tuple(reads[number]), tuple(makes[number]))
        for number, step in enumerate(configuration.steps)
    )
    return Diagram(boxes, tuple(flows), tuple(links))


def step_class(step: Step, operators: Mapping[str, Operator]) -> StepClass:
    """Return the class of a step's heaviest operator: a contraction counts before a normalisation, and that before
    element-wise ones."""
    if step.is_conversion:
        return "conversion"
    classes = {kind_of(operators[name]).operator_class for name in step.operators}
    return next(name for name in STEP_CLASSES if name in classes)


def _makers_and_readers(configuration: Configuration) -> tuple[dict[Made, int | None], dict[Made, list[int]]]:
    """Return, per tensor and form, the step that makes it (None: it comes from outside) and the steps that read it.

    A reader of a form that no earlier step has written is taken to read the tensor in the form written last, or, where
    there is none, to get it from outside.
    """
    makers: dict[Made, int | None] = {}
    readers: dict[Made, list[int]] = defaultdict(list)
    latest: dict[str, Made] = {}
    for number, step in enumerate(configuration.steps):
        for made in dict.fromkeys(step.inputs):
            if made not in makers:
                made = latest.get(made[0], made)
                makers.setdefault(made, None)
            readers[made].append(number)
        for made in step.outputs:
            makers[made] = number
            latest[made[0]] = made
    return makers, readers


def _outputs(graph: Graph, makers: Mapping[Made, int | None]) -> set[Made]:
    """Return each output of the graph in the form in which it was made last."""
    last = {tensor: (tensor, form) for tensor, form in makers}
    return {last[name] for name in graph.outputs if name in last}


def _is_of_parameter(graph: Graph, gradient: str) -> bool:
    parameter = graph.tensors.get(gradient.removeprefix("grad_"))
    return parameter is not None and parameter.role == "parameter"


def _box(
    number: int,
    step: Step,
    operators: Mapping[str, Operator],
    reads: tuple[BoxTensor, ...],
    makes: tuple[BoxTensor, ...],
) -> Box:
    if step.is_conversion:
        return Box(number, step, "conversion", ())
    return Box(number, step, step_class(step, operators), tuple(_members(step, operators)), reads, makes)


def _members(step: Step, operators: Mapping[str, Operator]) -> Iterator[Member]:
    for names, again in ((step.recomputed, True), (step.operators, step.again)):
        for name in names:
            yield Member(name, operators[name].kind, kind_of(operators[name]).operator_class, again)

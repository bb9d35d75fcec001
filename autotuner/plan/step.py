"""A step of a configuration: one kernel call with the forms of its operands, and the best other way to compute it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, GetPydanticSchema
from pydantic_core.core_schema import literal_schema

from autotuner.errors import AutotunerError, ConfigurationError
from autotuner.ir.form import STACK_AXIS, Form
from autotuner.ir.graph import Graph
from autotuner.ir.numerics import Numerics
from autotuner.ir.records import LETTERS, Call, Candidate, Scalar
from autotuner.kernels import KERNELS
from autotuner.kernels.canonical import canonical
from autotuner.kernels.rules.conversion import conversion_of
from autotuner.plan.document import Count, Document, Flag, Number, Us

AGAIN = "again "

Branches = Annotated[tuple[Annotated[tuple[Count, ...], Field(min_length=1)], ...], Field(min_length=1)]
"""Steps that run beside the others, by number: those of each branch in ascending order, one after the other."""


def tensor_of(name: str) -> str:
    """Return the tensor that a step's operand is an instance of: itself, or what "again <tensor>" stands for."""
    return name.removeprefix(AGAIN)


@dataclass(frozen=True)
class Alternative(Document):
    """Another way to compute some operators, and what the best whole plan with it would take more than the chosen one.

    Args:
        operators: what it covers.
        kernel, params: the candidate.
        inputs, outputs: (tensor, form) pairs in the order of the kernel's boundary.
        extra_us: more in all, by medians, everything else being chosen anew as suits it best.
        extra_low_us: the same if all that is timed took what its 95 % interval makes best for this alternative; below 0
            it could still be the better one.
        predicted_us: median of the candidate's own measurement; None where it has none.
    """

    operators: Annotated[tuple[str, ...], Field(min_length=1)]
    kernel: str
    params: tuple[tuple[str, Scalar], ...]
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    extra_us: Number
    extra_low_us: Number
    predicted_us: Us | None = None


@dataclass(frozen=True, kw_only=True)
class Step(Document):
    """One kernel call of a training step.

    Args:
        operators: what it computes, in the kernel's order; () for a conversion.
        recomputed: forward operators that it repeats inside.
        phase: "forward" or "backward".
        inputs, outputs: (tensor, form) pairs in the order of the kernel's boundary, forms in the tensors' own axes.
            What backward makes a second time, in a form in which forward had it, is named "again <tensor>".
        kernel, params: the candidate.
        adjacent: tensors that lie one behind the other in one buffer, for kernels that read or write them as a stack.
        predicted_us: median of its measurement.
        bound_us: the fastest measurement of the same work under any forms; for a conversion, 0.
        low_us, high_us: the 95 % interval of the measurement's median.
        again: whether it repeats, in backward, a forward operator whose result was not held.
        alternative: the best other way for the first of its operators; None for a conversion, or where there is none.
    """

    operators: tuple[str, ...]
    recomputed: tuple[str, ...]
    phase: Annotated[str, GetPydanticSchema(lambda *_: literal_schema(["forward", "backward"]))]
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    kernel: str
    params: tuple[tuple[str, Scalar], ...]
    adjacent: tuple[Annotated[tuple[str, ...], Field(min_length=2)], ...]
    predicted_us: Us
    bound_us: Us
    low_us: Us
    high_us: Us
    again: Flag = False
    alternative: Alternative | None = None

    @property
    def is_conversion(self) -> bool:
        return not self.operators

    @property
    def remade(self) -> tuple[str, ...]:
        """Forward tensors that it makes again beside its own work, for others in backward."""
        return () if self.again else tuple(tensor_of(name) for name, _ in self.outputs if name.startswith(AGAIN))

    @property
    def inexact(self) -> tuple[tuple[Numerics, str], ...]:
        """Numerics classes and tensors: of each that it makes in a storage format or by a kernel that is not exact."""
        needs = KERNELS[self.kernel].needs if self.kernel in KERNELS else "exact"
        if needs != "exact":
            return tuple((needs, tensor_of(name)) for name, _ in self.outputs)
        stored = ((Form.parse(form).format.numerics, name) for name, form in self.outputs)
        return tuple((numerics, name) for numerics, name in stored if numerics != "exact")

    @property
    def label(self) -> str:
        """The step for people: its operators joined, or the conversion's tensor and forms."""
        if not self.is_conversion:
            return " + ".join(self.operators)
        (name, source), (_, target) = self.inputs[0], self.outputs[0]
        return f"convert {name} {source} > {target}"

    def call(self, graph: Graph) -> Call:
        """Return the name-free record of this step: what its kernel's builder gets."""
        inputs, outputs = ([(tensor_of(name), text) for name, text in side] for side in (self.inputs, self.outputs))
        names = [name for name, _ in (*inputs, *outputs)]
        forms = tuple(
            str(Form.parse(text).nameless().renamed(graph.tensors[name].axes, LETTERS[: len(graph.tensors[name].axes)]))
            for name, text in (*inputs, *outputs)
        )
        if self.is_conversion:
            subgraph = conversion_of(graph, names[0], inputs[0][1], outputs[0][1])
        else:
            named = {operator.name: operator for operator in graph.operators}
            members = [named[name] for name in self.recomputed + self.operators]
            subgraph = graph.subgraph(members, [n for n, _ in inputs], [n for n, _ in outputs])
        return Call(subgraph, Candidate(self.kernel, forms, self.params, KERNELS[self.kernel].version))

    def asked_call(self, graph: Graph) -> Call:
        """Return the record that the rule gave: operands that lie one behind the other are slices of a stack there."""
        slices = {name: f"@{place}/{len(names)}" for names in self.adjacent for place, name in enumerate(names)}

        def asked(name: str, form: str) -> str:
            return f"{STACK_AXIS}{form}{slices[name]}" if name in slices and "@" not in form else form

        inputs, outputs = (tuple((n, asked(n, form)) for n, form in side) for side in (self.inputs, self.outputs))
        return replace(self, inputs=inputs, outputs=outputs).call(graph)

    def measured_call(self, graph: Graph) -> Call:
        """Return the record under which this step was timed."""
        asked = self.asked_call(graph)
        return canonical(asked.subgraph, asked.candidate)


def sources_of(steps: Sequence[Step]) -> tuple[frozenset[int], ...]:
    """Return for each step the steps before it that make what it reads."""
    made: dict[tuple[str, str], int] = {}
    found = []
    for number, step in enumerate(steps):
        found.append(frozenset(made[place] for place in step.inputs if place in made))
        made |= {place: number for place in step.outputs if not Form.parse(place[1]).is_absent}
    return tuple(found)


def check_branches(branches: Branches, count: int) -> None:
    """Check that branches are of a plan with so many steps.

    Raises:
        ConfigurationError: one lists what is no step, or what another one has, or nothing; or its steps do not ascend.
    """
    listed = [number for branch in branches for number in branch]
    ascending = all(branch and list(branch) == sorted(branch) for branch in branches)
    if not ascending or len(set(listed)) < len(listed) or not set(listed) <= set(range(count)):
        raise ConfigurationError(
            f"branches {[list(branch) for branch in branches]} must list steps from 0 to {count - 1}, each at most "
            "once, those of a branch in ascending order"
        )


def impossible(step: Step, graph: Graph) -> str | None:
    """Return why a step cannot be one of a graph's, or None: damaged, or of kernels that this version does not have."""
    if step.kernel not in KERNELS:
        return f"no kernel {step.kernel!r}: the file is damaged, or of a version that has one"
    named = {operator.name: operator for operator in graph.operators}
    read, made = ({tensor_of(name) for name, _ in side} for side in (step.inputs, step.outputs))
    if not ({*step.recomputed, *step.operators} <= named.keys() and read | made <= graph.tensors.keys()):
        return "it names operators or tensors that its model does not have"
    results = {result for name in (*step.recomputed, *step.operators) for result in named[name].outputs}
    if not (made <= results or (step.is_conversion and made == read and len(step.inputs) == len(step.outputs) == 1)):
        return f"it makes {' and '.join(sorted(made - results))}, which its operators do not"
    try:
        return KERNELS[step.kernel].misfit(step.asked_call(graph))
    except AutotunerError as error:
        return str(error)

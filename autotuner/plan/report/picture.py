"""The plan of a configuration as values for a page that draws it: steps, tensors between them, memory over the step."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autotuner.plan import summary
from autotuner.plan.configuration import Configuration
from autotuner.plan.explanation import Weighed, explain_plan
from autotuner.plan.memory_planner import make_plan
from autotuner.plan.parts import Fusion
from autotuner.plan.report import shares, steps
from autotuner.plan.report.diagram import BoxTensor, Flow, Member, StepClass, diagram
from autotuner.plan.report.shares import ClassShare, Share


@dataclass(frozen=True, slots=True)
class DrawnTensor:
    """A tensor in one form; `declared` where that keeps the declared order of axes. For roles see `BoxTensor`."""

    tensor: str
    form: str
    declared: bool
    role: str = ""


@dataclass(frozen=True, slots=True)
class DrawnFlow:
    """A tensor that leads from a step to those of its phase that read it, by their numbers from 1.

    `source` is None for what comes from outside. `is_output` says whether the caller gets it.
    """

    made: DrawnTensor
    source: int | None
    targets: tuple[int, ...]
    is_output: bool


@dataclass(frozen=True, slots=True)
class DrawnLink:
    """A tensor that forward saves for a step of backward; `source` is None for what comes from outside."""

    made: DrawnTensor
    source: int | None
    target: int


@dataclass(frozen=True, kw_only=True)
class DrawnStep:
    """One kernel call.

    Args:
        number: from 1, in running order.
        members: the operators that it computes.
        reads, makes: tensors that nothing within the phase leads to or from.
        best_us: the fastest that was measured for the same operators under any forms; None for a conversion.
        share: of the predicted time of all steps.
        flop, moved_bytes: of the call.
        other: the best plan without this step, None where it is not recorded.
    """

    number: int
    label: str
    phase: Literal["forward", "backward"]
    step_class: StepClass
    kernel: str
    params: Mapping[str, Any]
    members: tuple[Member, ...]
    reads: tuple[DrawnTensor, ...]
    makes: tuple[DrawnTensor, ...]
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    predicted_us: float
    low_us: float
    high_us: float
    best_us: float | None
    share: float
    flop: int
    moved_bytes: int
    other: Weighed | None


@dataclass(frozen=True, slots=True)
class MemoryMoment:
    """Bytes that exist while a step runs, beside parameters: `step` is its number, 0 between forward and backward."""

    step: int
    saved_bytes: int
    working_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True)
class LeanPoint:
    """A plan of the same graph: its predicted time, what forward holds for backward, and its peak."""

    predicted_us: float
    held_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Best measured rates of a device: of moving bytes, and of products by element type; None or {} where unknown."""

    gb_per_s: float | None
    tflop_per_s: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class PlanPicture:
    """All that a page shows of a configuration without its measurements; sentences are for people.

    Args:
        lead: the result in a sentence.
        totals: times of the whole training step: measured end to end, then the sums of kernels' times.
        remarks: why the plan is not faster.
        overtaking: candidates that could be better within the intervals.
        memory: at each step, in running order.
        front: this plan and leaner ones, each slower with fewer bytes held.
        tokens: of a training step; None where the model does not say which axes are batch and position.
    """

    reference: str
    dtype: str
    lead: str
    doubts: tuple[str, ...]
    figures: tuple[summary.Figure, ...]
    totals: tuple[summary.Total, ...]
    needs: tuple[summary.Need, ...]
    remarks: tuple[str, ...]
    steps: tuple[DrawnStep, ...]
    flows: tuple[DrawnFlow, ...]
    links: tuple[DrawnLink, ...]
    classes: tuple[ClassShare, ...]
    kernels: tuple[Share, ...]
    fused_sets: tuple[Fusion, ...]
    overtaking: tuple[Weighed, ...]
    overtaking_count: int
    counts: tuple[summary.Count, ...]
    memory: tuple[MemoryMoment, ...]
    budget_bytes: int | None
    front: tuple[LeanPoint, ...]
    tokens: int | None
    ceilings: Ceilings
    facts: Mapping[str, tuple[tuple[str, str], ...]]


def picture(configuration: Configuration, ceilings: Ceilings) -> PlanPicture:
    """Return what a page shows of a configuration.

    Args:
        ceilings: of its environment.

    Raises:
        ConfigurationError: a step names what its graph lacks, or its tensors cannot be placed in memory.
    """
    graph = steps.check_tensors(configuration)
    explained, content = explain_plan(configuration), diagram(configuration)

    def drawn(name: str, form: str, role: str = "") -> DrawnTensor:
        return DrawnTensor(name, form, steps.is_declared((name, form), graph), role)

    def ports(found: tuple[BoxTensor, ...]) -> tuple[DrawnTensor, ...]:
        return tuple(drawn(port.tensor, port.form, port.role) for port in found)

    def flow(found: Flow) -> DrawnFlow:
        source = None if found.source is None else found.source + 1
        return DrawnFlow(drawn(*found.made), source, tuple(each + 1 for each in found.targets), found.is_output)

    views = steps.step_views(configuration, content.boxes, None)
    measured = configuration.measured
    return PlanPicture(
        reference=configuration.model.reference,
        dtype=configuration.model.dtype,
        lead=summary.lead(configuration),
        doubts=tuple(doubt.sentence for doubt in configuration.doubts),
        figures=tuple(summary.figures(configuration)),
        totals=(
            *(summary.measured_totals(measured, configuration.kernels_us) if measured else ()),
            *summary.kernel_totals(configuration),
        ),
        needs=tuple(summary.needs(configuration)),
        remarks=tuple(summary.remarks(configuration, explained)),
        steps=tuple(
            DrawnStep(
                number=view.number, label=view.label, phase=view.box.phase, step_class=view.box.step_class,
                kernel=view.step.kernel, params=dict(view.step.params), members=view.box.members,
                reads=ports(view.box.reads), makes=ports(view.box.makes), inputs=view.step.inputs,
                outputs=view.step.outputs, predicted_us=view.step.predicted_us, low_us=view.step.low_us,
                high_us=view.step.high_us, best_us=view.times.best_us, share=view.share, flop=view.cost.flop,
                moved_bytes=view.cost.moved_bytes, other=view.other,
            )
            for view in views
        ),
        flows=tuple(flow(each) for each in content.flows),
        links=tuple(
            DrawnLink(drawn(*link.made), None if link.source is None else link.source + 1, link.target + 1)
            for link in content.links
        ),
        classes=shares.by_class(configuration),
        kernels=shares.by_kernel(configuration),
        fused_sets=summary.fused_sets(configuration),
        overtaking=explained.overtaking,
        overtaking_count=explained.overtaking_count,
        counts=tuple(summary.count_rows(configuration, None)),
        memory=tuple(_moments(configuration)),
        budget_bytes=configuration.budget_bytes,
        front=tuple(_front(configuration)),
        tokens=configuration.model.tokens,
        ceilings=ceilings,
        facts={
            "model": summary.model_facts(configuration),
            "environment": summary.environment_facts(configuration),
            "provenance": summary.provenance(configuration),
        },
    )  # fmt: skip


def _moments(configuration: Configuration) -> Iterator[MemoryMoment]:
    """Yield the bytes at each step, and at the boundary between forward and backward."""
    plan = make_plan(configuration)
    saved = {*plan.saved, *plan.held_outputs}
    ticks = {plan.tick(number): number + 1 for number in range(len(plan.steps))} | {plan.boundary: 0}
    for tick, step in sorted(ticks.items()):
        living = [(i, buffer) for i, buffer in enumerate(plan.buffers) if buffer.first <= tick <= buffer.last]
        arena = [(i, buffer.size_bytes) for i, buffer in living if buffer.role == "arena"]
        yield MemoryMoment(
            step,
            sum(count for i, count in arena if i in saved),
            sum(count for i, count in arena if i not in saved),
            sum(buffer.size_bytes for _, buffer in living if buffer.role == "output"),
        )


def _front(configuration: Configuration) -> Iterator[LeanPoint]:
    for plan in configuration.plans:
        if plan.memory is not None:
            yield LeanPoint(plan.certificate.predicted_us, plan.memory.held_bytes, plan.memory.peak_bytes)

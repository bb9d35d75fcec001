"""An operator's explanation: which kernel computes it, why that one, and what every other way would cost."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autotuner.errors import NotFoundError
from autotuner.ir.graph import Graph
from autotuner.plan.configuration import Configuration
from autotuner.plan.explanation.alternatives import Price, Weighed, balance_words, computing, conversion_prices, weigh
from autotuner.plan.parts import Fusion
from autotuner.plan.phrases import TOLD, call_words, counted, form_words, interval_us, near, some, us
from autotuner.plan.step import Step, tensor_of


@dataclass(frozen=True)
class Comparison:
    """A set of operators that one kernel could compute, against what was chosen and against its members alone.

    Args:
        best_us: the fastest kernel for the set, in its best forms; None where none works.
        instead_us: what the chosen steps take for the same operators; that kernel's time where it was chosen.
        alone_us: its operators one by one, each at its fastest alone, under any forms; None where that is not known.
        chosen: whether it is a step of the plan.
    """

    operators: tuple[str, ...]
    kernel: str
    best_us: float | None
    instead_us: float
    alone_us: float | None
    chosen: bool

    @classmethod
    def of(cls, fusion: Fusion) -> "Comparison":
        return cls(fusion.operators, fusion.kernel, fusion.best_us, fusion.instead_us, fusion.alone_us, fusion.chosen)

    @property
    def words(self) -> str:
        name = some(self.operators, " + ")
        alone = "" if self.alone_us is None else f", {us(self.alone_us)} one by one, each at its own fastest"
        if self.chosen:
            return f"{name} in one kernel takes {us(self.instead_us)}{alone}: chosen"
        if self.best_us is None:
            return f"{name} in one kernel: no candidate works or was measured"
        return (
            f"{name} in one kernel takes {us(self.best_us)} at its fastest ({self.kernel}), {us(self.instead_us)} are "
            f"taken now{alone}: rejected"
        )


@dataclass(frozen=True, kw_only=True)
class OperatorExplanation:
    """Reasons for which an operator is computed as it is; times in microseconds, of the whole step that computes it.

    Args:
        step: number from 1, in running order, of the step that computes it.
        operators: all that the step computes.
        recomputed: forward operators that the step repeats inside.
        inputs, outputs: (tensor, form) pairs of the step's kernel.
        bound_us: the fastest measured for the same operators under any forms.
        loss_us: what the step takes above that.
        alternative: the best plan without this step; None where none is recorded.
        overtaking: other candidates for the operator that could be better within the intervals.
        conversions: what is paid to read its step's inputs, and to hand on its outputs, in other forms.
        covers: sets of operators with this one that a kernel could compute.
        repeated_by: numbers of the steps that compute the operator again in backward.
        words: all of this in sentences.
    """

    operator: str
    kind: str
    phase: str
    step: int
    operators: tuple[str, ...]
    recomputed: tuple[str, ...]
    kernel: str
    params: tuple[tuple[str, Any], ...]
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    predicted_us: float
    low_us: float
    high_us: float
    bound_us: float
    loss_us: float
    alternative: Weighed | None
    overtaking: tuple[Weighed, ...]
    conversions: tuple[Price, ...]
    covers: tuple[Comparison, ...]
    repeated_by: tuple[int, ...]
    words: tuple[str, ...]


def explain_operator(configuration: Configuration, name: str) -> OperatorExplanation:
    """Return why an operator is computed as it is.

    Raises:
        NotFoundError: no operator has this name; the message lists near ones.
    """
    graph = configuration.graph()
    named = {operator.name: operator for operator in graph.operators}
    if name not in named:
        tensor = "; a tensor has this name" if name in graph.tensors else ""
        raise NotFoundError(
            f"no operator {name!r} in {configuration.model.reference}: {near(name, list(named))}{tensor}"
        )
    (step,) = computing(configuration, (name,))
    alternative = weigh(configuration, step.alternative) if step.alternative else None
    overtaking = tuple(weigh(configuration, other) for other in configuration.overtaking if name in other.operators)
    conversions = tuple(_conversions(configuration, step))
    covers = tuple(Comparison.of(fusion) for fusion in configuration.fusions if name in fusion.operators)
    repeated_by = tuple(
        number
        for number, other in enumerate(configuration.steps, start=1)
        if name in other.recomputed or (other.again and name in other.operators)
    )
    loss = max(0.0, step.predicted_us - step.bound_us)
    sentences = [
        *_chosen_words(name, step, graph),
        _loss_words(step, loss),
        *_alternative_words(step, alternative),
        *_overtaking_words([other for other in overtaking if other != alternative]),
        *(f"Paid for it: {price.words}." for price in conversions),
        *(f"{cover.words}." for cover in sorted(covers, key=lambda each: not each.chosen)),
        *(
            f"Step {number} computes it again, in backward, so that what it makes is not held."
            for number in repeated_by
        ),
    ]
    return OperatorExplanation(
        operator=name,
        kind=named[name].kind,
        phase=named[name].phase,
        step=configuration.steps.index(step) + 1,
        operators=step.operators,
        recomputed=step.recomputed,
        kernel=step.kernel,
        params=step.params,
        inputs=step.inputs,
        outputs=step.outputs,
        predicted_us=step.predicted_us,
        low_us=step.low_us,
        high_us=step.high_us,
        bound_us=step.bound_us,
        loss_us=loss,
        alternative=alternative,
        overtaking=overtaking,
        conversions=conversions,
        covers=covers,
        repeated_by=repeated_by,
        words=tuple(sentences),
    )


def _conversions(configuration: Configuration, step: Step) -> Iterator[Price]:
    """Yield the conversions that make what a step reads, and those that hand on what it writes."""
    for price in conversion_prices(configuration):
        if (price.tensor, price.target) in step.inputs or (price.tensor, price.source) in step.outputs:
            yield price


def _chosen_words(name: str, step: Step, graph: Graph) -> Iterator[str]:
    others = [other for other in step.operators if other != name]
    together = f", together with {some(others, shown=8)}" if others else ""
    yield f"{name} is computed in {step.phase} by {call_words(step.kernel, step.params)}{together}."
    if step.recomputed:
        for_others = f", and leaves {some(step.remade)} for other kernels" if step.remade else ""
        yield f"The kernel repeats {some(step.recomputed)} of forward inside{for_others}."
    for verb, operands in (("reads", step.inputs), ("writes", step.outputs)):
        if operands:
            yield f"It {verb} {', '.join(_operand(tensor, form, graph) for tensor, form in operands)}."


def _operand(name: str, form: str, graph: Graph) -> str:
    tensor = graph.tensors.get(tensor_of(name))
    declared = "" if tensor is None or form.partition(":")[0] == tensor.axes else f" (declared {tensor.axes})"
    return f"{name} as {form_words(form)}{declared}"


def _loss_words(step: Step, loss: float) -> str:
    taken = f"It takes {us(step.predicted_us)}"
    if step.low_us < step.high_us:
        taken += f", {interval_us(step.low_us, step.high_us)} within its 95 % interval"
    if f"{loss:.1f}" == "0.0":
        return f"{taken}: nothing that was measured for the same work is faster."
    return f"{taken}: {us(loss)} above its own best, {us(step.bound_us)}, in other forms or with another kernel."


def _overtaking_words(others: list[Weighed]) -> Iterator[str]:
    for other in others[:TOLD]:
        yield f"It could be overtaken {other.words}."
    if others[TOLD:]:
        yield f"{counted(len(others) - TOLD, 'more candidate')} could overtake it."


def _alternative_words(step: Step, weighed: Weighed | None) -> Iterator[str]:
    """Yield why the step was chosen: what the best plan without it costs, and where."""
    if weighed is None:
        yield "No other way to compute it is recorded."
        return
    first = "" if len(step.operators) == 1 else "Without this kernel, "
    text = f"{first}{weighed.words}."
    yield text[0].upper() + text[1:]
    balance = balance_words(weighed)
    if balance:
        yield f"{balance[0].upper()}{balance[1:]}."
    if weighed.alternative.extra_us < 0:
        yield "So the plan is not the best one over what was measured."
    elif weighed.alternative.extra_low_us < 0:
        yield "The intervals overlap: it could still be the better way."

"""A tensor's explanation: in which forms it exists, who asked for them, and what other forms would cost."""

from collections.abc import Iterator
from dataclasses import dataclass

from autotuner.errors import NotFoundError
from autotuner.plan.configuration import Configuration
from autotuner.plan.explanation.alternatives import Price, Weighed, prices_of, weigh
from autotuner.plan.phrases import TOLD, counted, form_words, near, some, us
from autotuner.plan.step import Step, tensor_of


@dataclass(frozen=True)
class Reading:
    """A step, by its number from 1, that makes or reads a tensor in a form; `operators` is () for a conversion."""

    step: int
    operators: tuple[str, ...]
    kernel: str
    form: str

    @property
    def words(self) -> str:
        return f"step {self.step} ({some(self.operators, ' + ') or 'a conversion'}, {self.kernel})"


@dataclass(frozen=True)
class TensorExplanation:
    """In which forms a tensor exists, and why.

    Args:
        declared: its axes in declared order.
        makers: steps that make it, conversions included; () where it comes from outside or stays inside a kernel.
        readers: steps that read it, conversions included.
        inside: number of the step whose kernel keeps it inside; None where it is materialised or comes from outside.
        conversions: what its conversions cost.
        alternatives: what was recorded of other ways in which it has another form, the cheapest in the whole first.
        words: all of this in sentences.
    """

    tensor: str
    role: str
    dtype: str
    declared: str
    makers: tuple[Reading, ...]
    readers: tuple[Reading, ...]
    inside: int | None
    conversions: tuple[Price, ...]
    alternatives: tuple[Weighed, ...]
    words: tuple[str, ...]


def explain_tensor(configuration: Configuration, name: str) -> TensorExplanation:
    """Return in which forms a tensor exists, and why.

    Raises:
        NotFoundError: no tensor has this name; the message lists near ones.
    """
    graph = configuration.graph()
    if name not in graph.tensors:
        operator = "; an operator has this name" if name in {o.name for o in graph.operators} else ""
        raise NotFoundError(
            f"no tensor {name!r} in {configuration.model.reference}: {near(name, list(graph.tensors))}{operator}"
        )
    tensor = graph.tensors[name]
    steps = list(enumerate(configuration.steps, start=1))
    makers = tuple(_readings(steps, name, "outputs"))
    readers = tuple(_readings(steps, name, "inputs"))
    producer = graph.producers.get(name)
    inside = None
    if producer is not None and not makers:
        inside = next((number for number, s in steps if producer.name in s.operators and not s.again), None)
    conversions = prices_of(configuration, name)
    alternatives = tuple(sorted(_alternatives(configuration, name), key=lambda each: each.alternative.extra_us))
    return TensorExplanation(
        tensor=name,
        role=tensor.role,
        dtype=tensor.dtype,
        declared=tensor.axes,
        makers=makers,
        readers=readers,
        inside=inside,
        conversions=conversions,
        alternatives=alternatives,
        words=(
            f"{name} ({tensor.role}, {tensor.dtype}) is declared {tensor.axes}.",
            *_forms_words(makers, readers, configuration.steps[inside - 1] if inside else None),
            *(f"It is converted: {price.words}." for price in conversions),
            *(f"{some(each.alternative.operators, ' + ')} {each.words}." for each in alternatives[:TOLD]),
            *_last_words(name, len(alternatives)),
        ),
    )


def _readings(steps: list[tuple[int, Step]], name: str, side: str) -> Iterator[Reading]:
    for number, step in steps:
        for operand, form in getattr(step, side):
            if tensor_of(operand) == name:
                yield Reading(number, step.operators, step.kernel, form)


def _alternatives(configuration: Configuration, name: str) -> Iterator[Weighed]:
    """Yield the recorded alternatives in which the tensor has another form, each once."""
    recorded = [step.alternative for step in configuration.steps if step.alternative] + list(configuration.overtaking)
    seen = []
    for alternative in recorded:
        if alternative not in seen:
            seen.append(alternative)
            weighed = weigh(configuration, alternative)
            if any(tensor_of(each.tensor) == name for each in weighed.differences):
                yield weighed


def _forms_words(makers: tuple[Reading, ...], readers: tuple[Reading, ...], inside: Step | None) -> Iterator[str]:
    if inside is not None:
        what = f"{some(inside.operators, ' + ')} in {us(inside.predicted_us)}"
        yield f"It takes no memory: {inside.kernel} keeps it inside, where it computes {what}."
    if not makers and inside is None:
        yield "It comes from outside."
    for maker in makers:
        yield f"It is made as {form_words(maker.form)} by {maker.words}."
    for form in dict.fromkeys(reader.form for reader in readers):
        yield f"It is read as {form_words(form)} by {some([r.words for r in readers if r.form == form])}."
    if not readers and inside is None:
        yield "No step reads it."


def _last_words(name: str, alternatives: int) -> Iterator[str]:
    if alternatives > TOLD:
        yield f"{counted(alternatives - TOLD, 'more alternative')} with {name} in another form."
    if not alternatives:
        yield f"No recorded alternative of a step has {name} in another form."

"""The whole plan's explanation: how good it is proven to be, where it takes more than it might, and what it needs."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import fsum

from autotuner.ir.numerics import CLASSES
from autotuner.plan.configuration import Configuration
from autotuner.plan.explanation.alternatives import Price, Weighed, conversion_prices, weigh
from autotuner.plan.parts import LEAN_SHARE, OF_FASTEST, Certificate
from autotuner.plan.phrases import NEVER_MEASURED, TOLD, binary, counted, interval_us, some, us

NOTHING = 1e-9
OVERTAKING_MAX = 10


@dataclass(frozen=True)
class Loss:
    """Time that a step takes above the fastest that was measured for the same operators, under any forms."""

    step: int
    operators: tuple[str, ...]
    kernel: str
    predicted_us: float
    bound_us: float
    loss_us: float


@dataclass(frozen=True)
class PlanExplanation:
    """Quality of a plan, and the reasons why it is not better.

    Args:
        losses: of every step that is above its own best, the greatest first.
        losses_us: their sum.
        conversions: every conversion of the plan, the dearest first.
        conversions_us: their sum.
        overtaking: candidates that could be better within the intervals, those that could gain most first; ten at most.
        overtaking_count: how many there are; a configuration lists only the first of many.
        reasons: why the plan is not better, in sentences: losses, conversions, overlap, what is computed again.
        words: these sentences, and those about the certificate, memory and what could overtake.
    """

    losses: tuple[Loss, ...]
    losses_us: float
    conversions: tuple[Price, ...]
    conversions_us: float
    overtaking: tuple[Weighed, ...]
    overtaking_count: int
    reasons: tuple[str, ...]
    words: tuple[str, ...]


def explain_plan(configuration: Configuration) -> PlanExplanation:
    """Return how good a configuration's plan is, and why it is not better."""
    losses = tuple(sorted(_losses(configuration), key=lambda loss: (-loss.loss_us, loss.step)))
    conversions = tuple(sorted(conversion_prices(configuration), key=lambda price: (-price.predicted_us, price.step)))
    overtaking = sorted(configuration.overtaking, key=lambda other: other.extra_low_us)
    losses_us, conversions_us = fsum(x.loss_us for x in losses), fsum(x.predicted_us for x in conversions)
    why = (
        *_loss_words(losses, losses_us, conversions, conversions_us),
        *_rest_words(configuration.certificate, losses_us + conversions_us),
        *_overlap_words(configuration),
    )
    again = tuple(_recomputed_words(configuration))
    return PlanExplanation(
        losses=losses,
        losses_us=losses_us,
        conversions=conversions,
        conversions_us=conversions_us,
        overtaking=tuple(weigh(configuration, other) for other in overtaking[:OVERTAKING_MAX]),
        overtaking_count=_overtaking_count(configuration),
        reasons=why + again,
        words=(
            *(f"Doubtful: {doubt.sentence}" for doubt in configuration.doubts),
            *_certificate_words(configuration.certificate),
            *why,
            *_memory_words(configuration),
            *_inexact_words(configuration),
            *_leaner_words(configuration),
            *again,
            *_overtaking_words(configuration),
        ),
    )


def _losses(configuration: Configuration) -> Iterator[Loss]:
    for place, step in enumerate(configuration.steps, start=1):
        loss = step.predicted_us - step.bound_us
        if not step.is_conversion and loss > NOTHING:
            yield Loss(place, step.operators, step.kernel, step.predicted_us, step.bound_us, loss)


def _certificate_words(certificate: Certificate) -> Iterator[str]:
    total, bound = certificate.predicted_us, certificate.lower_bound_us
    yield (
        f"The plan's kernels take {us(total)} by their medians, "
        f"{interval_us(certificate.low_us, certificate.high_us)} if each stays within its 95 % interval."
    )
    if certificate.proven_gap is None:
        yield f"How far it is above the best there can be is not known: {NEVER_MEASURED}."
    elif certificate.proven_gap <= NOTHING:
        yield "By these medians no plan takes less: the proven gap is 0."
    else:
        yield (
            f"No plan takes less than {us(bound)}: the proven gap is {certificate.proven_gap:.2%}, so this one takes "
            f"at most {us(total - bound)} more than the best there can be."
        )
    if certificate.estimated_gap is not None:
        yield f"By learned costs the gap is {certificate.estimated_gap:.2%}: estimated, not proven."


def _loss_words(
    losses: tuple[Loss, ...], losses_us: float, conversions: tuple[Price, ...], conversions_us: float
) -> Iterator[str]:
    if losses:
        named = [f"{some(loss.operators, ' + ')} {us(loss.loss_us)}" for loss in losses]
        yield (
            f"{counted(len(losses), 'step')} {'takes' if len(losses) == 1 else 'take'} {us(losses_us)} above "
            f"their own best, for the good of the whole: {some(named, '; ', TOLD)}."
        )
    else:
        yield "Every step is at its own best: nothing measured for the same operators is faster."
    if conversions:
        named = [price.words for price in conversions]
        yield f"{counted(len(conversions), 'conversion')}, {us(conversions_us)}: {some(named, '; ', TOLD)}."
    else:
        yield "No tensor is converted."


def _rest_words(certificate: Certificate, explained_us: float) -> Iterator[str]:
    """Yield what of the gap to the bound is neither lost by a step nor paid for a conversion."""
    rest = certificate.predicted_us - certificate.lower_bound_us - explained_us
    if certificate.proven_gap and rest > 0.05:
        yield (
            f"Of what lies between plan and bound, {us(rest)} are neither: operators grouped otherwise, and what was "
            "not measured and so counts as little as it possibly could."
        )


def _overlap_words(configuration: Configuration) -> Iterator[str]:
    overlap = configuration.overlap
    if overlap is not None:
        count = sum(len(branch) for branch in overlap.branches)
        yield (
            f"{count} of {counted(len(configuration.steps), 'step')} run beside the others, on "
            f"{counted(len(overlap.branches), 'stream')} of their own: measured on the whole plan, that saves "
            f"{us(overlap.gain_us)}, {interval_us(overlap.low_us, overlap.high_us)} by its 95 % interval."
        )


def _memory_words(configuration: Configuration) -> Iterator[str]:
    memory, measured = configuration.memory, configuration.measured
    if memory is not None:
        budget = "there is no budget" if memory.budget_bytes is None else f"the budget is {binary(memory.budget_bytes)}"
        yield (
            f"Forward holds {binary(memory.held_bytes)} for backward; a step needs {binary(memory.peak_bytes)} at most "
            f"beside parameters and inputs, as planned; {budget}."
        )
    if measured is not None and measured.peak_bytes is not None:
        off = ""
        if memory is not None and memory.peak_bytes and measured.peak_bytes:
            off = f", the planned figure is {memory.peak_bytes / measured.peak_bytes - 1:+.1%} off"
        peers = [f"{name} {binary(peak)}" for name, peak in measured.peers_peak_bytes.items() if peak is not None]
        beside = f"; {', '.join(peers)}" if peers else ""
        yield f"Measured, a step needed {binary(measured.peak_bytes)} at most{off}{beside}."


def _inexact_words(configuration: Configuration) -> Iterator[str]:
    for numerics, tensors in configuration.inexact.items():
        yield CLASSES[numerics].explanation.format(some(tensors, shown=12))


def _leaner_words(configuration: Configuration) -> Iterator[str]:
    told = []
    for plan in configuration.plans[1:]:
        assert plan.memory is not None
        slower = plan.certificate.predicted_us / configuration.certificate.predicted_us - 1
        again = f", with {some(plan.recomputed, shown=3)} computed again" if plan.recomputed else ""
        again += "".join(
            f", with {CLASSES[numerics].held.format(some(tensors, shown=3))}"
            for numerics, tensors in plan.inexact.items() if CLASSES[numerics].for_memory
        )  # fmt: skip
        told.append(f"{binary(plan.memory.held_bytes)} for {slower:+.1%} of the time{again}")
    if told:
        yield f"For memory budgets of whole steps, leaner plans are kept, which leave for backward: {'; '.join(told)}."


def _recomputed_words(configuration: Configuration) -> Iterator[str]:
    if configuration.recomputed:
        yield f"Backward computes again what is not held: {some(configuration.recomputed, shown=12)}."
    beside = [name for step in configuration.steps if step.recomputed for name in step.remade]
    if beside:
        yield f"Kernels of backward make again, beside their own work, what is not held: {some(beside, shown=12)}."
    told = configuration.certificate.statistics
    if all(name in told for name in OF_FASTEST):
        fastest_us, most, held = (told[name] for name in OF_FASTEST)
        yield (
            f"The fastest plan found takes {us(fastest_us)}; this one, within {100 * LEAN_SHARE:.0f} % of it, leaves "
            f"{binary(round(most - held))} less for backward."
        )


def _overtaking_count(configuration: Configuration) -> int:
    return max(len(configuration.overtaking), configuration.counts.get("overtaking", 0))


def _overtaking_words(configuration: Configuration) -> Iterator[str]:
    count = _overtaking_count(configuration)
    if count:
        yield f"Within the intervals, {counted(count, 'candidate')} could still overtake what was chosen."

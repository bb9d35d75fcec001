"""Alternatives weighed against the plan, with their gains and costs, and the prices of its conversions."""

from collections import defaultdict
from dataclasses import dataclass
from math import fsum

from autotuner.plan.configuration import Configuration
from autotuner.plan.phrases import SHOWN, call_words, counted, form_words, listed, more_us, some, us
from autotuner.plan.step import Alternative, Step, tensor_of


@dataclass(frozen=True)
class Difference:
    """A tensor that an alternative reads or writes in another form than the plan.

    Args:
        chosen: the plan's form where it computes the same operators; None where the tensor stays inside a kernel there.
        other: the alternative's.
    """

    tensor: str
    chosen: str | None
    other: str


@dataclass(frozen=True)
class Weighed:
    """An alternative weighed against the plan.

    Args:
        differences: tensors in other forms.
        same_operators: whether one step of the plan computes just its operators.
        instead_us: what the plan's steps take for its operators; None where one of them computes others as well.
        gained_us: how much less the alternative itself takes; None where that or its own time is not known.
        paid_us: how much more the rest of the plan would then take, so that what is paid without what is gained makes
            `extra_us`; None likewise.
        difference: in words, "with context as bnlp in place of blnp".
        words: the same with its price, "with context as ...: +3.1 us in all, at least -0.4 us within the intervals".
    """

    alternative: Alternative
    differences: tuple[Difference, ...]
    same_operators: bool
    instead_us: float | None
    gained_us: float | None
    paid_us: float | None
    difference: str
    words: str


def weigh(configuration: Configuration, alternative: Alternative) -> Weighed:
    """Set an alternative of a configuration against what was chosen."""
    steps = computing(configuration, alternative.operators)
    same = next((step for step in steps if set(step.operators) == set(alternative.operators)), None)
    differences = _differences(steps, alternative)
    whole = all(set(step.operators) <= set(alternative.operators) for step in steps)
    instead = fsum(step.predicted_us for step in steps) if whole else None
    gained = None if instead is None or alternative.predicted_us is None else instead - alternative.predicted_us
    difference = _difference_words(alternative, same, differences)
    return Weighed(
        alternative=alternative,
        differences=differences,
        same_operators=same is not None,
        instead_us=instead,
        gained_us=gained,
        paid_us=None if gained is None else alternative.extra_us + gained,
        difference=difference,
        words=f"{difference}: {price_words(alternative)}",
    )


def computing(configuration: Configuration, operators: tuple[str, ...]) -> list[Step]:
    """Return the steps that compute some of these operators, without those that repeat them in backward."""
    wanted = set(operators)
    return [step for step in configuration.steps if not step.again and wanted & set(step.operators)]


def price_words(alternative: Alternative) -> str:
    """Write what an alternative costs in the whole."""
    return f"{more_us(alternative.extra_us)} in all, at least {more_us(alternative.extra_low_us)} within the intervals"


def balance_words(weighed: Weighed) -> str | None:
    """Write what an alternative gains where it stands and what is paid elsewhere; None where that is not known."""
    own_us = weighed.alternative.predicted_us
    if own_us is None:
        return None
    if weighed.instead_us is None or weighed.gained_us is None or weighed.paid_us is None:
        return f"it takes {us(own_us)} itself, the rest of the difference lies elsewhere"
    here = f"{us(abs(weighed.gained_us))} {'gained' if weighed.gained_us >= 0 else 'lost'} here"
    rest = f"{us(abs(weighed.paid_us))} {'paid' if weighed.paid_us >= 0 else 'gained'} elsewhere"
    return f"it takes {us(own_us)} itself where {us(weighed.instead_us)} are taken now: {here}, {rest}"


def _differences(steps: list[Step], alternative: Alternative) -> tuple[Difference, ...]:
    chosen: dict[str, list[str]] = defaultdict(list)
    for step in steps:
        for name, form in (*step.inputs, *step.outputs):
            chosen[name].append(form)
    return tuple(
        Difference(name, next(iter(chosen[name]), None), form)
        for name, form in dict.fromkeys((*alternative.inputs, *alternative.outputs))
        if form not in chosen[name]
    )


def _apart(*forms: str) -> list[str]:
    """Write forms so that different ones read differently: with the names of their stacks only where it needs them."""
    short = [form_words(form) for form in forms]
    return short if len(set(short)) == len(forms) else list(forms)


def _difference_words(alternative: Alternative, same: Step | None, differences: tuple[Difference, ...]) -> str:
    """Write in what an alternative differs: the operators that it covers, then forms, then kernel and parameters."""
    call = call_words(alternative.kernel, alternative.params)
    parts = []
    if same is None:
        names = alternative.operators
        what = f"{names[0]} by itself" if len(names) == 1 else f"{some(names, ' + ')} in one kernel"
        parts.append(f"{what} ({call})")
    # Where operators are grouped anew, tensors that only then exist in memory go without saying.
    told = [each for each in differences if each.chosen is not None]
    parts += [f"{each.tensor} as {' in place of '.join(_apart(each.other, each.chosen or ''))}"
              for each in told[:SHOWN]]  # fmt: skip
    if told[SHOWN:]:
        parts.append(f"{counted(len(told) - SHOWN, 'more tensor')} in other forms")
    if same is not None and (same.kernel, same.params) != (alternative.kernel, alternative.params):
        parts.append(f"{call} in place of {call_words(same.kernel, same.params)}")
    return f"with {listed(parts)}" if parts else f"with {call} in its place"


@dataclass(frozen=True)
class Price:
    """A conversion of the plan: a tensor that is copied from one form into another, and what that takes.

    Args:
        step: its number from 1, in running order.
        tensor: as the step names it.
        predicted_us, low_us, high_us: the median of its measurement, and the 95 % interval of that.
    """

    step: int
    tensor: str
    source: str
    target: str
    predicted_us: float
    low_us: float
    high_us: float

    @property
    def words(self) -> str:
        return f"{self.tensor} from {form_words(self.source)} to {form_words(self.target)} for {us(self.predicted_us)}"


def conversion_prices(configuration: Configuration) -> tuple[Price, ...]:
    """Return every conversion of a plan, in running order."""
    return tuple(
        Price(number, name, source, target, step.predicted_us, step.low_us, step.high_us)
        for number, step in enumerate(configuration.steps, start=1)
        if step.is_conversion
        for (name, source), (_, target) in zip(step.inputs, step.outputs, strict=True)
    )


def prices_of(configuration: Configuration, tensor: str) -> tuple[Price, ...]:
    """Return the conversions of a tensor, those of what backward makes of it a second time included."""
    return tuple(price for price in conversion_prices(configuration) if tensor_of(price.tensor) == tensor)

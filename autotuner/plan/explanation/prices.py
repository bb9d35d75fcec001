"""What the conversions of a plan cost."""

from dataclasses import dataclass

from autotuner.plan.configuration import Configuration
from autotuner.plan.explanation.phrases import form_words, us
from autotuner.plan.step import tensor_of


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

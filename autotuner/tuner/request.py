"""What a tuning job asks for."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from autotuner.errors import InputError
from autotuner.ir.models import Model
from autotuner.ir.records import digest


@dataclass(frozen=True)
class Limits:
    """When a job stops measuring and answers with what it has; None for no limit.

    Args:
        seconds: of working on it, by everyone who takes it up.
        measurements: that are new.
    """

    seconds: float | None = None
    measurements: int | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and not (isfinite(self.seconds) and self.seconds > 0):
            raise InputError(f"the limit of seconds is {self.seconds}: give a number above 0, or none")
        if self.measurements is not None and self.measurements < 1:
            raise InputError(f"the limit of measurements is {self.measurements}: give a number above 0, or none")


@dataclass(frozen=True)
class Request:
    """A model, where it shall run, and how much effort the answer is worth.

    Args:
        device_name: None for any device of the type.
        gap: stop measuring as soon as the best plan so far is proven to take at most this share longer than the best
            there can be: 0.1 for a tenth.
        estimated_gap: the same by learned costs of what is not measured: an expectation, no proof; reached earlier.
        budget_bytes: the most memory that a training step may need beside parameters and inputs; None for no limit.
        exhaustive: measure all there is, also what is proven to make no difference.
        again: solve anew even if the answer is known; measurements are reused all the same.
        retry: measure once more what has failed.
        remeasure: measure everything anew, whatever is known; what it cannot measure keeps what was known.
        end_to_end: time the answer against the framework.
    """

    model: Model
    device_type: str = "cpu"
    device_name: str | None = None
    gap: float | None = None
    estimated_gap: float | None = None
    budget_bytes: int | None = None
    exhaustive: bool = False
    limits: Limits = field(default_factory=Limits)
    again: bool = False
    retry: bool = False
    remeasure: bool = False
    end_to_end: bool = True

    def __post_init__(self) -> None:
        for name, share in (("gap", self.gap), ("estimated_gap", self.estimated_gap)):
            if share is not None and not (isfinite(share) and share >= 0):
                raise InputError(f"{name} is {share}: give a share of 0 or more, such as 0.05, or none")
        if self.budget_bytes is not None and self.budget_bytes < 1:
            raise InputError(f"the budget is {self.budget_bytes} bytes: give a number above 0, or none")

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in _PLAIN}
        return {"model": self.model.to_json(), "limits": asdict(self.limits), **plain}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Request":
        """Read what `to_json` wrote.

        Raises:
            InputError: a key is missing or unknown, or a value is not valid.
        """
        value = {"remeasure": False, **value}  # a job that an earlier version stored has none
        keys = {"model", "limits", *_PLAIN}
        if set(value) != keys:
            raise InputError(f"a request has the keys {', '.join(sorted(keys))}, not {sorted(value)}")
        plain = {name: value[name] for name in _PLAIN}
        return cls(model=Model.from_json(value["model"]), limits=Limits(**value["limits"]), **plain)


def family_key(family: str, budget_bytes: int | None = None) -> str:
    """Return the key of what answers to requests have in common: a model's family, and the budget."""
    return family if budget_bytes is None else digest([family, budget_bytes])


_PLAIN = (
    "device_type", "device_name", "gap", "estimated_gap", "budget_bytes", "exhaustive", "again", "retry", "remeasure",
    "end_to_end",
)  # fmt: skip

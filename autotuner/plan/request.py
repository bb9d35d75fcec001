"""The request of a tuning job: a model, a device, and the job's options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotuner.errors import InputError
from autotuner.ir.models import Model
from autotuner.ir.numerics import Numerics, checked_numerics
from autotuner.ir.records import digest
from autotuner.settings import TuneOptions


@dataclass(frozen=True)
class Request:
    """A model, the device that it shall run on, and the options of its tuning.

    Args:
        device_name: None for any device of the type.

    Raises:
        InputError: the options name no class of numerics.
    """

    model: Model
    device_type: str = "cpu"
    device_name: str | None = None
    options: TuneOptions = field(default_factory=TuneOptions)

    def __post_init__(self) -> None:
        checked_numerics(self.options.numerics)

    @property
    def numerics(self) -> Numerics:
        """The class of storage formats that the options allow."""
        return checked_numerics(self.options.numerics)

    def to_json(self) -> dict[str, Any]:
        device = {"device_type": self.device_type, "device_name": self.device_name}
        return {"model": self.model.to_json(), **device, **self.options.to_json()}

    def summary(self) -> dict[str, Any]:
        """Return what lists of jobs tell: the model's family and values, without its operators, and the options."""
        model = self.model
        values = {
            "family": model.family, "extents": dict(model.extents), "options": dict(model.options), "dtype": model.dtype
        }  # fmt: skip
        return values | self.options.to_json()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Request":
        """Read what `to_json` wrote.

        Raises:
            InputError: a key is missing or unknown, or a value is not valid.
        """
        value = {"remeasure": False, "numerics": "exact", **value}  # a job that an earlier version stored has none
        keys = {"model", "device_type", "device_name", *TuneOptions.names()}
        if set(value) != keys:
            raise InputError(f"a request has the keys {', '.join(sorted(keys))}, not {sorted(value)}")
        options = TuneOptions.from_json({name: value[name] for name in TuneOptions.names()})
        return cls(Model.from_json(value["model"]), value["device_type"], value["device_name"], options)


def family_key(family: str, budget_bytes: int | None = None, numerics: Numerics = "exact") -> str:
    """Return the key of what answers to requests have in common: a model's family, the budget, and the numerics."""
    if numerics != "exact":
        return digest([family, budget_bytes, numerics])
    return family if budget_bytes is None else digest([family, budget_bytes])

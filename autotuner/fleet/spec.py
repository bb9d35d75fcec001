"""The measurer that an actor is to run, as JSON: it travels to the actor with each question."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from autotuner.ir.records import canonical_json

ON_DEVICE = "autotuner.fleet.actor:on_device"


@dataclass(frozen=True)
class MeasurerSpec:
    """A measurer by name.

    Args:
        factory: "module:function"; called with the arguments, it returns a measurer. Module and data lie on every host.
        arguments: keywords of the factory, as JSON has them.
    """

    factory: str = ON_DEVICE
    arguments: dict[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        return canonical_json(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "MeasurerSpec":
        return cls(**json.loads(text))

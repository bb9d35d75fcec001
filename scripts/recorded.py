"""Recorded sweeps of an encoder layer: what was measured, and the problems that it gives."""

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model, named_model
from autotuner.ir.records import Environment, Measurement, Scalar
from autotuner.measure.roofline import Roofline
from autotuner.solve.problem import Problem
from autotuner.solve.problem.formulate import formulate
from autotuner.space import Space, SpaceFile, build_space, space_file

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"


@dataclass(frozen=True)
class Recording:
    """A file that scripts/record_replay has written."""

    path: Path

    @cached_property
    def value(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(gzip.decompress(self.path.read_bytes()))
        return found

    @cached_property
    def costs_us(self) -> dict[str, float]:
        """The microseconds of each call that could be measured, by its key."""
        return {key: us for key, (status, us, *_) in self.value["measurements"].items() if status == "ok"}

    @property
    def environment(self) -> Environment:
        value = self.value["environment"]
        return Environment(
            value["device_type"], value["device_name"], tuple(value["facts"].items()), tuple(value["policy"].items())
        )

    @property
    def measurements(self) -> dict[str, Measurement]:
        """The measurement of each call, by its key; what was not recorded of it has its default."""
        return {
            key: Measurement(status, median, low, high, (), workspace or 0, "" if status == "ok" else "as recorded")
            for key, (status, median, low, high, workspace) in self.value["measurements"].items()
        }

    @property
    def ceilings(self) -> Roofline:
        return Roofline.from_facts(self.value["ceilings"])

    @property
    def model(self) -> Model:
        return named_model(self.value["model"], dtype=self.value.get("dtype"))

    @property
    def title(self) -> str:
        """Model and device."""
        return f"{self.value['model']} {self.model.dtype} on {self.value['environment']['device_name']}"

    @property
    def file(self) -> SpaceFile:
        """The search space as it was when this was recorded: kernels and parameters that came later are left out."""
        return as_recorded(space_file(self.value["device_type"]), self.value["kernels"])

    def space(self) -> Space:
        """Return the search space of its model."""
        return build_space(training_graph(self.model.graph()), self.file)

    def problem(self, *, saving: bool = False) -> Problem:
        """Return the problem of a training step at recorded costs; calls that were not recorded are left out.

        Args:
            saving: as in `formulate`.
        """
        return formulate(self.space(), saving=saving).priced(self.costs_us).problem


def as_recorded(file: SpaceFile, kernels: Mapping[str, dict[str, list[Scalar]]]) -> SpaceFile:
    """Return a search space with some kernels alone, with these lists of their parameters, and without what was offered
    later: repeats."""
    entries = {name: file.kernels[name].model_copy(update={"params": params}) for name, params in kernels.items()}
    return file.model_copy(update={"kernels": entries, "repeats": False})


TINY = Recording(DATA / "bert_encoder_tiny_cpu.json.gz")
LARGE = Recording(DATA / "bert_encoder_large_h200.json.gz")
RECORDINGS = {"tiny": TINY, "large": LARGE}

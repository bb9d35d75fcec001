"""Prebuilt calls of a plan's steps, over the memory that each reads and writes."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from autotuner.errors import ConfigurationError
from autotuner.kernels import KERNELS
from autotuner.plan.memory_planner import MemoryPlan, Place
from autotuner.runtime.devices import Run
from autotuner.runtime.shown_tensors import ShownTensors


class BuiltSteps:
    """Calls without arguments, one for each step that touches nothing which is handed out.

    The other steps write into storages that change from call to call. `build` builds them for given ones.

    Attributes:
        views: memory of each place of the plan, but for what is handed out.
        inside: the calls, by the step's number.
    """

    def __init__(self, plan: MemoryPlan, views: Mapping[Place, Tensor], shown: ShownTensors, vendor: str) -> None:
        """Build.

        Args:
            vendor: of the device.

        Raises:
            ConfigurationError: a kernel does not run on devices of this vendor.
        """
        for step in plan.steps:
            if reason := KERNELS[step.call.candidate.kernel].refuses_vendor(vendor):
                raise ConfigurationError(f"this configuration was measured on another device: {reason}")
        self._plan, self._shown = plan, shown
        self.views = dict(views)
        self.inside = {
            number: self.build(number, self.views) for number in range(len(plan.steps)) if self._is_inside(number)
        }

    def move(self, views: Mapping[Place, Tensor]) -> set[str]:
        """Build the steps that read these places on other memory, or where they have none yet; return their phases."""
        self.views |= views
        readers = self._readers(views.keys())
        with torch.inference_mode(False), torch.no_grad():
            for number in readers:
                if self._is_inside(number):
                    self.inside[number] = self.build(number, self.views)
        return {self._plan.steps[number].phase for number in readers}

    def drop(self, places: Collection[Place]) -> None:
        """Give up the memory of these places, and the calls of the steps that read them."""
        for number in self._readers(places):
            self.inside.pop(number, None)
        for place in places:
            del self.views[place]

    def build(self, number: int, views: Mapping[Place, Tensor]) -> Run:
        """Build a step on operands declared as its record declares them, over the same elements."""
        step = self._plan.steps[number]
        call = step.call
        operands: list[Tensor | None] = []
        for place, tensor, form in zip(
            (*step.inputs, *step.outputs), call.subgraph.boundary, call.candidate.parsed_forms(), strict=True
        ):
            if place is None:
                operands.append(None)
                continue
            declared = call.subgraph.tensors[tensor]
            lies = form.stored(declared.dtype, declared.axes, declared.extents)
            view = views[place]
            operands.append(view.as_strided(lies.extents, lies.strides, view.storage_offset()))
        count = len(step.inputs)
        run: Run = KERNELS[call.candidate.kernel].builder()(call, operands[:count], operands[count:])
        return self._shown.with_step(number, run, views)

    def _is_inside(self, number: int) -> bool:
        """Say whether all that a step touches has memory here."""
        step = self._plan.steps[number]
        return all(place is None or place in self.views for place in (*step.inputs, *step.outputs))

    def _readers(self, places: Collection[Place]) -> list[int]:
        """Return the numbers of the steps that read one of these places."""
        return [n for n, step in enumerate(self._plan.steps) if not set(places).isdisjoint(step.inputs)]

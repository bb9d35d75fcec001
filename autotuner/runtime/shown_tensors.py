"""Tensors that a plan keeps to itself and a caller wants to see: the keys and values of a cache, say.

A plan that was tuned without them runs as it is. Forward copies each right behind the step that makes it; backward adds
the gradient that the caller has for it right behind the step that makes its gradient, before anything reads that.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autotuner.errors import ConfigurationError
from autotuner.plan.memory_planner import MemoryPlan, Place, Port
from autotuner.plan.memory_planner.memory_plan import Geometry, geometry

Run = Callable[[], Any]


def shown_geometry(plan: MemoryPlan, port: Port) -> Geometry:
    """Return how a tensor lies that is shown: dense, in the order in which its axes are declared.

    Raises:
        ConfigurationError: no strides show it as the port wants it.
    """
    tensor = plan.graph.tensors[port.members[0]]
    shape = plan.graph.shape(tensor.name)
    strides = torch.empty(shape, device="meta").stride()
    steps = dict(zip(tensor.axes, strides, strict=True))
    return geometry(port, 0, [0], [steps], dict(zip(tensor.axes, shape, strict=True)))


def steps_that_make(plan: MemoryPlan, port: Port) -> tuple[tuple[int, Place], tuple[int, Place]]:
    """Return the steps that make a tensor and its gradient, each with the place where it is then.

    Raises:
        ConfigurationError: no step does: it stays inside of one.
    """
    (name,) = port.members
    gradient = next((each for each in (f"grad_{name}_sum", f"grad_{name}") if each in plan.graph.tensors), "")
    found = []
    for tensor, phase in ((name, "forward"), (gradient, "backward")):
        made = next(
            (
                (number, place)
                for number, step in enumerate(plan.steps) if step.phase == phase
                for place in step.outputs if place is not None and place[0] == tensor
            ),
            None,
        )  # fmt: skip
        if made is None:
            raise ConfigurationError(f"{port.name} cannot be shown: it stays inside of a kernel of this configuration")
        found.append(made)
    return found[0], found[1]


class ShownTensors:
    """Copies of tensors in memory of their own, and gradients that are added to those of a plan."""

    def __init__(self, plan: MemoryPlan, ports: tuple[Port, ...], device: torch.device) -> None:
        """Allocate.

        Raises:
            ConfigurationError: as `steps_that_make`.
        """
        self._behind: dict[int, list[tuple[str, Place, Tensor]]] = {}
        self._copies: list[Tensor] = []
        self._given: list[Tensor] = []
        for port in ports:
            (forward, place), (backward, gradient) = steps_that_make(plan, port)
            lies = shown_geometry(plan, port)
            for number, at, phase, shown in (
                (forward, place, "forward", self._copies), (backward, gradient, "backward", self._given)
            ):  # fmt: skip
                dtype = getattr(torch, plan.graph.tensors[at[0]].dtype)
                own = torch.empty(plan.graph.shape(port.members[0]), dtype=dtype, device=device)
                self._behind.setdefault(number, []).append((phase, at, own))
                shown.append(own.as_strided(lies.shape, lies.strides))

    def with_step(self, number: int, run: Run, views: Mapping[Place, Tensor]) -> Run:
        """Return a step's call with what has to follow it."""
        behind = [
            (views[place], own) if phase == "backward" else (own, views[place])
            for phase, place, own in self._behind.get(number, ())
        ]
        if not behind:
            return run
        is_sum = self._behind[number][0][0] == "backward"

        def run_and_show() -> None:
            run()
            for target, source in behind:
                if is_sum:
                    target.add_(source)
                else:
                    target.copy_(source)

        return run_and_show

    def handed(self) -> list[Tensor]:
        """Return what the last forward made, as copies."""
        return [shown.clone() for shown in self._copies]

    def memory(self) -> list[Tensor]:
        """Return all that is allocated here."""
        return [*self._copies, *self._given]

    def take(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the caller's gradients; None stands for zeros."""
        for own, gradient in zip(self._given, gradients, strict=True):
            if gradient is None:
                own.zero_()
            else:
                own.copy_(gradient)

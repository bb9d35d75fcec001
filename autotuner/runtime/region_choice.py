"""A region that can run in several ways: as plans that leave more or less for backward, or with its forward repeated.

Compiled code names the place, as it names a `TunedRegion`. Which way it goes is decided call by call, by the budget of
the training step that calls it; see `autotuner.runtime.step_budget`. A region whose forward is repeated leaves nothing
but its inputs, which other tensors of the model mostly are anyway: its backward runs the forward once more, with the
same random numbers.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.kinds import draws
from autotuner.ir.numerics import CLASSES, Numerics
from autotuner.runtime.bound_parameters import copied_buffers, lying_in
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.graphs import Switch
from autotuner.runtime.pool import Lease
from autotuner.runtime.region import TunedRegion
from autotuner.runtime.region_operator import number_of, tuned_region
from autotuner.runtime.region_plan import RegionPlan
from autotuner.runtime.scratch import shared_scratch, sharing
from autotuner.runtime.step_budget import StepBudget, current_budget
from autotuner.runtime.step_laps import BACKWARD, FORWARD


@dataclass(eq=False)
class RegionWay:
    """A way to run a region.

    Args:
        region: by its plan.
        repeats: whether backward runs the forward again, so that this leaves nothing.
        inputs_bytes: of inputs that get gradients and that no backward reads: a repeat alone needs them.
        copied_bytes: of parameters that lie otherwise than the plan says, known once it has been called.
    """

    region: TunedRegion
    repeats: bool
    inputs_bytes: int = 0
    copied_bytes: int = 0

    @property
    def time_us(self) -> float:
        """Time of its kernels in a training step."""
        us = self.region.plan.us
        return us[FORWARD] * (1 + self.repeats) + us[BACKWARD]

    @property
    def inexact(self) -> Collection[Numerics]:
        """Numerics classes of what its forward saves, but for exact values."""
        return tuple(each for each in self.region.plan.configuration.inexact if CLASSES[each].for_memory)

    @property
    def own_bytes(self) -> int:
        """Bytes that it holds while forward or backward run, beside inputs, outputs and gradients."""
        return self.region.plan.kept_bytes + self.copied_bytes

    @property
    def gradients_bytes(self) -> int:
        """Bytes of the gradients that its backward hands out."""
        return self.region.plan.gradients_bytes

    @property
    def outside_bytes(self) -> int:
        """Bytes of its inputs, outputs and gradients, of which a workspace that stays has its own."""
        return self.region.plan.outside_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that its forward leaves for backward, beside inputs that are there in any way."""
        return self.inputs_bytes if self.repeats else self.own_bytes


class RegionChoice:
    """A tuned region at one place of a compiled model, with several ways to run; see `TunedRegion`.

    Attributes:
        ways: all of them.
        fastest: runs outside of any budget.
        leanest: leaves the least for backward, and needs the least beside.
        draws: whether it draws random numbers.
        number, label: as of a `TunedRegion`.
    """

    operator = staticmethod(torch.ops.autotuner.tuned_region.default)

    def __init__(self, regions: Sequence[TunedRegion], graphs: Switch | None = None) -> None:
        """Offer the plans of regions at one place, those that hand out the same as the first, each in both ways.

        Args:
            regions: made with `in_place`.
            graphs: of all of them; None where their calls never become graphs.
        """
        self._graphs = graphs
        first = regions[0]
        alike = [region for region in regions if _handed(region) == _handed(first)]
        read_again = sorted({place for region in alike for place in region.plan.results.read_again})
        results = replace(
            first.plan.results, in_place=True, state_bytes=None, repeats=False, read_again=tuple(read_again)
        )
        inputs_bytes = sum(
            first.plan.input_bytes(place)
            for place, gradient in enumerate(results.gradients) if gradient is not None and place not in read_again
        )  # fmt: skip
        self.ways = tuple(RegionWay(region, repeats, inputs_bytes) for repeats in (False, True) for region in alike)
        self.fastest = min(self.ways, key=lambda way: way.time_us)
        self.leanest = self._leanest()
        self._called_with: list[int] = []
        self.scratch_bytes = max(way.region.plan.scratch_bytes for way in self.ways)
        self.draws = any(draws(operator.kind) for operator in first.plan.configuration.model.graph().operators)
        self.number, self.label = number_of(self), first.label
        self._results = results.text()

    @property
    def plan(self) -> Any:
        """The plan of the fastest way."""
        return self.fastest.region.plan

    def replay(self, on: bool) -> None:
        """Have calls become graphs from now on, as far as they may, or run one by one."""
        if self._graphs is not None:
            self._graphs.turn(on)

    def let_go(self) -> None:
        """Give up all memory, between steps."""
        for region in {way.region for way in self.ways}:
            region.bound.let_go()

    def arguments(self, inputs: Sequence[Any], parameters: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments of `operator`, for tensors or for nodes of an FX graph."""
        return self.number, (*inputs, *parameters)[0], [*inputs], [*parameters], self._results, None

    def call(self, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the region, and return the outputs. It has a backward."""
        made: tuple[list[Tensor], Tensor] = tuned_region(*self.arguments(inputs, parameters))
        return made[0]

    def forward(
        self, inputs: Sequence[Tensor], parameters: Sequence[Tensor], *, in_place: bool
    ) -> tuple[list[Tensor], "HeldCall"]:
        """Run forward, and return the outputs and what it holds for its backward.

        Raises:
            RuntimeError: the region was tuned for other inputs or parameters.
        """
        places = [parameter.data_ptr() for parameter in parameters]
        if places != self._called_with:
            for each in self.ways:
                each.copied_bytes = _copied_bytes(each.region.plan, parameters)
            self._called_with, self.leanest = places, self._leanest()
        budget = current_budget()
        way = self.fastest if budget is None else self._chosen(budget)
        device = (*inputs, *parameters)[0].device
        with nullcontext() if budget is None else budget.inside(self, FORWARD):
            if not way.repeats:
                outputs, lease = way.region.forward(inputs, parameters, in_place=in_place)
                held = HeldCall(self, way, budget, lease=lease)
            else:
                noting: AbstractContextManager[Any] = nullcontext()
                if self.draws:
                    noting = device_runtime(device).noted_draws()
                with noting as noted:
                    outputs, lease = way.region.forward(inputs, parameters, in_place=in_place)
                held = HeldCall(self, way, budget, inputs=inputs, noted=noted)
            del lease
        return outputs, held

    def _leanest(self) -> RegionWay:
        return min(self.ways, key=lambda way: (way.held_bytes, way.own_bytes, way.time_us))

    def _chosen(self, budget: StepBudget) -> RegionWay:
        way = budget.way_of(self)
        assert isinstance(way, RegionWay)
        return way

    def restored(self, *_: Any, **__: Any) -> Lease:
        raise AssertionError("what its forward leaves is a ticket")

    def going_back(self) -> AbstractContextManager[None]:
        """Return what a backward runs in: nothing, since `HeldCall` sees to it."""
        return nullcontext()

    def repeated(self, *_: Any) -> list[Tensor]:
        raise AssertionError("its gradients are not differentiated again: its results say so")


class HeldCall:
    """Hold of a forward for its backward: a workspace, or all that it takes to run once more."""

    __slots__ = ("__weakref__", "_budget", "_choice", "_inputs", "_lease", "_noted", "_scratch", "_way")

    def __init__(
        self,
        choice: RegionChoice,
        way: RegionWay,
        budget: StepBudget | None,
        *,
        lease: Lease | None = None,
        inputs: Sequence[Tensor] = (),
        noted: Any = None,
    ) -> None:
        self._choice, self._way, self._budget = choice, way, budget
        self._lease, self._inputs, self._noted, self._scratch = lease, list(inputs), noted, shared_scratch()
        if budget is not None:
            budget.began(self, choice)

    @property
    def backward(self) -> Callable[..., list[Tensor | None]]:
        """A function as `Workspace.backward`."""
        return self._backward

    def _backward(
        self,
        given: Sequence[Tensor | None],
        wanted: tuple[bool, ...],
        keeps: bool = False,
        current: Sequence[Tensor] = (),
        in_place: bool = False,  # noqa: ARG002
        places: Sequence[Tensor | None] = (),
    ) -> list[Tensor | None]:
        budget, region = self._budget, self._way.region
        with nullcontext() if budget is None else budget.inside(self._choice, BACKWARD), region.going_back():
            lease = self._again(current) if self._lease is None else self._lease
            keeps = keeps and self._lease is not None
            found = lease.backward(given, wanted, keeps, current, lease.workspace.gives_back, places)
            del lease
        if budget is not None and not keeps:
            budget.ended(self)
        return found

    def _again(self, parameters: Sequence[Tensor]) -> Lease:
        device = (*self._inputs, *parameters)[0].device
        drawing: AbstractContextManager[None] = nullcontext()
        if self._choice.draws:
            runtime = device_runtime(device)
            if runtime.is_capturing():
                if self._noted is None:
                    raise RuntimeError(
                        f"{self._choice.label}: a second backward of one forward, in a graph, under a memory budget: "
                        "its random numbers can be drawn again once"
                    )
                noted, self._noted = self._noted, None
            else:
                noted = self._noted
            drawing = runtime.draws_again(noted)
        # On a GPU, backward runs in a thread of its own.
        with nullcontext() if self._scratch is None else sharing(self._scratch), drawing:
            _, lease = self._way.region.forward(self._inputs, parameters, in_place=True)
        return lease


def _copied_bytes(plan: RegionPlan, parameters: Sequence[Tensor]) -> int:
    """Return the bytes of copies of parameters that do not lie as planned."""
    copied = copied_buffers(lying_in(plan.memory, plan.ports.parameters), parameters)
    return sum(plan.memory.buffers[number].size_bytes for number in copied)


def _handed(region: TunedRegion) -> Any:
    results = region.plan.results
    return results.outputs, results.gradients

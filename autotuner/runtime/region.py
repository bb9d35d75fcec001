"""A tuned region: a configuration that runs at one place of a compiled model, for a connected part of its forward.

The compiler guards what a region depends on, so there is no module here and there are no settings: a call brings inputs
and parameters, and only their shapes, types and devices are checked.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from threading import Timer
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.device import has_graphs
from autotuner.plan.configuration import Configuration
from autotuner.runtime.bound_parameters import BoundInTurn, BoundParameters
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.fallbacks import TALLY
from autotuner.runtime.gradient_stacks import without_shared_memory
from autotuner.runtime.graphs import Switch
from autotuner.runtime.pool import Lease
from autotuner.runtime.region_operator import RegionStep, number_of, tuned_region
from autotuner.runtime.region_plan import MisfitError, RegionPlan, RegionPorts
from autotuner.runtime.repeated_region import RepeatedRegion, can_repeat

SLOW_S = 2.0
"""Seconds behind which it is said what is being built."""


@contextmanager
def said_if_slow(say: Callable[[str], None], text: str) -> Iterator[None]:
    """Say what is done, from another thread, once it has taken a while."""
    timer = Timer(SLOW_S, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_watched() -> bool:
    """Say whether somebody sees each operator that runs: a compiler, a transformation, a mode of the dispatcher."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def is_captured(device: torch.device) -> bool:
    """Say whether a caller captures a graph on a device."""
    runtime = device_runtime(device)
    return runtime.has_graphs and runtime.is_current() and runtime.is_capturing()


class TunedRegion:
    """A tuned region at one place of a compiled model. Compiled code names it by a number, and does not hold it.

    It binds to the memory of its parameters at its first call, and follows them where they move. Models that share
    compiled code have a binding each.

    Attributes:
        number: by which the operator finds it.
        label: for messages.
        bound: bindings to parameters.
        calls: how many calls there were.
    """

    operator = staticmethod(torch.ops.autotuner.tuned_region.default)

    def __init__(
        self,
        configuration: Configuration,
        ports: RegionPorts,
        *,
        graphs: bool | Switch = True,
        in_place: bool = False,
        repeats: bool = False,
        follows: bool = True,
        label: str = "",
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Plan memory, or take the plan of another place.

        Args:
            configuration: of a model of any definition.
            ports: how the caller sees the model's tensors.
            graphs: whether calls become CUDA graphs; a switch that several regions share, or one of its own.
            in_place: whether inputs and gradients of outputs are read where they are, in a graph that a caller captures
                and in a step before that.
            repeats: whether its gradients can be differentiated again, where it computes the same again: it keeps its
                inputs until backward then.
            follows: whether inputs are read where they are outside of a caller's graph, too, as long as they lie where
                those of the call before lay. Those that backward reads are saved for it then. With `in_place`, or with
                this where calls become graphs, memory is planned such that regions can share a scratch; see
                `autotuner.runtime.scratch`.
            label: of the place, for messages.
            say: called with a line where its kernels take long to build.

        Raises:
            ConfigurationError: as `RegionPlan`.
        """
        shares = has_graphs(str(configuration.environment["device_type"]))  # regions of other devices share no scratch
        self.plan = RegionPlan.of(configuration, ports, apart=in_place or (follows and shares))
        self.number = number_of(self)
        self.label = label or f"tuned region {self.number}"
        self.calls = 0
        self._say = say
        self._went_back = False
        switch = graphs if isinstance(graphs, Switch) else Switch(graphs)
        self.bound = BoundInTurn(
            lambda: BoundParameters(self.plan.memory, self.plan.boundary, ports.parameters, switch)
        )
        self._in_place, self._follows = in_place, follows
        results = replace(self.plan.results, in_place=in_place or follows)
        self._results = replace(results, repeats=repeats and can_repeat(configuration)).text()

    def arguments(self, inputs: Sequence[Any], parameters: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments of `operator`, for tensors or for nodes of an FX graph."""
        return self.number, (*inputs, *parameters)[0], [*inputs], [*parameters], self._results, None

    def call(self, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the region, and return the outputs. It has a backward. Who traces or transforms sees one operator."""
        if is_watched():
            made: tuple[list[Tensor], Tensor] = tuned_region(*self.arguments(inputs, parameters))
            return made[0]
        if not torch.is_grad_enabled():
            with torch._C._DisableAutocast():
                return without_shared_memory(self.forward(inputs, parameters, in_place=self._follows)[0])
        step = RegionStep.apply(self.number, len(inputs), self._results, *inputs, *parameters)  # type: ignore[no-untyped-call]
        found: tuple[Tensor, ...] = step
        return found

    def forward(
        self, inputs: Sequence[Tensor], parameters: Sequence[Tensor], *, in_place: bool
    ) -> tuple[list[Tensor], Lease]:
        """Run forward in a workspace, and return the outputs and the lease of the workspace.

        Args:
            in_place: whether inputs may be read where they are.

        Raises:
            MisfitError: the region was tuned for other inputs or parameters.
        """
        counts = (len(self.plan.ports.inputs), len(self.plan.ports.parameters))
        if (len(inputs), len(parameters)) != counts:
            raise MisfitError(
                f"{self.label} was given {len(inputs)} inputs and {len(parameters)} parameters; it has {counts[0]} "
                f"inputs and {counts[1]} parameters"
            )
        device = (*inputs, *parameters)[0].device
        pool = self.bound.found(parameters, device)
        self.plan.check(inputs, () if pool else parameters, self.label, device)
        self.calls += 1
        TALLY.region_us += self.plan.us["forward"]
        pool = pool or self.bound.bind(parameters, device)
        if self.calls == 1 and self._say is not None:
            with said_if_slow(self._say, f"building {len(self.plan.configuration.steps)} kernels of {self.label}"):
                return self._run(Lease(pool), inputs, parameters, in_place)
        return self._run(Lease(pool), inputs, parameters, in_place)

    def _run(
        self, lease: Lease, inputs: Sequence[Tensor], parameters: Sequence[Tensor], in_place: bool
    ) -> tuple[list[Tensor], Lease]:
        in_place = in_place and (lease.gives_back or not self._in_place)
        return lease.workspace.forward(*inputs, current=parameters, in_place=in_place), lease

    def skip_kernels(self) -> None:
        """Leave out kernels from now on, where it has run."""
        if self.calls:
            self.bound.last.pool.skips_kernels = True

    def going_back(self) -> AbstractContextManager[None]:
        """Return what a backward runs in: the first one builds kernels, and says so where that takes a while."""
        TALLY.region_us += self.plan.us["backward"]
        if self._went_back or self._say is None:
            return nullcontext()
        self._went_back = True
        return said_if_slow(self._say, f"building kernels for the backward of {self.label}")

    def repeated(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run forward by plain operators on inputs and parameters, and return the outputs; torch records how."""
        ports = self.plan.ports
        again = RepeatedRegion(self.plan.configuration, (*ports.inputs, *ports.parameters), ports.outputs)
        return again(tensors)

    def restored(
        self,
        state: Tensor,
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        device: torch.device,
        *,
        in_place: bool,
    ) -> Lease:
        """Return the lease of a workspace that goes on where a forward left it, with a copy of what that has saved.

        Raises:
            RuntimeError: the inputs were read where they are, in a graph that a caller captured.
        """
        if in_place and not self._in_place and is_captured(device):
            raise RuntimeError(f"{self.label}: hooks on saved tensors gave backward a copy inside of a captured graph")
        pool = self.bound.found(parameters, device)
        lease = Lease(pool or self.bound.bind(parameters, device))
        lease.workspace.restore(state, inputs if in_place else (), parameters)
        return lease

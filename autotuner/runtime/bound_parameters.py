"""Parameters of a caller, and workspaces over their memory that follow them where they move."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from threading import Lock

import torch
from torch import Tensor

from autotuner.ir.device import alignment_bytes
from autotuner.plan.memory_planner import Geometry, MemoryPlan, Port, Ports
from autotuner.runtime.graphs import Switch
from autotuner.runtime.parameter_memory import ParameterMemory, where, whole_memory
from autotuner.runtime.pool import Pool

# Parameters that have moved more often are all copied before each forward, wherever they are by then, rather than bound
# to where they are. FSDP moves them every step, and a workspace over other memory takes milliseconds to build.
MOVES = 3
# Models of one class share compiled code, and so a region. As many of them keep a binding of their own.
MODELS = 4


class BoundParameters:
    """A caller's parameters by address, and a pool of workspaces that read them.

    Kernels read a parameter where it is, if the plan wants it as it lies: contiguous, and where siblings are stacked,
    one behind the other. Otherwise it is copied into memory of the workspace before each forward. The caller's own
    tensors are never replaced.

    Attributes:
        lying: where the plan has each of them.
        device: on which they were bound last.
        memory: where each of them is, by address, strides, shape and type, while they are bound.
        pool: workspaces over them, while they are bound.
    """

    memory: list[tuple[int, tuple[int, ...], torch.Size, torch.dtype]]
    pool: Pool

    def __init__(self, plan: MemoryPlan, boundary: Ports, ports: Sequence[Port], graphs: Switch) -> None:
        self._plan, self._boundary, self._ports, self._graphs = plan, boundary, ports, graphs
        self.lying = lying_in(plan, ports)
        self.memory = []
        self.is_bound = False
        self.device: torch.device | None = None
        self._moves = 0

    def are(self, current: Sequence[Tensor]) -> bool:
        """Say whether these are where they were when they were bound, with the same shapes and types."""
        return self.is_bound and self.memory == [where(tensor) for tensor in current]

    def bind(self, current: Sequence[Tensor], device: torch.device) -> None:
        """Bind to the memory that parameters have now, whose shapes and types are those of the plan."""
        if self.is_bound and device == self.device:
            self._moves += 1
        self.device = device
        self.memory = [where(parameter) for parameter in current]
        moving = self._moves > MOVES
        apart = self._apart(current)
        if self.is_bound and self.pool.reads(device, apart, current, moving):
            return
        with torch.inference_mode(False), torch.no_grad():
            views = dict(
                view for port, lies, parameter in zip(self._ports, self.lying, current, strict=True)
                if lies.buffer not in apart for view in self._views(port, lies, parameter)
            )  # fmt: skip
        # Those that move are handed in with each forward, and none of them is kept alive here.
        plain = [] if moving else [parameter.detach() for parameter in current]
        memory = ParameterMemory(views, self.lying, apart, plain, moving)
        self.pool = Pool(self._plan, self._boundary, memory, device, self._graphs)
        self.is_bound = True

    def let_go(self) -> None:
        """Give up workspaces, and the parameters that they were built on."""
        if self.is_bound:
            self.is_bound = False
            self.memory = []
            del self.pool

    def _apart(self, current: Sequence[Tensor]) -> frozenset[int]:
        """Return the buffers of parameters that are copied: they do not lie as planned, or move."""
        if self._moves > MOVES:
            return frozenset(lies.buffer for lies in self.lying)
        return copied_buffers(self.lying, current)

    def _views(self, port: Port, lies: Geometry, parameter: Tensor) -> list[tuple[str, Tensor]]:
        """Return the graph's parameters over the memory of a caller's parameter."""
        found = []
        whole, start = whole_memory(parameter)
        for member in port.members:
            place = self._plan.parameters[member]
            offset = self._plan.buffers[lies.buffer].offsets[place] - lies.offset
            view = whole.as_strided(self._plan.shape(place), self._plan.strides(place), start + offset)
            found.append((member, view))
        return found


class BoundInTurn:
    """Bindings of one region to the parameters of each model that calls it.

    A further binding is made only for parameters that were bound before and come back: those that have just moved
    leave nothing behind. Several threads may ask at a time: what they get is a pool, which stays what it is where
    another thread binds anew.
    """

    def __init__(self, make: Callable[[], BoundParameters]) -> None:
        self._make = make
        self._lock = Lock()
        self._bound = [make()]
        self._left: deque[list[tuple[int, tuple[int, ...], torch.Size, torch.dtype]]] = deque(maxlen=MODELS)

    @property
    def last(self) -> BoundParameters:
        """The binding of the last call."""
        return self._bound[0]

    def let_go(self) -> None:
        """Give up all workspaces, and the parameters that they were built on."""
        with self._lock:
            for bound in self._bound:
                bound.let_go()
            self._left.clear()

    def found(self, current: Sequence[Tensor], device: torch.device) -> Pool | None:
        """Return the workspaces over these parameters, whose binding is the last one from now on; None for none."""
        with self._lock:
            for place, bound in enumerate(self._bound):
                if bound.device == device and bound.are(current):
                    self._bound.insert(0, self._bound.pop(place))
                    return bound.pool
        return None

    def bind(self, current: Sequence[Tensor], device: torch.device) -> Pool:
        """Bind parameters, unless another thread has by now, and return the workspaces over them."""
        with self._lock:
            if self.last.device == device and self.last.are(current):
                return self.last.pool
            if self.last.is_bound:
                if [where(parameter) for parameter in current] in self._left:
                    self._bound.insert(0, self._bound.pop() if len(self._bound) == MODELS else self._make())
                else:
                    self._left.append(self.last.memory)
            self.last.bind(current, device)
            return self.last.pool


def lying_in(plan: MemoryPlan, ports: Sequence[Port]) -> list[Geometry]:
    """Return where a plan has each parameter, in the order of the ports."""
    return [plan.geometry(port) for port in ports]


def copied_buffers(lying: Sequence[Geometry], current: Sequence[Tensor]) -> frozenset[int]:
    """Return the buffers of a plan that parameters are copied to, since they lie otherwise.

    Args:
        lying: where the plan has each parameter.
        current: the parameters.
    """
    found: dict[int, list[tuple[Geometry, Tensor]]] = defaultdict(list)
    for lies, parameter in zip(lying, current, strict=True):
        found[lies.buffer].append((lies, parameter))
    return frozenset(
        number for number, members in found.items()
        if not _lie_as_planned(members) or members[0][1].data_ptr() % alignment_bytes(members[0][1].device.type)
    )  # fmt: skip


def _lie_as_planned(members: Sequence[tuple[Geometry, Tensor]]) -> bool:
    wholes = [(lies, *whole_memory(parameter)) for lies, parameter in members]
    starts = {(whole.untyped_storage().data_ptr(), start - lies.offset) for lies, whole, start in wholes}
    return len(starts) == 1 and all(_strides_fit(lies, p) for lies, p in members)


def _strides_fit(lies: Geometry, parameter: Tensor) -> bool:
    return all(
        extent == 1 or planned == actual
        for extent, planned, actual in zip(lies.shape, lies.strides, parameter.stride(), strict=True)
    )

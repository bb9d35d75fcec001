"""Workspaces of one plan and one set of parameters, lent to one forward and its backward at a time."""

from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from autotuner.plan.memory_planner import MemoryPlan, Ports
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.graphs import Switch
from autotuner.runtime.parameter_memory import ParameterMemory, where
from autotuner.runtime.scratch import Scratch, common_scratch, shared_scratch
from autotuner.runtime.workspace import CPU, Workspace

IDLE_WORKSPACES = 2
REFUSED = 3
"""Workspaces whose memory another one had in use, from which on each new one has memory of its own."""


class Pool:
    """Workspaces of one plan and one set of parameters: taken by a forward, given back when its backward is over.

    A forward that a caller captures gets a new workspace. What that one allocates belongs to the memory of the caller's
    graph, and is there for as long as the graph is, whatever becomes of the workspace. It gives its memory back within
    the capture, and is not taken again. One that was made before is kept, since the graph writes there.

    Any number of threads take and give back at a time. A lease may end anywhere, inside of `take` too, where the
    garbage collector runs: what is given back is put in a queue without waiting, and whoever has the lock sorts it.

    Attributes:
        made: how many workspaces there were.
        skips_kernels: whether workspaces leave out their kernels, which shows what a step costs beside them.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        ports: Ports,
        parameters: ParameterMemory,
        device: torch.device = CPU,
        graphs: Switch | None = None,
    ) -> None:
        self._arguments = (plan, ports, parameters, device, graphs)
        self._runtime = device_runtime(device)
        self._has_scratch = plan.kept_bytes < plan.arena_bytes
        self._read = (device, parameters.apart, parameters.moving)
        self._where = None if parameters.moving else [where(tensor) for tensor in parameters.current]
        self._idle: list[Workspace] = []
        self._in_capture: list[Workspace] = []
        self._given_back: deque[Workspace] = deque()
        self._lock = Lock()
        self._refused = 0
        self.made = 0
        self.skips_kernels = False

    def reads(self, device: torch.device, apart: frozenset[int], current: Sequence[Tensor], moving: bool) -> bool:
        """Say whether its workspaces read parameters on this device, where these are, and these buffers as copies."""
        return self._read == (device, apart, moving) and (
            self._where is None or self._where == [where(tensor) for tensor in current]
        )

    def take(self) -> Workspace:
        scratch = shared_scratch()
        # Where calls run to their end at once, threads would wait for each other.
        is_common = scratch is None and self._has_scratch and self._runtime.has_graphs
        if is_common:
            scratch = common_scratch(self._arguments[3])
        elif scratch is not None and not self._has_scratch and not scratch.is_of_one_step:
            scratch = None
        with self._lock:
            self._sort()
            found = self._taken(scratch)
            self.made += found is None
        try:
            if found is None and is_common and self._is_captured():  # a graph of the caller's is replayed at any time
                scratch = None
            workspace = Workspace(*self._arguments, scratch, shares=self._refused < REFUSED) if found is None else found
        finally:  # what was given back meanwhile leaves its memory to others, and not to the one that is built here
            self._settle()
        workspace.skips_kernels = self.skips_kernels
        return workspace

    def _taken(self, scratch: Scratch | None) -> Workspace | None:
        """Return an idle workspace that nobody else has from now on, None where there is none."""
        for workspace in self._in_capture:
            workspace.tidy()
        if self._is_captured():
            self._idle = [workspace for workspace in self._idle if workspace.has_graphs]
            return None
        self._idle = [workspace for workspace in self._idle if workspace.scratch is None or workspace.scratch.is_open]
        for place, workspace in reversed([*enumerate(self._idle)]):
            if workspace.scratch is scratch:
                del self._idle[place]
                if workspace.is_taken():
                    return workspace
                # Another one has its memory now, and would have it again.
                self._refused += 1
        return None

    def _is_captured(self) -> bool:
        with self._runtime.guard():
            return self._runtime.is_capturing()

    def give_back(self, workspace: Workspace) -> None:
        self._given_back.append(workspace)
        self._settle()

    def _settle(self) -> None:
        """Sort what was given back, unless somebody has the lock, who then does so behind releasing it."""
        while self._given_back and self._lock.acquire(blocking=False):
            try:
                self._sort()
            finally:
                self._lock.release()

    def _sort(self) -> None:
        """Keep some of those that were given back as idle ones, with the lock."""
        while self._given_back:
            workspace = self._given_back.popleft()
            if workspace.is_broken and not self._is_captured():  # in a capture, graphs must not be destroyed
                continue
            if workspace.in_capture or workspace.gives_back or workspace.is_broken:
                workspace.let_go()
                if not workspace.is_gone:
                    self._in_capture.append(workspace)
                continue
            workspace.rest()
            if sum(idle.scratch is workspace.scratch for idle in self._idle) < IDLE_WORKSPACES:
                self._idle.append(workspace)


Backward = Callable[
    [Sequence[Tensor | None], tuple[bool, ...], bool, Sequence[Tensor], bool, Sequence[Tensor | None]],
    list[Tensor | None],
]


class Held(Protocol):
    """A workspace that a forward holds for its backward, or the graph of an original that ran in its place."""

    @property
    def backward(self) -> Backward:
        """A function as `Workspace.backward`."""


class Lease:
    """Holds a workspace for as long as somebody holds the lease."""

    __slots__ = ("__weakref__", "pool", "workspace")

    def __init__(self, pool: Pool) -> None:
        self.pool, self.workspace = pool, pool.take()

    @property
    def gives_back(self) -> bool:
        """True where the workspace is for one forward and its backward: what is handed in may be read where it is."""
        return self.workspace.gives_back

    @property
    def backward(self) -> Backward:
        """The workspace's."""
        return self.workspace.backward

    def __del__(self) -> None:
        workspace = getattr(self, "workspace", None)
        if workspace is not None:
            self.pool.give_back(workspace)

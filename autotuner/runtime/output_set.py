"""Storages for what one phase of a workspace hands out, and the phase's calls built on them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from autotuner.plan.memory_planner import MemoryPlan, Place, Ports
from autotuner.runtime.branching import BranchingCalls
from autotuner.runtime.cuda import CallSequence, Cuda, Run

# Graphs of one set's backward, by the gradients that are wanted; for further choices of them the calls run one by one.
CHOICES = 4


class Builder(Protocol):
    """The part of a workspace that a set is built with."""

    plan: MemoryPlan
    ports: Ports
    views: dict[Place, Tensor]
    held: dict[int, Tensor]
    inside: dict[int, Run]
    cuda: Cuda | None

    @property
    def copying(self) -> list[Run]: ...

    def base(self, number: int) -> Tensor: ...
    def show(self, number: int, base: Tensor, views: dict[Place, Tensor]) -> None: ...
    def built(self, number: int, views: Mapping[Place, Tensor]) -> Run: ...


class OutputSet:
    """A set; it is free where nobody outside holds any of its storages."""

    def __init__(self, workspace: Builder, phase: str) -> None:
        plan, ports = workspace.plan, workspace.ports
        self.phase = phase
        self._plan, self._ports = plan, ports
        with torch.inference_mode(False), torch.no_grad():
            bases = {
                number: workspace.base(number)
                for number, buffer in enumerate(plan.buffers)
                if buffer.role == "output" and buffer.phase == phase and number not in workspace.held
            }
            views = dict(workspace.views)
            base: Tensor | None = None
            for number, base in bases.items():
                workspace.show(number, base, views)
            self.calls = {
                number: workspace.inside.get(number) or workspace.built(number, views)
                for number, step in enumerate(plan.steps)
                if step.phase == phase
            }
            lying = [
                plan.geometry(port, of)
                for of, side in (("", ports.outputs), ("grad_", ports.sources))
                if (of == "") == (phase == "forward")
                for port in side
            ]
            whole = bases | workspace.held
            self.handed = [
                base.as_strided(g.shape, g.strides, base.storage_offset() + g.offset)
                for g, base in ((g, whole[g.buffer]) for g in lying)
            ]
            self.held = frozenset(i for i, lies in enumerate(lying) if lies.buffer in workspace.held)
        self._cuda = workspace.cuda
        copying = workspace.copying if phase == "forward" else ()
        self.sequence = CallSequence([*copying, *self._over_streams(self.calls)])
        self._chosen: dict[tuple[bool, ...], CallSequence] = {}
        self._storages = [base.untyped_storage() for base in bases.values()]
        del bases, views, whole, base
        self._holders = [(storage._cdata, torch._C._storage_Use_Count(storage._cdata)) for storage in self._storages]

    def is_free(self) -> bool:
        """Say whether nobody outside holds a storage of this set: its use count is what it was when it was made."""
        count = torch._C._storage_Use_Count
        return all(count(storage) == holders for storage, holders in self._holders)

    @property
    def sequences(self) -> list[CallSequence]:
        """The calls of the phase, and those of each choice of gradients."""
        return [self.sequence, *self._chosen.values()]

    def _over_streams(self, calls: Mapping[int, Run]) -> Iterable[Run]:
        """Return what runs calls of this phase's steps, by number: on CUDA with the plan's branches."""
        if self._cuda is None or not self._plan.schedule.branches or not calls:
            return calls.values()
        return [BranchingCalls(calls, self._plan.schedule, self._cuda).run]

    def sequence_for(self, wanted: tuple[bool, ...]) -> CallSequence:
        """Return the calls that the wanted gradients need."""
        if wanted not in self._chosen:
            names = [
                f"grad_{member}"
                for port, want in zip(self._ports.sources, wanted, strict=True)
                if want
                for member in port.members
            ]
            needed = self._plan.needed(names)
            calls = {number: run for number, run in self.calls.items() if number in needed}
            self._chosen[wanted] = CallSequence([*self._over_streams(calls)], replays=len(self._chosen) < CHOICES)
        return self._chosen[wanted]


def copy_of(tensor: Tensor, strides: Sequence[int] | None = None) -> Tensor:
    """Return a copy with these strides, or else with the tensor's own."""
    strides = tensor.stride() if strides is None else strides
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

"""Storages for what a phase of a workspace hands out, in sets, and the phase's calls built on them."""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from autotuner.plan.memory_planner import Ports
from autotuner.runtime.arena import Arena
from autotuner.runtime.branching import BranchingCalls
from autotuner.runtime.built_steps import BuiltSteps
from autotuner.runtime.devices import DeviceRuntime, Run
from autotuner.runtime.graphs import CallSequence

# Graphs of one set's backward, by the gradients that are wanted; for further choices of them the calls run one by one.
CHOICES = 4

Finish = Callable[[list[Tensor | None]], list[Tensor]]
"""Makes what an operator returns of what it hands out: None where nothing is wanted."""

# Two sets let one be held (by `.grad`, by last step's output) while the other is written, step after step. Where more
# are held, results are handed out as copies.
SETS = 2

OWN = "autotuner: "
"""Names in a profile begin with it."""


class OutputSet:
    """Storages of a phase's outputs, and its calls built on them; free where nobody outside holds any of its storages.

    Attributes:
        phase: as given.
        calls: of each step of the phase, by number.
        bases: the storages' elements, by the number of the buffer.
        handed: the outputs, in the order of the ports.
        held: places in `handed` that backward reads, so that copies are handed out.
        sequence: what the phase runs.
        is_stale: whether its calls have to be built anew before they run again.
        holders: of each storage, by its address in torch, how many there are here but for what is finished.
    """

    def __init__(
        self,
        arena: Arena,
        steps: BuiltSteps,
        ports: Ports,
        phase: str,
        *,
        copying: Sequence[Run] = (),
        offered: Mapping[int, Tensor],
        runtime: DeviceRuntime,
    ) -> None:
        """Allocate and build.

        Args:
            phase: "forward" or "backward".
            copying: calls that come before those of the steps.
            offered: storages of others, by the number of the buffer that is to lie there.
            runtime: of the device.
        """
        plan = arena.plan
        self.phase = phase
        self._plan, self._ports = plan, ports
        self.is_stale = False
        with torch.inference_mode(False), torch.no_grad():
            bases = self.bases = {
                number: offered[number] if number in offered else arena.allocate(number)
                for number, buffer in enumerate(plan.buffers)
                if buffer.role == "output" and buffer.phase == phase and number not in arena.held
            }
            views = dict(steps.views)
            base: Tensor | None = None
            for number, base in bases.items():
                views |= arena.views_of(number, base)
            self.calls = {
                number: steps.inside.get(number) or steps.build(number, views)
                for number, step in enumerate(plan.steps)
                if step.phase == phase
            }
            lying = [
                plan.geometry(port, of)
                for of, side in (("", ports.outputs), ("grad_", ports.sources))
                if (of == "") == (phase == "forward")
                for port in side
            ]
            whole = bases | arena.held
            self.handed = [
                base.as_strided(g.shape, g.strides, base.storage_offset() + g.offset)
                for g, base in ((g, whole[g.buffer]) for g in lying)
            ]
            self.held = frozenset(i for i, lies in enumerate(lying) if lies.buffer in arena.held)
        self._finished: dict[Hashable, list[Tensor] | None] = {}
        self._runtime = runtime
        self.sequence = self._sequence(self.calls, copying)
        self._chosen: dict[tuple[bool, ...], CallSequence] = {}
        self._storages = [base.untyped_storage() for base in bases.values()]
        del bases, views, whole, base
        self._of_finished = [0] * len(self._storages)
        self.holders = [(s._cdata, count) for s, count in zip(self._storages, self._counted(), strict=True)]

    def is_free(self) -> bool:
        """Say whether nobody outside holds a storage of this set: its use count is what it was when it was made."""
        count = torch._C._storage_Use_Count
        own = zip(self.holders, self._of_finished, strict=True)
        return all(count(storage) == holders + finished for (storage, holders), finished in own)

    def finished(self, key: Hashable, wanted: Sequence[bool], finish: Finish) -> list[Tensor]:
        """Return what is made of the wanted outputs, for the caller; made once where it is over their own memory.

        Args:
            key: of `wanted` and what `finish` does.
        """
        known = self._finished.get(key)
        if known is not None:
            return [tensor.detach() for tensor in known]
        handed = [tensor if want else None for tensor, want in zip(self.handed, wanted, strict=True)]
        if key in self._finished:
            return finish([None if tensor is None else tensor.detach() for tensor in handed])
        before = self._counted()
        made = finish(handed)
        own = {storage.data_ptr() for storage in self._storages}
        if not all(tensor.untyped_storage().data_ptr() in own for tensor in made):
            self._finished[key] = None
            return [tensor.detach() for tensor in made]
        self._finished[key] = made
        more = [now - then for now, then in zip(self._counted(), before, strict=True)]
        self._of_finished = [one + other for one, other in zip(self._of_finished, more, strict=True)]
        return [tensor.detach() for tensor in made]

    def _counted(self) -> list[int]:
        return [torch._C._storage_Use_Count(storage._cdata) for storage in self._storages]

    @property
    def sequences(self) -> list[CallSequence]:
        """The calls of the phase, and those of each choice of gradients."""
        return [self.sequence, *self._chosen.values()]

    def _sequence(self, calls: Mapping[int, Run], copying: Sequence[Run] = (), *, replays: bool = True) -> CallSequence:
        """Return what runs calls of this phase's steps, by number: with the plan's branches, where there are graphs."""
        if self._runtime.has_graphs and self._plan.schedule.branches and calls:
            return CallSequence([*copying, BranchingCalls(calls, self._plan.schedule, self._runtime).run], replays)
        names = [*(f"{OWN}copy" for _ in copying), *(f"{OWN}{self._plan.steps[number].name}" for number in calls)]
        return CallSequence([*copying, *calls.values()], replays, names)

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
            self._chosen[wanted] = self._sequence(calls, replays=len(self._chosen) < CHOICES)
        return self._chosen[wanted]


class OutputSets:
    """The sets of both phases. Where all of a phase are held outside, a spare one is used, whose results are copied.

    Attributes:
        by_phase: the sets but for the spare ones.
        copies: how often results were handed out as copies, because all sets were held.
    """

    def __init__(self, arena: Arena, steps: BuiltSteps, ports: Ports, runtime: DeviceRuntime) -> None:
        self._arena, self._steps, self._ports, self._runtime = arena, steps, ports, runtime
        self.by_phase: dict[str, list[OutputSet]] = {"forward": [], "backward": []}
        self._spare: dict[str, OutputSet] = {}
        self.outlived: list[OutputSet] = []
        """Sets that were forgotten in a capture, which is no time to destroy their graphs."""
        self.copies = 0

    def __iter__(self) -> Iterator[OutputSet]:
        return iter((*self.by_phase["forward"], *self.by_phase["backward"], *self._spare.values()))

    def take(self, phase: str, copying: Sequence[Run] = ()) -> OutputSet:
        """Return a set that nobody outside holds; where all are held, the spare one.

        Args:
            copying: calls that come before those of the steps, in a set that is made now.
        """
        sets = self.by_phase[phase]
        number = next((number for number, each in enumerate(sets) if each.is_free()), None)
        if number is not None:
            if sets[number].is_stale:
                bases, holders = sets[number].bases, sets[number].holders
                self._leave(sets.pop(number))
                sets.insert(number, self._made(phase, copying, bases))
                sets[number].holders = holders  # the same, once the calls that were there are gone
            return sets[number]
        if len(sets) < SETS:
            sets.append(self._made(phase, copying))
            return sets[-1]
        if phase not in self._spare or self._spare[phase].is_stale:
            if phase in self._spare:
                self._leave(self._spare.pop(phase))
            self._spare[phase] = self._made(phase, copying)
        return self._spare[phase]

    def _leave(self, made: OutputSet) -> None:
        """Give up a set; in a capture, which is no time to destroy its graphs, it stays until that is over."""
        if self._runtime.is_capturing():
            self.outlived.append(made)

    def renew(self, phases: Collection[str]) -> None:
        """Have the calls of some phases' sets built anew, over the storages that they have."""
        for made in self:
            made.is_stale |= made.phase in phases

    def over(self, phase: str, offered: Mapping[int, Tensor]) -> OutputSet:
        """Return a set over storages of others, by the number of the buffer; it is used once."""
        return self._made(phase, (), offered)

    def handed(self, made: OutputSet, numbers: Iterable[int]) -> list[Tensor]:
        """Return outputs of a set for the caller."""
        is_spare = made is self._spare.get(made.phase)
        self.copies += is_spare
        return [
            copy_of(made.handed[number]) if is_spare or number in made.held else made.handed[number].detach()
            for number in numbers
        ]

    def finished(self, made: OutputSet, key: Hashable, wanted: Sequence[bool], finish: Finish) -> list[Tensor]:
        """Return what is made of the wanted outputs of a set, for the caller; see `OutputSet.finished`."""
        if not made.held and made is not self._spare.get(made.phase):
            return made.finished(key, wanted, finish)
        handed = iter(self.handed(made, [number for number, want in enumerate(wanted) if want]))
        return finish([next(handed) if want else None for want in wanted])

    def drop(self, phase: str) -> None:
        """Give up the sets of a phase, which have no graphs."""
        self.by_phase[phase] = []
        self._spare.pop(phase, None)

    def forget(self, *, in_capture: bool) -> None:
        """Make new sets from now on; what is forgotten in a capture stays in `outlived`."""
        if in_capture:
            self.outlived += self
        self.by_phase = {"forward": [], "backward": []}
        self._spare = {}

    def _made(self, phase: str, copying: Sequence[Run], offered: Mapping[int, Tensor] | None = None) -> OutputSet:
        return OutputSet(
            self._arena, self._steps, self._ports, phase, copying=copying, offered=offered or {}, runtime=self._runtime
        )


def copy_of(tensor: Tensor, strides: Sequence[int] | None = None) -> Tensor:
    """Return a copy with these strides, or else with the tensor's own."""
    strides = tensor.stride() if strides is None else strides
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

"""Memory planner: liveness of every tensor of a configuration, shared buffers, and one arena. Nothing here runs.

A place is a tensor in one form: a conversion makes a second place of the same tensor. Places that must lie one behind
the other, or as slices of one stack, share a buffer. Buffers that nobody sees from outside share one arena, and there
the bytes of those that are never needed at the same time: what forward leaves for backward makes room as soon as
backward has read it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from autotuner.errors import ConfigurationError
from autotuner.ir.device import alignment_bytes
from autotuner.ir.form import STACK_AXIS, Form
from autotuner.ir.graph import Graph, Tensor
from autotuner.kernels.canonical import canonical
from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner.memory_plan import (
    MemoryPlan,
    Place,
    PlannedBuffer,
    PlannedStep,
    Role,
    stored,
)
from autotuner.plan.memory_planner.packing import LiveRange, pack, pack_apart, side_by_side
from autotuner.plan.memory_planner.schedule import Schedule, tick_of
from autotuner.plan.step import Branches, Step, sources_of, tensor_of


def make_plan(
    configuration: Configuration,
    together: Iterable[tuple[str, ...]] = (),
    *,
    shares: bool = True,
    apart: bool = False,
) -> MemoryPlan:
    """Decide where every tensor lies.

    Args:
        configuration: steps in an order in which they can run, forward ones first.
        together: parameters that the framework keeps in one tensor; they and their gradients lie in one buffer.
        shares: whether tensors share memory that are never needed at the same time. Without, the steps may run over
            any streams.
        apart: whether what one phase makes and reads itself lies behind what forward leaves for backward, or in memory
            that this does not need at the time: so that several plans can share it. The arena may be larger then.
            Inputs lie outside of it, since they may be read where the caller has them.

    Raises:
        ConfigurationError: a step reads what nothing makes, or places are asked to lie in ways that exclude each other.
    """
    device_type = str(configuration.environment["device_type"])
    branches = configuration.overlap.branches if configuration.overlap else ()
    planning = _Planning(configuration.graph(), configuration.steps, tuple(together), alignment_bytes(device_type))
    return planning.plan(branches, shares=shares, apart=apart)


def plan_steps(
    graph: Graph,
    steps: Sequence[Step],
    together: Iterable[tuple[str, ...]] = (),
    device_type: str = "cpu",
    branches: Branches = (),
    *,
    shares: bool = True,
) -> MemoryPlan:
    """Decide the same for steps of a training graph that are no configuration yet, on a device of some type.

    Raises:
        ConfigurationError: as `make_plan`.
    """
    planning = _Planning(graph, tuple(steps), tuple(together), alignment_bytes(device_type))
    return planning.plan(branches, shares=shares)


class _Planning:
    def __init__(
        self, graph: Graph, steps: Sequence[Step], together: Sequence[tuple[str, ...]], alignment_bytes: int
    ) -> None:
        self.alignment_bytes = alignment_bytes
        self.steps = steps
        self.together = together
        self.graph = graph
        self.forward = sum(step.phase == "forward" for step in steps)
        self.followers: dict[Place, Place] = {}

    def plan(self, branches: Branches, *, shares: bool, apart: bool = False) -> MemoryPlan:
        phases = [step.phase for step in self.steps]
        if phases != sorted(phases, reverse=True):
            raise ConfigurationError("a forward step comes after a backward one; forward steps come first")
        made = self._made()
        parameters = self._parameters(made)
        outputs = self._outputs(made)
        steps = tuple(self._step(step) for step in self.steps)
        for group in self.together:
            self._keep_together([parameters[name] for name in group])
            self._keep_together([outputs[f"grad_{name}"] for name in group if f"grad_{name}" in outputs])
        schedule = Schedule(sources_of(self.steps), self.forward, branches)
        lives = self._lives(steps, made, schedule)
        outside = [name for name, tensor in self.graph.tensors.items() if tensor.role == "input"]
        inputs = [self._as_declared(name) for name in outside] if apart else []
        buffers = self._buffers(lives, set(outputs.values()), set(parameters.values()), inputs)
        buffers, kept_bytes, arena_bytes = self._packed(buffers, shares=shares, apart=apart)
        return MemoryPlan(
            self.graph,
            steps,
            buffers,
            arena_bytes,
            {name: self._as_declared(name) for name in outside},
            {name: self._as_declared(name) for name in self.graph.given_gradients},
            outputs,
            parameters,
            schedule,
            kept_bytes,
        )

    def _as_declared(self, name: str) -> Place:
        return name, self.graph.tensors[name].axes

    def _tensor(self, place: Place) -> Tensor:
        return self.graph.tensors[tensor_of(place[0])]

    def _made(self) -> dict[Place, int]:
        """Return when each place is made: 0 from outside, then one tick per step and one for the given gradients."""
        made: dict[Place, int] = {}
        for number, step in enumerate(self.steps):
            for place in step.outputs:
                if place in made:
                    raise ConfigurationError(f"tensor {place[0]!r} is made twice in form {place[1]}")
                if not Form.parse(place[1]).is_absent:
                    made[place] = self._tick(number)
        for name, tensor in self.graph.tensors.items():
            if tensor.role == "input":
                made[self._as_declared(name)] = 0
        for name in self.graph.given_gradients:
            made[self._as_declared(name)] = self.forward + 1
        return made

    def _tick(self, number: int) -> int:
        return tick_of(number, self.forward)

    @property
    def _end(self) -> int:
        return self._tick(len(self.steps))

    def _parameters(self, made: Mapping[Place, int]) -> dict[str, Place]:
        """Return the form in which each parameter is stored: the one that is read and that no step makes."""
        found: dict[str, Place] = {}
        for step in self.steps:
            for place in step.inputs:
                if self._tensor(place).role != "parameter" or place in made:
                    continue
                if found.setdefault(place[0], place) != place:
                    raise ConfigurationError(
                        f"parameter {place[0]!r} is read in forms {found[place[0]][1]} and {place[1]}, "
                        "and no step makes either; it can be stored in one only"
                    )
        missing = [n for n, t in self.graph.tensors.items() if t.role == "parameter" and n not in found]
        if missing:
            raise ConfigurationError(f"no step reads parameter {missing[0]!r} as it is stored")
        return found

    def _outputs(self, made: Mapping[Place, int]) -> dict[str, Place]:
        """Return the place of each output: as declared, or, of a parameter's gradient, as some step makes it."""
        found = {}
        for name in self.graph.outputs:
            found[name] = self._as_declared(name)
            if found[name] not in made:
                others = [place for place in made if place[0] == name]
                if not others or not self._is_gradient_of_parameter(name):
                    raise ConfigurationError(f"no step makes output {name!r} in form {found[name][1]}")
                found[name] = others[-1]
        return found

    def _is_gradient_of_parameter(self, name: str) -> bool:
        tensor = self.graph.tensors.get(name.removeprefix("grad_"))
        return tensor is not None and tensor.name != name and tensor.role == "parameter"

    def _step(self, step: Step) -> PlannedStep:
        operands = (*step.inputs, *step.outputs)
        slices: dict[str, str] = {}
        for group in step.adjacent:
            places = [place for name in group for place in operands if place[0] == name]
            if len(places) != len(group):
                raise ConfigurationError(f"{step.kernel}: it does not have all of {group} as operands")
            self._link(places)
            slices |= {name: f"@{index}/{len(group)}" for index, name in enumerate(group)}
        call = step.call(self.graph)
        forms = tuple(
            f"{STACK_AXIS}{text}{slices[name]}" if name in slices and STACK_AXIS not in text else text
            for (name, _), text in zip(operands, call.candidate.forms, strict=True)
        )
        call = canonical(call.subgraph, replace(call.candidate, forms=forms))
        inputs, outputs = (
            tuple(None if Form.parse(place[1]).is_absent else place for place in side)
            for side in (step.inputs, step.outputs)
        )
        what = "+".join(step.operators) or f"convert {'+'.join(name for name, _ in step.outputs)}"
        return PlannedStep(call, inputs, outputs, step.phase, f"{what} [{step.kernel}]")

    def _keep_together(self, places: Sequence[Place]) -> None:
        stacks = {Form.parse(text).stack and text.partition("#")[2] for _, text in places}
        if stacks == {None}:
            self._link(places)
        elif len(stacks) > 1 or None in stacks:
            raise ConfigurationError(f"{[str(p) for p in places]} must be stored alike: they are one tensor outside")

    def _link(self, places: Sequence[Place]) -> None:
        """Ask for dense places to lie one behind the other."""
        for first, second in pairwise(places):
            taken = [a for a, b in self.followers.items() if b == second and a != first]
            if taken or self.followers.get(first, second) != second or first in self._behind(second):
                raise ConfigurationError(
                    f"{second[0]!r} cannot lie right behind {first[0]!r}: another step asks for another order"
                )
            self.followers[first] = second

    def _behind(self, place: Place) -> list[Place]:
        """Return a place and those that lie behind it, in order."""
        found = [place]
        while found[-1] in self.followers:
            found.append(self.followers[found[-1]])
        return found

    def _lives(
        self, steps: Sequence[PlannedStep], made: Mapping[Place, int], schedule: Schedule
    ) -> dict[Place, tuple[int, int]]:
        """Return each place's first and last tick: it may be made, and be read for the last time."""
        lives = {place: (tick, tick) for place, tick in made.items()}
        for step, window in zip(steps, schedule.windows, strict=True):
            lives |= {place: window for place in step.outputs if place is not None}
        for number, step in enumerate(steps):
            for place in step.inputs:
                if place is None:
                    continue
                if place not in lives:
                    if self._tensor(place).role != "parameter":
                        raise ConfigurationError(f"a step reads {place[0]!r} as {place[1]}, which no step makes")
                    lives[place] = (0, self._end)
                first, last = lives[place]
                if self._tick(number) <= made.get(place, 0):
                    raise ConfigurationError(f"a step reads {place[0]!r} as {place[1]} before it is made")
                lives[place] = (first, max(last, schedule.windows[number][1]))
        return lives

    def _groups(self, places: Collection[Place]) -> Iterator[tuple[dict[Place, int], int]]:
        """Yield places that share a buffer, with offsets, and the buffer's length, in elements."""
        stacks: dict[tuple[str, ...], dict[Place, int]] = {}
        lengths: dict[tuple[str, ...], int] = {}
        behind = set(self.followers.values())
        for place in places:
            form, lies = Form.parse(place[1]), stored(self.graph, place)
            if form.stack:
                instance = place[0].removesuffix(tensor_of(place[0]))
                key: tuple[str, ...] = (instance, form.stack.group, form.layout.axes, form.storage)
                stacks.setdefault(key, {})[place] = lies.offset
                if lengths.setdefault(key, lies.length) != lies.length:
                    raise ConfigurationError(f"slices of stack {form.stack.group} differ in their extents")
            elif place not in behind:
                chain: dict[Place, int] = {}
                end = 0
                for link in self._behind(place):
                    chain[link] = end
                    end += stored(self.graph, link).length
                yield chain, end
        for group, offsets in stacks.items():
            yield offsets, lengths[group]

    def _buffers(
        self,
        lives: Mapping[Place, tuple[int, int]],
        outputs: Collection[Place],
        parameters: Collection[Place],
        inputs: Collection[Place],
    ) -> tuple[PlannedBuffer, ...]:
        buffers: list[PlannedBuffer] = []
        for offsets, elements in self._groups(lives):
            names = [place[0] for place in offsets]
            dtypes = {stored(self.graph, place).dtype for place in offsets}
            if len(dtypes) > 1:
                raise ConfigurationError(f"{names} share a buffer and differ in their dtypes: {sorted(dtypes)}")
            phases = {"forward" if lives[p][0] <= self.forward else "backward" for p in offsets if p in outputs}
            outside = [place in parameters for place in offsets]
            if len(phases) > 1 or (any(outside) and not all(outside)):
                raise ConfigurationError(f"{names} share a buffer, but come from different sides of the graph")
            alone = len(offsets) == 1 and not phases and set(offsets) <= set(inputs)
            role: Role = "parameter" if all(outside) else "output" if phases else "input" if alone else "arena"
            first, last = min(lives[p][0] for p in offsets), max(lives[p][1] for p in offsets)
            buffers.append(PlannedBuffer(role, min(phases, default=""), dtypes.pop(), elements, offsets, first, last))
        return tuple(buffers)

    def _packed(
        self, buffers: Sequence[PlannedBuffer], *, shares: bool, apart: bool
    ) -> tuple[tuple[PlannedBuffer, ...], int, int]:
        """Return the buffers with places in the arena, the bytes of it that outlive a phase, and all of its bytes."""
        arena = [number for number, buffer in enumerate(buffers) if buffer.role == "arena"]
        # Blocks start at 0 or where others end, so what they are padded to is what they are aligned to.
        blocks = [
            LiveRange(
                -(-buffers[i].size_bytes // self.alignment_bytes) * self.alignment_bytes,
                buffers[i].first,
                buffers[i].last,
            )
            for i in arena
        ]
        if apart:
            starts, kept_bytes, arena_bytes = pack_apart(blocks, self.forward + 1)
        else:
            starts, arena_bytes = pack(blocks) if shares else side_by_side(blocks)
            kept_bytes = arena_bytes
        begins = dict(zip(arena, starts, strict=True))
        placed = (replace(each, start_bytes=begins.get(i, each.start_bytes)) for i, each in enumerate(buffers))
        return tuple(placed), kept_bytes, arena_bytes
